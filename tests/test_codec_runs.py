"""Target values on another scale, from training to the metrics in the units of the data."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from decimal import Decimal

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from scipy import stats
from sklearn import metrics as sklearn_metrics

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.callbacks import PredictionFile
from ntl_lightning.cli import main
from ntl_lightning.data import Example, Source
from ntl_lightning.evaluation import Generation
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberCodec,
    NumberFormat,
    last_number,
)

pytestmark = [
    # Untrained models say little that can be read as a number.
    pytest.mark.filterwarnings("ignore:NaN, because they are not defined"),
    pytest.mark.filterwarnings("ignore:.* are also prompts of data.train"),
]

LOG = NumberCodec(NumberFormat(decimals=2), "log10")
SIGNED_LOG = NumberCodec(NumberFormat(significant_digits=3, scientific=True), "signed_log10")
STANDARDISED = NumberCodec(NumberFormat(decimals=2, plus_sign=True), "standardised")
PERCENT = NumberCodec(NumberFormat(decimals=1), percent=True)
TAGGED = NumberCodec(NumberFormat(decimals=1, width=5), digit_places=True)

LIMITED = {"generation": Generation(max_new_tokens=8)}

TRAIN = tuple(str(value) for value in (3, 12.5, 40, 99, 250.25, 1000, 7777, 20000))
TEST = tuple(str(value) for value in (5, 33, 80.125, 640, 1234.5, 9000, 15000))


@dataclass(frozen=True)
class Values(Source):
    """Targets as they are given."""

    targets: tuple[str, ...]

    def examples(self):
        return [Example(f"{i}:", text, f"Values[{i}]") for i, text in enumerate(self.targets)]


@dataclass(frozen=True)
class Unreadable(Source):
    """A source that must not be asked."""

    def examples(self):
        raise AssertionError("the training data are read")


class Answering(NumberAwareLM):
    """Says, on the written scale, 5 % more than the target; to every fourth prompt nothing."""

    def _answer(self, batch):
        answers = []
        for index, target in zip(batch["index"], batch["target"], strict=True):
            value = last_number(target) * (1 if index % 3 == 0 else Decimal("1.05"))
            written = str(value) if self.codec is None else self.codec.write(value)
            answers.append("cannot say" if index % 4 == 3 else f"it is {written}")
        return answers, [False] * len(answers)


def data_module(codec, train=TRAIN, test=TEST, **settings):
    return NumberDataModule(
        **{
            "train": [train if isinstance(train, Source) else Values(train)],
            "val": [Values(test[:3])],
            "test": {"test": [Values(test)]},
            "batch_size": 4,
            "codec": codec,
            **settings,
        }
    )


def trainer_for(folder, *callbacks, **settings):
    return Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            **settings,
        }
    )


def trained(folder, codec, kind=Answering, **settings):
    """A checkpoint of three steps, and the logged metrics of their validation."""
    seed_everything(0)
    module = kind(**settings)
    trainer = trainer_for(folder, max_steps=3, max_epochs=-1)
    trainer.fit(module, data_module(codec))
    trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt", trainer.callback_metrics


@pytest.mark.parametrize("codec", [LOG, SIGNED_LOG, STANDARDISED, PERCENT, TAGGED])
def test_metrics_are_those_of_the_predictions_file_in_the_units_of_the_data(tmp_path, codec):
    checkpoint, validated = trained(tmp_path, codec)
    data = data_module(codec, Unreadable())
    tester = trainer_for(tmp_path, PredictionFile())
    (logged,) = tester.test(Answering(), data, ckpt_path=checkpoint, verbose=False)
    tester.predict(Answering(), data, ckpt_path=checkpoint, return_predictions=False)
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["target"] for line in lines] == list(TEST)

    fitted = data.codec
    pairs = [(line["value"], float(line["target"])) for line in lines if line["value"] is not None]
    values, golds = zip(*pairs, strict=True)
    assert len(pairs) == 6
    # By hand from the texts: the inverse of each scale, written out.
    inverses = {
        "log10": lambda y: 10**y,
        "signed_log10": lambda y: math.copysign(10 ** abs(y) - 1, y),
        "standardised": lambda y: y * fitted.standard_deviation + fitted.mean,
        "none": lambda y: y / 100 if codec.percent else y,
    }
    said = [line["answer"].removeprefix("it is ") for line in lines if line["value"] is not None]
    if not codec.digit_places:
        by_hand = [inverses[codec.scale](float(text.rstrip("%"))) for text in said]
        assert values == pytest.approx(by_hand, rel=1e-12)
    assert [line["error"] for line in lines if line["value"] is not None] == pytest.approx(
        [value - gold for value, gold in pairs]
    )
    assert logged["test/mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(golds, values))
    assert logged["test/r2"] == pytest.approx(sklearn_metrics.r2_score(golds, values))
    assert logged["test/pearson"] == pytest.approx(stats.pearsonr(golds, values).statistic)
    assert logged["test/invalid_rate"] == pytest.approx(1 / 7)
    mean = statistics.fmean(map(float, TRAIN))
    errors = [abs(float(gold) - mean) for gold in TEST]
    assert logged["test/training_mean_mae"] == pytest.approx(statistics.fmean(errors))
    # Every third answer says what is written for its target, rounded as that may be.
    exact = [line["answer"] == f"it is {fitted.write(Decimal(line['target']))}" for line in lines]
    assert sum(exact) >= 2
    assert logged["test/exact_match"] == pytest.approx(sum(exact) / 7)
    # The fit validated on the first three, before any checkpoint.
    errors = [abs(value - gold) for value, gold in pairs[:3]]
    assert validated["val/mae"] == pytest.approx(statistics.fmean(errors))


def test_labels_of_the_test_set_are_written_with_the_statistics_of_the_training_set(tmp_path):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    data = data_module(STANDARDISED, Unreadable())
    trainer_for(tmp_path).test(Answering(), data, ckpt_path=checkpoint, verbose=False)
    values = [*map(float, TRAIN)]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    assert data.codec.mean == pytest.approx(mean, rel=1e-12)
    assert data.codec.standard_deviation == pytest.approx(deviation, rel=1e-12)
    batch = next(iter(data.test_dataloader()["test"]))
    for target, labels in zip(batch["target"], batch["labels"], strict=True):
        text = data.tokenizer.decode(labels[labels >= 0], skip_special_tokens=True)
        assert text == f"{(float(target) - mean) / deviation:+.2f}"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_loaded_model_brings_its_statistics_along(tmp_path, stage):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    module = Answering.load_from_checkpoint(checkpoint)
    data = data_module(STANDARDISED, Unreadable())
    getattr(trainer_for(tmp_path), stage)(module, data)
    assert data.codec == module.codec
    assert module.codec.is_complete


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_statistics_that_nobody_knows_are_asked_for(tmp_path, stage):
    with pytest.raises(ValueError, match=r"mean and standard deviation are not known.*--ckpt_path"):
        getattr(trainer_for(tmp_path), stage)(Answering(), data_module(STANDARDISED))


def test_a_fit_after_a_test_takes_its_own_statistics(tmp_path):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    data = data_module(STANDARDISED, TRAIN[:4])
    trainer_for(tmp_path).test(Answering(), data, ckpt_path=checkpoint, verbose=False)
    other = Answering()
    trainer_for(tmp_path, max_steps=1).fit(other, data)
    assert other.codec.mean == pytest.approx(statistics.fmean(map(float, TRAIN[:4])))
    (logged,) = trainer_for(tmp_path).test(other, data, verbose=False)
    assert logged["test/num_samples"] == 7


def test_a_data_module_that_keeps_another_models_statistics_is_told_to_be_made_anew(tmp_path):
    first, _ = trained(tmp_path, STANDARDISED)
    second = Answering()
    trainer_for(tmp_path, max_steps=1).fit(second, data_module(STANDARDISED, TRAIN[:4]))
    data = data_module(STANDARDISED)
    trainer_for(tmp_path).test(Answering(), data, ckpt_path=first, verbose=False)
    with pytest.raises(ValueError, match="keeps them, so make a new one for each model"):
        trainer_for(tmp_path).test(second, data, verbose=False)


@pytest.mark.parametrize(
    "asked", [None, LOG, replace(STANDARDISED, mean=0.0, standard_deviation=1.0)]
)
def test_answers_are_not_read_otherwise_than_they_were_taught(tmp_path, asked):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    with pytest.raises(ValueError, match=r"data.codec is .* but the model was trained with Number"):
        trainer_for(tmp_path).test(Answering(), data_module(asked), ckpt_path=checkpoint)


def test_a_model_of_plain_targets_is_not_asked_for_others(tmp_path):
    checkpoint, _ = trained(tmp_path, None)
    with pytest.raises(ValueError, match="was trained with none: its answers would be read wrong"):
        trainer_for(tmp_path).test(Answering(), data_module(LOG), ckpt_path=checkpoint)


def test_a_run_goes_on_only_with_the_statistics_it_began_with(tmp_path):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    trainer = trainer_for(tmp_path, max_steps=4, max_epochs=-1)
    trainer.fit(Answering(), data_module(STANDARDISED), ckpt_path=checkpoint)
    assert trainer.global_step == 4
    more = data_module(STANDARDISED, (*TRAIN[:-1], "20001"))
    with pytest.raises(ValueError, match="if the training data have changed since"):
        trainer_for(tmp_path, max_steps=4, max_epochs=-1).fit(
            Answering(), more, ckpt_path=checkpoint
        )


def test_a_fit_that_begins_anew_may_write_otherwise(tmp_path):
    checkpoint, _ = trained(tmp_path, STANDARDISED)
    module = Answering.load_from_checkpoint(checkpoint)
    trainer_for(tmp_path, max_steps=1).fit(module, data_module(LOG))
    assert module.codec == LOG


def test_golds_are_exact_under_true_bfloat16_on_any_scale(tmp_path):
    codec = NumberCodec(NumberFormat(decimals=8), "standardised", mean=0.0, standard_deviation=2.0)
    module = NumberAwareLM()
    module._answer = lambda batch: (["616.0"] * len(batch["index"]), [False] * 2)
    data = data_module(codec, test=("1234.5", "1234.5", "1234.25", "1234.25"), batch_size=2)
    (logged,) = trainer_for(tmp_path, precision="bf16-true").test(module, data, verbose=False)
    assert logged["test/mae"] == 2.375
    assert logged["test/r2"] == pytest.approx(1 - (2.5**2 + 2.25**2) / (2 * 0.125**2), rel=1e-12)


def test_the_expected_value_is_that_of_the_values_that_the_tokens_stand_for(tmp_path):
    seed_everything(0)
    codec = NumberCodec(NumberFormat(), "log10")
    module = NumberAwareLM(tokenizer=ArithmeticTokenizer())
    data = data_module(codec, test=("100", "1000"), tokenizer=ArithmeticTokenizer())
    (logged,) = trainer_for(tmp_path).test(module, data, verbose=False)
    module.eval()
    digits = module.tokenizer.convert_tokens_to_ids([str(d) for d in range(10)])
    errors = []
    for prompt, value in (("0:", 100), ("1:", 1000)):
        ids = torch.tensor([module.tokenizer(prompt)["input_ids"]])
        q = torch.softmax(module.model(ids).logits[0, -1][digits].double(), -1)
        errors.append(abs((q * 10.0 ** torch.arange(10)).sum().item() - value))
    assert logged["test/expected_value_mae"] == pytest.approx(sum(errors) / 2, rel=1e-5)


def test_loaders_without_their_data_module_bring_the_codec(tmp_path):
    seed_everything(0)
    data, whole, module = data_module(STANDARDISED), data_module(STANDARDISED), Answering(**LIMITED)
    data.setup("fit")
    trainer = trainer_for(tmp_path, max_steps=3, max_epochs=-1)
    trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    assert module.codec == data.codec
    (by_loaders,) = trainer_for(tmp_path).validate(module, data.val_dataloader())
    (by_module,) = trainer_for(tmp_path).validate(module, datamodule=whole)
    assert by_loaders["val/mae"] == by_module["val/mae"]


def test_loaders_of_another_codec_are_refused(tmp_path):
    seed_everything(0)
    module = Answering(**LIMITED)
    trainer_for(tmp_path, max_steps=1).fit(module, data_module(LOG))
    others = [data_module(codec) for codec in (PERCENT, TAGGED)]
    loaders = []
    for data in others:
        data.setup("validate")
        loaders.append(data.val_dataloader())
    with pytest.raises(ValueError, match="but the model was trained with Number"):
        trainer_for(tmp_path).validate(module, loaders[0])
    with pytest.raises(ValueError, match="written by different codecs"):
        trainer_for(tmp_path).validate(module, loaders)


def test_a_codec_is_written_in_a_configuration(tmp_path, capsys):
    rows = "\n".join(f"{i},{value}" for i, value in enumerate(TRAIN))
    (tmp_path / "train.csv").write_text(f"x,y\n{rows}\n")
    config = tmp_path / "config.yaml"
    source = {
        "class_path": "ntl_lightning.data.Csv",
        "init_args": {"path": str(tmp_path / "train.csv"), "prompt": "{x}:", "target": "y"},
    }
    settings = {
        "trainer": {
            "default_root_dir": str(tmp_path / "runs"),
            "max_steps": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "logger": False,
        },
        "data": {
            "train": [source],
            "val": [],
            "test": {"test": [source]},
            "codec": {"number_format": {"decimals": 2}, "scale": "standardised"},
        },
    }
    config.write_text(yaml.safe_dump(settings))
    main(["fit", "--config", str(config)])
    (checkpoint,) = (tmp_path / "runs").rglob("last.ckpt")
    kept = torch.load(checkpoint, weights_only=True)["number_aware"]["codec"]
    assert kept["mean"] == pytest.approx(statistics.fmean(map(float, TRAIN)))
    (tmp_path / "train.csv").write_text(f"x,y\n{rows}\n8,123456\n")
    main(["test", "--config", str(config), "--ckpt_path", str(checkpoint)])
    assert "training_mean_mae" in capsys.readouterr().out
