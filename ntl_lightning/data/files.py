"""Rows of files, as they stand there: JSON, CSV and Arrow tables, with a place for every fault."""

import codecs
import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from lightning.pytorch.utilities import rank_zero_info

from ntl_lightning.data.sources import TextTemplate
from ntl_lightning.paths import expand_path

__all__ = [
    "Row",
    "arrow_rows",
    "csv_rows",
    "existing_file",
    "json_array_rows",
    "json_rows",
    "no_column",
    "shortened",
    "text_lines",
]

_RETURN = "\r"
_RETURNS_HINT = (
    "A carriage return alone ends no line: convert the line ends, e.g. tr '\\r' '\\n' < OLD > NEW"
)
_QUOTES_HINT = (
    "Check its quotes: a quote inside a quoted field is written twice. Where quotes are plain "
    "characters, set Csv.quote: null."
)
_ANY_SIZE = 2**31 - 1  # In characters of a cell; more does not fit the C long of every machine.
_GZIP = b"\x1f\x8b"
# Longer marks first: that of UTF-32 (little endian) begins with that of UTF-16.
_OTHER_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# As Python, numpy, pandas, C, R, JavaScript and spreadsheets write them. `Nan` is a name.
_NOT_FINITE = {"nan", "NaN", "NAN", "inf", "Inf", "INF", "infinity", "Infinity", "INFINITY"}
_HALF_OR_SINGLE = {pa.float16(): np.float16, pa.float32(): np.float32}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, and where it stands."""

    table: str
    """The table in full, for errors: an absolute path, or a name on the hub."""
    name: str
    """The table in short, for people: a file name."""
    position: str
    """The row in the table: `:17` is a line, counted from 1; `[16]` an index, counted from 0."""
    cells: dict[str, object]
    """By column. Strings; numbers as the text in the file; other values as Python reads them, where
    a float can only be NaN or an infinity."""
    columns: Collection[str]
    """All columns of the table, also those that were not read."""

    @property
    def place(self) -> str:
        """For errors: table and position in full."""
        return self.table + self.position

    @property
    def origin(self) -> str:
        """For people: table and position in short."""
        return self.name + self.position

    def has_value(self, column: str, where: str) -> bool:
        """Whether there is something in a column, rather than null, NaN or blanks.

        Raises:
            ValueError: If there is no such column; `where` is the setting that names it.
        """
        value = self._cell(column, where)
        if isinstance(value, str):
            return bool(value.strip())
        return self._is_there(column, where)

    def text(self, column: str, where: str) -> str:
        """The text of a cell.

        Raises:
            ValueError: If there is no such column, or it holds no text, number or truth value;
                `where` is the setting that names it.
        """
        value = self._cell(column, where)
        if isinstance(value, str):
            if not value.isascii():
                self._check_characters(value, column)
            return value
        if isinstance(value, bool):
            return json.dumps(value)
        if value is None or isinstance(value, float):
            raise ValueError(
                f"{self.place}: the column {column!r}, which {where} names, has no value "
                f"({'null' if value is None else value}). Fill it or remove the row."
            )
        kinds: dict[type, str] = {list: "a list", dict: "an object", bytes: "bytes"}
        raise ValueError(
            f"{self.place}: the column {column!r}, which {where} names, holds "
            f"{kinds.get(type(value), type(value).__name__)}; only texts, numbers, true and "
            "false can be put into a text. Write its parts as columns of their own."
        )

    def fill(self, template: TextTemplate, where: str) -> str:
        """A template with the row's cells put in, of which some but not all may be empty.

        Raises:
            ValueError: As `text`, and if the filled template has nothing but blanks.
        """
        cells = {
            field: self.text(field, where) if self._is_there(field, where) else ""
            for field in template.fields
        }
        text = template.fill(cells)
        if not text.strip():
            self._refuse_empty(template.fields[0], where)
        return text

    def fill_target(
        self, template: TextTemplate, where: str, marked: Collection[str] = ()
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """A template of a target with the row's cells put in, of which none may be empty.

        Args:
            template: Of the target.
            where: Its setting, named in errors.
            marked: Columns whose places in the text are asked for.

        Returns:
            The text, and start and end of the marked columns in it.

        Raises:
            ValueError: As `text`, and if a cell is empty, NaN or infinite.
        """
        cells = {field: self.text(field, where) for field in template.fields}
        for field, cell in cells.items():
            stripped = cell.strip()
            if not stripped:
                self._refuse_empty(field, where)
            if stripped.lstrip("+-") in _NOT_FINITE:
                raise ValueError(
                    f"{self.place}: the column {field!r}, which {where} names, is {stripped}, "
                    "which no answer can be measured against. Correct it or remove the row."
                )
        return template.fill(cells), template.spans(cells, marked)

    def _is_there(self, column: str, where: str) -> bool:
        value = self._cell(column, where)
        return value is not None and value == value

    def _cell(self, column: str, where: str) -> object:
        if column not in self.cells:
            raise no_column(column, self.columns, self.place, where)
        return self.cells[column]

    def _check_characters(self, value: str, column: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.place}: the column {column!r} has half of a surrogate pair "
                f"({value[error.start]!a}), which is no character. Write the character itself."
            ) from error

    def _refuse_empty(self, column: str, where: str) -> None:
        raise ValueError(
            f"{self.place}: the column {column!r}, which {where} names, is empty. Fill it or "
            "remove the row."
        )


def no_column(column: str, columns: Collection[str], place: str, where: str) -> ValueError:
    """The error that a column does not exist; `where` is the setting that names it."""
    return ValueError(
        f"{place}: there is no column {column!r}, which {where} names. The columns here are "
        f"{', '.join(map(repr, columns))}. Name one of them, or write a text with columns in "
        "{braces}."
    )


def existing_file(path: str, where: str) -> Path:
    """The absolute path of a file as a user wrote it; `where` is its configuration key.

    Raises:
        OSError: If there is no such file, or it is a folder.
        ValueError: If a variable in the path is not set.
    """
    file = Path(expand_path(path, where)).absolute()
    if file.is_dir():
        raise IsADirectoryError(f"{where}: {file} is a folder. Name a file in it.")
    if not file.exists():
        raise FileNotFoundError(
            f"{where}: there is no file {file} (written as {path!r}). A relative path starts at "
            "the folder the run was started in."
        )
    return file


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines, which keep their end; only a line feed ends one.

    Raises:
        ValueError: If the file is empty or not UTF-8; names the line and, where it can be told, the
            encoding.
    """
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = raw
            if number == 1:
                if raw.startswith(_GZIP):
                    raise ValueError(f"{file}: the file is compressed. Unpack it: gunzip {file}")
                for mark, encoding in _OTHER_ENCODINGS:
                    if raw.startswith(mark):
                        raise _not_utf8(file, 1, raw, 0, encoding)
                line = raw.removeprefix(codecs.BOM_UTF8)
            if b"\0" in line:
                raise _not_utf8(file, number, raw, raw.index(b"\0"), "UTF-16")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                offset = error.start + len(raw) - len(line)
                # What Windows has there are quotes and the euro sign, and ISO 8859 nothing.
                guess = "WINDOWS-1252" if 0x80 <= raw[offset] <= 0x9F else "ISO-8859-1"
                raise _not_utf8(file, number, raw, offset, guess) from error
            yield number, text
        if stream.tell() == 0:
            raise ValueError(f"{file}: the file is empty.")


def _not_utf8(file: Path, line: int, raw: bytes, offset: int, guess: str) -> ValueError:
    return ValueError(
        f"{file}:{line}: byte {offset + 1} of the line is 0x{raw[offset]:02x}, which is not UTF-8 "
        f"text. If the file is {guess}, convert it: iconv -f {guess} -t UTF-8 OLD > NEW"
    )


def json_rows(file: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file; numbers keep the text they have there.

    Raises:
        ValueError: If the file is empty or not UTF-8, or a line is not one JSON object.
    """
    decoder = _json_decoder()
    empty = True
    for number, line in text_lines(file):
        text = line.strip()
        if not text:
            continue
        place = f"{file}:{number}"
        try:
            cells = decoder.decode(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: not JSON at character {error.pos + 1}: {error.msg}. Every line must be "
                f"one whole JSON object; this one is {shortened(text)}."
                f"{' ' + _RETURNS_HINT if _RETURN in text else ''}"
            ) from error
        except RecursionError as error:
            raise ValueError(
                f"{place}: lists or objects are nested too deeply to be read: {shortened(text)}. "
                "Remove them, or write their parts as columns of their own."
            ) from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if not isinstance(cells, dict):
            raise ValueError(
                f"{place}: not a JSON object: {shortened(text)}. Every line must be one whole "
                'object, such as {"question": "1+1=", "answer": 2}.'
            )
        empty = False
        yield Row(str(file), file.name, f":{number}", cells, cells.keys())
    if empty:
        raise ValueError(f"{file}: the file has blank lines only.")


def json_array_rows(file: Path) -> Iterator[Row]:
    """The objects of a file that is one JSON array; numbers keep the text they have there.

    Raises:
        ValueError: If the file is empty or not UTF-8, or is not one JSON array of objects.
    """
    text = "".join(line for _, line in text_lines(file))
    try:
        objects = _json_decoder().decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}:{error.lineno}: not JSON at character {error.colno}: {error.msg}. The file "
            "must be one JSON array of objects."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{file}: lists or objects are nested too deeply to be read.") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(objects, list) or not objects:
        raise ValueError(
            f"{file}: the file must be one JSON array of objects, but it is "
            f"{shortened(text.strip())}."
        )
    for number, cells in enumerate(objects):
        if not isinstance(cells, dict):
            raise ValueError(f"{file}[{number}]: not a JSON object: {shortened(repr(cells))}.")
        yield Row(str(file), file.name, f"[{number}]", cells, cells.keys())


def _json_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_int=str, parse_float=str, parse_constant=float, object_pairs_hook=_without_repetition
    )


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object. Remove one.")
    return cells


def csv_rows(
    file: Path, delimiter: str, quote: str | None, columns: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a CSV file below its header.

    Args:
        file: In UTF-8.
        delimiter: One character.
        quote: One character, or None: quotes are plain characters and every line is a row.
        columns: Names of the columns; empty takes those of the first line.

    Raises:
        ValueError: If the file is empty or not UTF-8, or a row has another number of fields than
            there are columns, or is badly quoted.
    """
    reader = csv.reader(
        (line for _, line in text_lines(file)),
        delimiter=delimiter,
        quotechar=quote,
        quoting=csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL,
        strict=True,
    )
    header = list(columns)
    empty = True
    num_long, first_long = 0, ""
    while True:
        number = reader.line_num + 1
        others = csv.field_size_limit(_ANY_SIZE)
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            # The reader says so where a carriage return alone ends a line.
            hint = _RETURNS_HINT if str(error).startswith("new-line character") else _QUOTES_HINT
            raise ValueError(
                f"{file}:{number}: the row that begins here is not CSV: {error}. {hint}"
            ) from error
        finally:
            csv.field_size_limit(others)
        place = f"{file}:{number}"
        if not fields:
            continue
        if not header:
            header = fields
            if repeated := [name for name in header if header.count(name) > 1]:
                raise ValueError(f"{place}: two columns are called {repeated[0]!r}. Rename one.")
            continue
        if len(fields) != len(header):
            named = f"Csv.columns {len(header)} names" if columns else f"the header {len(header)}"
            advice = (
                "every delimiter ends a field, because Csv.quote is null"
                if quote is None
                else "quote fields that contain it"
            )
            raise ValueError(
                f"{place}: the row has {len(fields)} fields, {named}. The delimiter is "
                f"{delimiter!r}; {advice}."
            )
        empty = False
        if reader.line_num > number:
            num_long, first_long = num_long + 1, first_long or place
        cells: dict[str, object] = dict(zip(header, fields, strict=True))
        yield Row(str(file), file.name, f":{number}", cells, header)
    if empty:
        below = "" if columns else " below its header"
        raise ValueError(f"{file}: the file has no rows{below}.")
    if num_long:
        rank_zero_info(
            f"{file}: {num_long} rows have quoted fields of several lines, the first begins at "
            f"{first_long}. If quotes are plain characters there, set Csv.quote: null."
        )


def arrow_rows(
    batches: Iterable[Any], columns: Sequence[str], table: str, name: str
) -> Iterator[Row]:
    """The rows of Arrow record batches or tables, with their numbers written out.

    Args:
        batches: With the columns that are needed.
        columns: All that the whole table has.
        table: Its full name.
        name: Its short name.

    A number becomes the shortest text that reads back as the same value of its type, so 0.1 in
    single precision is `0.1`; decimals keep their zeros, and dates are written as `2024-01-31`.
    """
    index = 0
    for batch in batches:
        texts = [
            [None if value is None else write(value) for value in column.to_pylist()]
            for column in batch.columns
            for write in [_writer(column.type)]
        ]
        for values in zip(*texts, strict=True):
            cells = dict(zip(batch.schema.names, values, strict=True))
            yield Row(table, name, f"[{index}]", cells, columns)
            index += 1


def _writer(kind: Any) -> Callable[[Any], object]:
    """How a value of an Arrow type becomes a cell."""
    if pa.types.is_floating(kind):
        # The digits are those of the narrow type, the notation is Python's for all.
        narrow = _HALF_OR_SINGLE.get(kind, float)
        return lambda value: str(float(str(narrow(value)))) if isfinite(value) else float(value)
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return _number_text
    return lambda value: value


def _number_text(value: object) -> str:
    # A zero of many places stays one: str() would give 0E-7.
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def shortened(text: str) -> str:
    """A text in quotes, cut to 80 characters."""
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")
