"""The answers of `predict` as a file, one JSON object a line, in the order of the input."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ntl_lightning.callbacks.answers import (
    Answer,
    answers_of,
    as_answer_module,
    difference,
    number_in,
)
from ntl_lightning.callbacks.files import (
    is_trial_run,
    keep_previous,
    replaced_file,
    run_folder,
)
from ntl_lightning.paths import expand_path

__all__ = ["Merged", "PredictionFile", "merge_parts", "prediction_line"]

_MOST_INTEGER_DIGITS = 640  # Python reads integers of so many digits under any setting.


def prediction_line(sample: Answer, target_value: Decimal | None) -> str:
    """A sample as one line of JSON, with a line break.

    Args:
        sample: What was asked and answered. Its value is written with all its digits, as a JSON
            number, over 640 digits with an exponent;
            `json.loads(line, parse_float=Decimal)` reads it back without rounding.
        target_value: The number in the target; `error` is the value minus this, exactly.

    >>> sample = Answer(0, "0.1 + 0.2 =", "0.3", "0.50", Decimal("0.50"))
    >>> print(prediction_line(sample, Decimal("0.3")), end="")
    {"index": 0, "prompt": "0.1 + 0.2 =", "target": "0.3", "answer": "0.50", "value": 0.50, "error": 0.20}
    """  # noqa: E501
    value = sample.value
    error = None if value is None or target_value is None else difference(value, target_value)
    members = {
        "index": str(sample.index),
        "prompt": json.dumps(sample.prompt, ensure_ascii=False),
        "target": json.dumps(sample.target, ensure_ascii=False),
        "answer": json.dumps(sample.answer, ensure_ascii=False),
        "value": _literal(value),
        "error": _literal(error),
    }
    return "{" + ", ".join(f'"{name}": {text}' for name, text in members.items()) + "}\n"


def _literal(value: Decimal | None) -> str:
    if value is None or not value.is_finite():
        return "null"
    return str(value) if len(value.as_tuple().digits) <= _MOST_INTEGER_DIGITS else f"{value:E}"


@dataclass(frozen=True)
class Merged:
    """What `merge_parts` did."""

    num_lines: int
    num_duplicates: int
    kept: Path | None
    """Where a file that was at the target before is now."""


def merge_parts(parts: Sequence[Path], target: Path) -> Merged:
    """Put lines into one file, sorted by `index`; of lines with the same index the first is kept.

    Args:
        parts: Files of lines that `prediction_line` wrote. They are removed at the end.
        target: The file; it appears in one step. One that is there is renamed to `.1`, `.2`, ...

    Raises:
        FileNotFoundError: If a part is missing; the parts that are there stay.
    """
    for part in parts:
        if not part.exists():
            raise FileNotFoundError(
                f"{part} with the predictions of another rank is not there. Write the predictions "
                "(PredictionFile.path, or the run folder) to a folder that all machines share."
            )
    places: dict[int, tuple[int, int]] = {}  # index -> number of the part, offset in bytes
    num_duplicates = 0
    for number, part in enumerate(parts):
        with part.open("rb") as lines:
            offset = 0
            for line in lines:
                # Other numbers may have more digits than `int` reads.
                index = int(json.loads(line, parse_int=str, parse_float=str)["index"])
                if places.setdefault(index, (number, offset)) != (number, offset):
                    num_duplicates += 1
                offset += len(line)
    with replaced_file(target) as temporary:
        opened = [part.open("rb") for part in parts]
        try:
            with temporary.open("wb") as merged:
                for index in sorted(places):
                    number, offset = places[index]
                    opened[number].seek(offset)
                    merged.write(opened[number].readline())
        finally:
            for part_file in opened:
                part_file.close()
        kept = keep_previous(target)
    for part in parts:
        part.unlink()
    return Merged(len(places), num_duplicates, kept)


class PredictionFile(Callback):
    """Writes what `predict` answers to a JSON-lines file, in the order of the input.

    Each line is `{"index", "prompt", "target", "answer", "value", "error"}`: `value` is the number
    in the answer, in the units of the target where a codec writes these otherwise, `error` that
    minus the number in the target, both exact, null where there is none.

    Lines go to a `.part` file beside the target while `predict` runs, so an interrupted
    run leaves what it has done; at the end they are sorted and put in place in one step. A file of
    an earlier run is kept under a number, `predictions.1.jsonl`.

    Call `trainer.predict(..., return_predictions=False)`, or Lightning keeps all answers in memory
    as well. `fast_dev_run` writes no file.

    Args:
        path: The file; `~` and `${VARIABLE}` are expanded. None: `predictions.jsonl` in the run
            folder. With several sets, each has its own file, `predictions_<set>.jsonl`.

    Raises:
        ValueError: If the path is a folder, or two sets have the same name.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.path = path
        self._folder = Path()
        self._targets: list[Path] = []
        self._parts: list[Path] = []
        self._open: list[TextIO] = []
        self._messages: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run folder, on all ranks."""
        self._messages = []
        if stage == "predict":
            self._folder = run_folder(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open this rank's part of each file."""
        if is_trial_run(trainer):
            self._messages.append("fast_dev_run: no file is written")
            return
        self._targets = self._files_of_sets(pl_module, len(trainer.num_predict_batches))
        self._parts = [
            _part_of(target, trainer.global_rank, trainer.world_size) for target in self._targets
        ]
        for part in self._parts:
            part.parent.mkdir(parents=True, exist_ok=True)
            if kept := keep_previous(part):
                self._messages.append(f"an interrupted run had left {part}: now {kept}")
        self._open = [part.open("w", encoding="utf-8", newline="\n") for part in self._parts]

    def _files_of_sets(self, pl_module: LightningModule, num_sets: int) -> list[Path]:
        file = (
            self._folder / "predictions.jsonl"
            if self.path is None
            else Path(expand_path(self.path, "PredictionFile.path"))
        )
        if file.is_dir():
            raise ValueError(
                f"PredictionFile.path {str(file)!r} is a folder; write the name of a file, such as "
                f"{str(file / 'predictions.jsonl')!r}."
            )
        if num_sets == 1:
            return [file]
        names = [
            as_answer_module(pl_module).set_name("predict", number).removeprefix("predict_")
            for number in range(num_sets)
        ]
        if len(set(names)) < num_sets:
            raise ValueError(
                f"the sets to predict are named {names}, so their predictions would go to the same "
                "file; give each set its own name."
            )
        return [file.with_name(f"{file.stem}_{name}{file.suffix}") for name in names]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the answers of a batch.

        Raises:
            TypeError: If `predict_step` returned something else than answers.
        """
        answers = answers_of(outputs)
        if answers is None:
            raise TypeError(
                f"{type(pl_module).__name__}.predict_step returned {type(outputs).__name__}; "
                "PredictionFile needs a dict of the lists index, prompt, target and answer."
            )
        if not self._open:  # a trial run
            return
        part = self._open[dataloader_idx]
        for sample in answers:
            part.write(prediction_line(sample, number_in(sample.target)))
        part.flush()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge the parts of all ranks, on rank 0."""
        self._close()
        trainer.strategy.barrier("PredictionFile: all parts are written")
        if trainer.is_global_zero:
            for target in self._targets:
                ranks = range(trainer.world_size)
                parts = [_part_of(target, rank, trainer.world_size) for rank in ranks]
                self._report(merge_parts(parts, target), target)
        trainer.strategy.barrier("PredictionFile: all parts are merged")

    def _report(self, merged: Merged, target: Path) -> None:
        if merged.kept is not None:
            self._messages.append(f"the earlier file is now {merged.kept}")
        if merged.num_duplicates:
            rank_zero_warn(
                f"PredictionFile: {merged.num_duplicates} lines had the index of an earlier line "
                f"and are not in {target}. (Ranks share the samples evenly by repeating a few.)"
            )
        self._messages.append(f"wrote {merged.num_lines} predictions to {target}")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keep what is done and say where; a file without a line is removed."""
        if not self._open:
            return
        self._close()
        begun = [part for part in self._parts if part.stat().st_size]
        for part in self._parts:
            if part not in begun:
                part.unlink()
        if begun:
            rank_zero_warn(
                "PredictionFile: predict did not end; the answers so far are in "
                f"{', '.join(map(str, begun))}."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say what was written, now that no progress bar is on the screen any more."""
        for message in self._messages:
            print(f"PredictionFile: {message}")
        self._messages = []

    def _close(self) -> None:
        for part in self._open:
            part.close()
        self._open = []


def _part_of(target: Path, rank: int, world_size: int) -> Path:
    rank_mark = f".rank{rank}" if world_size > 1 else ""
    return target.with_name(f"{target.name}{rank_mark}.part")
