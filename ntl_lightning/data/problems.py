"""Arithmetic problems, made from a seed."""

import operator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ntl_lightning.data.sources import Example, Source, TextTemplate

__all__ = ["TENTHS", "Arithmetic", "Split", "check_count", "check_seed"]

Operation = Literal["addition", "subtraction", "multiplication"]
Split = Literal["train", "val", "test"]

Operands = NDArray[np.uint64]

_CODES = {"addition": 1, "subtraction": 2, "multiplication": 3}
_SIGNS = {"addition": "+", "subtraction": "-", "multiplication": "*"}
_ANSWERS = {"addition": operator.add, "subtraction": operator.sub, "multiplication": operator.mul}
# Tenths of all problems. Changing these, the codes or a hash moves problems to another set.
TENTHS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}
_MOST_DIGITS = 19  # what 64 bits hold
_MOST_OF_ALL = 10_000_000
# Up to so many pairs are always listed: few pairs of a set may be fewer than its tenths promise.
_LISTED = 1 << 20
_CHUNK = 1 << 16
_NONE = (np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64))


@dataclass(frozen=True)
class Arithmetic(Source):
    """Sums, differences and products of two integers, in three sets that never share a problem.

    Operands are uniform over all integers with the digits asked for (0 has one digit), each pair
    is drawn at most once, and answers are exact. A fixed hash of the operation and its operands
    puts every pair into train (80 %), val (10 %) or test (10 %), so that the three are disjoint
    whatever the seeds, digits and templates; `3+5` and `5+3` are always in the same set. To test
    extrapolation, ask for more digits than in training.
    """

    operation: Operation
    """What to do with the operands."""
    num_examples: int | None
    """How many examples; null: all there are in this set, in random order."""
    split: Split
    """The set to draw from."""
    left_digits: tuple[int, int] = (1, 2)
    """Fewest and most digits of the left operand, 1 to 19."""
    right_digits: tuple[int, int] = (1, 2)
    """Fewest and most digits of the right operand, 1 to 19."""
    seed: int = 0
    """Seed of numpy's default generator. Equal fields give equal examples."""
    template: str | None = None
    """The prompt, with {left} and {right}. null: `{left}+{right}=`, with - or * in its place."""
    allow_negative: bool = True
    """Whether a difference may be below zero. If not, only pairs with left >= right are drawn."""

    def __post_init__(self) -> None:
        """Refuse values that describe no problems.

        Raises:
            ValueError: If a count, seed or range of digits makes no sense, if the template does
                not show both operands, or if `allow_negative` is off where it has no effect.
        """
        if self.num_examples is not None:
            check_count("Arithmetic", self.num_examples)
        check_seed("Arithmetic", self.seed)
        for name in ("left_digits", "right_digits"):
            fewest, most = getattr(self, name)
            if not 1 <= fewest <= most <= _MOST_DIGITS:
                raise ValueError(
                    f"Arithmetic.{name} must be the fewest and the most digits, from 1 to "
                    f"{_MOST_DIGITS}, got [{fewest}, {most}]."
                )
        fields = self._prompt().fields
        if set(fields) != {"left", "right"}:
            raise ValueError(
                "Arithmetic.template must have the fields {left} and {right} and no other, got "
                f"{self.template!r}."
            )
        if not self.allow_negative and self.operation != "subtraction":
            raise ValueError(
                f"Arithmetic.allow_negative: false has no effect on {self.operation}, whose "
                "answers are never negative. Remove it."
            )

    def examples(self) -> list[Example]:
        """Draw the examples.

        Raises:
            ValueError: If the set has fewer problems than asked for, or if all of more than ten
                million are asked for.
        """
        left, right = self._operands()
        # Python's integers: a product of two operands has up to 38 digits.
        answer = _ANSWERS[self.operation]
        prompt = self._prompt()
        return [
            Example(
                prompt=prompt.fill({"left": str(a), "right": str(b)}),
                target=str(answer(a, b)),
                origin=f"Arithmetic({self.operation}, {self.split})[{index}]",
            )
            for index, (a, b) in enumerate(zip(left.tolist(), right.tolist(), strict=True))
        ]

    def _prompt(self) -> TextTemplate:
        text = self.template
        if text is None:
            text = f"{{left}}{_SIGNS[self.operation]}{{right}}="
        return TextTemplate.parse(text, "Arithmetic.template")

    def _operands(self) -> tuple[Operands, Operands]:
        box = _Box.of_digits(self.left_digits, self.right_digits, ordered=not self.allow_negative)
        first, last = TENTHS[self.split]
        # Sources that differ in their digits alone do not draw from one stream.
        digits = (*self.left_digits, *self.right_digits)
        random = np.random.default_rng([self.seed, _CODES[self.operation], *digits])
        wanted = self.num_examples
        if wanted is None:
            if box.num_pairs * (last - first) > 10 * _MOST_OF_ALL:
                raise ValueError(
                    f"Arithmetic.num_examples: null asks for all {self._problems()}, about "
                    f"{box.num_pairs * (last - first) / 10:.2g}, but is meant for at most "
                    f"{_MOST_OF_ALL}. Write how many to draw."
                )
        elif box.area > _LISTED and 20 * wanted <= box.num_pairs * (last - first):
            return self._drawn(box, wanted, random)
        left, right = self._all(box)
        count = len(left)
        if count == 0 or (wanted is not None and wanted > count):
            raise ValueError(
                f"Arithmetic.num_examples asks for {'all' if wanted is None else wanted}, but "
                f"there are {count} {self._problems()}. Ask for fewer, or for more digits."
            )
        order = random.permutation(count)[:wanted]
        return left[order], right[order]

    def _problems(self) -> str:
        sign = "" if self.allow_negative else ", none negative"
        return (
            f"{self.operation} problems of {self.split} with left_digits {list(self.left_digits)} "
            f"and right_digits {list(self.right_digits)}{sign}"
        )

    def _drawn(
        self, box: "_Box", wanted: int, random: np.random.Generator
    ) -> tuple[Operands, Operands]:
        """Draw until there are enough different pairs, at most half of all there are."""
        left, right = _NONE
        while len(left) < wanted:
            chunks = [(left, right)]
            missing = wanted - len(left)
            while missing > 0:
                chunks.append(self._of_split(*box.random_pairs(random, _CHUNK)))
                missing -= len(chunks[-1][0])
            left, right = _without_repetition(*_joined(chunks))
        return left[:wanted], right[:wanted]

    def _all(self, box: "_Box") -> tuple[Operands, Operands]:
        """All pairs of the set, in ascending order."""
        return _joined(
            [
                self._of_split(*box.pairs(start, min(start + _CHUNK, box.area)))
                for start in range(0, box.area, _CHUNK)
            ]
        )

    def _of_split(self, left: Operands, right: Operands) -> tuple[Operands, Operands]:
        first, last = TENTHS[self.split]
        tenth = _tenth(self.operation, left, right)
        keep = (first <= tenth) & (tenth < last)
        if not self.allow_negative:
            keep &= left >= right
        return left[keep], right[keep]


@dataclass(frozen=True)
class _Box:
    """All pairs of operands within these ends, both included; or those with left >= right."""

    left: tuple[int, int]
    right: tuple[int, int]
    ordered: bool

    @classmethod
    def of_digits(cls, left: tuple[int, int], right: tuple[int, int], ordered: bool) -> "_Box":
        left_low, left_high = _ends(left)
        right_low, right_high = _ends(right)
        if ordered:
            # The smallest box around the pairs wanted; at least half of it is wanted.
            left_low, right_high = max(left_low, right_low), min(left_high, right_high)
        return cls((left_low, left_high), (right_low, right_high), ordered)

    @property
    def area(self) -> int:
        """How many pairs, the unwanted included."""
        return self._width(self.left) * self._width(self.right)

    @property
    def num_pairs(self) -> int:
        """How many pairs, without those of left < right if `ordered`."""
        if not self.ordered or self.area == 0:
            return self.area
        overlap = max(0, self.right[1] - self.left[0])
        return self.area - overlap * (overlap + 1) // 2

    def pairs(self, start: int, stop: int) -> tuple[Operands, Operands]:
        """Pairs number start to stop - 1 of all `area`; a row of one left operand at a time."""
        index = np.arange(start, stop, dtype=np.uint64)
        row = np.uint64(self._width(self.right))
        return index // row + np.uint64(self.left[0]), index % row + np.uint64(self.right[0])

    def random_pairs(self, random: np.random.Generator, count: int) -> tuple[Operands, Operands]:
        """Independent pairs, uniform over all `area`."""
        return (
            random.integers(*self.left, size=count, dtype=np.uint64, endpoint=True),
            random.integers(*self.right, size=count, dtype=np.uint64, endpoint=True),
        )

    @staticmethod
    def _width(ends: tuple[int, int]) -> int:
        return max(0, ends[1] - ends[0] + 1)


def _ends(digits: tuple[int, int]) -> tuple[int, int]:
    fewest, most = digits
    return 0 if fewest == 1 else 10 ** (fewest - 1), 10**most - 1


def _joined(chunks: list[tuple[Operands, Operands]]) -> tuple[Operands, Operands]:
    lefts, rights = zip(_NONE, *chunks, strict=True)
    return np.concatenate(lefts), np.concatenate(rights)


def _without_repetition(left: Operands, right: Operands) -> tuple[Operands, Operands]:
    """The first of every kind of pair, in the order given."""
    order = np.lexsort((right, left))  # stable: of equal pairs the first comes first
    left_sorted, right_sorted = left[order], right[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (left_sorted[1:] != left_sorted[:-1]) | (right_sorted[1:] != right_sorted[:-1])
    keep = np.sort(order[is_first])
    return left[keep], right[keep]


def _tenth(operation: Operation, left: Operands, right: Operands) -> Operands:
    """Which tenth of all problems each pair belongs to, from 0 to 9.

    Depends on nothing but the problem; for commutative operations not on the order either.
    """
    if operation != "subtraction":
        left, right = np.minimum(left, right), np.maximum(left, right)
    state = _mixed(np.array([_CODES[operation]], dtype=np.uint64))
    return _mixed(_mixed(state ^ left) ^ right) % np.uint64(10)


def _mixed(words: Operands) -> Operands:
    """One output of the generator SplitMix64 for each word as its state.

    Source: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def check_count(source: str, num_examples: int) -> None:
    """Refuse a number of examples below 1."""
    if num_examples < 1:
        raise ValueError(f"{source}.num_examples must be 1 or more, got {num_examples}.")


def check_seed(source: str, seed: int) -> None:
    """Refuse a negative seed, which numpy does not take."""
    if seed < 0:
        raise ValueError(f"{source}.seed must be 0 or more, got {seed}.")
