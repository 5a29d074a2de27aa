"""The one heavy step of every loss: three small results per label position from the logits.

B batch, T positions, M = B * T cells, N positions kept, V vocabulary, K number tokens.

A loss whose label is a single token needs, of the whole vocabulary, only the log partition (the
log of the softmax's denominator) and the logits of the label and of the number tokens. This module
takes these in one pass, and its backward writes the gradient once, on request over the logits
themselves. Everything of width V happens here and in `projection`, and nowhere else; the loss terms
are plain PyTorch on (N, K). Nothing here waits for a GPU: no shape and no branch depends on what a
tensor on a device holds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ntl_lightning.numbers.runs import NumberRuns, number_runs

__all__ = [
    "IGNORE_INDEX",
    "LabelCells",
    "TokenStatistics",
    "kept_cells",
    "token_statistics",
]

IGNORE_INDEX = -100
"""Label of positions that are no target, as in PyTorch and transformers."""

# Float32 copies of low-precision rows are made a few rows at a time. On a CPU they should stay in
# its caches, elsewhere they should be large enough to keep the device busy.
_SCRATCH_BYTES = {"cpu": 4 << 20}
_SCRATCH_BYTES_ELSEWHERE = 128 << 20


def scratch_rows(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a (rows, width) scratch of this dtype that are worked on at a time."""
    limit = _SCRATCH_BYTES.get(device.type, _SCRATCH_BYTES_ELSEWHERE)
    return max(1, limit // (width * dtype.itemsize))


_Owner = TypeVar("_Owner")
_Value = TypeVar("_Value")


class _once(Generic[_Owner, _Value]):
    """An attribute computed when first asked for.

    As `functools.cached_property`, whose lock (in Python 3.11) torch.compile cannot trace.
    """

    def __init__(self, function: Callable[[_Owner], _Value]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: _Owner, owner: type) -> _Value:
        value = self.function(instance)
        instance.__dict__[self.function.__name__] = value
        return value


def can_look(tensor: Tensor) -> bool:
    """Whether Python may read the tensor's values: on a CPU nothing has to be waited for."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


@dataclass(frozen=True)
class LabelCells:
    """What the labels alone tell, cell by cell; M cells in row-major order."""

    ids: Tensor
    """(..., T) int64 labels, `IGNORE_INDEX` where there is no target."""
    is_number: Tensor
    """(..., T) bool: the label is a number token, and its number is a quantity."""
    values: Tensor
    """(..., T) value of the label token; 0 where `is_number` is false."""
    forms: Tensor | None
    """(V, 3) how tokens are written, see `NumberVocabulary.forms_table`."""

    @classmethod
    def of(
        cls,
        labels: Tensor,
        value_table: Tensor,
        *,
        forms: Tensor | None = None,
        quantities: Tensor | None = None,
    ) -> "LabelCells":
        """Look the labels up.

        Args:
            labels: (..., T) int64.
            value_table: (V,) value of every token, NaN where it is no number.
            forms: (V, 3), needed for `runs`.
            quantities: (..., T) bool, false where a number is an id or a category; None: all are
                quantities.

        Raises:
            ValueError: If `quantities` has another shape; on the CPU also if a label is outside
                the vocabulary (elsewhere looking would mean to wait for the device, which reports
                it itself).
        """
        if quantities is not None and quantities.shape != labels.shape:
            raise ValueError(
                f"quantities must have the shape of labels, {tuple(labels.shape)}, got "
                f"{tuple(quantities.shape)}"
            )
        width = value_table.shape[0]
        if can_look(labels):
            _check_range(labels, width)
        # Not `value_table[...]`, which would take a negative label for one counted from the end.
        values = value_table.index_select(0, existing_ids(labels).reshape(-1)).view(labels.shape)
        is_number = ~values.isnan() & (labels != IGNORE_INDEX)
        if quantities is not None:
            is_number = is_number & quantities
        return cls(labels, is_number, torch.where(is_number, values, 0.0), forms)

    @_once
    def runs(self) -> NumberRuns:
        """The written numbers among the labels."""
        if self.forms is None:
            raise ValueError(
                "a loss term over whole numbers needs to know how tokens are written: pass forms="
                "vocabulary.forms_table(), or use Objective"
            )
        ids, is_number, values = map(torch.atleast_1d, (self.ids, self.is_number, self.values))
        return number_runs(ids, self.forms, is_number, values)


def existing_ids(labels: Tensor) -> Tensor:
    """The labels with token 0 in place of `IGNORE_INDEX`, to look something up; wrong ones stay."""
    return torch.where(labels == IGNORE_INDEX, 0, labels)


def _check_range(labels: Tensor, width: int) -> None:
    wrong = ((labels < 0) | (labels >= width)) & (labels != IGNORE_INDEX)
    if wrong.any():
        raise ValueError(
            f"label {int(labels[wrong][0])} is outside the vocabulary of {width} tokens that the "
            f"model scores; positions without a target must be {IGNORE_INDEX}"
        )


def kept_cells(labels: Tensor, num_labels: int | None) -> tuple[Tensor, Tensor] | None:
    """Indices of the cells with a label (N,) and without (M - N,), each in ascending order.

    None if they cannot be known without waiting for the device: it is no CPU, and the number of
    labels is not given.
    """
    ignored = labels.reshape(-1) == IGNORE_INDEX
    if can_look(labels):
        kept = (~ignored).nonzero().squeeze(-1)
        if num_labels is not None and num_labels != len(kept):
            raise ValueError(
                f"num_labels={num_labels}, but {len(kept)} labels are not {IGNORE_INDEX}; count "
                "the labels as they are given here (of a causal model, after the shift)"
            )
        return kept, ignored.nonzero().squeeze(-1)
    if num_labels is None:
        return None
    order = ignored.to(torch.uint8).argsort(stable=True)
    return order[:num_labels], order[num_labels:]


@dataclass(frozen=True)
class TokenStatistics:
    """What a loss term sees of N label positions. Floats are float32 (float64 for float64 logits).

    A term reads these and returns one value per position, shape (N,). Values at positions that do
    not count (no label, or for a number term no number) are thrown away by the `Objective`, and
    what is found there is harmless: finite numbers in place of those that do not exist.
    """

    cross_entropy: Tensor
    """(N,) minus the log-probability of the label under the softmax over the whole vocabulary."""
    log_partition: Tensor
    """(N,) log of the sum of exp(logit) over the whole vocabulary."""
    number_logits: Tensor
    """(N, K) logits of the number tokens."""
    label_ids: Tensor
    """(N,) int64 token ids of the labels."""
    is_number: Tensor
    """(N,) bool: the label is a number token, and its number is a quantity."""
    label_values: Tensor
    """(N,) value of the label token; 0 where `is_number` is false."""
    label_index: Tensor
    """(N,) int64 column of the label among the K number tokens; 0 where `is_number` is false."""
    number_values: Tensor
    """(K,) values of the number tokens."""
    number_forms: Tensor
    """(K, 3) how the number tokens are written, see `NumberVocabulary.forms_table`."""
    cells: LabelCells
    """The labels of the whole batch, of which the positions are a part."""
    rows: Tensor
    """(N,) int64 index of each position among the M cells."""

    @_once
    def is_label(self) -> Tensor:
        """(N,) bool: there is a label at all. False only where the device was not asked."""
        return self.label_ids != IGNORE_INDEX

    @_once
    def number_probabilities(self) -> Tensor:
        """(N, K) softmax over the number tokens alone; mass on text tokens does not count."""
        return torch.softmax(self.number_logits, dim=-1)

    @_once
    def number_log_probabilities(self) -> Tensor:
        """(N, K) log of `number_probabilities`."""
        return torch.log_softmax(self.number_logits, dim=-1)

    @_once
    def log_number_mass(self) -> Tensor:
        """(N,) log of `number_mass`."""
        return torch.logsumexp(self.number_logits, dim=-1) - self.log_partition

    @_once
    def number_mass(self) -> Tensor:
        """(N,) probability in [0, 1] that the whole softmax puts on number tokens."""
        return self.log_number_mass.exp()

    def expected_value(self) -> Tensor:
        """(N,) mean of the token values under `number_probabilities`."""
        # No matrix product: autocast would round the values to bfloat16.
        return (self.number_probabilities * self.number_values).sum(-1)

    @property
    def number_digits(self) -> Tensor:
        """(K,) int64 digits of each number token; 0 for one with a sign or a point."""
        return self.number_forms[:, 1].long()

    @property
    def number_starts_word(self) -> Tensor:
        """(K,) bool: the number token carries a space mark."""
        return self.number_forms[:, 2].bool()

    # Of the written number that a position's token belongs to, see `NumberRuns`.

    @property
    def num_cells(self) -> int:
        """M: the indices in `run` are below it."""
        return self.cells.ids.numel()

    @_once
    def run(self) -> Tensor:
        """(N,) int64 index of the written number; means nothing where `is_digit` is false."""
        return self._of_cells(self.cells.runs.run)

    @_once
    def is_digit(self) -> Tensor:
        """(N,) bool: the token holds digits of a number whose digits are all number tokens."""
        return self._of_cells(self.cells.runs.is_digit)

    @_once
    def starts_number(self) -> Tensor:
        """(N,) bool: the first token with digits of such a number."""
        return self._of_cells(self.cells.runs.is_first)

    @_once
    def place(self) -> Tensor:
        """(N,) int64 power of ten by which the token counts in its number: 0 units, 1 tens."""
        return self._of_cells(self.cells.runs.place)

    @_once
    def top_place(self) -> Tensor:
        """(N,) int64 power of ten of the first digit of the number."""
        return self._of_cells(self.cells.runs.top_place)

    @_once
    def last_place(self) -> Tensor:
        """(N,) int64 power of ten of the last digit of the number: 0 for whole ones."""
        return self._of_cells(self.cells.runs.last_place)

    @_once
    def rest(self) -> Tensor:
        """(N,) float64 value of the digits behind the token in its number."""
        return self._of_cells(self.cells.runs.rest)

    @_once
    def num_digit_tokens(self) -> Tensor:
        """(N,) int64 tokens with digits in the number."""
        return self._of_cells(self.cells.runs.num_digit_tokens)

    def _of_cells(self, values: Tensor) -> Tensor:
        return values.reshape(-1).index_select(0, self.rows)

    def at(self, positions: Tensor) -> "TokenStatistics":
        """The statistics of some of the positions only.

        Args:
            positions: (n,) int64 indices into the N positions.
        """
        # On a CPU `index_select` and its backward are several times faster than indexing.
        return replace(
            self,
            **{name: getattr(self, name).index_select(0, positions) for name in _PER_POSITION},
        )

    def at_numbers(self) -> "TokenStatistics":
        """The positions whose label is a number; off the CPU all, the others with stand-ins.

        How many numbers there are only the device knows; on a CPU asking costs nothing, and fewer
        rows are faster.
        """
        if can_look(self.label_ids):
            positions = self.is_number.nonzero().squeeze(-1)
            return self if len(positions) == len(self.rows) else self.at(positions)
        return self.with_stand_ins()

    def with_stand_ins(self) -> "TokenStatistics":
        """The same with uniform number logits and all mass on numbers where the label is none.

        Nothing flows back from there, whatever a term does with it.
        """
        number = self.is_number
        log_k = torch.full_like(self.log_partition, self.number_values.numel()).log()
        return replace(
            self,
            cross_entropy=torch.where(number, self.cross_entropy, 0.0),
            log_partition=torch.where(number, self.log_partition, log_k),
            number_logits=torch.where(number.unsqueeze(-1), self.number_logits, 0.0),
        )


_PER_POSITION = (
    "cross_entropy",
    "log_partition",
    "number_logits",
    "label_ids",
    "is_number",
    "label_values",
    "label_index",
    "rows",
)


def statistics_of_rows(
    cells: LabelCells,
    rows: Tensor,
    number_ids: Tensor,
    value_table: Tensor,
    cross_entropy: Tensor,
    log_partition: Tensor,
    number_logits: Tensor,
) -> TokenStatistics:
    """Put together what the labels tell of some cells and what the logits tell.

    Args:
        cells: The labels.
        rows: (N,) int64 indices of cells.
        number_ids: (K,) int64, ascending.
        value_table: (V,).
        cross_entropy: (N,).
        log_partition: (N,).
        number_logits: (N, K).
    """
    label_ids = cells.ids.reshape(-1).index_select(0, rows)
    is_number = cells.is_number.reshape(-1).index_select(0, rows)
    column = torch.searchsorted(number_ids, label_ids.clamp(min=0))
    dtype = number_logits.dtype
    forms = cells.forms
    return TokenStatistics(
        cross_entropy=cross_entropy,
        log_partition=log_partition,
        number_logits=number_logits,
        label_ids=label_ids,
        is_number=is_number,
        label_values=cells.values.reshape(-1).index_select(0, rows).to(dtype),
        label_index=torch.where(is_number, column, 0),
        number_values=value_table.index_select(0, number_ids).to(dtype),
        number_forms=(
            number_ids.new_zeros(len(number_ids), 3, dtype=torch.int8)
            if forms is None
            else forms.index_select(0, number_ids)
        ),
        cells=cells,
        rows=rows,
    )


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    number_ids: Tensor,
    value_table: Tensor,
    *,
    forms: Tensor | None = None,
    quantities: Tensor | None = None,
    overwrite_logits: bool = False,
    num_labels: int | None = None,
) -> TokenStatistics:
    """Cross entropy, log partition and number logits of every label position.

    Equal to `F.cross_entropy(logits.float(), labels, reduction="none")`, `logits.float().logsumexp
    (-1)` and `logits.float()[:, number_ids]` at the positions whose label is not `IGNORE_INDEX`,
    values and gradients, at a fraction of the time and memory.

    Args:
        logits: (..., V) float16, bfloat16, float32 or float64, aligned with the labels (nothing is
            shifted here). -inf is allowed, except for a whole row and, where number terms are
            used, for all number tokens of a row.
        labels: (..., T) int64 token ids in [0, V), `IGNORE_INDEX` where there is no target. The
            last dimension is that of the sequence: written numbers do not go beyond it.
        number_ids: (K,) int64 ids of the number tokens, ascending.
        value_table: (V,) float32 value of every token, NaN where it is no number.
        forms: (V, 3) `NumberVocabulary.forms_table()`, for terms that look at whole numbers.
        quantities: (..., T) bool, false where a number is no quantity and so none for the losses.
        overwrite_logits: Let the computation and the gradient use the logits' own memory. No
            tensor of the logits' size is then allocated; the logits hold garbage afterwards, and
            one backward pass is possible. Only for logits that nobody else reads, before or during
            the backward pass (a model that soft-caps its logits reads them).
        num_labels: Labels that are not `IGNORE_INDEX`, if known without asking a GPU.

    Returns:
        The statistics of the N positions with a label, in row-major order. N may be 0: all tensors
        are then empty, still connected to the graph. On a GPU, where N is not known unless
        `num_labels` is given, of all positions: `is_label` says which have one.

    Raises:
        ValueError: If the shapes disagree, or (on the CPU) a label is outside the vocabulary.
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
    cells = LabelCells.of(labels, value_table, forms=forms, quantities=quantities)
    scores = logits.reshape(-1, width)
    split = kept_cells(labels, num_labels)
    # Copying the kept rows out pays only where most rows have no label.
    selected = split[0] if split is not None and 2 * len(split[0]) < len(scores) else None
    ignored = None if selected is not None or split is None else split[1]
    cell_ids = labels.reshape(-1)
    with torch.autocast(logits.device.type, enabled=False):
        results = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
            scores, cell_ids, selected, ignored, number_ids, overwrite_logits
        )
    if split is None:
        rows = torch.arange(len(scores), device=labels.device)
    else:
        rows = split[0]
        if selected is None and len(split[1]):
            results = tuple(result.index_select(0, rows) for result in results)
    return statistics_of_rows(cells, rows, number_ids, value_table, *results)


class _TokenStatistics(torch.autograd.Function):
    """Forward and backward over the rows; see `token_statistics`.

    With p the softmax, the gradient for incoming g_ce, g_lse (rows,) and g_z (rows, K) is
    p * (g_ce + g_lse) - onehot(label) * g_ce, plus g_z in the number columns. The results of rows
    without a label mean nothing, and their gradient is zero whatever comes in.
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
        if selected is not None:
            labels = labels.index_select(0, selected)
        is_label = labels != IGNORE_INDEX
        labels = existing_ids(labels)
        compute_dtype = torch.promote_types(logits.dtype, torch.float32)
        number_logits = scores.index_select(1, number_ids).to(compute_dtype)
        label_logits = at_labels(scores, labels).to(compute_dtype)

        probabilities = None
        if ctx.needs_input_grad[0] and scores.dtype == compute_dtype:
            # The softmax may take the place of the scores.
            reuse = overwrite_logits or selected is not None
            probabilities = scores.detach() if reuse else torch.empty_like(scores)
            peak = scores.detach().amax(-1)
            torch.softmax(scores.detach(), -1, out=probabilities)
            log_partition, cross_entropy = from_softmax(probabilities, peak, label_logits)
        else:
            log_partition = torch.empty_like(label_logits)
            cross_entropy = torch.empty_like(label_logits)
            size = scratch_rows(scores.shape[-1], compute_dtype, scores.device)
            scratch = scores.new_empty(
                min(size, len(scores)), scores.shape[-1], dtype=compute_dtype
            )
            for start in range(0, len(scores), size):
                chunk = slice(start, start + size)
                part = scratch[: len(scores[chunk])].copy_(scores[chunk].detach())
                peak = part.amax(-1)
                torch.softmax(part, -1, out=part)
                log_partition[chunk], cross_entropy[chunk] = from_softmax(
                    part, peak, label_logits[chunk]
                )

        if ctx.needs_input_grad[0]:
            ctx.selected = selected
            ctx.ignored = ignored
            ctx.is_label = is_label
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

        if ctx.probabilities is not None:
            grad = ctx.probabilities.mul_(scale.unsqueeze(-1))
            ctx.probabilities = None
            add_at_single_tokens(grad, ctx.labels, ctx.number_ids, grad_cross_entropy, grad_numbers)
        else:
            scores = logits if ctx.selected is None else logits.index_select(0, ctx.selected)
            reuse = ctx.overwrite_logits or ctx.selected is not None
            grad = scores if reuse else torch.empty_like(scores)
            size = scratch_rows(scores.shape[-1], log_partition.dtype, scores.device)
            scratch = scores.new_empty(
                min(size, len(scores)), scores.shape[-1], dtype=log_partition.dtype
            )
            for start in range(0, len(grad), size):
                chunk = slice(start, start + size)
                part = scratch[: len(scores[chunk])].copy_(scores[chunk])
                part.sub_(log_partition[chunk, None]).exp_().mul_(scale[chunk, None])
                # Before the rounding: the gradient of a confident row is a small difference.
                add_at_single_tokens(
                    part,
                    ctx.labels[chunk],
                    ctx.number_ids,
                    None if grad_cross_entropy is None else grad_cross_entropy[chunk],
                    None if grad_numbers is None else grad_numbers[chunk],
                )
                grad[chunk] = part
        # Filled, not multiplied: also where the softmax is NaN.
        if ctx.ignored is not None:
            grad.index_fill_(0, ctx.ignored, 0.0)
        elif ctx.selected is None:
            grad.masked_fill_(~ctx.is_label.unsqueeze(-1), 0.0)

        if ctx.selected is not None:
            whole = logits.zero_() if ctx.overwrite_logits else torch.zeros_like(logits)
            grad = whole.index_copy_(0, ctx.selected, grad)
        if ctx.overwrite_logits:
            ctx.logits = None
        return grad, None, None, None, None, None


def at_labels(rows: Tensor, labels: Tensor) -> Tensor:
    """(rows,) the label's column of each row of (rows, V)."""
    return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def from_softmax(
    probabilities: Tensor, peak: Tensor, label_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Log partition and cross entropy, both (rows,), from the softmax of the rows.

    The largest probability is at least 1/V and so holds all its digits; the label's own may have
    underflowed.

    Args:
        probabilities: (rows, V).
        peak: (rows,) largest logit.
        label_logits: (rows,).
    """
    log_sum = -probabilities.amax(-1).log()
    return peak + log_sum, (peak - label_logits) + log_sum


def add_at_single_tokens(
    grad: Tensor,
    labels: Tensor,
    number_ids: Tensor,
    grad_cross_entropy: Tensor | None,
    grad_numbers: Tensor | None,
) -> None:
    """Add, in place, the parts of the logits' gradient that concern single tokens.

    Args:
        grad: (rows, V).
        labels: (rows,) int64.
        number_ids: (K,) int64.
        grad_cross_entropy: (rows,) or None.
        grad_numbers: (rows, K) or None.
    """
    if grad_numbers is not None:
        grad.index_add_(1, number_ids, grad_numbers)
    if grad_cross_entropy is not None:
        grad.scatter_add_(1, labels.unsqueeze(-1), -grad_cross_entropy.unsqueeze(-1))
