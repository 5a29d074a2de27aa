"""How target values are written for a model, and how its answers are read back.

Both directions are exact decimals where the scale allows it, so that metrics in the units of the
data see the rounding of the number format and nothing else.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from typing import Literal

from ntl_lightning.numbers.text import NumberFormat, last_number

__all__ = ["NumberCodec", "Scale"]

Scale = Literal["none", "log10", "signed_log10", "standardised"]
"""`log10`: log10(x), for positive values. `signed_log10`: sign(x) log10(|x| + 1), the scale of the
log metrics. `standardised`: (x - mean) / standard deviation."""

_EXACT = Context(50, ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)
# A power of ten cannot be exact: it gets the digits that tell any two float64 values apart.
_AS_FLOAT64 = Context(17, ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)
_ONE, _TEN = Decimal(1), Decimal(10)
_LARGEST_EXPONENT = 400  # beyond that float64 holds no power of ten

_PLACE = re.compile(r"_([0-9])_(-?[0-9]{1,6})_")
_PLACES = re.compile(rf"([-+]?)((?:{_PLACE.pattern})+)")


@dataclass(frozen=True)
class NumberCodec:
    """Writes the value of a target as the text that a model learns, and reads answers back.

    A value is brought to the scale, taken times a hundred where it is a percentage, and written in
    the number format; reading undoes this. What cannot be undone is the rounding of the format.

    >>> codec = NumberCodec(NumberFormat(decimals=2), scale="log10")
    >>> codec.write(Decimal(2000)), codec.read("3.30")
    ('3.30', Decimal('1995.2623149688796'))
    >>> NumberCodec(NumberFormat(), percent=True).write(0.25)
    '25%'
    """

    number_format: NumberFormat | None = None
    """How the number is written, on its scale: this decides what is rounded away. null: nothing is,
    which only the scale none can do."""
    scale: Scale = "none"
    """What is done with a value before it is written: none, log10 (of positive values),
    signed_log10 (sign(x) log10(|x| + 1)) or standardised ((x - mean) / standard deviation)."""
    mean: float | None = None
    """Of the scale `standardised`, in the units of the data. null: that of the training targets."""
    standard_deviation: float | None = None
    """Of the scale `standardised`, likewise; null: that of all training targets, without the
    correction for a sample (as scikit-learn's StandardScaler)."""
    percent: bool = False
    """Write 0.25 as `25%`."""
    digit_places: bool = False
    """Write every digit with its power of ten, 12.5 as `_1_1__2_0__5_-1_`. The places are marked
    as no quantities. Source: J. Born, M. Manica, Regression Transformer, arXiv:2202.01338, where
    each `_1_1_` is a token of its own; here it is plain text, without new tokens."""

    def __post_init__(self) -> None:
        """Check that the fields fit together.

        Raises:
            ValueError: If the scale is unknown or needs a number format, only one of mean and
                standard deviation is given, they have no effect or make no sense, or a percentage
                or places of digits are asked for where there is no such form.
        """
        if self.scale not in ("none", "log10", "signed_log10", "standardised"):
            raise ValueError(
                "NumberCodec.scale must be none, log10, signed_log10 or standardised, got "
                f"{self.scale!r}."
            )
        if self.number_format is None and self.scale != "none":
            raise ValueError(
                f"NumberCodec.scale: {self.scale} gives numbers with no end of decimals. Say how "
                "many to write in NumberCodec.number_format, such as {decimals: 3}."
            )
        given = [self.mean is not None, self.standard_deviation is not None]
        if any(given) and (self.scale != "standardised" or not all(given)):
            raise ValueError(
                "NumberCodec.mean and standard_deviation belong together and to scale: "
                f"standardised, got mean={self.mean}, standard_deviation="
                f"{self.standard_deviation} and scale={self.scale!r}. Give both or neither."
            )
        if self.mean is not None and self.standard_deviation is not None:
            # Those of NumPy are written and kept in checkpoints otherwise.
            object.__setattr__(self, "mean", float(self.mean))
            object.__setattr__(self, "standard_deviation", float(self.standard_deviation))
            if not math.isfinite(self.mean):
                raise ValueError(f"NumberCodec.mean must be a finite number, got {self.mean}.")
            if not 0 < self.standard_deviation < math.inf:
                raise ValueError(
                    "NumberCodec.standard_deviation must be a number above 0, got "
                    f"{self.standard_deviation}."
                )
        if self.percent and self.scale != "none":
            raise ValueError(
                f"NumberCodec.percent: true writes the value itself, but scale is {self.scale!r}. "
                "Remove one of the two."
            )
        if self.digit_places and self.number_format is not None and self.number_format.scientific:
            raise ValueError(
                "NumberCodec.digit_places: true and number_format.scientific: true both write "
                "powers of ten. Remove one of the two."
            )

    @property
    def is_complete(self) -> bool:
        """Whether it can write: all but a standardised scale without its mean can."""
        return self.scale != "standardised" or self.mean is not None

    def fitted(self, values: Sequence[Decimal]) -> "NumberCodec":
        """The codec with the mean and standard deviation of these values; complete, itself.

        Args:
            values: Those of all training targets.

        Raises:
            ValueError: If the values have no finite mean or standard deviation in float64, are all
                equal, or differ by less than float64 holds.
        """
        if self.is_complete:
            return self
        with localcontext(_EXACT):
            # Decimals: sums and squares of floats may overflow, or vanish, where these do not.
            exact_mean = sum(values, Decimal(0)) / len(values)
            variance = sum(((v - exact_mean) ** 2 for v in values), Decimal(0)) / len(values)
            mean, deviation = float(exact_mean), float(variance.sqrt())
        if not math.isfinite(mean) or not math.isfinite(deviation):
            raise ValueError(
                "the training targets are too large for a mean and standard deviation in float64. "
                "Take scale: signed_log10, or leave the largest out."
            )
        if min(values) == max(values):
            raise ValueError(
                f"all training targets are {values[0]}, so they have no standard deviation to "
                "divide by. Give NumberCodec.mean and standard_deviation, or take another scale."
            )
        if deviation == 0:
            raise ValueError(
                "the training targets differ by too little for a standard deviation in float64. "
                "Scale them up, or take another scale."
            )
        return replace(self, mean=mean, standard_deviation=deviation)

    def write(self, value: Decimal | int | float) -> str:
        """The text that a model learns for a value.

        Raises:
            ValueError: If the value is not finite, has no logarithm on the scale log10, is wider
                than the number format, or the mean and standard deviation are not known yet.
        """
        scaled = self._scaled(value)
        number_format = self.number_format
        if number_format is None:
            exponent = Decimal(scaled).as_tuple().exponent
            decimals = -exponent if isinstance(exponent, int) else 0
            number_format = NumberFormat(decimals=max(decimals, 0))
        text = number_format.write(scaled)
        if self.digit_places:
            text = _with_places(text)
        return f"{text}%" if self.percent else text

    def written_number(self, text: str) -> Decimal | None:
        """The number that a text says, on its scale: what `write` wrote, before it is undone.

        Returns:
            The last number of the text, or with `digit_places` the last digits with descending
            places; None where there is none.
        """
        return _read_places(text) if self.digit_places else last_number(text)

    def inverse(self, written: Decimal) -> Decimal | None:
        """The value that a number on the scale stands for, in the units of the data.

        Returns:
            Exact, or for logarithms with 17 digits; a standardised one is rounded to 50. None
            where float64 does not hold the power of ten.
        """
        if self.percent:
            return _shifted(written, -2)
        if self.scale == "standardised":
            mean, deviation = self._statistics()
            return _EXACT.fma(written, deviation, mean)
        if self.scale == "none":
            return written
        if written.copy_abs() > _LARGEST_EXPONENT:
            return None if written > 0 or self.scale == "signed_log10" else Decimal(0)
        if self.scale == "log10":
            value = _EXACT.power(_TEN, written)
        else:
            value = _EXACT.subtract(_EXACT.power(_TEN, written.copy_abs()), _ONE)
            value = value.copy_sign(written) if value else Decimal(0)
        value = _AS_FLOAT64.plus(value)
        return None if math.isinf(float(value)) else _without_trailing_zeros(value)

    def read(self, text: str) -> Decimal | None:
        """The value of an answer, in the units of the data; None where it has none."""
        written = self.written_number(text)
        return None if written is None else self.inverse(written)

    def is_exact(self, text: str, target: Decimal) -> bool:
        """Whether an answer says the very number that is written for a target."""
        return self.written_number(text) == self.written_number(self.write(target))

    def place_spans(self, written: str) -> tuple[tuple[int, int], ...]:
        """Start and end of the places in what `write` wrote: they are no quantities."""
        return tuple(match.span(2) for match in _PLACE.finditer(written))

    def _scaled(self, value: Decimal | int | float) -> Decimal | int | float:
        if self.scale == "none" and not self.percent:
            return value
        exact = Decimal(value)
        if not exact.is_finite():
            return exact
        if self.percent:
            return _shifted(exact, 2)
        if self.scale == "standardised":
            mean, deviation = self._statistics()
            return _EXACT.divide(_EXACT.subtract(exact, mean), deviation)
        if self.scale == "signed_log10":
            return _EXACT.log10(_EXACT.add(exact.copy_abs(), _ONE)).copy_sign(exact)
        if exact <= 0:
            raise ValueError(
                f"{value} has no logarithm, which NumberCodec.scale: log10 asks for. Take "
                "signed_log10, or leave such rows out."
            )
        return _EXACT.log10(exact)

    def _statistics(self) -> tuple[Decimal, Decimal]:
        if self.mean is None or self.standard_deviation is None:
            raise ValueError(
                "NumberCodec.mean and standard_deviation are not known: give both, or take them "
                "from the training targets."
            )
        # The shortest decimals that name these floats: 0.1 is meant as 0.1.
        return Decimal(repr(self.mean)), Decimal(repr(self.standard_deviation))


def _shifted(value: Decimal, places: int) -> Decimal:
    """The value times a power of ten, exactly."""
    sign, digits, exponent = value.as_tuple()
    return Decimal((sign, digits, int(exponent) + places))


def _without_trailing_zeros(value: Decimal) -> Decimal:
    short = value.normalize(_EXACT)
    return short if int(short.as_tuple().exponent) <= 0 else Decimal(int(short))


def _with_places(number: str) -> str:
    digits = number.lstrip("+-")
    sign = number[: len(number) - len(digits)]
    integer, _, decimals = digits.partition(".")
    places = range(len(integer) - 1, -len(decimals) - 1, -1)
    return sign + "".join(
        f"_{digit}_{place}_" for digit, place in zip(integer + decimals, places, strict=True)
    )


def _read_places(text: str) -> Decimal | None:
    # Decoders may put blanks between the pieces.
    numbers = list(_PLACES.finditer("".join(text.split())))
    if not numbers:
        return None
    digits, places = zip(*_PLACE.findall(numbers[-1][2]), strict=True)
    highest, lowest = int(places[0]), int(places[-1])
    if [*map(int, places)] != [*range(highest, highest - len(places), -1)]:
        return None
    value = Decimal((0, tuple(map(int, digits)), lowest))
    return value.copy_negate() if numbers[-1][1] == "-" and value else value
