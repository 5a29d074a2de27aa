"""The weighted sum of loss terms, what it is divided by, and what of it is logged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from ntl_lightning.losses.projection import (
    OutputProjection,
    attach_gradients,
    projected_gradients,
    projected_statistics,
)
from ntl_lightning.losses.terms import LossTerm, Positions
from ntl_lightning.losses.token_statistics import (
    IGNORE_INDEX,
    LabelCells,
    TokenStatistics,
    existing_ids,
    kept_cells,
    statistics_of_rows,
    token_statistics,
)
from ntl_lightning.numbers.runs import label_counts
from ntl_lightning.numbers.vocabulary import NumberVocabulary

__all__ = ["Objective", "ObjectiveResult"]


def average(total: Tensor, count: Tensor | float) -> Tensor:
    """The total over the count; 0 where there is nothing to average over."""
    if isinstance(count, Tensor):
        # Chosen, not multiplied by 0: the total of nothing may still be infinite.
        return torch.where(count > 0, total / count.clamp(min=1), 0.0)
    return total / count if count > 0 else torch.zeros_like(total)


def _weighted_sum(
    averages: Mapping[str, Tensor], weights: Mapping[str, float], zero: Tensor
) -> Tensor:
    # A term that is switched off may be infinite, and 0 times infinity is NaN.
    return sum((w * averages[name] for name, w in weights.items() if w > 0), start=zero)


@dataclass(frozen=True)
class ObjectiveResult:
    """Value of an objective on one batch."""

    loss: Tensor
    """() the weighted sum of the averaged terms, to call `backward` on."""
    sums: dict[str, Tensor]
    """Term name -> () detached, unweighted sum over the positions the term is evaluated at."""
    counts: dict[Positions, Tensor]
    """() int64. `tokens`: label positions of this batch; `numbers`: those whose label is a number
    token; `whole_numbers`, only where a term is averaged over them: the written numbers."""
    averages: dict[str, Positions]
    """Term name -> what it is averaged over."""
    weights: dict[str, float]
    """Term name -> its weight at this step."""
    statistics: TokenStatistics
    """The statistics the terms were computed from, of the `tokens` positions in row-major order
    (see `token_statistics`). Without a graph if the loss was computed from hidden states."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """Term name -> () detached, unweighted average over this batch; 0 without positions."""
        return {
            name: average(total, self.counts[self.averages[name]])
            for name, total in self.sums.items()
        }

    @property
    def value(self) -> Tensor:
        """() detached: the objective on this batch alone, whatever the denominators of `loss`."""
        return _weighted_sum(self.parts, self.weights, torch.zeros_like(self.loss.detach()))


class Objective(nn.Module):
    """Cross entropy, number token losses and your own terms, computed together.

    Works in any training loop; nothing is shifted here, and nothing of Lightning is needed.

    Args:
        terms: The loss terms; their names must differ.
        vocabulary: Which tokens are numbers, made for the logits' width.

    Raises:
        ValueError: If there is no term, two terms share a name, or a weight is negative or not
            finite.

    >>> from ntl_lightning.losses import CrossEntropy, Wasserstein
    >>> vocabulary = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=15)
    >>> objective = Objective([CrossEntropy(), Wasserstein(weight=0.3)], vocabulary)
    >>> logits = torch.zeros(1, 2, 15, requires_grad=True)
    >>> result = objective(logits, torch.tensor([[4, 12]]))
    >>> result.parts["ntl_was"], int(result.counts["numbers"])
    (tensor(2.5000), 1)
    """

    number_ids: Tensor
    forms: Tensor
    _value_bits: Tensor

    def __init__(self, terms: Sequence[LossTerm], vocabulary: NumberVocabulary) -> None:
        super().__init__()
        if not terms:
            raise ValueError("loss_terms is empty: name at least one loss term")
        repeated = [name for name, n in Counter(term.name for term in terms).items() if n > 1]
        if repeated:
            raise ValueError(
                f"loss_terms holds more than one term called {repeated[0]!r}; "
                "merge them or give one a class of its own with another name"
            )
        for term in terms:
            if not (math.isfinite(term.weight) and term.weight >= 0):
                raise ValueError(
                    f"loss_terms: the weight of {term.name} must be 0 or more, got {term.weight}"
                )
            allowed = {
                "averaged_over": get_args(Positions),
                "evaluated_at": ("numbers", "tokens"),
            }
            for key, values in allowed.items():
                if getattr(term, key) not in values:
                    raise ValueError(
                        f"loss_terms: {key} of {term.name} must be one of {', '.join(values)}, "
                        f"got {getattr(term, key)!r}"
                    )
            term.check(vocabulary)
        self.terms = tuple(terms)
        self.register_buffer(
            "number_ids",
            torch.tensor(vocabulary.token_ids, dtype=torch.long),
            persistent=False,
        )
        self.register_buffer("forms", vocabulary.forms_table(), persistent=False)
        # The values are kept as the bits of float32 in an integer buffer, because moving a module
        # to bfloat16 would round a floating-point one: 257 would become 256.
        self.register_buffer(
            "_value_bits",
            vocabulary.value_table().to(torch.float32).view(torch.int32),
            persistent=False,
        )

    @property
    def value_table(self) -> Tensor:
        """(V,) float32 value of every token, NaN where it is no number."""
        return self._value_bits.view(torch.float32)

    @property
    def needs_numbers(self) -> bool:
        """Whether a term with a weight is evaluated at number labels only."""
        return any(term.evaluated_at == "numbers" and term.weight > 0 for term in self.terms)

    def count(self, labels: Tensor, quantities: Tensor | None = None) -> dict[Positions, Tensor]:
        """What the terms are divided by on these labels alone, see `ObjectiveResult.counts`.

        Args:
            labels: (..., T) int64.
            quantities: (..., T) bool, see `forward`.
        """
        return self._counts(self._cells(labels, quantities))

    def _cells(self, labels: Tensor, quantities: Tensor | None) -> LabelCells:
        return LabelCells.of(labels, self.value_table, forms=self.forms, quantities=quantities)

    def _counts(self, cells: LabelCells) -> dict[Positions, Tensor]:
        whole = any(term.averaged_over == "whole_numbers" for term in self.terms)
        return label_counts(cells.ids, cells.is_number, cells.runs if whole else None)

    def weights(self, step: int) -> dict[str, float]:
        """Term name -> weight at an optimizer step."""
        return {term.name: term.weight * term.schedule.factor(step) for term in self.terms}

    def combine(self, averages: Mapping[str, Tensor], step: int) -> Tensor:
        """() the objective from the terms' averages, e.g. over an epoch."""
        zero = torch.zeros_like(next(iter(averages.values())))
        return _weighted_sum(averages, self.weights(step), zero)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        quantities: Tensor | None = None,
        denominators: Mapping[Positions, float] | None = None,
        step: int = 0,
        overwrite_logits: bool = False,
        num_labels: int | None = None,
    ) -> ObjectiveResult:
        """The objective on one batch, in float32 (float64 for float64 logits) under autocast too.

        Args:
            logits: (..., V) aligned with the labels.
            labels: (..., T) int64, `-100` where there is no target.
            quantities: (..., T) bool, false where the label's number is an id or a category: for
                the number terms it is then no number. None: all numbers are quantities.
            denominators: What the terms' sums are divided by. None: the counts of this batch. To
                get the same gradient however an optimizer step is cut into micro-batches and
                ranks, pass the counts over all of them, and undo the division by the number of
                micro-batches and ranks that the training loop does.
            step: Optimizer step, for the weight schedules.
            overwrite_logits: See `token_statistics`.
            num_labels: See `token_statistics`.

        Returns:
            The loss and its parts. A batch without numbers (or without any label) gives 0 for the
            terms concerned, still connected to the graph, so that `backward` works.
        """
        with torch.autocast(logits.device.type, enabled=False):
            statistics = token_statistics(
                logits,
                labels,
                self.number_ids,
                self.value_table,
                forms=self.forms,
                quantities=quantities,
                overwrite_logits=overwrite_logits,
                num_labels=num_labels,
            )
            counts = self._counts(statistics.cells)
            weights = self.weights(step)
            loss, sums = self._evaluate(statistics, self.terms, denominators or counts, weights)
        return self._result(loss, sums, counts, weights, statistics)

    def from_hidden(
        self,
        hidden: Tensor,
        output_weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        quantities: Tensor | None = None,
        denominators: Mapping[Positions, float] | None = None,
        step: int = 0,
        num_labels: int | None = None,
        rows_per_chunk: int | None = None,
    ) -> ObjectiveResult:
        """The objective from hidden states; logits exist for a few positions at a time only.

        The same numbers as `forward` on `cap(scale * (hidden @ output_weight.T + bias + a @ b.T))`
        with `low_rank = (a, b)` and `cap(x) = soft_cap * tanh(x / soft_cap)`. The gradients are
        taken on the way, so that `backward` multiplies only; nothing of vocabulary width is
        computed for positions without a label. A term that joins positions (`NumberLevel`) makes
        it go through the output matrix once more while its weight is not 0. Under autocast the
        products with the output matrix are computed in its dtype, all the rest in float32.

        Args:
            hidden: (..., D) what the model's output layer is given, aligned with the labels.
            output_weight: (V, D) output matrix; a DTensor is gathered.
            labels: (..., T) int64, `-100` where there is no target.
            bias: (V,) of the output layer.
            scale: Factor on the logits.
            soft_cap: Bound of the logits' tanh, or None.
            low_rank: (..., R) and (V, R), an adapter beside the output matrix.
            quantities: See `forward`.
            denominators: See `forward`.
            step: See `forward`.
            num_labels: See `token_statistics`. Without it a GPU is asked once, for the positions
                with a label.
            rows_per_chunk: Positions whose logits exist at a time. None: an eighth of them, and at
                least 256. Fewer need less memory and more time.

        Returns:
            As `forward`; the statistics have no graph.

        Raises:
            ValueError: If the shapes disagree, or (on the CPU) a label is outside the vocabulary.
        """
        if hidden.shape[:-1] != labels.shape:
            raise ValueError(
                f"labels must have the shape of hidden without its last dimension, "
                f"{tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}"
            )
        width = self.value_table.shape[0]
        if output_weight.shape[0] != width:
            raise ValueError(
                f"the output matrix has {output_weight.shape[0]} rows, but the number vocabulary "
                f"was made for {width}; build it with width=output_weight.shape[0]"
            )
        cells = self._cells(labels, quantities)
        split = kept_cells(labels, num_labels)
        if split is None:
            rows = (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(-1)
        else:
            rows = split[0]
        label_ids = existing_ids(labels.reshape(-1).index_select(0, rows))
        kept_hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
        if low_rank is not None:
            a, b = low_rank
            low_rank = a.reshape(-1, a.shape[-1]).index_select(0, rows), b
        projection = OutputProjection(output_weight, bias, scale, soft_cap, low_rank).gathered()
        tensors = (kept_hidden, projection.weight, projection.bias, *(projection.low_rank or ()))
        needs_gradient = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        arguments = (kept_hidden, projection, label_ids, self.number_ids)
        counts = self._counts(cells)
        totals = denominators or counts
        weights = self.weights(step)
        # Terms that join positions have to wait for the last chunk. Where they are only logged,
        # their gradient is not needed before.
        late = tuple(term for term in self.terms if term.joins_positions)
        early = tuple(term for term in self.terms if not term.joins_positions)
        joins = any(weights[term.name] > 0 for term in late)
        parts: list[tuple[Tensor, ...]] = []
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}

        def evaluate(
            terms: Sequence[LossTerm], chunk: slice, *from_logits: Tensor, gradient: bool = True
        ) -> tuple[Tensor | None, ...]:
            """The terms on some of the rows, and their gradient."""
            with (
                torch.set_grad_enabled(gradient),
                torch.autocast(hidden.device.type, enabled=False),
            ):
                leaves = tuple(
                    tensor.detach().requires_grad_() if gradient else tensor
                    for tensor in from_logits
                )
                statistics = statistics_of_rows(
                    cells, rows[chunk], self.number_ids, self.value_table, *leaves
                )
                loss, of_chunk = self._evaluate(statistics, terms, totals, weights)
                losses.append(loss.detach())
                for name, total in of_chunk.items():
                    sums[name] = sums[name] + total if name in sums else total
                if not gradient:
                    return ()
                return torch.autograd.grad(loss, leaves, allow_unused=True)

        def evaluate_early(chunk: slice, *from_logits: Tensor) -> tuple[Tensor | None, ...]:
            parts.append(from_logits)
            return evaluate(early, chunk, *from_logits)

        gradients = None
        if needs_gradient and len(rows) and not joins:
            gradients = projected_gradients(
                *arguments, evaluate_early, rows_per_chunk=rows_per_chunk
            )
            whole = tuple(torch.cat(column) for column in zip(*parts, strict=True))
            evaluate(late, slice(None), *whole, gradient=False)
        else:
            whole = projected_statistics(*arguments, rows_per_chunk=rows_per_chunk)
            of_all = evaluate(self.terms, slice(None), *whole, gradient=needs_gradient)
            if needs_gradient:
                gradients = projected_gradients(
                    *arguments,
                    lambda chunk, *_: tuple(None if g is None else g[chunk] for g in of_all),
                    rows_per_chunk=rows_per_chunk,
                )
        loss = torch.stack(losses).sum()
        if gradients is not None:
            loss = attach_gradients(loss, gradients, kept_hidden, projection)
        statistics = statistics_of_rows(cells, rows, self.number_ids, self.value_table, *whole)
        return self._result(loss, sums, counts, weights, statistics)

    def _result(
        self,
        loss: Tensor,
        sums: dict[str, Tensor],
        counts: dict[Positions, Tensor],
        weights: dict[str, float],
        statistics: TokenStatistics,
    ) -> ObjectiveResult:
        averages = {term.name: term.averaged_over for term in self.terms}
        return ObjectiveResult(loss, sums, counts, averages, weights, statistics)

    def _evaluate(
        self,
        statistics: TokenStatistics,
        terms: Sequence[LossTerm],
        totals: Mapping[Positions, Tensor] | Mapping[Positions, float],
        weights: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum () of the terms, and the sum () of each."""
        at_numbers = statistics.at_numbers()
        sums: dict[str, Tensor] = {}
        # The sum of nothing: zero, but connected to the graph.
        loss = statistics.cross_entropy[:0].sum()
        for term in terms:
            numbers_only = term.evaluated_at == "numbers"
            seen = at_numbers if numbers_only else statistics
            values = term.per_position(seen)
            if values.shape != seen.label_ids.shape:
                raise ValueError(
                    f"per_position of {term.name} must return one value for each of the "
                    f"{len(seen.label_ids)} positions, got the shape {tuple(values.shape)}"
                )
            counts = seen.is_number if numbers_only else seen.is_label
            total = torch.where(counts, values, 0.0).sum()
            # A term that is switched off stays out of the graph: 0 times infinity would be NaN.
            if weights[term.name] > 0:
                loss = loss + weights[term.name] * average(total, _total(totals, term))
            sums[term.name] = total.detach()
        return loss, sums


def _total(
    totals: Mapping[Positions, Tensor] | Mapping[Positions, float], term: LossTerm
) -> Tensor | float:
    if term.averaged_over not in totals:
        raise ValueError(
            f"denominators holds {', '.join(totals)}, but {term.name} is averaged over "
            f"{term.averaged_over}; Objective.count names all that are needed"
        )
    return totals[term.averaged_over]
