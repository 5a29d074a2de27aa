"""Losses with soft targets, as their definitions read: loops, float64, scipy's normal distribution.

Written from the formulas, on the text of the tokens; no code shared with ours.
"""

import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np
from scipy.stats import norm

SPACE = "▁"


def bare(text):
    return text.removeprefix(SPACE)


def value(text):
    return float(bare(text))


def zero_first(text):
    return re.fullmatch("0[0-9]+", bare(text)) is not None


def fits(candidate, label, same_length=False):
    """Whether a token could be written in the place of the label.

    Args:
        candidate: A number token.
        label: The token that is written.
        same_length: Ask for as many digits as the label has, as inside a number.
    """
    if candidate.startswith(SPACE) != label.startswith(SPACE):
        return False
    if same_length or zero_first(label):
        return bare(candidate).isdigit() and len(bare(candidate)) == len(bare(label))
    return not zero_first(candidate)


def shares(masses):
    """Token -> mass, made to sum to 1."""
    total = math.fsum(masses.values())
    return {text: mass / total for text, mass in masses.items()}


def gaussian(label, numbers, sigma):
    """numbers: texts of the number tokens."""
    y = value(label)
    return shares(
        {
            k: math.exp(-((value(k) - y) ** 2) / (2 * sigma**2)) if fits(k, label) else 0.0
            for k in numbers
        }
    )


def normal_mass(low, high):
    """Of the standard normal distribution; arrays."""
    low, high = np.asarray(low), np.asarray(high)
    return np.where(low > 0, norm.sf(low) - norm.sf(high), norm.cdf(high) - norm.cdf(low))


def digit_tree(tokens, at, numbers, sigma):
    """The Gaussian's mass on every number that begins with the true digits, summed by token.

    Args:
        tokens: The digit tokens of the written number, as pairs of a text and a place.
        at: Which of them the target is for.
        numbers: Texts of the number tokens.
        sigma: In units of the number.
    """
    unit = 10.0 ** tokens[-1][1]
    before, label, behind = tokens[:at], tokens[at][0], tokens[at + 1 :]
    y = int("".join(bare(text) for text, _ in tokens))
    prefix = "".join(bare(text) for text, _ in before)
    num_behind = sum(len(bare(text)) for text, _ in behind)
    lowest = int(prefix + "0" * (len(bare(label)) + num_behind))
    written = np.arange(lowest, lowest + 10 ** (len(bare(label)) + num_behind))
    cells = normal_mass((written - 0.5 - y) * unit / sigma, (written + 0.5 - y) * unit / sigma)
    masses = {}
    for k in numbers:
        masses[k] = 0.0
        if fits(k, label, same_length=True):
            first = int(bare(k)) * 10**num_behind
            masses[k] = math.fsum(cells[first : first + 10**num_behind])
    return shares(masses)


def histogram(label, numbers, sigma):
    """One token is the whole number: every value owns the line half way to its neighbours."""
    owners = [k for k in numbers if fits(k, label)]
    holders = Counter(value(k) for k in owners)
    values = sorted(holders)
    masses = dict.fromkeys(numbers, 0.0)
    if len(values) == 1:
        return shares(masses | dict.fromkeys(owners, 1.0))
    ends = [(a + b) / 2 for a, b in pairwise(values)]
    ends = [2 * values[0] - ends[0], *ends, 2 * values[-1] - ends[-1]]
    cells = normal_mass(
        *(np.array(side) / sigma - value(label) / sigma for side in (ends[:-1], ends[1:]))
    )
    cell_of = dict(zip(values, cells, strict=True))
    for k in owners:
        masses[k] = float(cell_of[value(k)]) / holders[value(k)]
    return shares(masses)


def hl_gauss(label, number, at, numbers, sigma):
    """At a token of a written number of (text, place) tokens, or of none (None)."""
    if number is not None and len(number) > 1:
        return digit_tree(number, at, numbers, sigma)
    if zero_first(label):
        return digit_tree([(label, 0)], 0, numbers, sigma)
    return histogram(label, numbers, sigma)


def log_softmax(scores):
    largest = max(scores.values())
    total = math.fsum(math.exp(z - largest) for z in scores.values())
    return {text: z - largest - math.log(total) for text, z in scores.items()}


def cross_entropy(target, scores):
    """target: number token -> mass; scores: token -> logit, over the whole vocabulary."""
    logs = log_softmax(scores)
    return -math.fsum(mass * logs[text] for text, mass in target.items() if mass > 0)


def divergence(target, scores):
    """Of the softmax over the number tokens from the target."""
    logs = log_softmax({text: scores[text] for text in target})
    return math.fsum(m * (math.log(m) - logs[text]) for text, m in target.items() if m > 0)


def discretized_distance(label, numbers, scores, temperature):
    y = value(label)
    distances = {k: (value(k) - y) ** 2 / temperature for k in numbers if fits(k, label)}
    logs = log_softmax({k: -d for k, d in distances.items()})
    target = {k: math.exp(logs[k]) if k in logs else 0.0 for k in numbers}
    return divergence(target, scores)


def derivative(function, scores, text, step=1e-5):
    """Of a function of {token: logit}, in one of the logits, by central differences."""
    sides = [function({**scores, text: scores[text] + by}) for by in (step, -step)]
    return (sides[0] - sides[1]) / (2 * step)
