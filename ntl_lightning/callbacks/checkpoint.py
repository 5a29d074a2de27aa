"""The checkpoint to go on from."""

import os
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from ntl_lightning.callbacks.files import is_trial_run, keep_previous

__all__ = ["LastCheckpoint"]


class LastCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/last.ckpt` up to date: each epoch, at the very end, and when interrupted.

    Lightning's own checkpoint follows epochs and validations alone: with `max_steps`, the steps
    after the last whole epoch would be lost. Add a `ModelCheckpoint` with a `monitor` to
    `trainer.callbacks` to keep the best weights beside the last ones. Where runs share a folder
    (no logger, or a fixed version), the file of an earlier run is renamed, not overwritten.

    Args:
        every_n_train_steps: Save after every so many optimizer steps, instead of each epoch.
        train_time_interval: Save after so much time, instead of each epoch.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
    ) -> None:
        super().__init__(
            filename="last",
            enable_version_counter=False,
            save_on_exception=True,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rename what this run would overwrite, unless it goes on with that."""
        if is_trial_run(trainer) or not trainer.is_global_zero or self.dirpath is None:
            return
        if not self.goes_on(trainer) and (kept := keep_previous(self._path)):
            rank_zero_info(f"The {self._path} of an earlier run is now {kept}.")

    def goes_on(self, trainer: Trainer) -> bool:
        """Whether a fit goes on with the very checkpoint that it will write."""
        given = trainer.ckpt_path
        if given is None or self.dirpath is None:
            return False
        # What is given may be on a remote file system, where no path exists.
        return os.path.exists(given) and self._path.exists() and self._path.samefile(given)

    @property
    def _path(self) -> Path:
        return Path(self.dirpath or "", f"{self.filename}.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final weights unless they are saved already."""
        super().on_train_end(trainer, pl_module)
        if trainer.global_step != self._last_global_step_saved and not is_trial_run(trainer):
            trainer.save_checkpoint(self.format_checkpoint_name({}))

    def state_dict(self) -> dict[str, object]:
        """Nothing: the one file is always the latest, and another run has its own folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Nothing to take back."""
