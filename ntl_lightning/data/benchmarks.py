"""Public data sets in the very form that their authors publish them in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn

from ntl_lightning.data.files import (
    Row,
    existing_file,
    json_array_rows,
    json_rows,
    shortened,
    text_lines,
)
from ntl_lightning.data.sources import Example, TextTemplate
from ntl_lightning.data.tables import RowSource
from ntl_lightning.numbers.text import find_numbers

__all__ = ["GSM8K", "SVAMP", "MultiRC", "RJokes"]

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
_ZERO_DECIMALS = re.compile(r"\.0+$")


@dataclass(frozen=True)
class GSM8K(RowSource):
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

    def __post_init__(self) -> None:
        """Check that the fields fit together.

        Raises:
            ValueError: If marks are to be kept where there is no reasoning to hold them, or
                `max_examples` is not positive.
        """
        super().__post_init__()
        if self.target == "answer" and self.calculator_marks == "keep":
            raise ValueError(
                "GSM8K.calculator_marks: keep has no effect with GSM8K.target: answer, which has "
                "no reasoning. Remove one of the two."
            )

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: As `JsonLines`; and if an answer has no `#### `, or not one number and
                nothing else after the last one. The message names file and line.
        """
        rows = json_rows(existing_file(self.path, "GSM8K.path"))
        return [self._example(row) for row in self.kept_rows(rows)]

    def _example(self, row: Row) -> Example:
        question = row.fill(TextTemplate.of_column("question"), "GSM8K")
        answer, _ = row.fill_target(TextTemplate.of_column("answer"), "GSM8K")
        _, mark, gold = answer.rpartition("#### ")
        gold = gold.strip()
        if not mark:
            raise ValueError(
                f"{row.place}: the answer has no '#### ' before its number: {shortened(answer)}. "
                "End it with a line such as '#### 72', or read the file with JsonLines."
            )
        if not _is_number(gold):
            raise ValueError(
                f"{row.place}: {shortened(gold)} after the last '#### ' is not a number. Write "
                "the number alone there, such as '#### 72'."
            )
        if self.target == "answer":
            return Example(question, gold, row.origin)
        if self.calculator_marks == "remove":
            answer = _CALCULATOR_MARK.sub("", answer)
        return Example(question, answer, row.origin)


@dataclass(frozen=True)
class SVAMP(RowSource):
    """Word problems of one step: a JSON array of objects with `Body`, `Question` and `Answer`.

    The prompt is body and question with a blank between them, the target the answer without zero
    decimals: `51.0` is written `51`, and `12.5` stays. Ids are those of the file.

    Source: A. Patel, S. Bhattamishra and N. Goyal, Are NLP Models really able to Solve Simple Math
    Word Problems?, arXiv:2103.07191; file `SVAMP.json` (1000 rows) of arkilpatel/SVAMP. There the
    whole file is the test set; others train on 700 rows. Take two files, or `Split`.
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: If it is not a JSON array of objects with these keys, or an answer is not a
                number. The message names the file and the place in the array, counted from 0.
        """
        rows = json_array_rows(existing_file(self.path, "SVAMP.path"))
        return [self._example(row) for row in self.kept_rows(rows)]

    def _example(self, row: Row) -> Example:
        prompt = row.fill(TextTemplate.parse("{Body} {Question}", "SVAMP"), "SVAMP")
        answer = row.text("Answer", "SVAMP")
        if not _is_number(answer):
            raise ValueError(f"{row.place}: the Answer {shortened(answer)} is not a number.")
        target = _ZERO_DECIMALS.sub("", answer)
        return Example(prompt, target, row.origin, id=row.text("ID", "SVAMP"))


@dataclass(frozen=True)
class RJokes(RowSource):
    r"""Jokes and their score on a log scale: lines of the score, a TAB and the joke.

    There is no header, and quotes are plain characters. All behind the first TAB is the joke. A TAB
    in it has a backslash before it in the published files, which is taken away. Columns for
    `filters` are `score` and `joke`.

    Source: O. Weller and K. Seppi, The r/Jokes Dataset: a Large Scale Humor Collection, LREC 2020;
    files `train.tsv`, `dev.tsv` and `test.tsv` of orionw/rJokesData, unpacked.
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: If the file is empty or not UTF-8, a line has no TAB or no joke, or a score
                is not a number. The message names file and line.
        """
        return [self._example(row) for row in self.kept_rows(self._rows())]

    def _rows(self) -> Iterator[Row]:
        file = existing_file(self.path, "RJokes.path")
        for number, line in text_lines(file):
            if not line.strip():
                continue
            score, tab, joke = line.rstrip("\r\n").partition("\t")
            if not tab:
                raise ValueError(
                    f"{file}:{number}: there is no TAB in {shortened(line)}. Every line must be a "
                    "score, a TAB and a joke."
                )
            cells: dict[str, object] = {"score": score, "joke": joke.replace("\\\t", "\t")}
            yield Row(str(file), file.name, f":{number}", cells, cells.keys())

    def _example(self, row: Row) -> Example:
        joke = row.fill(TextTemplate.of_column("joke"), "RJokes")
        score = row.text("score", "RJokes")
        if not _is_number(score):
            raise ValueError(f"{row.place}: the score {shortened(score)} is not a number.")
        return Example(joke, score, row.origin)


@dataclass(frozen=True)
class MultiRC(RowSource):
    """Questions about a passage with several right answers: the JSON Lines of SuperGLUE.

    An example is a question: `PASSAGE Question: QUESTION`, answered by its right answers in the
    order of the file, joined by ` | `. Where a file has no labels, as the public test file has not,
    examples have no target and serve for `predict` alone. A question of which no answer is right is
    left out; their number is reported. The id of an example is its passage. Columns for `filters`
    are `passage` and `question`.

    Source: D. Khashabi et al., Looking Beyond the Surface, NAACL 2018; files `train.jsonl`,
    `val.jsonl` and `test.jsonl` of SuperGLUE (A. Wang et al., arXiv:1905.00537).
    """

    path: str
    """The file, in UTF-8. `~` and `${VARIABLE}` are expanded; a relative path starts at the
    folder the run was started in."""

    def examples(self) -> list[Example]:
        """Read the file.

        Raises:
            OSError: If there is no such file, or it is a folder.
            ValueError: As `JsonLines`; if a line has another form; if some answers of the file have
                labels and some have not. The message names file and line.
        """
        unanswered: list[str] = []
        rows = self.kept_rows(self._rows(unanswered))
        examples = [self._example(row) for row in rows]
        if unanswered:
            rank_zero_warn(
                f"MultiRC.path: {len(unanswered)} questions are left out, because none of their "
                f"answers is right; the first is {unanswered[0]}."
            )
        labelled = [example.target is not None for example in examples]
        if any(labelled) and not all(labelled):
            raise ValueError(
                f"{examples[labelled.index(False)].origin} has no labels, but others in "
                f"{self.path} have. Give them labels or a file of their own."
            )
        return examples

    def _rows(self, unanswered: list[str]) -> Iterator[Row]:
        """A row for every question, without those that have no right answer, which are listed."""
        for line in json_rows(existing_file(self.path, "MultiRC.path")):
            passage = _entry(line.cells, "passage", dict, line.place)
            text = _entry(passage, "text", str, line.place)
            for number, question in enumerate(_entry(passage, "questions", list, line.place)):
                position = f"{line.position}[{number}]"
                place = line.table + position
                answers = _entry(question, "answers", list, place)
                cells: dict[str, object] = {
                    "passage": text,
                    "question": _entry(question, "question", str, place),
                }
                row = Row(line.table, line.name, position, cells, tuple(cells))
                # Numbers are read as they are written.
                labels = [_entry(answer, "label", str, place, None) for answer in answers]
                if wrong := [label for label in labels if label not in ("0", "1", None)]:
                    raise ValueError(
                        f"{place}: 'label' of an answer must be 0 or 1, got {wrong[0]}."
                    )
                if None not in labels:
                    right = [
                        _entry(answer, "text", str, place)
                        for answer, label in zip(answers, labels, strict=True)
                        if label == "1"
                    ]
                    if not right:
                        unanswered.append(row.origin)
                        continue
                    cells["answer"] = " | ".join(right)
                elif any(labels):
                    raise ValueError(f"{place}: some answers have a label and some have not.")
                yield row

    def _example(self, row: Row) -> Example:
        template = TextTemplate.parse("{passage} Question: {question}", "MultiRC")
        prompt = row.fill(template, "MultiRC")
        target = None
        if "answer" in row.cells:
            target, _ = row.fill_target(TextTemplate.of_column("answer"), "MultiRC")
        return Example(prompt, target, row.origin, id=row.text("passage", "MultiRC"))


_REQUIRED = object()


def _entry(holder: Any, key: str, kind: type, place: str, default: Any = _REQUIRED) -> Any:
    """An entry of a JSON object, checked to be of its kind."""
    value = holder.get(key, default) if isinstance(holder, dict) else _REQUIRED
    if value is default and default is not _REQUIRED:
        return value
    if not isinstance(value, kind):
        kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text or number"}
        raise ValueError(
            f"{place}: {key!r} must be {kinds[kind]} here, got "
            f"{'nothing' if value is _REQUIRED else shortened(repr(value))}. Lines must have the "
            "form of SuperGLUE's MultiRC."
        )
    return value


def _is_number(text: str) -> bool:
    """Whether a text is one number and nothing else."""
    return [number.text for number in find_numbers(text)] == [text]
