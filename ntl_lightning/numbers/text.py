"""Numbers in text: one reader for answers, golds and targets, and the writer of a fixed format.

Everything that turns text into numbers goes through `find_numbers`, so that two parts of a run can
never read the same answer differently. Values are exact (`Decimal`): 0.1 is 0.1, and integers of
any length keep all their digits.
"""

import re
import reprlib
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal

__all__ = [
    "NumberFormat",
    "NumberInText",
    "find_numbers",
    "join_spaced_pieces",
    "last_number",
    "only_number",
]

_MINUS_SIGNS = "-\u2212\ufe63\uff0d"
_EN_DASH = "\u2013"
_CURRENCY_MARKS = "$€£¥"
_TYPOGRAPHIC_BLANKS = "\u00a0\u202f\u2009"
_APOSTROPHES = "'\u2019"
_SLASHES = "/\u2044"

_SIGN = rf"[+{re.escape(_MINUS_SIGNS)}]"
_MARK = f"[{re.escape(_CURRENCY_MARKS)}]"
_NOT_AFTER_OPERAND = r"(?<![^\W_])(?<![)\]}%.])"

# `10x.6` is ten times .6, while the dots of `Rs.500` and `apples.7` end a word.
_POINT = rf"(?:(?:{_NOT_AFTER_OPERAND}|(?<=[0-9][xX]))\.)"
_EXPONENT = rf"(?:[eE]{_SIGN}?[0-9]{{1,6}}+)?+"
_END = rf"(?![0-9]|\.[0-9]|_++[0-9]|[eE]{_SIGN}?[0-9])"
_GLUED = rf"{_POINT}?[0-9]++(?:(?:\.|_++|[eE]{_SIGN}?)[0-9]++)*+"
_BASE_PREFIXED = r"0(?:[xX][0-9A-Fa-f]|[oO][0-7]|[bB][01])[0-9A-Za-z_]*+(?:\.[0-9A-Za-z_]++)*+"


def _grouped(separator: str, others: str = "") -> str:
    """Pattern of a maximal chain of thousands groups that no other group touches."""
    touching = f"[{separator}{others}]"
    return (
        rf"(?<![0-9]{touching})[1-9][0-9]{{0,2}}(?:[{separator}][0-9]{{3}})++"
        rf"(?:\.[0-9]++)?+{_EXPONENT}{_END}(?!{touching}[0-9])"
    )


_THOUSANDS = re.compile(_grouped(","))

# Every part is possessive or of bounded length and every chain is tried from its first group only:
# one pass over the text, whatever it holds.
_NUMBER = re.compile(
    rf"(?:{_NOT_AFTER_OPERAND}(?<![0-9]{_MARK})(?<![0-9]\\{_MARK})"
    rf"(?:{_SIGN}|(?<![0-9] ){_EN_DASH})(?:\\?{_MARK}[ {_TYPOGRAPHIC_BLANKS}]?)?)?"
    rf"(?:{_BASE_PREFIXED}"
    rf"|(?P<number>{_grouped(',')}"
    rf"|{_grouped(_APOSTROPHES, ',')}"
    rf"|{_grouped(_TYPOGRAPHIC_BLANKS, ',')}"
    rf"|(?<!\w){_grouped(' ', ',' + _TYPOGRAPHIC_BLANKS)}(?!-?[^\W\d_])"
    rf"|(?:{_POINT}[0-9]++|[0-9]++(?:\.[0-9]++)?+){_EXPONENT}{_END})"
    rf"|{_GLUED})"
)

_AS_DECIMAL_READS_IT = str.maketrans(
    dict.fromkeys(_MINUS_SIGNS + _EN_DASH, "-")
    | dict.fromkeys("," + _APOSTROPHES + _TYPOGRAPHIC_BLANKS + " ")
    | dict.fromkeys(_CURRENCY_MARKS + "\\")
)
_QUOTIENTS = Context(prec=50, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)


@dataclass(frozen=True)
class NumberInText:
    """A number that was read, and where: `source[start:end] == text`."""

    text: str
    """As written, with its sign, and with the currency mark only where it parts the two."""
    start: int
    """Index of its first character."""
    end: int
    """Index after its last character."""
    value: Decimal
    """What it is worth, exactly; zero never carries a minus."""


def find_numbers(text: str, *, fractions: bool = False) -> list[NumberInText]:
    r"""Read every number of a text, from left to right, in time linear in its length.

    Never raises, whatever the text holds. The rules:

    **Digits** are the ASCII digits only; `٣`, `²`, `½` and full-width digits are letters here, and
    words (`seven`, `inf`, `nan`) are never numbers. A letter next to the digits changes nothing.

    >>> [str(n.value) for n in find_numbers("####18: 5kg of a7, 3x and 1e")]
    ['18', '5', '7', '3', '1']

    **A sign** is `+`, `-` or the minus signs U+2212, U+FE63 and U+FF0D, directly before the number,
    or before or after its currency mark (`-$5`, `-$ 5`, `$-5`, LaTeX's `-\$5`). It counts unless
    the character before it ends an operand: a letter, a digit, `)`, `]`, `}`, `%`, `.` or a
    currency mark behind a digit. A sign with a blank after it is an operator. An en dash is a minus
    too, but not behind a digit and a blank, where it is a range.

    >>> [str(n.value) for n in find_numbers("10-7=3, x = 5 - 3, n=-7, covid-19, -$5, $-5")]
    ['10', '7', '3', '5', '3', '-7', '19', '-5', '-5']
    >>> [str(n.value) for n in find_numbers("5 -3, 5--3, (x+1)-3")]
    ['5', '-3', '5', '-3', '1', '3']
    >>> [str(n.value) for n in find_numbers("it is –5; pages 3–5, 3 –5, 3 – 5")]
    ['-5', '3', '5', '3', '5', '3', '5']

    **A dot** with a digit behind it is a decimal point, unless a letter, a closing bracket, `%` or
    another dot stands before a leading one (`Rs.500` is 500; but `10x.6` is 10 and .6). All other
    dots are punctuation.

    >>> [str(n.value) for n in find_numbers("18.00, .5, 18., No.5, ...7... and 1...5")]
    ['18.00', '0.5', '18', '5', '7', '1', '5']

    **An exponent** is `e` or `E`, a sign if any, and one to six digits: `3.5e-4`.

    **No number at all** are digits glued together in any other way: two decimal points (`1.2.3`,
    versions, IP addresses), underscores (`1_000`), two exponents or one of more than six digits
    (`1e1000000`), and literals of other bases (`0x1F`, `0o17`, `0b11`; hence `0x5` as well).

    >>> find_numbers("v1.2.3, 192.168.0.1, 1_000, 1e1000000, 0x1F")
    []

    **Thousands** are one to three digits without a leading zero, then groups of exactly three, then
    decimals and exponent if any, with one kind of separator: comma, apostrophe (also U+2019), one
    of the blanks U+00A0, U+202F and U+2009, or the ordinary blank. A chain of groups is one number
    as a whole or not at all: otherwise the separators part numbers. A decimal comma is not known.

    >>> [str(n.value) for n in find_numbers("1,234.50 and 1 000 000 and 1,234,5 and 0,25 and 1, 2")]
    ['1234.50', '1000000', '1', '234', '5', '0', '25', '1', '2']
    >>> [str(n.value) for n in find_numbers("1'234'000.50 and 5'11")]
    ['1234000.50', '5', '11']

    The ordinary blank does not join what touches a word (`12 500ml`, `12 200-kilobyte files`,
    `x1 234`), nor part of a longer row (`12 5 300`, `47 03 99`). What stays ambiguous is read as
    one number, with blanks as with commas: `100 200 300`.

    >>> [str(n.value) for n in find_numbers("12 500ml; 12 5 300; $350 000 x 5")]
    ['12', '500', '12', '5', '300', '350000', '5']

    **Currency and percent marks** are read over: `50%` is 50, `$5` and `5 €` are 5.

    Args:
        text: Any string. Notes such as `<<48/2=24>>` are not known here: take them out before.
        fractions: Read `3/4` (also with U+2044) as one number, the quotient, exact or rounded to 50
            significant digits. A fraction by zero, or with a part that is no number, is none; a
            longer chain (`1/2/2024`) is no fraction. `1 3/4` is 1 and 0.75. Without the option the
            two parts are two numbers.

    Returns:
        The numbers in the order of the text; their spans do not overlap.

    >>> [str(n.value) for n in find_numbers("3/4, -3/4, 1/0, 1/2/2024", fractions=True)]
    ['0.75', '-0.75', '1', '2', '2024']
    """
    spans = [(m.start(), m.end(), m.lastgroup == "number") for m in _NUMBER.finditer(text)]
    if fractions:
        return _with_fractions(text, spans)
    return [
        NumberInText(text[start:end], start, end, _value(text[start:end]))
        for start, end, readable in spans
        if readable
    ]


def last_number(text: str, *, fractions: bool = False) -> Decimal | None:
    """Value of the last number of a text, which is where answers have it.

    Args:
        text: Any string, read by the rules of `find_numbers`.
        fractions: As in `find_numbers`.

    Returns:
        The value, or None where the text has no number.

    >>> last_number("She pays 3 * $4 = $12.")
    Decimal('12')
    >>> last_number("no number here") is None
    True
    """
    numbers = find_numbers(text, fractions=fractions)
    return numbers[-1].value if numbers else None


def only_number(text: str) -> Decimal | None:
    """Value of a text that is one number and nothing else, blanks at the ends apart.

    Returns:
        The value, or None for any other text.

    >>> only_number(" -1,234.50")
    Decimal('-1234.50')
    >>> [only_number(text) for text in ("12 kg", "3 4", "50%", "nan", "")]
    [None, None, None, None, None]
    """
    alone = text.strip()
    numbers = find_numbers(alone)
    return numbers[0].value if [number.text for number in numbers] == [alone] else None


def _value(number: str) -> Decimal:
    return _without_negative_zero(Decimal(number.translate(_AS_DECIMAL_READS_IT)))


def _without_negative_zero(value: Decimal) -> Decimal:
    # Decimal's own `+value` and `abs(value)` would round to the context's 28 digits.
    return value.copy_abs() if value.is_zero() else value


def _with_fractions(text: str, spans: list[tuple[int, int, bool]]) -> list[NumberInText]:
    numbers: list[NumberInText] = []
    first = 0
    while first < len(spans):
        last = first
        while last + 1 < len(spans) and _only_a_slash_between(text, spans[last], spans[last + 1]):
            last += 1
        chain = spans[first : last + 1]
        start, end = chain[0][0], chain[-1][1]
        around = text[max(start - 1, 0) : start] + text[end : end + 1]
        if len(chain) == 2 and not any(slash in around for slash in _SLASHES):
            parts = [_value(text[a:b]) for a, b, readable in chain if readable]
            if len(parts) == 2 and not parts[1].is_zero():
                quotient = _without_negative_zero(_QUOTIENTS.divide(parts[0], parts[1]))
                numbers.append(NumberInText(text[start:end], start, end, quotient))
        else:
            numbers.extend(
                NumberInText(text[a:b], a, b, _value(text[a:b]))
                for a, b, readable in chain
                if readable
            )
        first = last + 1
    return numbers


def _only_a_slash_between(
    text: str, left: tuple[int, int, bool], right: tuple[int, int, bool]
) -> bool:
    return right[0] == left[1] + 1 and text[left[1]] in _SLASHES


# What decoders leave of a number. A piece that touches a letter, or a row with a piece of several
# digits, was put together by the decoder itself: there a blank is a blank of the text.
_ROW_OF_DIGITS = re.compile(r"(?<![\w.,])(?<![0-9] )[0-9](?: [0-9])++(?!\w|[.,][0-9])")
_SPACED_POINT = re.compile(r"(?<=[0-9]) ?\. ?(?=[0-9])")
_SPACED_LEADING_POINT = re.compile(
    rf"(?:^|(?<=[=(*×÷<>:{re.escape(_CURRENCY_MARKS)}]))( ?)\. (?=[0-9])"
)
_SPACED_LEADING_POINT_AFTER_SIGN = re.compile(rf"(?<={_SIGN}) ?\. (?=[0-9])")
_SPACED_LIST = re.compile(r"(?<![0-9.])[0-9]++(?:\.[0-9]++)?+(?: ?, ?[0-9]++(?:\.[0-9]++)?+)++")
_SPACED_EXPONENT = re.compile(rf"(?<=[0-9]) ?([eE])(?: ?({_SIGN}))? ?(?=[0-9])")
_SPACED_SLASH = re.compile(rf"(?<=[0-9]) ?([{_SLASHES}]) ?(?=[0-9])")
_SPACED_SIGN = re.compile(rf"({_SIGN}) ?({_MARK}?) ?(?=\.?[0-9])")


def join_spaced_pieces(text: str) -> str:
    """Put numbers together again that a decoder has spaced out.

    Only for text from decoders that put blanks between pieces (BERT's WordPiece): in other text a
    blank between two digits is a blank. Single digits, decimal points, well-formed thousands
    commas, exponents and slashes are joined. A sign is joined where it can be no operator: at the
    start, behind `=`, `(`, another sign and the like, or behind a word of two letters or more that
    is not the unit of a number.

    >>> join_spaced_pieces("the answer is 1 2 3 4. 5")
    'the answer is 1234.5'
    >>> join_spaced_pieces("- $ 1, 2 3 4 and 3. 5 e - 4")
    '-$1,234 and 3.5e-4'
    >>> join_spaced_pieces("the answer is - 7")
    'the answer is -7'
    >>> join_spaced_pieces("5 - 3 = 2 and 1, 2")
    '5 - 3 = 2 and 1, 2'

    Some texts have the same ids there, and no reading can tell them apart: `1 2` and `12` (where
    every digit is a piece), `5. 3 apples` and `5.3 apples`, `100, 200` and `100,200`, `covid-19`
    and `covid -19`, `.5` and the end of a sentence before `5`. Each of the first four is joined.

    Args:
        text: Decoded text. Text that is already joined comes back as it is.

    Returns:
        The text without the blanks inside numbers; nothing else is changed.
    """
    text = _ROW_OF_DIGITS.sub(lambda m: m[0].replace(" ", ""), text)
    text = _SPACED_POINT.sub(".", text)
    text = _SPACED_LEADING_POINT.sub(r"\1.", text)
    # `5 - .5` reaches us as `5 -. 5`: the blank goes back where it was; unary signs join below.
    text = _SPACED_LEADING_POINT_AFTER_SIGN.sub(" .", text)
    text = _SPACED_LIST.sub(_joined_thousands, text)
    text = _SPACED_EXPONENT.sub(r"\1\2", text)
    text = _SPACED_SLASH.sub(r"\1", text)
    return _SPACED_SIGN.sub(
        lambda m: m[0] if _is_operator(m.string, m.start()) else m[1] + m[2], text
    )


def _joined_thousands(chain: re.Match[str]) -> str:
    joined = chain[0].replace(" ", "")
    return joined if _THOUSANDS.fullmatch(joined) else chain[0]


def _is_operator(text: str, at: int) -> bool:
    """Whether an operand ends before the sign at `at`, one blank between them or none."""
    last = at - 1
    if last >= 0 and text[last] == " ":
        last -= 1
    if last < 0:
        return False
    if text[last] in _CURRENCY_MARKS or text[last] == ".":
        return _number_ends_before(text, last)
    if not text[last].isalpha():
        return text[last].isalnum() or text[last] in ")]}%"
    first = last
    while first > 0 and text[first - 1].isalpha():
        first -= 1
    return first == last or _number_ends_before(text, first)


def _number_ends_before(text: str, at: int) -> bool:
    before = text[max(at - 2, 0) : at]
    return before.rstrip(" ")[-1:].isdecimal()


@dataclass(frozen=True)
class NumberFormat:
    """How values are written: so many decimals, or so many significant digits.

    What is written is read back by `find_numbers` as exactly the rounded value.

    >>> NumberFormat(decimals=2).write(3.14159)
    '3.14'
    >>> NumberFormat(decimals=1, width=3, plus_sign=True).write(7)
    '+007.0'
    >>> [NumberFormat(significant_digits=3).write(value) for value in (1234, 0.5)]
    ['1230', '0.500']
    >>> NumberFormat(decimals=2, scientific=True).write(-31415.9)
    '-3.14e4'
    """

    decimals: int = 0
    """Digits behind the decimal point; with 0 there is no point."""
    width: int | None = None
    """Digits before the decimal point, filled up with zeros; the sign is not counted. None: as many
    as the value has."""
    plus_sign: bool = False
    """Write `+` before values that are not negative, zero included."""
    significant_digits: int | None = None
    """Digits from the first that is not 0, in place of `decimals`; None: `decimals` count."""
    scientific: bool = False
    """One digit before the point and a power of ten behind: `3.14e4`, `5.0e-3`."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: If `decimals` is not an integer of at least 0, `width` or
                `significant_digits` not None or an integer of at least 1, or `plus_sign` or
                `scientific` not a bool; if there are both decimals and significant digits, or a
                width for scientific notation.
        """
        if not _is_integer(self.decimals) or self.decimals < 0:
            raise ValueError(
                f"NumberFormat.decimals must be an integer of at least 0, got {self.decimals!r}."
            )
        if self.width is not None and (not _is_integer(self.width) or self.width < 1):
            raise ValueError(
                "NumberFormat.width must be an integer of at least 1, or None for no padding, "
                f"got {self.width!r}."
            )
        digits = self.significant_digits
        if digits is not None and (not _is_integer(digits) or digits < 1):
            raise ValueError(
                "NumberFormat.significant_digits must be an integer of at least 1, or None where "
                f"decimals count, got {digits!r}."
            )
        for name, flag in (("plus_sign", self.plus_sign), ("scientific", self.scientific)):
            if not isinstance(flag, bool):
                raise ValueError(f"NumberFormat.{name} must be true or false, got {flag!r}.")
        if digits is not None and self.decimals:
            raise ValueError(
                f"NumberFormat.decimals={self.decimals} and significant_digits={digits} exclude "
                "each other. Remove one."
            )
        if self.scientific and self.width is not None:
            raise ValueError(
                f"NumberFormat.width={self.width} has no effect with scientific: true, which "
                "writes one digit before the point. Remove one."
            )

    def write(self, value: Decimal | int | float) -> str:
        """Write a value in this format.

        Args:
            value: Rounded half to even on its exact decimal value: the float 2.675 lies below
                2.675 and is written 2.67. What rounds to zero is written without a minus.

        Returns:
            The sign if any, the integer digits, a point and the decimals if any, and in scientific
            notation `e` and the exponent.

        Raises:
            ValueError: If the value is not a finite number, or its integer part has more digits
                than `width`.
        """
        if isinstance(value, bool) or not isinstance(value, Decimal | int | float):
            raise ValueError(
                f"a number format writes a Decimal, int or float, got {value!r} "
                f"({type(value).__name__})."
            )
        exact = Decimal(value)
        if not exact.is_finite():
            raise ValueError(
                f"{value} cannot be written as a number: only finite values have digits. "
                "Take such rows out of the data."
            )
        exponent = ""
        decimals = self.decimals
        if self.significant_digits is not None or self.scientific:
            digits = self.significant_digits or self.decimals + 1
            exact = _exactly(digits).plus(exact)
            magnitude = exact.adjusted() if exact else 0
            decimals = digits - 1
            if self.scientific:
                exact = _exactly(digits).scaleb(exact, -magnitude)
                exponent = f"e{magnitude}"
            else:
                decimals = max(decimals - magnitude, 0)
        context = _exactly(max(exact.adjusted(), 0) + decimals + 2)
        rounded = exact.quantize(Decimal((0, (1,), -decimals)), context=context)
        integer, point, behind = f"{rounded.copy_abs():f}".partition(".")
        sign = "-" if rounded < 0 else "+" if self.plus_sign else ""
        if self.width is not None and len(integer) > self.width:
            written = reprlib.repr(sign + integer + point + behind)
            raise ValueError(
                f"{written} has {len(integer)} digits before the decimal point, more than the "
                f"width {self.width} of the number format: use width {len(integer)} or more."
            )
        return sign + integer.zfill(self.width or 0) + point + behind + exponent


def _exactly(digits: int) -> Context:
    return Context(digits, ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
