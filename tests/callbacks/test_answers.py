from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntl_lightning.callbacks.answers import Answer, answers_of, difference, number_in


def test_answers_of_a_batch_keep_order_and_unknown_targets() -> None:
    outputs = {"index": [4, 2], "prompt": ["a", "b"], "target": ["1", None], "answer": ["2", ""]}
    assert answers_of(outputs) == [
        Answer(4, "a", "1", "2", Decimal(2)),
        Answer(2, "b", None, "", None),
    ]


def test_the_value_of_an_answer_is_the_one_that_comes_with_it() -> None:
    outputs = {
        "index": [0, 1],
        "prompt": ["a", "b"],
        "target": ["1000", "1"],
        "answer": ["3.00", "9e9"],
        "value": [Decimal(1000), None],
    }
    assert answers_of(outputs) == [
        Answer(0, "a", "1000", "3.00", Decimal(1000)),
        Answer(1, "b", "1", "9e9", None),
    ]


def test_lists_of_unequal_length_are_an_error() -> None:
    outputs = {"index": [4, 2], "prompt": ["a"], "target": ["1", None], "answer": ["2", ""]}
    with pytest.raises(ValueError, match="shorter"):
        answers_of(outputs)


@pytest.mark.parametrize("outputs", [None, torch.zeros(()), {"loss": torch.zeros(())}])
def test_a_step_that_gives_no_answers_is_told_from_one_that_does(outputs: object) -> None:
    assert answers_of(outputs) is None


def test_the_number_of_a_text_is_its_last() -> None:
    assert number_in("3 and 1,234.50") == Decimal("1234.50")
    assert number_in(None) is None
    assert number_in("none") is None


@given(
    *[st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40)] * 2
)
def test_difference_is_that_of_fractions(answer: Decimal, target: Decimal) -> None:
    assert Fraction(difference(answer, target)) == Fraction(answer) - Fraction(target)


def test_difference_of_numbers_far_apart_is_rounded_and_does_not_hang() -> None:
    assert difference(Decimal("1e999999"), Decimal(1)) == Decimal("1e999999")
