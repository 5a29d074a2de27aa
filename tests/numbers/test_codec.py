import math
import statistics
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from ntl_lightning.numbers import NumberCodec, NumberFormat, last_number

SCALES = ["none", "log10", "signed_log10", "standardised"]

decimals = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**15), max_value=10**15)
formats = st.builds(
    NumberFormat, decimals=st.integers(0, 12), plus_sign=st.booleans(), scientific=st.booleans()
) | st.builds(
    NumberFormat,
    significant_digits=st.integers(1, 15),
    plus_sign=st.booleans(),
    scientific=st.booleans(),
)


def standardised(decimals=2, mean=100.0, standard_deviation=10.0):
    return NumberCodec(NumberFormat(decimals), "standardised", mean, standard_deviation)


# --- writing ---


@pytest.mark.parametrize(
    ("codec", "value", "written"),
    [
        (NumberCodec(NumberFormat()), 72, "72"),
        (NumberCodec(), Decimal("-0.7740"), "-0.7740"),
        (NumberCodec(), Decimal("1e3"), "1000"),
        (NumberCodec(percent=True), Decimal("0.25125"), "25.125%"),
        (NumberCodec(digit_places=True), 12.5, "_1_1__2_0__5_-1_"),
        (NumberCodec(NumberFormat(decimals=2)), Decimal("-0.774"), "-0.77"),
        (NumberCodec(NumberFormat(width=5)), 484, "00484"),
        (NumberCodec(NumberFormat(significant_digits=3, scientific=True)), 31415.9, "3.14e4"),
        (NumberCodec(NumberFormat(), percent=True), Decimal("0.25"), "25%"),
        (NumberCodec(NumberFormat(decimals=1), percent=True), Decimal("-1.2345"), "-123.4%"),
        (NumberCodec(NumberFormat(decimals=3), "log10"), 1000, "3.000"),
        (NumberCodec(NumberFormat(decimals=1, plus_sign=True), "log10"), Decimal("0.001"), "-3.0"),
        (NumberCodec(NumberFormat(decimals=3), "signed_log10"), -999, "-3.000"),
        (NumberCodec(NumberFormat(decimals=3), "signed_log10"), 0, "0.000"),
        (standardised(), 115, "1.50"),
        (standardised(), Decimal("99.9"), "-0.01"),
        (NumberCodec(NumberFormat(decimals=1), digit_places=True), 12.5, "_1_1__2_0__5_-1_"),
        (NumberCodec(NumberFormat(), digit_places=True), -407, "-_4_2__0_1__7_0_"),
    ],
)
def test_values_are_written_on_their_scale_and_in_their_format(codec, value, written):
    assert codec.write(value) == written


@given(st.floats(min_value=1e-300, max_value=1e300), st.booleans())
def test_logarithms_are_those_of_the_math_module(value, negative):
    fine = NumberFormat(significant_digits=20)
    logarithm = Decimal(NumberCodec(fine, "log10").write(value))
    assert float(logarithm) == pytest.approx(math.log10(value), rel=1e-14, abs=1e-15)
    signed = -value if negative else value
    logarithm = Decimal(NumberCodec(fine, "signed_log10").write(signed))
    expected = math.copysign(math.log1p(value) / math.log(10), signed)
    assert float(logarithm) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("value", [0, -1, Decimal("-0.5"), -0.0])
def test_a_value_without_a_logarithm_is_refused(value):
    with pytest.raises(ValueError, match=r"has no logarithm.*signed_log10"):
        NumberCodec(NumberFormat(decimals=2), "log10").write(value)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("-Infinity")])
def test_values_that_are_not_finite_are_refused_on_every_scale(scale, value):
    given = (0.0, 1.0) if scale == "standardised" else (None, None)
    with pytest.raises(ValueError, match="only finite values"):
        NumberCodec(NumberFormat(decimals=2), scale, *given).write(value)


@given(decimals, st.booleans(), st.booleans())
def test_without_a_format_nothing_is_rounded(value, percent, digit_places):
    codec = NumberCodec(percent=percent, digit_places=digit_places)
    assert codec.read(codec.write(value)) == value


def test_without_a_format_what_is_not_finite_is_refused_too():
    with pytest.raises(ValueError, match="only finite values"):
        NumberCodec().write(float("nan"))


def test_a_value_wider_than_the_format_is_refused():
    with pytest.raises(ValueError, match="more than the width 3"):
        NumberCodec(NumberFormat(width=3), percent=True).write(10)


def test_a_standardised_codec_without_its_statistics_writes_and_reads_nothing():
    codec = NumberCodec(NumberFormat(decimals=2), "standardised")
    assert not codec.is_complete
    with pytest.raises(ValueError, match="are not known"):
        codec.write(1)
    with pytest.raises(ValueError, match="are not known"):
        codec.read("1")


# --- reading ---


@pytest.mark.parametrize(
    ("codec", "text", "value"),
    [
        (NumberCodec(NumberFormat()), "first 3, then 1,234.50", "1234.50"),
        (NumberCodec(NumberFormat()), "no number", None),
        (NumberCodec(NumberFormat(), percent=True), "25%", "0.25"),
        (NumberCodec(NumberFormat(), percent=True), "25", "0.25"),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "it is 3", "1000"),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "-2", "0.01"),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "308", str(10**308)),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "309", None),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "9e999999", None),
        (NumberCodec(NumberFormat(decimals=2), "log10"), "-9e999999", "0"),
        (NumberCodec(NumberFormat(decimals=2), "signed_log10"), "-3.00", "-999"),
        (NumberCodec(NumberFormat(decimals=2), "signed_log10"), "-0.00", "0"),
        (NumberCodec(NumberFormat(decimals=2), "signed_log10"), "-400.5", None),
        (standardised(), "1.5", "115"),
        (standardised(mean=0.1, standard_deviation=0.3), "2", "0.7"),
        (NumberCodec(NumberFormat(), digit_places=True), "-_4_2__0_1__7_0_", "-407"),
        (NumberCodec(NumberFormat(), digit_places=True), "_1_1_ is _1_1_ _2_0_", "12"),
        (NumberCodec(NumberFormat(), digit_places=True), "- _ 5 _ - 1 _", "-0.5"),
        (NumberCodec(NumberFormat(), digit_places=True), "_1_1__2_1_", None),
        (NumberCodec(NumberFormat(), digit_places=True), "_1_2__2_0_", None),
        (NumberCodec(NumberFormat(), digit_places=True), "12", None),
    ],
)
def test_answers_are_read_back_in_the_units_of_the_data(codec, text, value):
    read = codec.read(text)
    assert read == (None if value is None else Decimal(value))
    assert read is None or not (read.is_zero() and read.is_signed())


@given(st.text(), st.sampled_from(SCALES), st.booleans())
def test_any_text_can_be_read(text, scale, digit_places):
    given = (1.5, 2.5) if scale == "standardised" else (None, None)
    codec = NumberCodec(NumberFormat(2), scale, *given, digit_places=digit_places)
    read = codec.read(text)
    assert read is None or read.is_finite()


@given(st.text(alphabet="_-+0123 .e", max_size=40), st.sampled_from(SCALES), st.booleans())
def test_any_text_of_numbers_can_be_read(text, scale, digit_places):
    given = (1.5, 2.5) if scale == "standardised" else (None, None)
    read = NumberCodec(NumberFormat(2), scale, *given, digit_places=digit_places).read(text)
    assert read is None or read.is_finite()


# --- there and back ---


@given(decimals, formats)
def test_without_a_scale_what_is_read_is_the_rounded_value(value, number_format):
    written = number_format.write(value)
    codec = NumberCodec(number_format)
    assert codec.write(value) == written
    assert codec.read(written) == Decimal(written)


@given(decimals, st.integers(0, 12), st.booleans())
def test_percentages_are_exact(value, places, digit_places):
    codec = NumberCodec(NumberFormat(places), percent=True, digit_places=digit_places)
    read = codec.read(codec.write(value))
    assert abs(Fraction(read) - Fraction(value)) <= Fraction(1, 200 * 10**places)


@given(decimals, st.integers(0, 12), st.none() | st.integers(16, 20), st.booleans())
def test_places_of_digits_say_the_same_number(value, places, width, plus_sign):
    number_format = NumberFormat(places, width, plus_sign)
    codec = NumberCodec(number_format, digit_places=True)
    written = codec.write(value)
    assert codec.read(written) == Decimal(number_format.write(value))
    marked = "".join(written[start:end] for start, end in codec.place_spans(written))
    highest = len(number_format.write(value).lstrip("+-").partition(".")[0]) - 1
    assert marked == "".join(map(str, range(highest, -places - 1, -1)))


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value="1e-30", max_value="1e30"),
    st.integers(0, 12),
)
def test_rounding_a_logarithm_is_a_relative_error_of_known_size(value, places):
    codec = NumberCodec(NumberFormat(places), "log10")
    read = codec.read(codec.write(value))
    factor = 10 ** (0.5 * 10.0**-places)
    assert float(value) / factor <= float(read) * (1 + 1e-14)
    assert float(read) <= float(value) * factor * (1 + 1e-14)


@given(decimals, st.integers(0, 12))
def test_rounding_a_signed_logarithm_is_a_relative_error_of_x_plus_1(value, places):
    codec = NumberCodec(NumberFormat(places), "signed_log10")
    read = codec.read(codec.write(value))
    assert read.is_zero() or read.is_signed() == value.is_signed()
    factor = 10 ** (0.5 * 10.0**-places)
    assert abs(float(read - value)) <= (abs(float(value)) + 1) * (factor - 1) * (1 + 1e-9) + 1e-14


@given(
    decimals,
    st.integers(0, 12),
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
)
def test_rounding_a_standardised_value_is_half_a_unit_of_the_standard_deviation(
    value, places, mean, deviation
):
    codec = standardised(places, mean, deviation)
    read = codec.read(codec.write(value))
    unit = Fraction(Decimal(repr(deviation))) / 10**places
    assert abs(Fraction(read) - Fraction(value)) <= unit / 2 + Fraction(1, 10**20)


@given(decimals, formats, st.sampled_from(SCALES), st.booleans(), st.booleans())
def test_what_is_read_is_written_the_same_way(value, number_format, scale, percent, digit_places):
    assume(not digit_places or not number_format.scientific)
    assume(scale != "log10" or value > 0)
    # A logarithm's inverse has 17 digits, so its own logarithm has not many more.
    assume("log" not in scale or (number_format.significant_digits or 0) <= 12)
    given = (0.1, 3.7) if scale == "standardised" else (None, None)
    codec = NumberCodec(
        number_format, scale, *given, percent and scale == "none", digit_places=digit_places
    )
    written = codec.write(value)
    read = codec.read(written)
    assume(read is not None and (scale != "log10" or read > 0))
    assert codec.written_number(codec.write(read)) == codec.written_number(written)


def test_the_callers_decimal_context_does_not_matter():
    with localcontext() as context:
        context.prec = 3
        codec = standardised(6, 0.12345678, 1.0).fitted([])
        assert codec.write(Decimal("123456.78901234")) == "123456.665556"
        assert codec.read("123456.665556") == Decimal("123456.78901278")
        percent = NumberCodec(NumberFormat(4), percent=True)
        assert percent.read("123456.7891%") == Decimal("1234.567891")
        fitted = NumberCodec(NumberFormat(2), "standardised").fitted(
            [Decimal("1.23456789")] * 2 + [Decimal(5)]
        )
        assert fitted.mean == pytest.approx(statistics.fmean([1.23456789] * 2 + [5]))


# --- mean and standard deviation ---


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=50))
def test_statistics_are_those_of_scikit_learns_scaler(values):
    assume(np.std(values) > 1e-3)
    codec = NumberCodec(NumberFormat(decimals=3), "standardised").fitted([*map(Decimal, values)])
    oracle = StandardScaler().fit(np.array(values)[:, None])
    assert codec.mean == pytest.approx(oracle.mean_[0], rel=1e-9, abs=1e-6)
    assert codec.standard_deviation == pytest.approx(oracle.scale_[0], rel=1e-6)


@pytest.mark.parametrize("values", [(1e160, -1e160), (1e-170, -5e-170), (1.7e308, -1.7e308)])
def test_statistics_are_those_of_values_whose_squares_float64_does_not_hold(values):
    codec = NumberCodec(NumberFormat(2), "standardised").fitted([*map(Decimal, values)])
    mean, deviation = values[0] / 2 + values[1] / 2, values[0] / 2 - values[1] / 2
    assert codec.mean == pytest.approx(mean, abs=1e-15 * deviation)
    assert codec.standard_deviation == pytest.approx(deviation, rel=1e-15, abs=0)


def test_statistics_may_be_floats_of_numpy():
    codec = standardised(2, np.float64(3.5), np.float32(0.5))
    assert (codec.mean, codec.standard_deviation) == (3.5, 0.5)
    assert type(codec.mean) is type(codec.standard_deviation) is float
    assert codec.write(Decimal(4)) == "1.00"


def test_statistics_that_are_given_are_kept():
    codec = standardised()
    assert codec.fitted([Decimal(1), Decimal(2)]) is codec
    plain = NumberCodec(NumberFormat())
    assert plain.fitted([Decimal(1), Decimal(2)]) is plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3, 3, 3], "all training targets are 3"),
        ([Decimal("1e400"), 1], "too large for a mean"),
        ([Decimal("1e-400"), 0], "differ by too little"),
    ],
)
def test_statistics_that_do_not_exist_are_refused(values, message):
    codec = NumberCodec(NumberFormat(), "standardised")
    with pytest.raises(ValueError, match=message):
        codec.fitted([*map(Decimal, values)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"number_format": None, "scale": "log10"}, "Say how many to write in NumberCodec.number_"),
        ({"scale": "ln"}, "scale must be none, log10, signed_log10 or standardised, got 'ln'"),
        ({"mean": 1.0}, "belong together"),
        ({"scale": "standardised", "mean": 1.0}, "belong together"),
        ({"scale": "standardised", "standard_deviation": 1.0}, "Give both or neither"),
        ({"mean": 1.0, "standard_deviation": 1.0}, "scale='none'"),
        (
            {"scale": "standardised", "mean": math.nan, "standard_deviation": 1.0},
            "mean must be a finite number, got nan",
        ),
        (
            {"scale": "standardised", "mean": 0.0, "standard_deviation": 0.0},
            "standard_deviation must be a number above 0, got 0.0",
        ),
        (
            {"scale": "standardised", "mean": 0.0, "standard_deviation": math.inf},
            "standard_deviation must be a number above 0, got inf",
        ),
        ({"scale": "log10", "percent": True}, "percent: true writes the value itself"),
        (
            {"number_format": NumberFormat(2, scientific=True), "digit_places": True},
            "both write powers of ten",
        ),
    ],
)
def test_a_codec_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NumberCodec(**{"number_format": NumberFormat(2), **fields})


def test_an_exact_answer_is_one_that_says_the_written_number():
    codec = NumberCodec(NumberFormat(decimals=2), "log10")
    label = codec.write(2000)
    assert codec.written_number("3.3") == codec.written_number(label) == last_number("3.30")
    assert codec.read("3.3") != 2000
