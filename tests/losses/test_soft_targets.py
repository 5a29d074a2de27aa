"""Losses with soft targets against brute force over all written numbers, and their properties."""

import math
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise

import jsonargparse
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from ntl_lightning.losses import (
    CrossEntropy,
    DiscretizedDistance,
    HLGauss,
    LossTerm,
    Objective,
    SmoothedCrossEntropy,
    gaussian_target,
    hl_gauss_target,
    token_statistics,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary
from tests.losses.conftest import assert_hidden_states_give_what_logits_give
from tests.oracles import soft_targets as oracle
from tests.oracles.whole_numbers import written_numbers

DIGITS = [*"0123456789"]
TEXT = ["<pad>", "a", "b", ".", ",", "-"]
UP_TO_THREE = [f"{i:0{width}}" for width in (1, 2, 3) for i in range(10**width)]
SOME_LONGER = ["007", "05", "12", "10", "34", "045", "099", "100", "999"]
SOME_LONGER += ["▁3", "▁05", "▁12", "▁045", "▁100"]
SIGNED = ["-3", "-2.5", "0", "0.5", "1", "2", "+2", "2.0", "7", "12", "-100"]
VOCABULARIES = {
    "digits": ([*TEXT, *DIGITS], "digits"),
    "doubled": ([*TEXT, "▁a", *DIGITS, *("▁" + digit for digit in DIGITS)], "digits"),
    "up to three": ([*TEXT, *UP_TO_THREE], "integers"),
    "some": ([*TEXT, *DIGITS, *SOME_LONGER], "integers"),
    "signed": ([*TEXT, *SIGNED], "numbers"),
    "single": ([*TEXT, "5"], "digits"),
}
ROWS = {
    "digits": [
        ["a", "1", "2", "3", "b", "4", ".", "5", "a", None, "7", "b"],
        ["-", "1", ",", "2", "3", "4", ".", "0", "5", "a", "0", None],
        ["a", "9", "9", "b", "1", "0", "0", "a", "0", "0", "7", "a"],
        ["a", "b", None, "7", ".", "2", "5", "a", "-", "9", ",", "."],
    ],
    "doubled": [
        ["▁a", "▁3", "4", "▁9", ".", "0", "1", "a", "5"],
        ["5", "5", "▁5", None, "▁0", "▁a", "▁2", ",", "7"],
    ],
    "up to three": [
        ["123", "45", "a", "9", "b", "99", "a", "007", None],
        ["100", ".", "5", "a", "1", ",", "045", "a", "00"],
        ["250", "a", "3", ".", "14", "b", "999", "99", "9"],
    ],
    "some": [
        ["12", "34", "5", "a", "045", "▁12", "099", "▁3", "▁045"],
        ["▁05", "a", "007", "b", "1", ".", "05", "▁100", "12"],
    ],
    "signed": [["-3", "a", "7", "b", "0.5", "a", "+2", "b", "12"]],
    "single": [["5", "a", "5", "5", "b", None, "-"]],
}


@cache
def vocabulary_of(name):
    texts, kind = VOCABULARIES[name]
    backend = Backend(models.WordLevel({t: i for i, t in enumerate(texts)}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    return NumberVocabulary.from_tokenizer(tokenizer, kind=kind, width=len(texts) + 2)


def texts_of(name):
    """By id; the logits have two columns without a token."""
    return [*VOCABULARIES[name][0], "unused 0", "unused 1"]


def labels_of(name, rows=None):
    ids = {text: i for i, text in enumerate(texts_of(name))}
    rows = ROWS[name] if rows is None else rows
    return torch.tensor([[-100 if text is None else ids[text] for text in row] for row in rows])


def random_logits(labels, width, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*labels.shape, width, dtype=torch.float64, generator=generator)


def statistics_of(logits, labels, vocabulary, quantities=None):
    return token_statistics(
        logits,
        labels,
        torch.tensor(vocabulary.token_ids),
        vocabulary.value_table(),
        forms=vocabulary.forms_table(),
        quantities=quantities,
    )


def by_cell(term, logits, labels, vocabulary, quantities=None):
    """The term's value at every cell; 0 where it is not asked for one."""
    statistics = statistics_of(logits, labels, vocabulary, quantities)
    if term.evaluated_at == "numbers":
        statistics = statistics.at_numbers()
    found = term.per_position(statistics)
    cells = found.new_zeros(labels.numel()).index_copy(0, statistics.rows, found)
    return cells.view(labels.shape)


def target_by_hand(term, name, label, number, at):
    """Number token -> mass, for a token of a written number of (text, place) tokens."""
    numbers = vocabulary_of(name).tokens
    if isinstance(term, HLGauss):
        return oracle.hl_gauss(label, number, at, numbers, term.sigma)
    if isinstance(term, SmoothedCrossEntropy):
        return oracle.gaussian(label, numbers, term.sigma)
    return oracle.gaussian(label, numbers, math.sqrt(term.temperature / 2))


def formulas(term, name, row):
    """Position -> function of {token: logit}, wherever the term has a value."""
    numbers = vocabulary_of(name).tokens
    written = {}
    for digits in written_numbers([t if t is None else t.replace("▁", " ") for t in row]):
        for at, (position, place) in enumerate(digits):
            number = [(row[i], place) for i, place in digits]
            written[position] = (number, at, place, digits[-1][1])
    found = {}
    for position, text in enumerate(row):
        if text is None:
            continue
        if text not in numbers:
            if term.evaluated_at == "tokens":
                found[position] = lambda z, t={text: 1.0}: oracle.cross_entropy(t, z)
            continue
        number, at, place, last_place = written[position]
        if isinstance(term, DiscretizedDistance):
            weight = (place if place >= 0 else place - last_place) + 1 if term.place_weights else 1
            found[position] = lambda z, t=text, w=weight: (
                w * oracle.discretized_distance(t, numbers, z, term.temperature)
            )
        else:
            target = target_by_hand(term, name, text, number, at)
            found[position] = lambda z, g=target: oracle.cross_entropy(g, z)
    return found


def scores_of(name, logits):
    return dict(zip(texts_of(name), logits.tolist(), strict=True))


def settings_of(term):
    given_settings = (f"{f.name}={getattr(term, f.name)}" for f in fields(term)[3:])
    return f"{type(term).__name__}({', '.join(given_settings)})"


TERMS = [
    SmoothedCrossEntropy(),
    SmoothedCrossEntropy(sigma=4.0),
    HLGauss(sigma=0.3),
    HLGauss(sigma=2.0),
    HLGauss(sigma=30.0),
    HLGauss(sigma=1000.0),
    DiscretizedDistance(),
    DiscretizedDistance(temperature=20.0),
    DiscretizedDistance(place_weights=True),
]
ONE_OF_EACH = [SmoothedCrossEntropy(), HLGauss(sigma=5.0), DiscretizedDistance(place_weights=True)]
IN_PLACE_OF_CROSS_ENTROPY = ONE_OF_EACH[:2]
every_vocabulary = pytest.mark.parametrize("name", list(VOCABULARIES))


@every_vocabulary
@pytest.mark.parametrize("term", TERMS, ids=settings_of)
def test_the_value_is_the_formulas_at_every_position(term, name):
    labels = labels_of(name)
    logits = random_logits(labels, len(texts_of(name)))
    want = torch.zeros(labels.shape, dtype=torch.float64)
    for r, row in enumerate(ROWS[name]):
        for i, formula in formulas(term, name, row).items():
            want[r, i] = formula(scores_of(name, logits[r, i]))
    vocabulary = vocabulary_of(name)
    found = by_cell(term, logits, labels, vocabulary)
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-11)
    in_float32 = by_cell(term, logits.float(), labels, vocabulary)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["digits", "doubled", "some", "signed"])
@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_the_gradient_is_the_slope_of_the_formula(term, name):
    labels = labels_of(name)
    logits = random_logits(labels, len(texts_of(name)), seed=1).requires_grad_()
    want = torch.zeros_like(logits)
    for r, row in enumerate(ROWS[name]):
        for i, formula in formulas(term, name, row).items():
            scores = scores_of(name, logits[r, i])
            slopes = [oracle.derivative(formula, scores, text) for text in scores]
            want[r, i] = torch.tensor(slopes, dtype=torch.float64)
    by_cell(term, logits, labels, vocabulary_of(name)).sum().backward()
    torch.testing.assert_close(logits.grad, want, rtol=1e-6, atol=1e-8)

    single = logits.detach().float().requires_grad_()
    by_cell(term, single, labels, vocabulary_of(name)).sum().backward()
    torch.testing.assert_close(single.grad.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_gradcheck(term):
    labels = labels_of("some", [["12", ".", "5", "a", None, "▁045", "12"]])
    logits = random_logits(labels, len(texts_of("some")), seed=2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: by_cell(term, z, labels, vocabulary_of("some")), (logits,), nondet_tol=1e-12
    )


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_precision_are_taken_to_float32(term, dtype):
    labels = labels_of("up to three")
    logits = random_logits(labels, len(texts_of("up to three"))).to(dtype)
    found = by_cell(term, logits, labels, vocabulary_of("up to three"))
    assert found.dtype == torch.float32
    want = by_cell(term, logits.double(), labels, vocabulary_of("up to three"))
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_the_average_is_over_what_the_term_says(term):
    labels = labels_of("doubled")
    logits = random_logits(labels, len(texts_of("doubled")))
    vocabulary = vocabulary_of("doubled")
    result = Objective([term], vocabulary)(logits, labels)
    assert term.averaged_over == ("numbers" if term.name == "discretized_distance" else "tokens")
    count = 12 if term.averaged_over == "numbers" else 17
    assert result.counts[term.averaged_over] == count
    total = by_cell(term, logits, labels, vocabulary).sum().item()
    assert result.parts[term.name].item() == pytest.approx(total / count, rel=1e-12)
    assert result.loss.item() == pytest.approx(term.weight * total / count, rel=1e-12)


# The targets.


def targets(term, statistics):
    if isinstance(term, HLGauss):
        return hl_gauss_target(statistics, term.sigma)
    if isinstance(term, SmoothedCrossEntropy):
        return gaussian_target(statistics, term.sigma)
    return gaussian_target(statistics, math.sqrt(term.temperature / 2))


def targets_of(name, rows, sigma, dtype=torch.float64):
    """The HL-Gauss targets at the numbers of some rows, each as token -> mass without zeros."""
    vocabulary = vocabulary_of(name)
    labels = labels_of(name, rows)
    logits = torch.zeros(*labels.shape, vocabulary.width, dtype=dtype)
    found = hl_gauss_target(statistics_of(logits, labels, vocabulary).at_numbers(), sigma)
    assert found.dtype == dtype
    return [
        {t: m for t, m in zip(vocabulary.tokens, row.tolist(), strict=True) if m > 0}
        for row in found
    ]


@every_vocabulary
@pytest.mark.parametrize("sigma", [1e-300, 1e-9, 0.1, 1.0, 30.0, 1e4, 1e9, 1e100, 1e300])
def test_a_target_is_a_distribution_over_tokens_that_could_be_written(name, sigma):
    labels = labels_of(name)
    logits = torch.zeros(*labels.shape, len(texts_of(name)), dtype=torch.float64)
    statistics = statistics_of(logits, labels, vocabulary_of(name)).at_numbers()
    found = hl_gauss_target(statistics, sigma)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)).double(), rtol=1e-12, atol=0)
    tokens = vocabulary_of(name).tokens
    for row, label in zip(found, statistics.label_index.tolist(), strict=True):
        assert row[label] > 0
        for text, mass in zip(tokens, row.tolist(), strict=True):
            assert text.startswith("▁") == tokens[label].startswith("▁") or mass == 0
    assert not found.requires_grad


def test_the_leading_digit_has_mass_beside_it_only_within_reach():
    first_of = {
        text: targets_of("digits", [list(text)], sigma=10.0)[0]
        for text in ("299", "250", "205", "3.9")
    }
    half = norm.cdf(0.05)
    assert first_of["299"]["2"] == pytest.approx(half, rel=1e-12)
    assert first_of["299"]["3"] == pytest.approx(1 - half, rel=1e-12)
    assert first_of["250"]["2"] == pytest.approx(1, abs=1e-6)
    assert first_of["205"]["1"] == pytest.approx(norm.cdf(-0.55), rel=1e-9)
    assert first_of["3.9"]["4"] > 0.05


def test_the_last_digits_are_nearly_uniform_where_sigma_is_large():
    *_, last = targets_of("digits", [list("5555")], sigma=300.0)
    assert list(last.values()) == pytest.approx([0.1] * 10, rel=1e-2)
    *_, last = targets_of("up to three", [["555", "555"]], sigma=1e7)
    assert len(last) == 1000
    assert list(last.values()) == pytest.approx([1e-3] * 1000, rel=1e-6)


@given(
    st.from_regex(r"[0-9]{2,4}", fullmatch=True),
    st.integers(0, 3),
    st.floats(0.02, 1e4),
)
@settings(deadline=None)
def test_the_shares_of_the_labels_digits_multiply_to_that_of_the_whole_number(
    digits, decimals, sigma
):
    decimals = min(decimals, len(digits) - 1)
    cut = len(digits) - decimals
    row = [*digits[:cut], *(["."] if decimals else []), *digits[cut:]]
    unit = 10.0**-decimals
    shares = targets_of("digits", [row], sigma)
    product = math.prod(shares[i][digit] for i, digit in enumerate(digits))

    def below(m):
        return norm.cdf((m - 0.5 - int(digits)) * unit / sigma)

    own = 2 * (0.5 - norm.cdf(-0.5 * unit / sigma))
    assert product == pytest.approx(own / (below(10 ** len(digits)) - below(0)), rel=1e-6)


@pytest.mark.parametrize("zeros", [2, 8, 14, 16, 20, 100, 290])
def test_a_long_number_is_treated_like_a_short_one(zeros):
    """Seen in units of the place, both sides of a boundary, above and below float64's digits."""
    for text, beside in (("7000", "6"), ("6999", "7")):
        short = targets_of("digits", [list(text)], sigma=30.0)[0]
        filling = text[1] * zeros
        long = targets_of("digits", [list(text + filling)], sigma=30.0 * 10.0**zeros)[0]
        assert long[beside] == pytest.approx(short[beside], abs=0.02)
        assert sum(long.values()) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("text", ["7" + "0" * 30, "6" + "9" * 30, "0." + "0" * 30, "9" * 400])
@pytest.mark.parametrize("sigma", [1e-3, 1e-12])
def test_far_below_the_unit_the_target_is_the_label_also_in_a_long_number(text, sigma):
    sigma *= 10.0 ** -len(text.partition(".")[2])
    found = targets_of("digits", [list(text)], sigma)
    labels = [c for c in text if c != "."]
    assert [max(target, key=target.get) for target in found] == labels
    assert [max(target.values()) for target in found] == pytest.approx([1.0] * len(labels))


def test_masses_far_out_are_exact():
    """Tails keep their relative precision, and so do slices much thinner than sigma."""
    (target,) = targets_of("up to three", [["500"]], sigma=20.0)
    total = norm.sf((0.5 - 500) / 20) - norm.sf((999.5 - 500) / 20)
    for k in (1, 2, 130, 499, 500, 501, 700, 998, 999):
        low, high = abs(k - 500) - 0.5, abs(k - 500) + 0.5
        mass = norm.sf(low / 20) - norm.sf(high / 20) if k != 500 else 1 - 2 * norm.sf(0.5 / 20)
        assert target[str(k)] == pytest.approx(mass / total, rel=1e-8)
    assert 0 < target["999"] < 1e-100
    (target,) = targets_of("up to three", [["7"]], sigma=1e12)
    assert list(target.values()) == pytest.approx([1e-3] * 1000, rel=1e-9)


def test_float32_statistics_have_the_target_of_float64():
    rows = ROWS["up to three"]
    for single, double in zip(
        targets_of("up to three", rows, 12.0, torch.float32),
        targets_of("up to three", rows, 12.0),
        strict=True,
    ):
        for text, mass in double.items():
            assert single.get(text, 0.0) == pytest.approx(mass, rel=1e-6, abs=1e-37)


def test_a_device_without_float64_has_nearly_the_same_target():
    vocabulary = vocabulary_of("up to three")
    labels = labels_of("up to three")
    statistics = statistics_of(
        torch.zeros(*labels.shape, vocabulary.width), labels, vocabulary
    ).at_numbers()
    cells = replace(statistics.cells)
    cells.__dict__["runs"] = replace(statistics.cells.runs, rest=statistics.cells.runs.rest.float())
    for sigma in (0.1, 3.0, 1000.0, 1e6):
        want = hl_gauss_target(statistics, sigma)
        found = hl_gauss_target(replace(statistics, cells=cells), sigma)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-6)


def test_one_token_has_the_ordinary_histogram_over_all_values():
    (target,) = targets_of("up to three", [["99"]], sigma=2.0)
    assert "099" not in target
    assert set(target) <= {str(i) for i in range(1000)}
    for k in (96, 99, 100, 104):
        low, high = (k - 99 - 0.5) / 2, (k - 99 + 0.5) / 2
        assert target[str(k)] == pytest.approx(norm.cdf(high) - norm.cdf(low), rel=1e-9)


def test_cells_reach_half_way_to_the_neighbours_and_tokens_of_one_value_share():
    (target,) = targets_of("signed", [["1"]], sigma=1.5)
    values = [-100, -3, -2.5, 0, 0.5, 1, 2, 7, 12]
    ends = [(a + b) / 2 for a, b in pairwise(values)]
    ends = [-100 - 48.5, *ends, 12 + 2.5]
    masses = [norm.cdf((b - 1) / 1.5) - norm.cdf((a - 1) / 1.5) for a, b in pairwise(ends)]
    of_value = dict(zip(values, masses, strict=True))
    total = sum(masses)
    assert target["-2.5"] == pytest.approx(of_value[-2.5] / total, rel=1e-9)
    for text in ("2", "+2", "2.0"):
        assert target[text] == pytest.approx(of_value[2] / 3 / total, rel=1e-9)
    assert target["12"] == pytest.approx(of_value[12] / total, rel=1e-6)


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_the_only_token_that_could_be_written_gets_all(term):
    labels = labels_of("single")
    logits = torch.zeros(*labels.shape, len(texts_of("single")), dtype=torch.float64)
    found = targets(term, statistics_of(logits, labels, vocabulary_of("single")).at_numbers())
    assert found.tolist() == [[1.0]] * 3


def test_tokens_with_a_leading_zero_stand_only_where_one_could_be_written():
    def gaussian(row):
        vocabulary = vocabulary_of("up to three")
        labels = labels_of("up to three", [row])
        logits = torch.zeros(*labels.shape, vocabulary.width)
        statistics = statistics_of(logits, labels, vocabulary).at_numbers()
        found = zip(vocabulary.tokens, gaussian_target(statistics, 1.0)[-1].tolist(), strict=True)
        return {text for text, mass in found if mass > 1e-3}

    assert gaussian(["5"]) == {"2", "3", "4", "5", "6", "7", "8"}
    assert gaussian(["10"]) == {"7", "8", "9", "10", "11", "12", "13"}
    assert gaussian(["007"]) == {"004", "005", "006", "007", "008", "009", "010"}

    def histogram(row):
        return {t for t, mass in targets_of("up to three", [row], 1.0)[-1].items() if mass > 1e-2}

    assert histogram(["100"]) == {"98", "99", "100", "101", "102"}
    assert histogram(["12", "100"]) == {"098", "099", "100", "101", "102"}
    assert histogram(["099"]) == {"097", "098", "099", "100", "101"}
    assert histogram(["00"]) == {"00", "01", "02"}


@pytest.mark.parametrize("quantities", ["first", "last"])
def test_what_is_left_of_a_number_with_a_digit_that_is_no_quantity_stands_alone(quantities):
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [list("593a5")])
    marked = torch.ones_like(labels, dtype=torch.bool)
    gone, left = (0, 2) if quantities == "first" else (2, 0)
    marked[0, gone] = False
    logits = random_logits(labels, vocabulary.width)
    alone = labels_of("digits", [["a", "a", "a", "a", "593"[left]]])
    for term in ONE_OF_EACH:
        found = by_cell(term, logits, labels, vocabulary, marked)[0]
        moved = logits.clone()
        moved[0, 4] = logits[0, left]
        want = by_cell(term, moved, alone, vocabulary)[0, 4]
        assert found[left].item() == pytest.approx(want.item(), rel=1e-12)
        plain = 0.0
        if term.evaluated_at == "tokens":
            plain = by_cell(CrossEntropy(), logits, labels, vocabulary)[0, gone].item()
        assert found[gone].item() == pytest.approx(plain, rel=1e-12)


# The losses.


@pytest.mark.parametrize("name", ["digits", "doubled", "some", "signed"])
@pytest.mark.parametrize("term", TERMS, ids=settings_of)
def test_the_minimum_is_where_the_probabilities_are_the_target(term, name):
    """There the gradient is 0 and the value that of the documentation; all else costs more."""
    vocabulary = vocabulary_of(name)
    labels = labels_of(name)
    at_uniform = torch.zeros(*labels.shape, vocabulary.width, dtype=torch.float64)
    statistics = statistics_of(at_uniform, labels, vocabulary)
    number = torch.where(statistics.is_number)[0]
    cells = statistics.rows[number]
    goal = targets(term, statistics.at(number))
    best = torch.full((labels.numel(), vocabulary.width), -1e4, dtype=torch.float64)
    ids = torch.tensor(vocabulary.token_ids)
    best[cells[:, None], ids] = goal.clamp_min(1e-300).log()
    best = best.view(at_uniform.shape).requires_grad_()
    values = by_cell(term, best, labels, vocabulary)
    entropy = -torch.special.xlogy(goal, goal).sum(-1)
    kl = isinstance(term, DiscretizedDistance)
    want = torch.zeros_like(entropy) if kl else entropy
    least = values.reshape(-1)[cells]
    torch.testing.assert_close(least, want, rtol=1e-9, atol=1e-9)
    least.sum().backward()
    assert best.grad.abs().max() < 1e-9

    for seed in range(5):
        away = best.detach() + random_logits(labels, vocabulary.width, seed, scale=0.3)
        more = by_cell(term, away, labels, vocabulary).reshape(-1)[cells] - least.detach()
        assert (more > -1e-12).all()
        assert (more > 1e-9)[entropy > 0.01].all()


@pytest.mark.parametrize("term", IN_PLACE_OF_CROSS_ENTROPY, ids=settings_of)
def test_at_text_positions_it_is_cross_entropy(term):
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [["a", "b", "1", "2", "."], ["a", None, "-", "b", "."]])
    logits = random_logits(labels, vocabulary.width)
    found = by_cell(term, logits, labels, vocabulary)
    plain = by_cell(CrossEntropy(), logits, labels, vocabulary)
    text = torch.tensor([[True, True, False, False, True], [True] * 5])
    assert torch.equal(found[text], plain[text])
    assert (found != plain)[~text].all()
    without_numbers = Objective([term], vocabulary)(logits[1:], labels[1:])
    want = torch.nn.functional.cross_entropy(logits[1], labels[1])
    assert without_numbers.loss.item() == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.parametrize("term", IN_PLACE_OF_CROSS_ENTROPY, ids=settings_of)
def test_mass_on_text_tokens_costs_as_in_cross_entropy(term):
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [["1", "2", "a", "3"]])
    logits = random_logits(labels, vocabulary.width)
    more = logits.clone()
    more[..., 1] += 3.0
    numbers = labels[0] != 1
    rise, plain = (
        (by_cell(t, more, labels, vocabulary) - by_cell(t, logits, labels, vocabulary))[0, numbers]
        for t in (term, CrossEntropy())
    )
    assert (rise > 0.05).all()
    torch.testing.assert_close(rise, plain)


def test_discretized_distance_does_not_see_text_tokens_but_number_tokens_written_otherwise():
    vocabulary = vocabulary_of("doubled")
    texts = texts_of("doubled")
    labels = labels_of("doubled", [["1", "▁2"]])
    logits = random_logits(labels, vocabulary.width)
    value = by_cell(DiscretizedDistance(), logits, labels, vocabulary)
    text, other = logits.clone(), logits.clone()
    text[..., [i for i, t in enumerate(texts) if t not in vocabulary.tokens]] += 5.0
    torch.testing.assert_close(by_cell(DiscretizedDistance(), text, labels, vocabulary), value)
    other[0, 0, texts.index("▁1")] += 5.0
    assert by_cell(DiscretizedDistance(), other, labels, vocabulary)[0, 0] > value[0, 0] + 0.1


def test_discretized_distance_counts_a_digit_by_its_place():
    vocabulary = vocabulary_of("digits")
    row = ["-", *"12,345.678", "a", "9"]
    labels = labels_of("digits", [row])
    logits = random_logits(labels, vocabulary.width)
    plain = by_cell(DiscretizedDistance(), logits, labels, vocabulary)
    by_place = by_cell(DiscretizedDistance(place_weights=True), logits, labels, vocabulary)
    weights = [0, 5, 4, 0, 3, 2, 1, 0, 3, 2, 1, 0, 1]
    torch.testing.assert_close(by_place, plain * torch.tensor([weights], dtype=torch.float64))
    assert (plain[0, torch.tensor(weights) > 0] > 0).all()


@pytest.mark.parametrize("term", TERMS, ids=settings_of)
@given(order=st.permutations(range(len(texts_of("some")))), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_renaming_token_ids_changes_nothing(term, order, seed):
    vocabulary = vocabulary_of("some")
    labels = labels_of("some")
    logits = random_logits(labels, vocabulary.width, seed)
    new_id = torch.tensor(order)
    ids = sorted((order[old], k) for k, old in enumerate(vocabulary.token_ids))
    forms = torch.empty_like(vocabulary.forms_table())
    forms[new_id] = vocabulary.forms_table()
    renamed = replace(
        vocabulary,
        token_ids=tuple(i for i, _ in ids),
        values=tuple(vocabulary.values[k] for _, k in ids),
        tokens=tuple(vocabulary.tokens[k] for _, k in ids),
        forms=bytes(forms.flatten().tolist()),
        digit_bearing_ids=(),
    )
    moved = torch.empty_like(logits)
    moved[..., new_id] = logits
    new_labels = torch.where(labels < 0, labels, new_id[labels.clamp(min=0)])
    torch.testing.assert_close(
        by_cell(term, moved, new_labels, renamed),
        by_cell(term, logits, labels, vocabulary),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("term", TERMS, ids=settings_of)
def test_a_constant_on_all_logits_changes_nothing(term):
    labels = labels_of("up to three")
    vocabulary = vocabulary_of("up to three")
    logits = random_logits(labels, vocabulary.width, 5)
    shifts = 100 * random_logits(labels, 1, 6)
    torch.testing.assert_close(
        by_cell(term, logits + shifts, labels, vocabulary),
        by_cell(term, logits, labels, vocabulary),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize("term", TERMS, ids=settings_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["7", "0" * 60, "9" * 350, "1" + "0" * 350, "0." + "0" * 350])
def test_extreme_logits_and_long_numbers_stay_finite(term, dtype, text):
    vocabulary = vocabulary_of("digits")
    labels = torch.cat([labels_of("digits", [["a", *text]])] * 3)
    logits = random_logits(labels, vocabulary.width, 7).to(dtype)
    logits[1] = logits[1].sign() * 1e4
    logits[2] = -1e4
    logits[2, :, 2] = 1e4
    logits.requires_grad_()
    values = by_cell(term, logits, labels, vocabulary)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    assert (values.sum(-1) > 0).all()
    values.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    "term",
    [SmoothedCrossEntropy(sigma=0.05), HLGauss(sigma=1e-3), DiscretizedDistance(temperature=0.005)],
    ids=settings_of,
)
def test_impossible_tokens_without_mass_in_the_target_do_no_harm(term):
    """Also where all number tokens are impossible, at a text position."""
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [["a", "1", "2", ".", "5", "b"]])
    logits = torch.full((1, 6, vocabulary.width), -math.inf)
    logits.scatter_(-1, labels.unsqueeze(-1), 0.0)
    logits[..., 1] = 0.0
    logits.requires_grad_()
    values = by_cell(term, logits, labels, vocabulary)
    mixed = math.log(2) if term.evaluated_at == "tokens" else 0.0
    plain = math.log(2) if term.evaluated_at == "tokens" else 0.0
    want = [0.0, mixed, mixed, plain, mixed, plain]
    assert values[0].tolist() == pytest.approx(want, abs=1e-6)
    values.sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[0, 5, 6:] == 0).all()


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_an_impossible_token_with_mass_in_the_target_costs_infinitely_much(term):
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [["4"]])
    logits = torch.zeros(1, 1, vocabulary.width)
    logits[..., texts_of("digits").index("5")] = -math.inf
    logits.requires_grad_()
    value = by_cell(term, logits, labels, vocabulary)
    assert value.item() == math.inf
    value.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
@pytest.mark.parametrize("rows", [[], [[None, None]]])
def test_without_a_label_there_is_an_attached_zero(term, rows):
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", rows).long().view(len(rows), -1 if rows else 5)
    logits = random_logits(labels, vocabulary.width).requires_grad_()
    result = Objective([term], vocabulary)(logits, labels)
    assert result.loss.item() == 0
    result.loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_discretized_distance_without_a_number_is_an_attached_zero():
    vocabulary = vocabulary_of("digits")
    labels = labels_of("digits", [["a", "b", None, "."]])
    logits = random_logits(labels, vocabulary.width).requires_grad_()
    result = Objective([DiscretizedDistance()], vocabulary)(logits, labels)
    assert result.loss.item() == 0
    result.loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("term", TERMS, ids=settings_of)
@pytest.mark.parametrize("name", ["digits", "some"])
def test_positions_left_out_and_stand_ins_change_no_number(term, name):
    labels = labels_of(name)
    vocabulary = vocabulary_of(name)
    answers = []
    for view in ("all", "numbers", "stand-ins", "backwards"):
        logits = random_logits(labels, vocabulary.width, 4).requires_grad_()
        statistics = statistics_of(logits, labels, vocabulary)
        seen = {
            "all": lambda s: s,
            "numbers": lambda s: s.at(s.is_number.nonzero().squeeze(-1)),
            "stand-ins": lambda s: s.with_stand_ins(),
            "backwards": lambda s: s.at(torch.arange(len(s.rows) - 1, -1, -1)),
        }[view](statistics)
        found = term.per_position(seen)
        assert found.shape == seen.label_ids.shape
        found = torch.where(seen.is_number, found, 0.0)
        cells = found.new_zeros(labels.numel()).index_copy(0, seen.rows, found)
        cells.square().sum().backward()
        answers.append((cells.detach(), logits.grad))
    assert (answers[0][0] > 0).any()
    for values, gradient in answers[1:]:
        torch.testing.assert_close(values, answers[0][0], rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, answers[0][1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
@pytest.mark.parametrize("name", ["digits", "signed"])
def test_traces_without_a_graph_break(term, name):
    labels = labels_of(name)
    vocabulary = vocabulary_of(name)
    statistics = statistics_of(random_logits(labels, vocabulary.width), labels, vocabulary)

    def evaluate(number_logits):
        return term.per_position(replace(statistics, number_logits=number_logits))

    torch.compiler.reset()
    compiled = torch.compile(evaluate, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(statistics.number_logits), evaluate(statistics.number_logits), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("term", ONE_OF_EACH, ids=settings_of)
def test_from_hidden_states_the_value_and_the_gradient_are_the_same(term):
    labels, vocabulary = labels_of("some"), vocabulary_of("some")
    assert_hidden_states_give_what_logits_give(term, vocabulary, labels, rows_per_chunk=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SmoothedCrossEntropy(sigma=0.0), "SmoothedCrossEntropy.sigma must be a positive"),
        (lambda: HLGauss(sigma=-1.0), "HLGauss.sigma must be a positive number, got -1.0"),
        (lambda: HLGauss(sigma=math.inf), "HLGauss.sigma must be a positive number, got inf"),
        (lambda: HLGauss(sigma=True), "HLGauss.sigma must be a positive number, got True"),
        (
            lambda: DiscretizedDistance(temperature=math.nan),
            "DiscretizedDistance.temperature must be a positive number, got nan",
        ),
    ],
)
def test_settings_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_hl_gauss_has_no_default_sigma():
    with pytest.raises(TypeError, match="sigma"):
        HLGauss()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--term", type=LossTerm)
    path = "ntl_lightning.losses.HLGauss"
    given_sigma = parser.parse_object({"term": {"class_path": path, "init_args": {"sigma": 30}}})
    assert parser.instantiate_classes(given_sigma).term == HLGauss(sigma=30.0)
    with pytest.raises(jsonargparse.ArgumentError, match="sigma"):
        parser.parse_object({"term": {"class_path": path}})


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (SmoothedCrossEntropy(), "smoothed_cross_entropy"),
        (HLGauss(sigma=1.0), "hl_gauss"),
        (DiscretizedDistance(), "discretized_distance"),
    ],
)
def test_the_log_name_says_which_loss_it_is(term, name):
    assert term.name == name
