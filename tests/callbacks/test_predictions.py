import json
from decimal import MAX_EMAX, Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntl_lightning.callbacks import PredictionFile
from ntl_lightning.callbacks.answers import Answer
from ntl_lightning.callbacks.predictions import Merged, merge_parts, prediction_line
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.fake import FakeLM, Sample, loader

SAMPLES: list[Sample] = [
    ("0.1 + 0.2 =", "0.3", "It is 0.50"),
    ("x\ny =", "5", "no idea"),
    ("capital?", "Paris", "7"),
    ("later", None, "1,234"),
    ("é", "1", "-1"),
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_float=Decimal)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def written(path: Path, indices: list[int], text: str = "") -> Path:
    path.write_text(
        "".join(prediction_line(Answer(i, "p", None, text, None), None) for i in indices)
    )
    return path


def test_lines_hold_prompt_target_answer_value_and_error(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(PredictionFile()).predict(FakeLM(), loader(SAMPLES), return_predictions=False)
    path = tmp_path / "predictions.jsonl"
    columns = ("index", "prompt", "target", "answer", "value", "error")
    assert [tuple(line[name] for name in columns) for line in lines_of(path)] == [
        (0, "0.1 + 0.2 =", "0.3", "It is 0.50", Decimal("0.50"), Decimal("0.20")),
        (1, "x\ny =", "5", "no idea", None, None),
        (2, "capital?", "Paris", "7", 7, None),
        (3, "later", None, "1,234", 1234, None),
        (4, "é", "1", "-1", -1, -2),
    ]
    assert f"wrote 5 predictions to {path}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]


numbers = st.decimals(allow_nan=False, allow_infinity=False)


@given(numbers, st.text(), st.text())
def test_any_value_and_text_survives_the_file(value: Decimal, prompt: str, answer: str) -> None:
    prompt, answer = (text.encode(errors="ignore").decode() for text in (prompt, answer))
    line = prediction_line(Answer(3, prompt, None, answer, value), None)
    assert line.count("\n") == 1
    read = json.loads(line, parse_float=Decimal, parse_int=Decimal)
    assert Decimal(read["value"]) == value
    assert Decimal(read["value"]).as_tuple().exponent == value.as_tuple().exponent
    assert (read["prompt"], read["answer"]) == (prompt, answer)


def test_line_is_strict_json_where_the_error_is_beyond_any_number() -> None:
    largest = Decimal((0, (9,) * 20, MAX_EMAX - 19))
    line = prediction_line(Answer(0, "p", "t", "a", largest), largest.copy_negate())
    assert '"error": null' in line


@pytest.mark.parametrize("digits", [640, 641, 5000])
def test_long_numbers_can_be_read_by_any_program_and_lose_no_digit(
    tmp_path: Path, make_trainer: MakeTrainer, digits: int
) -> None:
    # Python's own json reads no integer of over 4300 digits.
    samples: list[Sample] = [("p", "1", "7" * digits), ("p", "1", f"1e{digits}"), ("p", "1", "2")]
    make_trainer(PredictionFile()).predict(FakeLM(), loader(samples), return_predictions=False)
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]
    exact = [json.loads(line, parse_int=Decimal, parse_float=Decimal) for line in lines]
    assert [line["value"] for line in exact] == [
        Decimal("7" * digits),
        Decimal(f"1e{digits}"),
        Decimal(2),
    ]
    assert exact[0]["error"] == Decimal("7" * (digits - 1) + "6")
    assert exact[1]["error"] == Decimal("9" * digits)


def test_shuffled_input_is_put_in_order(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    samples: list[Sample] = [(f"prompt {i}", "1", str(i)) for i in range(50)]
    shuffled = loader(samples, batch_size=3, order=[17 * i % 50 for i in range(50)])
    make_trainer(PredictionFile()).predict(FakeLM(), shuffled, return_predictions=False)
    lines = lines_of(tmp_path / "predictions.jsonl")
    assert [(line["index"], line["value"]) for line in lines] == [(i, i) for i in range(50)]


def test_each_of_several_sets_has_its_own_file(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    make_trainer(PredictionFile(str(tmp_path / "out" / "answers.jsonl"))).predict(
        FakeLM(), [loader(SAMPLES), loader(SAMPLES[:2])], return_predictions=False
    )
    assert len(lines_of(tmp_path / "out/answers_easy.jsonl")) == 5
    assert len(lines_of(tmp_path / "out/answers_hard.jsonl")) == 2


def test_sets_of_the_same_name_are_refused(make_trainer: MakeTrainer) -> None:
    model = FakeLM()
    model.set_names["predict"] = ["predict", "predict"]
    with pytest.raises(ValueError, match=r"named \['predict', 'predict'\]"):
        make_trainer(PredictionFile()).predict(
            model, [loader(SAMPLES), loader(SAMPLES)], return_predictions=False
        )


def test_an_earlier_file_is_kept_under_a_number(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    make_trainer(PredictionFile()).predict(FakeLM(), loader(SAMPLES), return_predictions=False)
    assert (tmp_path / "predictions.1.jsonl").read_text() == "precious"
    assert len(lines_of(tmp_path / "predictions.jsonl")) == 5
    assert f"the earlier file is now {tmp_path / 'predictions.1.jsonl'}" in capsys.readouterr().out


def test_path_expands_home_and_variables(
    tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "there"))
    make_trainer(PredictionFile("${OUT}/p.jsonl")).predict(
        FakeLM(), loader(SAMPLES), return_predictions=False
    )
    assert len(lines_of(tmp_path / "there/p.jsonl")) == 5


def test_a_folder_as_path_is_refused(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="is a folder; write the name of a file"):
        make_trainer(PredictionFile(str(tmp_path))).predict(
            FakeLM(), loader(SAMPLES), return_predictions=False
        )


def test_predictions_that_are_no_answers_are_refused(make_trainer: MakeTrainer) -> None:
    class Numbers(FakeLM):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return torch.zeros(2)

    with pytest.raises(TypeError, match=r"Numbers\.predict_step returned Tensor"):
        make_trainer(PredictionFile()).predict(Numbers(), loader(SAMPLES), return_predictions=False)


class FailsAtTheThirdBatch(FakeLM):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if batch_idx == 2:
            raise RuntimeError("out of memory")
        return batch


def test_an_interrupted_run_leaves_what_it_has_done(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    part = tmp_path / "predictions.jsonl.part"
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        pytest.warns(UserWarning, match=r"answers so far are in .*predictions.jsonl.part"),
    ):
        make_trainer(PredictionFile()).predict(
            FailsAtTheThirdBatch(), loader(SAMPLES), return_predictions=False
        )
    assert [line["index"] for line in lines_of(part)] == [0, 1, 2, 3]
    assert (tmp_path / "predictions.jsonl").read_text() == "precious"

    make_trainer(PredictionFile()).predict(FakeLM(), loader(SAMPLES), return_predictions=False)
    assert len(lines_of(tmp_path / "predictions.jsonl.1.part")) == 4
    assert len(lines_of(tmp_path / "predictions.jsonl")) == 5
    assert "an interrupted run had left" in capsys.readouterr().out


def test_a_run_that_fails_before_the_first_answer_leaves_no_file(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    class Fails(FakeLM):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):  # Warnings are errors here.
        make_trainer(PredictionFile()).predict(Fails(), loader(SAMPLES), return_predictions=False)
    assert list(tmp_path.iterdir()) == []


def test_of_several_sets_only_those_begun_are_named(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        pytest.warns(UserWarning, match=r"so far are in [^,]*_easy.jsonl.part\.$"),
    ):
        make_trainer(PredictionFile()).predict(
            FailsAtTheThirdBatch(), [loader(SAMPLES), loader(SAMPLES)], return_predictions=False
        )
    assert [path.name for path in tmp_path.iterdir()] == ["predictions_easy.jsonl.part"]


def test_fast_dev_run_writes_no_file_and_moves_none(
    tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    trainer = make_trainer(PredictionFile(), fast_dev_run=True)
    trainer.predict(FakeLM(), loader(SAMPLES), return_predictions=False)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == "precious"
    assert "fast_dev_run: no file is written" in capsys.readouterr().out


def test_lines_are_in_the_part_file_as_soon_as_their_batch_is_done(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    seen: list[int] = []

    class Looks(FakeLM):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            seen.append(len(lines_of(tmp_path / "predictions.jsonl.part")))
            return batch

    make_trainer(PredictionFile()).predict(Looks(), loader(SAMPLES), return_predictions=False)
    assert seen == [0, 2, 4]


def test_parts_of_ranks_are_merged_in_order_and_duplicates_dropped(tmp_path: Path) -> None:
    parts = [
        written(tmp_path / "a.part", [0, 2, 4], "rank 0"),
        written(tmp_path / "b.part", [3, 1, 0], "rank 1"),
    ]
    target = tmp_path / "all.jsonl"
    assert merge_parts(parts, target) == Merged(num_lines=5, num_duplicates=1, kept=None)
    assert [(line["index"], line["answer"]) for line in lines_of(target)] == [
        (0, "rank 0"),
        (1, "rank 1"),
        (2, "rank 0"),
        (3, "rank 1"),
        (4, "rank 0"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]


def test_a_missing_part_is_an_error_and_the_others_stay(tmp_path: Path) -> None:
    part = written(tmp_path / "a.part", [0])
    with pytest.raises(FileNotFoundError, match=r"b.part .*folder that all machines share"):
        merge_parts([part, tmp_path / "b.part"], tmp_path / "all.jsonl")
    assert part.exists()


def test_duplicates_are_warned_of(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    repeating = loader(SAMPLES, order=[0, 1, 0])
    with pytest.warns(UserWarning, match="1 lines had the index of an earlier line"):
        make_trainer(PredictionFile()).predict(FakeLM(), repeating, return_predictions=False)
    assert [line["index"] for line in lines_of(tmp_path / "predictions.jsonl")] == [0, 1]


@pytest.mark.filterwarnings("ignore")  # of the processes' own start
def test_two_processes_write_one_file(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(PredictionFile(), devices=2, strategy="ddp_fork")
    samples: list[Sample] = [(f"prompt {i}", "1", str(i)) for i in range(7)]
    trainer.predict(FakeLM(), loader(samples), return_predictions=False)
    assert [line["value"] for line in lines_of(tmp_path / "predictions.jsonl")] == list(range(7))
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]
