"""What a model is going to see: the data of a configuration, counted and shown.

Everything is taken from the sets as `NumberDataModule` has tokenised them, not from the files.
"""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ntl_lightning.callbacks.report import number_text
from ntl_lightning.data import NumberDataModule
from ntl_lightning.numbers import last_number

__all__ = ["DataInspection", "inspect_data", "render_inspection"]

_QUANTILES = {"min": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "max": 1.0}
_NUM_BINS = 10
# Where one of the equal bins would hold more, the bins are powers of ten.
_LARGEST_SHARE = 0.9
_BAR = 30
_BLANK = "␣"
_NUMBER, _LABEL, _PROMPT = "bold green", "default", "dim"


class BinInspection(TypedDict):
    """A part of the number line, `low <= value < high`; the last one has its upper end too."""

    low: float
    high: float
    count: int


class ValueInspection(TypedDict):
    """The last number of every target."""

    num_without: int
    """Targets without a number."""
    num_not_finite: int
    """Targets whose number is too large for float64."""
    quantiles: dict[str, float]
    """Empty without numbers."""
    histogram: list[BinInspection]


class PartInspection(TypedDict):
    """A set, or one of its sources."""

    set: str
    """`train`, `val`, `predict` or `test.<name>`."""
    source: str | None
    """None: all of them."""
    num_examples: int
    num_left_out: int
    """Examples that are not there, because they are too long."""
    num_cut: int
    """Examples with a prompt that was cut."""
    num_without_target: int
    prompt_tokens: dict[str, float]
    """Quantiles of the prompts' lengths in tokens."""
    target_tokens: dict[str, float]
    """Quantiles of the targets' lengths in tokens, end of sequence included."""
    num_label_tokens: int
    num_number_tokens: int
    """Label tokens that the number losses act on."""
    num_digit_tokens: int
    """Label tokens whose text has a digit, without those that are marked as no quantities."""
    num_not_quantities: int
    """Number tokens that are marked as no quantities."""
    values: ValueInspection


class ExampleInspection(TypedDict):
    """An example as the model gets it."""

    set: str
    origin: str
    tokens: list[str]
    """Of the prompt and then of the target, as text."""
    is_label: list[bool]
    is_number: list[bool]
    """Labels that the number losses act on."""


class DataInspection(TypedDict):
    """Everything `inspect-data` says; plain values, so that it can be written as JSON."""

    tokenizer: str
    architecture: str
    number_tokens: str
    parts: list[PartInspection]
    """Set by set; each source where there are several, then the whole."""
    examples: list[ExampleInspection]
    warnings: list[str]


def inspect_data(data: NumberDataModule, num_examples: int = 5) -> DataInspection:
    """Set up all sets and look at them.

    Args:
        data: Not set up yet, or its warnings are missing here.
        num_examples: How many to show, evenly spaced over the training set; 0 for none.

    Raises:
        ValueError: If `num_examples` is negative; and as `NumberDataModule.setup`.
        OSError: If a file is missing.
    """
    if num_examples < 0:
        raise ValueError(f"--examples must be 0 or more, got {num_examples}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup("fit")
        data.train_dataloader()  # Budgets that do not fit the examples are refused here.
        if data.test_sources:
            data.setup("test")
        if data.predict_sources:
            data.setup("predict")
    parts = [part for name in data.sources for part in _parts(data, name)]
    return DataInspection(
        tokenizer=data.tokenizer.name_or_path or type(data.tokenizer).__name__,
        architecture=data.architecture,
        number_tokens=data.vocabulary.kind,
        parts=parts,
        examples=_examples(data, "train", num_examples),
        warnings=[
            str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)
        ],
    )


def _parts(data: NumberDataModule, name: str) -> list[PartInspection]:
    table = data.table(name)
    sources = data.sources[name]
    of_source = np.asarray(table.with_format("arrow")[:]["source"])
    given = data.num_examples[name]
    if len(sources) == 1:
        return [_part(data, name, _source_name(sources[0]), table, given[0])]
    parts = []
    for number, source in enumerate(sources):
        rows = table.select(np.flatnonzero(of_source == number))
        parts.append(_part(data, name, f"{number}: {_source_name(source)}", rows, given[number]))
    return [*parts, _part(data, name, None, table, sum(given))]


def _source_name(source: object) -> str:
    """The class, and where there is one the file."""
    path = getattr(source, "path", None)
    return type(source).__name__ + ("" if path is None else f" {Path(path).name}")


def _part(
    data: NumberDataModule, name: str, source: str | None, table: Dataset, num_given: int
) -> PartInspection:
    columns = table.with_format("arrow")[:]
    coverage = data.label_marks(table).coverage()
    targets = columns["target"].drop_null().to_pylist()
    return PartInspection(
        set=name,
        source=source,
        num_examples=len(table),
        num_left_out=num_given - len(table),
        num_cut=pc.sum(columns["is_cut"]).as_py() or 0,
        num_without_target=columns["target"].null_count,
        prompt_tokens=_quantiles(_lengths(columns["prompt_ids"])),
        target_tokens=_quantiles(_lengths(columns["target_ids"])),
        num_label_tokens=coverage.tokens,
        num_number_tokens=coverage.numbers,
        num_digit_tokens=coverage.digit_bearing,
        num_not_quantities=coverage.not_quantities,
        values=_values(targets),
    )


def _lengths(lists: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists), dtype=np.int64)


def _quantiles(numbers: NDArray[np.int64] | NDArray[np.float64]) -> dict[str, float]:
    if not len(numbers):
        return {}
    # The nearest one that there is, so that lengths stay whole and huge values finite.
    found = np.quantile(numbers, list(_QUANTILES.values()), method="inverted_cdf")
    return {key: value.item() for key, value in zip(_QUANTILES, found, strict=True)}


def _values(targets: Sequence[str]) -> ValueInspection:
    numbers = [number for target in targets if (number := last_number(target)) is not None]
    values = np.array([float(number) for number in numbers], dtype=np.float64)
    finite = values[np.isfinite(values)]
    return ValueInspection(
        num_without=len(targets) - len(numbers),
        num_not_finite=len(values) - len(finite),
        quantiles=_quantiles(finite),
        histogram=_histogram(finite),
    )


def _histogram(values: NDArray[np.float64]) -> list[BinInspection]:
    """Counts in bins of equal width, or in powers of ten where the values differ by many."""
    if not len(values):
        return []
    edges = _edges(values)
    counts, _ = np.histogram(values, edges)
    return [
        BinInspection(low=low.item(), high=high.item(), count=count.item())
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    least, most = values.min(), values.max()
    if least == most:
        return np.array([least, most])
    # Halved before the difference, which may overflow.
    equal = np.clip(2 * np.linspace(least / 2, most / 2, _NUM_BINS + 1), least, most)
    sizes = np.abs(values[values != 0])
    smallest, largest = (math.floor(math.log10(size)) for size in (sizes.min(), sizes.max()))
    is_lopsided = np.histogram(values, equal)[0].max() > _LARGEST_SHARE * len(values)
    if largest == smallest or not is_lopsided:
        return equal
    step = -(-(largest + 1 - smallest) // _NUM_BINS)
    powers = np.array([float(f"1e{e}") for e in range(smallest, largest + step + 1, step)])
    powers = np.minimum(powers, np.finfo(np.float64).max)
    above = powers[: np.searchsorted(powers, most) + 1] if most > 0 else []
    below = -powers[: np.searchsorted(powers, -least) + 1][::-1] if least < 0 else []
    return np.concatenate((below, [0.0], above))


def _examples(data: NumberDataModule, name: str, count: int) -> list[ExampleInspection]:
    table = data.table(name)
    count = min(count, len(table))
    shown = []
    for index in (number * len(table) // count for number in range(count)):
        row = table[index]
        marks = data.label_marks(table.select([index]))
        prompt, target = row["prompt_ids"], row["target_ids"]
        nothing = [False] * len(prompt)
        shown.append(
            ExampleInspection(
                set=name,
                origin=row["origin"],
                tokens=list(data.tokenizer.convert_ids_to_tokens([*prompt, *target])),
                is_label=[*nothing, *[True] * len(target)],
                is_number=[*nothing, *(marks.is_number & marks.is_quantity).tolist()],
            )
        )
    return shown


def render_inspection(inspection: DataInspection) -> RenderableType:
    """The inspection for people, in colours where the terminal has them."""
    parts = inspection["parts"]
    blocks: list[RenderableType] = [
        Text(
            f"Tokenizer {inspection['tokenizer']}, {inspection['architecture']} model, "
            f"number tokens: {inspection['number_tokens']}"
        ),
        _counts_table(parts),
        _lengths_table(parts),
    ]
    for part in parts:
        is_whole = part["source"] is None or _is_alone(part, parts)
        if is_whole and part["values"]["histogram"]:
            blocks += [Text(), *_render_values(part)]
    if inspection["examples"]:
        blocks += [Text(), _legend(inspection["examples"][0]["set"])]
        blocks += [_render_example(example) for example in inspection["examples"]]
    if inspection["warnings"]:
        blocks += [Text(), Text(f"Warnings ({len(inspection['warnings'])})", style="bold yellow")]
        blocks += [Text(f"- {warning}") for warning in inspection["warnings"]]
    return Group(*blocks)


def _is_alone(part: PartInspection, parts: Sequence[PartInspection]) -> bool:
    return sum(other["set"] == part["set"] for other in parts) == 1


def _counts_table(parts: Sequence[PartInspection]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("set", no_wrap=True)
    table.add_column("source", overflow="ellipsis")
    for name in (
        "\nexamples",
        "left\nout",
        "\ncut",
        "label\ntokens",
        "\nnumbers",
        "\nreached",
        "no\nnumber",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        labels, numbers = part["num_label_tokens"], part["num_number_tokens"]
        digits = part["num_digit_tokens"]
        table.add_row(
            part["set"],
            part["source"] or "all",
            f"{part['num_examples']:,}",
            f"{part['num_left_out']:,}",
            f"{part['num_cut']:,}",
            f"{labels:,}",
            f"{numbers / labels:.1%}" if labels else "",
            f"{numbers / digits:.1%}" if digits else "",
            f"{part['values']['num_without']:,}",
        )
    return table


def _lengths_table(parts: Sequence[PartInspection]) -> Table:
    quantiles = ", ".join(_QUANTILES)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("set", no_wrap=True)
    table.add_column("source", overflow="ellipsis")
    table.add_column(f"prompt tokens\n{quantiles}", justify="right", no_wrap=True)
    table.add_column(f"target tokens\n{quantiles}", justify="right", no_wrap=True)
    for part in parts:
        lengths = [
            ", ".join(map(str, quantiles.values()))
            for quantiles in (part["prompt_tokens"], part["target_tokens"])
        ]
        table.add_row(part["set"], part["source"] or "all", *lengths)
    return table


def _render_values(part: PartInspection) -> list[RenderableType]:
    values = part["values"]
    quantiles = ", ".join(f"{name} {number_text(v)}" for name, v in values["quantiles"].items())
    title = f"Values of {part['set']}: {quantiles}"
    if values["num_not_finite"]:
        title += f"; {values['num_not_finite']:,} too large for float64"
    histogram = values["histogram"]
    most = max(bin_["count"] for bin_ in histogram)
    edges = [(number_text(bin_["low"]), number_text(bin_["high"])) for bin_ in histogram]
    widths = [max(len(edge[side]) for edge in edges) for side in (0, 1)]
    count_width = len(f"{most:,}")
    lines: list[RenderableType] = [Text(title)]
    for (low, high), bin_ in zip(edges, histogram, strict=True):
        # What there is at all is seen.
        bar = "█" * -(-bin_["count"] * _BAR // most)
        text = f"  {low:>{widths[0]}} to {high:>{widths[1]}} {bin_['count']:>{count_width},} "
        lines.append(Text(text).append(bar, style="blue"))
    return lines


def _legend(name: str) -> Text:
    return Text.assemble(
        f"Examples of {name} as the model sees them: ",
        ("prompt", _PROMPT),
        ", ",
        ("label", _LABEL),
        ", ",
        ("[number label]", _NUMBER),
    )


def _render_example(example: ExampleInspection) -> Text:
    text = Text(f"  {example['origin']}:", overflow="fold")
    was_label = False
    for token, is_label, is_number in zip(
        example["tokens"], example["is_label"], example["is_number"], strict=True
    ):
        # In a terminal without colours too.
        text.append(" => " if is_label and not was_label else " ")
        style = _NUMBER if is_number else _LABEL if is_label else _PROMPT
        seen = token if token.strip() else _BLANK * len(token)
        text.append(f"[{seen}]" if is_number else seen, style=style)
        was_label = is_label
    return text
