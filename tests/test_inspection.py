"""inspect-data: what it counts, and what it shows to people and to programs."""

import json
from dataclasses import dataclass
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ntl_lightning import NumberDataModule
from ntl_lightning.cli import main
from ntl_lightning.data import Example, Source
from ntl_lightning.inspection import inspect_data, render_inspection
from ntl_lightning.numbers import NumberCodec, NumberFormat
from tests.conftest import ROOT


@dataclass(frozen=True)
class Pairs(Source):
    """Prompts and targets given as they are."""

    pairs: tuple[tuple[str, str | None], ...]

    def examples(self):
        return [Example(p, t, f"Pairs[{i}]") for i, (p, t) in enumerate(self.pairs)]


SUMS = Pairs((("1+1=", "2"), ("10+2=", "12"), ("say a", "a")))
DIFFERENCES = Pairs((("3-10=", "-7"),))


def rendered(inspection, width=100):
    out = StringIO()
    Console(file=out, width=width).print(render_inspection(inspection))
    return out.getvalue()


def values_of(*targets):
    pairs = tuple((f"{i}?", target) for i, target in enumerate(targets))
    data = NumberDataModule(train=[Pairs(pairs)], val=[])
    return inspect_data(data)["parts"][0]["values"]


def test_every_source_and_every_set_is_counted():
    data = NumberDataModule(train=[SUMS, DIFFERENCES], val=[SUMS], test={"far": [DIFFERENCES]})
    inspection = inspect_data(data)
    assert [(p["set"], p["source"], p["num_examples"]) for p in inspection["parts"]] == [
        ("train", "0: Pairs", 3),
        ("train", "1: Pairs", 1),
        ("train", None, 4),
        ("val", "Pairs", 3),
        ("test.far", "Pairs", 1),
    ]
    sums, differences, train = inspection["parts"][:3]
    # 2, 12 and a, each with an end of sequence.
    assert sums["num_label_tokens"] == 7
    assert sums["num_number_tokens"] == sums["num_digit_tokens"] == 3
    assert sums["values"]["num_without"] == 1
    assert sums["prompt_tokens"] == {"min": 4, "median": 5, "90%": 5, "99%": 5, "max": 5}
    assert sums["target_tokens"] == {"min": 2, "median": 2, "90%": 3, "99%": 3, "max": 3}
    assert differences["num_label_tokens"] == 3
    assert differences["num_number_tokens"] == 1
    for key in ("num_examples", "num_label_tokens", "num_number_tokens"):
        assert train[key] == sums[key] + differences[key]
    assert train["values"]["quantiles"]["min"] == -7
    shared = [text for text in inspection["warnings"] if "also prompts of data.train" in text]
    assert len(shared) == 2


def test_examples_are_shown_as_the_model_sees_them():
    data = NumberDataModule(
        train=[Pairs((("a 1", "2 in room 34"),))], val=[], not_quantities=["room ([0-9]+)"]
    )
    inspection = inspect_data(data)
    (example,) = inspection["examples"]
    assert example["origin"] == "Pairs[0]"
    assert example["tokens"] == [*"a 1", *"2 in room 34", data.tokenizer.eos_token]
    assert example["is_label"] == [False] * 3 + [True] * 13
    assert [t for t, n in zip(example["tokens"], example["is_number"], strict=True) if n] == ["2"]
    assert inspection["parts"][0]["num_not_quantities"] == 2
    text = rendered(inspection)
    assert "Pairs[0]: a ␣ 1 => [2] ␣ i n ␣ r o o m ␣ 3 4" in text


@pytest.mark.parametrize(
    ("asked", "shown"), [(0, []), (2, [0, 2]), (4, [0, 1, 2, 3]), (9, range(4))]
)
def test_examples_are_spread_over_the_training_set(asked, shown):
    data = NumberDataModule(train=[SUMS, DIFFERENCES], val=[])
    origins = [example["origin"] for example in inspect_data(data, asked)["examples"]]
    every = [f"Pairs[{i}]" for i in (0, 1, 2, 0)]
    assert origins == [every[i] for i in shown]


def test_values_are_those_of_the_source_where_a_codec_writes_them_otherwise():
    codec = NumberCodec(NumberFormat(), percent=True)
    data = NumberDataModule(train=[Pairs((("a", "0.25"), ("b", "0.5")))], val=[], codec=codec)
    inspection = inspect_data(data)
    assert inspection["parts"][0]["values"]["quantiles"]["max"] == 0.5
    assert "".join(inspection["examples"][1]["tokens"]).startswith("b50")


def test_what_is_left_out_is_told():
    data = NumberDataModule(
        train=[SUMS, DIFFERENCES], val=[], max_target_tokens=2, too_long="leave_out"
    )
    inspection = inspect_data(data)
    assert [part["num_examples"] for part in inspection["parts"]] == [2, 0, 2]
    assert [part["num_left_out"] for part in inspection["parts"]] == [1, 1, 2]
    (warning,) = inspection["warnings"]
    assert "2 of 4 examples are longer than data.max_target_tokens=2" in warning
    text = rendered(inspection)
    assert "Warnings (1)" in text
    assert "They are left out" in text


def test_what_is_cut_is_told():
    data = NumberDataModule(
        train=[SUMS, DIFFERENCES], val=[], max_prompt_tokens=4, too_long="cut_prompt"
    )
    inspection = inspect_data(data)
    assert [part["num_cut"] for part in inspection["parts"]] == [2, 1, 3]
    assert [part["num_left_out"] for part in inspection["parts"]] == [0, 0, 0]
    (warning,) = inspection["warnings"]
    assert "3 of 4 prompts are cut" in warning


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(-1000, 1000).map(float),
        min_size=1,
        max_size=30,
    )
)
def test_a_histogram_counts_every_value_where_it_lies(numbers):
    targets = [np.format_float_positional(number, trim="-") for number in numbers]
    values = values_of(*targets)
    bins = values["histogram"]
    assert len(bins) <= 25
    for number, bin_ in enumerate(bins):
        last = number == len(bins) - 1
        inside = [v for v in numbers if bin_["low"] <= v and (v < bin_["high"] or last)]
        assert len([v for v in inside if v <= bin_["high"]]) == bin_["count"]
    assert sum(bin_["count"] for bin_ in bins) == len(numbers)


def test_a_few_huge_values_do_not_hide_the_others():
    values = values_of(*map(str, range(1, 100)), "2880000")
    assert [bin_["count"] for bin_ in values["histogram"]] == [0, 9, 90, 0, 0, 0, 0, 1]
    assert values["histogram"][-1]["high"] == 1e7


def test_numbers_too_large_for_floats_are_counted():
    values = values_of("1" + "0" * 400, "5", "no")
    assert (values["num_not_finite"], values["num_without"]) == (1, 1)
    assert values["quantiles"]["max"] == 5


def test_targets_may_be_missing_for_predict():
    data = NumberDataModule(train=[SUMS], val=[], predict=[Pairs((("7?", None),))])
    inspection = inspect_data(data)
    part = inspection["parts"][-1]
    assert (part["set"], part["num_examples"], part["num_without_target"]) == ("predict", 1, 1)
    assert part["num_label_tokens"] == 0
    assert "predict" in rendered(inspection)


def test_a_negative_number_of_examples_is_refused():
    with pytest.raises(ValueError, match="--examples must be 0 or more, got -1"):
        inspect_data(NumberDataModule(), -1)


# The command


def test_the_command_prints_json_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs/quickstart.yaml"
    main(["inspect-data", "--config", str(config), "--json", "--examples", "1"])
    inspection = json.loads(capsys.readouterr().out)
    sizes = {part["set"]: part["num_examples"] for part in inspection["parts"]}
    assert sizes == {"train": 2000, "val": 300, "test.test": 500}
    assert len(inspection["examples"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_needs_no_gpu_for_the_data_of_a_run_on_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["inspect-data", "--trainer.accelerator", "gpu", "--trainer.devices", "8"])
    text = capsys.readouterr().out
    assert "Values of train" in text
    assert "Examples of train" in text


def test_the_command_names_a_missing_file(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        "data:\n  train:\n    - class_path: ntl_lightning.data.JsonLines\n"
        "      init_args: {path: gone.jsonl, prompt: a, target: b}\n"
    )
    with pytest.raises(SystemExit) as stop:
        main(["inspect-data", "--config", str(config)])
    assert stop.value.code == 1
    assert "JsonLines.path: there is no file" in capsys.readouterr().err
