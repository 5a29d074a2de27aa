"""The one heavy step of every loss: three small results per label position from the logits.

B batch, T positions, M = B * T, N label positions kept, V vocabulary, K number tokens.

A loss whose label is a single token needs, of the whole vocabulary, only the log partition (the
log of the softmax's denominator) and the logits of the label and of the number tokens. This module
takes these in one pass, and its backward writes the gradient once, on request over the logits
themselves. Everything of width V happens here and nowhere else; the loss terms are plain PyTorch
on (N, K).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["IGNORE_INDEX", "TokenStatistics", "token_statistics"]

IGNORE_INDEX = -100
"""Label of positions that are no target, as in PyTorch and transformers."""

# Rows worked on at a time where a float32 copy of low-precision logits is needed: large enough to
# keep the cores busy, small enough (32 rows of 150k are 19 MB) not to matter as memory.
_ROWS_PER_CHUNK = 32

# Cross entropy up to which the label's probability holds all its digits in float32 (1e-30).
_UNDERFLOW = 69.0


@dataclass(frozen=True)
class TokenStatistics:
    """What a loss term sees of N label positions. Floats are float32 (float64 for float64 logits).

    A term reads these and returns one value per position, shape (N,).
    """

    cross_entropy: Tensor
    """(N,) minus the log-probability of the label under the softmax over the whole vocabulary."""
    log_partition: Tensor
    """(N,) log of the sum of exp(logit) over the whole vocabulary."""
    number_logits: Tensor
    """(N, K) logits of the number tokens."""
    label_ids: Tensor
    """(N,) int64 token ids of the labels."""
    label_values: Tensor
    """(N,) value of the label token; NaN where the label is no number token."""
    number_values: Tensor
    """(K,) values of the number tokens."""

    @cached_property
    def is_number(self) -> Tensor:
        """(N,) bool: the label is a number token."""
        return ~self.label_values.isnan()

    @cached_property
    def number_probabilities(self) -> Tensor:
        """(N, K) softmax over the number tokens alone; mass on text tokens does not count."""
        return torch.softmax(self.number_logits, dim=-1)

    @cached_property
    def number_mass(self) -> Tensor:
        """(N,) probability in [0, 1] that the whole softmax puts on number tokens."""
        return (torch.logsumexp(self.number_logits, dim=-1) - self.log_partition).exp()

    def expected_value(self) -> Tensor:
        """(N,) mean of the token values under `number_probabilities`."""
        # No matrix product: autocast would round the values to bfloat16.
        return (self.number_probabilities * self.number_values).sum(-1)

    def at(self, positions: Tensor) -> "TokenStatistics":
        """The statistics of some of the positions only.

        Args:
            positions: (n,) int64 indices into the N positions.
        """
        # On a CPU `index_select` and its backward are several times faster than indexing.
        return replace(
            self,
            cross_entropy=self.cross_entropy.index_select(0, positions),
            log_partition=self.log_partition.index_select(0, positions),
            number_logits=self.number_logits.index_select(0, positions),
            label_ids=self.label_ids.index_select(0, positions),
            label_values=self.label_values.index_select(0, positions),
        )


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    number_ids: Tensor,
    value_table: Tensor,
    *,
    overwrite_logits: bool = False,
) -> TokenStatistics:
    """Cross entropy, log partition and number logits of every label position.

    Equal to `F.cross_entropy(logits.float(), labels, reduction="none")`, `logits.float().logsumexp
    (-1)` and `logits.float()[:, number_ids]` at the positions whose label is not `IGNORE_INDEX`,
    values and gradients, at a fraction of the time and memory.

    Args:
        logits: (..., V) float16, bfloat16, float32 or float64, aligned with the labels (nothing is
            shifted here). -inf is allowed, except for a whole row and, where number terms are
            used, for all number tokens of a row.
        labels: (...) int64 token ids in [0, V), `IGNORE_INDEX` where there is no target.
        number_ids: (K,) int64 ids of the number tokens.
        value_table: (V,) float32 value of every token, NaN where it is no number.
        overwrite_logits: Let the computation and the gradient use the logits' own memory. No
            tensor of the logits' size is then allocated; the logits hold garbage afterwards, and
            one backward pass is possible. Only for logits that nobody else reads, before or during
            the backward pass (a model that soft-caps its logits reads them).

    Returns:
        The statistics of the N positions with a label, in row-major order. N may be 0: all tensors
        are then empty, still connected to the graph.

    Raises:
        ValueError: If the shapes disagree.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of logits without the vocabulary, "
            f"{tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    width = logits.shape[-1]
    if value_table.shape != (width,):
        raise ValueError(
            f"the logits are {width} wide, but the number vocabulary was made for "
            f"{value_table.shape[0]}; build it with width=logits.shape[-1]"
        )
    rows = logits.reshape(-1, width)
    row_labels = labels.reshape(-1)
    kept = (row_labels != IGNORE_INDEX).nonzero().squeeze(-1)
    label_ids = row_labels[kept]
    if label_ids.numel() and not (0 <= int(label_ids.min()) <= int(label_ids.max()) < width):
        bad = label_ids[(label_ids < 0) | (label_ids >= width)][0]
        raise ValueError(
            f"label {int(bad)} is outside the vocabulary of {width} tokens that the model scores; "
            f"positions without a target must be {IGNORE_INDEX}"
        )
    # Copying the kept rows out pays only where most rows have no label.
    selected = kept if 2 * len(kept) < len(rows) else None
    ignored = None
    if selected is None and len(kept) < len(rows):
        ignored = (row_labels == IGNORE_INDEX).nonzero().squeeze(-1)
    with torch.autocast(logits.device.type, enabled=False):
        cross_entropy, log_partition, number_logits = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
            rows, row_labels, selected, ignored, number_ids, overwrite_logits
        )
    if ignored is not None:
        cross_entropy = cross_entropy.index_select(0, kept)
        log_partition = log_partition.index_select(0, kept)
        number_logits = number_logits.index_select(0, kept)
    values = value_table.to(number_logits.dtype)
    return TokenStatistics(
        cross_entropy=cross_entropy,
        log_partition=log_partition,
        number_logits=number_logits,
        label_ids=label_ids,
        label_values=values[label_ids],
        number_values=values[number_ids],
    )


class _TokenStatistics(torch.autograd.Function):
    """Forward and backward over the rows; see `token_statistics`.

    With p the softmax, the gradient for incoming g_ce, g_lse (rows,) and g_z (rows, K) is
    p * (g_ce + g_lse) - onehot(label) * g_ce, plus g_z in the number columns. The results of the
    `ignored` rows mean nothing, and their gradient is zero whatever comes in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        selected: Tensor | None,
        ignored: Tensor | None,
        number_ids: Tensor,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scores = logits if selected is None else logits.index_select(0, selected)
        labels = labels if selected is None else labels.index_select(0, selected)
        if ignored is not None:
            labels = labels.index_fill(0, ignored, 0)
        compute_dtype = torch.promote_types(logits.dtype, torch.float32)
        number_logits = scores.index_select(1, number_ids).to(compute_dtype)
        label_logits = _at_labels(scores, labels).to(compute_dtype)

        probabilities = None
        if ctx.needs_input_grad[0] and scores.dtype == compute_dtype:
            reuse = overwrite_logits or selected is not None
            # The softmax takes the place of the scores, which are asked for again in rare rows.
            largest = scores.detach().amax(-1) if reuse else None
            probabilities = scores.detach() if reuse else torch.empty_like(scores)
            torch.softmax(scores.detach(), -1, out=probabilities)
            cross_entropy, log_partition = _from_probabilities(
                probabilities, labels, label_logits, scores.detach(), largest
            )
        else:
            cross_entropy = torch.empty_like(label_logits)
            log_partition = torch.empty_like(label_logits)
            parts = scores.new_empty(_ROWS_PER_CHUNK, scores.shape[-1], dtype=compute_dtype)
            for start in range(0, len(scores), _ROWS_PER_CHUNK):
                chunk = slice(start, start + _ROWS_PER_CHUNK)
                chunk_scores = scores[chunk].detach()
                part = parts[: len(chunk_scores)].copy_(chunk_scores)
                torch.softmax(part, -1, out=part)
                cross_entropy[chunk], log_partition[chunk] = _from_probabilities(
                    part, labels[chunk], label_logits[chunk], chunk_scores, None
                )

        if ctx.needs_input_grad[0]:
            ctx.selected = selected
            ctx.ignored = ignored
            ctx.labels = labels
            ctx.number_ids = number_ids
            ctx.log_partition = log_partition.detach()
            ctx.probabilities = probabilities
            if overwrite_logits:
                # Not through save_for_backward, which would object to our own writing.
                ctx.logits = logits.detach()
            else:
                ctx.save_for_backward(logits)
            ctx.overwrite_logits = overwrite_logits
            ctx.used = False
        return cross_entropy, log_partition, number_logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_cross_entropy: Tensor | None,
        grad_log_partition: Tensor | None,
        grad_numbers: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.used and ctx.overwrite_logits:
            raise RuntimeError(
                "a second backward pass with overwrite_logits=True: the first one has written the "
                "gradient over the logits; compute the loss again, or do not overwrite"
            )
        ctx.used = True
        logits = ctx.logits if ctx.overwrite_logits else ctx.saved_tensors[0]
        log_partition = ctx.log_partition
        scale = torch.zeros_like(log_partition)
        for incoming in (grad_cross_entropy, grad_log_partition):
            scale = scale if incoming is None else scale + incoming

        def add_at_single_tokens(part: Tensor, chunk: slice) -> None:
            if grad_numbers is not None:
                part.index_add_(1, ctx.number_ids, grad_numbers[chunk])
            if grad_cross_entropy is not None:
                rows = torch.arange(len(part), device=part.device)
                labels = ctx.labels[chunk]
                part[rows, labels] = part[rows, labels] - grad_cross_entropy[chunk]

        if ctx.probabilities is not None:
            grad = ctx.probabilities.mul_(scale.unsqueeze(-1))
            ctx.probabilities = None
            add_at_single_tokens(grad, slice(None))
        else:
            scores = logits if ctx.selected is None else logits.index_select(0, ctx.selected)
            reuse = ctx.overwrite_logits or ctx.selected is not None
            grad = scores if reuse else torch.empty_like(scores)
            parts = scores.new_empty(_ROWS_PER_CHUNK, scores.shape[-1], dtype=log_partition.dtype)
            for start in range(0, len(grad), _ROWS_PER_CHUNK):
                chunk = slice(start, start + _ROWS_PER_CHUNK)
                part = parts[: len(scores[chunk])].copy_(scores[chunk])
                part.sub_(log_partition[chunk, None]).exp_().mul_(scale[chunk, None])
                # Before the rounding: the gradient of a confident row is a small difference.
                add_at_single_tokens(part, chunk)
                grad[chunk] = part
        if ctx.ignored is not None:
            # Also where the softmax is NaN.
            grad.index_fill_(0, ctx.ignored, 0.0)

        if ctx.selected is not None:
            whole = logits.zero_() if ctx.overwrite_logits else torch.zeros_like(logits)
            grad = whole.index_copy_(0, ctx.selected, grad)
        if ctx.overwrite_logits:
            ctx.logits = None
        return grad, None, None, None, None, None


def _at_labels(rows: Tensor, labels: Tensor) -> Tensor:
    """(rows,) the label's column of each row of (rows, V)."""
    return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _from_probabilities(
    probabilities: Tensor,
    labels: Tensor,
    label_logits: Tensor,
    scores: Tensor,
    largest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy and log partition, both (rows,), from the softmax of the rows.

    Args:
        probabilities: (rows, V).
        labels: (rows,) int64.
        label_logits: (rows,).
        scores: (rows, V) the logits; not read if `largest` is given.
        largest: (rows,) largest logit of each row, or None.
    """
    cross_entropy = -_at_labels(probabilities, labels).log()
    log_partition = label_logits + cross_entropy
    # A label's probability that has underflowed tells nothing; the largest one, at least 1/V, does.
    rows = (~(cross_entropy < _UNDERFLOW)).nonzero().squeeze(-1)
    if len(rows):
        if largest is None:
            peak = scores.index_select(0, rows).amax(-1).to(label_logits.dtype)
        else:
            peak = largest.index_select(0, rows)
        log_sum = -probabilities.index_select(0, rows).amax(-1).log()
        log_partition[rows] = peak + log_sum
        cross_entropy[rows] = log_sum + (peak - label_logits.index_select(0, rows))
    return cross_entropy, log_partition
