"""Losses that know where a digit stands in its number: number level, NTIL, digit entropy.

N positions whose label is a number token, K number tokens, M cells of the label batch. A written
number is what `number_runs` finds: adjacent digit tokens with decimal point and thousands marks
among them, whose i-th digit token counts `10^place_i` times its value. Its sign is the label's: it
stands in front of the true number and of the predicted one.

All terms here see the number tokens only. Mass on text tokens neither costs nor gains anything, and
cross entropy has to move it. A number with a digit token that is no number token (or no quantity)
is passed over.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ntl_lightning.losses.terms import LossTerm, Positions
from ntl_lightning.losses.token_statistics import TokenStatistics

__all__ = ["DigitEntropy", "EarthMoverPlace", "NumberLevel"]

# Numbers are measured in units of their last place, which float32 does exactly for short ones; but
# in no less than this power of ten below their leading digit, so that none overflows.
_LEAST_UNIT = -25


def _power_of_ten(exponent: Tensor, like: Tensor) -> Tensor:
    return torch.pow(10.0, exponent.to(like.dtype))


def _unit_place(statistics: TokenStatistics) -> Tensor:
    """(N,) power of ten of the unit that a position's number is measured in."""
    return torch.maximum(statistics.last_place, statistics.top_place + _LEAST_UNIT)


def _worth(statistics: TokenStatistics) -> Tensor:
    """(N,) what the token's place counts, in units of its number.

    Digits far to the right of the unit may underflow to 0.
    """
    return _power_of_ten(statistics.place - _unit_place(statistics), statistics.label_values)


def _sum_over_number(values: Tensor, statistics: TokenStatistics) -> Tensor:
    """(N,) sum of the values (N,) over the digit tokens of the number that a position belongs to.

    Where a position belongs to none, any finite number.
    """
    of_digits = torch.where(statistics.is_digit, values, 0.0)
    sums = values.new_zeros(statistics.num_cells).index_add(0, statistics.run, of_digits)
    return sums.index_select(0, statistics.run)


@dataclass(frozen=True)
class NumberLevel(LossTerm):
    """The relative error of the whole number: `|x - y| / (x + y + u)`.

    `x = sum_i 10^place_i sum_k q_ik v_k` is the number that the digits have on average, y the
    label's number, and u one unit of its last written place: 1 for `120`, 0.01 for `1.20` (of
    numbers with more than 26 digits, 10^-25 of the leading place). In [0, 1); 0 if and only if x =
    y. As for `ExpectedValue`, that may be so for two wrong answers on both sides of the label (half
    on 4 and half on 6 costs nothing for 5), here also where one digit makes up for another. For a
    sure answer it grows with the distance from y in either direction.

    The gradient with respect to any number logit is at most 1/2 in absolute value, however long the
    number is: `|dx/dz| <= x` and `|dL/dx| = (2y + u) / (x + y + u)^2 <= 1 / (2x)`. Number tokens
    with a minus sign can cancel in x; x + y is then the mean of the absolute value plus `|y|`, and
    the bound is 2. A number token with a sign or point of its own (`-3`, `0.5`) is a number by
    itself, with the unit 1.

    Averaged over written numbers; the value stands at the number's first digit token.

    Source: `ntloss.NumberLevelLoss` 0.3.2, from the authors of "Regress, Don't Guess". With
    `reweigh=False` it has the same x and y for integers of up to 20 digits. Where it differs:

    - It has a tiny constant in place of the unit. For y = 0 every wrong answer then costs 1, and
      there is next to no gradient; here y = 0 is learned like any other number. For numbers of more
      than a few digits the unit makes no difference.
    - `float_level=True` joins digits at any point and drops it, so `12.34` counts as 1234. The
      relative error of that is the same. But `1.2.3` counts as 123, and is no number here. With
      `float_level=False`, its default, `12.34` is 12 and 34.
    - `1,234` is 1 and 234; here it is 1234. In both the sign counts for nothing.
    - From the 20th place to the left, all digits count 10^19.
    - `reweigh` (its default) adds 1.01 times the mass on text tokens, at the first digit of the
      number alone: mass that leaks behind it is free. Its documentation warns that the loss then
      explodes. It is not offered here; `NumberMass` beside this term sees every digit.

    The label is 14; the first digit is sure, the second half on 3 and half on 9, so x is 16:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 2, 10), -torch.inf)
    >>> logits[0, [0, 1, 1], [1, 3, 9]] = 0.0
    >>> result = Objective([NumberLevel()], digits)(logits, torch.tensor([[1, 4]]))
    >>> result.parts["number_level"]   # |16 - 14| / (16 + 14 + 1)
    tensor(0.0645)
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "whole_numbers"
    """What the term's sum is divided by."""
    joins_positions: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """`number_level`."""
        return "number_level"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The relative error at the first digit token of every number, 0 elsewhere, (N,)."""
        probabilities, values = statistics.number_probabilities, statistics.number_values
        labels = statistics.label_values
        worth = _worth(statistics)
        # The mean of the differences, not the difference of the mean: exact for a sure answer.
        differences = (probabilities * (values - labels.unsqueeze(-1))).sum(-1)
        sizes = (probabilities * values.abs()).sum(-1) + labels.abs()
        error = _sum_over_number(worth * differences, statistics).abs()
        size = _sum_over_number(worth * sizes, statistics)
        return torch.where(statistics.starts_number, error / (size + 1), 0.0)


@dataclass(frozen=True)
class EarthMoverPlace(LossTerm):
    """NTIL: digit-wise earth mover's distance by place, relative error and order of magnitude.

    `a mean_i(base^place_i W_i) + b |x - y| / (max(x, y) + 1) + c log((max(x, y) + 1) / (min(x, y) +
    1))` for each written number, with `W_i = sum_k q_ik |v_k - y_i|` the distance of `Wasserstein`
    at its i-th digit token, y the label's number, and x the number of the likeliest digits after a
    little Gumbel noise. x takes its gradient from the mean under `softmax((z + noise * Gumbel) /
    temperature)` (straight-through).

    Zero if and only if all number mass at every digit lies on tokens of the label's value; with
    a = 0, already where x = y. Averaged over written numbers; the value stands at the number's
    first digit token.

    The gradient has no bound: where the leading digits of x are zeros and those of the label are
    not, that of the magnitude part grows as 10^digits. Where numbers are long, clip the gradient or
    set `magnitude_weight` to 0. The weights base^place grow as well (1.2^20 is 38) and leave
    float32 at some 480 digits. In numbers of more than 25 integer digits, the 1 beside x and y is
    taken as 10^-25 of the leading place.

    The noise comes from PyTorch's global generator of the logits' device (`torch.rand_like`), in
    validation too: seed it, or set `noise` to 0, for repeatable values.

    Source: "Advancing Sequential Numerical Prediction in Autoregressive Models", arXiv 2505.13077;
    formula and constants from its public code (repository xfey/NTIL), which loops over the labels.
    Where that differs:

    - It scales the whole term to `weight` times the current cross entropy, `weight * (CE / NTIL) *
      NTIL` with the quotient held constant. Here the weight is a plain factor, as for all terms.
    - It takes W_i's mean over the digits of a row and the mean over rows of all; here every number
      counts the same.
    - It knows no decimal point and no thousands marks: `1.5` is 1 and 5. Decimal places here have
      negative exponents, also in base^place.
    - It has the ten digits only. Here x and y may have tokens with a sign of their own; max and min
      are then those of `|x|` and `|y|`, and the magnitude part is `log(1 + |x - y| / (min + 1))`,
      which is the same where the signs agree.

    The label is 14; the first digit is sure, the second has 9 with 3/4 and 4 with 1/4, so x is 19:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 2, 10), -torch.inf)
    >>> logits[0, [0, 1, 1], [1, 9, 4]] = torch.tensor([1.0, 3.0, 1.0]).log()
    >>> result = Objective([EarthMoverPlace(noise=0.0)], digits)(logits, torch.tensor([[1, 4]]))
    >>> result.parts["ntil"]   # (1.2 * 0 + 3/4 * 5) / 2 + 0.2 * 5/20 + 0.2 * log(20/15)
    tensor(1.9825)
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "whole_numbers"
    """What the term's sum is divided by."""
    distance_weight: float = 1.0
    """Factor a of the digits' distances."""
    relative_weight: float = 0.2
    """Factor b of the relative error of the whole number."""
    magnitude_weight: float = 0.2
    """Factor c of the logarithm of the two numbers' ratio."""
    place_base: float = 1.2
    """A digit's distance counts this many times that of the digit to its right."""
    temperature: float = 0.1
    """Temperature of the softmax that x takes its gradient from; the lower, the closer to x."""
    noise: float = 0.01
    """Factor of the Gumbel noise on the logits that x is read from. 0: none."""
    joins_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key in ("distance_weight", "relative_weight", "magnitude_weight", "noise"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise ValueError(
                    f"EarthMoverPlace.{key} must be 0 or more, got {getattr(self, key)}"
                )
        for key in ("place_base", "temperature"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) > 0):
                raise ValueError(
                    f"EarthMoverPlace.{key} must be a positive number, got {getattr(self, key)}"
                )

    @property
    def name(self) -> str:
        """`ntil`."""
        return "ntil"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The three parts together at the first digit token of every number, 0 elsewhere, (N,)."""
        labels = statistics.label_values
        distances = (statistics.number_values - labels.unsqueeze(-1)).abs()
        moved = (statistics.number_probabilities * distances).sum(-1)
        moved = moved * torch.pow(self.place_base, statistics.place.to(labels.dtype))
        num_digits = statistics.num_digit_tokens.clamp(min=1)

        worth = _worth(statistics)
        answers = self._answers(statistics)
        # Not the difference of the sums, which would not be exactly 0 for the right answer.
        error = _sum_over_number(worth * (answers - labels), statistics).abs()
        x = _sum_over_number(worth * answers, statistics).abs()
        y = _sum_over_number(worth * labels, statistics).abs()
        one = _power_of_ten((-_unit_place(statistics)).clamp(min=0), labels)
        loss = (
            self.distance_weight * _sum_over_number(moved, statistics) / num_digits
            + self.relative_weight * error / (torch.maximum(x, y) + one)
            + self.magnitude_weight * torch.log1p(error / (torch.minimum(x, y) + one))
        )
        return torch.where(statistics.starts_number, loss, 0.0)

    def _answers(self, statistics: TokenStatistics) -> Tensor:
        """(N,) value of the likeliest number token, with the gradient of the soft mean."""
        scores, values = statistics.number_logits, statistics.number_values
        if self.noise > 0:
            uniform = torch.rand_like(scores).clamp(min=torch.finfo(scores.dtype).tiny)
            scores = scores - self.noise * (-uniform.log()).log()
        answers = values.index_select(0, scores.argmax(-1))
        soft = torch.softmax(scores / self.temperature, dim=-1)
        mean_difference = (soft * (values - answers.unsqueeze(-1))).sum(-1)
        return answers + (mean_difference - mean_difference.detach())


@dataclass(frozen=True)
class DigitEntropy(LossTerm):
    """DEL: `w(place) / K * sum_k q_k BCE(sigmoid(z_k), [v_k = y])`.

    An entropy of the digits in which the logarithm of the probability gives way to the binary cross
    entropy of "is it this digit?": `log(1 + exp(-z_k))` for tokens of the label's value, `log(1 +
    exp(z_k))` for the others. Integer digits count `w = 2 (place + 1)`, decimals `w = 1.02^(place -
    1)`: 2 the units, 4 the tens, 0.96 the tenths.

    Never 0. It goes to 0 as the label's logit grows above 0 and all others; but also where a wrong
    digit wins among logits that all are far below 0. The level of the logits counts: unlike with
    the other terms, a constant added to all of them changes the loss. It knows no distance between
    digits. Keep cross entropy beside it.

    Averaged over number tokens; digits of an incomplete number, whose place is not known, add 0.
    Made for vocabularies of single digits. Where a digit has several tokens (`5`, `▁5`) all tokens
    of the label's value are right, and the division by K halves the loss; for tokens of several
    digits the place is that of the last one, and with K = 1000 the loss all but vanishes.

    Source: "DEL: Digit Entropy Loss for Numerical Learning of Large Language Models", arXiv
    2605.20369; formula and constants as in its public training code (repository PolyU-VCLab/DEL),
    where q has its gradient. That code has the weight 0.01 for Qwen and DeepSeek, and 0.1 for
    CodeLlama and Mistral. With the former, gradient accumulation divides cross entropy by the
    tokens of all n micro-batches but this term by the digits of its own, so that it weighs n times
    as much. Not verified: the paper's own formula, and which weight its tables were made with.

    The label is 4; the logits of 4 and 9 are 0, the others minus infinity:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 10), -torch.inf)
    >>> logits[0, [4, 9]] = 0.0
    >>> result = Objective([DigitEntropy()], digits)(logits, torch.tensor([4]))
    >>> result.parts["digit_entropy"]   # 2 / 10 * (1/2 * log(2) + 1/2 * log(2))
    tensor(0.1386)
    """

    weight: float = 0.01
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by."""

    @property
    def name(self) -> str:
        """`digit_entropy`."""
        return "digit_entropy"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The weighted entropy at every digit of a complete number, 0 elsewhere, (N,)."""
        logits, labels = statistics.number_logits, statistics.label_values
        # Impossible tokens have q = 0: no matter what stands beside it, if it is finite.
        scores = torch.where(logits == -torch.inf, 0.0, logits)
        is_right = statistics.number_values == labels.unsqueeze(-1)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(
            scores, is_right.to(scores.dtype), reduction="none"
        )
        place = statistics.place.to(labels.dtype)
        weight = torch.where(place >= 0, 2 * (place + 1), torch.pow(1.02, place - 1))
        loss = weight * (statistics.number_probabilities * entropy).mean(-1)
        return torch.where(statistics.is_digit, loss, 0.0)
