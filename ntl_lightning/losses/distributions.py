"""Distributions over the number tokens: a soft target, and the distance between two of them.

N label positions, K number tokens.
"""

import torch
from torch import Tensor

from ntl_lightning.losses.token_statistics import TokenStatistics

__all__ = ["gaussian_target", "has_leading_zero", "wasserstein_distance", "written_alike"]


def gaussian_target(statistics: TokenStatistics, sigma: float) -> Tensor:
    """A soft label: mass around the label's value, `g_k ~ exp(-(v_k - y)^2 / (2 sigma^2))`.

    Normalised over the number tokens that are written as the label is: where a vocabulary has both
    `5` and `▁5`, a label inside a word gives mass to `4`, `5` and `6`, and none to `▁5`, which the
    text cannot go on with. Where it has both `5` and `005`, the label `5` gives none to `005`, and
    the label `005` to tokens of three digits only. Where all tokens are written alike, it is the
    paper's target.

    Source: the Gaussian smoothing of "Regress, Don't Guess", arXiv 2411.02083.

    Args:
        statistics: N positions whose label is a number token.
        sigma: Standard deviation in units of the token values, above 0. Much below the distance to
            the next value, the target is the label alone.

    Returns:
        (N, K) probabilities, each row with the sum 1; no gradient.
    """
    differences = statistics.number_values - statistics.label_values.unsqueeze(-1)
    zero_first = has_leading_zero(statistics).index_select(0, statistics.label_index)
    scores = differences.div_(sigma).square_().mul_(-0.5)
    scores = scores.masked_fill_(~written_alike(statistics, zero_first), -torch.inf)
    return torch.softmax(scores, dim=-1)


def has_leading_zero(statistics: TokenStatistics) -> Tensor:
    """(K,) bool: the number token is a run of digits like `05` or `00`, but not `0`."""
    digits = statistics.number_digits
    least = torch.pow(10.0, (digits - 1).to(statistics.number_values.dtype))
    # `pow` may be a little off.
    return (digits > 1) & (statistics.number_values < least - 0.5)


def written_alike(statistics: TokenStatistics, same_length: Tensor) -> Tensor:
    """(N, K) bool: the number tokens that could be written in the place of the label.

    They begin a word if and only if the label does. Where `same_length`, (N,) bool, they have as
    many digits as the label; elsewhere any number of them, but no leading zero.
    """
    label = statistics.label_index
    starts_word, digits = statistics.number_starts_word, statistics.number_digits
    as_long = digits == digits.index_select(0, label).unsqueeze(-1)
    alike = torch.where(same_length.unsqueeze(-1), as_long, ~has_leading_zero(statistics))
    return alike & (starts_word == starts_word.index_select(0, label).unsqueeze(-1))


def wasserstein_distance(probabilities: Tensor, target: Tensor, values: Tensor) -> Tensor:
    """The 1-Wasserstein distance between two distributions over the same values.

    `sum_j |P_j - T_j| (u_{j+1} - u_j)` over the values u in ascending order, P and T the cumulated
    probabilities: exact on values that are unevenly spaced, unsorted or repeated. Not negative; 0
    if and only if each value has the same mass in both. In float32 the error is about 1e-7 of the
    largest distance between two values.

    Args:
        probabilities: (N, K) float, each row with the sum 1.
        target: (N, K) float, the same.
        values: (K,) float.

    Returns:
        (N,) distances, differentiable in both distributions.

    Half of the mass has 3 to go, the other half is in place:

    >>> half_astray = torch.tensor([[0.5, 0.0, 0.5]])
    >>> all_on_the_first = torch.tensor([[1.0, 0.0, 0.0]])
    >>> wasserstein_distance(half_astray, all_on_the_first, torch.tensor([4.0, 9.0, 1.0]))
    tensor([1.5000])
    """
    ascending, order = values.sort()
    # A last gap of 0 is cheaper than cutting the last column off.
    gaps = torch.cat([ascending.diff(), ascending.new_zeros(1)])
    cumulated = (probabilities - target).index_select(-1, order).cumsum(-1)
    return (cumulated.abs() * gaps).sum(-1)
