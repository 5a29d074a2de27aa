import decimal
import itertools
import math
import time
import warnings
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import HalfPrecision
from scipy import stats
from sklearn import metrics as sklearn_metrics

from ntl_lightning.evaluation.metrics import (
    NumericMetrics,
    TermAverages,
    average_ranks,
    is_within_one_percent,
    median,
    pearson,
    r2,
    root_mean_square,
    signed_log10,
    spearman,
)
from ntl_lightning.numbers import NumberCodec, NumberFormat

RTOL = 1e-12


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def compute(predictions, targets, *, training_mean=None, fractions=False, **given):
    """All metrics of one batch as floats; warnings of undefined ones are tested on their own."""
    metrics = NumericMetrics(training_mean, fractions)
    metrics.update(predictions, targets, **given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NaN, because|There are no samples")
        result = metrics.compute()
    assert all(value.dtype == torch.float64 and value.shape == () for value in result.values())
    return {name: float(value) for name, value in result.items()}


def test_answers_on_another_scale_are_scored_in_the_units_of_the_targets():
    codec = NumberCodec(NumberFormat(decimals=1), "log10")
    metrics = NumericMetrics(codec=codec)
    metrics.update(["2.0", "it is 3", "3.4", "none", "999"], ["100", "1050", "1000", "10", "10"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NaN, because")
        result = {name: float(value) for name, value in metrics.compute().items()}
    values, golds = [100, 1000, 10**3.4], [100, 1050, 1000]
    assert_values(
        result,
        mae=sklearn_metrics.mean_absolute_error(golds, values),
        r2=sklearn_metrics.r2_score(golds, values),
        # 1050 is written 3.0, so `3` is what the model was taught, though it means 1000.
        exact_match=2 / 5,
        within_1_percent=1 / 5,
        invalid_rate=2 / 5,
        num_valid=3,
    )


def test_a_right_answer_beyond_float64_is_an_exact_match_without_a_value():
    metrics = NumericMetrics(codec=NumberCodec(NumberFormat(decimals=1), "log10"))
    metrics.update(["400.0", "399.9", "none", "2.0"], ["1e400", "1e400", "1e400", "100"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NaN, because")
        result = {name: float(value) for name, value in metrics.compute().items()}
    assert_values(result, exact_match=2 / 4, num_valid=1)


def assert_values(result, **expected):
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=RTOL, abs=0, nan_ok=True), name


def assert_identical(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name] == value or (math.isnan(result[name]) and math.isnan(value)), name


# The functions


finite_values = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@st.composite
def pairs(draw, elements=finite_values, min_size=2):
    both = draw(st.lists(st.tuples(elements, elements), min_size=min_size, max_size=30))
    return tuple(np.array(column, dtype=np.float64) for column in zip(*both, strict=True))


@given(pairs())
def test_r2_is_that_of_sklearn(columns):
    x, y = columns
    assume(np.ptp(y) > 0)
    expected = sklearn_metrics.r2_score(y, x)
    # 1 - ratio: digits are lost where it is near 0.
    assert float(r2(double(x), double(y))) == pytest.approx(expected, rel=RTOL, abs=RTOL)


@given(pairs())
def test_pearson_is_that_of_scipy(columns):
    x, y = columns
    assume(np.ptp(x) > 0 and np.ptp(y) > 0)
    expected = stats.pearsonr(x, y).statistic
    assert float(pearson(double(x), double(y))) == pytest.approx(expected, rel=RTOL, abs=RTOL)


@given(pairs(st.integers(0, 4)))
def test_spearman_is_that_of_scipy_with_many_ties(columns):
    x, y = columns
    assume(np.ptp(x) > 0 and np.ptp(y) > 0)
    expected = stats.spearmanr(x, y).statistic
    assert float(spearman(double(x), double(y))) == pytest.approx(expected, rel=RTOL, abs=RTOL)


@given(st.lists(st.integers(-3, 3) | finite_values, min_size=1))
def test_ranks_are_those_of_scipy(values):
    assert average_ranks(double(values)).tolist() == stats.rankdata(values).tolist()


@given(st.lists(finite_values, min_size=1))
def test_median_and_root_mean_square_are_those_of_numpy(values):
    values = double(values)
    assert float(median(values)) == pytest.approx(np.median(values), rel=RTOL)
    assert float(root_mean_square(values)) == pytest.approx(
        np.sqrt(np.mean(values.numpy() ** 2)), rel=RTOL
    )


def test_the_log_scale_is_signed_and_counts_decades():
    values = double([99.0, -999.0, 0.0, 1e300])
    assert signed_log10(values).tolist() == pytest.approx([2.0, -3.0, 0.0, 300.0], rel=RTOL)


def test_r2_keeps_its_digits_far_from_zero():
    targets = torch.arange(1_000_000, 1_000_010, dtype=torch.float64)
    assert float(r2(targets + 1, targets)) == pytest.approx(1 - 10 / 82.5, rel=RTOL)


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_squares_neither_overflow_nor_vanish(factor):
    x, y = double([1.0, 2.0, 4.0]), double([1.0, 3.0, 4.0])
    assert float(root_mean_square(x * factor)) == pytest.approx(math.sqrt(7) * factor, rel=RTOL)
    assert float(r2(x * factor, y * factor)) == pytest.approx(float(r2(x, y)), rel=RTOL)
    assert float(pearson(x * factor, y * factor)) == pytest.approx(float(pearson(x, y)), rel=RTOL)


def test_values_at_the_end_of_float64_have_an_r2():
    assert float(r2(double([1.7e308, -1.7e308]), double([-1.7e308, 1.7e308]))) == -3.0


@pytest.mark.parametrize("constant", [[], [3.0], [0.1, 0.1, 0.1]])
def test_r2_and_correlations_of_constants_are_not_defined(constant):
    values = double(constant)
    varied = torch.arange(len(constant), dtype=torch.float64)
    for undefined in (
        r2(varied, values),
        pearson(varied, values),
        pearson(values, varied),
        spearman(varied, values),
        spearman(values, varied),
    ):
        assert undefined.isnan()
        assert undefined.dtype == torch.float64


@given(
    st.decimals(-(10**12), 10**12, places=6),
    st.sampled_from(["0.98", "0.99", "0.9899999999", "1", "1.01", "1.0100000001", "-1"]),
)
def test_one_percent_is_decided_exactly(target, factor):
    answer = decimal.Context(prec=100).multiply(target, Decimal(factor))
    expected = abs(Fraction(answer) - Fraction(target)) <= abs(Fraction(target)) / 100
    assert is_within_one_percent(answer, target) == expected


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("1.01e999999999", "1e999999999", True),
        ("1.02e999999999", "1e999999999", False),
        ("1", "1e-999999999", False),
        ("1e-999999999", "1", False),
        ("-9.99e999999999999999999", "-9.99e999999999999999999", True),
    ],
)
def test_one_percent_of_numbers_with_any_exponent_is_decided(answer, target, expected):
    assert is_within_one_percent(Decimal(answer), Decimal(target)) is expected


# What counts as right


@pytest.mark.parametrize(
    ("prediction", "target", "exact", "within", "close"),
    [
        ("7", "7", 1, 1, 1),
        ("3 + 4 = 7", "7", 1, 1, 1),  # the last number is the answer
        ("7 = 3 + 4", "7", 0, 0, 0),
        ("7", "#### 7", 1, 1, 1),
        ("18.00", "18", 1, 1, 1),
        ("1,234", "1234", 1, 1, 1),
        ("1,080", "2,080", 0, 0, 0),  # not 080 on both sides
        ("-3", "3", 0, 0, 0),
        ("-3", "-3", 1, 1, 1),
        ("20000000001", "20000000001", 1, 1, 1),  # no clipping at 1e10
        ("20000000002", "20000000001", 0, 1, 1),
        ("99999", "100000", 0, 1, 1),  # nearly right is not right
        ("99998", "100000", 0, 1, 0),
        ("9007199254740993", "9007199254740992", 0, 1, 1),  # one number in float64
        ("101", "100", 0, 1, 0),
        ("102", "100", 0, 0, 0),
        ("0.101", "0.1", 0, 1, 0),  # in float64 more than one percent off
        ("0.1010000000000000001", "0.1", 0, 0, 0),
        ("-99", "-100", 0, 1, 0),
        ("0", "0", 1, 1, 1),
        ("-0.0", "0", 1, 1, 1),
        ("0.000000001", "0", 0, 0, 1),
        ("1e400", "1e400", 1, 1, 1),  # all three are infinite in float64
        ("1.001e400", "1e400", 0, 1, 0),
        ("2e400", "1e400", 0, 0, 0),
        ("5", "1e400", 0, 0, 0),
        ("1e400", "5", 0, 0, 0),
        ("I do not know", "0", 0, 0, 0),
        ("", "0", 0, 0, 0),
    ],
)
def test_one_answer_is_judged(prediction, target, exact, within, close):
    result = compute([prediction], [target])
    assert_values(result, exact_match=exact, within_1_percent=within, isclose=close)


@given(pairs(st.integers(99_990, 100_010) | finite_values, min_size=1))
def test_isclose_is_that_of_numpy(columns):
    x, y = columns
    result = compute([f"{value:.3f}" for value in x], [f"{value:.3f}" for value in y])
    assert result["isclose"] == pytest.approx(np.isclose(x, y).mean(), rel=RTOL)


def test_a_target_without_a_number_is_compared_as_text():
    result = compute(["yes ", "no", "about 5", "3"], [" yes", "yes", "many", "3"])
    assert_values(
        result,
        exact_match=0.5,
        num_samples=4,
        num_targets_without_number=3,
        num_valid=1,
        # the numeric sample alone
        within_1_percent=1,
        isclose=1,
        invalid_rate=0,
        mae=0,
    )


def test_an_answer_without_a_number_is_wrong_and_counted():
    result = compute(["10", "x", "x", "x", "20"], ["10", "5", "6", "7", "20"])
    mean = (10 + 5 + 6 + 7 + 20) / 5
    imputed, targets = [10, mean, mean, mean, 20], [10, 5, 6, 7, 20]
    assert_values(
        result,
        mae=0,
        r2=1,
        num_valid=2,
        num_samples=5,
        invalid_rate=0.6,
        exact_match=0.4,
        within_1_percent=0.4,
        isclose=0.4,
        mae_imputed=sklearn_metrics.mean_absolute_error(targets, imputed),
        rmse_imputed=sklearn_metrics.root_mean_squared_error(targets, imputed),
        r2_imputed=sklearn_metrics.r2_score(targets, imputed),
    )


def test_without_any_valid_answer_the_imputed_errors_are_those_of_the_mean():
    result = compute(["x", "y"], ["1", "3"])
    assert_values(result, mae=math.nan, mae_imputed=1, rmse_imputed=1, r2_imputed=0, invalid_rate=1)


def test_numbers_beyond_float64_are_compared_but_not_averaged():
    result = compute(["1e400", "x", "5", "1e400", "3"], ["1e400", "1e400", "-1e400", "4", "3"])
    assert_values(
        result,
        exact_match=2 / 5,
        within_1_percent=2 / 5,
        isclose=2 / 5,
        num_targets_not_finite=3,
        num_valid=1,
        invalid_rate=2 / 5,  # x, and 1e400 for 4; for 1e400 it is a right answer
        mae=0,
        mae_imputed=0.25,
    )


def test_fractions_are_read_by_option():
    assert_values(compute(["3/4"], ["0.75"], fractions=True), exact_match=1)
    assert_values(compute(["0.75"], ["3/4"], fractions=True), exact_match=1)
    assert_values(compute(["3/4"], ["0.75"]), exact_match=0)


# Errors


@settings(deadline=None)
@given(pairs())
def test_errors_are_those_of_numpy_scipy_and_sklearn(columns):
    x, y = columns
    assume(np.ptp(x) > 0 and np.ptp(y) > 0)
    result = compute([f"{value:.3f}" for value in x], [f"so {value:.3f}" for value in y])
    log_x, log_y = (np.sign(values) * np.log10(np.abs(values) + 1) for values in (x, y))
    expected = {
        "mae": sklearn_metrics.mean_absolute_error(y, x),
        "rmse": sklearn_metrics.root_mean_squared_error(y, x),
        "median_absolute_error": sklearn_metrics.median_absolute_error(y, x),
        "r2": sklearn_metrics.r2_score(y, x),
        "log_mae": sklearn_metrics.mean_absolute_error(log_y, log_x),
        "log_r2": sklearn_metrics.r2_score(log_y, log_x),
        "pearson": stats.pearsonr(x, y).statistic,
        "spearman": stats.spearmanr(x, y).statistic,
    }
    expected |= {f"{name}_imputed": expected[name] for name in ("mae", "rmse", "r2")}
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=RTOL, abs=RTOL), name


def test_a_large_offset_costs_no_digits():
    targets = range(1_000_000, 1_000_010)
    result = compute([str(y + 1) for y in targets], [str(y) for y in targets])
    assert_values(result, r2=1 - 10 / 82.5, pearson=1, mae=1, rmse=1)


def test_the_log_metrics_are_on_the_signed_log_scale():
    result = compute(["999", "-9"], ["99", "9"])
    assert_values(result, log_mae=(1 + 2) / 2, log_r2=1 - (1 + 4) / 0.5)


def test_the_expected_values_are_scored_beside_the_answers():
    result = compute(
        ["1", "1", "1", "1", "?", "1"],
        ["1", "2", "4", "none", "8", "16"],
        expected_values=[1.5, None, 5.0, 3.0, 7.0, math.nan],
    )
    x, y = [1.5, 5.0, 7.0], [1.0, 4.0, 8.0]
    assert_values(
        result,
        expected_value_mae=sklearn_metrics.mean_absolute_error(y, x),
        expected_value_rmse=sklearn_metrics.root_mean_squared_error(y, x),
        expected_value_r2=sklearn_metrics.r2_score(y, x),
        expected_value_pearson=stats.pearsonr(x, y).statistic,
        expected_value_rate=4 / 6,
    )


def test_the_length_limit_rate_is_over_the_samples_it_was_given_for():
    metrics = NumericMetrics()
    metrics.update(["1", "2"], ["1", "2"], hit_length_limit=[True, False])
    metrics.update(["3"], ["3"])
    assert float(metrics.compute()["length_limit_rate"]) == 0.5


def test_the_training_mean_is_a_baseline_for_every_finite_target():
    result = compute(["1", "?", "2"], ["1", "4", "none"], training_mean=2.0)
    assert_values(
        result,
        training_mean_mae=1.5,
        training_mean_rmse=math.sqrt(2.5),
        training_mean_r2=sklearn_metrics.r2_score([1, 4], [2, 2]),
    )


@pytest.mark.parametrize(
    ("training_mean", "length_limit", "expected_values"),
    list(itertools.product([False, True], repeat=3)),
)
def test_the_names_are_known_before_any_sample(training_mean, length_limit, expected_values):
    given = {"hit_length_limit": [False]} if length_limit else {}
    given |= {"expected_values": [None]} if expected_values else {}
    result = compute(["1"], ["1"], training_mean=0.0 if training_mean else None, **given)
    names = NumericMetrics.names(
        training_mean=training_mean, length_limit=length_limit, expected_values=expected_values
    )
    assert tuple(result) == names
    assert len(set(names)) == len(names)


# Too few samples


def test_one_sample_gives_what_is_defined_and_one_warning():
    metrics = NumericMetrics()
    metrics.update(["3"], ["5"])
    with pytest.warns(UserWarning, match=r"NaN.*: r2, log_r2, pearson, spearman, r2_imp") as caught:
        result = metrics.compute()
    assert len(caught) == 1
    undefined = {name for name, value in result.items() if value.isnan()}
    assert undefined == {"r2", "log_r2", "pearson", "spearman", "r2_imputed"}
    assert float(result["mae"]) == 2


def test_constant_targets_have_no_r2_and_give_one_warning():
    metrics = NumericMetrics()
    metrics.update(["0.1", "0.2", "0.1"], ["0.1", "0.1", "0.1"])
    with pytest.warns(UserWarning, match=r"3 of 3 samples are valid") as caught:
        result = metrics.compute()
    assert len(caught) == 1
    assert result["r2"].isnan()
    assert float(result["mae"]) == pytest.approx(0.1 / 3, rel=RTOL)


def test_defined_metrics_give_no_warning():
    metrics = NumericMetrics()
    metrics.update(["1", "2"], ["1", "3"])
    assert not any(value.isnan() for value in metrics.compute().values())  # warnings are errors


@pytest.mark.parametrize(
    ("updates", "message"), [(0, "before the ``update`` method"), (1, "There are no samples")]
)
def test_no_sample_gives_nan_and_zero_counts_and_one_warning(updates, message):
    metrics = NumericMetrics(training_mean=1.0)
    for _ in range(updates):
        metrics.update([], [], hit_length_limit=[], expected_values=[])
    with pytest.warns(UserWarning, match=message) as caught:
        result = metrics.compute()
    assert len(caught) == 1
    given = updates > 0
    names = NumericMetrics.names(training_mean=True, length_limit=given, expected_values=given)
    assert tuple(result) == names
    for name, value in result.items():
        assert float(value) == 0 if name.startswith("num_") else value.isnan(), name


# Order, batches, dtypes, ranks


samples = st.tuples(
    st.sampled_from(["x", "1e400", "1/3"]) | finite_values.map(str),
    st.sampled_from(["x", "1e400"]) | finite_values.map(str),
    st.booleans(),
    st.none() | finite_values,
)


def update(metrics, batch):
    predictions, targets, limits, expected = zip(*batch, strict=True) if batch else [()] * 4
    metrics.update(predictions, targets, hit_length_limit=limits, expected_values=expected)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(samples, max_size=20), st.data())
def test_neither_order_nor_batches_change_a_single_bit(batch, data):
    whole = compute(
        [s[0] for s in batch],
        [s[1] for s in batch],
        hit_length_limit=[s[2] for s in batch],
        expected_values=[s[3] for s in batch],
    )
    shuffled = data.draw(st.permutations(batch))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=4)))
    metrics = NumericMetrics()
    for start, end in itertools.pairwise([0, *cuts, len(batch)]):
        update(metrics, shuffled[start:end])
    with warnings.catch_warnings(action="ignore"):
        result = metrics.compute()
    assert_identical({name: float(value) for name, value in result.items()}, whole)


def test_the_order_of_equal_answers_does_not_matter_either():
    expected_values = [0.1, 0.7, 1e10, 0.3, -1e10 / 3]
    results = [
        compute(["1"] * 5, ["1"] * 5, expected_values=order)["expected_value_mae"]
        for order in itertools.permutations(expected_values)
    ]
    assert len(set(results)) == 1


CASTS = {
    "half": lambda module: module.half(),
    "float": lambda module: module.float(),
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "to float32": lambda module: module.to(dtype=torch.float32),
    "bf16-true": lambda module: HalfPrecision("bf16-true").convert_module(module),
    "16-true": lambda module: HalfPrecision("16-true").convert_module(module),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_no_cast_of_the_module_costs_digits(cast):
    module = torch.nn.ModuleDict(
        {"numeric": NumericMetrics(), "terms": TermAverages({"cross_entropy": "tokens"})}
    )

    def add():
        with HalfPrecision("bf16-true").forward_context():
            module["numeric"].update(["1234.5", "7.1"], ["1234.7", "7.4"])
            module["terms"].update({"cross_entropy": double(0.1)}, 1, 0, 70_001)

    add()
    cast(module)
    add()
    numeric, terms = module["numeric"].compute(), module["terms"].compute()
    error = ((1234.7 - 1234.5) + (7.4 - 7.1)) / 2
    assert float(numeric["mae"]) == pytest.approx(error, rel=RTOL)
    assert float(terms["cross_entropy"]) == 0.1
    assert float(terms["token_accuracy"]) == 70_001
    assert {value.dtype for value in (*numeric.values(), *terms.values())} == {torch.float64}
    module["numeric"].reset()
    module["terms"].reset()
    add()
    assert float(module["numeric"].compute()["mae"]) == pytest.approx(error, rel=RTOL)
    assert module["terms"].compute()["cross_entropy"].dtype == torch.float64


def test_set_dtype_does_not_lower_the_precision():
    metrics = NumericMetrics()
    metrics.update(["1234.5", "1"], ["1234.5", "2"])
    metrics.set_dtype(torch.float16)
    assert float(metrics.compute()["pearson"]) == pytest.approx(1, rel=RTOL)
    assert {batch.dtype for batch in metrics.samples} == {torch.float64}


def test_metrics_built_on_the_meta_device_work():
    with torch.device("meta"):
        metrics, averages = NumericMetrics(), TermAverages({"ntl_was": "numbers"})
    metrics.update(["1", "2"], ["1", "2"])
    averages.update({"ntl_was": double(3.0)}, 2, 2, 1)
    torch.nn.ModuleList([metrics, averages]).to_empty(device="cpu")  # as for meta parameters
    assert float(metrics.compute()["mae"]) == 0
    assert float(averages.compute()["ntl_was"]) == 1.5


def test_where_the_device_has_no_float64_the_states_stay_on_the_cpu():
    metrics, averages = NumericMetrics(), TermAverages({"ntl_was": "numbers"})
    for metric in (metrics, averages):
        metric._apply(lambda state: SimpleNamespace(device=torch.device("mps")))
    metrics.update(["1", "2"], ["1", "2"])
    averages.update({"ntl_was": double(3.0)}, 2, 2, 1)
    assert float(metrics.compute()["mae"]) == 0
    assert float(averages.compute()["ntl_was"]) == 1.5


RANKED = [0.0, 0.0, 0.0, 0.0, 10.0]
# Samples of rank 0; rank 1 has the rest.
SPLITS = [range(5), range(0), range(3), [0, 4]]


def ranked_update(metrics, averages, value):
    # The limit is given for one sample only, hence on one rank; expected values are never given.
    given = {"hit_length_limit": [True]} if value else {}
    metrics.update([str(value)], ["0"], **given)
    averages.update({"cross_entropy": double(value), "ntl_was": double(value)}, 2, 1, 1)


def on_one_of_two_ranks(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    results = []
    for split in SPLITS:
        metrics = NumericMetrics(training_mean=3.0)
        averages = TermAverages({"cross_entropy": "tokens", "ntl_was": "numbers"})
        mine = [i for i in range(5) if (i in split) == (rank == 0)]
        for i in mine:
            ranked_update(metrics, averages, RANKED[i])
        results.append((metrics.compute(), averages.compute()))
        # What was gathered is not kept: the rank goes on with its own samples.
        assert sum(len(batch) for batch in metrics.samples) == len(mine)
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_give_what_one_process_gives(tmp_path):
    context = torch.multiprocessing.spawn(
        on_one_of_two_ranks, args=(str(tmp_path),), nprocs=2, join=False
    )
    deadline = time.monotonic() + 120
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    metrics = NumericMetrics(training_mean=3.0)
    averages = TermAverages({"cross_entropy": "tokens", "ntl_was": "numbers"})
    for value in RANKED:
        ranked_update(metrics, averages, value)
    with pytest.warns(UserWarning, match="NaN, because"):
        expected = metrics.compute()
    assert float(expected["mae"]) == 2.0
    assert float(expected["num_samples"]) == 5
    assert tuple(expected) == NumericMetrics.names(training_mean=True, length_limit=True)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert len(results) == len(SPLITS)
        for numeric, terms in results:
            assert_identical(numeric, expected)
            assert_identical(terms, averages.compute())


# Wrong calls


def test_a_text_in_place_of_a_list_of_texts_is_refused():
    with pytest.raises(TypeError, match=r"predictions must be a list of texts, got the text '12'"):
        NumericMetrics().update("12", ["1", "2"])
    with pytest.raises(TypeError, match=r"targets must be a list of texts, got the text '12'"):
        NumericMetrics().update(["1", "2"], "12")


@pytest.mark.parametrize("name", ["predictions", "hit_length_limit", "expected_values"])
def test_lists_of_different_length_are_refused(name):
    arguments = {"predictions": ["1", "2"], "hit_length_limit": None, "expected_values": None}
    with pytest.raises(ValueError, match=rf"{name} has 1 entries for 2 targets"):
        NumericMetrics().update(targets=["1", "2"], **(arguments | {name: [1]}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_training_mean_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=rf"training_mean must be a finite number, got {value}"):
        NumericMetrics(training_mean=value)


# Averages of the loss terms


def averages_of(terms, *batches):
    averages = TermAverages(terms)
    for batch in batches:
        averages.update(*batch)
    return {name: float(value) for name, value in averages.compute().items()}


def test_every_number_weighs_the_same_whatever_its_batch():
    result = averages_of(
        {"ntl_was": "numbers"},
        ({"ntl_was": torch.tensor(9.0)}, 10, 1, 0),
        ({"ntl_was": torch.tensor(9.0)}, 10, 9, 0),
    )
    assert result["ntl_was"] == 1.8


def test_terms_are_averaged_over_what_they_declare():
    result = averages_of(
        {"ntl_was": "numbers", "cross_entropy": "tokens"},
        ({"cross_entropy": double(6.0), "ntl_was": double(3.0)}, 8, 2, 5),
        ({"cross_entropy": double(2.0), "ntl_was": double(1.0)}, 2, 0, 2),
    )
    assert result == {
        "ntl_was": 2.0,
        "cross_entropy": 0.8,
        "perplexity": pytest.approx(math.exp(0.8), rel=RTOL),
        "token_accuracy": 0.7,
        "num_label_tokens": 10,
        "num_number_tokens": 2,
    }


def test_perplexity_is_that_of_the_average_not_the_average_of_perplexities():
    batches = [({"cross_entropy": double(mean * 7)}, 7, 0, 0) for mean in (1.0, 3.0)]
    result = averages_of({"cross_entropy": "tokens"}, *batches)
    assert result["perplexity"] == pytest.approx(math.e**2, rel=RTOL)


def test_terms_without_anything_to_average_over_are_zero():
    result = averages_of(
        {"cross_entropy": "tokens", "ntl_was": "numbers"},
        ({"cross_entropy": double(6.0), "ntl_was": double(0.0)}, 3, 0, 1),
    )
    assert result["ntl_was"] == 0
    assert result["num_number_tokens"] == 0
    assert result["cross_entropy"] == 2


def test_a_sum_that_is_nan_is_not_hidden_by_an_empty_count():
    result = averages_of({"ntl_was": "numbers"}, ({"ntl_was": double(math.nan)}, 3, 0, 1))
    assert math.isnan(result["ntl_was"])


@pytest.mark.parametrize(
    ("updates", "message"), [(0, "before the ``update`` method"), (1, "no label tokens")]
)
def test_without_label_tokens_perplexity_and_accuracy_are_not_perfect(updates, message):
    averages = TermAverages({"cross_entropy": "tokens"})
    for _ in range(updates):
        averages.update({"cross_entropy": double(0.0)}, 0, 0, 0)
    with pytest.warns(UserWarning, match=message) as caught:
        result = averages.compute()
    assert len(caught) == 1
    assert result["perplexity"].isnan()
    assert result["token_accuracy"].isnan()
    assert float(result["cross_entropy"]) == 0


def test_low_precision_sums_add_up_in_float64():
    batch = ({"ntl_was": torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)}, 1, 1, 0)
    averages = TermAverages({"ntl_was": "numbers"})
    for _ in range(1000):  # bfloat16 would stop at 256
        averages.update(*batch)
    assert float(averages.sums) == 1000
    assert not averages.sums.requires_grad


def test_a_term_over_whole_numbers_is_divided_by_them_and_their_count_is_told():
    terms = {"number_level": "whole_numbers", "ntl_was": "numbers"}
    sums = {"number_level": double(1.5), "ntl_was": double(12.0)}
    result = averages_of(terms, (sums, 20, 6, 0, 3), (sums, 20, 6, 0, 2))
    assert result["number_level"] == 3.0 / 5
    assert result["ntl_was"] == 2.0
    assert result["num_whole_numbers"] == 5
    assert tuple(result) == TermAverages.names(terms)


def test_counts_may_be_tensors():
    counts = torch.tensor([5, 2, 4])
    result = averages_of({"ntl_was": "numbers"}, ({"ntl_was": double(3.0)}, *counts))
    assert result["ntl_was"] == 1.5
    assert result["token_accuracy"] == 0.8


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9), st.integers(1, 9)), min_size=1),
    st.data(),
)
def test_averages_do_not_depend_on_the_order_of_batches(batches, data):
    updates = [({"ntl_was": double(s)}, tokens, numbers, 0) for s, tokens, numbers in batches]
    result = averages_of({"ntl_was": "numbers"}, *data.draw(st.permutations(updates)))
    total = math.fsum(batch[0] for batch in batches) / sum(batch[2] for batch in batches)
    assert result["ntl_was"] == pytest.approx(total, rel=RTOL)


@pytest.mark.parametrize("terms", [{"ntl_was": "numbers"}, {"cross_entropy": "tokens"}])
def test_the_names_of_averages_are_known_before_any_batch(terms):
    result = averages_of(terms, ({name: double(1.0) for name in terms}, 1, 1, 1))
    assert tuple(result) == TermAverages.names(terms)


def test_wrong_terms_are_refused():
    with pytest.raises(ValueError, match="terms is empty"):
        TermAverages({})
    with pytest.raises(ValueError, match=r"terms\['ntl_was'\] is averaged over 'batches'"):
        TermAverages({"ntl_was": "batches"})
    with pytest.raises(ValueError, match="called 'perplexity', which is the name of another"):
        TermAverages({"perplexity": "tokens"})


def test_sums_of_other_terms_or_per_position_are_refused():
    averages = TermAverages({"ntl_was": "numbers"})
    with pytest.raises(ValueError, match=r"sums has the terms \['ntl_mse'\].*\['ntl_was'\]"):
        averages.update({"ntl_mse": double(1.0)}, 1, 1, 1)
    with pytest.raises(ValueError, match=r"sums\['ntl_was'\] must be a scalar.*\(2,\)"):
        averages.update({"ntl_was": double([1.0, 2.0])}, 1, 1, 1)
