"""The losses as their formulas read, in Python loops over float64; no code shared with ours."""

import math

IGNORED = -100


def _softmax(scores):
    largest = max(scores)
    if largest == -math.inf:
        return [math.nan] * len(scores)
    powers = [math.exp(s - largest) for s in scores]
    return [p / math.fsum(powers) for p in powers]


def cross_entropy(logits, label):
    largest = max(logits)
    log_sum = math.log(math.fsum(math.exp(s - largest) for s in logits)) + largest
    return log_sum - logits[label]


def wasserstein(logits, label, values):
    """values: token id -> number."""
    ids = list(values)
    q = _softmax([logits[i] for i in ids])
    return math.fsum(p * abs(values[i] - values[label]) for p, i in zip(q, ids, strict=True))


def expected_value(logits, label, values, power=2.0):
    ids = list(values)
    q = _softmax([logits[i] for i in ids])
    mean = math.fsum(p * values[i] for p, i in zip(q, ids, strict=True))
    return abs(mean - values[label]) ** power


def huber(logits, label, values, delta):
    error = expected_value(logits, label, values, power=1.0)
    return error**2 / 2 if error <= delta else delta * (error - delta / 2)


def mean_over_numbers(term, logits, labels, values, **settings):
    """logits: list of rows; mean of a term over the rows whose label is a number."""
    rows = [(z, y) for z, y in zip(logits, labels, strict=True) if y in values]
    if not rows:
        return 0.0
    return math.fsum(term(z, y, values, **settings) for z, y in rows) / len(rows)


def mean_cross_entropy(logits, labels):
    rows = [(z, y) for z, y in zip(logits, labels, strict=True) if y != IGNORED]
    return math.fsum(cross_entropy(z, y) for z, y in rows) / len(rows) if rows else 0.0
