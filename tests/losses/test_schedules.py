"""Weights by optimizer step: the steps where they change, and settings that make no sense."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntl_lightning.losses import Objective, Wasserstein
from ntl_lightning.losses.schedules import Constant, Cosine, LinearWarmup, StepRange


def factors(schedule, steps):
    return [schedule.factor(step) for step in steps]


def test_a_constant_is_one_at_every_step():
    assert factors(Constant(), [0, 1, 10**9]) == [1.0, 1.0, 1.0]


def test_a_warmup_starts_at_zero_and_is_full_at_its_last_step():
    assert factors(LinearWarmup(steps=4), [0, 1, 3, 4, 5]) == [0.0, 0.25, 0.75, 1.0, 1.0]
    assert factors(LinearWarmup(steps=1), [0, 1]) == [0.0, 1.0]


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.1), (0.1, 3.3)])
def test_a_cosine_meets_both_ends_exactly_and_stays_at_the_last(start, end):
    schedule = Cosine(steps=8, start=start, end=end)
    assert factors(schedule, [0, 8, 9, 10**6]) == [start, end, end, end]
    assert schedule.factor(4) == pytest.approx((start + end) / 2, rel=1e-15)
    wave = [end + (start - end) * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert factors(schedule, range(9)) == pytest.approx(wave, rel=1e-12, abs=1e-15)


@given(st.integers(1, 50), st.floats(0, 10), st.floats(0, 10))
def test_a_cosine_never_leaves_its_two_levels_nor_turns_back(steps, start, end):
    if start == end:
        return
    found = factors(Cosine(steps=steps, start=start, end=end), range(steps + 3))
    slack = 1e-12 * max(start, end)
    assert all(min(start, end) - slack <= factor <= max(start, end) + slack for factor in found)
    sign = 1 if end > start else -1
    assert all(sign * (b - a) >= -slack for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("schedule", "acting"),
    [
        (StepRange(first=2, last=4), {2, 3, 4}),
        (StepRange(first=3), {3, 4, 5, 6, 7}),
        (StepRange(last=2), {0, 1, 2}),
        (StepRange(first=5, last=5), {5}),
        (StepRange(last=0), {0}),
    ],
)
def test_a_range_acts_from_its_first_to_its_last_step(schedule, acting):
    assert factors(schedule, range(8)) == [float(step in acting) for step in range(8)]


def test_a_range_without_a_last_step_never_ends():
    assert StepRange(first=10).factor(10**12) == 1.0


def test_outside_its_range_a_term_is_logged_but_has_no_gradient(v15):
    term = Wasserstein(weight=0.5, schedule=StepRange(first=1, last=1))
    objective = Objective([term], v15)
    logits = torch.zeros(1, 15, requires_grad=True)
    values = []
    for step in range(3):
        logits.grad = None
        result = objective(logits, torch.tensor([5]), step=step)
        result.loss.backward()
        values.append((result.loss.item(), bool(logits.grad.any()), result.parts["ntl_was"].item()))
    assert values == [(0.0, False, 4.5), (2.25, True, 4.5), (0.0, False, 4.5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWarmup(steps=0), "LinearWarmup.steps must be at least 1, got 0"),
        (lambda: Cosine(steps=0), "Cosine.steps must be at least 1, got 0"),
        (lambda: Cosine(steps=4, start=-0.1), "Cosine.start must be a number of at least 0"),
        (lambda: Cosine(steps=4, end=math.inf), "Cosine.end must be a number of at least 0"),
        (lambda: Cosine(steps=4, start=0.5, end=0.5), "start and end are both 0.5"),
        (lambda: StepRange(first=-1), "StepRange.first must be at least 0, got -1"),
        (lambda: StepRange(first=5, last=4), "StepRange.last must be at least first=5"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
