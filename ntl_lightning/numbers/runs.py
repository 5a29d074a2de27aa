"""The written numbers among label tokens: which digits belong together, and what each counts.

Shapes: T positions of one row of labels, M cells (all positions of all rows), V width of the
logits. Everything is computed on the labels' device, in fixed shapes and without waiting for it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["NumberRuns", "Role", "label_counts", "number_runs"]

# float64 holds integers of so many digits, and their powers of ten, exactly.
_EXACT_DIGITS = 15
# Powers of ten end at 308 in float64 and at 38 in float32.
LARGEST_EXPONENT = {torch.float64: 300, torch.float32: 35}
# Cells to the right that count for `rest`: what lies beyond is far below what float64 can tell.
_WINDOW = 128


class Role(IntEnum):
    """What the text of a token, without its space mark, can be in a written number."""

    TEXT = 0
    """Nothing: text, special tokens, ids without a token."""
    DIGITS = 1
    """ASCII digits and nothing else, whether a number token or not."""
    POINT = 2
    """A decimal point, if digits follow."""
    THOUSANDS = 3
    """A comma, which is a thousands mark in the right place."""
    SIGN = 4
    """A plus or minus; it changes nothing about the digits behind it."""
    WHOLE = 5
    """Digits together with something else (`-3`, `0.5`, `a5`): where it is a number token, a
    written number of its own."""
    WORD = 6
    """Text that ends in a letter, a closing bracket, `%` or `.`: a point behind it ends a sentence
    or an abbreviation and is no decimal point."""


@dataclass(frozen=True)
class NumberRuns:
    """The written numbers among labels. All but `num_runs` have the shape of the labels.

    A digit token is a token of digits, or a number token with a sign or point of its own (`-3`).
    """

    run: Tensor
    """int64 in [0, M): which number a token belongs to, ascending; anything in that range where
    `is_digit` is false."""
    is_digit: Tensor
    """bool: a digit token of a complete number, one whose digit tokens all are number tokens."""
    is_first: Tensor
    """bool: the first digit token of a complete number."""
    place: Tensor
    """int64 power of ten by which the token's value counts: 0 at the last integer token, -1 at the
    first decimal; 3 at the `12` of `12`, `345`, and -2 at a `25` right behind the point. 0 where
    `is_digit` is false."""
    top_place: Tensor
    """int64 place of the leading digit of the number; 0 where `is_digit` is false."""
    last_place: Tensor
    """int64 place of the last digit token of the number; 0 where `is_digit` is false."""
    rest: Tensor
    """float64 value of the digits to the right of the token in its number: 45 at the `3` of 345; 0
    where `is_digit` is false. float32 on devices without float64."""
    num_digit_tokens: Tensor
    """int64 digit tokens of the number; 0 where `is_digit` is false."""

    @property
    def num_runs(self) -> Tensor:
        """() int64 complete numbers."""
        return self.is_first.sum()


def number_runs(labels: Tensor, forms: Tensor, is_number: Tensor, values: Tensor) -> NumberRuns:
    """Find the written numbers among labels, as `find_numbers` reads them in the text.

    A number is `digits[,ddd]*[.digits]` or `.digits` of adjacent labels, and

        abs(number) = sum over its digit tokens of value * 10^place

    The end of the row, a label without target, a token with a space mark and any other token end
    it. As in `find_numbers`, commas are thousands marks only in a well-formed chain (`1,234,5` is
    three numbers and `0,123` two), and digits with two points (`1.2.3`) are no number.

    What differs from `find_numbers`:

    - A sign is passed over, for it changes nothing about the digits.
    - Exponents, underscores, other bases, and thousands parted by blanks or apostrophes are not
      known: `3e5` is 3 and 5, and `1 000` is 1 and 0. The `x` of `10x.6` is a letter like others.
    - A number token with a sign or point of its own is a number by itself. Where it touches other
      digits, or only a point or comma parts them, neither is complete, and so for every token that
      holds digits and something else (`a5`).
    - WordPiece has the same tokens for `1 2` and `12`: they are read as 12.

    Args:
        labels: (..., T) int64 token ids in [0, V), negative where there is no target.
        forms: (V, 3) int8 `NumberVocabulary.forms_table()`, on the labels' device.
        is_number: (..., T) bool: the label is a number token and its number a quantity.
        values: (..., T) floats, the value of the label token, 0 where `is_number` is false.

    Returns:
        The complete numbers, those whose digit tokens all are number tokens.
    """
    cells = _Cells.of(labels, forms, is_number, values)
    linked, comma, point, broken = _links(cells)
    single, written = cells.single, cells.digits | cells.single
    runs = _Stretches.of((cells.digits | comma | point) & ~linked | single, linked)
    so_far, total = runs.sums(point, cells.num_digits, written, broken | written & ~cells.is_number)
    points_so_far, digits_so_far, tokens_so_far, _ = so_far
    _, num_digits, num_tokens, num_broken = total
    _, (num_integer,) = runs.sums(torch.where(points_so_far == 0, cells.num_digits, 0))

    is_digit = written & (num_broken == 0)
    place = torch.where(is_digit, num_integer - digits_so_far, 0)
    last_place = torch.where(is_digit, num_integer - num_digits, 0)
    rest = _rest(torch.where(is_digit, cells.values, 0.0), place, last_place, runs)
    return NumberRuns(
        run=runs.index.view(labels.shape),
        is_digit=is_digit.view(labels.shape),
        is_first=(is_digit & (tokens_so_far == 1)).view(labels.shape),
        place=place.view(labels.shape),
        top_place=torch.where(is_digit & ~single, num_integer - 1, 0).view(labels.shape),
        last_place=last_place.view(labels.shape),
        rest=torch.where(is_digit, rest, 0.0).view(labels.shape),
        num_digit_tokens=torch.where(is_digit, num_tokens, 0).view(labels.shape),
    )


def label_counts(
    labels: Tensor, is_number: Tensor, runs: NumberRuns | None = None
) -> dict[Literal["tokens", "numbers", "whole_numbers"], Tensor]:
    """How many of each kind of position labels have, which is what loss terms are averaged over.

    Args:
        labels: (...) int64 token ids, negative where there is no target.
        is_number: (...) bool: the label is a number token and its number a quantity.
        runs: The written numbers; without them `whole_numbers` is left out.

    Returns:
        () int64 each: `tokens`, all labels; `numbers`, those that are number tokens;
        `whole_numbers`, the complete written numbers.
    """
    counts: dict[Literal["tokens", "numbers", "whole_numbers"], Tensor] = {
        "tokens": (labels >= 0).sum(),
        "numbers": is_number.sum(),
    }
    if runs is not None:
        counts["whole_numbers"] = runs.num_runs
    return counts


@dataclass(frozen=True)
class _Cells:
    """The labels of all rows one after another, each tensor (M,)."""

    role: Tensor
    digits: Tensor
    single: Tensor
    num_digits: Tensor
    joined: Tensor
    """There is a label in the cell before in the same row, and no space mark between the two."""
    is_number: Tensor
    values: Tensor

    @classmethod
    def of(cls, labels: Tensor, forms: Tensor, is_number: Tensor, values: Tensor) -> "_Cells":
        is_label = labels >= 0
        form = forms.index_select(0, labels.clamp(min=0).reshape(-1))
        label_before = functional.pad(is_label, (1, 0))[..., :-1]
        role = torch.where(is_label.reshape(-1), form[:, 0], Role.TEXT.value)
        return cls(
            role=role,
            digits=role == Role.DIGITS.value,
            single=role == Role.WHOLE.value,
            num_digits=torch.where(is_label.reshape(-1), form[:, 1], 0).long(),
            joined=(is_label & label_before).reshape(-1) & (form[:, 2] == 0),
            is_number=is_number.reshape(-1),
            values=values.reshape(-1),
        )


@dataclass(frozen=True)
class _Stretches:
    """Stretches of adjacent cells, and sums over them.

    What cells outside every stretch get is of no meaning, but harmless.
    """

    index: Tensor
    """(M,) int64 number of the stretch."""
    first: Tensor
    """(M,) int64 first cell of the stretch."""
    last: Tensor
    """(M,) int64 last cell of the stretch."""

    @classmethod
    def of(cls, start: Tensor, linked: Tensor) -> "_Stretches":
        """Stretches that begin at `start` and go on as long as the next cell is `linked`."""
        cell = torch.arange(len(start), device=start.device)
        ends = torch.where(_after(linked), len(start), cell)
        return cls(
            index=(start.cumsum(0) - 1).clamp(min=0),
            first=torch.where(start, cell, 0).cummax(0).values,
            last=ends.flip(0).cummin(0).values.flip(0),
        )

    def sums(self, *counts: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of some counts, each (M,), over the stretches.

        Returns:
            (counts, M) int64 up to this cell, itself included, and the same over all the stretch.
        """
        cells = torch.stack([count.long() for count in counts])
        up_to = cells.cumsum(1)
        before = (up_to - cells).gather(1, self.first.expand_as(cells))
        return up_to - before, up_to.gather(1, self.last.expand_as(cells)) - before


def _links(cells: _Cells) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the cells hang together, all bool (M,).

    Returns:
        Whether the cell belongs to the number of the cell before; whether it is a thousands comma;
        whether it is a decimal point; whether its number cannot be read.
    """
    role, joined, digits, single = cells.role, cells.joined, cells.digits, cells.single
    behind_digit = joined & _before(digits)
    before_digit = _after(joined & digits)

    no_decimals = (role == Role.WORD.value) | (role == Role.POINT.value) | single
    point = (role == Role.POINT.value) & before_digit & ~(joined & _before(no_decimals))
    comma = (role == Role.THOUSANDS.value) & before_digit & behind_digit
    mark = point | comma
    linked = joined & torch.where(digits, _before(digits | mark), mark & _before(digits))

    # Groups of digits between the marks, judged at their last cell.
    groups = _Stretches.of(digits & ~behind_digit, behind_digit & digits)
    (size,), _ = groups.sums(cells.num_digits)
    behind_comma = _before(comma).index_select(0, groups.first)
    behind_point = _before(point).index_select(0, groups.first)
    ends = digits & ~before_digit
    comma_follows = ends & _after(comma)
    glued = ends & behind_point & _after(point & behind_digit)
    # Of a first token without value nothing is known, and a longer one is too long for a group.
    least = torch.where(cells.num_digits == 1, 1, torch.where(cells.num_digits == 2, 10, 100))
    starts_with_zero = (cells.is_number & (cells.values < least)).index_select(0, groups.first)
    malformed = torch.where(
        behind_comma,
        ends & (size != 3),
        comma_follows & (behind_point | (size > 3) | starts_with_zero),
    )
    # One wrong group, and all the commas of the chain part numbers.
    chains = _Stretches.of((digits | mark) & ~linked, linked)
    _, (num_malformed,) = chains.sums(malformed | glued)
    comma = comma & (num_malformed == 0)
    parts = (role == Role.THOUSANDS.value) & ~comma
    linked = linked & ~(parts | _before(parts))

    written = digits | single
    beside = joined & written & _before(written) & (single | _before(single))
    any_mark = (role == Role.POINT.value) | (role == Role.THOUSANDS.value)
    between = joined & _before(joined & any_mark)
    across = between & written & _before(written, 2) & (single | _before(single, 2))
    broken = glued | beside | _after(beside) | across | _after(across, 2)
    return linked, comma, point, broken


def _rest(values: Tensor, place: Tensor, last_place: Tensor, runs: _Stretches) -> Tensor:
    """(M,) sum of value * 10^place over the cells to the right in the same stretch."""
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    # In units of the last place the summands are integers, and their sum is exact.
    unit = last_place.clamp(min=-_EXACT_DIGITS)
    num_right = runs.last - torch.arange(len(values), device=values.device)
    sums = values.to(dtype) * _power_of_ten(place - unit, dtype)
    sums = torch.where(num_right >= 1, _after(sums), 0.0)
    step = 1
    while step < min(_WINDOW, len(values)):
        # Each cell knows the sum over `step` cells: with that of the last one's neighbour, twice.
        sums = sums + torch.where(num_right >= step, _after(sums, step), 0.0)
        step *= 2
    return sums / _power_of_ten(-unit, dtype)


def _power_of_ten(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    largest = LARGEST_EXPONENT[dtype]
    power = torch.pow(10.0, exponent.clamp(-largest, largest).to(dtype))
    # `pow` may be off by one unit in the last place.
    return torch.where(exponent >= 0, power.round(), power)


def _before(cells: Tensor, steps: int = 1) -> Tensor:
    """What the cells some steps to the left have; zero or False where there are none."""
    return functional.pad(cells, (steps, 0))[: len(cells)]


def _after(cells: Tensor, steps: int = 1) -> Tensor:
    """What the cells some steps to the right have; zero or False where there are none."""
    return functional.pad(cells, (0, steps))[steps:]
