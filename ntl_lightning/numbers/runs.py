"""The written numbers among label tokens: which digits belong together, and what each counts.

Shapes: T positions of one row of labels, M cells (all positions of all rows), V width of the
logits. Everything is computed on the labels' device, in fixed shapes and without waiting for it.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["NumberRuns", "Role", "label_counts", "number_runs"]

# Up to here tenths are added up as integers, so that 0.3 and 0.03 make exactly 0.33.
_EXACT_DECIMALS = 15
# Powers of ten in float64 end at 308, and a token has up to nine times its power.
_LARGEST_EXPONENT = 300


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

    A number is `digits[,ddd]* [. digits]` or `. digits` of adjacent labels; its absolute value is
    the sum of token value * 10^place. A label without target, a text token, the end of the row and
    a token with a space mark end it. As in `find_numbers`, a comma is a thousands mark only in a
    well-formed chain (`1,234,5` are three numbers, and so are `0,123` and `456,78`'s parts), and
    digits with two points (`1.2.3`) are no number.

    Where it differs from `find_numbers`:

    - signs are passed over: the numbers are those without their sign;
    - exponents, underscores, other bases, and thousands parted by blanks or apostrophes are not
      known: `3e5` is 3 and 5, and `1 000` is 1 and 0; a factor `x` before a leading point is a
      letter like any other;
    - digits that touch a token which holds digits and something else (`-3`, `a5`), or are parted
      from it only by a point or comma, make an incomplete number, and such a token too;
    - tokenizers without space marks (WordPiece) have the same tokens for `1 2` and `12`, which is
      read as one number.

    Args:
        labels: (..., T) int64 token ids in [0, V), negative where there is no target.
        forms: (V, 3) int8 `NumberVocabulary.forms_table()`, on the labels' device.
        is_number: (..., T) bool: the label is a number token and its number a quantity.
        values: (..., T) floats, the value of the label token, 0 where `is_number` is false.

    Returns:
        The numbers all of whose digit tokens are number tokens; of the others nothing is left.
    """
    cells = _Cells.of(labels, forms, is_number, values)
    linked, comma, point, broken = _links(cells)
    digits, single = cells.role == Role.DIGITS, cells.role == Role.WHOLE
    written = digits | single
    runs = _Stretches.of((digits | comma | point) & ~linked | single, linked)
    is_digit = written & (runs.total(broken | (written & ~cells.is_number)) == 0)

    is_decimal = runs.so_far(point) > 0
    num_integer = runs.total(torch.where(is_decimal, 0, cells.num_digits))
    place = torch.where(is_digit, num_integer - runs.so_far(cells.num_digits), 0)
    last_place = torch.where(is_digit, num_integer - runs.total(cells.num_digits), 0)
    rest = _rest(
        torch.where(is_digit, cells.values, 0.0), place, last_place, runs, labels.shape[-1]
    )
    return NumberRuns(
        run=runs.index.view(labels.shape),
        is_digit=is_digit.view(labels.shape),
        is_first=(is_digit & (runs.so_far(written) == 1)).view(labels.shape),
        place=place.view(labels.shape),
        top_place=torch.where(is_digit & ~single, num_integer - 1, 0).view(labels.shape),
        last_place=last_place.view(labels.shape),
        rest=torch.where(is_digit, rest, 0.0).view(labels.shape),
        num_digit_tokens=torch.where(is_digit, runs.total(written), 0).view(labels.shape),
    )


def label_counts(
    labels: Tensor, is_number: Tensor, runs: NumberRuns | None = None
) -> dict[str, Tensor]:
    """How many of each kind of position labels have, which is what loss terms are averaged over.

    Args:
        labels: (...) int64 token ids, negative where there is no target.
        is_number: (...) bool: the label is a number token and its number a quantity.
        runs: The written numbers; without them `whole_numbers` is left out.

    Returns:
        () int64 each: `tokens`, all labels; `numbers`, those that are number tokens;
        `whole_numbers`, the complete written numbers.
    """
    counts = {"tokens": (labels >= 0).sum(), "numbers": is_number.sum()}
    if runs is not None:
        counts["whole_numbers"] = runs.num_runs
    return counts


@dataclass(frozen=True)
class _Cells:
    """The labels of all rows one after another, each tensor (M,)."""

    role: Tensor
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
        return cls(
            role=torch.where(is_label.reshape(-1), form[:, 0], int(Role.TEXT)),
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

    def so_far(self, counts: Tensor) -> Tensor:
        """(M,) int64 sum over the stretch up to this cell, the cell itself included."""
        sums = counts.cumsum(0)
        return sums - (sums - counts.long()).index_select(0, self.first)

    def total(self, counts: Tensor) -> Tensor:
        """(M,) int64 sum over the whole stretch."""
        sums = counts.cumsum(0)
        before = (sums - counts.long()).index_select(0, self.first)
        return sums.index_select(0, self.last) - before


def _links(cells: _Cells) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the cells hang together, all bool (M,).

    Returns:
        Whether the cell belongs to the number of the cell before; whether it is a thousands comma;
        whether it is a decimal point; whether its number cannot be read.
    """
    role, joined = cells.role, cells.joined
    digits, single = role == Role.DIGITS, role == Role.WHOLE
    behind_digit = joined & _before(digits)
    before_digit = _after(joined & digits)

    no_decimals = (role == Role.WORD) | (role == Role.POINT) | single
    point = (role == Role.POINT) & before_digit & ~(joined & _before(no_decimals))
    comma = (role == Role.THOUSANDS) & before_digit & behind_digit
    mark = point | comma
    linked = joined & torch.where(digits, _before(digits | mark), mark & _before(digits))

    # Groups of digits between the marks, judged at their last cell.
    groups = _Stretches.of(digits & ~behind_digit, behind_digit & digits)
    size = groups.so_far(cells.num_digits)
    behind_comma = _before(comma).index_select(0, groups.first)
    behind_point = _before(point).index_select(0, groups.first)
    ends = digits & ~before_digit
    comma_follows = ends & _after(comma)
    glued = ends & behind_point & _after(point & behind_digit)
    # Tokens of more digits are too long for the first group anyway.
    least = torch.where(cells.num_digits == 1, 1, torch.where(cells.num_digits == 2, 10, 100))
    starts_with_zero = (cells.is_number & (cells.values < least)).index_select(0, groups.first)
    malformed = torch.where(
        behind_comma,
        ends & (size != 3),
        comma_follows & (behind_point | (size > 3) | starts_with_zero),
    )
    # One wrong group, and all the commas of the chain part numbers.
    chains = _Stretches.of((digits | mark) & ~linked, linked)
    comma = comma & (chains.total(malformed | glued) == 0)
    linked = linked & ~(_before(role == Role.THOUSANDS) & ~_before(comma))
    linked = linked & ((role != Role.THOUSANDS) | comma)

    written = digits | single
    beside = joined & written & _before(written) & (single | _before(single))
    between = joined & _before(joined & ((role == Role.POINT) | (role == Role.THOUSANDS)))
    across = between & written & _before(written, 2) & (single | _before(single, 2))
    broken = glued | beside | _after(beside) | across | _after(across, 2)
    return linked, comma, point, broken


def _rest(
    values: Tensor, place: Tensor, last_place: Tensor, runs: _Stretches, length: int
) -> Tensor:
    """(M,) sum of value * 10^place over the cells to the right in the same stretch."""
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    unit = last_place.clamp(min=-_EXACT_DECIMALS)
    exponent = place - unit
    sums = values.to(dtype) * _power_of_ten(exponent, dtype) / _power_of_ten(-exponent, dtype)

    def from_right(sums: Tensor, step: int) -> Tensor:
        return torch.where(_after(runs.index, step) == runs.index, _after(sums, step), 0.0)

    sums = from_right(sums, 1)
    step = 1
    while step < length:
        sums = sums + from_right(sums, step)
        step *= 2
    return sums / _power_of_ten(-unit, dtype)


def _power_of_ten(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """10^exponent, exactly as far as the dtype holds it; 1 for negative exponents."""
    exponent = exponent.clamp(0, _LARGEST_EXPONENT)
    power = torch.ones_like(exponent, dtype=dtype)
    for bit in range(_LARGEST_EXPONENT.bit_length()):
        # `torch.pow` is not exact, not even where the result is an integer.
        power = torch.where((exponent >> bit) & 1 == 1, power * 10.0 ** (2**bit), power)
    return power


def _before(cells: Tensor, steps: int = 1) -> Tensor:
    """What the cells some steps to the left have; zero or False where there are none."""
    return functional.pad(cells, (steps, 0))[: len(cells)]


def _after(cells: Tensor, steps: int = 1) -> Tensor:
    """What the cells some steps to the right have; zero or False where there are none."""
    return functional.pad(cells, (0, steps))[steps:]
