"""The weighted sum of loss terms, what it is divided by, and what of it is logged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from ntl_lightning.losses.terms import LossTerm, Positions
from ntl_lightning.losses.token_statistics import (
    IGNORE_INDEX,
    TokenStatistics,
    token_statistics,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary

__all__ = ["Objective", "ObjectiveResult"]


def average(total: Tensor, count: float) -> Tensor:
    """The total over the count; 0 where there is nothing to average over."""
    return total / count if count else torch.zeros_like(total)


@dataclass(frozen=True)
class ObjectiveResult:
    """Value of an objective on one batch."""

    loss: Tensor
    """() the weighted sum of the averaged terms, to call `backward` on."""
    sums: dict[str, Tensor]
    """Term name -> () detached, unweighted sum over the positions the term is evaluated at."""
    counts: dict[Positions, int]
    """`tokens`: label positions of this batch; `numbers`: those whose label is a number token."""
    averages: dict[str, Positions]
    """Term name -> what it is averaged over."""
    weights: dict[str, float]
    """Term name -> its weight at this step."""
    statistics: TokenStatistics
    """The statistics the terms were computed from, of the `tokens` positions in row-major order."""

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
        return sum(
            (self.weights[name] * part for name, part in self.parts.items()),
            start=torch.zeros_like(self.loss.detach()),
        )


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
    >>> result.parts["ntl_was"], result.counts["numbers"]
    (tensor(2.5000), 1)
    """

    number_ids: Tensor
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
            for key in ("averaged_over", "evaluated_at"):
                if getattr(term, key) not in get_args(Positions):
                    raise ValueError(
                        f"loss_terms: {key} of {term.name} must be one of "
                        f"{', '.join(get_args(Positions))}, got {getattr(term, key)!r}"
                    )
        self.terms = tuple(terms)
        self.register_buffer(
            "number_ids", torch.tensor(vocabulary.token_ids, dtype=torch.long), persistent=False
        )
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

    def count(self, labels: Tensor) -> dict[Positions, int]:
        """Number of label positions, and of those whose label is a number token."""
        kept = labels[labels != IGNORE_INDEX]
        return {"tokens": kept.numel(), "numbers": int((~self.value_table[kept].isnan()).sum())}

    def weights(self, step: int) -> dict[str, float]:
        """Term name -> weight at an optimizer step."""
        return {term.name: term.weight * term.schedule.factor(step) for term in self.terms}

    def combine(self, averages: Mapping[str, Tensor], step: int) -> Tensor:
        """() the objective from the terms' averages, e.g. over an epoch."""
        weighted = [w * averages[name] for name, w in self.weights(step).items()]
        return torch.stack(weighted).sum()

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        denominators: Mapping[Positions, float] | None = None,
        step: int = 0,
        overwrite_logits: bool = False,
    ) -> ObjectiveResult:
        """The objective on one batch, in float32 (float64 for float64 logits) under autocast too.

        Args:
            logits: (..., V) aligned with the labels.
            labels: (...) int64, `-100` where there is no target.
            denominators: What the terms' sums are divided by. None: the counts of this batch. To
                get the same gradient however an optimizer step is cut into micro-batches and
                ranks, pass the counts over all of them, and undo the division by the number of
                micro-batches and ranks that the training loop does.
            step: Optimizer step, for the weight schedules.
            overwrite_logits: See `token_statistics`.

        Returns:
            The loss and its parts. A batch without numbers (or without any label) gives 0 for the
            terms concerned, still connected to the graph, so that `backward` works.
        """
        with torch.autocast(logits.device.type, enabled=False):
            statistics = token_statistics(
                logits, labels, self.number_ids, self.value_table, overwrite_logits=overwrite_logits
            )
            return self._from_statistics(statistics, denominators, step)

    def _from_statistics(
        self,
        statistics: TokenStatistics,
        denominators: Mapping[Positions, float] | None,
        step: int,
    ) -> ObjectiveResult:
        number_positions = statistics.is_number.nonzero().squeeze(-1)
        counts: dict[Positions, int] = {
            "tokens": len(statistics.label_ids),
            "numbers": len(number_positions),
        }
        at_numbers = (
            statistics if counts["numbers"] == counts["tokens"] else statistics.at(number_positions)
        )
        totals = counts if denominators is None else denominators
        weights = self.weights(step)
        sums: dict[str, Tensor] = {}
        # The sum of nothing: zero, but connected to the graph.
        loss = statistics.cross_entropy[:0].sum()
        for term in self.terms:
            seen = at_numbers if term.evaluated_at == "numbers" else statistics
            weight, divisor = weights[term.name], totals[term.averaged_over]
            values = term.per_position(seen)
            if values.shape != seen.label_ids.shape:
                raise ValueError(
                    f"per_position of {term.name} must return one value for each of the "
                    f"{len(seen.label_ids)} positions, got the shape {tuple(values.shape)}"
                )
            total = values.sum()
            # A term that is switched off stays out of the graph: 0 times infinity would be NaN.
            if weight > 0 and divisor > 0:
                loss = loss + total * (weight / divisor)
            sums[term.name] = total.detach()
        return ObjectiveResult(
            loss=loss,
            sums=sums,
            counts=counts,
            averages={term.name: term.averaged_over for term in self.terms},
            weights=weights,
            statistics=statistics,
        )
