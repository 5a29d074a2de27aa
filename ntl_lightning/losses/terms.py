"""Loss terms: each is one formula, a value per position from the token statistics.

N label positions, K number tokens. With z the number logits at a position whose label is a number
token, q = softmax(z) over the number tokens only, v the token values and y the label's value:

    Wasserstein    sum_k q_k |v_k - y|              (NTL-WAS)
    ExpectedValue  |sum_k q_k v_k - y|^p            (NTL-MSE for p = 2, NTL-MAE for p = 1)

Both see the number tokens only: mass on text tokens neither costs nor gains anything, and cross
entropy has to move it. With `reweigh` the share m of the whole softmax that lies on number tokens
comes in: m * loss + (1 - m) * 1.01 * (the largest loss a number can have).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ntl_lightning.losses.schedules import Constant, WeightSchedule
from ntl_lightning.losses.token_statistics import TokenStatistics

__all__ = ["CrossEntropy", "ExpectedValue", "LossTerm", "Positions", "Wasserstein"]

Positions = Literal["numbers", "tokens", "whole_numbers"]
"""What a term is averaged over. `numbers`: positions whose label is a number token; `tokens`: all
label positions; `whole_numbers`: written numbers, each of one or more number tokens."""

EvaluatedAt = Literal["numbers", "tokens"]
"""The positions a term has a value at; as in `Positions`."""


@dataclass(frozen=True)
class LossTerm(ABC):
    """One summand of the objective: `weight * schedule * mean of per_position`.

    Subclass it as a frozen dataclass of plain values and name the class by its path in the
    configuration; it is then fused with, averaged, scheduled and logged like the terms here.
    """

    weight: float = 1.0
    """Factor of the term in the objective. With 0 the term is logged but has no gradient."""
    averaged_over: Positions = "tokens"
    """What the term's sum is divided by. The paper divides NTL by `numbers`: the true weight of a
    number then grows as numbers get rarer. `tokens` divides by what cross entropy divides by."""
    schedule: WeightSchedule = Constant()
    """How the weight changes over the optimizer steps."""
    evaluated_at: ClassVar[EvaluatedAt] = "numbers"
    """The positions that `per_position` is asked for; the term is zero elsewhere."""
    joins_positions: ClassVar[bool] = False
    """Whether the value at one position depends on the statistics of others, as where the digits
    of a written number are put together. Such a term is always given all positions at once."""

    @property
    def name(self) -> str:
        """Name in the logs (`train/<name>`); the class's own by default."""
        return type(self).__name__.lower()

    @abstractmethod
    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The term's value at each of the N positions asked for, shape (N,), float32."""


def _check_largest_distance(value: float | None, where: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{where}.largest_distance must be a positive number or null, got {value}")


def _spread(values: Tensor) -> Tensor:
    """() the largest distance between two of the values."""
    return values.max() - values.min()


def _distance_scale(values: Tensor, largest_distance: float | None) -> Tensor | float:
    """Factor that makes the largest distance between two of the values `largest_distance`."""
    if largest_distance is None:
        return 1.0
    spread = _spread(values)
    # One value only: every distance is 0 and stays 0.
    return largest_distance / torch.where(spread > 0, spread, 1.0)


def _reweighed(loss: Tensor, worst: Tensor | float, statistics: TokenStatistics) -> Tensor:
    """The loss with mass on text tokens costing a little more than the worst number."""
    mass = statistics.number_mass
    return mass * loss + (1 - mass) * 1.01 * worst


@dataclass(frozen=True)
class CrossEntropy(LossTerm):
    """Cross entropy of the label under the softmax over the whole vocabulary.

    Equals `torch.nn.functional.cross_entropy` with `ignore_index=-100`. Zero only where all mass is
    on the label.
    """

    evaluated_at: ClassVar[EvaluatedAt] = "tokens"

    @property
    def name(self) -> str:
        """`cross_entropy`."""
        return "cross_entropy"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """Minus the log-probability of the label, (N,)."""
        return statistics.cross_entropy


@dataclass(frozen=True)
class Wasserstein(LossTerm):
    """NTL-WAS: `sum_k q_k |v_k - y|`, the 1-Wasserstein distance to all mass on the label.

    Exact for any token values: unevenly spaced, unsorted, repeated. Zero if and only if all number
    mass lies on tokens of the label's value.

    Source: "Regress, Don't Guess", arXiv 2411.02083, NTL-WAS; equals `ntloss.NTLoss` with the same
    `reweigh` and `squash_factor` (which reweighs by default; the paper does not).

    The label is 4, half of the mass on 3 and half on 9:

    >>> from ntl_lightning.losses.token_statistics import token_statistics
    >>> logits = torch.full((1, 10), -torch.inf)
    >>> logits[0, [3, 9]] = 0.0
    >>> digits = torch.arange(10)
    >>> statistics = token_statistics(logits, torch.tensor([4]), digits, digits.float())
    >>> Wasserstein().per_position(statistics)   # 0.5 * 1 + 0.5 * 5
    tensor([3.])
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by: `numbers` (the paper) or `tokens`."""
    largest_distance: float | None = None
    """Distances are scaled so that the largest one between two number tokens is this. With numbers
    of several digits in one token, 9 gives them the range that digits have. null: not scaled."""
    squash_factor: float | None = None
    """Distances are squeezed so that the farthest number costs this many times the nearest wrong
    one, which costs 1. With 1 every wrong number costs the same. null: not squeezed."""
    reweigh: bool = False
    """Make mass on text tokens cost 1.01 times the largest distance."""

    def __post_init__(self) -> None:
        _check_largest_distance(self.largest_distance, "Wasserstein")
        if self.squash_factor is None:
            return
        if isinstance(self.squash_factor, bool) or not (
            math.isfinite(self.squash_factor) and self.squash_factor >= 1
        ):
            raise ValueError(
                "Wasserstein.squash_factor must be a number of at least 1, or null, got "
                f"{self.squash_factor}"
            )
        if self.largest_distance is not None:
            raise ValueError(
                f"Wasserstein.largest_distance={self.largest_distance} and squash_factor="
                f"{self.squash_factor} both set the largest distance; give one of the two"
            )

    @property
    def name(self) -> str:
        """`ntl_was`."""
        return "ntl_was"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The expected distance from the label's value, (N,)."""
        values = statistics.number_values
        distances = (values - statistics.label_values.unsqueeze(-1)).abs()
        worst: Tensor | float
        if self.squash_factor is None:
            scale = _distance_scale(values, self.largest_distance)
            worst = _spread(values) * scale
        else:
            distances = self._squashed(distances, values)
            scale, worst = 1.0, self.squash_factor
        loss = (statistics.number_probabilities * distances).sum(-1) * scale
        return _reweighed(loss, worst, statistics) if self.reweigh else loss

    def _squashed(self, distances: Tensor, values: Tensor) -> Tensor:
        gaps = values.sort().values.diff()
        spread = _spread(values)
        nearest = torch.where(gaps > 0, gaps, spread).min() if len(gaps) else spread
        # With one distance only, it is the nearest.
        width = torch.where(spread > nearest, spread - nearest, 1.0)
        factor = 1.0 if self.squash_factor is None else self.squash_factor
        squashed = 1 + (distances - nearest) * (factor - 1) / width
        return torch.where(distances > 0, squashed, 0.0)


@dataclass(frozen=True)
class ExpectedValue(LossTerm):
    """NTL-MSE, NTL-MAE, NTL-Huber: the error of the expected value, `|sum_k q_k v_k - y|^p`.

    Zero wherever the mean is right, also for two wrong tokens on both sides of the label (half on 4
    and half on 6 costs nothing for 5): `Wasserstein` has no such blind spot and is the default.

    Source: "Regress, Don't Guess", arXiv 2411.02083, NTL-MSE / NTL-L_p; equals
    `ntloss.NTLossDotProduct` with the same `reweigh` (which reweighs by default).

    The label is 4, half of the mass on 3 and half on 9, so the mean is 6:

    >>> from ntl_lightning.losses.token_statistics import token_statistics
    >>> logits = torch.full((1, 10), -torch.inf)
    >>> logits[0, [3, 9]] = 0.0
    >>> digits = torch.arange(10)
    >>> statistics = token_statistics(logits, torch.tensor([4]), digits, digits.float())
    >>> ExpectedValue().per_position(statistics), ExpectedValue(power=1).per_position(statistics)
    (tensor([4.]), tensor([2.]))
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by: `numbers` (the paper) or `tokens`."""
    power: float = 2.0
    """Exponent p of the error: 2 is NTL-MSE, 1 is NTL-MAE."""
    huber_delta: float | None = None
    """If set, the Huber loss with this delta takes the place of the power (NTL-Huber)."""
    largest_distance: float | None = None
    """Errors are scaled as distances are in `Wasserstein`. null: not scaled."""
    reweigh: bool = False
    """Make mass on text tokens cost 1.01 times the largest loss that a number can have."""

    def __post_init__(self) -> None:
        _check_largest_distance(self.largest_distance, "ExpectedValue")
        if not (math.isfinite(self.power) and self.power >= 1):
            raise ValueError(
                f"ExpectedValue.power must be at least 1, got {self.power}; below 1 the gradient "
                "is unbounded at the right answer"
            )
        if self.huber_delta is not None:
            if not (math.isfinite(self.huber_delta) and self.huber_delta > 0):
                raise ValueError(
                    f"ExpectedValue.huber_delta must be positive or null, got {self.huber_delta}"
                )
            if self.power != 2.0:
                raise ValueError(
                    f"ExpectedValue.power={self.power} has no effect with huber_delta="
                    f"{self.huber_delta}; give one of the two"
                )

    @property
    def name(self) -> str:
        """`ntl_mse`, `ntl_mae`, `ntl_huber` or `ntl_l<p>`."""
        if self.huber_delta is not None:
            return "ntl_huber"
        return {1.0: "ntl_mae", 2.0: "ntl_mse"}.get(self.power, f"ntl_l{self.power:g}")

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The power of the expected value's error, (N,)."""
        values = statistics.number_values
        differences = values - statistics.label_values.unsqueeze(-1)
        # The mean of the differences, not the difference of the mean: exact for a sure answer.
        scale = _distance_scale(values, self.largest_distance)
        loss = self._loss((statistics.number_probabilities * differences).sum(-1) * scale)
        if not self.reweigh:
            return loss
        return _reweighed(loss, self._loss(_spread(values) * scale), statistics)

    def _loss(self, error: Tensor) -> Tensor:
        if self.huber_delta is not None:
            return torch.nn.functional.huber_loss(
                error, torch.zeros_like(error), reduction="none", delta=self.huber_delta
            )
        return error.square() if self.power == 2.0 else error.abs() ** self.power
