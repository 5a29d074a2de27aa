"""The results of a run as a table for people and a JSON file for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ntl_lightning.callbacks.checkpoint import LastCheckpoint
from ntl_lightning.callbacks.files import is_trial_run, keep_previous, replaced_file, run_folder

__all__ = ["MetricsReport", "group_by_set", "merge_metrics", "metric_text", "number_text"]

Metrics = dict[str, dict[str, float]]
"""Set -> metric -> value, in the order of the table."""

_NO_SET = "other"
_RATES = ("exact_match", "within_1_percent", "isclose", "token_accuracy")
_OVER_VALID = (
    "mae",
    "rmse",
    "median_absolute_error",
    "r2",
    "pearson",
    "spearman",
    "log_mae",
    "log_r2",
)
_ANSWER_METRICS = (
    "exact_match",
    "within_1_percent",
    "isclose",
    "invalid_rate",
    "length_limit_rate",
    *_OVER_VALID,
)
_COUNTS = ("num_samples", "num_valid", "num_targets_without_number", "num_targets_not_finite")
_FIRST_LOSSES = ("loss", "cross_entropy")
_AFTER_LOSSES = (
    "perplexity",
    "token_accuracy",
    "num_label_tokens",
    "num_number_tokens",
    "num_whole_numbers",
)
_ANSWER, _IMPUTED, _EXPECTED, _BASELINE, _COUNT, _LOSS = range(6)
_COLUMN_GAP = 2


def group_by_set(metrics: Mapping[str, SupportsFloat]) -> Metrics:
    """Sort logged values into sets by their names, `set/metric`.

    Lightning logs `x`, `x_step` and `x_epoch` for one value that is logged per step and per epoch:
    one is kept, as `x`, with the value of the epoch. A name without a set, such as a learning
    rate's, goes to the set `other`.

    >>> group_by_set({"train/loss": 1.0, "train/loss_step": 1.0, "train/loss_epoch": 3.0})
    {'train': {'loss': 3.0}}
    """
    groups: Metrics = {}
    for name, value in metrics.items():
        base = name.removesuffix("_step").removesuffix("_epoch")
        if {f"{base}_step", f"{base}_epoch"} <= metrics.keys():
            name, value = base, metrics[f"{base}_epoch"]
        set_name, slash, metric = name.partition("/")
        if not slash:
            set_name, metric = _NO_SET, name
        groups.setdefault(set_name, {})[metric] = float(value)
    return {
        set_name: dict(sorted(groups[set_name].items(), key=lambda item: _metric_order(item[0])))
        for set_name in sorted(groups, key=_set_order)
    }


def _set_order(set_name: str) -> int:
    for place, prefix in enumerate(("train", "val", "test")):
        if set_name == prefix or set_name.startswith(prefix + "_"):
            return place
    return 4 if set_name == _NO_SET else 3


def _split_metric(metric: str) -> tuple[int, str]:
    """The group of a metric in the table, and its name without the mark of the group."""
    for group, prefix in ((_EXPECTED, "expected_value_"), (_BASELINE, "training_mean_")):
        if metric.startswith(prefix):
            return group, metric.removeprefix(prefix)
    if metric.endswith("_imputed"):
        return _IMPUTED, metric.removesuffix("_imputed")
    if metric in _ANSWER_METRICS:
        return _ANSWER, metric
    if metric.startswith("num_") and metric not in _AFTER_LOSSES:
        return _COUNT, metric
    return _LOSS, metric


def _metric_order(metric: str) -> tuple[int, int]:
    group, base = _split_metric(metric)
    known = (*_ANSWER_METRICS, *_COUNTS, *_FIRST_LOSSES, None, *_AFTER_LOSSES)
    return group, known.index(base if base in known else None)


def number_text(value: float) -> str:
    """A number in 4 significant digits, without an exponent from 0.0001 to 10 million.

    >>> [number_text(x) for x in (0.0, 3.14159, 0.00012, 123456.7, 1e12, math.nan)]
    ['0', '3.142', '0.0001200', '123,457', '1.000e+12', 'nan']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _percent_text(share: float) -> str:
    # A rate of 100.00 % or 0.00 % in the table is exactly that: otherwise it gets more digits.
    for decimals in range(2, 8):
        text = f"{100 * share:.{decimals}f} %"
        if float(text[:-2]) not in (0, 100):
            return text
    return f"{100 * share:.2f} %"


def metric_text(metric: str, value: float) -> str:
    """A metric's value for people: rates in percent, counts whole, the rest in 4 digits.

    >>> metric_text("exact_match", 0.9375), metric_text("num_valid", 1319.0)
    ('93.75 %', '1,319')
    >>> metric_text("exact_match", 0.99999)
    '99.999 %'
    """
    if math.isfinite(value):
        if metric in _RATES or (metric.endswith("_rate") and metric != "learning_rate"):
            return _percent_text(value)
        if metric.startswith(("num_", "number_")) and value.is_integer():
            return f"{value:,.0f}"
    return number_text(value)


def _tables(metrics: Metrics, width: int) -> list[Table]:
    """One table, or several below each other where the sets do not fit beside each other."""
    rows = sorted({metric for values in metrics.values() for metric in values}, key=_metric_order)
    texts = {
        (metric, set_name): metric_text(metric, values[metric])
        for set_name, values in metrics.items()
        for metric in values
    }
    set_widths = {
        set_name: max(len(set_name), *(len(texts.get((metric, set_name), "")) for metric in rows))
        for set_name in metrics
    }
    room = width - max(len(metric) for metric in rows) - 2 * _COLUMN_GAP
    tables: list[Table] = []
    for columns in _pack(set_widths, room):
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("metric", overflow="fold")
        for set_name in columns:
            table.add_column(escape(set_name), justify="right", overflow="fold")
        shown = [metric for metric in rows if any((metric, name) in texts for name in columns)]
        for metric, following in zip(shown, [*shown[1:], ""], strict=True):
            table.add_row(
                escape(metric),
                *(texts.get((metric, set_name), "-") for set_name in columns),
                end_section=_split_metric(metric)[0] != _split_metric(following)[0],
            )
        tables.append(table)
    return tables


def _pack(widths: Mapping[str, int], room: int) -> list[list[str]]:
    """Columns from left to right, as many in a line as fit into `room` characters."""
    lines: list[list[str]] = []
    used = 0
    for name, width in widths.items():
        if not lines or used + width + _COLUMN_GAP > room:
            lines.append([])
            used = 0
        lines[-1].append(name)
        used += width + _COLUMN_GAP
    return lines


def _explanations(metrics: Metrics) -> list[str]:
    """One sentence for each kind of row that a new reader may not know. ASCII, for any terminal."""
    names = {metric for values in metrics.values() for metric in values}
    groups = {_split_metric(metric)[0] for metric in names}
    notes = []
    if "invalid_rate" in names and (plain := [name for name in _OVER_VALID if name in names]):
        notes.append(
            f"{', '.join(plain)}: over the answers that hold a number; read them together with "
            "invalid_rate, the share of answers that hold none."
        )
    if _IMPUTED in groups:
        notes.append(
            "..._imputed: over all answers; one without a readable number counts as if it had "
            "said the mean of the targets."
        )
    if _EXPECTED in groups:
        notes.append(
            "expected_value_...: the same metrics of the number that the model's probabilities "
            "give on average, instead of the number in its answer."
        )
    if _BASELINE in groups:
        notes.append(
            "training_mean_...: what always answering the mean of the training targets would "
            "score; a useful model is better."
        )
    if any(math.isnan(value) for values in metrics.values() for value in values.values()):
        notes.append("nan: not defined here, for instance r2 of one sample or of equal targets.")
    if any(names != values.keys() for values in metrics.values()):
        notes.append("-: not computed for this set.")
    return notes


def merge_metrics(path: Path, metrics: Metrics) -> str | None:
    """Write sets of metrics into a JSON file, beside the other sets it holds.

    NaN and infinity, which JSON does not have, are written as null.

    Args:
        path: The file; it is replaced in one step, or made.
        metrics: Each set replaces the set of the same name in the file.

    Returns:
        A warning if the file held something else, which was moved to `metrics.1.json`, else None.
    """
    warning = None
    merged: dict[str, object] = {}
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is not an object of sets")
            merged = found
        except ValueError as error:
            kept = keep_previous(path)
            warning = f"{path} was not a metrics file ({error}); it was moved to {kept}."
    for set_name, values in metrics.items():
        merged[set_name] = {
            metric: value if math.isfinite(value) else None for metric, value in values.items()
        }
    with replaced_file(path) as temporary:
        temporary.write_text(json.dumps(merged, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return warning


class MetricsReport(Callback):
    """Prints all metrics in one table when a run ends, and writes them to a JSON file.

    After `fit` it shows the training metrics and those of the last validation, after `validate`
    and `test` those of each set. `fast_dev_run` writes no file. Where the module has
    `evaluation_results` (set -> metric -> value) of a set, these are taken: what is logged passes
    through float32.

    Lightning prints a table of its own after `validate` and `test`; their `verbose=False` switches
    it off.

    Args:
        file_name: Name of the JSON file in the run folder: set -> metric -> value. Sets that are
            already in the file stay; a new fit starts a new file and keeps the earlier one as
            `metrics.1.json`, `metrics.2.json`, ...
    """

    def __init__(self, file_name: str = "metrics.json") -> None:
        super().__init__()
        self.file_name = file_name
        self._folder = Path()
        self._to_print: tuple[str, Metrics, Sequence[str]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run folder, on all ranks."""
        self._folder = run_folder(trainer)
        self._to_print = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rename the file of an earlier run, unless `LastCheckpoint` says that this goes on."""
        goes_on = any(
            isinstance(callback, LastCheckpoint) and callback.goes_on(trainer)
            for callback in trainer.checkpoint_callbacks
        )
        if goes_on or is_trial_run(trainer) or not trainer.is_global_zero:
            return
        path = self._folder / self.file_name
        if kept := keep_previous(path):
            rank_zero_info(f"The {path} of an earlier run is now {kept}.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on a fit."""
        self._report(trainer, pl_module, f"Results of fit, step {trainer.global_step}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on `validate`; the validations of a fit are reported at its end."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._report(trainer, pl_module, "Results of validate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on `test`."""
        self._report(trainer, pl_module, "Results of test")

    def _report(self, trainer: Trainer, pl_module: LightningModule, title: str) -> None:
        if not trainer.is_global_zero:
            return
        metrics = group_by_set(trainer.callback_metrics)
        # Lightning logs in float32; the module may know better.
        exact: Metrics = getattr(pl_module, "evaluation_results", {})
        for set_name, values in metrics.items():
            values.update(exact.get(set_name, {}))
        if not metrics:
            rank_zero_warn("MetricsReport: nothing was logged, so there is nothing to report.")
            return
        notes = _explanations(metrics)
        if trainer.state.fn == TrainerFn.FITTING:
            validated = any(_set_order(set_name) == 1 for set_name in metrics)
            notes.append("val: the last validation." if validated else "No validation was run.")
        if is_trial_run(trainer):
            notes.append("fast_dev_run: not written to a file.")
        else:
            path = self._folder / self.file_name
            if warning := merge_metrics(path, metrics):
                rank_zero_warn(warning)
            notes.append(f"Written to {path}")
        self._to_print = (title, metrics, notes)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the table, now that no progress bar is on the screen any more."""
        if self._to_print is None:
            return
        title, metrics, notes = self._to_print
        self._to_print = None
        console = Console(highlight=False)
        console.print(f"\n[bold]{title}[/bold]")
        for table in _tables(metrics, console.width):
            console.print(table)
        for note in notes:
            console.print(note, markup=False, soft_wrap=note.startswith("Written to "))
