"""The Gaussian target and the distance of distributions, against transport by hand and scipy."""

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ntl_lightning.losses import CrossEntropy, Objective
from ntl_lightning.losses.distributions import gaussian_target, wasserstein_distance
from ntl_lightning.numbers.vocabulary import NumberVocabulary
from tests.oracles import losses as oracle


@st.composite
def two_distributions(draw):
    """Values in any order, some of them repeated, and two distributions over them."""
    size = draw(st.integers(1, 8))
    values = draw(st.lists(st.integers(-30, 30), min_size=size, max_size=size))
    masses = st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any)
    first, second = (torch.tensor(draw(masses), dtype=torch.float64) for _ in range(2))
    return first / first.sum(), second / second.sum(), torch.tensor(values) / 4


@given(two_distributions())
@settings(deadline=None)
def test_the_distance_equals_transport_by_hand_and_scipy(case):
    p, g, values = case
    got = wasserstein_distance(p[None], g[None], values.double()).item()
    by_hand = oracle.transport(p.tolist(), g.tolist(), values.tolist())
    assert got == pytest.approx(by_hand, rel=1e-9, abs=1e-13)
    assert got == pytest.approx(
        scipy.stats.wasserstein_distance(values, values, p, g), rel=1e-9, abs=1e-13
    )
    in_float32 = wasserstein_distance(p[None].float(), g[None].float(), values).item()
    assert in_float32 == pytest.approx(by_hand, rel=1e-5, abs=1e-5)


@given(two_distributions())
@settings(deadline=None)
def test_the_distance_is_symmetric_and_zero_for_equal_masses_of_each_value_only(case):
    p, g, values = case
    there = wasserstein_distance(p[None], g[None], values.double())
    back = wasserstein_distance(g[None], p[None], values.double())
    assert there == back
    equal = all(
        math.isclose(p[values == v].sum(), g[values == v].sum(), abs_tol=1e-12)
        for v in values.unique()
    )
    assert (there.item() < 1e-12) == equal


@given(two_distributions(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_values_does_not_matter(case, random):
    p, g, values = case
    order = list(range(len(values)))
    random.shuffle(order)
    before = wasserstein_distance(p[None], g[None], values.double())
    after = wasserstein_distance(p[None][:, order], g[None][:, order], values.double()[order])
    assert after.item() == pytest.approx(before.item(), rel=1e-12, abs=1e-14)


def test_to_a_target_on_one_value_it_is_the_mean_distance():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=generator, dtype=torch.float64) * 100
    p = torch.softmax(torch.randn(20, 50, generator=generator, dtype=torch.float64) * 3, -1)
    labels = torch.randint(0, 50, (20,), generator=generator)
    target = torch.nn.functional.one_hot(labels, 50).double()
    want = (p * (values - values[labels, None]).abs()).sum(-1)
    torch.testing.assert_close(wasserstein_distance(p, target, values), want)


def test_the_distance_is_differentiable_in_both_distributions():
    generator = torch.Generator().manual_seed(1)
    p, g = (torch.rand(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.tensor([4.0, 1.0, 9.0, 1.0, -3.0, 100.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: wasserstein_distance(a.softmax(-1), b.softmax(-1), values),
        (p.requires_grad_(), g.requires_grad_()),
    )


def statistics_of(labels, vocabulary):
    logits = torch.zeros(len(labels), vocabulary.width, dtype=torch.float64)
    return Objective([CrossEntropy()], vocabulary)(logits, torch.tensor(labels)).statistics


@given(
    st.lists(st.integers(-500, 500), min_size=1, max_size=9, unique=True),
    st.floats(0.05, 100),
    st.data(),
)
@settings(deadline=None)
def test_the_target_is_the_gaussian_over_the_values(values, sigma, data):
    numbers = {3 * i + 1: v / 10 for i, v in enumerate(values)}
    label = data.draw(st.sampled_from(sorted(numbers)))
    vocabulary = NumberVocabulary.from_values(numbers, width=40)
    got = gaussian_target(statistics_of([label], vocabulary), sigma)
    want = oracle.gaussian(label, vocabulary_values(vocabulary), sigma)
    assert got.sum().item() == pytest.approx(1, rel=1e-12)
    assert got[0].tolist() == pytest.approx(list(want.values()), rel=1e-5, abs=1e-12)


def vocabulary_values(vocabulary):
    """Token id to value, as float32 holds it."""
    values = torch.tensor(vocabulary.values, dtype=torch.float32).tolist()
    return dict(zip(vocabulary.token_ids, values, strict=True))


def test_no_mass_goes_to_tokens_that_the_text_cannot_go_on_with():
    values = {0: 4.0, 1: 5.0, 2: 6.0, 3: 4.0, 4: 5.0, 5: 6.0}
    vocabulary = replace(
        NumberVocabulary.from_values(values, width=7),
        tokens=("4", "5", "6", "▁4", "▁5", "▁6"),
        forms=(),
    )
    statistics = statistics_of([1, 4], vocabulary)
    assert statistics.number_starts_word.tolist() == [False] * 3 + [True] * 3
    within, at_the_start = gaussian_target(statistics, 1.0).tolist()
    wing = math.exp(-0.5)
    bell = [mass / (1 + 2 * wing) for mass in (wing, 1, wing)]
    assert within == pytest.approx([*bell, 0, 0, 0], rel=1e-12)
    assert at_the_start == pytest.approx([0, 0, 0, *bell], rel=1e-12)
    for row, label in ((within, 1), (at_the_start, 4)):
        want = oracle.gaussian(label, values, 1.0, starts_word={3, 4, 5})
        assert row == pytest.approx(list(want.values()), rel=1e-12)


def test_a_target_far_narrower_than_the_gaps_is_the_label_and_finite():
    vocabulary = NumberVocabulary.from_values({i: 1e6 * i for i in range(4)}, width=4)
    for sigma in (1e-30, 1e-3):
        target = gaussian_target(statistics_of([2, 0], vocabulary), sigma)
        assert target.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


@given(st.floats(1e-3, 1e3))
def test_the_target_is_highest_at_the_label_and_falls_with_the_distance(sigma):
    digits = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    for label in (0, 4, 9):
        row = gaussian_target(statistics_of([label], digits), sigma)[0].tolist()
        by_distance = [row[k] for k in sorted(range(10), key=lambda k: abs(k - label))]
        assume(row[label] > 0)
        assert by_distance == sorted(by_distance, reverse=True)
