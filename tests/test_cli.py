"""The command line as users run it: tiny models, a few steps, in this process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from transformers import PreTrainedTokenizerFast

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.backbones import FromConfig
from ntl_lightning.callbacks.checkpoint import LastCheckpoint
from ntl_lightning.cli import NumberCLI, main
from ntl_lightning.data import Arithmetic
from ntl_lightning.losses import CrossEntropy, ExpectedValue, LossTerm, Wasserstein
from ntl_lightning.losses.token_statistics import TokenStatistics
from ntl_lightning.numbers import ArithmeticTokenizer, PretrainedTokenizer
from ntl_lightning.optimization import Adafactor, AdamW, ConstantLR

pytestmark = [
    # Untrained models answer without a number, and correlations of nothing are not defined.
    pytest.mark.filterwarnings("ignore:NaN, because they are not defined"),
    pytest.mark.filterwarnings("ignore:AnswerPlots. no answer of"),
    pytest.mark.filterwarnings("ignore:.*is not empty"),
]

SETTINGS = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}


def addition(split: str, num_examples: int = 8) -> dict[str, Any]:
    return {
        "class_path": "ntl_lightning.data.Arithmetic",
        "init_args": {"operation": "addition", "num_examples": num_examples, "split": split},
    }


# No model setting here is the default of its class.
MODEL: dict[str, Any] = {
    "backbone": {
        "class_path": "ntl_lightning.backbones.FromConfig",
        "init_args": {"model_type": "gpt2", "settings": {"n_embd": 16, "n_layer": 1, "n_head": 2}},
    },
    "tokenizer": {
        "class_path": "ntl_lightning.numbers.ArithmeticTokenizer",
        "init_args": {"number_width": 3},
    },
    "number_tokens": "integers",
    "largest_number_token": 500,
    "loss_terms": [
        {"class_path": "ntl_lightning.losses.CrossEntropy"},
        {
            "class_path": "ntl_lightning.losses.Wasserstein",
            "init_args": {"weight": 0.7, "largest_distance": 9.0},
        },
    ],
    "generation": {"max_new_tokens": 6},
    "optimizer": {
        "class_path": "ntl_lightning.optimization.Adafactor",
        "init_args": {"lr": 0.01, "scale_parameter": False},
    },
    "lr_schedule": {
        "class_path": "ntl_lightning.optimization.ConstantLR",
        "init_args": {"warmup": 1},
    },
}
TEST_SETS = {"test", "test_other"}
DATA: dict[str, Any] = {
    "batch_size": 4,
    "train": [addition("train")],
    "val": [addition("val", 4)],
    "test": {"test": [addition("test", 4)], "other": [addition("test", 6)]},
}


def config(root: Path, name: str = "config.yaml", **sections: Any) -> Path:
    """A configuration file; sections replace those of the small default one."""
    trainer = {
        "default_root_dir": str(root / "runs"),
        "accelerator": "cpu",
        "max_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    content = {"seed_everything": 0, "trainer": trainer, "model": MODEL, "data": DATA}
    path = root / name
    path.write_text(yaml.safe_dump({**content, **sections}))
    return path


@dataclass
class Trained:
    """A run folder of `fit`, and the configuration it was made with."""

    config: Path
    run: Path
    printed: str

    @property
    def checkpoint(self) -> str:
        return str(self.run / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    path = config(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ntl_lightning"])
        main(["fit", "--config", str(path)])
    return Trained(path, root / "runs/lightning_logs/version_0", "")


class Instantiated(NumberCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command line says to the user beside warnings."""
    messages: list[str] = []
    monkeypatch.setattr("ntl_lightning.cli.rank_zero_info", messages.append)
    return messages


Fails = Callable[[Sequence[str | Path]], str]


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command that must fail: its error, checked to be one line for people."""

    def run(args: Sequence[str | Path]) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        assert stop.value.code == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1] == "(set NTL_DEBUG=1 for the traceback)"
        assert lines[-2].startswith("error: ")
        assert not any("Traceback" in line or line.startswith("usage") for line in lines)
        return lines[-2]

    return run


def model_settings(checkpoint: str) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True)["hyper_parameters"]


# What each command leaves behind


def test_fit_leaves_its_configuration_checkpoint_metrics_and_figures(trained: Trained) -> None:
    files = {str(path.relative_to(trained.run)) for path in trained.run.rglob("*")}
    assert {
        "config_fit.yaml",
        "checkpoints/last.ckpt",
        "metrics.json",
        "figures/val_predicted_against_true.png",
    } <= files
    metrics = json.loads((trained.run / "metrics.json").read_text())
    assert set(metrics) == {"train", "val"}
    assert {"loss", "cross_entropy", "ntl_was"} <= set(metrics["val"])
    assert metrics["val"]["num_samples"] == 4
    assert torch.load(trained.checkpoint, weights_only=True)["global_step"] == 2
    assert (
        yaml.safe_load((trained.run / "config_fit.yaml").read_text())["trainer"]["max_steps"] == 2
    )


def test_test_prints_a_table_and_writes_the_metrics_of_every_set(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    main(["test", "--config", str(trained.config), "--ckpt_path", "last"])
    assert said == [f"--ckpt_path last is {trained.checkpoint}."]
    printed = capsys.readouterr().out
    assert "Results of test" in printed
    assert "test_other" in printed

    (folder,) = trained.run.parent.glob("*/config_test.yaml")
    written = json.loads((folder.parent / "metrics.json").read_text())
    assert set(written) == {"test", "test_other"}
    assert (written["test"]["num_samples"], written["test_other"]["num_samples"]) == (4, 6)

    module = NumberAwareLM.load_from_checkpoint(trained.checkpoint)
    tokenizer = ArithmeticTokenizer(number_width=3)
    data = NumberDataModule(
        test={"test": [Arithmetic("addition", 4, "test")]},
        batch_size=4,
        tokenizer=tokenizer,
        number_tokens="integers",
        largest_number_token=500,
    )
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (expected,) = trainer.test(module, datamodule=data, verbose=False)
    for name in ("loss", "cross_entropy", "ntl_was", "perplexity"):
        assert written["test"][name] == pytest.approx(expected[f"test/{name}"], rel=1e-6)


def test_validate_reports_on_the_validation_set(trained: Trained, tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    main(["validate", "-c", str(trained.config), root, "--ckpt_path", trained.checkpoint])
    (file,) = tmp_path.rglob("metrics.json")
    assert (file.parent / "config_validate.yaml").exists()
    assert set(json.loads(file.read_text())) == {"val"}


def test_predict_writes_answers_in_the_order_of_the_input(trained: Trained, tmp_path: Path) -> None:
    prompts = ["1+1=", "100+200=", "12+3=", "7+7=", "99+99=", "5+10="]
    lines = [json.dumps({"q": prompt}) for prompt in prompts]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    source = {
        "class_path": "ntl_lightning.data.JsonLines",
        "init_args": {"path": str(tmp_path / "asked.jsonl"), "prompt": "q", "target": None},
    }
    path = config(tmp_path, data={"batch_size": 4, "predict": [source]})
    main(["predict", "--config", str(path), "--ckpt_path", trained.checkpoint])
    (file,) = tmp_path.rglob("predictions.jsonl")
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3, 4, 5]
    assert {answer["target"] for answer in answers} == {None}


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_fast_dev_run_leaves_nothing(trained: Trained, tmp_path: Path, command: str) -> None:
    root = f"--trainer.default_root_dir={tmp_path / 'root'}"
    options = [root, "--trainer.fast_dev_run", "1", "--ckpt_path", trained.checkpoint]
    main([command, "--config", str(trained.config), *options])
    assert not list(tmp_path.rglob("*.*"))


# Checkpoints and configurations that disagree


def test_the_checkpoint_alone_decides_tokenizer_and_model(trained: Trained, tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    cli = NumberCLI(
        [
            "test",
            "--ckpt_path",
            trained.checkpoint,
            root,
            "--trainer.limit_test_batches=1",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
        ]
    )
    assert cli.model.objective.terms == (
        CrossEntropy(),
        Wasserstein(weight=0.7, largest_distance=9.0),
    )
    assert cli.model.optimizer_spec == Adafactor(lr=0.01, scale_parameter=False)
    assert cli.model.lr_schedule == ConstantLR(warmup=1)
    assert cli.model.language_model.config.model_type == "gpt2"
    # The data side follows through the links.
    assert cli.datamodule.tokenizer.tokenize("12+345=") == ["1", "2", "+", "345", "="]
    assert cli.datamodule.vocabulary == cli.model.vocabulary
    assert cli.model.vocabulary.largest == 500
    assert cli.datamodule.architecture == "causal"


OTHER_SETTINGS = {
    "another value": (["--model.largest_number_token=99"], "model.largest_number_token is 500"),
    "null": (["--model.largest_number_token=null"], "null was asked for"),
    "the default of the module": (["--model.number_tokens=digits"], 'is "integers" in the'),
    "the default of a class": (
        ["--model.optimizer.scale_parameter=true"],
        "model.optimizer.init_args.scale_parameter is false in the checkpoint, true was asked for",
    ),
    "of a linked object": (
        ["--model.tokenizer.number_width=2"],
        "model.tokenizer.init_args.number_width is 3 in the checkpoint, 2 was asked for",
    ),
    "inside a list": (
        [
            "--model.loss_terms=[{class_path: CrossEntropy}, {class_path: Wasserstein, init_args: "
            "{largest_distance: 9.0}}]"
        ],
        "model.loss_terms[1].init_args.weight is 0.7 in the checkpoint, 0.3 was asked for",
    ),
    "the length of a list": (
        ["--model.loss_terms=[{class_path: CrossEntropy}]"],
        "model.loss_terms is [",
    ),
    "inside a dictionary": (
        ["--model.backbone.settings={n_embd: 32, n_layer: 1, n_head: 2}"],
        "model.backbone.init_args.settings.n_embd is 16 in the checkpoint, 32 was asked for",
    ),
    "a setting that was not there": (
        ["--model.backbone.settings={n_embd: 16, n_layer: 1, n_head: 2, n_inner: 8}"],
        "model.backbone.init_args.settings.n_inner is null in the checkpoint, 8 was asked for",
    ),
    "in a plain dataclass": (["--model.generation.num_beams=2"], "model.generation.num_beams is 1"),
    "another class": (
        ["--model.lr_schedule=CosineLR"],
        'model.lr_schedule.class_path is "ntl_lightning.optimization.ConstantLR"',
    ),
}


@pytest.mark.parametrize(("options", "message"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_fit_refuses_to_go_on_with_other_model_settings(
    trained: Trained, tmp_path: Path, error_of: Fails, options: list[str], message: str
) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    error = error_of(["fit", root, "--ckpt_path", trained.checkpoint, *options])
    assert message in error
    assert error.count("was asked for") == 1
    assert "start a new run without --ckpt_path" in error
    assert not list(tmp_path.iterdir())


def test_every_contradiction_is_named_and_files_count_too(
    trained: Trained, tmp_path: Path, error_of: Fails
) -> None:
    model = {
        **MODEL,
        "largest_number_token": 7,
        "optimizer": {"class_path": "ntl_lightning.optimization.AdamW", "init_args": {"lr": 0.01}},
    }
    path = config(tmp_path, model=model)
    error = error_of(
        ["fit", "-c", path, "--model.lr_schedule.warmup=3", "--ckpt_path", trained.checkpoint]
    )
    assert error.count("was asked for") == 3
    for key in (
        "model.largest_number_token",
        "model.optimizer.class_path",
        "model.lr_schedule.init_args.warmup",
    ):
        assert f"{key} is " in error


def test_fit_goes_on_with_equal_settings(trained: Trained, tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    cli = NumberCLI(
        [
            "fit",
            "-c",
            str(trained.config),
            root,
            "--ckpt_path",
            trained.checkpoint,
            "--trainer.max_steps=4",
        ]
    )
    assert cli.trainer.global_step == 4
    assert cli.trainer.current_epoch == 2
    # What was trained stays as it was.
    assert torch.load(trained.checkpoint, weights_only=True)["global_step"] == 2


def test_fit_takes_settings_that_were_not_asked_for_from_the_checkpoint(
    trained: Trained, tmp_path: Path
) -> None:
    path = config(tmp_path, model={})
    cli = NumberCLI(
        ["fit", "-c", str(path), "--ckpt_path", trained.checkpoint, "--trainer.max_steps=3"]
    )
    assert cli.trainer.global_step == 3
    assert cli.model.optimizer_spec == Adafactor(lr=0.01, scale_parameter=False)
    (saved,) = tmp_path.rglob("last.ckpt")
    assert model_settings(str(saved))["loss_terms"][1]["init_args"]["weight"] == 0.7
    # And so on: a third run is told the same as the first.
    again = ["fit", "-c", str(trained.config), "--ckpt_path", str(saved), "--trainer.max_steps=4"]
    assert NumberCLI([*again, f"--trainer.default_root_dir={tmp_path}"]).trainer.global_step == 4


def test_an_option_of_a_class_that_only_the_checkpoint_names(
    trained: Trained, tmp_path: Path
) -> None:
    # AdamW, the default, has no scale_parameter.
    root = f"--trainer.default_root_dir={tmp_path}"
    cli = NumberCLI(
        [
            "test",
            "-c",
            str(config(tmp_path, model={})),
            root,
            "--ckpt_path",
            trained.checkpoint,
            "--model.optimizer.scale_parameter=true",
        ]
    )
    assert cli.model.optimizer_spec == Adafactor(lr=0.01, scale_parameter=True)


def test_the_checkpoint_is_used_where_options_complete_the_model(
    tokenizer_folder: Path, tmp_path: Path, said: list[str]
) -> None:
    # Without its option, PretrainedTokenizer lacks its folder.
    tokenizer = {"class_path": "ntl_lightning.numbers.PretrainedTokenizer"}
    path = config(tmp_path, model={**MODEL, "tokenizer": tokenizer})
    options = ["-c", str(path), f"--model.tokenizer.init_args.name_or_path={tokenizer_folder}"]
    NumberCLI(["fit", *options])
    cli = NumberCLI(["test", *options, "--ckpt_path", "last"])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert said == [f"--ckpt_path last is {checkpoint}."]
    assert cli.model.trained_steps == 2
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, value in cli.model.state_dict().items():
        assert torch.equal(saved[name], value)
    cli = NumberCLI(["fit", *options, "--ckpt_path", "last", "--trainer.max_steps=3"])
    assert torch.load(cli.trainer.checkpoint_callback.best_model_path)["global_step"] == 3
    assert cli.trainer.fit_loop.epoch_loop.total_batch_idx == 2
    # Classes that are not asked for are those of the checkpoint.
    bare = config(tmp_path, "bare.yaml", model={"tokenizer": tokenizer})
    options[1] = str(bare)
    cli = Instantiated(["test", *options, "--ckpt_path", str(checkpoint)])
    assert cli.model.optimizer_spec == Adafactor(lr=0.01, scale_parameter=False)
    assert cli.model.objective.terms[1] == Wasserstein(weight=0.7, largest_distance=9.0)


def test_other_commands_use_what_was_asked_for_and_say_so(
    trained: Trained, tmp_path: Path, said: list[str]
) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    terms = "[{class_path: CrossEntropy}, {class_path: Wasserstein, init_args: {weight: 0.1, "
    terms += "largest_distance: 5}}]"
    cli = NumberCLI(
        [
            "test",
            "-c",
            str(trained.config),
            root,
            "--ckpt_path",
            trained.checkpoint,
            f"--model.loss_terms={terms}",
            "--model.largest_number_token=100",
        ]
    )
    assert cli.model.objective.terms == (
        CrossEntropy(),
        Wasserstein(weight=0.1, largest_distance=5.0),
    )
    assert cli.model.vocabulary.largest == 100
    assert cli.datamodule.vocabulary == cli.model.vocabulary
    (message,) = said
    assert message.startswith("What was asked for is used: ")
    for key in ("largest_number_token", "loss_terms[1].init_args.weight"):
        assert f"model.{key} is " in message


def test_weights_that_do_not_fit_what_was_asked_for(
    trained: Trained, tmp_path: Path, error_of: Fails
) -> None:
    error = error_of(
        [
            "test",
            "-c",
            config(tmp_path),
            "--ckpt_path",
            trained.checkpoint,
            "--model.backbone.settings={n_embd: 32, n_layer: 1, n_head: 2}",
        ]
    )
    assert "do not fit the model: model.backbone.init_args.settings.n_embd is 16" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tokenizer.number_width", "2"),
        ("number_tokens", "digits"),
        ("largest_number_token", "77"),
        (
            "backbone",
            "{class_path: FromConfig, init_args: {model_type: t5, settings: "
            "{d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2}}}",
        ),
    ],
)
def test_linked_settings_reach_the_data(
    trained: Trained, tmp_path: Path, option: str, value: str
) -> None:
    for command, more in (("fit", []), ("test", ["--ckpt_path", trained.checkpoint])):
        arguments = [command, "-c", str(config(tmp_path)), *more, f"--model.{option}={value}"]
        cli = Instantiated(arguments)
        assert cli.datamodule.tokenizer.get_vocab() == cli.model.tokenizer.get_vocab()
        assert cli.datamodule.vocabulary.kind == cli.model.vocabulary.kind
        assert cli.datamodule.vocabulary.largest == cli.model.vocabulary.largest
        assert cli.datamodule.vocabulary.values == cli.model.vocabulary.values
        assert cli.datamodule.architecture == cli.model.architecture
    found = {
        "tokenizer.number_width": str(len("99"))
        if "99" in cli.datamodule.tokenizer.get_vocab()
        else "",
        "number_tokens": cli.datamodule.vocabulary.kind,
        "largest_number_token": f"{cli.datamodule.vocabulary.largest:g}",
        "backbone": value if cli.datamodule.architecture == "seq2seq" else "",
    }
    assert found[option] == value


@pytest.mark.parametrize("model", [MODEL, {}], ids=["other settings", "defaults"])
def test_a_printed_configuration_makes_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any]
) -> None:
    path = config(tmp_path, model=model)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), "--print_config"])
    assert stop.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    models = [NumberCLI(["fit", "-c", str(file)]).model for file in (path, printed)]
    for name in ("objective.terms", "optimizer_spec", "lr_schedule", "generation", "backbone"):
        first, second = (attrgetter(name)(model) for model in models)
        assert first == second
    if not model:
        assert models[1].objective.terms == (CrossEntropy(), Wasserstein())
        assert models[1].optimizer_spec == AdamW()
    # What went through the checkpoints is the same too.
    logged = [file.read_text() for file in sorted(tmp_path.rglob("metrics.json"))]
    assert logged[0] == logged[1]


def test_classes_do_not_inherit_arguments_of_the_default_class(tmp_path: Path) -> None:
    # AdamW's weight decay is 0.01, CosineLR's warm-up 0.05, CrossEntropy's weight 1.
    model = {
        "optimizer": {"class_path": "ntl_lightning.optimization.Adafactor"},
        "lr_schedule": {"class_path": "ntl_lightning.optimization.ConstantLR"},
        "loss_terms": [
            {"class_path": "ntl_lightning.losses.Wasserstein"},
            {"class_path": "ntl_lightning.losses.CrossEntropy"},
        ],
    }
    cli = NumberCLI(["fit", "-c", str(config(tmp_path, model=model)), "--trainer.fast_dev_run=1"])
    assert cli.model.optimizer_spec == Adafactor()
    assert cli.model.lr_schedule == ConstantLR()
    assert cli.model.objective.terms == (Wasserstein(), CrossEntropy())


@pytest.mark.filterwarnings("ignore:test without --ckpt_path")
@pytest.mark.parametrize("way", ["option", "file"])
@pytest.mark.parametrize("start", ["defaults", "checkpoint"])
def test_lists_can_be_added_to(trained: Trained, tmp_path: Path, way: str, start: str) -> None:
    (tmp_path / "more.yaml").write_text("model: {loss_terms+: [{class_path: ExpectedValue}]}")
    ways = {
        "option": ["--model.loss_terms+=ExpectedValue"],
        "file": ["-c", str(tmp_path / "more.yaml")],
    }
    options = [*ways[way], f"--trainer.default_root_dir={tmp_path}", "--trainer.fast_dev_run=1"]
    expected: tuple[LossTerm, ...] = (CrossEntropy(), Wasserstein(), ExpectedValue())
    if start == "checkpoint":
        options += ["--ckpt_path", trained.checkpoint]
        expected = (CrossEntropy(), Wasserstein(weight=0.7, largest_distance=9.0), ExpectedValue())
    cli = Instantiated(["test", *options])
    assert cli.model.objective.terms == expected


def test_a_printed_configuration_knows_the_checkpoint(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["test", "--ckpt_path", trained.checkpoint, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["largest_number_token"] == 500
    assert printed["model"]["loss_terms"][1]["init_args"]["weight"] == 0.7


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_commands_without_a_checkpoint_warn(trained: Trained, tmp_path: Path, command: str) -> None:
    fitted = trained.run / "config_fit.yaml"
    root = f"--trainer.default_root_dir={tmp_path}"
    with pytest.warns(UserWarning, match=f"^{command} without --ckpt_path: the weights that model"):
        main([command, "--config", str(fitted), root])


def test_fit_without_a_checkpoint_says_nothing(trained: Trained, said: list[str]) -> None:
    # Warnings are errors in these tests.
    main(["fit", "--config", str(trained.config), "--trainer.fast_dev_run=1"])
    assert said == []


# Runs that share a folder


def test_nothing_is_lost_where_the_version_of_the_logger_is_fixed(tmp_path: Path) -> None:
    logger = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": str(tmp_path / "logs"), "name": "a", "version": "b"},
    }
    path = config(tmp_path)
    trainer = {**yaml.safe_load(path.read_text())["trainer"], "logger": logger}
    path = config(tmp_path, trainer=trainer)
    main(["fit", "-c", str(path), "--model.optimizer.lr=0.1"])
    main(["fit", "-c", str(path), "--model.optimizer.lr=0.2"])
    # `last` is found below the folder of the logger.
    main(["test", "-c", str(path), "--model.optimizer.lr=0.2", "--ckpt_path", "last"])
    run = tmp_path / "logs" / "a" / "b"
    for config_name, checkpoint_name, lr in (
        ("config_fit.1.yaml", "last.1.ckpt", 0.1),
        ("config_fit.yaml", "last.ckpt", 0.2),
    ):
        kept = yaml.safe_load((run / config_name).read_text())
        assert kept["model"]["optimizer"]["init_args"]["lr"] == lr
        settings = model_settings(str(run / "checkpoints" / checkpoint_name))
        assert settings["optimizer"]["init_args"]["lr"] == lr
    assert (run / "config_test.yaml").exists()
    assert set(json.loads((run / "metrics.1.json").read_text())) == {"train", "val"}
    assert set(json.loads((run / "metrics.json").read_text())) == {"train", "val"} | TEST_SETS


def test_classes_in_files_of_their_own_are_kept_in_the_configuration(tmp_path: Path) -> None:
    backbone = tmp_path / "backbone.yaml"
    backbone.write_text(yaml.safe_dump(MODEL["backbone"]))
    # Twice, for the first run leaves no file that the second would have to overwrite.
    for _ in range(2):
        path = config(tmp_path, model={**MODEL, "backbone": str(backbone)})
        main(["fit", "-c", str(path), "--trainer.logger=false"])
    runs = tmp_path / "runs"
    assert {file.name for file in runs.glob("*.yaml")} == {"config_fit.yaml", "config_fit.1.yaml"}
    kept = yaml.safe_load((runs / "config_fit.yaml").read_text())["model"]["backbone"]
    assert kept["class_path"] == MODEL["backbone"]["class_path"]
    assert kept["init_args"]["settings"] == MODEL["backbone"]["init_args"]["settings"]


def test_going_on_in_the_same_folder_keeps_one_checkpoint(tmp_path: Path) -> None:
    path = str(config(tmp_path))
    main(["fit", "-c", path, "--trainer.logger=false"])
    main(["fit", "-c", path, "--trainer.logger=false", "--trainer.max_steps=4", "--ckpt_path=last"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4


def test_going_on_from_elsewhere_keeps_what_is_in_the_folder(
    trained: Trained, tmp_path: Path
) -> None:
    path = str(config(tmp_path))
    main(["fit", "-c", path, "--trainer.logger=false"])
    checkpoint = ["--ckpt_path", trained.checkpoint, "--trainer.max_steps=4"]
    main(["fit", "-c", path, "--trainer.logger=false", *checkpoint])
    steps = {
        file.name: torch.load(file, weights_only=True)["global_step"]
        for file in tmp_path.rglob("*.ckpt")
    }
    assert steps == {"last.1.ckpt": 2, "last.ckpt": 4}


def test_a_second_run_has_a_folder_of_its_own(trained: Trained, tmp_path: Path) -> None:
    path = str(config(tmp_path))
    main(["fit", "-c", path])
    main(["fit", "-c", path])
    runs = tmp_path / "runs/lightning_logs"
    assert sorted(file.relative_to(runs) for file in runs.rglob("*.ckpt")) == [
        Path("version_0/checkpoints/last.ckpt"),
        Path("version_1/checkpoints/last.ckpt"),
    ]


def test_last_is_the_newest_checkpoint(trained: Trained, tmp_path: Path, said: list[str]) -> None:
    for age, version in ((30, "version_0"), (10, "version_1"), (20, "mine")):
        target = tmp_path / "lightning_logs" / version / "checkpoints" / "last.ckpt"
        target.parent.mkdir(parents=True)
        target.write_bytes(Path(trained.checkpoint).read_bytes())
        os.utime(target, (time.time() - age, time.time() - age))
    root = f"--trainer.default_root_dir={tmp_path}"
    main(["validate", "-c", str(trained.config), root, "--ckpt_path=last"])
    newest = tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt"
    assert said == [f"--ckpt_path last is {newest}."]


def logger_of(save_dir: Path, class_name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "class_path": f"lightning.pytorch.loggers.{class_name}",
        "init_args": {"save_dir": str(save_dir), **arguments},
    }


@pytest.mark.parametrize("other", ["", "lightning_logs/version_0/", "a/b/"])
def test_last_is_not_that_of_an_experiment_in_a_folder_below(
    trained: Trained, tmp_path: Path, error_of: Fails, other: str
) -> None:
    target = tmp_path / f"runs/quickstart/{other}checkpoints/last.ckpt"
    target.parent.mkdir(parents=True)
    target.write_bytes(Path(trained.checkpoint).read_bytes())
    error = error_of(["test", "-c", config(tmp_path), "--ckpt_path=last"])
    assert f"there is no last.ckpt in {tmp_path / 'runs/checkpoints'}, " in error


@pytest.mark.parametrize(
    ("class_name", "arguments", "folder"),
    [
        ("TensorBoardLogger", {}, "lightning_logs/version_0"),
        ("TensorBoardLogger", {"name": "mine"}, "mine/version_0"),
        ("TensorBoardLogger", {"name": "a/b", "version": "third"}, "a/b/third"),
        ("TensorBoardLogger", {"name": ""}, "version_0"),
        ("CSVLogger", {"name": "[x]"}, "[x]/version_0"),
    ],
)
def test_last_is_found_where_the_logger_put_it(
    tmp_path: Path, said: list[str], class_name: str, arguments: dict[str, str], folder: str
) -> None:
    trainer = yaml.safe_load(config(tmp_path).read_text())["trainer"]
    trainer["logger"] = logger_of(tmp_path / "logs[1]", class_name, **arguments)
    path = str(config(tmp_path, trainer=trainer))
    NumberCLI(["fit", "-c", path])
    written = tmp_path / "logs[1]" / folder / "checkpoints/last.ckpt"
    assert list(tmp_path.rglob("last.ckpt")) == [written]
    Instantiated(["test", "-c", path, "--ckpt_path=last"])
    assert said == [f"--ckpt_path last is {written}."]
    # Another name is another experiment.
    trainer["logger"]["init_args"]["name"] = "other"
    path = str(config(tmp_path, trainer=trainer))
    with pytest.raises(
        ValueError, match=r"there is no last.ckpt in .*/logs\S*/other/\*/checkpoints"
    ):
        Instantiated(["test", "-c", path, "--ckpt_path=last"])


def test_last_below_the_current_folder(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["-c", str(trained.config), "--trainer.default_root_dir=null"]
    NumberCLI(["fit", *options, "--trainer.logger=false"])
    Instantiated(["test", *options, "--ckpt_path=last"])
    assert said == [f"--ckpt_path last is {tmp_path / 'checkpoints/last.ckpt'}."]


# Modules built in Python


@dataclass(frozen=True)
class Noted(LossTerm):
    """A user's own term with a path."""

    weight: float = 0.1
    notes: Path = Path("notes.txt")

    def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
        return (statistics.expected_value() - statistics.label_values).abs()


class Side(Enum):
    ABOVE = "answers that are too large"
    BELOW = "answers that are too small"


@dataclass(frozen=True)
class Sided(LossTerm):
    """A user's own term with a choice."""

    side: Side = Side.ABOVE

    def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
        error = statistics.expected_value() - statistics.label_values
        return error.clamp(min=0) if self.side is Side.ABOVE else error.clamp(max=0).abs()


def python_built(tokenizer_folder: Path) -> NumberAwareLM:
    return NumberAwareLM(
        backbone=FromConfig(model_type="llama", settings=SETTINGS),
        tokenizer=PretrainedTokenizer(str(tokenizer_folder)),
        loss_terms=[
            CrossEntropy(),
            Wasserstein(weight=np.float64(0.7)),
            Noted(notes=Path("a") / "b.txt"),
        ],
        largest_number_token=np.float32(500),
        optimizer=AdamW(lr=0.02),
    )


def python_data(tokenizer_folder: Path) -> NumberDataModule:
    return NumberDataModule(
        batch_size=4,
        train=[Arithmetic("addition", 8, "train")],
        val=[Arithmetic("addition", 4, "val")],
        test={"test": [Arithmetic("addition", 4, "test")]},
        tokenizer=PretrainedTokenizer(str(tokenizer_folder)),
        largest_number_token=500,
    )


def quiet_trainer(root: Path, **settings: Any) -> Trainer:
    return Trainer(
        default_root_dir=root,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def assert_plain(value: object) -> None:
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert type(value) in (str, int, float, bool, type(None))


def test_modules_built_in_python_are_saved_as_plain_values(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    ArithmeticTokenizer(number_width=2).load().save_pretrained(folder)
    module, data = python_built(folder), python_data(folder)
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[LastCheckpoint()])
    trainer.fit(module, datamodule=data)
    checkpoint = str(tmp_path / "checkpoints" / "last.ckpt")
    # As `torch.load` and Lightning read files by default: no code is run.
    settings = model_settings(checkpoint)
    assert_plain(settings)
    assert settings["tokenizer"]["init_args"]["name_or_path"] == str(folder)

    again = NumberAwareLM.load_from_checkpoint(checkpoint)
    assert again.objective.terms == module.objective.terms
    assert again.optimizer_spec == module.optimizer_spec
    assert again.tokenizer.get_vocab() == module.tokenizer.get_vocab()
    assert again.tokenizer.tokenize("34+5") == module.tokenizer.tokenize("34+5") == ["34", "+", "5"]
    assert again.vocabulary == module.vocabulary
    answers = [
        quiet_trainer(tmp_path).predict(m, datamodule=python_data(folder)) for m in (module, again)
    ]
    assert answers[0] == answers[1]

    resumed = python_built(folder)
    trainer = quiet_trainer(tmp_path / "resumed", max_steps=4)
    trainer.fit(resumed, datamodule=python_data(folder), ckpt_path=checkpoint)
    assert trainer.global_step == 4

    # The command line goes on with it too, whichever way classes are named there.
    model = {
        "loss_terms": [
            {"class_path": "ntl_lightning.losses.CrossEntropy"},
            {"class_path": "ntl_lightning.losses.Wasserstein", "init_args": {"weight": 0.7}},
            {
                "class_path": f"{__name__}.Noted",
                "init_args": {"notes": "a/b.txt"},
            },
        ]
    }
    path = config(tmp_path, model=model)
    cli = NumberCLI(["fit", "-c", str(path), "--ckpt_path", checkpoint, "--trainer.max_steps=3"])
    assert cli.trainer.global_step == 3
    assert cli.model.objective.terms == module.objective.terms


def test_numpy_numbers_in_an_optimizer_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    optimizer = AdamW(lr=np.float64(0.02), weight_decay=np.float32(0.5))
    module = NumberAwareLM(FromConfig("llama", SETTINGS), optimizer=optimizer)
    data = NumberDataModule(train=[Arithmetic("addition", 8, "train")], batch_size=4)
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert model_settings(str(tmp_path / "a.ckpt"))["optimizer"]["init_args"]["lr"] == 0.02


def test_enum_settings_are_read_back(tmp_path: Path) -> None:
    terms = [Sided(side=Side.BELOW)]
    module = NumberAwareLM(FromConfig("llama", SETTINGS), loss_terms=terms)
    module.configure_model()
    trainer = quiet_trainer(tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    again = NumberAwareLM.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.objective.terms == (Sided(side=Side.BELOW),)


def test_objects_in_place_of_settings_are_refused() -> None:
    tokenizer = ArithmeticTokenizer().load()
    with pytest.raises(TypeError, match=r"model\.tokenizer must be a Tokenizer, got .*; give"):
        NumberAwareLM(tokenizer=tokenizer)  # type: ignore[arg-type]

    @dataclass(frozen=True)
    class Holder(LossTerm):
        held: object = None

        def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
            return statistics.label_values

    with pytest.raises(TypeError, match=r"model.loss_terms\[0\].held must be made of plain"):
        NumberAwareLM(loss_terms=[Holder(held=tokenizer)])


# What is refused before or at the start of a run


def test_t5_in_float16_is_refused(tmp_path: Path, error_of: Fails) -> None:
    settings = "{d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2}"
    backbone = f"{{class_path: FromConfig, init_args: {{model_type: t5, settings: {settings}}}}}"
    error = error_of(
        [
            "fit",
            "-c",
            config(tmp_path),
            "--trainer.precision=16-true",
            f"--model.backbone={backbone}",
        ]
    )
    assert "the activations of t5 models leave float16's range" in error
    assert "trainer.precision=16-true" in error
    assert "use bf16-mixed" in error


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_t5_in_float16_is_refused_on_any_device(precision: str) -> None:
    # On a CPU, Lightning itself turns 16-mixed into bfloat16.
    module = NumberAwareLM(
        FromConfig("t5", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2})
    )
    module.configure_model()
    module._trainer = SimpleNamespace(precision=precision)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the activations of t5 models leave"):
        module.on_fit_start()


def test_a_misspelt_monitor_stops_before_training(tmp_path: Path, error_of: Fails) -> None:
    best = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"monitor": "val/mea", "filename": "best"},
    }
    path = config(tmp_path)
    trainer = {**yaml.safe_load(path.read_text())["trainer"], "callbacks": [best]}
    error = error_of(["fit", "-c", config(tmp_path, trainer=trainer)])
    assert "ModelCheckpoint monitors 'val/mea', which is never logged" in error
    assert "val/mae" in error
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("monitor", ["val/mae_imputed", "val/training_mean_mae"])
def test_the_weights_that_do_best_are_kept(tmp_path: Path, monitor: str) -> None:
    best = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"monitor": monitor, "filename": "best"},
    }
    trainer = yaml.safe_load(config(tmp_path).read_text())["trainer"]
    main(["fit", "-c", str(config(tmp_path, trainer={**trainer, "callbacks": [best]}))])
    assert {file.name for file in tmp_path.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}


WRONG_OPTIONS = {
    "no command": ([], "there is no command; choose one of fit, validate, test, predict, inspect"),
    "unknown command": (["fitt"], "'fitt' is no command; choose one of fit"),
    "unknown option": (["fit", "--modle.x=1"], "--modle.x"),
    "unknown model option": (["fit", "--model.bckbone=1"], "--model.bckbone"),
    "unknown argument of a class": (
        ["fit", "--model.optimizer.lrr=1"],
        "\"model.optimizer\": Problem with given class_path 'ntl_lightning.optimization.AdamW': "
        "Option 'lrr' is not accepted",
    ),
    "unknown argument in a list": (
        ["fit", "--model.loss_terms=[{class_path: CrossEntropy, init_args: {wieght: 3}}]"],
        "\"model.loss_terms\": - Problem with given class_path 'ntl_lightning.losses.CrossEntropy'"
        ": Option 'wieght' is not accepted",
    ),
    "unknown setting of an architecture": (
        ["fit", "--model.backbone.settings={hidden_sie: 16}"],
        "model.backbone.settings: llama has no field hidden_sie",
    ),
    "unknown class": (["fit", "--model.backbone=FromConfg"], '"model.backbone"'),
    "wrong choice": (
        ["fit", "--model.number_tokens=digit"],
        "\"model.number_tokens\": Expected a typing.Literal['digits', 'integers', 'numbers']",
    ),
    "wrong type": (["fit", "--trainer.max_steps=x"], '"trainer.max_steps": Expected a'),
    "linked option": (
        ["fit", "--data.number_tokens=digits"],
        "model.number_tokens --> data.number_tokens",
    ),
    "negative weight": (
        ["fit", "--model.loss_terms=[{class_path: CrossEntropy, init_args: {weight: -3}}]"],
        "the weight of cross_entropy must be 0 or more, got -3",
    ),
    "refused by a class": (["fit", "--model.optimizer.lr=-1"], "AdamW.lr must be a positive"),
    "refused by the data": (["fit", "--data.batch_size=0"], "data.batch_size must be at least 1"),
    "refused by Lightning": (["fit", "--trainer.accelerator=cpuu"], "accelerator='cpuu'"),
    "missing configuration": (["fit", "--config=nowhere.yaml"], "nowhere.yaml"),
    "missing tokenizer": (
        ["fit", "--model.tokenizer=PretrainedTokenizer", "--model.tokenizer.name_or_path=./gone"],
        "tokenizer.name_or_path: there is no folder './gone'",
    ),
    "missing checkpoint": (["test", "--ckpt_path=gone.ckpt"], "there is no checkpoint /"),
    "unset variable": (
        ["test", "--ckpt_path=${NTL_NOT_SET}/a.ckpt"],
        "--ckpt_path: the environment variable NTL_NOT_SET",
    ),
}


@pytest.mark.parametrize(("args", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_end_with_one_line(
    error_of: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(args)
    assert not list(tmp_path.iterdir())


WRONG_FILES = {
    "top level": ("modle: {a: 1}", "'modle.a'"),
    "section": ("model: {bckbone: 3}", "'model.bckbone'"),
    "trainer": ("trainer: {max_epoch: 3}", "'trainer.max_epoch'"),
    "callback": ("report: {filename: a}", "'report.filename'"),
    "class": ("model: {backbone: {class_path: FromConfg}}", '"model.backbone"'),
    "argument": (
        "model: {tokenizer: {class_path: ArithmeticTokenizer, init_args: {widht: 3}}}",
        '"model.tokenizer": Problem with given class_path \'ntl_lightning.numbers.ArithmeticToken'
        "izer': Option 'widht' is not accepted",
    ),
    "source": (
        "data: {train: [{class_path: Friedman, init_args: {num_examples: 1, sead: 1}}]}",
        "\"data.train\": Problem with given class_path 'ntl_lightning.data.Friedman'",
    ),
    "not YAML": ("model: [", "Problems parsing config"),
    "number as text": (
        "model: {backbone: {class_path: Pretrained, init_args: {name_or_path: 123}}}",
        "\"name_or_path\": Expected a <class 'str'>. Got value: 123 (YAML reads 123, 1e5, ",
    ),
    "exponent as text": (
        "model: {backbone: {class_path: Pretrained, init_args: {name_or_path: a, revision: 1e5}}}",
        "put them in quotes",
    ),
    "no as text": ("report: {file_name: no}", "\"report.file_name\": Expected a <class 'str'>"),
    "text as number": (
        "model: {optimizer: {class_path: AdamW, init_args: {lr: fast}}}",
        "\"lr\": Expected a <class 'float'>. Got value: fast",
    ),
    "linked choice": (
        "data: {number_tokens: integers}",
        "data.number_tokens is set through model.number_tokens; write it there",
    ),
    "linked class": (
        "data: {tokenizer: {class_path: ArithmeticTokenizer}}",
        "data.tokenizer is set through model.tokenizer; write it there",
    ),
    "what the model knows": (
        "data: {architecture: seq2seq}",
        "data.architecture is known from model.backbone; leave it out",
    ),
    "linked, in a file for all commands": (
        "fit: {data: {largest_number_token: 7}}",
        "data.largest_number_token is set through model.largest_number_token",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_keys_and_types_in_files_are_named(
    error_of: Fails, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    before_the_command = text.startswith("fit:")
    args = ["-c", path, "fit"] if before_the_command else ["fit", "-c", path]
    root = f"--trainer.default_root_dir={tmp_path}"
    assert message in error_of([*args, root])
    assert list(tmp_path.iterdir()) == [path]


SECTION_FILES = {
    "option": ["fit", "--data", "section.yaml"],
    "option and more": ["fit", "--data", "section.yaml", "--data.batch_size=3"],
    "option before a file": ["fit", "--data=section.yaml", "-c", "more.yaml"],
    "option of the model": ["fit", "--model", "section.yaml"],
    "in a file": ["fit", "-c", "data.yaml"],
    "in a file for all commands": ["-c", "all.yaml", "fit"],
}


@pytest.mark.parametrize("args", SECTION_FILES.values(), ids=SECTION_FILES)
def test_sections_in_files_of_their_own_are_refused(
    error_of: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = "loss_terms+: [{class_path: ExpectedValue}]"
    (tmp_path / "section.yaml").write_text(section if "--model" in args else "batch_size: 4")
    (tmp_path / "more.yaml").write_text("data: {batch_size: 5}")
    (tmp_path / "data.yaml").write_text("data: section.yaml")
    (tmp_path / "all.yaml").write_text("fit: {data: section.yaml}")
    name = "model" if "--model" in args else "data"
    error = error_of([*args, "--trainer.fast_dev_run=1"])
    assert f"{name} is the file section.yaml; write its content below `{name}:` in a file" in error


def test_several_configuration_files_are_merged(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("data: {batch_size: 3}")
    path = str(config(tmp_path))
    cli = Instantiated(["fit", "-c", path, "-c", str(tmp_path / "more.yaml")])
    assert (cli.datamodule.batch_size, cli.model.vocabulary.largest) == (3, 500)


REPEATED_KEYS = {
    "section": ("data: {batch_size: 4}\nmodel: {}\ndata: {num_workers: 0}", "line 3: data is"),
    "setting": ("data:\n  batch_size: 4\n  batch_size: 5", "line 3: batch_size is"),
    "in a list": (
        "data:\n  train:\n  - class_path: Arithmetic\n    init_args:\n      operation: addition\n"
        "      num_examples: 4\n      split: val\n      num_examples: 5",
        "line 8: num_examples is",
    ),
    "quoted": ("{\"seed_everything\": 1,\n 'seed_everything': 2}", "line 2: seed_everything is"),
}


@pytest.mark.parametrize(("text", "message"), REPEATED_KEYS.values(), ids=REPEATED_KEYS)
def test_a_key_that_is_set_twice_is_refused(
    error_of: Fails, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    error = error_of(["fit", "-c", path])
    assert f"error: {path}, {message}" in error


def test_anchors_and_merged_keys_are_no_repeated_keys(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    arguments = "&a {operation: addition, num_examples: 4, split: val}"
    one = f"{{class_path: Arithmetic, init_args: {arguments}}}"
    other = "{class_path: Arithmetic, init_args: {<<: *a, num_examples: 6}}"
    path.write_text(f"data: {{train: [{one}, {other}]}}")
    cli = Instantiated(["fit", "-c", str(path), "--trainer.accelerator=cpu"])
    sources = cli.config.fit.data.train
    assert [source.init_args.num_examples for source in sources] == [4, 6]


def test_numbers_in_files_are_read_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.yaml"
    # PyYAML alone takes 1e-3 and 5e2 for texts.
    path.write_text(
        "trainer: {fast_dev_run: 1, accelerator: cpu, enable_model_summary: false}\n"
        "model:\n"
        "  number_tokens: integers\n"
        "  largest_number_token: 5e2\n"
        "  optimizer: {class_path: AdamW, init_args: {lr: 1e-3}}\n"
        "  lr_schedule: {class_path: ConstantLR, init_args: {warmup: 2}}\n"
    )
    root = f"--trainer.default_root_dir={tmp_path}"
    cli = NumberCLI(["fit", "-c", str(path), root, "--trainer.enable_progress_bar=false"])
    assert cli.model.optimizer_spec == AdamW(lr=0.001)
    assert type(cli.model.optimizer_spec.lr) is float
    assert cli.model.vocabulary.largest == 500
    assert cli.model.lr_schedule == ConstantLR(warmup=2.0)


def json_lines(tmp_path: Path, *rows: tuple[str, str]) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"q": q, "a": a}) for q, a in rows))
    return {
        "class_path": "ntl_lightning.data.JsonLines",
        "init_args": {"path": str(path), "prompt": "q", "target": "a"},
    }


def test_data_that_cannot_be_learned_from_is_refused(tmp_path: Path, error_of: Fails) -> None:
    no_number = json_lines(tmp_path, ("one", "two"), ("three", "four"))
    error = error_of(["fit", "-c", config(tmp_path, data={"train": [no_number]})])
    assert "no label of the training data is a number token" in error
    assert "inspect-tokenizer" in error

    not_ascii = json_lines(tmp_path, ("a", "½"), ("b", "¾"))
    error = error_of(["fit", "-c", config(tmp_path, data={"train": [not_ascii]})])
    assert "data.train: 2 of 2 targets hold characters outside the tokenizer's vocabulary" in error

    no_file = {**not_ascii, "init_args": {**not_ascii["init_args"], "path": "${NTL_NOT_SET}/a"}}
    error = error_of(["fit", "-c", config(tmp_path, data={"train": [no_file]})])
    assert "JsonLines.path: the environment variable NTL_NOT_SET" in error

    no_file["init_args"]["path"] = str(tmp_path / "gone.jsonl")
    error = error_of(["fit", "-c", config(tmp_path, data={"train": [no_file]})])
    assert f"JsonLines.path: there is no file {tmp_path / 'gone.jsonl'}" in error


def test_last_where_no_run_was(tmp_path: Path, error_of: Fails) -> None:
    error = error_of(["test", "-c", config(tmp_path), "--ckpt_path=last"])
    places = [tmp_path / "runs/checkpoints", tmp_path / "runs/lightning_logs/*/checkpoints"]
    assert f"there is no last.ckpt in {places[0]}, {places[1]}; run fit first" in error


@pytest.mark.parametrize("content", [b"", b"model: 3", b"PK\3\4 not a zip file"])
def test_files_that_are_no_checkpoints(tmp_path: Path, error_of: Fails, content: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    error = error_of(["test", "--ckpt_path", path])
    assert f"--ckpt_path {path}: no checkpoint of NumberAwareLM could be read" in error


def test_checkpoints_of_other_programs(tmp_path: Path, error_of: Fails) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}}, path)
    assert "no checkpoint of NumberAwareLM" in error_of(["test", "--ckpt_path", path])
    torch.save({"hyper_parameters": {"hidden_width": 3}}, path)
    error = error_of(["test", "--ckpt_path", path])
    assert "holds model settings that this version does not know" in error
    assert "model.hidden_width" in error


def test_the_settings_of_a_sharded_checkpoint_are_found(trained: Trained, tmp_path: Path) -> None:
    # FSDP2 writes a folder; what is not sharded is in meta.pt.
    folder = tmp_path / "checkpoints" / "last.ckpt"
    folder.mkdir(parents=True)
    (folder / "meta.pt").write_bytes(Path(trained.checkpoint).read_bytes())

    class Parsed(NumberCLI):
        def before_instantiate_classes(self) -> None:
            raise InterruptedError(self.config.test.model.largest_number_token)

    root = f"--trainer.default_root_dir={tmp_path}"
    with pytest.raises(InterruptedError, match="500"):
        Parsed(["test", root, "--ckpt_path=last"])


def test_tracebacks_are_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NTL_DEBUG", "1")
    with pytest.raises(ValueError, match="'fitt' is no command"):
        main(["fitt"])


# A process of its own


def python_m(args: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "ntl_lightning", *map(str, args)]


def test_interrupted_runs_can_be_gone_on_with(tmp_path: Path) -> None:
    data = {"batch_size": 4, "train": [addition("train", 4000)], "val": [addition("val", 4)]}
    path = config(tmp_path, data=data)
    options = ["--checkpoint.every_n_train_steps=20", "--trainer.max_steps=10000000"]
    command = python_m(["fit", "-c", path, *options])
    # A background job of a shell ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.rglob("last.ckpt")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in stderr
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert step >= 20
    # In the middle of an epoch, and between two regular checkpoints unless by chance.
    assert f"saved checkpoint to {checkpoint}" in stderr or step % 20 == 0
    cli = NumberCLI(["fit", "-c", str(path), "--ckpt_path=last", f"--trainer.max_steps={step + 2}"])
    assert cli.trainer.global_step == step + 2


def test_the_command_line_of_a_shell(trained: Trained, tmp_path: Path) -> None:
    command = python_m(
        [
            "test",
            "-c",
            trained.config,
            "--ckpt_path",
            trained.checkpoint,
            f"--trainer.default_root_dir={tmp_path}",
            "--model.largest_number_token=100",
        ]
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "Results of test" in done.stdout
    assert (
        "What was asked for is used: model.largest_number_token is 500.0 in the "
        "checkpoint, 100.0 was asked for." in done.stderr
    )
    assert "Warning" not in done.stderr.replace("UserWarning: NaN, because", "")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict", "inspect-tokenizer"):
        assert command in printed
    assert printed.startswith("usage: python -m ntl_lightning ")


@pytest.mark.parametrize("argument", ["--model.loss_terms.help=Wasserstein", "--help"])
def test_help_shows_what_is_written_below_each_field(
    capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", argument])
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert {
        "--help": "Beams of a beam search; 1 is greedy.",
        "--model.loss_terms.help=Wasserstein": "Distances are scaled so that the largest one",
    }[argument] in words


# inspect-tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that cuts numbers into runs of three digits."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer: PreTrainedTokenizerFast = ArithmeticTokenizer(number_width=3).load()
    tokenizer.save_pretrained(folder)
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, Any]:
    main(["inspect-tokenizer", "--json", *map(str, args)])
    return json.loads(capsys.readouterr().out)


def test_inspect_tokenizer_as_json(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = inspected(capsys, "--tokenizer", tokenizer_folder)
    assert audit["values"] == list(range(10))
    assert audit["kind"] == "digits"
    audit = inspected(
        capsys, "--tokenizer", tokenizer_folder, "--kind=integers", "--largest=11", "--width=2000"
    )
    assert audit["values"] == list(range(12))
    assert audit["logits_width"] == 2000
    # 0 to 9 as 5 and as 005; 010 and 011.
    assert audit["num_number_tokens"] == 22


def test_inspect_tokenizer_of_a_digit_level_tokenizer(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens_of(text: str, *args: str) -> list[str]:
        audit = inspected(capsys, "--tokenizer", tokenizer_folder, *args)
        (sample,) = (sample for sample in audit["samples"] if sample["text"] == text)
        return sample["tokens"]

    assert tokens_of("1,234") == ["1", ",", "234"]
    assert tokens_of("1,234", "--digit_level", "true") == ["1", ",", "2", "3", "4"]


def test_inspect_tokenizer_looks_up_the_numbers_of_a_text(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("7 apples, 12 pears\n345 plums")
    audit = inspected(capsys, "--tokenizer", tokenizer_folder, "--text", text)
    assert audit["text"]["num_numbers"] == 3
    assert audit["text"]["num_all_digits"] == 2
    assert audit["text"]["num_no_digits"] == 1


def test_inspect_tokenizer_for_people(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["inspect-tokenizer", "--tokenizer", str(tokenizer_folder)])
    printed = capsys.readouterr().out
    assert not printed.startswith("{")
    assert "number tokens" in printed
    with pytest.raises(SystemExit) as stop:
        main(["inspect-tokenizer", "--help"])
    assert stop.value.code == 0
    assert "--digit_level" in capsys.readouterr().out


INSPECT_ERRORS = {
    "no tokenizer": ([], "tokenizer"),
    "no folder": (["--tokenizer=./gone"], "there is no folder './gone'"),
    "unknown option": (["--tokenizer=a", "--digitlevel=true"], "--digitlevel"),
    "unknown kind": (["--tokenizer=a", "--kind=floats"], '"kind": Expected a typing.Literal'),
}


@pytest.mark.parametrize(("args", "message"), INSPECT_ERRORS.values(), ids=INSPECT_ERRORS)
def test_inspect_tokenizer_errors(error_of: Fails, args: list[str], message: str) -> None:
    assert message in error_of(["inspect-tokenizer", *args])


def test_inspect_tokenizer_without_the_text(
    tokenizer_folder: Path, tmp_path: Path, error_of: Fails
) -> None:
    gone = tmp_path / "gone.txt"
    error = error_of(["inspect-tokenizer", "--tokenizer", tokenizer_folder, "--text", gone])
    assert str(gone) in error
