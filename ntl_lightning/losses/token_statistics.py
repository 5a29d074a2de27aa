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
# keep the cores busy, small enough (64 rows of 150k are 38 MB) not to matter as memory.
_ROWS_PER_CHUNK = 64


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
        return self.number_probabilities @ self.number_values

    def at(self, positions: Tensor) -> "TokenStatistics":
        """The statistics of some of the positions only.

        Args:
            positions: (n,) int64 indices into the N positions.
        """
        return replace(
            self,
            cross_entropy=self.cross_entropy[positions],
            log_partition=self.log_partition[positions],
            number_logits=self.number_logits[positions],
            label_ids=self.label_ids[positions],
            label_values=self.label_values[positions],
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
            shifted here). -inf is allowed, except for a whole row.
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
    with torch.autocast(logits.device.type, enabled=False):
        cross_entropy, log_partition, number_logits = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
            rows, row_labels, selected, number_ids, overwrite_logits
        )
    if selected is None and len(kept) < len(rows):
        cross_entropy, log_partition = cross_entropy[kept], log_partition[kept]
        number_logits = number_logits[kept]
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
    p * (g_ce + g_lse) - onehot(label) * g_ce, plus g_z in the number columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        selected: Tensor | None,
        number_ids: Tensor,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = logits if selected is None else logits[selected]
        labels = labels if selected is None else labels[selected]
        is_label = labels != IGNORE_INDEX
        label_columns = labels.clamp(min=0).unsqueeze(-1)
        compute_dtype = torch.promote_types(logits.dtype, torch.float32)
        number_logits = scores[:, number_ids].to(compute_dtype)
        label_logits = scores.gather(-1, label_columns).squeeze(-1).to(compute_dtype)

        probabilities = None
        if ctx.needs_input_grad[0] and scores.dtype == compute_dtype:
            largest = scores.amax(-1)
            reuse = overwrite_logits or selected is not None
            probabilities = scores.detach() if reuse else torch.empty_like(scores)
            torch.softmax(scores.detach(), -1, out=probabilities)
            # The largest probability is at least 1/V, so its logarithm is exact to rounding; the
            # label's may have underflowed.
            log_sum = -probabilities.amax(-1).log()
        else:
            largest, log_sum = _largest_and_log_sum(scores.detach(), compute_dtype)
        cross_entropy = torch.where(is_label, log_sum + (largest - label_logits), 0.0)
        log_partition = largest + log_sum

        if ctx.needs_input_grad[0]:
            ctx.selected = selected
            ctx.is_label = is_label
            ctx.label_columns = label_columns
            ctx.number_ids = number_ids
            ctx.results = (cross_entropy.detach(), log_partition.detach(), number_logits.detach())
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
        ctx: Any, grad_cross_entropy: Tensor, grad_log_partition: Tensor, grad_numbers: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        if ctx.used and ctx.overwrite_logits:
            raise RuntimeError(
                "a second backward pass with overwrite_logits=True: the first one has written the "
                "gradient over the logits; compute the loss again, or do not overwrite"
            )
        ctx.used = True
        logits = ctx.logits if ctx.overwrite_logits else ctx.saved_tensors[0]
        cross_entropy, log_partition, number_logits = ctx.results
        grad_cross_entropy = torch.where(ctx.is_label, grad_cross_entropy, 0.0)
        scale = grad_cross_entropy + grad_log_partition

        if ctx.probabilities is not None:
            grad = ctx.probabilities.mul_(scale.unsqueeze(-1))
            ctx.probabilities = None
        else:
            scores = logits if ctx.selected is None else logits[ctx.selected]
            reuse = ctx.overwrite_logits or ctx.selected is not None
            grad = scores if reuse else torch.empty_like(scores)
            for start in range(0, len(grad), _ROWS_PER_CHUNK):
                chunk = slice(start, start + _ROWS_PER_CHUNK)
                part = scores[chunk].to(log_partition.dtype, copy=True)
                part.sub_(log_partition[chunk, None]).exp_().mul_(scale[chunk, None])
                grad[chunk] = part
        # The number and label columns are written afresh rather than added to: in low precision a
        # difference of rounded parts would lose the small gradient of a confident row.
        numbers = (number_logits - log_partition.unsqueeze(-1)).exp() * scale.unsqueeze(-1)
        numbers += grad_numbers
        grad[:, ctx.number_ids] = numbers.to(grad.dtype)
        at_label = (-cross_entropy).exp() * scale - grad_cross_entropy
        column_of_label = ctx.number_ids.new_full((logits.shape[-1],), -1)
        column_of_label[ctx.number_ids] = torch.arange(
            len(ctx.number_ids), device=ctx.number_ids.device
        )
        number_column = column_of_label[ctx.label_columns.squeeze(-1)]
        if len(ctx.number_ids):
            from_number = grad_numbers.gather(-1, number_column.clamp(min=0).unsqueeze(-1))
            at_label = at_label + torch.where(number_column >= 0, from_number.squeeze(-1), 0.0)
        grad.scatter_(-1, ctx.label_columns, at_label.unsqueeze(-1).to(grad.dtype))
        # Rows without a label have zero gradient even where the softmax is NaN.
        grad.masked_fill_(~ctx.is_label.unsqueeze(-1), 0.0)

        if ctx.selected is not None:
            whole = logits.zero_() if ctx.overwrite_logits else torch.zeros_like(logits)
            grad = whole.index_copy_(0, ctx.selected, grad)
        if ctx.overwrite_logits:
            ctx.logits = None
        return grad, None, None, None, None


def _largest_and_log_sum(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Largest logit and log of the sum of exp(logit - largest), both (rows,) and in `dtype`."""
    largest = torch.empty(len(scores), dtype=dtype, device=scores.device)
    log_sum = torch.empty_like(largest)
    for start in range(0, len(scores), _ROWS_PER_CHUNK):
        chunk = slice(start, start + _ROWS_PER_CHUNK)
        part = scores[chunk].to(dtype, copy=True)
        torch.amax(part, -1, out=largest[chunk])
        part.sub_(largest[chunk, None]).exp_()
        log_sum[chunk] = part.sum(-1).log_()
    return largest, log_sum
