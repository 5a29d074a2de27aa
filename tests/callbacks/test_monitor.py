import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from ntl_lightning.callbacks import LastCheckpoint, MonitorCheck
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.fake import FakeLM, Sample, loader

SAMPLES: list[Sample] = [("1 + 1 =", "2", "2"), ("1 + 2 =", "3", "4")]


def texts_of_warnings(run: Callable[[], None]) -> str:
    """What `run` warned of, Lightning's own warnings included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return "\n".join(str(warning.message) for warning in caught)


def weights_in(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["weight"])


@pytest.mark.parametrize(
    "callback",
    [ModelCheckpoint(monitor="val/mea"), EarlyStopping(monitor="val/mea")],
    ids=["checkpoint", "early stopping"],
)
def test_misspelt_monitor_fails_before_the_training_and_names_what_is_close(
    make_trainer: MakeTrainer, callback: Any
) -> None:
    class NeverRuns(FakeLM):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise AssertionError("the sanity check ran")

    trainer = make_trainer(MonitorCheck(), callback, enable_checkpointing=True)
    with pytest.raises(
        ValueError, match=rf"{type(callback).__name__} monitors 'val/mea'.*Close names are val/mae"
    ):
        trainer.fit(NeverRuns(), loader(SAMPLES), loader(SAMPLES))
    assert trainer.global_step == 0


def test_a_monitor_like_nothing_lists_all_names(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        MonitorCheck(), ModelCheckpoint(monitor="xyzzy"), enable_checkpointing=True
    )
    with pytest.raises(
        ValueError, match=r"No name is close\. All names: test/mae, train/loss, val"
    ):
        trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))


class Plateau(FakeLM):
    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor},
        }


def test_misspelt_monitor_of_a_schedule_fails_too(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau monitors 'val/mea'"):
        make_trainer(MonitorCheck()).fit(Plateau("val/mea"), loader(SAMPLES), loader(SAMPLES))


def test_a_schedule_that_waits_for_a_validation_does_not_end_the_fit(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = trainer_that_monitors(make_trainer, tmp_path, limit_val_batches=0, max_epochs=2)
    model = Plateau("val/mae")
    texts = texts_of_warnings(lambda: trainer.fit(model, loader(SAMPLES), loader(SAMPLES)))
    assert "ReduceLROnPlateau monitors 'val/mae', but this fit runs no validation" in texts
    assert trainer.global_step == 2


def test_names_that_are_logged_pass(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        MonitorCheck(extra_names=["val/mine"]),
        ModelCheckpoint(monitor="val/mae"),
        ModelCheckpoint(monitor="epoch", mode="max"),
        ModelCheckpoint(dirpath=tmp_path / "newest"),
        EarlyStopping(monitor="val/mine", strict=False),
        enable_checkpointing=True,
    )
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))


@pytest.mark.parametrize("names", [["val_0", "val_1"], ["val_easy", "val_far_out"]])
def test_names_of_several_validation_sets_pass(make_trainer: MakeTrainer, names: list[str]) -> None:
    class Several(FakeLM):
        def log_names(self) -> set[str]:
            return {"train/loss", "val/mae"}  # Before the data is there, no set is known.

    def fit(monitor: str) -> None:
        model = Several({name: {"mae": 1.0} for name in names})
        model.set_names["val"] = names
        trainer = make_trainer(MonitorCheck(), EarlyStopping(monitor=monitor))
        trainer.fit(model, loader(SAMPLES), [loader(SAMPLES), loader(SAMPLES)])
        assert trainer.global_step == 1

    fit(f"{names[1]}/mae")
    for wrong in (f"{names[1]}/mea", "val_/mae", "valid/mae", "val_/a/mae"):
        with pytest.raises(ValueError, match=f"monitors '{wrong}', which is never logged"):
            fit(wrong)


def trainer_that_monitors(make_trainer: MakeTrainer, tmp_path: Path, **settings: Any) -> pl.Trainer:
    return make_trainer(
        MonitorCheck(),
        EarlyStopping(monitor="val/mae"),
        ModelCheckpoint(tmp_path / "best", monitor="val/mae"),
        LastCheckpoint(),
        **{"enable_checkpointing": True, **settings},
    )


@pytest.mark.parametrize(
    ("settings", "validation", "reason"),
    [
        ({}, None, "the data have no validation set"),
        ({}, DataLoader([]), "the validation set is empty"),
        ({"limit_val_batches": 0}, loader(SAMPLES), "trainer.limit_val_batches is 0"),
        (
            {"check_val_every_n_epoch": 5, "max_epochs": 1},
            loader(SAMPLES),
            "trainer.check_val_every_n_epoch is 5, but the fit ends with epoch 1",
        ),
        (
            {"check_val_every_n_epoch": 5, "num_sanity_val_steps": 0},
            loader(SAMPLES),
            "trainer.check_val_every_n_epoch is 5, but the fit ends with epoch 3",
        ),
    ],
)
def test_a_fit_without_validation_warns_and_ends_and_its_last_state_is_saved(
    tmp_path: Path,
    make_trainer: MakeTrainer,
    settings: dict[str, Any],
    validation: DataLoader | None,
    reason: str,
) -> None:
    trainer = trainer_that_monitors(make_trainer, tmp_path, **{"max_epochs": 3, **settings})
    model = FakeLM()
    texts = texts_of_warnings(lambda: trainer.fit(model, loader(SAMPLES), validation))
    for owner in ("ModelCheckpoint", "EarlyStopping"):
        assert f"{owner} monitors 'val/mae', but this fit runs no validation: {reason}. " in texts
    assert trainer.global_step == settings.get("max_epochs", 3)
    (last,) = tmp_path.rglob("*.ckpt")
    assert weights_in(last) == model.weight.item() < 1


def test_early_stopping_is_as_strict_as_before_after_the_fit(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = trainer_that_monitors(make_trainer, tmp_path, limit_val_batches=0)
    texts_of_warnings(lambda: trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES)))
    assert [callback.strict for callback in trainer.early_stopping_callbacks] == [True]


def test_a_fit_that_ends_by_its_steps_before_the_first_validation_is_saved(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = trainer_that_monitors(
        make_trainer, tmp_path, max_epochs=-1, max_steps=2, check_val_every_n_epoch=4
    )
    texts = texts_of_warnings(lambda: trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES)))
    assert "runs no validation" not in texts
    (last,) = tmp_path.rglob("*.ckpt")
    assert last.name == "last.ckpt"


def test_validation_in_the_fifth_epoch_of_five_is_not_warned_of(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(
        MonitorCheck(),
        ModelCheckpoint(tmp_path, monitor="val/mae"),
        enable_checkpointing=True,
        check_val_every_n_epoch=5,
        max_epochs=5,
    )
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=4-step=5.ckpt"]


def test_two_processes_save_one_last_checkpoint(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = trainer_that_monitors(
        make_trainer, tmp_path, limit_val_batches=0, devices=2, strategy="ddp_fork"
    )
    texts_of_warnings(lambda: trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES)))
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
