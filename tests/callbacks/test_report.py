import json
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from ntl_lightning.callbacks import LastCheckpoint, MetricsReport
from ntl_lightning.callbacks.report import group_by_set, merge_metrics, metric_text, number_text
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.fake import FakeLM, loader

SAMPLES = [("1 + 1 =", "2", "2"), ("1 + 2 =", "3", "4")]

# What a module logs after a test on three sets: every metric the project knows.
ANSWERS = {
    "exact_match": 0.5,
    "within_1_percent": 0.62539,
    "isclose": 0.5,
    "invalid_rate": 0.0,
    "num_samples": 1319.0,
    "num_valid": 1319.0,
    "num_targets_without_number": 0.0,
    "num_targets_not_finite": 0.0,
    "mae": 12.3456,
    "rmse": 1234567.8,
    "median_absolute_error": 0.001234,
    "r2": math.nan,
    "log_mae": 0.25,
    "log_r2": 0.75,
    "pearson": 0.99,
    "spearman": 0.98,
    "mae_imputed": 13.0,
    "rmse_imputed": 20.5,
    "r2_imputed": 0.5,
    "expected_value_mae": 11.0,
    "expected_value_rate": 1.0,
    "training_mean_mae": 40.0,
    "ntl_was": 1.5,
    "cross_entropy": 0.5,
    "loss": 0.95,
    "perplexity": 1.6487,
    "token_accuracy": 0.99999,
    "num_label_tokens": 12345.0,
    "num_number_tokens": 2345.0,
}


def test_sets_and_metrics_are_told_apart_at_the_first_slash() -> None:
    logged = {"test_extrapolate/mae": 2.0, "val/mae": torch.tensor(1.0), "val/a/b": 3}
    assert group_by_set(logged) == {
        "val": {"mae": 1.0, "a/b": 3.0},
        "test_extrapolate": {"mae": 2.0},
    }


def test_of_step_and_epoch_doubles_the_epochs_value_is_kept_under_the_plain_name() -> None:
    logged = {"train/loss": 1.0, "train/loss_step": 1.0, "train/loss_epoch": 3.0}
    assert group_by_set(logged) == {"train": {"loss": 3.0}}


def test_names_that_only_look_like_doubles_stay() -> None:
    logged = {"train/time_per_step": 1.0, "train/num_samples_epoch": 2.0}
    assert group_by_set(logged) == {"train": {"time_per_step": 1.0, "num_samples_epoch": 2.0}}


def test_a_name_without_a_set_is_not_lost() -> None:
    assert group_by_set({"lr-SGD": 0.1}) == {"other": {"lr-SGD": 0.1}}


def test_sets_come_in_the_order_of_a_run() -> None:
    logged = dict.fromkeys(["mine/x", "test_b/x", "lr", "test/x", "train/x", "val/x"], 0.0)
    assert list(group_by_set(logged)) == ["train", "val", "test_b", "test", "mine", "other"]


def test_metrics_come_with_answers_first_and_losses_last() -> None:
    shuffled = {f"val/{name}": ANSWERS[name] for name in sorted(ANSWERS)}
    assert list(group_by_set(shuffled)["val"]) == [
        "exact_match",
        "within_1_percent",
        "isclose",
        "invalid_rate",
        "mae",
        "rmse",
        "median_absolute_error",
        "r2",
        "pearson",
        "spearman",
        "log_mae",
        "log_r2",
        "mae_imputed",
        "rmse_imputed",
        "r2_imputed",
        "expected_value_mae",
        "expected_value_rate",
        "training_mean_mae",
        "num_samples",
        "num_valid",
        "num_targets_without_number",
        "num_targets_not_finite",
        "loss",
        "cross_entropy",
        "ntl_was",
        "perplexity",
        "token_accuracy",
        "num_label_tokens",
        "num_number_tokens",
    ]


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("exact_match", 0.5, "50.00 %"),
        ("exact_match", 1.0, "100.00 %"),
        ("exact_match", 0.999999, "99.9999 %"),
        ("invalid_rate", 0.0, "0.00 %"),
        ("invalid_rate", 0.00001, "0.001 %"),
        ("exact_match", math.nan, "nan"),
        ("learning_rate", 0.001, "0.001000"),
        ("num_samples", 12345.0, "12,345"),
        ("num_samples", 2.5, "2.500"),
        ("mae", 12345.0, "12,345"),
        ("mae", 7.0, "7.000"),
    ],
)
def test_metric_text(metric: str, value: float, text: str) -> None:
    assert metric_text(metric, value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.5, "-0.5000"),
        (1234.56, "1,235"),
        (0.000123456, "0.0001235"),
        (1.5e-9, "1.500e-09"),
        (1.5e12, "1.500e+12"),
        (math.inf, "inf"),
    ],
)
def test_number_text(value: float, text: str) -> None:
    assert number_text(value) == text


def test_merging_keeps_other_sets_and_replaces_a_set_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    merge_metrics(path, {"val": {"mae": 1.0, "r2": 0.5}, "train": {"loss": 2.0}})
    merge_metrics(path, {"val": {"mae": 3.0}, "test": {"mae": 4.0}})
    assert json.loads(path.read_text()) == {
        "val": {"mae": 3.0},
        "train": {"loss": 2.0},
        "test": {"mae": 4.0},
    }


def test_values_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    merge_metrics(path, {"val": {"r2": math.nan, "mae": math.inf, "rmse": 1.5}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found == {"val": {"r2": None, "mae": None, "rmse": 1.5}}


@pytest.mark.parametrize("content", ["{half of", "[1, 2]"])
def test_a_file_that_holds_something_else_is_moved_and_not_lost(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(content)
    warning = merge_metrics(path, {"val": {"mae": 1.0}})
    assert warning is not None
    assert "moved to" in warning
    assert (tmp_path / "metrics.1.json").read_text() == content
    assert json.loads(path.read_text()) == {"val": {"mae": 1.0}}


def test_a_moved_file_is_warned_of(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    (tmp_path / "metrics.json").write_text("nonsense")
    with pytest.warns(UserWarning, match="was not a metrics file"):
        make_trainer(MetricsReport()).test(FakeLM(), loader(SAMPLES), verbose=False)


def test_fit_validate_and_test_share_one_file(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(MetricsReport())
    model = FakeLM(
        {
            "val": {"mae": 2.0},
            "test": {"mae": 3.0},
            "test_extrapolate": {"mae": 4.0, "exact_match": 0.25},
        }
    )
    trainer.fit(model, loader(SAMPLES), loader(SAMPLES))
    printed = capsys.readouterr().out
    assert "Results of fit, step 1" in printed
    assert "val: the last validation." in printed

    trainer.test(model, [loader(SAMPLES), loader(SAMPLES)], verbose=False)
    printed = capsys.readouterr().out
    assert printed.count("Results of test") == 1
    assert [line.split() for line in printed.splitlines() if "exact_match" in line] == [
        ["exact_match", "-", "25.00", "%"]
    ]
    assert "-: not computed for this set." in printed

    model.metrics["val"]["mae"] = 5.0
    trainer.validate(model, loader(SAMPLES), verbose=False)
    assert "Results of validate" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "train": {"loss": 0.5},
        "val": {"mae": 5.0},
        "test": {"mae": 3.0},
        "test_extrapolate": {"mae": 4.0, "exact_match": 0.25},
    }


def test_a_new_fit_keeps_the_results_of_the_one_before(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    earlier = '{"test": {"mae": 1.0}}'
    (tmp_path / "metrics.json").write_text(earlier)
    make_trainer(MetricsReport()).fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert (tmp_path / "metrics.1.json").read_text() == earlier
    assert set(json.loads((tmp_path / "metrics.json").read_text())) == {"train", "val"}


@pytest.mark.filterwarnings("ignore:.*is not empty")
def test_a_fit_that_goes_on_adds_to_its_results(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    def fit(**settings: object) -> None:
        trainer = make_trainer(
            MetricsReport(),
            LastCheckpoint(),
            enable_checkpointing=True,
            max_epochs=settings.pop("max_epochs"),
        )
        trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES), **settings)

    fit(max_epochs=1)
    merge_metrics(tmp_path / "metrics.json", {"test": {"mae": 7.0}})
    last = tmp_path / "checkpoints/last.ckpt"
    copied = tmp_path / "elsewhere.ckpt"
    copied.write_bytes(last.read_bytes())
    fit(max_epochs=2, ckpt_path=last)
    assert json.loads((tmp_path / "metrics.json").read_text())["test"] == {"mae": 7.0}
    assert not (tmp_path / "metrics.1.json").exists()

    fit(max_epochs=2, ckpt_path=copied)
    assert json.loads((tmp_path / "metrics.1.json").read_text())["test"] == {"mae": 7.0}
    assert "test" not in json.loads((tmp_path / "metrics.json").read_text())


def test_values_that_float32_does_not_hold_are_those_of_the_module(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeLM(
        {"val": {"mae": 1.0}, "test": {"mae": 16777217.0, "mine": 2.0}, "test_b": {"mae": 3.0}}
    )
    model.set_names["test"] = ["test", "test_b"]
    model.evaluation_results = {"val": {"mae": 1.0}, "test": {"mae": 16777217.0}}
    trainer = make_trainer(MetricsReport())
    trainer.test(model, [loader(SAMPLES), loader(SAMPLES)], verbose=False)
    assert trainer.callback_metrics["test/mae"] == 16777216  # the reason for all this
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "test": {"mae": 16777217.0, "mine": 2.0},
        "test_b": {"mae": 3.0},
    }
    assert "1.678e+07" in capsys.readouterr().out


def test_file_goes_to_the_loggers_folder(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(MetricsReport("result.json"), logger=CSVLogger(tmp_path, name="runs"))
    trainer.test(FakeLM(), loader(SAMPLES), verbose=False)
    assert json.loads((tmp_path / "runs/version_0/result.json").read_text()) == {
        "test": {"mae": 3.0}
    }


def test_values_of_other_callbacks_are_in_the_table(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(
        MetricsReport(), LearningRateMonitor(), logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert ["lr-SGD", "-", "-", "0.1000"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_fit_without_validation_says_so(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(MetricsReport()).fit(FakeLM(), loader(SAMPLES))
    assert "No validation was run." in capsys.readouterr().out


def test_fast_dev_run_prints_but_writes_nothing(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    trainer = make_trainer(MetricsReport(), fast_dev_run=True)
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert "fast_dev_run: not written to a file." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert (tmp_path / "metrics.json").read_text() == "{}"


def test_the_validations_of_a_fit_are_not_reported_one_by_one(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Looks(FakeLM):
        def on_train_epoch_start(self) -> None:
            assert not (tmp_path / "metrics.json").exists()

    trainer = make_trainer(MetricsReport(), max_epochs=3)
    trainer.fit(Looks(), loader(SAMPLES), loader(SAMPLES))
    assert capsys.readouterr().out.count("Results of") == 1
    assert (tmp_path / "metrics.json").exists()


def test_nothing_logged_is_said_and_is_no_error(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match="nothing was logged"):
        make_trainer(MetricsReport()).test(FakeLM({"val": {}}), loader(SAMPLES), verbose=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")  # of the processes' own start
def test_two_processes_print_one_table(
    tmp_path: Path, make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(MetricsReport(), devices=2, strategy="ddp_fork")
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert capfd.readouterr().out.count("Results of fit") == 1
    assert json.loads((tmp_path / "metrics.json").read_text())["val"] == {"mae": 2.0}


def test_table_of_everything_fits_into_80_columns_and_explains_its_rows(
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["test", "test_interpolate", "test_extrapolate", "test_very_long_numbers_of_20_digits"]
    model = FakeLM(dict.fromkeys(names, ANSWERS))
    model.set_names["test"] = names
    make_trainer(MetricsReport()).test(model, [loader(SAMPLES)] * 4, verbose=False)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, [line for line in lines if "Written to" not in line])) <= 80
    headers = [name for line in lines if line.split()[:1] == ["metric"] for name in line.split()]
    assert [name for name in headers if name != "metric"] == names
    rows = [line.split() for line in lines if line.split()[:1] == ["exact_match"]]
    assert sum(row.count("50.00") for row in rows) == 4
    words = " ".join(printed.split())
    assert "one without a readable number counts as if it had said the mean" in words
    assert "expected_value_...:" in words
    assert "what always answering the mean of the training targets would score" in words
    assert "nan: not defined here" in words
    assert "together with invalid_rate" in words
    assert "-: not computed" not in words


def test_explanations_of_rows_that_are_not_there_are_left_out(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(MetricsReport()).test(FakeLM(), loader(SAMPLES), verbose=False)
    printed = capsys.readouterr().out
    assert "imputed" not in printed
    assert "expected_value" not in printed
    assert "training_mean" not in printed
    assert "nan" not in printed
