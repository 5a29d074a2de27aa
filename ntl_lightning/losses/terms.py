"""Loss terms: each is one formula, a value per position from the token statistics.

N label positions, K number tokens. At a position whose label is a number token: z the number
logits, q = softmax(z) over the number tokens only, v the token values, y the label's value, m the
share of the whole softmax that lies on number tokens:

    Wasserstein      (sum_k q_k d(v_k, y)^p)^(1/p)   (NTL-WAS for d = |v_k - y| and p = 1)
    ExpectedValue    |sum_k q_k v_k - y|^p           (NTL-MSE for p = 2, NTL-MAE for p = 1)
    NumberMass       -log m
    RegressionAware  (sum_k m q_k v_k - y)^2         (RAFT)

The first two see the number tokens only: mass on text tokens neither costs nor gains anything, and
cross entropy has to move it. Two ways bring it in: `NumberMass`, smooth, as a term beside them, or
their `reweigh`, m * loss + (1 - m) * 1.01 * (the largest loss a number can have), as in the
package `ntloss`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ntl_lightning.losses.distributions import gaussian_target, wasserstein_distance
from ntl_lightning.losses.schedules import Constant, WeightSchedule
from ntl_lightning.losses.token_statistics import TokenStatistics
from ntl_lightning.numbers.vocabulary import NumberVocabulary

__all__ = [
    "Cost",
    "CrossEntropy",
    "EvaluatedAt",
    "ExpectedValue",
    "LossTerm",
    "NumberMass",
    "Positions",
    "RegressionAware",
    "Wasserstein",
]

Cost = Literal["absolute", "log", "modular"]
"""Distance between two numbers a and b. `absolute`: |a - b|; `log`: |s(a) - s(b)| with
s(a) = sign(a) log(1 + |a|); `modular`: the shorter way round a circle."""

# exp of this is 0, and its multiples are finite.
_LOG_OF_NOTHING = -1e30

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

    def check(self, vocabulary: NumberVocabulary) -> None:
        """Called once, before the first step; for terms that need something of the vocabulary.

        Raises:
            ValueError: If the term cannot work with these number tokens.
        """
        return

    @abstractmethod
    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The term's value at each of the N positions asked for, shape (N,), float32."""


def check_positive(value: float | None, key: str, or_null: bool = True) -> None:
    if value is None and or_null:
        return
    if value is None or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"{key} must be a positive number{' or null' if or_null else ''}, got {value}"
        )


def _spread(values: Tensor) -> Tensor:
    """() the largest distance between two of the values."""
    return values.max() - values.min()


def _scale_to(largest_distance: float | None, spread: Tensor) -> Tensor | float:
    """Factor that makes the largest distance, `spread`, what was asked for."""
    if largest_distance is None:
        return 1.0
    # One value only: every distance is 0 and stays 0.
    return largest_distance / torch.where(spread > 0, spread, 1.0)


def _reweighed(loss: Tensor, worst: Tensor | float, statistics: TokenStatistics) -> Tensor:
    """The loss with mass on text tokens costing a little more than the worst number."""
    mass = statistics.number_mass
    return mass * loss + (1 - mass) * 1.01 * worst


def _by_place(loss: Tensor, base: float, statistics: TokenStatistics) -> Tensor:
    """The loss times `base ** place`, the power kept between 1e-30 and 1e30."""
    if base == 1.0:
        return loss
    most = math.floor(30 / abs(math.log10(base)))
    return loss * torch.pow(base, statistics.place.clamp(-most, most).to(loss.dtype))


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
    """NTL-WAS: `(sum_k q_k d(v_k, y)^p)^(1/p)`, the Wasserstein distance to all mass on the label.

    With the defaults, p = 1 and d(v, y) = |v - y|, it is the paper's `sum_k q_k |v_k - y|`. Exact
    for any token values: unevenly spaced, unsorted, repeated. Zero if and only if all number mass
    lies on tokens of the label's value (at distance 0 of it, if `modular`). With `target_sigma` the
    target is no longer the label alone but a Gaussian around it, and the loss is zero if and only
    if each value has the mass that the Gaussian gives it.

    Mass on text tokens does not count, unless `reweigh` is set. A sum over numbers, divided by
    their count (`averaged_over`).

    Source: "Regress, Don't Guess", arXiv 2411.02083, NTL-WAS; equals `ntloss.NTLoss` with the same
    `reweigh` and `squash_factor` (which reweighs by default; the paper does not).

    The label is 4, half of the mass on 3 and half on 9:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 10), -torch.inf)
    >>> logits[0, [3, 9]] = 0.0
    >>> def value(term):
    ...     return round(Objective([term], digits)(logits, torch.tensor([4])).value.item(), 4)
    >>> value(Wasserstein(weight=1.0))             # 0.5 * 1 + 0.5 * 5
    3.0
    >>> value(Wasserstein(weight=1.0, power=2))    # sqrt(0.5 * 1 + 0.5 * 25)
    3.6056
    >>> value(Wasserstein(weight=1.0, cost="log"))   # 0.5 * log(5 / 4) + 0.5 * log(10 / 5)
    0.4581
    >>> value(Wasserstein(weight=1.0, cost="modular", modulus=8))   # 0.5 * 1 + 0.5 * 3
    2.0
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
    """Make mass on text tokens cost 1.01 times the largest distance. `NumberMass` is the smooth
    alternative."""
    power: float = 1.0
    """Exponent p of the p-Wasserstein distance, at least 1: the larger, the more the farthest mass
    counts. Above 1 the last traces of mass on wrong numbers weigh more: a share e of it at distance
    d costs `e^(1/p) d`."""
    cost: Cost = "absolute"
    """Distance between two numbers. `absolute`: their difference. `log`: the difference of their
    orders of magnitude, `sign(v) log(1 + |v|)`. `modular`: on a circle of circumference `modulus`,
    for what starts anew: 10 for the last digit, 24 for hours, 360 for degrees."""
    modulus: float | None = None
    """Circumference of the circle for `cost: modular`."""
    target_sigma: float | None = None
    """Standard deviation, in token values, of a Gaussian around the label that takes its place as
    the target; see `gaussian_target`. null: the target is the label alone."""
    place_base: float = 1.0
    """A digit's loss is multiplied by `place_base ** place`: place 0 for ones, 1 for tens, -1 for
    tenths, and 0 for a token that is a whole number by itself, such as `-3`. 1: all places alike;
    10: by what the digit is worth, which leaves the last digits of long numbers next to nothing.
    The power stays between 1e-30 and 1e30."""

    def __post_init__(self) -> None:
        for key in ("largest_distance", "modulus", "target_sigma"):
            check_positive(getattr(self, key), f"Wasserstein.{key}")
        check_positive(self.place_base, "Wasserstein.place_base", or_null=False)
        if not (math.isfinite(self.power) and self.power >= 1):
            raise ValueError(
                f"Wasserstein.power must be at least 1, got {self.power}; below 1 it is no distance"
            )
        if self.cost not in get_args(Cost):
            raise ValueError(
                f"Wasserstein.cost must be one of {', '.join(get_args(Cost))}, got {self.cost!r}"
            )
        if (self.cost == "modular") != (self.modulus is not None):
            raise ValueError(
                f"Wasserstein.cost={self.cost!r} with modulus={self.modulus}: the modular cost "
                "needs a modulus, and no other cost has one"
            )
        if self.squash_factor is not None:
            self._check_squash_factor(self.squash_factor)
        if self.target_sigma is not None:
            for key, neutral, given in (
                ("power", 1.0, self.power),
                ("squash_factor", None, self.squash_factor),
                ("modulus", None, self.modulus),
            ):
                if given != neutral:
                    raise ValueError(
                        f"Wasserstein.target_sigma={self.target_sigma} and {key}={given}: the "
                        "distance to a soft target is made for power 1 on a line, not squeezed; "
                        "give one of the two"
                    )

    def _check_squash_factor(self, factor: float) -> None:
        if isinstance(factor, bool) or not (math.isfinite(factor) and factor >= 1):
            raise ValueError(
                f"Wasserstein.squash_factor must be a number of at least 1, or null, got {factor}"
            )
        if self.largest_distance is not None:
            raise ValueError(
                f"Wasserstein.largest_distance={self.largest_distance} and squash_factor="
                f"{factor} both set the largest distance; give one of the two"
            )

    @property
    def name(self) -> str:
        """`ntl_was`, or `ntl_w<p>`; then `_log`, `_modular`, `_soft` for what is set."""
        parts = ["ntl_was" if self.power == 1.0 else f"ntl_w{self.power:g}"]
        if self.cost != "absolute":
            parts.append(self.cost)
        if self.target_sigma is not None:
            parts.append("soft")
        return "_".join(parts)

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The distance between the numbers' probabilities and the target, (N,)."""
        points = self._points(statistics.number_values)
        if self.target_sigma is None:
            loss = self._to_label(statistics, points)
        else:
            target = gaussian_target(statistics, self.target_sigma)
            loss = wasserstein_distance(statistics.number_probabilities, target, points)
        worst: Tensor | float | None = self.squash_factor
        if worst is None and (self.reweigh or self.largest_distance is not None):
            farthest = self._farthest(points)
            scale = _scale_to(self.largest_distance, farthest)
            loss, worst = loss * scale, farthest * scale
        if self.reweigh and worst is not None:
            loss = _reweighed(loss, worst, statistics)
        return _by_place(loss, self.place_base, statistics)

    def _to_label(self, statistics: TokenStatistics, points: Tensor) -> Tensor:
        """(N,) the distance to all mass on the label."""
        distances = self._distances(points, points.index_select(0, statistics.label_index))
        if self.squash_factor is not None:
            distances = self._squashed(distances, points, self.squash_factor)
        if self.power == 1.0:
            return (statistics.number_probabilities * distances).sum(-1)
        # In logarithms d^p cannot overflow, and the gradient is finite also at 0.
        logs = statistics.number_log_probabilities + self.power * distances.log()
        return (logs.clamp_min(_LOG_OF_NOTHING).logsumexp(-1) / self.power).exp()

    def _points(self, values: Tensor) -> Tensor:
        """(K,) the token values on the line, or round the circle, where distances are taken."""
        return values.sign() * values.abs().log1p() if self.cost == "log" else values

    def _distances(self, points: Tensor, labels: Tensor) -> Tensor:
        """(N, K) distances of the points (K,) from the labels (N,)."""
        # In place where it can be: another (N, K) would double the time.
        distances = (points - labels.unsqueeze(-1)).abs_()
        if self.modulus is None:
            return distances
        distances = distances.remainder_(self.modulus)
        return torch.minimum(distances, self.modulus - distances)

    def _farthest(self, points: Tensor) -> Tensor:
        """() the largest distance between two number tokens."""
        return _spread(points) if self.modulus is None else self._distances(points, points).max()

    def _nearest(self, points: Tensor) -> Tensor:
        """() the smallest distance above 0 between two number tokens; infinite if there is none."""
        if self.modulus is None:
            distances = points.sort().values.diff()
        else:
            distances = self._distances(points, points).flatten()
        distances = torch.where(distances > 0, distances, torch.inf)
        return torch.cat([distances, distances.new_full((1,), torch.inf)]).min()

    def _squashed(self, distances: Tensor, points: Tensor, factor: float) -> Tensor:
        farthest = self._farthest(points)
        nearest = torch.minimum(self._nearest(points), farthest)
        # With one distance only, it is the nearest.
        width = torch.where(farthest > nearest, farthest - nearest, 1.0)
        is_wrong = distances > 0
        squashed = distances.sub_(nearest).mul_((factor - 1) / width).add_(1.0)
        return torch.where(is_wrong, squashed, 0.0)


@dataclass(frozen=True)
class ExpectedValue(LossTerm):
    """NTL-MSE, NTL-MAE, NTL-Huber: the error of the expected value, `|sum_k q_k v_k - y|^p`.

    Zero wherever the mean is right, also for two wrong tokens on both sides of the label (half on 4
    and half on 6 costs nothing for 5): `Wasserstein` has no such blind spot and is the default.

    Mass on text tokens does not count, unless `reweigh` is set. A sum over numbers, divided by
    their count (`averaged_over`).

    Source: "Regress, Don't Guess", arXiv 2411.02083, NTL-MSE / NTL-L_p; equals
    `ntloss.NTLossDotProduct` with the same `reweigh` (which reweighs by default).

    The label is 4, half of the mass on 3 and half on 9, so the mean is 6:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 10), -torch.inf)
    >>> logits[0, [3, 9]] = 0.0
    >>> terms = [ExpectedValue(), ExpectedValue(power=1), ExpectedValue(huber_delta=1)]
    >>> Objective(terms, digits)(logits, torch.tensor([4])).parts   # 2^2, 2, 1 * (2 - 1 / 2)
    {'ntl_mse': tensor(4.), 'ntl_mae': tensor(2.), 'ntl_huber': tensor(1.5000)}
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
    """Make mass on text tokens cost 1.01 times the largest loss that a number can have.
    `NumberMass` is the smooth alternative."""
    place_base: float = 1.0
    """A digit's loss is multiplied by `place_base ** place`, as in `Wasserstein`."""

    def __post_init__(self) -> None:
        check_positive(self.largest_distance, "ExpectedValue.largest_distance")
        check_positive(self.huber_delta, "ExpectedValue.huber_delta")
        check_positive(self.place_base, "ExpectedValue.place_base", or_null=False)
        if not (math.isfinite(self.power) and self.power >= 1):
            raise ValueError(
                f"ExpectedValue.power must be at least 1, got {self.power}; below 1 the gradient "
                "is unbounded at the right answer"
            )
        if self.huber_delta is not None and self.power != 2.0:
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
        error = (statistics.number_probabilities * differences).sum(-1)
        scale = _scale_to(self.largest_distance, _spread(values))
        loss = self._loss(error * scale)
        if self.reweigh:
            loss = _reweighed(loss, self._loss(_spread(values) * scale), statistics)
        return _by_place(loss, self.place_base, statistics)

    def _loss(self, error: Tensor) -> Tensor:
        if self.huber_delta is not None:
            return torch.nn.functional.huber_loss(
                error, torch.zeros_like(error), reduction="none", delta=self.huber_delta
            )
        return error.square() if self.power == 2.0 else error.abs() ** self.power


@dataclass(frozen=True)
class NumberMass(LossTerm):
    """`-log m`: minus the log of the probability m that a number follows where one does.

    Zero if and only if all mass of the whole softmax lies on number tokens, whichever. It tells
    text from numbers and nothing else, beside terms that only tell numbers apart: they see no text
    token, and a large weight on them can drown what cross entropy says about text. Cross entropy
    at a number is this plus the cross entropy among the numbers, so a weight w makes the choice
    between number and text count 1 + w times.

    The smooth alternative to `reweigh` for mass on text tokens. The gradient of `reweigh` is
    proportional to m (1 - m) and to the largest distance: it vanishes where no mass is on numbers,
    which is where it is needed, and grows with the values. Here the gradient is p_j for a text
    token and -q_k (1 - m) for a number token (p the whole softmax): at most 1 in every logit, for
    any values, and largest where m is 0.

    A sum over numbers, divided by their count (`averaged_over`). Source: this package.

    The label is a number, and a quarter of the mass is on numbers:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=40)
    >>> result = Objective([NumberMass()], digits)(torch.zeros(1, 40), torch.tensor([4]))
    >>> result.parts["number_mass"]   # log(4)
    tensor(1.3863)
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by: `numbers` or `tokens`."""

    @property
    def name(self) -> str:
        """`number_mass`."""
        return "number_mass"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """Minus the log of the mass on number tokens, (N,)."""
        # The difference of two rounded logarithms may be a little below 0.
        return (-statistics.log_number_mass).clamp_min(0.0)


@dataclass(frozen=True)
class RegressionAware(LossTerm):
    """RAFT: `(sum_k p_k v_k - y)^2`, the squared error of the expected answer.

    The sum runs over a list of answers, each one number token, and p is the whole softmax, not made
    to sum to 1 over them: mass on text tokens, or on numbers outside the list, counts as the answer
    0 and so pulls the expectation towards 0. Trains the model for the decision rule that answers
    with the expected value.

    Zero wherever the expectation is right, which is not only where all mass is on the label: half
    on 8 and half on text costs nothing for 4, and for 0 all mass may be on text. So it belongs
    beside cross entropy. A sum over numbers, divided by their count (`averaged_over`).

    Source: "Better autoregressive regression with LLMs via regression-aware fine-tuning", ICLR 2025
    (OpenReview xGs7Ch3Vyo); beside cross entropy: TRACT, arXiv 2503.04381. Both score an answer of
    one token; answers of several tokens, which they also score whole, are here scored token by
    token.

    The label is 4; a quarter of the mass on 3, a quarter on 9, and half on text:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=12)
    >>> logits = torch.full((1, 12), -torch.inf)
    >>> logits[0, [3, 9, 10, 11]] = 0.0
    >>> def parts(term):
    ...     return Objective([term], digits)(logits, torch.tensor([4])).parts
    >>> parts(RegressionAware())   # (3 / 4 + 9 / 4 - 4)^2
    {'regression_aware': tensor(1.)}
    >>> parts(RegressionAware(values=(1, 2, 3, 4, 5)))   # (3 / 4 - 4)^2
    {'regression_aware': tensor(10.5625)}
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by: `numbers` or `tokens`."""
    values: tuple[float, ...] | None = None
    """The answers, by value, such as `[1, 2, 3, 4, 5]` for a rating; each must be the value of a
    number token. null: all number tokens."""
    largest_distance: float | None = None
    """Errors are scaled so that the largest distance between two answers is this. null: not
    scaled."""

    def __post_init__(self) -> None:
        check_positive(self.largest_distance, "RegressionAware.largest_distance")
        if self.values is None:
            return
        object.__setattr__(self, "values", tuple(self.values))
        if len(set(self.values)) < 2 or not all(map(math.isfinite, self.values)):
            raise ValueError(
                "RegressionAware.values must hold at least two different finite numbers, or be "
                f"null, got {list(self.values)}"
            )

    @property
    def name(self) -> str:
        """`regression_aware`."""
        return "regression_aware"

    def check(self, vocabulary: NumberVocabulary) -> None:
        """Every answer of the list must be the value of a number token."""
        # Compared as the statistics hold them, in float32.
        token_values = torch.tensor(vocabulary.values, dtype=torch.float32)
        for answer in self.values or ():
            if not (token_values == answer).any():
                raise ValueError(
                    f"RegressionAware.values holds {answer:g}, but no number token has this value "
                    f"(they go from {min(vocabulary.values):g} to {max(vocabulary.values):g}); "
                    "leave it out, or choose number_tokens that have it"
                )

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The squared error of the expected answer, (N,)."""
        values = statistics.number_values
        spread = _spread(values)
        if self.values is not None:
            # One by one: a tensor of the list would be copied to the device in every step.
            is_answer = torch.zeros_like(values, dtype=torch.bool)
            for answer in self.values:
                is_answer = is_answer | (values.float() == answer)
            values = torch.where(is_answer, values, 0.0)
            spread = spread.new_full((), max(self.values) - min(self.values))
        expected = statistics.number_mass * (statistics.number_probabilities * values).sum(-1)
        error = expected - statistics.label_values
        return (error * _scale_to(self.largest_distance, spread)).square()
