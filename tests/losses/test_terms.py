"""Values and gradients of the terms against loops in float64, scipy and the ntloss package."""

import math
from dataclasses import replace

import jsonargparse
import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ntl_lightning.losses import (
    CrossEntropy,
    ExpectedValue,
    LossTerm,
    NumberMass,
    Objective,
    RegressionAware,
    Wasserstein,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary
from tests.oracles import losses as oracle

VALUES = {2: 1.0, 3: -7.0, 5: 5.0, 6: 5.0, 7: 1000.0, 11: 2.5}  # unevenly spaced, one repeated
WIDTH = 13
VOCABULARY = NumberVocabulary.from_values(VALUES, width=WIDTH)


def random_batch(seed, rows=40, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) * scale
    labels = torch.randint(0, WIDTH, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.2] = -100
    return logits, labels


def part(term, logits, labels, vocabulary=VOCABULARY):
    result = Objective([term], vocabulary)(logits, labels)
    return result.parts[term.name].item()


def numbers_only(logits, labels):
    """The statistics of the rows whose label is a number, as a term is given them."""
    rows = torch.tensor([label in VALUES for label in labels.tolist()])
    return Objective([CrossEntropy()], VOCABULARY)(logits[rows], labels[rows]).statistics


SPREAD = 1007.0  # from -7 to 1000
LOG_SPREAD = math.log(1001) + math.log(8)

ORACLES = [
    (Wasserstein(), oracle.wasserstein, {}),
    (Wasserstein(power=2.0), oracle.wasserstein_to_label, {"power": 2.0}),
    (Wasserstein(power=7.5), oracle.wasserstein_to_label, {"power": 7.5}),
    (Wasserstein(cost="log"), oracle.wasserstein_to_label, {"cost": "log"}),
    (
        Wasserstein(cost="modular", modulus=10.0),
        oracle.wasserstein_to_label,
        {"cost": "modular", "modulus": 10.0},
    ),
    (
        Wasserstein(cost="modular", modulus=7.25, power=3.0, largest_distance=9.0),
        oracle.wasserstein_to_label,
        {"cost": "modular", "modulus": 7.25, "power": 3.0, "largest": 9.0},
    ),
    (
        Wasserstein(cost="modular", modulus=10.0, squash_factor=4.0),
        oracle.wasserstein_to_label,
        {"cost": "modular", "modulus": 10.0, "squash": 4.0},
    ),
    (
        Wasserstein(cost="log", squash_factor=3.0, power=2.0),
        oracle.wasserstein_to_label,
        {"cost": "log", "squash": 3.0, "power": 2.0},
    ),
    (
        Wasserstein(cost="log", power=2.0, reweigh=True),
        oracle.reweighed(oracle.wasserstein_to_label, LOG_SPREAD),
        {"cost": "log", "power": 2.0},
    ),
    (
        Wasserstein(largest_distance=9.0, reweigh=True),
        oracle.reweighed(oracle.wasserstein_to_label, 9.0),
        {"largest": 9.0},
    ),
    (Wasserstein(target_sigma=2.0), oracle.wasserstein_to_gaussian, {"sigma": 2.0}),
    (
        Wasserstein(target_sigma=40.0, cost="log", largest_distance=9.0),
        oracle.wasserstein_to_gaussian,
        {"sigma": 40.0, "cost": "log", "largest": 9.0},
    ),
    (
        Wasserstein(target_sigma=1.0, reweigh=True),
        oracle.reweighed(oracle.wasserstein_to_gaussian, SPREAD),
        {"sigma": 1.0},
    ),
    (ExpectedValue(), oracle.expected_value, {"power": 2.0}),
    (ExpectedValue(power=1.0), oracle.expected_value, {"power": 1.0}),
    (ExpectedValue(power=1.5), oracle.expected_value, {"power": 1.5}),
    (ExpectedValue(huber_delta=3.0), oracle.huber, {"delta": 3.0}),
    (
        ExpectedValue(reweigh=True),
        oracle.reweighed(oracle.expected_value, SPREAD**2),
        {"power": 2.0},
    ),
    (
        ExpectedValue(largest_distance=9.0, reweigh=True),
        oracle.reweighed(lambda *row: (9 / SPREAD) ** 2 * oracle.expected_value(*row), 81.0),
        {},
    ),
    (NumberMass(), oracle.number_mass, {}),
    (RegressionAware(), oracle.regression_aware, {}),
    (
        RegressionAware(values=(1, 2.5, 5), largest_distance=9.0),
        oracle.regression_aware,
        {"answers": (1, 2.5, 5), "largest": 9.0},
    ),
]
NUMBER_TERMS = [term for term, _, _ in ORACLES]


@pytest.mark.parametrize(("term", "formula", "options"), ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_number_term_equals_its_formula(term, formula, options, seed):
    logits, labels = random_batch(seed)
    want = oracle.mean_over_numbers(formula, logits.tolist(), labels.tolist(), VALUES, **options)
    assert part(term, logits, labels) == pytest.approx(want, rel=1e-9)
    assert part(term, logits.float(), labels) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("term", "formula", "options"), ORACLES)
def test_the_gradient_of_a_number_term_is_the_slope_of_its_formula(term, formula, options):
    labels = torch.tensor([2, 3, 0, 5, 6, -100, 7, 11])
    logits, _ = random_batch(6, rows=len(labels), scale=1.0)
    truth = [
        oracle.gradient(formula, row, label, VALUES, **options)
        if label in VALUES
        else [0.0] * WIDTH
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    truth = torch.tensor(truth, dtype=torch.float64)
    count = len(VALUES)
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 2e-6)):
        ours = logits.to(dtype, copy=True).requires_grad_()
        Objective([replace(term, weight=1.0)], VOCABULARY)(ours, labels).loss.backward()
        error = (ours.grad.double() * count - truth).abs().max()
        assert error < tolerance * truth.abs().max()


def test_cross_entropy_equals_its_formula():
    logits, labels = random_batch(3)
    want = oracle.mean_cross_entropy(logits.tolist(), labels.tolist())
    assert part(CrossEntropy(), logits, labels) == pytest.approx(want, rel=1e-12)


def plain_wasserstein(logits, labels):
    """NTL-WAS by plain autograd over float64."""
    ids = torch.tensor(list(VALUES))
    values = torch.tensor(list(VALUES.values()), dtype=logits.dtype)
    rows = torch.tensor([label in VALUES for label in labels.tolist()])
    y = torch.tensor([VALUES[i] for i in labels[rows].tolist()], dtype=logits.dtype)
    q = torch.softmax(logits[rows][:, ids], -1)
    return (q * (values - y[:, None]).abs()).sum(-1).mean()


def plain_expected_value(logits, labels):
    ids = torch.tensor(list(VALUES))
    values = torch.tensor(list(VALUES.values()), dtype=logits.dtype)
    rows = torch.tensor([label in VALUES for label in labels.tolist()])
    y = torch.tensor([VALUES[i] for i in labels[rows].tolist()], dtype=logits.dtype)
    return ((torch.softmax(logits[rows][:, ids], -1) @ values - y) ** 2).mean()


@pytest.mark.parametrize(
    ("term", "formula"),
    [
        (Wasserstein(weight=0.3), plain_wasserstein),
        (ExpectedValue(weight=0.3), plain_expected_value),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients_equal_float64_autograd_of_the_plain_formula(term, formula, overwrite):
    logits, labels = random_batch(4, scale=1.0)
    truth = logits.clone().requires_grad_()
    ce = torch.nn.functional.cross_entropy(truth, labels, ignore_index=-100)
    (ce + 0.3 * formula(truth, labels)).backward()
    ours = logits.float().requires_grad_()
    objective = Objective([CrossEntropy(), term], VOCABULARY)
    objective(ours * 1.0, labels, overwrite_logits=overwrite).loss.backward()
    scale = truth.grad.abs().max()
    assert (ours.grad.double() - truth.grad).abs().max() / scale < 1e-6


@pytest.mark.parametrize("term", NUMBER_TERMS)
def test_gradcheck(term):
    logits, labels = random_batch(5, rows=6, scale=1.0)
    objective = Objective([CrossEntropy(), term], VOCABULARY)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: objective(z, labels).loss, (logits,), nondet_tol=1e-9)


@pytest.mark.parametrize("term", [CrossEntropy(), *NUMBER_TERMS])
def test_a_term_traces_without_a_graph_break(term):
    torch.compiler.reset()  # each term is a recompilation of the same code, and they are counted
    labels = torch.tensor([2, 3, 5, 6, 7, 11, 2])
    logits, _ = random_batch(7, rows=len(labels))
    statistics = Objective([term], VOCABULARY)(logits, labels).statistics
    results = []
    for compute in (
        term.per_position,
        torch.compile(term.per_position, fullgraph=True, backend="eager"),
    ):
        leaves = {
            name: getattr(statistics, name).detach().requires_grad_()
            for name in ("cross_entropy", "log_partition", "number_logits")
        }
        values = compute(replace(statistics, **leaves))
        values.sum().backward()
        results.append((values, *(leaf.grad for leaf in leaves.values())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_wasserstein_equals_scipy_on_unevenly_spaced_values():
    ids, values = list(VALUES), list(VALUES.values())
    for seed in range(5):
        logits, labels = random_batch(seed, rows=20)
        distances = []
        for row, label in zip(logits, labels.tolist(), strict=True):
            if label in VALUES:
                q = torch.softmax(row[ids], -1).numpy()
                distances.append(
                    scipy.stats.wasserstein_distance(values, [VALUES[label]], q, [1.0])
                )
        got = part(Wasserstein(), logits.float(), labels)
        assert got == pytest.approx(np.mean(distances), rel=1e-6)


def test_wasserstein_to_a_soft_target_equals_scipy_on_unevenly_spaced_values():
    ids, values = list(VALUES), np.array(list(VALUES.values()))
    for seed in range(5):
        logits, labels = random_batch(seed, rows=20)
        distances = []
        for row, label in zip(logits, labels.tolist(), strict=True):
            if label in VALUES:
                q = torch.softmax(row[ids], -1).numpy()
                density = scipy.stats.norm.pdf(values, VALUES[label], 3.0)
                distances.append(scipy.stats.wasserstein_distance(values, values, q, density))
        got = part(Wasserstein(target_sigma=3.0), logits, labels)
        assert got == pytest.approx(np.mean(distances), rel=1e-9)


class TinyTokenizer:
    """What ntloss asks of a tokenizer; adding tokens changes nothing."""

    def __init__(self, tokens):
        self.vocab = {token: i for i, token in enumerate(tokens)}

    def get_vocab(self):
        return self.vocab

    def add_tokens(self, tokens):
        return 0

    def convert_tokens_to_ids(self, token):
        return self.vocab[token]

    def __len__(self):
        return len(self.vocab)


def huber_loss(prediction, target, reduction="mean"):
    """What ntloss is given: its float32 labels have no backward beside float64."""
    return F.huber_loss(prediction, target.to(prediction.dtype), reduction=reduction)


@pytest.mark.parametrize("largest", [9, 999])
@pytest.mark.parametrize("seed", range(2))
def test_values_equal_the_ntloss_package_without_reweighing(largest, seed):
    import ntloss

    tokens = ["<pad>", "a", "b", "c", ".", *map(str, range(largest + 1)), "d", "e"]
    vocabulary = NumberVocabulary.from_values(
        {i + 5: float(i) for i in range(largest + 1)}, width=len(tokens)
    )
    tokenizer = TinyTokenizer(tokens)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 17, len(tokens), generator=generator)
    labels = torch.randint(0, len(tokens), (3, 17), generator=generator)
    labels[0, 3:6] = -100
    for peer, term in (
        (ntloss.NTLoss, Wasserstein()),
        (ntloss.NTLossDotProduct, ExpectedValue()),
    ):
        want = peer(tokenizer, digit_level=largest == 9, reweigh=False)(logits, labels)
        assert part(term, logits, labels, vocabulary) == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("largest", [9, 999])
@pytest.mark.parametrize(
    ("peer", "options", "term"),
    [
        ("NTLoss", {"reweigh": True}, Wasserstein(reweigh=True)),
        ("NTLossDotProduct", {"reweigh": True}, ExpectedValue(reweigh=True)),
        (
            "NTLossDotProduct",
            {"reweigh": True, "loss_function": F.l1_loss},
            ExpectedValue(power=1.0, reweigh=True),
        ),
        (
            "NTLossDotProduct",
            {"reweigh": True, "loss_function": huber_loss},
            ExpectedValue(huber_delta=1.0, reweigh=True),
        ),
        ("NTLoss", {"reweigh": False, "squash_factor": 3.0}, Wasserstein(squash_factor=3.0)),
        (
            "NTLoss",
            {"reweigh": True, "squash_factor": 3.0},
            Wasserstein(squash_factor=3.0, reweigh=True),
        ),
    ],
)
def test_options_have_the_meaning_they_have_in_the_ntloss_package(largest, peer, options, term):
    import ntloss

    tokens = ["<pad>", "a", "b", "c", ".", *map(str, range(largest + 1)), "d", "e"]
    vocabulary = NumberVocabulary.from_values(
        {i + 5: float(i) for i in range(largest + 1)}, width=len(tokens)
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, len(tokens), generator=generator)
    labels = torch.randint(0, len(tokens), (2, 9), generator=generator)
    loss = getattr(ntloss, peer)(TinyTokenizer(tokens), digit_level=largest == 9, **options)
    theirs, ours = (logits.double().requires_grad_() for _ in range(2))
    want = loss(theirs, labels)
    want.backward()
    result = Objective([term], vocabulary)(ours, labels)
    result.loss.backward()
    assert result.parts[term.name].item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad * term.weight, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("peer", "options", "term"),
    [
        ("NTLoss", {"reweigh": False}, Wasserstein()),
        ("NTLoss", {"reweigh": True}, Wasserstein(reweigh=True)),
        (
            "NTLoss",
            {"reweigh": True, "squash_factor": 2.0},
            Wasserstein(squash_factor=2.0, reweigh=True),
        ),
        ("NTLossDotProduct", {"reweigh": True}, ExpectedValue(reweigh=True)),
    ],
)
def test_the_ntloss_package_agrees_on_unevenly_spaced_values(peer, options, term):
    import ntloss

    numbers = {2: "-7", 5: "2.5", 6: "1", 8: "100", 9: "40"}
    tokens = [numbers.get(i, f"t{i}") for i in range(11)]
    vocabulary = NumberVocabulary.from_values({i: float(n) for i, n in numbers.items()}, width=11)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 12, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 12), generator=generator)
    want = getattr(ntloss, peer)(TinyTokenizer(tokens), digit_level=False, **options)(
        logits, labels
    )
    assert part(term, logits, labels, vocabulary) == pytest.approx(want.item(), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.permutations(range(WIDTH)))
@settings(max_examples=20, deadline=None)
def test_renaming_token_ids_changes_nothing(seed, order):
    logits, labels = random_batch(seed, rows=5)
    place = {old: new for new, old in enumerate(order)}
    renamed = NumberVocabulary.from_values(
        dict(sorted((place[i], v) for i, v in VALUES.items())), width=WIDTH
    )
    new_labels = torch.tensor([place.get(i, -100) for i in labels.tolist()])
    for term in (CrossEntropy(), *NUMBER_TERMS):
        before = part(term, logits, labels)
        after = part(term, logits[:, order], new_labels, renamed)
        assert after == pytest.approx(before, rel=1e-9, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.floats(-300, 300))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_all_logits_changes_nothing(seed, constant):
    logits, labels = random_batch(seed, rows=5)
    for term in (CrossEntropy(), *NUMBER_TERMS):
        before, after = part(term, logits, labels), part(term, logits + constant, labels)
        assert after == pytest.approx(before, rel=1e-9, abs=1e-9)


EXTREMES = {
    "all on the label": lambda z, y: z.fill_(-math.inf).index_put_((y,), torch.tensor(0.0)),
    "all on a wrong number": lambda z, y: z.fill_(-math.inf).index_put_(
        (torch.tensor(7 if y != 7 else 2),), torch.tensor(0.0)
    ),
    "no mass on some tokens": lambda z, y: z.index_fill_(0, torch.tensor([0, 3, 7]), -math.inf),
    "huge on the label": lambda z, y: z.index_put_((y,), torch.tensor(1e4)),
    "huge on a text token": lambda z, y: z.index_fill_(0, torch.tensor([0]), 1e4),
    "tiny on the label": lambda z, y: z.index_put_((y,), torch.tensor(-1e4)),
    "all huge": lambda z, y: z.add_(1e4),
    "all equal": lambda z, y: z.zero_(),
}


@pytest.mark.parametrize("shape", EXTREMES)
@pytest.mark.parametrize("term", NUMBER_TERMS)
def test_values_and_gradients_are_finite_for_extreme_logits(term, shape):
    labels = torch.tensor([2, 3, 5, 6, 7, 11])
    logits, _ = random_batch(8, rows=len(labels))
    logits = logits.float()
    for row, label in zip(logits, labels, strict=True):
        EXTREMES[shape](row, label)
    logits.requires_grad_()
    result = Objective([term], VOCABULARY)(logits, labels)
    result.loss.backward()
    assert result.loss.isfinite()
    assert result.loss >= 0
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("term", NUMBER_TERMS)
def test_a_batch_without_numbers_costs_nothing_and_stays_attached(term):
    logits, _ = random_batch(9, rows=4)
    logits[0, 2] = -math.inf
    logits.requires_grad_()
    result = Objective([term], VOCABULARY)(logits, torch.tensor([0, 1, -100, 12]))
    result.loss.backward()
    assert result.loss == 0
    assert result.parts[term.name] == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("term", NUMBER_TERMS)
def test_a_position_that_is_no_number_does_not_disturb_the_others(term):
    logits, labels = random_batch(10)
    kept = torch.tensor([label in VALUES for label in labels.tolist()])
    want = part(term, logits[kept], labels[kept])
    assert part(term, logits, labels) == pytest.approx(want, rel=1e-12)


DIGITS = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
LABELS = [
    (Wasserstein(), lambda a, b: abs(a - b)),
    (Wasserstein(power=3.0), lambda a, b: abs(a - b)),
    (Wasserstein(cost="log"), lambda a, b: abs(math.log1p(a) - math.log1p(b))),
    (
        Wasserstein(cost="modular", modulus=10.0),
        lambda a, b: min(abs(a - b), 10 - abs(a - b)),
    ),
    (Wasserstein(squash_factor=9.0), lambda a, b: abs(a - b)),
    (ExpectedValue(power=1.0), lambda a, b: abs(a - b)),
    (RegressionAware(), lambda a, b: (a - b) ** 2),
]


def costs(term, logits, labels, vocabulary=DIGITS):
    """The term's value at each position."""
    statistics = Objective([CrossEntropy()], vocabulary)(logits, labels).statistics
    return term.per_position(statistics)


def sure(*told):
    """Logits (n, 10) of n answers with all mass on the tokens told (n,), evenly."""
    logits = torch.full((len(told[0]), 10), -math.inf, dtype=torch.float64)
    for tokens in told:
        logits.scatter_(1, tokens.unsqueeze(1), 0.0)
    return logits


@pytest.mark.parametrize(("term", "cost"), LABELS)
def test_a_sure_answer_costs_its_distance(term, cost):
    told, labels = torch.cartesian_prod(torch.arange(10), torch.arange(10)).T
    got = costs(term, sure(told), labels)
    want = torch.tensor([cost(a, b) for a, b in zip(told.tolist(), labels.tolist(), strict=True)])
    torch.testing.assert_close(got, want.double(), rtol=1e-6, atol=0)
    assert ((got == 0) == (told == labels)).all()


@pytest.mark.parametrize(
    "term",
    [
        Wasserstein(),
        Wasserstein(power=2.0),
        Wasserstein(cost="log"),
        Wasserstein(cost="modular", modulus=10.0),
        Wasserstein(squash_factor=1.0),
    ],
)
def test_wasserstein_is_zero_for_the_label_only(term):
    told, other, labels = torch.cartesian_prod(*[torch.arange(10)] * 3).T
    got = costs(term, sure(told, other), labels)
    assert ((got == 0) == ((told == labels) & (other == labels))).all()


def test_wasserstein_is_zero_for_another_token_of_the_labels_value():
    logits = torch.full((1, WIDTH), -math.inf)
    logits[0, 6] = 0.0  # 5, as token 5 is
    for term in (Wasserstein(), Wasserstein(power=2.0), Wasserstein(squash_factor=3.0)):
        assert part(term, logits, torch.tensor([5])) == 0


def test_the_clock_comes_round():
    hours = NumberVocabulary.from_values({i: float(i) for i in range(24)}, width=24)
    logits = torch.full((1, 24), -math.inf)
    logits[0, 23] = 0.0
    term = Wasserstein(cost="modular", modulus=24.0)
    assert part(term, logits, torch.tensor([0]), hours) == 1
    assert part(term, logits, torch.tensor([11]), hours) == 12
    # 11 is as far as two of the tokens 0 to 11 can be on a circle of 30.
    half = NumberVocabulary.from_values({i: float(i) for i in range(12)}, width=24)
    wide = Wasserstein(cost="modular", modulus=30.0, largest_distance=22.0)
    logits = torch.full((1, 24), -math.inf)
    logits[0, 10] = 0.0
    assert part(wide, logits, torch.tensor([0]), half) == 20


def test_a_soft_target_is_met_by_the_gaussian_and_by_nothing_else():
    sigma, label = 1.5, 4
    density = torch.exp(-((torch.arange(10.0, dtype=torch.float64) - label) ** 2) / 2 / sigma**2)
    term = Wasserstein(target_sigma=sigma)
    labels = torch.tensor([label])
    assert part(term, density.log()[None], labels, DIGITS) < 1e-14
    assert part(term, sure(labels), labels, DIGITS) > 0.5
    for said in range(10):
        moved = density.clone()
        moved[said] += 0.01
        assert part(term, moved.log()[None], labels, DIGITS) > 1e-4


def test_a_narrow_gaussian_is_the_label_alone():
    logits, labels = random_batch(11)
    soft, hard = (part(t, logits, labels) for t in (Wasserstein(target_sigma=0.01), Wasserstein()))
    assert soft == pytest.approx(hard, rel=1e-9)


@pytest.mark.parametrize("power", [1.5, 2.0, 4.0, 60.0])
def test_the_gradient_of_a_power_stays_finite_down_to_no_mass_at_all(power):
    for gap in (0.0, 10.0, 50.0, 80.0, 95.0, 110.0, 1e3, 1e5, math.inf):
        logits = torch.full((1, 1005), -gap)
        logits[0, 5] = 0.0
        logits.requires_grad_()
        vocabulary = NumberVocabulary.from_values(
            {i + 5: float(i) for i in range(1000)}, width=1005
        )
        result = Objective([Wasserstein(weight=1.0, power=power)], vocabulary)(
            logits, torch.tensor([5])
        )
        result.loss.backward()
        shares = math.fsum((d / 999) ** power for d in range(1, 1000))
        shares /= 1 + 999 * math.exp(-gap)
        truth = 999 * shares ** (1 / power) * math.exp(-gap / power)
        assert result.loss.item() == pytest.approx(truth, rel=1e-4, abs=1e-30)
        assert logits.grad.isfinite().all()


def test_number_mass_is_zero_only_without_text_and_goes_with_log_mass():
    def loss(*tokens):
        logits = torch.full((1, WIDTH), -math.inf)
        logits[0, list(tokens)] = 0.0
        return part(NumberMass(), logits, torch.tensor([2]))

    assert loss(2) == 0
    assert loss(3, 7, 11) == pytest.approx(0, abs=1e-7)
    assert loss(2, 3, 0) == pytest.approx(math.log(3 / 2), rel=1e-6)
    assert loss(2, 0, 1, 4) == pytest.approx(math.log(4), rel=1e-6)


def test_number_mass_is_never_negative_by_rounding():
    generator = torch.Generator().manual_seed(14)
    logits = torch.randn(500, WIDTH, generator=generator) * 5 + 40
    logits[:, [i for i in range(WIDTH) if i not in VALUES]] = -100.0
    statistics = numbers_only(logits, torch.full((500,), 2))
    assert (statistics.log_number_mass > 0).any()
    assert NumberMass().per_position(statistics).min() == 0


@pytest.mark.parametrize("lead", [-3.0, 0.0, 3.0, 30.0, 300.0])
def test_number_mass_pulls_where_reweighing_does_not_and_never_harder_than_one(lead):
    """The lead of the text tokens over the numbers, in logits."""
    logits = torch.zeros(1, WIDTH, dtype=torch.float64)
    logits[0, [i for i in range(WIDTH) if i not in VALUES]] += lead
    mass = 6 / (6 + 7 * math.exp(lead))
    pulls = {}
    for term in (NumberMass(weight=1.0), Wasserstein(weight=1.0, reweigh=True)):
        given_logits = logits.clone().requires_grad_()
        Objective([term], VOCABULARY)(given_logits, torch.tensor([2])).loss.backward()
        text = [i for i in range(WIDTH) if i not in VALUES]
        pulls[term.name] = given_logits.grad[0, text].sum().item()
        if term.name == "number_mass":
            assert given_logits.grad.abs().max() <= 1
    within = sum(abs(v - 1) for v in VALUES.values()) / 6
    assert pulls["number_mass"] == pytest.approx(1 - mass, rel=1e-9)
    assert pulls["ntl_was"] == pytest.approx(
        mass * (1 - mass) * (1.01 * SPREAD - within), rel=1e-9, abs=1e-250
    )


def test_cross_entropy_at_a_number_is_number_mass_plus_cross_entropy_among_numbers():
    logits, labels = random_batch(12)
    statistics = numbers_only(logits, labels)
    among = -statistics.number_log_probabilities.gather(
        1, statistics.label_index.unsqueeze(1)
    ).squeeze(1)
    torch.testing.assert_close(
        NumberMass().per_position(statistics) + among, statistics.cross_entropy
    )


def test_regression_aware_takes_mass_on_text_for_the_answer_0():
    vocabulary = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=12)

    def loss(label, *tokens, **settings):
        logits = torch.full((1, 12), -60.0)
        logits[0, list(tokens)] = 0.0
        return part(RegressionAware(**settings), logits, torch.tensor([label]), vocabulary)

    assert loss(4, 8, 10) == pytest.approx(0, abs=1e-9)
    assert loss(0, 10, 11) == pytest.approx(0, abs=1e-12)
    assert loss(4, 4, 10) == pytest.approx(4, rel=1e-4)
    assert loss(4, 3, 9) == pytest.approx(4, rel=1e-4)
    assert loss(4, 3, 9, values=[1, 2, 3]) == pytest.approx(2.5**2, rel=1e-4)


def test_answers_are_found_by_their_value_also_where_it_is_no_binary_fraction():
    vocabulary = NumberVocabulary.from_values({0: 0.1, 1: 0.9, 2: 5.0}, width=4)
    for dtype in (torch.float32, torch.float64):
        logits = torch.zeros(1, 4, dtype=dtype)
        got = part(RegressionAware(values=(0.1, 0.9)), logits, torch.tensor([0]), vocabulary)
        assert got == pytest.approx((0.25 - 0.1) ** 2, rel=1e-5)


def test_an_answer_that_no_token_can_give_is_named():
    Objective([RegressionAware(values=(1, 2.5, 1000))], VOCABULARY)
    with pytest.raises(ValueError, match=r"values holds 10, but no number .* from -7 to 1000"):
        Objective([RegressionAware(values=(1, 2.5, 10))], VOCABULARY)


def test_the_answers_are_read_from_a_configuration():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--term", type=LossTerm)
    settings = {
        "class_path": "ntl_lightning.losses.RegressionAware",
        "init_args": {"values": [1, 2, 3.5]},
    }
    given_settings = parser.parse_object({"term": settings})
    assert parser.instantiate_classes(given_settings).term == RegressionAware(values=(1, 2, 3.5))
    again = parser.parse_string(parser.dump(given_settings))
    assert parser.instantiate_classes(again).term == RegressionAware(values=(1, 2, 3.5))


def test_the_answers_may_be_a_list_and_are_kept_as_a_tuple():
    assert RegressionAware(values=[1, 2]) == RegressionAware(values=(1.0, 2.0))
    assert hash(RegressionAware(values=[1, 2])) == hash(RegressionAware(values=(1, 2)))


@pytest.mark.parametrize("make", [Wasserstein, ExpectedValue])
def test_a_digit_counts_by_its_place_in_the_written_number(make):
    vocabulary = NumberVocabulary.from_values(
        {i: float(i) for i in range(10)}, width=12, marks={10: "."}
    )
    labels = torch.tensor([[4, 0, 7, 10, 2, 5, 11, 8]])  # 407.25 and, behind a text token, 8
    places = [2, 1, 0, None, -1, -2, None, 0]
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(1, 8, 12, dtype=torch.float64, generator=generator)
    plain, reweighed = (
        costs(make(reweigh=reweigh), logits, labels, vocabulary) for reweigh in (False, True)
    )
    for base in (0.5, 3.0, 10.0):
        weights = [0.0 if place is None else base**place for place in places]
        weights = torch.tensor(weights, dtype=torch.float64)
        for values, reweigh in ((plain, False), (reweighed, True)):
            term = make(weight=1.0, place_base=base, reweigh=reweigh)
            result = Objective([term], vocabulary)(logits, labels)
            assert result.counts["numbers"] == 6
            want = (values * weights).sum() / 6
            assert result.loss.item() == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.parametrize(
    "term", [Wasserstein(largest_distance=9.0), ExpectedValue(power=1, largest_distance=9.0)]
)
def test_the_largest_distance_is_what_was_asked_for(term, v1005):
    logits = torch.full((1, 1005), -math.inf)
    logits[0, 1004] = 0.0  # all mass on 999
    assert part(term, logits, torch.tensor([5]), v1005) == pytest.approx(9.0, rel=1e-6)
    assert part(term, logits, torch.tensor([1003]), v1005) == pytest.approx(9 / 999, rel=1e-6)


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (CrossEntropy(), "cross_entropy"),
        (Wasserstein(), "ntl_was"),
        (Wasserstein(power=2), "ntl_w2"),
        (Wasserstein(power=1.5, cost="log"), "ntl_w1.5_log"),
        (Wasserstein(cost="modular", modulus=24), "ntl_was_modular"),
        (Wasserstein(cost="log", target_sigma=1.0), "ntl_was_log_soft"),
        (ExpectedValue(), "ntl_mse"),
        (ExpectedValue(power=1.0), "ntl_mae"),
        (ExpectedValue(power=1.5), "ntl_l1.5"),
        (ExpectedValue(huber_delta=1.0), "ntl_huber"),
        (NumberMass(), "number_mass"),
        (RegressionAware(), "regression_aware"),
    ],
)
def test_the_log_name_says_which_loss_it_is(term, name):
    assert term.name == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wasserstein(largest_distance=0.0), "largest_distance must be a positive number"),
        (lambda: ExpectedValue(largest_distance=-1.0), "ExpectedValue.largest_distance"),
        (lambda: ExpectedValue(power=0.5), "power must be at least 1, got 0.5"),
        (lambda: ExpectedValue(huber_delta=0.0), "huber_delta must be a positive number or null"),
        (lambda: ExpectedValue(place_base=0.0), "ExpectedValue.place_base must be a positive num"),
        (lambda: ExpectedValue(power=1.0, huber_delta=1.0), "has no effect with huber_delta"),
        (lambda: Wasserstein(squash_factor=0.5), "squash_factor must be a number of at least 1"),
        (lambda: Wasserstein(squash_factor=True), "squash_factor must be .* got True"),
        (lambda: Wasserstein(squash_factor=2.0, largest_distance=9.0), "both set the largest"),
        (lambda: Wasserstein(power=0.5), "Wasserstein.power must be at least 1, got 0.5"),
        (lambda: Wasserstein(power=math.inf), "Wasserstein.power must be at least 1, got inf"),
        (lambda: Wasserstein(cost="squared"), "must be one of absolute, log, modular, got 'squar"),
        (lambda: Wasserstein(cost="modular"), "cost='modular' with modulus=None"),
        (lambda: Wasserstein(modulus=24.0), "cost='absolute' with modulus=24.0"),
        (
            lambda: Wasserstein(cost="modular", modulus=-1.0),
            "Wasserstein.modulus must be a positive number or null, got -1.0",
        ),
        (lambda: Wasserstein(target_sigma=0.0), "Wasserstein.target_sigma must be a positive num"),
        (
            lambda: Wasserstein(target_sigma=1.0, power=2.0),
            "target_sigma=1.0 and power=2.0",
        ),
        (
            lambda: Wasserstein(target_sigma=1.0, squash_factor=2.0),
            "target_sigma=1.0 and squash_factor=2.0",
        ),
        (
            lambda: Wasserstein(target_sigma=1.0, cost="modular", modulus=5.0),
            "target_sigma=1.0 and modulus=5.0",
        ),
        (lambda: Wasserstein(place_base=-1.0), "Wasserstein.place_base must be a positive number"),
        (lambda: Wasserstein(place_base=True), "Wasserstein.place_base must be a positive number"),
        (lambda: RegressionAware(values=()), "RegressionAware.values must hold at least two"),
        (lambda: RegressionAware(values=(1, 1)), "RegressionAware.values must hold at least two"),
        (lambda: RegressionAware(values=(1, math.nan)), "RegressionAware.values must hold at lea"),
        (lambda: RegressionAware(largest_distance=0.0), "RegressionAware.largest_distance must"),
    ],
)
def test_settings_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
