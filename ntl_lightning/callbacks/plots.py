"""Pictures and sample answers of each evaluation, for TensorBoard and as PNG files."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor

from ntl_lightning.callbacks.answers import (
    Answer,
    answers_of,
    as_answer_module,
    difference,
    num_steps,
    number_in,
)
from ntl_lightning.callbacks.figures import (
    digit_confusion_figure,
    digit_places,
    predicted_against_true_figure,
)
from ntl_lightning.callbacks.files import is_trial_run, replaced_file, run_folder
from ntl_lightning.callbacks.report import number_text

__all__ = ["AnswerPlots", "sample_table", "shortened"]

_LONGEST_TEXT = 80
_LONGEST_EXACT = 12  # characters of an error; longer ones are rounded


@dataclass
class _Collected:
    answers: list[Answer] = field(default_factory=list)
    num_seen: int = 0


def shortened(text: str, length: int = _LONGEST_TEXT) -> str:
    """Cut out the middle of a long text.

    >>> shortened("What is 1234 + 5678? Answer:", 20)
    'What is 12 ... swer:'
    """
    if len(text) <= length:
        return text
    kept = length - 5
    return f"{text[: kept - kept // 3]} ... {text[len(text) - kept // 3 :]}"


def _cell(text: str | None) -> str:
    """A text as the literal content of a cell of a Markdown table."""
    if text is None:
        return ""
    text = shortened(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]()#+!|-])", r"\\\1", text)
    return " ↵ ".join(text.splitlines()).strip()


def sample_table(answers: list[Answer]) -> str:
    """Answers as a Markdown table: prompt, target, answer, and how far off the answer is."""
    lines = ["| prompt | target | answer | result |", "|---|---|---|---|"]
    for sample in answers:
        cells = (sample.prompt, sample.target, sample.answer, _result(sample))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _result(sample: Answer) -> str:
    target, answer = number_in(sample.target), sample.value
    if target is None:
        if sample.target is None:
            return ""
        return "ok" if sample.answer.strip() == sample.target.strip() else "wrong"
    if answer is None:
        return "no number"
    if answer == target:
        return "ok"
    error = difference(answer, target)
    exact = f"{error:f}"
    return f"off by {exact if len(exact) <= _LONGEST_EXACT else number_text(float(error))}"


class AnswerPlots(Callback):
    """Draws predicted against true values, the confusion of digits, and lists sample answers.

    For each set, after a validation or test:

    - a scatter of predicted against true values;
    - for each decimal place, which digits were predicted for each true digit;
    - a table of the first answers as text.

    The figures are written as PNG files to `figures/` in the run folder, where the latest replaces
    the one before, and, like the text, to each logger that takes them (TensorBoard), which keeps
    all. Rank 0 draws the samples that it evaluated itself. `fast_dev_run` writes no PNG.

    Args:
        every_n_validations: During a fit, draw after each n-th validation. `validate` and `test`
            always draw.
        max_samples: Draw the first so many samples of a set; the title says how many there were.
        num_text_samples: Length of the table of answers.

    Raises:
        ValueError: If a number is below 1 (`num_text_samples`: below 0).
    """

    def __init__(
        self,
        every_n_validations: int = 1,
        max_samples: int = 2000,
        num_text_samples: int = 16,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("every_n_validations", every_n_validations, 1),
            ("max_samples", max_samples, 1),
            ("num_text_samples", num_text_samples, 0),
        ):
            if value < least:
                raise ValueError(f"AnswerPlots.{name} must be at least {least}, got {value}.")
        self.every_n_validations = every_n_validations
        self.max_samples = max_samples
        self.num_text_samples = num_text_samples
        self._folder = Path()
        self._num_validations = 0
        self._collecting = False
        self._sets: dict[str, _Collected] = {}
        self._warned: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run folder, on all ranks."""
        self._folder = run_folder(trainer) / "figures"
        self._num_validations = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this validation is drawn."""
        due = True
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._num_validations += 1
            due = self._num_validations % self.every_n_validations == 0
        self._start(trainer, due and not trainer.sanity_checking)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to collect."""
        self._start(trainer, True)

    def _start(self, trainer: Trainer, due: bool) -> None:
        self._sets = {}
        self._collecting = due and trainer.is_global_zero

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the answers of a batch."""
        self._collect(pl_module, outputs, "val", dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the answers of a batch."""
        self._collect(pl_module, outputs, "test", dataloader_idx)

    def _collect(
        self, pl_module: LightningModule, outputs: object, stage: str, dataloader_idx: int
    ) -> None:
        if not self._collecting:
            return
        set_name = as_answer_module(pl_module).set_name(stage, dataloader_idx)
        answers = answers_of(outputs)
        if outputs == {}:  # generation is switched off in the fit
            return
        if answers is None:
            self._warn_once(f"the evaluation of {set_name!r} gives no answers, nothing is drawn.")
            return
        collected = self._sets.setdefault(set_name, _Collected())
        collected.num_seen += len(answers)
        collected.answers += answers[: self.max_samples - len(collected.answers)]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._draw_all(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._draw_all(trainer, pl_module)

    def _draw_all(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for set_name, collected in self._sets.items():
            self._draw(trainer, pl_module, set_name, collected)
        self._sets = {}

    def _draw(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        set_name: str,
        collected: _Collected,
    ) -> None:
        if self.num_text_samples:
            text = sample_table(collected.answers[: self.num_text_samples])
            for add_text in _logger_methods(trainer, "add_text"):
                add_text(f"{set_name}/sample_answers", text, num_steps(trainer, pl_module))
        pairs, unread = _numbers_of(collected.answers)
        if not pairs and not unread:
            self._warn_once(f"no target of {set_name!r} holds a number, no figures are drawn.")
            return

        step = num_steps(trainer, pl_module)
        title = f"{set_name} at step {step}"
        shown = self._shown_text(trainer, collected)
        numberless = len(collected.answers) - len(pairs) - len(unread)
        if numberless:
            shown += f", {numberless} of them without a number in the target"
        mae = _mean([abs(difference(answer, true)) for true, answer in pairs])
        self._publish(
            trainer,
            step,
            f"{set_name}/predicted_against_true",
            predicted_against_true_figure(
                pairs,
                unread,
                f"{title}: predicted against true\n{shown}\n"
                f"MAE {number_text(mae)} over {len(pairs)} answers with a number",
            ),
        )
        if not pairs:
            self._warn_once(f"no answer of {set_name!r} holds a number, no digits to compare.")
            return
        places, num_left_out = digit_places([true for true, _ in pairs])
        notes = "sign ignored, missing digits are 0, grey: not in the targets"
        if num_left_out:
            notes += f"; {num_left_out} more places not shown"
        self._publish(
            trainer,
            step,
            f"{set_name}/digit_confusion",
            digit_confusion_figure(
                pairs,
                places,
                f"{title}: digits by place\n{shown}; {len(pairs)} answers with a number\n{notes}",
            ),
        )

    def _shown_text(self, trainer: Trainer, collected: _Collected) -> str:
        shown, seen = len(collected.answers), collected.num_seen
        text = f"{seen} samples" if shown == seen else f"first {shown} of {seen} samples"
        if trainer.world_size > 1:
            text += f" (rank 0 of {trainer.world_size})"
        return text

    def _publish(self, trainer: Trainer, step: int, tag: str, figure: Figure) -> None:
        if not is_trial_run(trainer):
            path = self._folder / f"{tag.replace('/', '_')}.png"
            with replaced_file(path) as temporary:
                figure.savefig(temporary, format="png", dpi=100)
        for add_figure in _logger_methods(trainer, "add_figure"):
            add_figure(tag, figure, step)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_warn(f"AnswerPlots: {message}")


def _logger_methods(trainer: Trainer, name: str) -> Iterator[Callable[..., object]]:
    """The method of that name of each logger's writer that has one; TensorBoard's has."""
    for logger in trainer.loggers:
        method = getattr(getattr(logger, "experiment", None), name, None)
        if method is not None:
            yield method


def _in_float64(number: Decimal | None) -> Decimal | None:
    """The number, or None if it is beyond float64, as in the metrics."""
    return None if number is None or math.isinf(float(number)) else number


def _numbers_of(
    answers: list[Answer],
) -> tuple[list[tuple[Decimal, Decimal]], list[Decimal]]:
    """(True, predicted) of the answers with a number, and the true values of those without."""
    pairs: list[tuple[Decimal, Decimal]] = []
    unread: list[Decimal] = []
    for sample in answers:
        target, answer = _in_float64(number_in(sample.target)), _in_float64(sample.value)
        if target is not None and answer is not None:
            pairs.append((target, answer))
        elif target is not None:
            unread.append(target)
    return pairs, unread


def _mean(errors: list[Decimal]) -> float:
    return sum(float(error) for error in errors) / len(errors) if errors else math.nan
