"""Tables as text: files and data sets of the hub whose columns become prompts and targets."""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ntl_lightning.data.files import (
    Row,
    arrow_rows,
    csv_rows,
    existing_file,
    json_rows,
    no_column,
    shortened,
)
from ntl_lightning.data.sources import Example, Source, TextTemplate, check_max_examples
from ntl_lightning.numbers.text import find_numbers
from ntl_lightning.paths import expand_path

__all__ = ["Csv", "HubDataset", "JsonLines", "Parquet", "RowFilter", "RowSource"]

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class RowFilter:
    """Which rows to keep, by one of their columns. All conditions that are set must hold.

    A row that has no value there (null, NaN, nothing but blanks) is not kept.
    """

    column: str
    """The column, which need not be part of prompt or target."""
    one_of: tuple[str | int | bool, ...] | None = None
    """Keep these values. They are compared as texts: quote what YAML reads otherwise, as `["0.10",
    "01", "no", "True"]`. A value that no row has is warned of."""
    matches: str | None = None
    """Keep values in which this regular expression (as for Python's `re`) finds something."""
    at_least: float | None = None
    """Keep numbers from here on; a value that is no number is an error."""
    at_most: float | None = None
    """Keep numbers up to here; a value that is no number is an error."""

    def __post_init__(self) -> None:
        """Refuse filters that cannot be meant.

        Raises:
            ValueError: If no condition is set, `one_of` is empty or a text alone, `matches` is no
                regular expression, or no number lies between the limits.
        """
        if isinstance(self.one_of, str):
            raise ValueError(
                f"RowFilter.one_of must be a list of values, got {self.one_of!r} alone. Write "
                f"[{self.one_of}], in Python ({self.one_of!r},)."
            )
        limits = (self.at_least, self.at_most)
        if not self.one_of and self.matches is None and limits == (None, None):
            raise ValueError(
                f"The filter of column {self.column!r} has no condition. Set one_of, matches, "
                "at_least or at_most."
            )
        if None not in limits and not self.at_least <= self.at_most:  # type: ignore[operator]
            raise ValueError(
                f"The filter of column {self.column!r} keeps nothing: no number is at least "
                f"{self.at_least} and at most {self.at_most}."
            )
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except (re.error, OverflowError) as error:
                raise ValueError(
                    f"RowFilter.matches: {self.matches!r} is no regular expression: {error}. "
                    "Write it as for Python's re."
                ) from error

    def keeps(self, row: Row, where: str) -> bool:
        """Whether a row meets the conditions; `where` is the filter's configuration key.

        Raises:
            ValueError: If there is no such column, it holds what is no text, or limits are set and
                it holds no number.
        """
        if not row.has_value(self.column, where):
            return False
        text = row.text(self.column, where)
        if self.one_of is not None and text not in map(_as_in_a_file, self.one_of):
            return False
        if self.matches is not None and not re.search(self.matches, text):
            return False
        if self.at_least is None and self.at_most is None:
            return True
        value = self._number(text, row, where)
        # The limits as they are written: in binary, 0.1 is more than a tenth.
        return (self.at_least is None or Decimal(str(self.at_least)) <= value) and (
            self.at_most is None or value <= Decimal(str(self.at_most))
        )

    def _number(self, text: str, row: Row, where: str) -> Decimal:
        numbers = find_numbers(text.strip())
        if [number.text for number in numbers] != [text.strip()]:
            raise ValueError(
                f"{row.place}: the column {self.column!r}, which {where} compares with "
                f"{self.at_least if self.at_most is None else self.at_most}, holds "
                f"{shortened(text)}, which is not a number. Correct it, or leave such rows out "
                "with a filter before this one, such as {column: ..., matches: '^[0-9.]+$'}."
            )
        return numbers[0].value


def _as_in_a_file(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class RowSource(Source):
    """A source that makes an example of every row that it keeps."""

    filters: tuple[RowFilter, ...] = ()
    """Keep only the rows that pass all of these, each a column with conditions, for instance
    `{column: level, one_of: [easy, hard]}`. How many are left out is reported."""
    max_examples: int | None = None
    """Take at most so many, from the beginning; the rest is not read. null: all."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file.

        Raises:
            ValueError: If `max_examples` is not positive.
        """
        check_max_examples(type(self).__name__, self.max_examples)

    def kept_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows that pass the filters, at most `max_examples`; says how many did not.

        Raises:
            ValueError: If there are rows and none passes; as `RowFilter.keeps`.
        """
        key = f"{type(self).__name__}.filters"
        left_out = [0] * len(self.filters)
        unseen = [dict.fromkeys(map(_as_in_a_file, f.one_of or ())) for f in self.filters]
        num_kept = num_read = 0
        first: Row | None = None
        for row in rows:
            first = first or row
            num_read += 1
            failed = None
            for i, row_filter in enumerate(self.filters):
                is_kept = row_filter.keeps(row, f"{key}[{i}]")
                if unseen[i] and row.has_value(row_filter.column, f"{key}[{i}]"):
                    unseen[i].pop(row.text(row_filter.column, f"{key}[{i}]"), None)
                if not is_kept:
                    failed = i
                    break
            if failed is not None:
                left_out[failed] += 1
                continue
            yield row
            num_kept += 1
            if num_kept == self.max_examples:
                break
        else:
            self._report_unseen(unseen, key)
        if not self.filters or first is None:
            return
        reasons = ", ".join(
            f"{count} by {key}[{i}] on {self.filters[i].column!r}"
            for i, count in enumerate(left_out)
            if count
        )
        if not num_kept:
            column = self.filters[0].column
            raise ValueError(
                f"{first.table}: the filters leave none of {num_read} rows ({reasons}). In the "
                f"first row {column!r} is {shortened(str(first.cells[column]))}. Correct "
                f"{key}, or leave it out."
            )
        rank_zero_info(
            f"{first.table}: the filters keep {num_kept} of {num_read} rows"
            f"{', and leave out ' + reasons if reasons else ''}."
        )

    def _report_unseen(self, unseen: Sequence[Collection[str]], key: str) -> None:
        for i, (row_filter, values) in enumerate(zip(self.filters, unseen, strict=True)):
            # Where all are unseen, nothing is kept, which is an error.
            if values and len(values) < len(row_filter.one_of or ()):
                rank_zero_warn(
                    f"{key}[{i}]: no row that comes to it has {', '.join(map(repr, values))} in "
                    f"{row_filter.column!r}. Values are compared as texts, and YAML reads no, on, "
                    "01 and 1.0 as other things: put them in quotes."
                )


@dataclass(frozen=True)
class _Table(RowSource):
    """A table whose columns become prompt and target."""

    path: str
    """The file. `~` and `${VARIABLE}` are expanded; a relative path starts at the folder the run
    was started in."""
    prompt: str
    """A column, or a text with columns in braces: `What is {a} + {b}?`. Some columns may be empty,
    as long as the prompt as a whole is not."""
    target: str | None
    """Likewise for the answer, where no column may be empty, NaN or infinite; null where there is
    no answer (only for predict)."""
    id_column: str | None = field(default=None, kw_only=True)
    """A column that says what a row is about: a row number, a person, a molecule. `Split` keeps
    rows of one id together, and `fit` warns of ids that training and evaluation share."""
    not_quantities: tuple[str, ...] = field(default=(), kw_only=True)
    """Columns of the target whose numbers are ids or categories: they are learnt by cross entropy
    alone, the number losses pass them over. See also `data.not_quantities`."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file.

        Raises:
            ValueError: If `max_examples` is not positive, or `not_quantities` is a text alone or
                names columns of a target that is null.
        """
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.not_quantities, str):
            raise ValueError(
                f"{name}.not_quantities must be a list of columns, got {self.not_quantities!r} "
                f"alone. Write [{self.not_quantities}], in Python ({self.not_quantities!r},)."
            )
        if self.not_quantities and self.target is None:
            raise ValueError(
                f"{name}.not_quantities names columns of the target, but {name}.target is null. "
                "Remove one of the two."
            )

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """All rows."""

    def examples(self) -> list[Example]:
        """Read the table.

        Raises:
            OSError: If there is no such file or data set.
            ValueError: If the table cannot be read or has no rows; if a column does not exist; if a
                prompt is empty, or a column of a target is, or is NaN or infinite; if the filters
                keep no row; if `not_quantities` names what is no column of the target. The message
                names the file and the row, or the setting.
        """
        examples: list[Example] = []
        templates: tuple[TextTemplate, TextTemplate | None] | None = None
        name = type(self).__name__
        for row in self.kept_rows(self._rows()):
            templates = templates or self._templates(row.columns)
            of_prompt, of_target = templates
            prompt = row.fill(of_prompt, f"{name}.prompt")
            target: str | None = None
            spans: tuple[tuple[int, int], ...] = ()
            if of_target is not None:
                where = f"{name}.target"
                target, spans = row.fill_target(of_target, where, self.not_quantities)
            key = None
            if self.id_column is not None:
                key = row.fill(TextTemplate.of_column(self.id_column), f"{name}.id_column").strip()
            examples.append(Example(prompt, target, row.origin, spans, key))
        return examples

    def _templates(self, columns: Collection[str]) -> tuple[TextTemplate, TextTemplate | None]:
        name = type(self).__name__
        prompt = TextTemplate.of_setting(self.prompt, columns, f"{name}.prompt")
        if self.target is None:
            return prompt, None
        target = TextTemplate.of_setting(self.target, columns, f"{name}.target")
        for column in self.not_quantities:
            if column not in target.fields:
                raise ValueError(
                    f"{name}.not_quantities: {column!r} is no column of {name}.target, which has "
                    f"{', '.join(map(repr, target.fields))}. Name one of these; a regular "
                    "expression for any text belongs to data.not_quantities."
                )
        return prompt, target

    def _needed(self, columns: Sequence[str], place: str) -> list[str]:
        """The columns that the settings name, of those that a table has."""
        prompt, target = self._templates(columns)
        name = type(self).__name__
        named = dict.fromkeys(prompt.fields, f"{name}.prompt")
        named |= dict.fromkeys(target.fields if target else (), f"{name}.target")
        if self.id_column is not None:
            named[self.id_column] = f"{name}.id_column"
        named |= {f.column: f"{name}.filters[{i}]" for i, f in enumerate(self.filters)}
        for column, where in named.items():
            if column not in columns:
                raise no_column(column, columns, place, where)
        return list(named)


@dataclass(frozen=True)
class JsonLines(_Table):
    """A JSON Lines file in UTF-8: one object per line, whose keys are the columns.

    Numbers are put into the texts as they stand in the file: `0.10` stays `0.10`, and no digit of
    a long number is lost. Blank lines hold nothing and are passed over; line numbers count them.
    """

    def _rows(self) -> Iterator[Row]:
        return json_rows(existing_file(self.path, "JsonLines.path"))


@dataclass(frozen=True)
class Csv(_Table):
    """A table in UTF-8 with a line for every row; fields are put into the texts as they stand.

    The first line names the columns. Fields may be quoted with `"` and then hold delimiters and
    line breaks. Blank lines hold nothing and are passed over; line numbers count them.
    """

    delimiter: str = ","
    """One character between fields; in YAML a tab is written "\\t"."""
    quote: str | None = '"'
    """The character that quotes fields. null: quotes are plain characters and every line is a row,
    as in the tables of GLUE."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a file that does not begin with them. Empty: they are in the first
    line."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file.

        Raises:
            ValueError: As for the other tables; if delimiter or quote is not one usable character,
                or `columns` is a text alone or names a column twice.
        """
        super().__post_init__()
        if len(self.delimiter) != 1 or self.delimiter in {"\r", "\n", self.quote}:
            raise ValueError(
                "Csv.delimiter must be one character other than the quote or a line break, got "
                f'{self.delimiter!r}. In YAML a tab is written "\\t", with double quotes.'
            )
        if self.quote is not None and (len(self.quote) != 1 or self.quote in "\r\n"):
            raise ValueError(
                f"Csv.quote must be one character, or null for none, got {self.quote!r}."
            )
        if isinstance(self.columns, str) or len(set(self.columns)) < len(self.columns):
            raise ValueError(
                f"Csv.columns must be a list of different names, got {self.columns!r}."
            )

    def _rows(self) -> Iterator[Row]:
        file = existing_file(self.path, "Csv.path")
        return csv_rows(file, self.delimiter, self.quote, self.columns)


@dataclass(frozen=True)
class Parquet(_Table):
    """A Parquet file. Only the columns that are needed are read.

    A number is written as the shortest text that reads back as the same value of its type: `0.1`
    for a tenth in single precision as well, `5.0` for a five in a column of floats. Decimals keep
    their zeros. Rows are counted from 0.
    """

    def _rows(self) -> Iterator[Row]:
        file = existing_file(self.path, "Parquet.path")
        try:
            with pq.ParquetFile(file) as table:
                columns = table.schema_arrow.names
                if repeated := [name for name in columns if columns.count(name) > 1]:
                    raise ValueError(f"{file}: two columns are called {repeated[0]!r}. Rename one.")
                if not table.metadata.num_rows:
                    raise ValueError(f"{file}: the table has no rows.")
                batches = table.iter_batches(
                    _ROWS_AT_ONCE, columns=self._needed(columns, str(file))
                )
                yield from arrow_rows(batches, columns, str(file), file.name)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file}: not a Parquet file that can be read: {error}") from error


@dataclass(frozen=True)
class HubDataset(_Table):
    """A data set of the Hugging Face hub, or a folder of one, read with `datasets`.

    A folder may be a copy of one on the hub, may hold files such as `train.jsonl` and
    `test.parquet`, or may have been written by `save_to_disk`. Numbers are written as for
    `Parquet`, also where the file is text: to keep `0.10` as it stands, take `JsonLines` or `Csv`.
    Class labels are their numbers, as `datasets` gives them. Rows are counted from 0.
    """

    path: str
    """Name on the hub (`openai/gsm8k`) or folder; `~` and `${VARIABLE}` are expanded."""
    split: str | None
    """The split: `train`, `train[:10%]`, `train+test`. null only for a folder that was written by
    `save_to_disk` and has no splits."""
    name: str | None = None
    """Which of the configurations of the data set (`main` of `openai/gsm8k`); null where there is
    only one."""
    revision: str | None = None
    """Branch, tag or commit on the hub; not for folders."""

    def _rows(self) -> Iterator[Row]:
        path = expand_path(self.path, "HubDataset.path")
        folder = Path(path)
        table = f"{folder.absolute() if folder.is_dir() else path}[{self.split}]"
        dataset = self._load(path)
        columns = dataset.column_names
        needed = dataset.select_columns(self._needed(columns, table))
        batches = needed.with_format("arrow").iter(_ROWS_AT_ONCE)
        yield from arrow_rows(batches, columns, table, f"{folder.name}[{self.split}]")

    def _load(self, path: str) -> datasets.Dataset:
        folder = Path(path)
        if folder.is_file():
            raise NotADirectoryError(
                f"HubDataset.path: {path!r} is a file. Give the folder that it lies in, or read it "
                "with JsonLines, Csv or Parquet."
            )
        if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
            raise FileNotFoundError(
                f"HubDataset.path: there is no folder {path!r} (looked for {folder.absolute()}). "
                "Give an existing folder, or a name on the hub such as 'openai/gsm8k'."
            )
        if folder.is_dir() and self.revision is not None:
            raise ValueError(
                f"HubDataset.revision is {self.revision!r}, but {path!r} is a local folder, which "
                "has no revisions. Leave `revision` out."
            )
        if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            return self._load_saved(folder)
        if self.split is None:
            raise ValueError(
                f"HubDataset.split is null, but only a folder that was written by save_to_disk can "
                f"be without splits, and {path!r} was not. Name a split, such as train."
            )
        try:
            return datasets.load_dataset(path, self.name, split=self.split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            why = f"datasets says: {' '.join(str(error.__cause__ or error).split())}"
            if folder.is_dir():
                raise ValueError(
                    f"HubDataset: split {self.split!r} of the folder {folder.absolute()} cannot be "
                    f"read with name {self.name!r}. {why}"
                ) from error
            raise OSError(
                f"HubDataset: {path!r} is no folder here (looked for {folder.absolute()}), and "
                f"split {self.split!r} with name {self.name!r} came neither from the hub nor from "
                "its cache. Without network, download it elsewhere (hf download --repo-type "
                f"dataset {path} --local-dir FOLDER) and set HubDataset.path: FOLDER. {why}"
            ) from error

    def _load_saved(self, folder: Path) -> datasets.Dataset:
        try:
            saved = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, IndexError) as error:  # The last where there are no rows.
            raise ValueError(
                f"HubDataset.path: the folder {folder.absolute()}, written by save_to_disk, has no "
                f"rows or cannot be read. datasets says: {error}"
            ) from error
        if self.name is not None:
            raise ValueError(
                f"HubDataset.name is {self.name!r}, but {folder} was written by save_to_disk, "
                "which keeps one configuration. Leave `name` out."
            )
        if isinstance(saved, datasets.DatasetDict):
            if self.split not in saved:
                raise ValueError(
                    f"HubDataset.split: {self.split!r} is no split of {folder}, which has "
                    f"{', '.join(map(repr, saved))}."
                )
            return saved[self.split]
        if self.split not in (None, saved.split):
            raise ValueError(
                f"HubDataset.split is {self.split!r}, but {folder} holds one set of rows "
                f"({'without a split' if saved.split is None else repr(str(saved.split))}). Set "
                "HubDataset.split: null."
            )
        return saved
