"""The reader against hand-made tables, and against numbers that Python's own formatting wrote."""

import json
import re
import time
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from ntl_lightning.numbers.text import (
    NumberFormat,
    NumberInText,
    find_numbers,
    join_spaced_pieces,
    last_number,
    only_number,
)

HOSTILE_CHARACTERS = (
    "0123456789.,+-_eExX/()]}%$€# \n\t'ab\u2212\ufe63\uff0d\u2013\u2044\u00a0\u202f\u2009"
    "٣५²½５" + "\u0301\ud800\\\u2019"
)

finite_decimals = st.decimals(
    allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12
)


def values(text: str, *, fractions: bool = False) -> list[str]:
    """Values as plain text, so that 18.00 and 18 stay apart."""
    return [f"{n.value:f}" for n in find_numbers(text, fractions=fractions)]


# --- answers as models and data sets write them ---


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("#### 18", 18),
        ("#### 1,234", 1234),
        ("#### $5", 5),
        ("#### 18.", 18),
        ("#### 18.00", 18),
        ("#### -7", -7),
        ("#### 1,000,000", 1000000),
        ("####18", 18),
        ("the total is 72 clips, altogether.", 72),
        ("10-7=3", 3),
        ("5 × 3 = 15", 15),
        ("(7)", 7),
        ("7...", 7),
        ("#### 2,080", 2080),
    ],
)
def test_the_last_number_of_an_answer(answer: str, value: int) -> None:
    assert last_number(answer) == value


def test_an_answer_without_a_number_gives_none() -> None:
    assert last_number("no number here") is None
    assert last_number("") is None


def test_wrong_leading_groups_are_not_lost() -> None:
    assert last_number("#### 1,080") != last_number("#### 2,080")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        # What other readers make of it: 234, 5, 5, -3, -3, 4 with fractions.
        ("1,234", ["1234"]),
        (".5", ["0.5"]),
        ("1e5", ["100000"]),
        ("12-3", ["12", "3"]),
        ("x = 5 - 3", ["5", "3"]),
        ("99999", ["99999"]),
    ],
)
def test_strings_that_other_readers_misread(text: str, right: list[str]) -> None:
    assert values(text) == right


def test_neighbouring_large_numbers_stay_apart() -> None:
    assert last_number("99999") != last_number("100000")
    assert last_number("12345678901234567891") != last_number("12345678901234567890")


def test_the_golds_of_gsm8k_are_all_read(assets: Path) -> None:
    read = {}
    for split in ("train", "test"):
        lines = (assets / "data" / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
        answers = [json.loads(line)["answer"] for line in lines]
        golds = [number for answer in answers if (number := last_number(answer)) is not None]
        # Independent of the reader: the figures behind the mark, commas taken out.
        assert golds == [int(answer.split("#### ")[1].replace(",", "")) for answer in answers]
        read[split] = (len(golds), sum(golds), sum(gold < 0 for gold in golds))
    assert read == {"train": (7473, 403114874, 3), "test": (1319, 9009187, 2)}


# --- signs ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("-7", ["-7"]),
        ("+7", ["7"]),
        ("\u22127", ["-7"]),
        ("\ufe637", ["-7"]),
        ("\uff0d7", ["-7"]),
        ("\u20137", ["-7"]),
        ("The answer is \u20135", ["-5"]),
        ("(\u20137)", ["-7"]),
        ("x=\u20137", ["-7"]),
        ("#### \u2013$1,234", ["-1234"]),
        ("pages 3 \u20135", ["3", "5"]),
        ("3 \u2013 5", ["3", "5"]),
        ("x\u20135", ["5"]),
        ("answer \u2013 5", ["5"]),
        ("n=-7", ["-7"]),
        ("(-7)", ["-7"]),
        ("10-7=3", ["10", "7", "3"]),
        ("10\u22127", ["10", "7"]),
        ("x-7", ["7"]),
        ("covid-19", ["19"]),
        ("(x+1)-3", ["1", "3"]),
        ("a[2]-3", ["2", "3"]),
        ("\\frac{1}{2}-3", ["1", "2", "3"]),
        ("50%-20%", ["50", "20"]),
        ("5.-3", ["5", "3"]),
        ("x²-3", ["3"]),
        ("3\u20135", ["3", "5"]),
        ("5 - 3", ["5", "3"]),
        ("5 -3", ["5", "-3"]),
        ("5--3", ["5", "-3"]),
        ("- 7", ["7"]),
        ("**-7**", ["-7"]),
        ("_-7_", ["-7"]),
        ("2024-01-05", ["2024", "1", "5"]),
        ("-0", ["0"]),
        ("-0.0", ["0.0"]),
    ],
)
def test_a_sign_counts_unless_an_operand_stands_before_it(text: str, right: list[str]) -> None:
    assert values(text) == right


# --- currency and percent ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("$5", ["5"]),
        ("5€", ["5"]),
        ("5 €", ["5"]),
        ("-$5", ["-5"]),
        ("$-5", ["-5"]),
        ("-£1,234.50", ["-1234.50"]),
        ("US$-5", ["-5"]),
        ("10-$5", ["10", "5"]),
        ("$10-$5", ["10", "5"]),
        ("10$-5$", ["10", "5"]),
        ("10$-$5", ["10", "5"]),
        ("- $5", ["5"]),
        ("-$ 5", ["-5"]),
        ("-€\u00a05", ["-5"]),
        ("-$  5", ["5"]),
        ("10-$ 5", ["10", "5"]),
        ("-\\$5", ["-5"]),
        ("\\$-5", ["-5"]),
        ("-\\$ 1,234.50", ["-1234.50"]),
        ("10\\$-5\\$", ["10", "5"]),
        ("-\\5", ["5"]),
        ("50%", ["50"]),
        ("-12.5%.", ["-12.5"]),
    ],
)
def test_currency_and_percent_marks_are_read_over(text: str, right: list[str]) -> None:
    assert values(text) == right


def test_the_span_covers_the_number_with_its_sign_and_no_mark_around_it() -> None:
    assert find_numbers("is -$5, $-6 or 7%") == [
        NumberInText("-$5", 3, 6, Decimal(-5)),
        NumberInText("-6", 9, 11, Decimal(-6)),
        NumberInText("7", 15, 16, Decimal(7)),
    ]


# --- decimals, exponents, and what is no number ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("18.00", ["18.00"]),
        ("18.", ["18"]),
        ("$.50", ["0.50"]),
        ("-.5", ["-0.5"]),
        ("...7...", ["7"]),
        ("7..", ["7"]),
        ("1...5", ["1", "5"]),
        ("33.333...%", ["33.333"]),
        ("Rs.500", ["500"]),
        ("Rs.1,234", ["1234"]),
        ("(a).5", ["5"]),
        ("25x.4=10", ["25", "0.4", "10"]),
        ("3.5e-4", ["0.00035"]),
        ("3.5E\u22124", ["0.00035"]),
        ("2e+3", ["2000"]),
        (".5e1", ["5"]),
        ("1e", ["1"]),
        ("1e+", ["1"]),
        ("1e5.", ["100000"]),
        ("5kg", ["5"]),
        ("3x", ["3"]),
        ("a5", ["5"]),
        ("x_1", ["1"]),
        ("__18__", ["18"]),
        ("007", ["7"]),
        ("10x6", ["10", "6"]),
        ("12:30", ["12", "30"]),
        ("5²", ["5"]),
    ],
)
def test_decimals_and_exponents(text: str, right: list[str]) -> None:
    assert values(text) == right


@pytest.mark.parametrize(
    "text",
    [
        "1.2.3",
        "-1.2.3",
        "192.168.0.1",
        "v2.10.1",
        "1.000.000",
        "1_000",
        "1__000.5",
        "0x1F",
        "0x1F.8p3",
        "0b101",
        "0o17",
        "1e5e6",
        "1e5.5",
        "1e1000000",
        "1e-1000000",
        "1e0000001",
        "٣ and ५ and ５ and ½ and ²",
        "inf, nan, infinity, NaN, seven",
        ". , - + $ % e E",
    ],
)
def test_what_is_no_number(text: str) -> None:
    assert find_numbers(text) == []


def test_exponents_of_six_digits_are_exact() -> None:
    assert last_number("-7e999999") == Decimal("-7e999999")
    assert last_number("7e-999999") == Decimal("7e-999999")


def test_a_refused_literal_hides_no_number_after_it() -> None:
    assert values("1.2.3, 0x1F and 1_000: 7") == ["7"]


# --- thousands ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1,234", ["1234"]),
        ("-1,234,567", ["-1234567"]),
        ("1,234.50", ["1234.50"]),
        ("1,234.", ["1234"]),
        ("1,234,", ["1234"]),
        ("1,234e2", ["123400"]),
        ("1, 2", ["1", "2"]),
        ("1,2", ["1", "2"]),
        ("1,,234", ["1", "234"]),
        ("1,234,5", ["1", "234", "5"]),
        ("1,2345", ["1", "2345"]),
        ("1234,567", ["1234", "567"]),
        ("1,234.5,678", ["1", "234.5", "678"]),
        ("1.5,234", ["1.5", "234"]),
        ("0,125", ["0", "125"]),
        ("012,345", ["12", "345"]),
        ("100,00", ["100", "0"]),
        ("13,15,17&19", ["13", "15", "17", "19"]),
        ("100,200,300", ["100200300"]),
        ("1'000", ["1000"]),
        ("-1\u2019234\u2019567.50", ["-1234567.50"]),
        ("'100','200'", ["100", "200"]),
        ("5'11", ["5", "11"]),
        ("1'234,5", ["1", "234", "5"]),
        ("1'234'56", ["1", "234", "56"]),
        ("1\u00a0000\u00a0000", ["1000000"]),
        ("12\u202f345,", ["12345"]),
        ("12\u2009345.5kg", ["12345.5"]),
        ("12\u00a0300g", ["12300"]),
        ("1,234\u00a056", ["1234", "56"]),
        ("1,2\u00a0300", ["1", "2", "300"]),
        ("2\u00a0300,5", ["2", "300", "5"]),
    ],
)
def test_thousands_with_commas_and_typographic_blanks(text: str, right: list[str]) -> None:
    assert values(text) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1 000 000", ["1000000"]),
        ("is 1 234.50.", ["1234.50"]),
        ("$350 000 x 5/100", ["350000", "5", "100"]),
        ("$80 000+ $16 000", ["80000", "16000"]),
        ("About 450 000 people", ["450000"]),
        ("1 000 000 + 1 500 000", ["1000000", "1500000"]),
        ("17 000/5 = 3 400.", ["17000", "5", "3400"]),
        ("100 200 300", ["100200300"]),
        # Rows of numbers and numbers that touch words are not groups.
        ("47 03 99", ["47", "3", "99"]),
        ("12 5 300", ["12", "5", "300"]),
        ("1 234 56", ["1", "234", "56"]),
        ("2019 300", ["2019", "300"]),
        ("0 000", ["0", "0"]),
        ("3.5 12 300", ["3.5", "12", "300"]),
        ("1,2 300", ["1", "2", "300"]),
        ("2 300,5", ["2", "300", "5"]),
        ("200 300,500", ["200", "300500"]),
        ("1\u00a02 300", ["1", "2", "300"]),
        ("1,000 200 300", ["1000", "200", "300"]),
        ("1  234", ["1", "234"]),
        ("1\n234", ["1", "234"]),
        ("x1 234", ["1", "234"]),
        ("12 500ml bottles", ["12", "500"]),
        ("12 200-kilobyte files", ["12", "200"]),
        ("5 -3 000", ["5", "-3000"]),
    ],
)
def test_thousands_with_ordinary_blanks(text: str, right: list[str]) -> None:
    assert values(text) == right


# --- fractions ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3/4", ["0.75"]),
        ("3\u20444", ["0.75"]),
        ("-3/4", ["-0.75"]),
        ("3/-4", ["-0.75"]),
        ("-$3/4", ["-0.75"]),
        ("6/2 = 3", ["3", "3"]),
        ("1.5/2", ["0.75"]),
        ("1,000/8", ["125"]),
        ("0/5", ["0"]),
        ("0/-5", ["0"]),
        ("1 3/4", ["1", "0.75"]),
        ("1/3", ["0." + "3" * 50]),
        ("2/3", ["0." + "6" * 49 + "7"]),
        ("3/0", []),
        ("3/0.00 or 7", ["7"]),
        ("3/4.5.6", []),
        ("1/2/2024", ["1", "2", "2024"]),
        ("1/0/2", ["1", "0", "2"]),
        ("1/2/1.2.3", ["1", "2"]),
        ("tmp/3/4", ["3", "4"]),
        ("3/4/x", ["3", "4"]),
        ("3 / 4", ["3", "4"]),
        ("50%/2", ["50", "2"]),
        ("and/or 7", ["7"]),
    ],
)
def test_fractions_by_option(text: str, right: list[str]) -> None:
    assert values(text, fractions=True) == right


def test_without_the_option_a_fraction_is_two_numbers() -> None:
    assert values("3/4") == ["3", "4"]
    assert last_number("3/4") == 4
    assert last_number("3/4", fractions=True) == Decimal("0.75")


def test_the_span_of_a_fraction_covers_both_parts() -> None:
    assert find_numbers("x = -3/4.", fractions=True) == [
        NumberInText("-3/4", 4, 8, Decimal("-0.75"))
    ]


def test_fractions_beyond_the_range_of_default_decimals() -> None:
    (number,) = find_numbers("9e999999/1e-999999", fractions=True)
    assert number.value.adjusted() == 1999998


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**30), st.booleans())
def test_a_fraction_is_the_quotient_to_fifty_digits(
    numerator: int, denominator: int, grouped: bool
) -> None:
    text = f"{numerator:,}/{denominator:,}" if grouped else f"{numerator}/{denominator}"
    (value,) = (n.value for n in find_numbers(f"it is {text}.", fractions=True))
    exact = Fraction(numerator, denominator)
    assert abs(Fraction(value) - exact) <= abs(exact) * Fraction(1, 10**49)


# --- what Python's own formatting writes is read back ---

BEFORE = [
    "",
    "= ",
    "is ",
    "####",
    "(",
    "$",
    "x=",
    "a ",
    "[",
    "**",
    "no. ",
    "7 %, ",
    "\n",
    "٣ ",
    "…",
    '"',
]
AFTER = [
    "",
    ".",
    ". Then",
    ",",
    ", and",
    ")",
    "%",
    " €",
    "kg",
    "...",
    "\n",
    " =",
    "!",
    "**",
    "٣",
    ";",
    "-",
]
FORMATS: list[Callable[[Decimal], str]] = [
    lambda v: f"{v:f}",
    lambda v: f"{v:,f}",
    lambda v: f"{v:+,f}",
    lambda v: f"{v:f}".replace("-", "\u2212"),
    lambda v: f"{v:,f}".replace(",", "\u202f"),
    lambda v: f"{v:e}",
    lambda v: f"{v:E}",
]


@given(finite_decimals, st.sampled_from(FORMATS), st.sampled_from(BEFORE), st.sampled_from(AFTER))
@example(Decimal("1E-30"), FORMATS[0], "", "")
def test_a_formatted_decimal_is_read_back_exactly(
    value: Decimal, write: Callable[[Decimal], str], before: str, after: str
) -> None:
    written = write(value)
    text = before + written + after
    found = find_numbers(text)[-1]
    assert found.value == value
    assert (found.text, found.start) == (written, len(before))


@given(st.integers(), st.sampled_from([" x", ".", ""]))
def test_integers_grouped_by_ordinary_blanks_are_read_back(value: int, after: str) -> None:
    grouped = f"{value:,}".replace(",", " ")
    assert [n.value for n in find_numbers(grouped + after)] == [value]


@given(
    st.lists(finite_decimals, max_size=8),
    st.sampled_from([", ", "; ", "\n", " and ", " + ", " = ", "|"]),
)
def test_a_list_of_numbers_is_read_back(numbers: list[Decimal], separator: str) -> None:
    assert [n.value for n in find_numbers(separator.join(f"{v:f}" for v in numbers))] == numbers


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_repr_of_a_float_is_read_back(value: float) -> None:
    (number,) = find_numbers(repr(value))
    assert float(number.value) == value


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.sampled_from(["-", "+", "\u2212", "\u2013", "*", " - ", ":", "="]),
)
def test_the_operands_of_a_formula_are_read_without_the_operator(
    a: int, b: int, operator: str
) -> None:
    assert [n.value for n in find_numbers(f"{a}{operator}{b}")] == [a, b]


def test_numbers_longer_than_pythons_limit_for_int_are_exact() -> None:
    digits = "123456789" * 1000
    assert last_number(f"= -{digits}.") == Decimal("-" + digits)
    assert last_number("1," + ",".join(["234"] * 3000)) == Decimal("1" + "234" * 3000)


# --- any text ---


@given(st.text() | st.text(HOSTILE_CHARACTERS), st.booleans())
def test_any_text_is_read_without_an_exception(text: str, fractions: bool) -> None:
    numbers = find_numbers(text, fractions=fractions)
    end = 0
    for number in numbers:
        assert end <= number.start < number.end <= len(text)
        assert text[number.start : number.end] == number.text
        assert re.search("[0-9]", number.text)
        assert number.value.is_finite()
        assert number.value or not number.value.is_signed()
        end = number.end
    assert last_number(text, fractions=fractions) == (numbers[-1].value if numbers else None)


@given(st.text(HOSTILE_CHARACTERS))
def test_a_number_read_alone_is_worth_the_same(text: str) -> None:
    for number in find_numbers(text, fractions=True):
        assert last_number(number.text, fractions=True) == number.value


@pytest.mark.parametrize(
    "piece",
    ["1", ".", ",", " ", "_", "-", "–", "1.", "1,", "1 ", "1'", "-\\$", "1_", "1e", "1e-", "1/",
     "0x1", "-$5", "a - ", "12 345,678 ", "1 2,3.4", "5 - ", "1 , ", "1 . ", "1 e ", ". "],
)  # fmt: skip
def test_hostile_text_is_read_in_linear_time(piece: str) -> None:
    assert_not_read_in_quadratic_time((piece * 200_000)[:200_000])


@pytest.mark.parametrize(
    "group", ["123,", "123 ", "123\u00a0", "123'", "123, ", "1.", "1e", "1_", "1 "]
)
@pytest.mark.parametrize("end", ["5", ".5.5", "_5", ",5", " 5", "x"])
def test_a_long_chain_that_breaks_at_its_end_is_read_in_linear_time(group: str, end: str) -> None:
    assert_not_read_in_quadratic_time((group * 200_000)[:200_000] + "123" + end)


def assert_not_read_in_quadratic_time(text: str) -> None:
    for read in (find_numbers, join_spaced_pieces):
        before = time.process_time()
        read(text)
        # A second at most; a reader that looks back at each step takes minutes.
        assert time.process_time() - before < 20


# --- text from decoders that space out pieces ---


@pytest.mark.parametrize(
    ("spaced", "joined"),
    [
        ("the answer is 1 2 3 4. 5", "the answer is 1234.5"),
        ("the answer is 1234. 5", "the answer is 1234.5"),
        ("1 2 3 4 . 5", "1234.5"),
        ("1 8.", "18."),
        ("1, 2 3 4", "1,234"),
        ("1 , 2 3 4 , 5 6 7 . 5 0", "1,234,567.50"),
        ("1, 2", "1, 2"),
        ("1 0, 2 0, 3 0", "10, 20, 30"),
        ("1, 234, 5", "1, 234, 5"),
        ("3. 5e - 4", "3.5e-4"),
        ("3. 5 e - 4", "3.5e-4"),
        ("2 e + 1 0", "2e+10"),
        ("1 e 5", "1e5"),
        ("x =. 5", "x =.5"),
        ("-. 5", "-.5"),
        (". 5", ".5"),
        ("(. 5 )", "(.5 )"),
        ("$. 5", "$.5"),
        ("5 -. 5", "5 - .5"),
        ("the end. 5 apples", "the end. 5 apples"),
        ("3 / 4", "3/4"),
        # Blanks of the text: the decoder has put these pieces together itself.
        ("10 20 30", "10 20 30"),
        ("1 234", "1 234"),
        ("12 3 4", "12 3 4"),
        ("5 3.5", "5 3.5"),
        ("5 3kg", "5 3kg"),
        ("1e5 3", "1e5 3"),
        ("# # # # 1 8", "# # # # 18"),
    ],
)
def test_the_pieces_of_a_number_are_joined(spaced: str, joined: str) -> None:
    assert join_spaced_pieces(spaced) == joined


@pytest.mark.parametrize(
    ("spaced", "joined"),
    [
        ("- 7", "-7"),
        ("+ 7", "+7"),
        ("the answer is - 7", "the answer is -7"),
        ("x = - 7", "x = -7"),
        ("( - 7 )", "( -7 )"),
        ("- $ 5", "-$5"),
        ("$ - 5", "$ -5"),
        ("5 - - 7", "5 - -7"),
        ("done. - 7", "done. -7"),
        ("5 - 3 = 2", "5 - 3 = 2"),
        ("5. - 3", "5. - 3"),
        ("( x ) - 3", "( x ) - 3"),
        ("50 % - 3", "50 % - 3"),
        ("x - 3", "x - 3"),
        ("3x - 5", "3x - 5"),
        ("3 kg - 2 kg", "3 kg - 2 kg"),
        ("3kg - 2kg", "3kg - 2kg"),
        ("$ 5 - $ 3", "$ 5 - $ 3"),
        ("5 $ - 3 $", "5 $ - 3 $"),
        ("x² - 3", "x² - 3"),
        ("covid - 19", "covid -19"),
    ],
)
def test_a_spaced_sign_is_joined_where_it_is_no_operator(spaced: str, joined: str) -> None:
    assert join_spaced_pieces(spaced) == joined


@given(st.text() | st.text("0123456789.,+-eE$/%()= \u2212abcx"))
def test_joined_text_comes_back_as_it_is(text: str) -> None:
    joined = join_spaced_pieces(text)
    assert join_spaced_pieces(joined) == joined
    assert joined.replace(" ", "") == text.replace(" ", "")


@given(
    finite_decimals,
    st.sampled_from([lambda v: f"{v:f}", lambda v: f"{v:,f}", lambda v: f"{v:e}"]),
    st.sampled_from(["", "the answer is ", "x = ", "5 - 3 = ", "3 kg , so : $ "]),
    st.sampled_from(["", ".", " apples."]),
    st.booleans(),
)
def test_what_a_wordpiece_decoder_spaces_out_is_read_back(
    value: Decimal, write: Callable[[Decimal], str], before: str, after: str, cleanup: bool
) -> None:
    pieces = re.findall(r"[0-9]|[A-Za-z]+|\S", before + write(value) + after)
    decoded = decoders.WordPiece(cleanup=cleanup).decode(pieces)
    assert last_number(join_spaced_pieces(decoded)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 1234.5", "1234.5"),
        ("x = -7", "-7"),
        ("5-3=-1,234,567.50", "-1234567.50"),
        ("about 3.5e-4", "0.00035"),
        ("it costs -$5.", "-5"),
        ("#### 18", "18"),
        ("16 - 3 - 4 = 9", "9"),
        ("5 - 3", "3"),
    ],
)
@pytest.mark.parametrize("digit_level", [False, True])
def test_answers_decoded_by_bert_are_read_right(
    assets: Path, text: str, value: str, digit_level: bool
) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_file(str(assets / "tokenizers" / "bert" / "tokenizer.json"))
    if digit_level:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [tokenizer.pre_tokenizer, pre_tokenizers.Digits(individual_digits=True)]
        )
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
    assert last_number(join_spaced_pieces(decoded)) == Decimal(value)


# --- one number alone ---


@given(finite_decimals, st.text(alphabet=" \n\t", max_size=3))
def test_a_number_alone_is_told_from_one_with_words(value: Decimal, blank: str) -> None:
    assert only_number(f"{blank}{value:f}{blank}") == value
    assert only_number(f"{value:f} kg") is None
    assert only_number(f"{value:f} {value:f}") is None


@pytest.mark.parametrize("text", ["", " ", "nan", "-inf", "50%", "$5", "1.2.3", "5.", "(5)", "١"])
def test_what_is_not_one_number_alone_is_none(text: str) -> None:
    assert only_number(text) is None


# --- writing ---


@pytest.mark.parametrize(
    ("fmt", "value", "written"),
    [
        (NumberFormat(), 7, "7"),
        (NumberFormat(), -7, "-7"),
        (NumberFormat(), Decimal("1e3"), "1000"),
        (NumberFormat(), 0.5, "0"),
        (NumberFormat(), 1.5, "2"),
        (NumberFormat(), 2.5, "2"),
        (NumberFormat(), -0.4, "0"),
        (NumberFormat(decimals=2), 2.675, "2.67"),
        (NumberFormat(decimals=2), Decimal("2.675"), "2.68"),
        (NumberFormat(decimals=2), -0.001, "0.00"),
        (NumberFormat(decimals=3), Decimal("1e-9"), "0.000"),
        (NumberFormat(width=3), 7, "007"),
        (NumberFormat(width=3), -7, "-007"),
        (NumberFormat(width=3), 999, "999"),
        (NumberFormat(decimals=2, width=2), 1.5, "01.50"),
        (NumberFormat(plus_sign=True), 7, "+7"),
        (NumberFormat(plus_sign=True), -7, "-7"),
        (NumberFormat(plus_sign=True), -0.0, "+0"),
        (NumberFormat(decimals=1), 10**40 + 1, "1" + "0" * 39 + "1.0"),
        (NumberFormat(significant_digits=3), 1234567, "1230000"),
        (NumberFormat(significant_digits=3), Decimal("0.00012345"), "0.000123"),
        (NumberFormat(significant_digits=3), Decimal("999.6"), "1000"),
        (NumberFormat(significant_digits=3), Decimal("0.09996"), "0.100"),
        (NumberFormat(significant_digits=3), 5, "5.00"),
        (NumberFormat(significant_digits=3), 0, "0.00"),
        (NumberFormat(significant_digits=1), -25, "-20"),
        (NumberFormat(significant_digits=2, width=3, plus_sign=True), 1.25, "+001.2"),
        (NumberFormat(decimals=2, scientific=True), 31415.9, "3.14e4"),
        (NumberFormat(significant_digits=3, scientific=True), 31415.9, "3.14e4"),
        (NumberFormat(decimals=1, scientific=True), Decimal("-0.0996"), "-1.0e-1"),
        (NumberFormat(scientific=True), 0, "0e0"),
        (NumberFormat(scientific=True, plus_sign=True), 7, "+7e0"),
    ],
)
def test_values_are_written_in_the_format(
    fmt: NumberFormat, value: Decimal | int | float, written: str
) -> None:
    assert fmt.write(value) == written


def test_integers_beyond_pythons_limit_for_str_are_written() -> None:
    assert NumberFormat().write(10**5000) == "1" + "0" * 5000
    with pytest.raises(ValueError, match="5001 digits before the decimal point"):
        NumberFormat(width=1).write(10**5000)


def test_writing_does_not_depend_on_the_callers_decimal_context() -> None:
    with localcontext() as context:
        context.prec = 3
        assert NumberFormat(decimals=4).write(Decimal("123456.78915")) == "123456.7892"
        assert last_number("123456.7892") == Decimal("123456.7892")


@given(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | finite_decimals,
    st.integers(0, 20),
    st.none() | st.integers(1, 20),
    st.booleans(),
)
def test_what_is_written_is_read_back_as_the_rounded_value(
    value: Decimal | int | float, decimals: int, width: int | None, plus_sign: bool
) -> None:
    with localcontext() as context:
        context.prec = 800
        rounded = Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_EVEN)
    digits = len(str(int(abs(rounded))))
    fmt = NumberFormat(decimals, width, plus_sign)
    if width is not None and digits > width:
        with pytest.raises(ValueError, match=f"use width {digits} or more"):
            fmt.write(value)
        return
    written = fmt.write(value)
    assert [n.value for n in find_numbers(written)] == [rounded]
    assert find_numbers(f"is {written}.")[0].text == written
    assert written[:1] == ("-" if rounded < 0 else "+" if plus_sign else written[:1])
    if width is not None:
        assert len(written.lstrip("+-").split(".")[0]) == width


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 20))
def test_significant_digits_are_those_of_pythons_own_format(value: float, digits: int) -> None:
    exact = Decimal(value)
    python = f"{exact:.{digits - 1}e}"
    scientific = NumberFormat(significant_digits=digits, scientific=True).write(value)
    assert scientific == NumberFormat(decimals=digits - 1, scientific=True).write(value)
    mantissa, _, exponent = scientific.partition("e")
    assert Decimal(mantissa) == Decimal(python.lower().partition("e")[0])
    assert int(exponent) == (Decimal(python).adjusted() if value else 0)
    assert len(mantissa.lstrip("-").replace(".", "")) == digits
    plain = NumberFormat(significant_digits=digits).write(value)
    for written in (scientific, plain):
        assert [n.value for n in find_numbers(written)] == [Decimal(python)]
    assert "e" not in plain
    assert len(plain.lstrip("-").replace(".", "").lstrip("0")) >= (digits if value else 0)


def test_a_value_wider_than_the_format_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"'-1234.50' has 4 digits .* width 3 .* use width 4 or more"
    ):
        NumberFormat(decimals=2, width=3).write(-1234.5)


def test_rounding_up_to_one_more_digit_is_an_error_too() -> None:
    with pytest.raises(ValueError, match="'1000' has 4 digits"):
        NumberFormat(width=3).write(999.5)


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), Decimal("sNaN"), Decimal("Infinity")]
)
def test_values_without_digits_are_an_error(value: float | Decimal) -> None:
    with pytest.raises(ValueError, match="cannot be written as a number"):
        NumberFormat().write(value)


@pytest.mark.parametrize("value", [True, "7", None, 1j])
def test_what_is_no_number_is_not_written(value: object) -> None:
    with pytest.raises(ValueError, match="writes a Decimal, int or float, got"):
        NumberFormat().write(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decimals": -1}, "decimals must be an integer of at least 0, got -1"),
        ({"decimals": True}, "decimals must be an integer of at least 0, got True"),
        ({"decimals": 1.0}, "decimals must be an integer of at least 0, got 1.0"),
        ({"width": 0}, "width must be an integer of at least 1, or None .* got 0"),
        ({"width": True}, "width must be an integer of at least 1, or None .* got True"),
        ({"plus_sign": 1}, "plus_sign must be true or false, got 1"),
        ({"scientific": "yes"}, "scientific must be true or false, got 'yes'"),
        ({"significant_digits": 0}, "significant_digits must be an integer of at least 1"),
        ({"significant_digits": 2.0}, "significant_digits must be .* got 2.0"),
        ({"significant_digits": 2, "decimals": 1}, "decimals=1 and significant_digits=2 exclude"),
        ({"scientific": True, "width": 2}, "width=2 has no effect with scientific"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumberFormat(**fields)  # type: ignore[arg-type]
