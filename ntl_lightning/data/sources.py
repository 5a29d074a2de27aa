"""Where examples come from: every task is a list of (prompt, target) texts.

A source is a frozen dataclass of plain values, so that a configuration names it by its class path
and `--help` shows its fields. The work is done in `examples()`, never in the constructor.
"""

import codecs
import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from ntl_lightning.numbers.text import find_numbers
from ntl_lightning.paths import expand_path

__all__ = ["GSM8K", "Csv", "Example", "JsonLines", "Source", "TextTemplate"]

_PIECE = re.compile(
    r"(?P<literal>[^{}]+)|(?P<brace>\{\{|\}\})|\{(?P<field>[^{}]+)\}|(?P<stray>[{}])"
)
_RETURN = "\r"
_RETURNS_HINT = (
    "A carriage return alone ends no line: convert the line ends, e.g. tr '\\r' '\\n' < OLD > NEW"
)
_QUOTES_HINT = "Check its quotes: a quote inside a quoted field is written twice."
_ANY_SIZE = 2**31 - 1  # In characters of a cell; more does not fit the C long of every machine.
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
# Longer marks first: that of UTF-32 (little endian) begins with that of UTF-16.
_OTHER_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its answer, as texts."""

    prompt: str
    """What the model is given."""
    target: str | None
    """What it should say; None where the answer is not known (only for predict)."""
    origin: str
    """Where it comes from, for people: `train.jsonl:17`, `Friedman[3]`."""
    not_quantities: tuple[tuple[int, int], ...] = ()
    """Start and end of the parts of the target whose numbers are ids or categories, which the
    number losses pass over; counted in characters."""


class Source(ABC):
    """Anything that gives examples. A source of your own is a frozen dataclass with one method.

    Name it in a configuration by its class path, like the sources of this package. The same
    fields must always give the same examples in the same order: every process of a distributed
    run makes its own copy of the list.

    >>> @dataclass(frozen=True)
    ... class Doubles(Source):
    ...     count: int = 3
    ...     def examples(self) -> list[Example]:
    ...         return [
    ...             Example(prompt=f"2*{i}=", target=str(2 * i), origin=f"Doubles[{i}]")
    ...             for i in range(self.count)
    ...         ]
    >>> Doubles(count=2).examples()[1]
    Example(prompt='2*1=', target='2', origin='Doubles[1]', not_quantities=())
    """

    @abstractmethod
    def examples(self) -> list[Example]:
        """All examples, in a fixed order."""


@dataclass(frozen=True)
class JsonLines(Source):
    """A JSON Lines file: one object per line.

    Numbers are put into the texts as they stand in the file: `0.10` stays `0.10`, and no digit of
    a long number is lost. Blank lines hold nothing and are passed over; line numbers count them.
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""
    prompt: str
    """A column (key of the objects), or a text with columns in braces: `What is {a} + {b}?`."""
    target: str | None
    """Likewise for the answer; null where there is none (only for predict)."""
    max_examples: int | None = None
    """Take at most so many, from the beginning; the rest of the file is not read. null: all."""
    not_quantities: tuple[str, ...] = ()
    """Columns of the target whose numbers are ids or categories: they are learnt by cross entropy
    alone, the number losses pass them over. See also `data.not_quantities`."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file.

        Raises:
            ValueError: If `max_examples` is not positive, or `not_quantities` is a text alone or
                names columns of a target that is null.
        """
        _check_max_examples("JsonLines", self.max_examples)
        _check_not_quantities("JsonLines", self.not_quantities, self.target)

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: If the file is empty or not UTF-8; if a line is not a JSON object, lacks a
                column, or holds null, a list or an object in it; if a prompt or target is empty;
                if `not_quantities` names what is no column of the target. The message names file
                and line, or the setting.
        """
        rows = _json_rows(_existing_file(self.path, "JsonLines.path"))
        return _table_examples(
            rows, "JsonLines", self.prompt, self.target, self.max_examples, self.not_quantities
        )


@dataclass(frozen=True)
class Csv(Source):
    """A table whose first line names the columns; fields are put into the texts as they stand.

    Fields may be quoted with `"` and then hold delimiters and line breaks. Blank lines hold
    nothing and are passed over; line numbers count them.
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""
    prompt: str
    """A column, or a text with columns in braces: `What is {a} + {b}?`. Here a column may be
    empty, as long as the prompt as a whole is not."""
    target: str | None
    """Likewise for the answer, where no column may be empty; null where there is no answer (only
    for predict)."""
    delimiter: str = ","
    """One character between fields; in YAML a tab is written "\\t"."""
    max_examples: int | None = None
    """Take at most so many, from the beginning; the rest of the file is not read. null: all."""
    not_quantities: tuple[str, ...] = ()
    """Columns of the target whose numbers are ids or categories: they are learnt by cross entropy
    alone, the number losses pass them over. See also `data.not_quantities`."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file.

        Raises:
            ValueError: If the delimiter is not one usable character, `max_examples` is not
                positive, or `not_quantities` is a text alone or names columns of a target that is
                null.
        """
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ValueError(
                "Csv.delimiter must be one character other than a quote or a line break, got "
                f'{self.delimiter!r}. In YAML a tab is written "\\t", with double quotes.'
            )
        _check_max_examples("Csv", self.max_examples)
        _check_not_quantities("Csv", self.not_quantities, self.target)

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: If the file is empty or not UTF-8; if a row has more or fewer fields than
                the header or is badly quoted; if a column does not exist; if a prompt or target
                is empty; if `not_quantities` names what is no column of the target. The message
                names file and line, or the setting.
        """
        rows = _csv_rows(_existing_file(self.path, "Csv.path"), self.delimiter)
        return _table_examples(
            rows, "Csv", self.prompt, self.target, self.max_examples, self.not_quantities
        )


@dataclass(frozen=True)
class GSM8K(Source):
    """Grade school word problems: JSON Lines with `question`, and `answer` ending in `#### 72`.

    Source: K. Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv:2110.14168;
    files `train.jsonl` (7473 rows) and `test.jsonl` (1319 rows) of openai/grade-school-math.
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""
    calculator_marks: Literal["remove", "keep"] = "remove"
    """What to do with calculator annotations such as `<<48/2=24>>` in the reasoning."""
    target: Literal["reasoning", "answer"] = "reasoning"
    """`reasoning`: the whole solution, ending in `#### 72`. `answer`: `72` alone."""
    max_examples: int | None = None
    """Take at most so many, from the beginning; the rest of the file is not read. null: all."""

    def __post_init__(self) -> None:
        """Check that the fields fit together.

        Raises:
            ValueError: If marks are to be kept where there is no reasoning to hold them, or
                `max_examples` is not positive.
        """
        if self.target == "answer" and self.calculator_marks == "keep":
            raise ValueError(
                "GSM8K.calculator_marks: keep has no effect with GSM8K.target: answer, which has "
                "no reasoning. Remove one of the two."
            )
        _check_max_examples("GSM8K", self.max_examples)

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: As `JsonLines`; and if an answer has no `#### `, or not one number and
                nothing else after the last one. The message names file and line.
        """
        rows = _json_rows(_existing_file(self.path, "GSM8K.path"))
        return [self._example(row) for row in islice(rows, self.max_examples)]

    def _example(self, row: "_Row") -> Example:
        question = _filled(TextTemplate.of_column("question"), row, "GSM8K")
        answer = _filled(TextTemplate.of_column("answer"), row, "GSM8K", every_field=True)
        _, mark, gold = answer.rpartition("#### ")
        gold = gold.strip()
        if not mark:
            raise ValueError(
                f"{row.place}: the answer has no '#### ' before its number: {_shortened(answer)}. "
                "End it with a line such as '#### 72', or read the file with JsonLines."
            )
        if [number.text for number in find_numbers(gold)] != [gold]:
            raise ValueError(
                f"{row.place}: {_shortened(gold)} after the last '#### ' is not a number. Write "
                "the number alone there, such as '#### 72'."
            )
        if self.target == "answer":
            return Example(question, gold, row.origin)
        if self.calculator_marks == "remove":
            answer = _CALCULATOR_MARK.sub("", answer)
        return Example(question, answer, row.origin)


@dataclass(frozen=True)
class TextTemplate:
    """A text with fields in braces: `{left}+{right}=`. `{{` and `}}` stand for plain braces.

    A field is everything between its braces, spaces and colons included; there are no format
    specifications.

    >>> template = TextTemplate.parse("Solve {{x}}: {two words}", where="JsonLines.prompt")
    >>> template.fill({"two words": "x=1"})
    'Solve {x}: x=1'
    """

    pieces: tuple[tuple[str, str | None], ...]
    """Pairs of plain text and the field after it, or None."""

    @classmethod
    def parse(cls, text: str, where: str) -> "TextTemplate":
        """Split a text as a user wrote it.

        Args:
            text: The text.
            where: The configuration key it was written at; named in errors.

        Raises:
            ValueError: If a brace has no partner, or there is no field.
        """
        pieces: list[tuple[str, str | None]] = []
        for match in _PIECE.finditer(text):
            if match["stray"]:
                raise ValueError(
                    f"{where}: {text!r} has a brace without its partner, or none between its "
                    f"braces, at character {match.start() + 1}. Write {{name}} for a field, and "
                    "{{ and }} for plain braces."
                )
            pieces.append((match["literal"] or (match["brace"] or "")[:1], match["field"]))
        template = cls(tuple(pieces))
        if not template.fields:
            raise ValueError(f"{where}: {text!r} has no field in braces, such as {{name}}.")
        return template

    @classmethod
    def of_column(cls, name: str) -> "TextTemplate":
        """The template that is one field and nothing else, whatever characters its name has."""
        return cls((("", name),))

    @property
    def fields(self) -> list[str]:
        """The names of the fields, in order, with repetitions."""
        return [field for _, field in self.pieces if field is not None]

    def fill(self, values: Mapping[str, str]) -> str:
        """Put the values of the fields in."""
        return "".join(
            literal if field is None else literal + values[field] for literal, field in self.pieces
        )

    def spans(
        self, values: Mapping[str, str], fields: Collection[str]
    ) -> tuple[tuple[int, int], ...]:
        """Start and end, in the filled text, of what some of the fields put in.

        >>> template = TextTemplate.parse("room {room}: {degrees}", where="Csv.target")
        >>> template.spans({"room": "12", "degrees": "19.5"}, ["room"])
        ((5, 7),)
        """
        spans, end = [], 0
        for literal, field in self.pieces:
            start = end + len(literal)
            end = start if field is None else start + len(values[field])
            if field in fields:
                spans.append((start, end))
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class _Row:
    place: str
    """For errors: absolute path and line."""
    origin: str
    """For people: file name and line."""
    cells: dict[str, object]
    """Strings; JSON numbers as the text in the file; other JSON values as Python reads them,
    where a float can only be NaN or an infinity."""


def _check_max_examples(source: str, max_examples: int | None) -> None:
    if max_examples is not None and max_examples < 1:
        raise ValueError(
            f"{source}.max_examples must be 1 or more, or null for all, got {max_examples}."
        )


def _check_not_quantities(source: str, columns: Collection[str], target: str | None) -> None:
    if isinstance(columns, str):
        raise ValueError(
            f"{source}.not_quantities must be a list of columns, got {columns!r} alone. Write "
            f"[{columns}], in Python ({columns!r},)."
        )
    if columns and target is None:
        raise ValueError(
            f"{source}.not_quantities names columns of the target, but {source}.target is null. "
            "Remove one of the two."
        )


def _existing_file(path: str, where: str) -> Path:
    file = Path(expand_path(path, where)).absolute()
    if file.is_dir():
        raise IsADirectoryError(f"{where}: {file} is a folder. Name a file in it.")
    if not file.exists():
        raise FileNotFoundError(
            f"{where}: there is no file {file} (written as {path!r}). A relative path starts at "
            "the folder the run was started in."
        )
    return file


def _table_examples(
    rows: Iterator[_Row],
    source: str,
    prompt: str,
    target: str | None,
    max_examples: int | None,
    not_quantities: Sequence[str],
) -> list[Example]:
    examples: list[Example] = []
    prompt_template: TextTemplate | None = None
    target_template: TextTemplate | None = None
    for row in islice(rows, max_examples):
        if prompt_template is None:
            prompt_template = _template(prompt, row, f"{source}.prompt")
            if target is not None:
                target_template = _template(target, row, f"{source}.target")
                _check_are_fields(not_quantities, target_template, source)
        filled_prompt = _filled(prompt_template, row, f"{source}.prompt")
        if target_template is None:
            examples.append(Example(filled_prompt, None, row.origin))
            continue
        where = f"{source}.target"
        filled_target = _filled(target_template, row, where, every_field=True)
        spans = target_template.spans(_cells(target_template, row, where), not_quantities)
        examples.append(Example(filled_prompt, filled_target, row.origin, spans))
    return examples


def _check_are_fields(columns: Sequence[str], template: TextTemplate, source: str) -> None:
    for column in columns:
        if column not in template.fields:
            raise ValueError(
                f"{source}.not_quantities: {column!r} is no column of {source}.target, which has "
                f"{', '.join(map(repr, template.fields))}. Name one of these; a regular expression "
                "for any text belongs to data.not_quantities."
            )


def _template(text: str, first_row: _Row, where: str) -> TextTemplate:
    if text in first_row.cells or not ("{" in text or "}" in text):
        return TextTemplate.of_column(text)
    return TextTemplate.parse(text, where)


def _filled(template: TextTemplate, row: _Row, where: str, every_field: bool = False) -> str:
    """The template with a row's cells put in; `every_field`: none of them may be empty."""
    cells = _cells(template, row, where)
    text = template.fill(cells)
    for field, cell in cells.items():
        if not cell.strip() and (every_field or not text.strip()):
            raise ValueError(
                f"{row.place}: the column {field!r}, which {where} names, is empty. Fill it or "
                "remove the row."
            )
    return text


def _cells(template: TextTemplate, row: _Row, where: str) -> dict[str, str]:
    return {field: _cell_text(row, field, where) for field in template.fields}


def _cell_text(row: _Row, column: str, where: str) -> str:
    if column not in row.cells:
        raise ValueError(
            f"{row.place}: there is no column {column!r}, which {where} names. The columns here "
            f"are {', '.join(map(repr, row.cells))}. Name one of them, or write a text with "
            "columns in {braces}."
        )
    value = row.cells[column]
    if isinstance(value, str):
        if not value.isascii():
            _check_characters(value, row, column)
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if value is None or isinstance(value, float):
        raise ValueError(
            f"{row.place}: the column {column!r}, which {where} names, has no value "
            f"({'null' if value is None else value}). Fill it or remove the row."
        )
    raise ValueError(
        f"{row.place}: the column {column!r}, which {where} names, holds "
        f"{'a list' if isinstance(value, list) else 'an object'}; only texts, numbers, true and "
        "false can be put into a text. Write its parts as columns of their own."
    )


def _check_characters(value: str, row: _Row, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{row.place}: the column {column!r} has half of a surrogate pair "
            f"({value[error.start]!a}), which is no character. Write the character itself."
        ) from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines, which keep their end; only a line feed ends one."""
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = raw
            if number == 1:
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
                raise _not_utf8(file, number, raw, offset, "ISO-8859-1") from error
            yield number, text
        if stream.tell() == 0:
            raise ValueError(f"{file}: the file is empty.")


def _not_utf8(file: Path, line: int, raw: bytes, offset: int, guess: str) -> ValueError:
    return ValueError(
        f"{file}:{line}: byte {offset + 1} of the line is 0x{raw[offset]:02x}, which is not UTF-8 "
        f"text. If the file is {guess}, convert it: iconv -f {guess} -t UTF-8 OLD > NEW"
    )


def _json_rows(file: Path) -> Iterator[_Row]:
    decoder = json.JSONDecoder(
        parse_int=str, parse_float=str, parse_constant=float, object_pairs_hook=_without_repetition
    )
    empty = True
    for number, line in _lines(file):
        text = line.strip()
        if not text:
            continue
        place = f"{file}:{number}"
        try:
            cells = decoder.decode(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: not JSON at character {error.pos + 1}: {error.msg}. Every line must be "
                f"one whole JSON object; this one is {_shortened(text)}."
                f"{' ' + _RETURNS_HINT if _RETURN in text else ''}"
            ) from error
        except RecursionError as error:
            raise ValueError(
                f"{place}: lists or objects are nested too deeply to be read: {_shortened(text)}. "
                "Remove them, or write their parts as columns of their own."
            ) from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if not isinstance(cells, dict):
            raise ValueError(
                f"{place}: not a JSON object: {_shortened(text)}. Every line must be one whole "
                'object, such as {"question": "1+1=", "answer": 2}.'
            )
        empty = False
        yield _Row(place, f"{file.name}:{number}", cells)
    if empty:
        raise ValueError(f"{file}: the file has blank lines only.")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object. Remove one.")
    return cells


def _csv_rows(file: Path, delimiter: str) -> Iterator[_Row]:
    reader = csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=True)
    header: list[str] = []
    empty = True
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
            raise ValueError(
                f"{place}: the row has {len(fields)} fields, the header {len(header)}. Quote "
                f"fields that contain the delimiter {delimiter!r}."
            )
        empty = False
        yield _Row(place, f"{file.name}:{number}", dict(zip(header, fields, strict=True)))
    if empty:
        raise ValueError(f"{file}: the file has no rows below its header.")


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")
