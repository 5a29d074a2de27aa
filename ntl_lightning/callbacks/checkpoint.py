"""The checkpoint to go on from."""

from datetime import timedelta

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

__all__ = ["LastCheckpoint"]


class LastCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/last.ckpt` up to date: each epoch, at the very end, and when interrupted.

    Lightning's own checkpoint follows epochs and validations alone: with `max_steps`, the steps
    after the last whole epoch would be lost. Add a `ModelCheckpoint` with a `monitor` to
    `trainer.callbacks` to keep the best weights beside the last ones.

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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final weights unless they are saved already."""
        super().on_train_end(trainer, pl_module)
        if trainer.global_step != self._last_global_step_saved and self.dirpath is not None:
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                return
            trainer.save_checkpoint(self.format_checkpoint_name({}))

    def state_dict(self) -> dict[str, object]:
        """Nothing: the one file is always the latest, and another run has its own folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Nothing to take back."""
