import fsspec
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.backbones import FromConfig
from ntl_lightning.callbacks import LastCheckpoint
from ntl_lightning.data import Arithmetic
from ntl_lightning.evaluation import Generation

SETTINGS = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def fit(folder, *callbacks, ckpt_path=None, **settings):
    module = NumberAwareLM(
        backbone=FromConfig("llama", SETTINGS), generation=Generation(during_fit=False)
    )
    data = NumberDataModule(
        train=[Arithmetic("addition", 40, "train")],
        val=[Arithmetic("addition", 8, "val")],
        batch_size=8,
    )
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            **settings,
        }
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, trainer


def saved_step(folder):
    (path,) = folder.rglob("last*.ckpt")
    assert path.name == "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint["global_step"]


@pytest.mark.parametrize(("max_steps", "step"), [(3, 3), (5, 5), (7, 7), (10, 10)])
def test_the_last_step_is_saved_also_in_the_middle_of_an_epoch(tmp_path, max_steps, step):
    module, _ = fit(tmp_path, LastCheckpoint(), max_steps=max_steps, max_epochs=-1)
    assert saved_step(tmp_path) == step
    (path,) = tmp_path.rglob("*.ckpt")
    loaded = NumberAwareLM.load_from_checkpoint(path)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_the_last_step_is_saved_where_validation_follows_steps(tmp_path):
    fit(
        tmp_path,
        LastCheckpoint(),
        max_steps=7,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=3,
    )
    assert saved_step(tmp_path) == 7


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            raise RuntimeError("power cut")


def test_an_interrupted_run_leaves_its_last_step(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, Stop(), LastCheckpoint(), max_epochs=3)
    assert saved_step(tmp_path) == 2


def test_it_saves_every_so_many_steps_when_asked(tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, *rest):
            seen.append([saved_step(tmp_path)] if list(tmp_path.rglob("last.ckpt")) else [])

    fit(tmp_path, LastCheckpoint(every_n_train_steps=2), Watch(), max_steps=5, max_epochs=-1)
    assert seen == [[], [], [2], [2], [4]]
    assert saved_step(tmp_path) == 5


def test_a_trial_run_writes_nothing(tmp_path):
    fit(tmp_path, LastCheckpoint(), fast_dev_run=True)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_it_stands_beside_a_checkpoint_of_the_best_weights(tmp_path):
    best = ModelCheckpoint(monitor="val/loss", filename="best", auto_insert_metric_name=False)
    fit(tmp_path, LastCheckpoint(), best, max_epochs=2)
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_last_checkpoint_of_an_earlier_run_in_the_same_folder_is_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "last.ckpt").write_text("precious")
    fit(tmp_path, LastCheckpoint(), max_steps=1)
    assert (folder / "last.1.ckpt").read_text() == "precious"
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 1


def test_a_fit_goes_on_from_a_remote_checkpoint_and_keeps_what_is_in_the_folder(tmp_path):
    fit(tmp_path, LastCheckpoint(), max_steps=1)
    fsspec.filesystem("memory").pipe("/a.ckpt", next(tmp_path.rglob("last.ckpt")).read_bytes())
    with pytest.warns(UserWarning, match="is not empty"):
        fit(tmp_path, LastCheckpoint(), max_steps=2, ckpt_path="memory://a.ckpt")
    steps = {
        path.name: torch.load(path, weights_only=True)["global_step"]
        for path in tmp_path.rglob("*.ckpt")
    }
    assert steps == {"last.1.ckpt": 1, "last.ckpt": 2}
