"""Values and gradients of the terms against loops in float64, scipy and the ntloss package."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from ntl_lightning.losses import (
    CrossEntropy,
    ExpectedValue,
    LinearWarmup,
    Objective,
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


ORACLES = [
    (Wasserstein(), oracle.wasserstein, {}),
    (ExpectedValue(), oracle.expected_value, {"power": 2.0}),
    (ExpectedValue(power=1.0), oracle.expected_value, {"power": 1.0}),
    (ExpectedValue(power=1.5), oracle.expected_value, {"power": 1.5}),
    (ExpectedValue(huber_delta=3.0), oracle.huber, {"delta": 3.0}),
]


@pytest.mark.parametrize(("term", "formula", "options"), ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_number_term_equals_its_formula(term, formula, options, seed):
    logits, labels = random_batch(seed)
    want = oracle.mean_over_numbers(formula, logits.tolist(), labels.tolist(), VALUES, **options)
    assert part(term, logits, labels) == pytest.approx(want, rel=1e-9)
    assert part(term, logits.float(), labels) == pytest.approx(want, rel=1e-5)


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


@pytest.mark.parametrize("term", [term for term, _, _ in ORACLES])
def test_gradcheck(term):
    logits, labels = random_batch(5, rows=6, scale=1.0)
    objective = Objective([CrossEntropy(), term], VOCABULARY)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: objective(z, labels).loss, (logits,), nondet_tol=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_wasserstein_equals_scipy_on_unevenly_spaced_values(seed):
    logits, labels = random_batch(seed, rows=20)
    ids, values = list(VALUES), list(VALUES.values())
    distances = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label in VALUES:
            q = torch.softmax(row[ids], -1).numpy()
            distances.append(wasserstein_distance(values, [VALUES[label]], q, [1.0]))
    got = part(Wasserstein(), logits.float(), labels)
    assert got == pytest.approx(np.mean(distances), rel=1e-6)


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


@given(st.integers(0, 2**32 - 1), st.permutations(range(WIDTH)))
@settings(max_examples=40, deadline=None)
def test_renaming_token_ids_changes_nothing(seed, order):
    logits, labels = random_batch(seed, rows=5)
    place = {old: new for new, old in enumerate(order)}
    renamed = NumberVocabulary.from_values(
        dict(sorted((place[i], v) for i, v in VALUES.items())), width=WIDTH
    )
    new_labels = torch.tensor([place.get(i, -100) for i in labels.tolist()])
    for term in (Wasserstein(), ExpectedValue(), CrossEntropy()):
        before = part(term, logits, labels)
        after = part(term, logits[:, order], new_labels, renamed)
        assert after == pytest.approx(before, rel=1e-9, abs=1e-12)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_wasserstein_is_zero_only_at_the_label_and_grows_with_the_distance(label, one, other):
    vocabulary = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)

    def loss(said):
        logits = torch.full((1, 10), -math.inf)
        logits[0, said] = 0.0
        return part(Wasserstein(), logits, torch.tensor([label]), vocabulary)

    assert loss(one) == abs(one - label)
    assert (loss(one) < loss(other)) == (abs(one - label) < abs(other - label))


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
        (ExpectedValue(), "ntl_mse"),
        (ExpectedValue(power=1.0), "ntl_mae"),
        (ExpectedValue(power=1.5), "ntl_l1.5"),
        (ExpectedValue(huber_delta=1.0), "ntl_huber"),
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
        (lambda: ExpectedValue(huber_delta=0.0), "huber_delta must be positive"),
        (lambda: ExpectedValue(power=1.0, huber_delta=1.0), "has no effect with huber_delta"),
        (lambda: Wasserstein(squash_factor=0.5), "squash_factor must be a number of at least 1"),
        (lambda: Wasserstein(squash_factor=True), "squash_factor must be .* got True"),
        (lambda: Wasserstein(squash_factor=2.0, largest_distance=9.0), "both set the largest"),
        (lambda: LinearWarmup(steps=0), "steps must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
