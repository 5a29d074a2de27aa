"""Finds monitors that will never be logged before the training, not after it."""

import difflib
import re
from collections.abc import Iterator, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from ntl_lightning.callbacks.answers import as_answer_module

__all__ = ["MonitorCheck"]


class MonitorCheck(Callback):
    """Checks what checkpoints, early stopping and schedules monitor.

    - Before a fit: each `monitor` must be a name that the module logs; `val_<set>/...` is one where
      `val/...` is.
    - If a `val/...` name is monitored but this fit runs no validation, it warns, and early
      stopping and schedules wait for the name instead of ending the run with an error. Checkpoints
      of the best weights are then not written; `LastCheckpoint` keeps the last ones.

    Args:
        extra_names: Names that are logged by other callbacks, and so not known to the module.
    """

    def __init__(self, extra_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.extra_names = tuple(extra_names)
        self._made_lenient: list[EarlyStopping | LRSchedulerConfig] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the names.

        Raises:
            ValueError: If a callback or learning-rate schedule monitors a name that is not logged.
        """
        logged = as_answer_module(pl_module).log_names() | set(self.extra_names)
        for owner, name, own_names in _monitors(trainer):
            # Of several validation sets, each has a name of its own: val_0/mae, val_hard/mae.
            if {name, re.sub("^val_[^/]+/", "val/", name)} & (logged | own_names):
                continue
            close = difflib.get_close_matches(name, sorted(logged), n=3, cutoff=0.5)
            hint = f"Close names are {', '.join(close)}." if close else "No name is close."
            raise ValueError(
                f"{owner} monitors {name!r}, which is never logged. {hint} All names: "
                f"{', '.join(sorted(logged))}. (A name that another callback logs goes into "
                "MonitorCheck.extra_names.)"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if what is monitored waits for a validation that will not come."""
        reason = _why_no_validation(trainer)
        if reason is None:
            return
        for owner, name, _ in _monitors(trainer):
            if _is_of_validation(name):
                rank_zero_warn(
                    f"{owner} monitors {name!r}, but this fit runs no validation: {reason}. "
                    "It will do nothing."
                )
        self._made_lenient = [
            waiting
            for waiting in (*trainer.early_stopping_callbacks, *trainer.lr_scheduler_configs)
            if isinstance(waiting, EarlyStopping | LRSchedulerConfig)
            and waiting.strict
            and _is_of_validation(waiting.monitor or "")
        ]
        for waiting in self._made_lenient:
            waiting.strict = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make what had to wait as strict as before."""
        for waiting in self._made_lenient:
            waiting.strict = True
        self._made_lenient = []


def _monitors(trainer: Trainer) -> Iterator[tuple[str, str, set[str]]]:
    """What is monitored: by whom, which name, and the names it knows without any logging."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            yield type(callback).__name__, callback.monitor, {"epoch", "step"}
        elif isinstance(callback, EarlyStopping):
            yield type(callback).__name__, callback.monitor, set()
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor, set()


def _is_of_validation(name: str) -> bool:
    set_name = name.partition("/")[0]
    return set_name == "val" or set_name.startswith("val_")


def _why_no_validation(trainer: Trainer) -> str | None:
    """Why this fit, about to train, runs no validation; None if it will, as far as one knows."""
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches is 0"
    if not trainer.enable_validation:
        return "the data have no validation set"
    every = trainer.check_val_every_n_epoch
    last = trainer.max_epochs
    if every is not None and last is not None and last >= 0:
        first = (trainer.current_epoch // every + 1) * every
        if first > last:
            return f"trainer.check_val_every_n_epoch is {every}, but the fit ends with epoch {last}"
    if trainer.val_dataloaders is not None and sum(trainer.num_val_batches) == 0:
        return "the validation set is empty"
    return None
