import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ntl_lightning.callbacks import AnswerPlots
from ntl_lightning.callbacks.answers import Answer
from ntl_lightning.callbacks.plots import sample_table, shortened
from ntl_lightning.numbers import last_number
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.fake import FakeLM, Sample, loader

SAMPLES: list[Sample] = [
    ("12 + 7 =", "19", "19"),
    ("5 + 5 =", "10", "It is 12."),
    ("1 + 1 =", "2", "I cannot tell"),
    ("8 + 8 =", "16", "17"),
]
FIGURES = ["val_digit_confusion.png", "val_predicted_against_true.png"]


def titles_of(trainer: pl.Trainer, run: Any) -> list[str]:
    """The titles of the figures that `run` saves."""
    titles: list[str] = []
    save = Figure.savefig

    def note(self: Figure, *args: Any, **kwargs: Any) -> None:
        assert self._suptitle is not None
        titles.append(self._suptitle.get_text())
        save(self, *args, **kwargs)

    with patch.object(Figure, "savefig", note):
        run()
    return titles


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


def test_figures_and_text_go_to_tensorboard_at_every_validation(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(AnswerPlots(), logger=logger, max_epochs=2, log_every_n_steps=1)
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    logger.experiment.flush()
    events = events_of(Path(logger.log_dir))
    for tag in ("val/predicted_against_true", "val/digit_confusion"):
        assert [image.step for image in events.Images(tag)] == [2, 4]
    texts = events.Tensors("val/sample_answers/text_summary")
    assert [text.step for text in texts] == [2, 4]
    assert (
        "| 5 \\+ 5 = | 10 | It is 12. | off by 2 |" in texts[0].tensor_proto.string_val[0].decode()
    )
    figures = Path(logger.log_dir) / "figures"
    assert sorted(path.name for path in figures.iterdir()) == FIGURES


def test_titles_say_set_step_counts_and_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(AnswerPlots(max_samples=3))
    model = FakeLM()
    samples = [*SAMPLES, ("?", "no number here", "4")]
    titles = titles_of(trainer, lambda: trainer.validate(model, loader(samples), verbose=False))
    assert titles == [
        "val at step 0: predicted against true\n"
        "first 3 of 5 samples\n"
        "MAE 1.000 over 2 answers with a number",
        "val at step 0: digits by place\n"
        "first 3 of 5 samples; 2 answers with a number\n"
        "sign ignored, missing digits are 0, grey: not in the targets",
    ]


@pytest.mark.filterwarnings("ignore")  # of the processes' own start
def test_titles_say_that_other_processes_have_the_other_samples(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    def note(figure: Figure, path: Path, **settings: Any) -> None:
        assert figure._suptitle is not None
        path.write_text(figure._suptitle.get_text())

    trainer = make_trainer(AnswerPlots(), devices=2, strategy="ddp_fork")
    with patch.object(Figure, "savefig", note):
        trainer.test(FakeLM(), loader(SAMPLES), verbose=False)
    title = (tmp_path / "figures/test_predicted_against_true.png").read_text()
    assert "\n2 samples (rank 0 of 2)\n" in title


def test_targets_without_a_number_are_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(AnswerPlots())
    samples = [*SAMPLES, ("?", "no number here", "4"), ("?", "1e400", "4")]
    titles = titles_of(trainer, lambda: trainer.test(FakeLM(), loader(samples), verbose=False))
    assert "6 samples, 2 of them without a number in the target\n" in titles[0]
    assert "MAE 1.000 over 3 answers" in titles[0]


def test_places_that_are_not_shown_are_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(AnswerPlots())
    samples = [("?", "12345678.125", "1")]
    titles = titles_of(trainer, lambda: trainer.test(FakeLM(), loader(samples), verbose=False))
    assert titles[1].endswith("; 5 more places not shown")


def test_each_set_has_its_own_figures_without_any_logger(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    make_trainer(AnswerPlots()).test(
        FakeLM(), [loader(SAMPLES), loader(SAMPLES[:1])], verbose=False
    )
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "test_digit_confusion.png",
        "test_extrapolate_digit_confusion.png",
        "test_extrapolate_predicted_against_true.png",
        "test_predicted_against_true.png",
    ]
    assert imread(tmp_path / "figures/test_predicted_against_true.png").shape[:2] == (720, 640)


def test_a_logger_that_takes_no_figures_is_left_alone(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(AnswerPlots(), logger=logger).test(FakeLM(), loader(SAMPLES), verbose=False)
    assert len(list((Path(logger.log_dir) / "figures").iterdir())) == 2


@pytest.mark.parametrize(("every", "num_drawn"), [(1, 5), (2, 2), (6, 0)])
def test_only_each_nth_validation_of_a_fit_is_drawn(
    make_trainer: MakeTrainer, every: int, num_drawn: int
) -> None:
    trainer = make_trainer(AnswerPlots(every_n_validations=every), max_epochs=5)
    titles = titles_of(trainer, lambda: trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES)))
    assert len(titles) == 2 * num_drawn
    assert len(titles_of(trainer, lambda: trainer.validate(FakeLM(), loader(SAMPLES)))) == 2


def test_sanity_check_draws_nothing(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(AnswerPlots(), limit_train_batches=0)
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_no_picture(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(AnswerPlots(), fast_dev_run=True, logger=True)
    trainer.fit(FakeLM(), loader(SAMPLES), loader(SAMPLES))
    assert list(tmp_path.iterdir()) == []


def test_targets_without_numbers_are_said_once(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    words = [("Capital of France?", "Paris", "Paris"), ("Of Spain?", "Madrid", "5")]
    trainer = make_trainer(AnswerPlots(), max_epochs=3)
    with pytest.warns(UserWarning, match="no target of 'val' holds a number") as warned:
        trainer.fit(FakeLM(), loader(words), loader(words))
    assert len([w for w in warned if "AnswerPlots" in str(w.message)]) == 1
    assert not (tmp_path / "figures").exists()


def test_answers_without_numbers_still_give_the_scatter(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(AnswerPlots())
    with pytest.warns(UserWarning, match="no answer of 'test' holds a number"):
        trainer.test(FakeLM(), loader([("1 + 1", "2", "two")]), verbose=False)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == [
        "test_predicted_against_true.png"
    ]


def test_evaluation_without_answers_is_said(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    class LossOnly(FakeLM):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return torch.zeros(())

    with pytest.warns(UserWarning, match="the evaluation of 'test' gives no answers"):
        make_trainer(AnswerPlots()).test(LossOnly(), loader(SAMPLES), verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_evaluation_that_generates_nothing_on_purpose_is_not_warned_of(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    class NoGeneration(FakeLM):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {}

    make_trainer(AnswerPlots()).fit(NoGeneration(), loader(SAMPLES), loader(SAMPLES))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [("every_n_validations", 0), ("max_samples", 0), ("num_text_samples", -1)],
)
def test_settings_out_of_range_are_refused(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"AnswerPlots.{setting} must be at least .*{value}"):
        AnswerPlots(**{setting: value})


def test_no_text_where_none_is_wanted(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    logger = TensorBoardLogger(tmp_path)
    make_trainer(AnswerPlots(num_text_samples=0), logger=logger).test(
        FakeLM(), loader(SAMPLES), verbose=False
    )
    logger.experiment.flush()
    assert events_of(Path(logger.log_dir)).Tags()["tensors"] == []


@pytest.mark.parametrize(
    ("target", "answer", "result"),
    [
        ("10", "10.0", "ok"),
        ("10", "7", r"off by \-3"),
        ("10", "ten", "no number"),
        ("Paris", "Paris ", "ok"),
        ("Paris", "Rome", "wrong"),
        (None, "7", ""),
    ],
)
def test_result_of_an_answer(target: str | None, answer: str, result: str) -> None:
    table = sample_table([Answer(0, "p", target, answer, last_number(answer))])
    assert table.splitlines()[-1].endswith(f"| {result} |")


def test_an_answer_on_another_scale_is_compared_by_its_value() -> None:
    table = sample_table([Answer(0, "p", "1050", "3.0", Decimal(1000))])
    assert table.splitlines()[-1].endswith(r"| off by \-50 |")


def as_tensorboard_shows(markdown: str) -> str:
    with warnings.catch_warnings(action="ignore"):  # of the HTML library that it carries along
        from tensorboard.plugin_util import markdown_to_safe_html
    return markdown_to_safe_html(markdown)


AWKWARD = [
    "2*3*4 | 5_000_000 `x`",
    "line one\nline two\r\n\n# not a heading",
    "<b>a</b> & [link](http://x) \\ 1 < 2",
    "- 7\n- 8",
    "",
    "~~no~~ 1. one",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_tensorboard_shows_any_text_as_it_is(text: str) -> None:
    table = sample_table([Answer(0, text, text, text, last_number(text))])
    html = as_tensorboard_shows(table)
    cells = [cell.split("</td>")[0] for cell in html.split("<td>")[1:]]
    shown = cells[0].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert shown == " ↵ ".join(text.splitlines()).strip()
    assert len(cells) == 4


def test_long_texts_are_cut_in_the_middle() -> None:
    text = "a" * 500 + "#### 18"
    assert len(shortened(text)) == 80
    assert shortened(text).endswith("a#### 18")
    assert shortened("short") == "short"
