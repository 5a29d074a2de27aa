"""Losses of whole written numbers, in Python loops over exact fractions and float64.

Written from the formulas, on the text of the tokens; no code shared with ours.
"""

import math
import re
from fractions import Fraction

_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def written_numbers(tokens):
    """The numbers in a row of token texts, None where there is no label.

    Returns:
        For each number its digit tokens, as pairs of a position in the row and a place.
    """
    text, position_of_character = "", []
    for position, token in enumerate(tokens):
        token = "|" if token is None else token
        text += token
        position_of_character += [position] * len(token)
    numbers = []
    for match in _NUMBER.finditer(text):
        place = len(match.group().split(".")[0].replace(",", "")) - 1
        place_of_token = {}
        for i in range(match.start(), match.end()):
            if text[i].isdigit():
                place_of_token[position_of_character[i]] = place
                place -= 1
        numbers.append(sorted(place_of_token.items()))
    return numbers


def softmax(scores):
    largest = max(scores)
    powers = [math.exp(s - largest) for s in scores]
    return [p / math.fsum(powers) for p in powers]


def _worth(place):
    return Fraction(10) ** place


def _total(digits, of_digit):
    """Sum of 10^place times each digit's value, exactly."""
    total = Fraction()
    for (_, place), value in zip(digits, of_digit, strict=True):
        total += _worth(place) * Fraction(value)
    return total


def _mean(scores, values):
    return math.fsum(p * v for p, v in zip(softmax(scores), values, strict=True))


def number_level(logits, digits, labels, values):
    """logits: row -> K scores; digits: as in `written_numbers`; labels: row -> true value."""
    x = _total(digits, [_mean(logits[i], values) for i, _ in digits])
    y = _total(digits, [labels[i] for i, _ in digits])
    return float(abs(x - y) / (x + y + _worth(digits[-1][1])))


def earth_mover_place(
    logits, digits, labels, values, *, a=1.0, b=0.2, c=0.2, base=1.2, temperature=0.1, at=None
):
    """At the scores `at`, the likeliest digits are those at `logits`: only their means move.

    The derivative in `at` is so the straight-through gradient.
    """
    at = logits if at is None else at
    moved, said = [], []
    for i, place in digits:
        q = softmax(at[i])
        moved.append(
            base**place * math.fsum(p * abs(v - labels[i]) for p, v in zip(q, values, strict=True))
        )
        likeliest = max(range(len(values)), key=lambda k, i=i: logits[i][k])
        means = [_mean([z / temperature for z in scores[i]], values) for scores in (at, logits)]
        said.append(values[likeliest] + means[0] - means[1])
    x = float(_total(digits, said))
    y = float(_total(digits, [labels[i] for i, _ in digits]))
    return (
        a * math.fsum(moved) / len(moved)
        + b * abs(x - y) / (max(x, y) + 1)
        + c * math.log((max(x, y) + 1) / (min(x, y) + 1))
    )


def digit_entropy(logits, place, label, values):
    """At one digit; logits: K scores."""
    weight = 2 * (place + 1) if place >= 0 else 1.02 ** (place - 1)
    total = 0.0
    for q, z, v in zip(softmax(logits), logits, values, strict=True):
        if q > 0:
            chance = 1 / (1 + math.exp(-z))
            total -= q * math.log(chance if v == label else 1 - chance)
    return weight * total / len(values)


def derivative(function, row, column, step=1e-5):
    """Of a function of {row: list of scores}, in one of the scores, by central differences."""

    def slope(rows):
        results = []
        for by in (step, -step):
            moved = {i: list(scores) for i, scores in rows.items()}
            moved[row][column] += by
            results.append(function(moved))
        return (results[0] - results[1]) / (2 * step)

    return slope
