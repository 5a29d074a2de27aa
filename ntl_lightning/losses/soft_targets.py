"""Losses whose target is a distribution over the number tokens, in place of the label alone.

N label positions, K number tokens. At a position whose label is a number token: p the softmax over
the whole vocabulary, q that over the number tokens only, v the token values, y the label's value:

    SmoothedCrossEntropy  -sum_k g_k log p_k, g a Gaussian over the values         (GCE)
    HLGauss               -sum_k g_k log p_k, g_k the Gaussian's mass in a cell    (HL-Gauss)
    DiscretizedDistance   sum_k g_k log(g_k / q_k), g = softmax(-(v - y)^2 / tau)  (DIST2)

The first two are cross entropy with another target: where the label is text they are cross entropy
itself, mass on text tokens costs as it does there, and they take its place in the list of terms.
The third sees the number tokens only and stands beside cross entropy.

A target gives mass only to tokens that could be written in the place of the label: with a space
mark if and only if it has one, and with a leading zero (`05`) only where it has one itself or, in
`HLGauss`, is one of several tokens of a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ntl_lightning.losses.distributions import (
    gaussian_target,
    has_leading_zero,
    written_alike,
)
from ntl_lightning.losses.terms import EvaluatedAt, LossTerm, Positions, check_positive
from ntl_lightning.losses.token_statistics import TokenStatistics
from ntl_lightning.numbers.runs import LARGEST_EXPONENT

__all__ = [
    "DiscretizedDistance",
    "HLGauss",
    "SmoothedCrossEntropy",
    "gaussian_target",
    "hl_gauss_target",
]


def hl_gauss_target(statistics: TokenStatistics, sigma: float) -> Tensor:
    """A soft label for every digit of a number: the share of `N(number, sigma^2)` in its cell.

    The targets of `HLGauss`, which says what the cells are. Computed in float64 where the device
    has it. Far below the distance to the next number sigma leaves the label alone; far above the
    largest one, each token has the share that its cell has of all.

    Args:
        statistics: N positions whose label is a number token.
        sigma: Standard deviation in units of the written numbers, above 0.

    Returns:
        (N, K) probabilities, each row with the sum 1; no gradient.
    """
    dtype = statistics.rest.dtype
    label = statistics.label_index
    values = statistics.number_values.to(dtype)
    zero_first = has_leading_zero(statistics)
    in_tree = (statistics.num_digit_tokens > 1) | zero_first.index_select(0, label)
    branch = in_tree.unsqueeze(-1)

    # In units of the token: how far it is from the label, and its cell from the number on its side.
    steps = values - statistics.label_values.to(dtype).unsqueeze(-1)
    above = steps > 0
    to_lower, to_upper, unit = _around_number(statistics)
    beside = torch.where(above, to_upper.unsqueeze(-1), to_lower.unsqueeze(-1))
    form = torch.where(zero_first, 2, statistics.number_starts_word.long())
    half_below, half_above, share = _cells(values, form)
    towards = torch.where(above, half_below, half_above)
    away = torch.where(above, half_above, half_below)

    distance = steps.abs()
    # The label's own cell lies on both sides of the number: it begins behind it.
    near = torch.where(distance == 0, -to_upper.unsqueeze(-1), distance - 1 + beside)
    near = torch.where(branch, near, distance - towards)
    far = distance + torch.where(branch, beside, away)
    per_sigma = torch.where(in_tree, unit, 1.0).div_(sigma * math.sqrt(2)).unsqueeze(-1)
    mass = _between(near.mul_(per_sigma), far.mul_(per_sigma))
    mass = mass * torch.where(branch, 1.0, share)
    mass = torch.where(written_alike(statistics, in_tree), mass, 0.0)
    return (mass / mass.sum(-1, keepdim=True)).to(statistics.number_logits.dtype)


def _around_number(statistics: TokenStatistics) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the label's cell the number lies, in units of the token's place.

    Returns:
        (N,) each: the distances from the number to the lower and to the upper end of the cell,
        which add up to 1, and the unit itself.
    """
    rest = statistics.rest
    largest = LARGEST_EXPONENT[rest.dtype]
    place = statistics.place.clamp(-largest, largest).to(rest.dtype)
    finest = (statistics.last_place - statistics.place).clamp(min=-largest).to(rest.dtype)
    half = torch.pow(10.0, finest) / 2
    behind = (rest * torch.pow(10.0, -place)).clamp(0.0, 1.0)
    # Each from its own side: for a long number the difference to 1 would be lost.
    return behind + half, (1 - behind - 2 * half).clamp(min=0.0) + half, torch.pow(10.0, place)


def _cells(values: Tensor, form: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of the line that each token owns among those of its form.

    Args:
        values: (K,).
        form: (K,) int64; tokens of different forms know nothing of each other.

    Returns:
        (K,) each: how far the cell reaches below the value and above it, and the share of it that
        the token has, below 1 where several tokens have the value.
    """
    order = values.argsort(stable=True)
    order = order.index_select(0, form.index_select(0, order).argsort(stable=True))
    v, f = values.index_select(0, order), form.index_select(0, order)
    last = len(values) - 1
    index = torch.arange(len(values), device=values.device)
    changes = ((v.diff() != 0) | (f.diff() != 0)).long()
    first_alike = (index * functional.pad(changes, (1, 0))).cummax(0).values
    last_alike = torch.where(functional.pad(changes, (0, 1)) == 1, index, last)
    last_alike = last_alike.flip(0).cummin(0).values.flip(0)

    def gap(neighbour: Tensor) -> Tensor:
        at = neighbour.clamp(0, last)
        there = (neighbour == at) & (f.index_select(0, at) == f)
        return torch.where(there, (v.index_select(0, at) - v).abs(), torch.inf)

    below, above = gap(first_alike - 1), gap(last_alike + 1)
    # The outer cells reach as far outwards as inwards; one alone is the whole line.
    half_below = torch.where(below < torch.inf, below, above) / 2
    half_above = torch.where(above < torch.inf, above, below) / 2
    share = 1.0 / (last_alike - first_alike + 1).to(values.dtype)
    back = torch.empty_like(order).index_copy_(0, order, index)
    return (
        half_below.index_select(0, back),
        half_above.index_select(0, back),
        share.index_select(0, back),
    )


def _between(near: Tensor, far: Tensor) -> Tensor:
    """The integral of `2 / sqrt(pi) exp(-t^2)` from near to far, `far >= |near|`."""
    # Differences of what is small on this side of 0: those of the other function would cancel.
    tail = torch.erfc(near) - torch.erfc(far)
    return torch.where(near > 0.5, tail, torch.erf(far) - torch.erf(near))


def _cross_entropy_to(
    target: Callable[[TokenStatistics], Tensor], statistics: TokenStatistics
) -> Tensor:
    """(N,) `-sum_k g_k log p_k` with the target g where the label is a number, else -log p(label).

    Args:
        target: Function of statistics at numbers, (n, K) probabilities.
        statistics: N positions.
    """
    numbers = statistics.at_numbers()
    g = target(numbers)
    surprise = numbers.log_partition.unsqueeze(-1) - numbers.number_logits
    # An impossible token may have an infinite one: no matter, if the target does not ask for it.
    smoothed = (g * torch.where(g > 0, surprise, 0.0)).sum(-1)
    of_cells = smoothed.new_zeros(statistics.num_cells).index_copy(0, numbers.rows, smoothed)
    smoothed = of_cells.index_select(0, statistics.rows)
    return torch.where(statistics.is_number, smoothed, statistics.cross_entropy)


@dataclass(frozen=True)
class SmoothedCrossEntropy(LossTerm):
    """GCE: cross entropy with a Gaussian over the number tokens in place of a number label.

    `-sum_k g_k log p_k` with `g_k ~ exp(-(v_k - y)^2 / (2 sigma^2))` where the label is a number,
    g as in `gaussian_target`; `-log p(label)` where it is text. It takes the place of
    `CrossEntropy` in the list of terms: with both, text counts twice. The logs then lack
    `cross_entropy` and the perplexity; `CrossEntropy` with weight 0 brings them back.

    Its minimum at a number, where p is g, is not 0 but the entropy of g: with sigma 1 it is 1.42
    for the digits in the middle, 0.92 for 0 and 9. Mass on text tokens costs as in cross entropy. A
    token that has mass in the target and a logit of minus infinity makes it infinite, as the label
    does in cross entropy. Averaged over tokens.

    Smooths token by token: the tens of a number as the ones, and 9 is far from 0 also where 19 and
    20 are meant. `HLGauss` smooths the whole number.

    Source: the Gaussian cross entropy of "Regress, Don't Guess", arXiv 2411.02083; not verified
    there: whether its tables have sigma 1 or 2. Normalised over tokens written as the label is,
    where the paper has one form of every digit only.

    The label is 4 among 3, 4 and 5, which have 1/4, 1/2 and 1/4:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> three = NumberVocabulary.from_values({0: 3.0, 1: 4.0, 2: 5.0}, width=4)
    >>> logits = torch.tensor([[0.25, 0.5, 0.25, 0.0]]).log()
    >>> result = Objective([SmoothedCrossEntropy()], three)(logits, torch.tensor([1]))
    >>> result.parts["smoothed_cross_entropy"]   # g: 0.274, 0.452, 0.274; 0.548 log 4 + 0.452 log 2
    tensor(1.0731)
    """

    sigma: float = 1.0
    """Standard deviation of the Gaussian, in token values."""
    evaluated_at: ClassVar[EvaluatedAt] = "tokens"

    def __post_init__(self) -> None:
        check_positive(self.sigma, "SmoothedCrossEntropy.sigma", or_null=False)

    @property
    def name(self) -> str:
        """`smoothed_cross_entropy`."""
        return "smoothed_cross_entropy"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """Cross entropy to the Gaussian at numbers, to the label elsewhere, (N,)."""
        return _cross_entropy_to(lambda numbers: gaussian_target(numbers, self.sigma), statistics)


@dataclass(frozen=True)
class HLGauss(LossTerm):
    """HL-Gauss on whole numbers: cross entropy to a Gaussian around the number, digit by digit.

    `-sum_k g_k log p_k` where the label is a number token, with g_k the share of the Gaussian
    `N(number, sigma^2)` that lies in the cell of token k (`hl_gauss_target`); `-log p(label)` where
    it is text. It takes the place of `CrossEntropy` in the list of terms: with both, text counts
    twice. The logs then lack `cross_entropy` and the perplexity; `CrossEntropy` with weight 0
    brings them back.

    A number of several digit tokens: a written number m owns the cell `[m - u/2, m + u/2)`, u a
    unit of its last written place: 1 for `120`, 0.01 for `1.20`. A token owns the cells of all
    numbers that begin with the true digits before it and go on with the token, written with as many
    digits as the label's number. With p its place, d its distance from the label's token and r the
    value of the true digits behind, that is `[d 10^p - r - u/2, (d + 1) 10^p - r - u/2)` around the
    number. So the last digits of a number become nearly uniform where sigma is large, and a leading
    digit has mass beside it only if the number is within reach of it: 299 has 3 as well as 2 in
    front, 250 for sigma 10 only 2. The shares of the label's tokens, multiplied, are the share of
    the number itself among all of as many digits.

    What lies outside the numbers of as many digits is lost: for 103 and sigma 30 some of the mass
    is on `0`, for the numbers written `099` and below, and for 97 none is above 99. Where targets
    are not padded to one width, the leading digits near powers of ten are so taught zeros. The sign
    is not part of the number: the Gaussian is that of its absolute value, cut off below 0.

    A number of one token: the ordinary histogram loss over the number tokens. Every value owns the
    cell between the midpoints to its neighbours, the outer ones as much outwards as inwards; tokens
    of the same value share it evenly. So are taken tokens with a sign or point of their own, and
    digits that belong to no complete number. A token with a leading zero (`007`) is a number of
    several digits.

    Its minimum, where p is g, is not 0 but the entropy of g: log 10 for a last digit where sigma is
    large. Mass on text tokens costs as in cross entropy. A token that has mass in the target and a
    logit of minus infinity makes it infinite, as the label does in cross entropy. Averaged over
    tokens.

    Source: the histogram loss with a Gaussian, "Stop Regressing", arXiv 2403.03950, for one token
    (there with cells of one width). The digits of a number: this package; we know of no
    publication.

    The number is 50, its first digit 5 with 3/4 and 4 with 1/4, its second 0. For sigma 1/2 the
    first target is 0.159 on 4 (what is below 49.5, one sigma) and 0.841 on 5, the second 0.811 on
    0, 0.187 on 1 and 0.002 on 2:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    >>> logits = torch.full((1, 2, 10), -60.0)
    >>> logits[0, 0, 4:6] = torch.tensor([1.0, 3.0]).log()
    >>> logits[0, 1] = 0.0
    >>> labels = torch.tensor([[5, 0]])
    >>> statistics = Objective([HLGauss(sigma=0.5)], digits)(logits, labels).statistics
    >>> hl_gauss_target(statistics, sigma=0.5)[:, :6].round(decimals=3)
    tensor([[0.0000, 0.0000, 0.0000, 0.0000, 0.1590, 0.8410],
            [0.8110, 0.1870, 0.0020, 0.0000, 0.0000, 0.0000]])
    >>> HLGauss(sigma=0.5).per_position(statistics)   # 0.159 log 4 + 0.841 log 4/3, and log 10
    tensor([0.4620, 2.3026])
    """

    sigma: float = field(kw_only=True)
    """Standard deviation of the Gaussian, in units of the written numbers: about the noise of the
    targets, or the error that does not matter. There is no default that suits all data."""
    evaluated_at: ClassVar[EvaluatedAt] = "tokens"

    def __post_init__(self) -> None:
        check_positive(self.sigma, "HLGauss.sigma", or_null=False)

    @property
    def name(self) -> str:
        """`hl_gauss`."""
        return "hl_gauss"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """Cross entropy to the Gaussian's shares at numbers, to the label elsewhere, (N,)."""
        return _cross_entropy_to(lambda numbers: hl_gauss_target(numbers, self.sigma), statistics)


@dataclass(frozen=True)
class DiscretizedDistance(LossTerm):
    """DIST2: `KL(g || q)`, the divergence of the number probabilities from a target by distance.

    `sum_k g_k log(g_k / q_k)` with `g = softmax(-(v - y)^2 / temperature)`: the Gaussian of
    `gaussian_target` with `sigma^2 = temperature / 2`, over the tokens that are written as the
    label is. Zero if and only if q is g; so never for a sure answer. Its gradient, in each number
    logit, is q_k - g_k: at most 1.

    Mass on text tokens does not count, and cross entropy has to move it; mass on number tokens that
    are written otherwise does. A token with mass in the target and a logit of minus infinity makes
    it infinite. A sum over numbers, divided by their count (`averaged_over`).

    Source: "Teaching Metric Distance to Discrete Autoregressive Language Models" (DIST2Loss), arXiv
    2503.02379. Not verified: the authors' code was not found; that the distance of digits is
    squared and the temperature 1 is so in the comparison of "DEL: Digit Entropy Loss", arXiv
    2605.20369 (repository PolyU-VCLab/DEL), which has `place_weights`, adds the term to cross
    entropy with the factor 1, and leaves open how it averages. The weight here is that of the other
    terms.

    The label is 4 among 3, 4 and 5, which are equally likely:

    >>> from ntl_lightning.losses import Objective
    >>> from ntl_lightning.numbers.vocabulary import NumberVocabulary
    >>> three = NumberVocabulary.from_values({0: 3.0, 1: 4.0, 2: 5.0}, width=4)
    >>> result = Objective([DiscretizedDistance()], three)(torch.zeros(1, 4), torch.tensor([1]))
    >>> result.parts["discretized_distance"]   # g: 0.212, 0.576, 0.212; log 3 - entropy of g
    tensor(0.1233)
    """

    weight: float = 0.3
    """Factor of the term in the objective."""
    averaged_over: Positions = "numbers"
    """What the term's sum is divided by."""
    temperature: float = 1.0
    """The larger, the more of the target lies on numbers beside the label."""
    place_weights: bool = False
    """A digit counts by its place: the last digit of a whole number once, the one before it twice,
    and so on. Digits behind a decimal point count likewise, by themselves: 2 and 1 in `.25`."""

    def __post_init__(self) -> None:
        check_positive(self.temperature, "DiscretizedDistance.temperature", or_null=False)

    @property
    def name(self) -> str:
        """`discretized_distance`."""
        return "discretized_distance"

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The divergence, (N,)."""
        g = gaussian_target(statistics, math.sqrt(self.temperature / 2))
        excess = g.clamp_min(torch.finfo(g.dtype).tiny).log() - statistics.number_log_probabilities
        loss = (g * torch.where(g > 0, excess, 0.0)).sum(-1)
        if not self.place_weights:
            return loss
        place = statistics.place
        to_the_right = torch.where(place < 0, place - statistics.last_place, place)
        return loss * (to_the_right + 1).to(loss.dtype)
