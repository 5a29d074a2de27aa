import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ntl_lightning.data.problems import Arithmetic
from ntl_lightning.data.sources import Example


def operands(examples: list[Example]) -> list[tuple[int, int]]:
    """Both operands of every prompt, read with an expression of our own."""
    found = [re.fullmatch(r"(\d+)[-+*](\d+)=", e.prompt) for e in examples]
    return [(int(match[1]), int(match[2])) for match in found if match]


def problems(examples: list[Example]) -> set[object]:
    """What may not be shared between sets: the sign with the operands, without their order."""
    return {
        (e.prompt.strip("0123456789="), *(pair if "-" in e.prompt else sorted(pair)))
        for e, pair in zip(examples, operands(examples), strict=True)
    }


digit_ranges = st.tuples(st.integers(1, 19), st.integers(1, 19)).map(lambda p: (min(p), max(p)))
operations = st.sampled_from(["addition", "subtraction", "multiplication"])
splits = st.sampled_from(["train", "val", "test"])
CALCULATE = {"addition": int.__add__, "subtraction": int.__sub__, "multiplication": int.__mul__}
SIGNS = {"addition": "+", "subtraction": "-", "multiplication": "*"}


@given(operations, splits, digit_ranges, digit_ranges, st.integers(0, 2**64))
def test_answers_and_digits_are_right(operation, split, left_digits, right_digits, seed):
    source = Arithmetic(operation, 5, split, left_digits, right_digits, seed=seed)
    examples = source.examples()
    assert len(examples) == 5
    for example, (left, right) in zip(examples, operands(examples), strict=True):
        assert example.prompt == f"{left}{SIGNS[operation]}{right}="
        assert example.target == str(CALCULATE[operation](left, right))
        assert left_digits[0] <= len(str(left)) <= left_digits[1]
        assert right_digits[0] <= len(str(right)) <= right_digits[1]


def test_products_of_nineteen_digits_are_exact():
    examples = Arithmetic("multiplication", 100, "train", (19, 19), (19, 19)).examples()
    for example, (left, right) in zip(examples, operands(examples), strict=True):
        assert int(str(example.target)) == left * right > 10**36


@given(
    operations,
    st.permutations(["train", "val", "test"]),
    st.lists(st.tuples(digit_ranges, digit_ranges, st.integers(0, 9)), min_size=2, max_size=2),
)
def test_sets_are_disjoint_whatever_the_seeds_and_digits(operation, order, settings):
    drawn = [
        problems(Arithmetic(operation, 5, split, left, right, seed=seed).examples())
        for split, (left, right, seed) in zip(order[:2], settings, strict=True)
    ]
    assert drawn[0].isdisjoint(drawn[1])


@pytest.mark.parametrize("operation", ["addition", "subtraction", "multiplication"])
def test_the_three_sets_are_a_partition_of_all_problems(operation):
    sets = [Arithmetic(operation, None, s).examples() for s in ("train", "val", "test")]
    pairs = [pair for examples in sets for pair in operands(examples)]
    assert sorted(pairs) == [(a, b) for a in range(100) for b in range(100)]
    train, val, test = map(problems, sets)
    assert not (train & val) | (train & test) | (val & test)
    # 80, 10 and 10 %: within four standard deviations of a fair hash of 5050 or 10000 problems.
    share = np.array([len(train), len(val), len(test)]) / len(train | val | test)
    np.testing.assert_allclose(share, [0.8, 0.1, 0.1], rtol=0, atol=0.023)


def test_both_orders_of_a_sum_are_in_the_same_set():
    train = set(operands(Arithmetic("addition", None, "train").examples()))
    assert train == {(b, a) for a, b in train}
    train = set(operands(Arithmetic("subtraction", None, "train").examples()))
    assert train != {(b, a) for a, b in train}


def splitmix64(state: int) -> int:
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_set_of_a_problem_follows_the_documented_hash():
    # The published first output of SplitMix64 for this seed.
    assert splitmix64(1234567) == 6457827717110365317

    def tenth(code: int, first: int, second: int) -> int:
        return splitmix64(splitmix64(splitmix64(code) ^ first) ^ second) % 10

    for split, tenths in (("train", range(8)), ("val", [8]), ("test", [9])):
        for left, right in operands(Arithmetic("subtraction", 300, split, (1, 19)).examples()):
            assert tenth(2, left, right) in tenths
        for left, right in operands(Arithmetic("multiplication", 300, split, (1, 19)).examples()):
            assert tenth(3, min(left, right), max(left, right)) in tenths


def test_extrapolation_asks_for_digits_that_training_never_has():
    train = Arithmetic("addition", None, "train").examples()
    far = Arithmetic("addition", 500, "test", (3, 3), (3, 3)).examples()
    assert max(max(pair) for pair in operands(train)) == 99
    assert min(min(pair) for pair in operands(far)) >= 100
    assert problems(train).isdisjoint(problems(far))
    wide = Arithmetic("addition", 500, "test", (1, 3), (1, 3)).examples()
    assert min(min(pair) for pair in operands(wide)) < 100
    assert problems(train).isdisjoint(problems(wide))


# 6400 of about 8000 problems are picked from a list; 20000 of about 810000 are drawn.
@pytest.mark.parametrize(
    ("split", "count", "left_digits", "right_digits"),
    [
        ("train", 6400, (1, 2), (1, 2)),
        ("test", 20_000, (4, 4), (3, 3)),
        ("val", 20, (1, 19), (1, 19)),
    ],
)
def test_no_problem_is_drawn_twice(split, count, left_digits, right_digits):
    source = Arithmetic("addition", count, split, left_digits, right_digits)
    pairs = operands(source.examples())
    assert len(set(pairs)) == len(pairs) == count


def test_operands_drawn_are_uniform_over_all_integers():
    source = Arithmetic("multiplication", 50_000, "train", (1, 3), (1, 4))
    left, right = np.array(operands(source.examples())).T
    assert stats.chisquare(np.bincount(left, minlength=1000)).pvalue > 0.001
    assert stats.chisquare(np.bincount(right // 10, minlength=1000)).pvalue > 0.001
    blocks, *_ = np.histogram2d(left, right, bins=10, range=[(0, 1000), (0, 10_000)])
    assert stats.chisquare(blocks.ravel()).pvalue > 0.001


def test_operands_picked_from_a_list_are_uniform_over_all_integers():
    pairs = np.array(operands(Arithmetic("addition", 60_000, "val", (1, 3), (1, 3)).examples()))
    for column in pairs.T:
        assert stats.chisquare(np.bincount(column, minlength=1000)).pvalue > 0.001


def test_long_operands_are_uniform_from_end_to_end():
    pairs = operands(Arithmetic("addition", 5000, "train", (19, 19), (1, 1)).examples())
    lefts = [(left - 10**18) / (9 * 10**18) for left, _ in pairs]
    assert stats.kstest(lefts, "uniform").pvalue > 0.001
    assert stats.chisquare(np.bincount([right for _, right in pairs])).pvalue > 0.001


def test_differences_are_not_negative_when_so_asked():
    for count in (None, 500):
        source = Arithmetic("subtraction", count, "train", allow_negative=False)
        assert all(int(str(e.target)) >= 0 for e in source.examples())
    either = Arithmetic("subtraction", 500, "train").examples()
    assert 100 < sum(str(e.target).startswith("-") for e in either) < 400


def test_no_difference_that_is_not_negative_is_left_out():
    pairs = [
        pair
        for split in ("train", "val", "test")
        for pair in operands(
            Arithmetic("subtraction", None, split, (1, 2), (2, 3), allow_negative=False).examples()
        )
    ]
    assert sorted(pairs) == [(a, b) for a in range(10, 100) for b in range(10, a + 1)]


def test_differences_that_are_not_negative_are_found_where_they_are_rare():
    # Of 10 x 10^18 pairs only 55 are not negative.
    counts = [
        len(Arithmetic("subtraction", None, s, (1, 1), (1, 18), allow_negative=False).examples())
        for s in ("train", "val", "test")
    ]
    assert sum(counts) == 55
    drawn = Arithmetic("subtraction", 50, "test", (1, 18), (18, 18), allow_negative=False)
    assert all(int(str(e.target)) >= 0 for e in drawn.examples())


@given(st.integers(0, 2**32), splits, st.sampled_from([3, 900]))
def test_equal_fields_give_equal_examples_and_seeds_differ(seed, split, count):
    def draw(seed: int) -> list[Example]:
        return Arithmetic("addition", count, split, seed=seed).examples()

    assert draw(seed) == draw(seed)
    assert draw(seed) != draw(seed + 1)


def test_problems_of_more_digits_are_not_those_of_fewer_with_a_digit_appended():
    def pairs(right_digits: int) -> list[tuple[int, int]]:
        digits = (4, 4), (right_digits, right_digits)
        return operands(Arithmetic("multiplication", 2000, "train", *digits).examples())

    # By chance, one in twenty times one of them.
    assert len(set(pairs(4)) & {(left, right // 10) for left, right in pairs(5)}) < 5


def test_arithmetic_is_the_same_on_every_machine():
    picked = Arithmetic("addition", 3, "train").examples()
    assert [e.prompt for e in picked] == ["70+88=", "71+57=", "23+47="]
    drawn = Arithmetic("addition", 3, "train", (1, 9), (1, 9)).examples()
    assert [e.prompt for e in drawn] == [
        "248933993+765774622=",
        "131731067+706055166=",
        "462481031+825299563=",
    ]
    every = Arithmetic("multiplication", None, "test", (1, 1), (1, 1)).examples()
    assert {e.prompt for e in every} == {
        *("0*1=", "1*0=", "0*4=", "4*0=", "4*4=", "6*6=", "7*7="),
    }


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("operation", ["addition", "subtraction", "multiplication"])
def test_small_sets_can_be_drawn_to_the_last_problem(operation, split):
    # As few as seven of the hundred pairs of single digits belong to one set.
    there = len(Arithmetic(operation, None, split, (1, 1), (1, 1)).examples())
    for count in range(1, there + 1):
        source = Arithmetic(operation, count, split, (1, 1), (1, 1))
        assert len(source.examples()) == count


def test_origins_name_operation_set_and_index():
    examples = Arithmetic("addition", 2, "val").examples()
    origins = [e.origin for e in examples]
    assert origins == ["Arithmetic(addition, val)[0]", "Arithmetic(addition, val)[1]"]


def test_the_template_may_be_written_otherwise():
    plain = Arithmetic("addition", 5, "train").examples()
    words = Arithmetic("addition", 5, "train", template="What is {right} plus {left}?").examples()
    for a, b, (left, right) in zip(plain, words, operands(plain), strict=True):
        assert b.prompt == f"What is {right} plus {left}?"
        assert b.target == a.target


def test_more_examples_than_there_are_is_an_error_with_their_number():
    there = len(Arithmetic("addition", None, "val").examples())
    assert len(Arithmetic("addition", there, "val").examples()) == there
    message = (
        rf"num_examples asks for {there + 1}, but there are {there} addition problems of val with "
        r"left_digits \[1, 2\] and right_digits \[1, 2\]\. Ask for fewer, or for more digits\."
    )
    with pytest.raises(ValueError, match=message):
        Arithmetic("addition", there + 1, "val").examples()


@pytest.mark.parametrize("count", [None, 1])
def test_an_empty_set_is_an_error(count):
    source = Arithmetic("subtraction", count, "train", (1, 1), (2, 2), allow_negative=False)
    with pytest.raises(ValueError, match=r"there are 0 subtraction problems .*, none negative\."):
        source.examples()


def test_all_of_too_many_is_an_error_with_their_number():
    with pytest.raises(ValueError, match=r"about 4e\+07, but is meant for at most 10000000"):
        Arithmetic("subtraction", None, "train", (1, 4), (1, 4), allow_negative=False).examples()
    with pytest.raises(ValueError, match=r"all addition problems of train .*, about 8e\+07, .*how"):
        Arithmetic("addition", None, "train", (1, 4), (1, 4)).examples()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 0}, r"Arithmetic\.num_examples must be 1 or more, got 0"),
        ({"seed": -1}, r"Arithmetic\.seed must be 0 or more, got -1"),
        ({"left_digits": (0, 2)}, r"Arithmetic\.left_digits .* from 1 to 19, got \[0, 2\]"),
        ({"right_digits": (3, 2)}, r"Arithmetic\.right_digits .* got \[3, 2\]"),
        ({"right_digits": (1, 20)}, r"Arithmetic\.right_digits .* got \[1, 20\]"),
        ({"template": "{left}+3="}, r"Arithmetic\.template must have .* got '\{left\}\+3='"),
        ({"template": "{left}{right}{x}"}, r"Arithmetic\.template must have the fields"),
        ({"template": "{left}+{right"}, r"Arithmetic\.template: .*without its partner"),
        ({"template": ""}, r"Arithmetic\.template: '' has no field"),
        ({"allow_negative": False}, r"Arithmetic\.allow_negative: false has no effect on addition"),
    ],
)
def test_arithmetic_refuses_values_that_describe_no_problems(fields, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**{"operation": "addition", "num_examples": 5, "split": "train", **fields})
