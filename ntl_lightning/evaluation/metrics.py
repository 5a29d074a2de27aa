"""Metrics of answers that hold numbers, and epoch averages of the loss terms.

Pure functions in float64 below, two torchmetrics classes above them that only keep the samples and
the sums. Every sample counts: an answer without a readable number is wrong in the accuracies, is
reported in `invalid_rate`, and has its own version of the error metrics (`*_imputed`).

Shapes: N samples.
"""

import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, rank_zero_warn

from ntl_lightning.numbers import NumberCodec, last_number

__all__ = [
    "NumericMetrics",
    "TermAverages",
    "average_ranks",
    "is_within_one_percent",
    "median",
    "pearson",
    "r2",
    "root_mean_square",
    "signed_log10",
    "spearman",
]

_ANSWER_NAMES = (
    "exact_match",
    "within_1_percent",
    "isclose",
    "invalid_rate",
    "num_samples",
    "num_valid",
    "num_targets_without_number",
    "num_targets_not_finite",
    "mae",
    "rmse",
    "median_absolute_error",
    "r2",
    "log_mae",
    "log_r2",
    "pearson",
    "spearman",
    "mae_imputed",
    "rmse_imputed",
    "r2_imputed",
)
_EXPECTED_VALUE_NAMES = (
    "expected_value_mae",
    "expected_value_rmse",
    "expected_value_r2",
    "expected_value_pearson",
    "expected_value_rate",
)
_TRAINING_MEAN_NAMES = ("training_mean_mae", "training_mean_rmse", "training_mean_r2")
_TOKEN_NAMES = ("perplexity", "token_accuracy", "num_label_tokens", "num_number_tokens")
_WHOLE_NUMBERS_NAME = "num_whole_numbers"
AveragedOver = Literal["numbers", "tokens", "whole_numbers"]
# answer, target, exact, within 1 %, hit the length limit, expected value
_NUM_COLUMNS = 6


def is_within_one_percent(answer: Decimal, target: Decimal) -> bool:
    """Whether |answer - target| <= 0.01 |target|, decided without any rounding.

    >>> is_within_one_percent(Decimal("0.101"), Decimal("0.1"))
    True
    >>> 0.101 - 0.1 <= 0.01 * 0.1
    False
    """
    # The bounds have three digits more than the target, whatever its exponent; a difference of
    # two Decimals could need as many digits as their exponents are apart.
    exact = decimal.Context(
        prec=len(target.as_tuple().digits) + 3,
        Emin=decimal.MIN_EMIN,
        Emax=decimal.MAX_EMAX,
        traps=[],
    )
    bounds = [exact.multiply(target, Decimal(factor)) for factor in ("0.99", "1.01")]
    return min(bounds) <= answer <= max(bounds)


def signed_log10(values: Tensor) -> Tensor:
    """sign(x) log10(|x| + 1), the scale of the log metrics; same shape as `values`.

    Source: arXiv:2411.02083, section on the mathematics dataset, whose tables are on this scale.
    """
    return values.sign() * values.abs().log1p() / math.log(10)


def root_mean_square(values: Tensor) -> Tensor:
    """sqrt(mean(x^2)) of float64 (N,), as (); NaN for N = 0. The squares do not overflow."""
    scale = _scale(values)
    return (values / scale).square().mean().sqrt() * scale


def median(values: Tensor) -> Tensor:
    """Median of float64 (N,), as (); of two middle values their mean; NaN for N = 0."""
    if not len(values):
        return _nan(values)
    ordered = values.sort().values
    return ordered[(len(values) - 1) // 2] / 2 + ordered[len(values) // 2] / 2


def r2(predictions: Tensor, targets: Tensor) -> Tensor:
    """Share of the targets' variance that the predictions explain: 1 - SSE / SST.

    Args:
        predictions: Finite float64 (N,).
        targets: Finite float64 (N,).

    Returns:
        Float64 (); NaN if N < 2 or all targets are equal, where the share is not defined. The
        squares are those of centred targets, so a large offset costs no digits.
    """
    if _is_constant(targets):
        return _nan(targets)
    scale = max(_scale(predictions), _scale(targets))
    errors = predictions / scale - targets / scale
    return 1 - (root_mean_square(errors) / root_mean_square(_centred(targets / scale))).square()


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Linear correlation of two finite float64 (N,), as (); NaN if N < 2 or one is constant."""
    if _is_constant(x) or _is_constant(y):
        return _nan(x)
    x, y = (_centred(values / _scale(values)) for values in (x, y))
    return ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).clamp(-1, 1)


def average_ranks(values: Tensor) -> Tensor:
    """Rank of each value, from 1; equal values share the mean of their ranks.

    Args:
        values: Float64 (N,).

    Returns:
        Float64 (N,).

    >>> average_ranks(torch.tensor([7.0, 5.0, 7.0], dtype=torch.float64))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    ordered = values.sort().values
    num_below = torch.searchsorted(ordered, values, right=False)
    num_up_to = torch.searchsorted(ordered, values, right=True)
    return (num_below + num_up_to + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation, ties by average rank, of two finite float64 (N,); NaN as in `pearson`.

    torchmetrics 1.9 computes the ranks in float32 and adds 1e-6 to the denominator.
    """
    return pearson(average_ranks(x), average_ranks(y))


def _nan(like: Tensor) -> Tensor:
    return like.new_full((), math.nan)


def _is_constant(values: Tensor) -> bool:
    # Not by the variance: the mean of three times 0.1 is not 0.1.
    return len(values) < 2 or bool(values.min() == values.max())


def _centred(values: Tensor) -> Tensor:
    return values - values.mean()


def _scale(values: Tensor) -> float:
    """The largest power of two not above max |x| (any, for no or zero values).

    Dividing by it is exact, and squares and sums of the quotients stay inside float64.
    """
    largest = float(values.abs().max()) if len(values) else 0.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 1)


def _mean(values: Tensor) -> Tensor:
    """Mean of float64 (N,), as (); NaN for N = 0. The sum does not overflow."""
    scale = _scale(values)
    return (values / scale).mean() * scale


def _share(hits: Tensor) -> Tensor:
    """Share of True in bool (N,), as float64 (); NaN for N = 0."""
    return hits.double().mean()


def _errors(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    errors = predictions - targets
    return {
        "mae": _mean(errors.abs()),
        "rmse": root_mean_square(errors),
        "r2": r2(predictions, targets),
    }


def _float_or_nan(value: Decimal | float | None) -> float:
    return math.nan if value is None else float(value)


class _Float64Metric(Metric):
    """A metric whose states stay float64 (counts int64), whatever the module is cast to.

    torchmetrics keeps the dtype of its states under `.half()` and `.float()`, but not under
    `.to(torch.bfloat16)`, which is what Lightning's `precision: bf16-true` calls.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self) -> None:
        # Not on the default device: under `torch.device("meta")` the states would hold nothing.
        with torch.device("cpu"):
            super().__init__()

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> "_Float64Metric":
        def move_only(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, dtype=torch.float32, device=state.device)).device
            # MPS has no float64; torchmetrics can add up on the CPU.
            return state.to("cpu" if device.type == "mps" else device)

        super()._apply(move_only, exclude_state)
        return self


class NumericMetrics(_Float64Metric):
    """How near the numbers in the answers are to those in the targets.

    The number of a text is its last one (`last_number`). A sample is *numeric* if its target has a
    number, *finite* if this number fits float64, and *valid* if moreover the answer's does.
    `compute` returns float64 scalars, the same ones for any order of the samples, any split into
    batches and any split over ranks:

    - `exact_match`: share of all samples whose answer's number equals the target's, as decimals;
      where the target has no number, whose text does (blanks at the ends apart). With a codec:
      whose answer says the number that the codec writes for the target, so that what its format
      rounds away makes no answer wrong. All other metrics see the answer's value in the units of
      the target, with the rounding.
    - `within_1_percent`: share of numeric samples with |p - y| <= 0.01 |y|, in decimals.
    - `isclose`: share of numeric samples that `numpy.isclose` accepts in float64,
      |p - y| <= 1e-8 + 1e-5 |y|: the paper's `number_accuracy`, which takes 99999 for 100000.
      A target beyond float64 is close to itself only.
    - `invalid_rate`: share of numeric samples whose answer has no number, or one beyond float64
      where the target's is not.
    - `length_limit_rate`: share of samples that were cut at the length limit, of those for which
      `hit_length_limit` was given. Only where it was given.
    - `num_samples`, `num_valid`, `num_targets_without_number`, `num_targets_not_finite`: counts.
    - `mae`, `rmse`, `median_absolute_error`, `r2`, `pearson`, `spearman`: over the valid samples.
      `log_mae`, `log_r2`: the same of `signed_log10` of both sides.
    - `mae_imputed`, `rmse_imputed`, `r2_imputed`: over the finite samples; an invalid answer scores
      as if the mean of their targets had been said.
    - `expected_value_mae`, `_rmse`, `_r2`, `_pearson`: of the expected values instead of the
      answers' numbers, over the finite samples that have one; `expected_value_rate`: the share of
      all samples that have one (a value that is not finite is none). Only where
      `expected_values` was given.
    - `training_mean_mae`, `_rmse`, `_r2`: of the constant `training_mean`, over the finite
      samples: what a model has to beat. Only with `training_mean`.

    A metric of no sample is NaN, as is a correlation or R2 of fewer than two samples or of
    constant ones; one warning per `compute` lists them.

    Args:
        training_mean: Mean of the numbers in the training targets; None: no such baseline.
        fractions: Whether `3/4` is read as 0.75; in answers only without a codec.
        codec: Reads the answers; None: their number is the last one. Targets are always in their
            own units.

    Raises:
        ValueError: If `training_mean` is not finite.

    >>> metrics = NumericMetrics()
    >>> metrics.update(["It is 10.", "20", "30", "I cannot tell."], ["10", "20", "30", "40"])
    >>> result = metrics.compute()
    >>> [float(result[name]) for name in ("mae", "mae_imputed", "exact_match", "invalid_rate")]
    [0.0, 3.75, 0.75, 0.25]
    """

    samples: list[Tensor] | Tensor
    num_given: Tensor

    def __init__(
        self,
        training_mean: float | None = None,
        fractions: bool = False,
        codec: NumberCodec | None = None,
    ) -> None:
        super().__init__()
        if training_mean is not None and not math.isfinite(training_mean):
            raise ValueError(
                f"training_mean must be a finite number, got {training_mean}. "
                "Leave it out (None) if the training targets have no mean."
            )
        self.training_mean = training_mean
        self.fractions = fractions
        self.codec = codec
        self.add_state("samples", [], dist_reduce_fx="cat")
        # How often hit_length_limit and expected_values came: says which metrics there are.
        zeros = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.add_state("num_given", zeros, dist_reduce_fx="sum")

    @staticmethod
    def names(
        *, training_mean: bool = False, length_limit: bool = False, expected_values: bool = False
    ) -> tuple[str, ...]:
        """The names that `compute` returns, in its order.

        Args:
            training_mean: Whether a `training_mean` is set.
            length_limit: Whether some `update` gets `hit_length_limit`.
            expected_values: Whether some `update` gets `expected_values`.
        """
        return (
            *_ANSWER_NAMES,
            *(("length_limit_rate",) if length_limit else ()),
            *(_EXPECTED_VALUE_NAMES if expected_values else ()),
            *(_TRAINING_MEAN_NAMES if training_mean else ()),
        )

    def update(
        self,
        predictions: Sequence[str],
        targets: Sequence[str],
        *,
        hit_length_limit: Sequence[bool] | None = None,
        expected_values: Sequence[float | None] | None = None,
    ) -> None:
        """Add N samples.

        Args:
            predictions: The N answers as text.
            targets: The N right answers as text.
            hit_length_limit: Per sample, whether the answer was cut at the length limit.
            expected_values: Per sample, the number that the model's probabilities give on average;
                None where they give none.

        Raises:
            TypeError: If a text stands where a list of texts should.
            ValueError: If the lengths differ.
        """
        for name, texts in (("predictions", predictions), ("targets", targets)):
            if isinstance(texts, str):
                raise TypeError(f"{name} must be a list of texts, got the text {texts!r}")
        num_samples = len(targets)
        for name, values in (
            ("predictions", predictions),
            ("hit_length_limit", hit_length_limit),
            ("expected_values", expected_values),
        ):
            if values is not None and len(values) != num_samples:
                raise ValueError(
                    f"{name} has {len(values)} entries for {num_samples} targets; "
                    "give one for each target"
                )
        rows = [
            (
                *self._judge(prediction, target),
                math.nan if hit_length_limit is None else float(hit_length_limit[i]),
                _float_or_nan(None if expected_values is None else expected_values[i]),
            )
            for i, (prediction, target) in enumerate(zip(predictions, targets, strict=True))
        ]
        given = [hit_length_limit is not None, expected_values is not None]
        self.num_given = self.num_given + torch.tensor(given, device=self.device)
        self._batches().append(self._table(rows))

    def compute(self) -> dict[str, Tensor]:
        """All metrics as float64 scalars, under the names that `names` lists."""
        # On the CPU and in one order, because float sums depend on both.
        table = dim_zero_cat(self.samples if len(self.samples) else [self._table([])]).cpu()
        for column in range(_NUM_COLUMNS):
            table = table[table[:, column].argsort(stable=True)]
        answer, target, exact, within, limit, expected = table.unbind(1)

        numeric = ~target.isnan()
        finite = target.isfinite()
        valid = finite & answer.isfinite()
        invalid = answer.isnan() | (answer.isinf() & finite)
        close = (answer - target).abs() <= 1e-8 + 1e-5 * target.abs()
        close = torch.where(finite, close, exact.bool())
        has_expected = expected.isfinite()
        x, y = answer[valid], target[valid]
        imputed = torch.where(valid, answer, _mean(target[finite]))[finite]
        expected_x, expected_y = expected[finite & has_expected], target[finite & has_expected]
        values = {
            "exact_match": _mean(exact),
            "within_1_percent": _mean(within[numeric]),
            "isclose": _share(close[numeric]),
            "invalid_rate": _share(invalid[numeric]),
            "num_samples": exact.new_tensor(len(table)),
            "num_valid": valid.sum().double(),
            "num_targets_without_number": (~numeric).sum().double(),
            "num_targets_not_finite": target.isinf().sum().double(),
            **_errors(x, y),
            "median_absolute_error": median((x - y).abs()),
            "log_mae": _mean((signed_log10(x) - signed_log10(y)).abs()),
            "log_r2": r2(signed_log10(x), signed_log10(y)),
            "pearson": pearson(x, y),
            "spearman": spearman(x, y),
            **{f"{name}_imputed": v for name, v in _errors(imputed, target[finite]).items()},
            "length_limit_rate": _mean(limit[~limit.isnan()]),
            **{f"expected_value_{name}": v for name, v in _errors(expected_x, expected_y).items()},
            "expected_value_pearson": pearson(expected_x, expected_y),
            "expected_value_rate": _share(has_expected),
        }
        if self.training_mean is not None:
            errors = _errors(torch.full_like(target[finite], self.training_mean), target[finite])
            values |= {f"training_mean_{name}": value for name, value in errors.items()}

        length_limit, expected_values = (self.num_given > 0).tolist()
        names = self.names(
            training_mean=self.training_mean is not None,
            length_limit=length_limit,
            expected_values=expected_values,
        )
        self._warn_of_undefined([name for name in names if values[name].isnan()], values)
        return {name: values[name].to(self.device) for name in names}

    def sync(
        self,
        dist_sync_fn: Callable[..., object] | None = None,
        process_group: object | None = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        """Gather the samples of all ranks.

        A rank without samples takes part with an empty table; in its place torchmetrics would send
        a float32 vector, which cannot be gathered with the float64 tables of the other ranks.
        """
        if not len(self.samples):
            self._batches().append(self._table([]))
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)

    def _batches(self) -> list[Tensor]:
        assert isinstance(self.samples, list), "samples are one tensor only while synced"
        return self.samples

    def _table(self, rows: Sequence[tuple[float, ...]]) -> Tensor:
        table = torch.tensor(rows, dtype=torch.float64, device=self.device)
        return table.view(-1, _NUM_COLUMNS)

    def _judge(self, prediction: str, target: str) -> tuple[float, float, float, float]:
        """Answer and target as float64 (NaN: no number), whether they are equal, within 1 %."""
        y = last_number(target, fractions=self.fractions)
        if self.codec is None:
            x = last_number(prediction, fractions=self.fractions)
        else:
            x = self.codec.read(prediction)
        if y is None:
            return _float_or_nan(x), math.nan, prediction.strip() == target.strip(), False
        is_exact = x == y if self.codec is None else self.codec.is_exact(prediction, y)
        if x is None:
            # On a logarithmic scale a right answer may stand for more than float64 holds.
            return math.nan, float(y), is_exact, False
        return float(x), float(y), is_exact, is_within_one_percent(x, y)

    def _warn_of_undefined(self, undefined: list[str], values: Mapping[str, Tensor]) -> None:
        if not values["num_samples"]:
            # torchmetrics has warned already where there was no update at all.
            if self.update_called:
                rank_zero_warn("There are no samples: all metrics but the counts are NaN.")
        elif undefined:
            rank_zero_warn(
                f"NaN, because they are not defined for these samples: {', '.join(undefined)}. "
                "R2 and correlations need two samples whose values differ, the others one "
                f"({int(values['num_valid'])} of {int(values['num_samples'])} samples are valid)."
            )


class TermAverages(_Float64Metric):
    """Averages of the loss terms over an epoch: sum over all batches / count over all batches.

    So neither the batch size nor the spread of the numbers over batches or ranks matters; a mean
    of the batches' means would weigh a number more if it stands in a batch with few. `compute`
    returns float64 scalars:

    - each term by its name. With nothing to average over it is 0, as the loss itself is then (NaN
      would stop what monitors the term); the counts below tell.
    - `perplexity`: exp of the average of the term called `cross_entropy`; only where there is one.
    - `token_accuracy`: share of label tokens for which the most probable token is right.
      It and `perplexity` are NaN, with a warning, if there was no label token.
    - `num_label_tokens`, `num_number_tokens`: counts; and `num_whole_numbers`, written numbers,
      where a term is averaged over them.

    Args:
        terms: Name of each term and what it is averaged over: all label tokens, those that are
            numbers, or whole numbers as they are written.

    Raises:
        ValueError: If there is no term, a term is averaged over anything else, or has the name of
            one of the other values.

    >>> averages = TermAverages({"ntl_was": "numbers"})
    >>> averages.update({"ntl_was": torch.tensor(9.0)}, 10, 1, 5)
    >>> averages.update({"ntl_was": torch.tensor(9.0)}, 10, 9, 5)
    >>> float(averages.compute()["ntl_was"])
    1.8
    """

    sums: Tensor
    num_tokens: Tensor
    num_numbers: Tensor
    num_whole_numbers: Tensor
    num_correct_tokens: Tensor

    def __init__(self, terms: Mapping[str, AveragedOver]) -> None:
        super().__init__()
        if not terms:
            raise ValueError("terms is empty: name at least one loss term")
        for name, averaged_over in terms.items():
            if averaged_over not in get_args(AveragedOver):
                raise ValueError(
                    f"terms[{name!r}] is averaged over {averaged_over!r}; write one of "
                    f"{', '.join(get_args(AveragedOver))}"
                )
            if name in (*_TOKEN_NAMES, _WHOLE_NUMBERS_NAME):
                raise ValueError(
                    f"A loss term is called {name!r}, which is the name of another logged value; "
                    "give the term another name"
                )
        self.terms = dict(terms)
        sums = torch.zeros(len(terms), dtype=torch.float64, device="cpu")
        self.add_state("sums", sums, dist_reduce_fx="sum")
        for name in ("num_tokens", "num_numbers", "num_whole_numbers", "num_correct_tokens"):
            count = torch.zeros((), dtype=torch.int64, device="cpu")
            self.add_state(name, count, dist_reduce_fx="sum")

    @staticmethod
    def names(terms: Mapping[str, AveragedOver]) -> tuple[str, ...]:
        """The names that `compute` returns for these terms, in its order."""
        with_perplexity = _TOKEN_NAMES if "cross_entropy" in terms else _TOKEN_NAMES[1:]
        whole = (_WHOLE_NUMBERS_NAME,) if "whole_numbers" in terms.values() else ()
        return (*terms, *with_perplexity, *whole)

    def update(
        self,
        sums: Mapping[str, Tensor],
        num_tokens: Tensor | int,
        num_numbers: Tensor | int,
        num_correct_tokens: Tensor | int,
        num_whole_numbers: Tensor | int = 0,
    ) -> None:
        """Add one batch.

        Args:
            sums: Per term its sum, not its mean, over the batch: float (), any float dtype.
            num_tokens: Label tokens in the batch.
            num_numbers: Label tokens in the batch that are numbers.
            num_correct_tokens: Label tokens that are the most probable ones.
            num_whole_numbers: Written numbers in the batch; for terms averaged over them.

        Raises:
            ValueError: If the names are not those of `terms`, or a sum is not a scalar.
        """
        if sums.keys() != self.terms.keys():
            raise ValueError(
                f"sums has the terms {sorted(sums)}, but TermAverages was made for "
                f"{sorted(self.terms)}; give the sums of exactly these"
            )
        for name, value in sums.items():
            if value.dim() != 0:
                raise ValueError(
                    f"sums[{name!r}] must be a scalar, the sum over the batch; "
                    f"got the shape {tuple(value.shape)}"
                )
        batch = [sums[name].to(self.device, torch.float64) for name in self.terms]
        self.sums = self.sums + torch.stack(batch)
        self.num_tokens = self.num_tokens + self._count(num_tokens)
        self.num_numbers = self.num_numbers + self._count(num_numbers)
        self.num_whole_numbers = self.num_whole_numbers + self._count(num_whole_numbers)
        self.num_correct_tokens = self.num_correct_tokens + self._count(num_correct_tokens)

    def compute(self) -> dict[str, Tensor]:
        """All averages as float64 scalars, under the names that `names` lists."""
        counts = {
            "tokens": self.num_tokens,
            "numbers": self.num_numbers,
            "whole_numbers": self.num_whole_numbers,
        }
        values = {
            name: total / counts[averaged_over].clamp(min=1)
            for (name, averaged_over), total in zip(self.terms.items(), self.sums, strict=True)
        }
        values["token_accuracy"] = self.num_correct_tokens.double() / self.num_tokens
        values["num_label_tokens"] = self.num_tokens.double()
        values["num_number_tokens"] = self.num_numbers.double()
        values[_WHOLE_NUMBERS_NAME] = self.num_whole_numbers.double()
        if "cross_entropy" in self.terms:
            values["perplexity"] = values["cross_entropy"].exp()
            if not self.num_tokens:
                values["perplexity"] = _nan(self.sums)
        if not self.num_tokens and self.update_called:
            rank_zero_warn("There are no label tokens: perplexity and token_accuracy are NaN.")
        return {name: values[name] for name in self.names(self.terms)}

    def _count(self, count: Tensor | int) -> Tensor:
        return torch.as_tensor(count, dtype=torch.int64, device=self.device)
