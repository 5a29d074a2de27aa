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


def distance(a, b, cost="absolute", modulus=None):
    if cost == "log":
        a, b = (math.copysign(math.log1p(abs(v)), v) for v in (a, b))
    if cost == "modular":
        steps = math.fmod(abs(a - b), modulus)
        return min(steps, modulus - steps)
    return abs(a - b)


def wasserstein_to_label(
    logits, label, values, power=1.0, cost="absolute", modulus=None, largest=None, squash=None
):
    """The p-th root of the mean of the distances' p-th powers, any cost, scaled or squeezed."""
    ids = list(values)
    q = _softmax([logits[i] for i in ids])
    pairs = [distance(values[i], values[j], cost, modulus) for i in ids for j in ids]
    nearest, farthest = min(d for d in pairs if d > 0), max(pairs)

    def price(d):
        if squash is not None:
            return 0.0 if d == 0 else 1 + (squash - 1) * (d - nearest) / (farthest - nearest)
        return d if largest is None else d * largest / farthest

    costs = [price(distance(values[i], values[label], cost, modulus)) for i in ids]
    return math.fsum(p * c**power for p, c in zip(q, costs, strict=True)) ** (1 / power)


def gaussian(label, values, sigma, starts_word=None):
    """Token id -> mass; none on tokens that start a word where the label does not, or reversed."""
    starts_word = starts_word or set()
    powers = {
        i: math.exp(-((v - values[label]) ** 2) / (2 * sigma**2))
        for i, v in values.items()
        if (i in starts_word) == (label in starts_word)
    }
    return {i: powers.get(i, 0.0) / math.fsum(powers.values()) for i in values}


def transport(supply, demand, places):
    """Cost of moving one distribution into the other on a line: the lowest open ends are joined."""
    order = sorted(range(len(places)), key=lambda k: places[k])
    have, want = ([masses[k] for k in order] for masses in (supply, demand))
    i = j = 0
    moved = []
    while i < len(order) and j < len(order):
        mass = min(have[i], want[j])
        moved.append(mass * abs(places[order[i]] - places[order[j]]))
        have[i] -= mass
        want[j] -= mass
        if have[i] <= want[j]:
            i += 1
        else:
            j += 1
    return math.fsum(moved)


def wasserstein_to_gaussian(logits, label, values, sigma, cost="absolute", largest=None):
    ids = list(values)
    q = _softmax([logits[i] for i in ids])
    target = gaussian(label, values, sigma)
    places = [math.copysign(distance(values[i], 0.0, cost), values[i]) for i in ids]
    scale = 1.0 if largest is None else largest / (max(places) - min(places))
    return transport(q, [target[i] for i in ids], places) * scale


def number_mass(logits, label, values):
    mass = math.fsum(_softmax(logits)[i] for i in values)
    return math.inf if mass == 0 else -math.log(mass)


def regression_aware(logits, label, values, answers=None, largest=None):
    p = _softmax(logits)
    told = [i for i in values if answers is None or values[i] in answers]
    spread = max(values[i] for i in told) - min(values[i] for i in told)
    error = math.fsum(p[i] * values[i] for i in told) - values[label]
    return (error * (1.0 if largest is None else largest / spread)) ** 2


def reweighed(term, worst):
    """The term with mass on text tokens costing 1.01 times the worst number."""

    def loss(logits, label, values, **settings):
        mass = math.fsum(_softmax(logits)[i] for i in values)
        return mass * term(logits, label, values, **settings) + (1 - mass) * 1.01 * worst

    return loss


def gradient(term, logits, label, values, step=1e-5, **settings):
    """Of one row, by central differences."""
    slopes = []
    for k in range(len(logits)):
        sides = []
        for move in (step, -step):
            row = list(logits)
            row[k] += move
            sides.append(term(row, label, values, **settings))
        slopes.append((sides[0] - sides[1]) / (2 * step))
    return slopes
