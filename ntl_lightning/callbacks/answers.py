"""What the callbacks ask of the module: names of sets and metrics, and the answers of a batch."""

import decimal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, cast

from lightning.pytorch import LightningModule, Trainer

from ntl_lightning.numbers.text import last_number

__all__ = [
    "Answer",
    "AnswerModule",
    "answers_of",
    "as_answer_module",
    "difference",
    "num_steps",
    "number_in",
]

_EXACT_DIGITS = 10_000


class AnswerModule(Protocol):
    """A LightningModule whose evaluation and prediction steps return answers.

    `validation_step`, `test_step` and `predict_step` return a dict of four lists of equal length:
    `prompt`, `target` (None where it is not known), `answer` and `index` (the place in the set);
    and as a fifth one `value`, the number in each answer or None, where that is not simply its
    last one. An evaluation without answers, because generation is switched off, returns an empty
    dict.
    """

    def set_name(self, stage: str, dataloader_idx: int) -> str:
        """Name of a set in the log, for stage "val", "test" or "predict": "test_extrapolate"."""

    def log_names(self) -> set[str]:
        """All names that a fit with this module logs, its validation included: "val/mae"."""


@dataclass(frozen=True)
class Answer:
    """One sample and what the model said."""

    index: int
    prompt: str
    target: str | None
    answer: str
    value: Decimal | None
    """The number in the answer, in the units of the target."""


def as_answer_module(pl_module: LightningModule) -> AnswerModule:
    """The same object, for the type checker."""
    return cast("AnswerModule", pl_module)


def num_steps(trainer: Trainer, pl_module: LightningModule) -> int:
    """Optimizer steps behind the weights; a Trainer that only tests them counts none itself."""
    return int(getattr(pl_module, "trained_steps", trainer.global_step))


def answers_of(outputs: object) -> list[Answer] | None:
    """The answers that a step returned; None if it returned something else (say, only a loss)."""
    if not isinstance(outputs, Mapping) or "answer" not in outputs:
        return None
    columns: list[Iterable[object]] = [
        outputs[name] for name in ("index", "prompt", "target", "answer")
    ]
    values = outputs.get("value")
    columns.append(map(last_number, outputs["answer"]) if values is None else values)
    return [
        Answer(
            int(str(index)),
            str(prompt),
            None if target is None else str(target),
            str(answer),
            cast("Decimal | None", value),
        )
        for index, prompt, target, answer, value in zip(*columns, strict=True)
    ]


def number_in(text: str | None) -> Decimal | None:
    """The number of a target, read as the metrics read it."""
    return None if text is None else last_number(text)


def difference(answer: Decimal, target: Decimal) -> Decimal:
    """Answer minus target, exact unless it has over 10000 digits (1e99999 - 1).

    >>> difference(Decimal("12345678901234567890123456789.5"), Decimal("0.25"))
    Decimal('12345678901234567890123456789.25')
    """
    lowest = min(int(number.as_tuple().exponent) for number in (answer, target))
    digits = max(answer.adjusted(), target.adjusted()) - lowest + 2
    context = decimal.Context(
        prec=max(1, min(digits, _EXACT_DIGITS)),
        Emin=decimal.MIN_EMIN,
        Emax=decimal.MAX_EMAX,
        traps=[],
    )
    return context.subtract(answer, target)
