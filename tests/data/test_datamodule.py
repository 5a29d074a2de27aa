import itertools
import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import hypothesis
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
)
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from ntl_lightning import NumberAwareLM
from ntl_lightning.data import (
    GSM8K,
    Arithmetic,
    BatchLoader,
    Collator,
    Csv,
    Example,
    Friedman,
    JsonLines,
    LabelCoverage,
    NumberDataModule,
    Source,
)
from ntl_lightning.evaluation import Generation
from ntl_lightning.numbers import ArithmeticTokenizer, NumberCodec, PretrainedTokenizer
from ntl_lightning.optimization import AdamW, ConstantLR, CosineLR

pytestmark = [
    # Untrained models say little that can be read as a number.
    pytest.mark.filterwarnings("ignore:NaN, because they are not defined"),
]

NUM_TRAIN, BATCH_SIZE = 21, 3


@dataclass(frozen=True)
class Pairs(Source):
    """Prompts and targets given as they are."""

    pairs: tuple[tuple[str, str | None], ...]

    def examples(self):
        return [Example(p, t, f"Pairs[{i}]") for i, (p, t) in enumerate(self.pairs)]


def targets(*texts):
    return Pairs(tuple((f"{i}:", text) for i, text in enumerate(texts)))


def sums(count, split="train"):
    return Arithmetic("addition", num_examples=count, split=split)


def data_module(**settings):
    return NumberDataModule(
        **{
            "train": [sums(NUM_TRAIN)],
            "val": [sums(7, "val")],
            "test": {},
            "batch_size": BATCH_SIZE,
            **settings,
        }
    )


def new_module(**settings):
    seed_everything(0)
    return NumberAwareLM(
        **{
            "lr_schedule": ConstantLR(),
            "generation": Generation(during_fit=False, max_new_tokens=3),
            **settings,
        }
    )


def trainer_for(folder, *callbacks, **settings):
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            **settings,
        }
    )


class Watch(Callback):
    """What a run is trained on, and the totals of its steps."""

    def __init__(self):
        self.batches = []
        self.totals = []
        self.num_labels = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["input_ids"].tolist())
        self.totals.append(batch["step_totals"])
        self.num_labels.append(batch["num_labels"])


class EvaluationWatch(Callback):
    def __init__(self):
        self.sizes = []
        self.seen = []

    def _keep(self, outputs, batch):
        self.sizes.append(len(batch["index"]))
        if outputs:
            self.seen += zip(outputs["index"], outputs["target"], strict=True)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self._keep(outputs, batch)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self._keep(outputs, batch)


# ---- A run that is interrupted and goes on


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def run(folder, *callbacks, checkpoint=None, schedule=None, data=None, **settings):
    module = new_module(**({} if schedule is None else {"lr_schedule": schedule}))
    watch = Watch()
    trainer = trainer_for(folder, watch, *callbacks, **settings)
    trainer.fit(module, data_module(**(data or {})), ckpt_path=checkpoint)
    return trainer, weights(module), watch


# 21 examples are 7 batches. With two batches to a step an epoch has 4 steps, the last of one batch.
@pytest.mark.parametrize(
    ("accumulated", "steps"), [(1, 3), (1, 7), (1, 10), (2, 2), (2, 4), (2, 5), (2, 8)]
)
def test_a_run_stopped_and_resumed_has_the_weights_of_one_run(tmp_path, accumulated, steps):
    settings = {"accumulate_grad_batches": accumulated, "max_epochs": -1}
    _, expected, whole = run(tmp_path, max_steps=2 * steps, **settings)
    trainer, half, first = run(tmp_path, max_steps=steps, **settings)
    assert not torch.equal(half, expected)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, second = run(
        tmp_path, checkpoint=tmp_path / "half.ckpt", max_steps=2 * steps, **settings
    )
    assert first.batches + second.batches == whole.batches
    assert first.totals + second.totals == whole.totals
    assert torch.equal(resumed, expected)


BATCHINGS = {
    "token budget": {"max_tokens_per_batch": 30},
    "grouped": {"max_tokens_per_batch": 30, "group_by_length": True},
    "packed": {"max_tokens_per_batch": 30, "packing": True},
    "multiple": {"max_tokens_per_batch": 32, "packing": True, "pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("data", BATCHINGS.values(), ids=BATCHINGS)
def test_a_run_on_token_budgets_goes_on_after_its_third_step(tmp_path, data):
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2, "data": data}
    _, expected, whole = run(tmp_path, schedule=CosineLR(), **settings)
    save = Save()
    run(tmp_path, save, schedule=CosineLR(), **settings)
    done, checkpoint = save.checkpoints[5]
    _, resumed, rest = run(tmp_path, checkpoint=checkpoint, schedule=CosineLR(), **settings)
    assert done == 6
    assert 0 < len(rest.batches) == len(whole.batches) - done
    assert rest.batches == whole.batches[done:]
    assert rest.totals == whole.totals[done:]
    assert torch.equal(resumed, expected)


class Save(Callback):
    """Checkpoints of a running run, as ModelCheckpoint makes them: after batches, validations."""

    def __init__(self):
        self.checkpoints = []

    def _save(self, trainer, when):
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        path = f"{trainer.default_root_dir}/{when}{done}.ckpt"
        trainer.save_checkpoint(path)
        self.checkpoints.append((done, path))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._save(trainer, "batch")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self._save(trainer, "epoch")


@pytest.mark.parametrize("accumulated", [1, 2])
def test_any_checkpoint_of_a_running_run_leads_to_the_same_weights(tmp_path, accumulated):
    """Here the run's length is known, so Lightning asks for the loader before it restores."""
    settings = {
        "accumulate_grad_batches": accumulated,
        "max_epochs": 2,
        "val_check_interval": 3,
        "schedule": CosineLR(),
    }
    save = Save()
    _, expected, whole = run(tmp_path, save, **settings)
    assert len(save.checkpoints) == 14 + 4 + 2
    for done, path in save.checkpoints[:-1]:
        _, resumed, rest = run(tmp_path, checkpoint=path, **settings)
        assert rest.batches == whole.batches[done:], path
        # Within a step, the gradient of its first batch is lost.
        if done % 7 % accumulated == 0:
            assert rest.totals == whole.totals[done:], path
            assert torch.equal(resumed, expected), path
        else:
            assert rest.totals[1:] == whole.totals[done + 1 :], path


@pytest.mark.parametrize("limit", [4, 1.0])
def test_a_checkpoint_between_epochs_leads_to_the_same_weights(tmp_path, limit):
    settings = {"limit_train_batches": limit, "num_sanity_val_steps": 0}
    _, expected, whole = run(tmp_path, max_epochs=3, **settings)
    trainer, _, _ = run(tmp_path, max_epochs=1, **settings)
    trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    _, resumed, rest = run(tmp_path, checkpoint=tmp_path / "epoch.ckpt", max_epochs=3, **settings)
    assert rest.batches == whole.batches[len(whole.batches) // 3 :]
    assert torch.equal(resumed, expected)


def test_the_rest_of_a_step_that_was_interrupted_is_a_step_of_its_own(tmp_path):
    save = Save()
    settings = {"accumulate_grad_batches": 3, "max_epochs": 1}
    _, _, whole = run(tmp_path, save, **settings)
    _, _, rest = run(tmp_path, checkpoint=dict(save.checkpoints)[4], **settings)
    assert rest.batches == whole.batches[4:]
    tokens = [int((labels_of(batch) != -100).sum()) for batch in rest.batches]
    assert [totals["tokens"] for totals in rest.totals] == [sum(tokens[:2])] * 2 + [tokens[2]]


def labels_of(input_ids):
    """Labels of prompts that end with `=`: what stands behind it, up to the end token."""
    tokenizer = ArithmeticTokenizer().load()
    equals, pad = tokenizer.convert_tokens_to_ids("="), tokenizer.pad_token_id
    rows = []
    for ids in input_ids:
        start = ids.index(equals) + 1
        rows.append([-100] * start + [-100 if i == pad else i for i in ids[start:]])
    return torch.tensor(rows)


def test_a_checkpoint_that_is_tested_does_not_move_the_next_fit(tmp_path):
    trainer, _, whole = run(tmp_path, max_steps=3, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    data = data_module(test={"test": [sums(3, "test")]})
    module, watch = new_module(), Watch()
    trainer = trainer_for(tmp_path, watch, max_steps=3, max_epochs=-1)
    trainer.test(module, data, ckpt_path=tmp_path / "half.ckpt", verbose=False)
    trainer.fit(module, data)
    assert watch.batches == whole.batches


def test_a_state_that_comes_after_the_loader_is_loaded_too(tmp_path):
    """As strategies that shard do."""
    _, _, whole = run(tmp_path, max_epochs=1)
    data = data_module()
    data.trainer = trainer_for(tmp_path)
    data.setup("fit")
    loader = data.train_dataloader()
    data.load_state_dict({})
    assert [batch["input_ids"].tolist() for batch in loader] == whole.batches
    data.setup("fit")
    loader = data.train_dataloader()
    inner = {"epoch": 0, "num_read": 5, "length": 7}
    data.load_state_dict({"train": {"position": 5, "num_skipped": 0, "loader": inner}})
    assert [batch["input_ids"].tolist() for batch in loader] == whole.batches[5:]


def test_a_second_fit_begins_anew(tmp_path):
    data, seen = data_module(), []
    for _ in range(2):
        watch = Watch()
        trainer_for(tmp_path, watch, max_epochs=1).fit(new_module(), data)
        seen.append(watch.batches)
    assert seen[0] == seen[1]


def test_loaders_that_are_made_anew_every_epoch_do_not_repeat_its_order(tmp_path):
    _, _, once = run(tmp_path, max_epochs=3)
    _, _, anew = run(tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert anew.batches == once.batches


def test_loaders_that_are_made_anew_go_on_from_a_checkpoint_once(tmp_path):
    save = Save()
    _, _, whole = run(tmp_path, save, max_epochs=3)
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    _, _, rest = run(tmp_path, checkpoint=dict(save.checkpoints)[4], **settings)
    assert rest.batches == whole.batches[4:]


def test_state_without_a_run():
    data = data_module()
    assert data.state_dict() == {}
    data.load_state_dict({})


# ---- Batches in training


def test_totals_are_those_of_the_step_with_a_changing_accumulation(tmp_path):
    scheduler = GradientAccumulationScheduler({0: 3, 1: 2})
    module, watch = new_module(), Watch()
    trainer_for(tmp_path, watch, scheduler, max_epochs=2).fit(module, data_module())
    tokens = [int((labels_of(b) != -100).sum()) for b in watch.batches]
    windows = [(0, 3), (3, 6), (6, 7), (7, 9), (9, 11), (11, 13), (13, 14)]
    expected = [sum(tokens[a:b]) for a, b in windows for _ in range(a, b)]
    assert [totals["tokens"] for totals in watch.totals] == expected
    assert watch.num_labels == tokens


def test_overfitting_takes_the_same_first_batches_in_every_epoch(tmp_path):
    module, watch = new_module(), Watch()
    trainer = trainer_for(tmp_path, watch, max_epochs=2, overfit_batches=2)
    trainer.fit(module, data_module())
    assert len(watch.batches) == 4
    assert watch.batches[:2] == watch.batches[2:]
    tokenizer = ArithmeticTokenizer().load()
    prompts = [e.prompt for e in sums(NUM_TRAIN).examples()[: 2 * BATCH_SIZE]]
    texts = [tokenizer.decode(ids) for batch in watch.batches[:2] for ids in batch]
    assert all(text.startswith(prompt) for prompt, text in zip(prompts, texts, strict=True))


@pytest.mark.parametrize("data", BATCHINGS.values(), ids=BATCHINGS)
def test_epochs_of_token_budgets_hold_every_label_once_in_batches_that_fit(tmp_path, data):
    _, _, watch = run(tmp_path, max_epochs=2, data=data)
    plain = data_module()
    plain.setup("fit")
    expected = sum(map(len, plain.table("train")["target_ids"]))
    half = len(watch.batches) // 2
    for epoch in (slice(half), slice(half, None)):
        assert sum(watch.num_labels[epoch]) == expected
    assert watch.batches[:half] != watch.batches[half:]
    sizes = [len(batch) * len(batch[0]) for batch in watch.batches]
    assert max(sizes) <= data["max_tokens_per_batch"]


@pytest.mark.parametrize("kind", ["token budget", "packed"])
def test_overfitting_a_token_budget_takes_the_same_batches_in_every_epoch(tmp_path, kind):
    _, _, watch = run(tmp_path, max_epochs=2, overfit_batches=2, data=BATCHINGS[kind])
    assert len(watch.batches) == 4
    assert watch.batches[:2] == watch.batches[2:]


def test_evaluation_is_not_packed_and_counts_examples():
    data = data_module(packing=True, max_tokens_per_batch=30, pad_to_multiple_of=8)
    data.setup("fit")
    for batch in data.val_dataloader():
        assert "attention_mask" in batch
        assert len(batch["labels"]) == len(batch["index"]) <= BATCH_SIZE
        assert batch["labels"].shape[1] % 8 == 0
    batch = next(iter(data.train_dataloader()))
    assert "position_ids" in batch
    assert batch["labels"].shape[1] % 8 == 0


def test_the_padding_of_a_token_budget_is_told(monkeypatch):
    said = []
    monkeypatch.setattr("ntl_lightning.data.datamodule.rank_zero_info", said.append)
    # Six tokens, nine tokens: with their prompts 7 + 10 = 17 of 20.
    texts = ["1234", "1234567"]
    for settings in ({}, {"packing": True}):
        data = data_module(train=[targets(*texts)], max_tokens_per_batch=20, **settings)
        data.setup("fit")
        data.train_dataloader()
    assert [text for text in said if text.startswith("Training batches")] == [
        "Training batches: 1 an epoch, with at most 20 tokens, of which 15.0% is padding.",
        "Training batches: 1 an epoch, with at most 20 tokens in packed rows of at most 20, of "
        "which 0.0% is padding.",
    ]


def test_a_token_budget_below_the_longest_example_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"data\.max_tokens_per_batch=5 does not hold"):
        run(tmp_path, max_epochs=1, data={"max_tokens_per_batch": 5})


def test_a_search_for_a_batch_size_that_is_not_used_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"BatchSizeFinder in trainer\.callbacks would look for"):
        run(tmp_path, BatchSizeFinder(), max_epochs=1, data={"max_tokens_per_batch": 30})


class FirstBatch(Callback):
    """The number of rows of the first batch after the search for a batch size."""

    def __init__(self):
        self.size = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.size = self.size or len(batch["labels"])


def test_the_batch_size_that_is_found_is_the_one_used_in_fit(tmp_path):
    finder, first = BatchSizeFinder(steps_per_trial=1, max_trials=3), FirstBatch()
    data = data_module(train=[sums(100)], val=[sums(40, "val")])
    trainer = trainer_for(tmp_path, finder, first, max_steps=1, max_epochs=-1)
    trainer.fit(new_module(), data)
    # Twice 2 x 2, because the third trial is the last.
    assert finder.optimal_batch_size == data.batch_size == first.size == 8


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
def test_the_batch_size_that_is_found_is_the_one_used_in_validate(tmp_path, name):
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=3, batch_arg_name=name)
    own = None if name == "batch_size" else 4
    data = data_module(val=[sums(40, "val")], eval_batch_size=own)
    watch = EvaluationWatch()
    trainer_for(tmp_path, finder, watch).validate(new_module(), data, verbose=False)
    assert finder.optimal_batch_size == getattr(data, name) == watch.sizes[0] == 8
    assert sum(watch.sizes) == 40


# ---- Batches in evaluation


def test_validation_counts_every_sample(tmp_path):
    watch = EvaluationWatch()
    data = data_module(val=[targets("0", "0", "0", "0", "10")], eval_batch_size=2)
    (logged,) = trainer_for(tmp_path, watch).validate(new_module(), data, verbose=False)
    assert watch.sizes == [2, 2, 1]
    assert sorted(watch.seen) == [(0, "0"), (1, "0"), (2, "0"), (3, "0"), (4, "10")]
    assert logged["val/num_samples"] == 5
    assert logged["val/num_label_tokens"] == 4 * 2 + 3


def _validate_on_a_rank(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    torch.set_num_threads(1)
    watch = EvaluationWatch()
    trainer = trainer_for(
        folder, watch, devices=2, strategy=DDPStrategy(process_group_backend="gloo")
    )
    data = data_module(val=[targets("0", "0", "0", "0", "10")], eval_batch_size=2)
    (logged,) = trainer.validate(new_module(), data, verbose=False)
    result = {"seen": watch.seen, "num_samples": logged["val/num_samples"]}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))


def test_two_processes_validate_every_sample_once(tmp_path, free_port):
    mp.spawn(_validate_on_a_rank, args=(free_port, str(tmp_path)), nprocs=2, join=True)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    seen = [(index, int(target)) for rank in ranks for index, target in rank["seen"]]
    assert sorted(seen) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 10)]
    assert fmean(value for _, value in seen) == 2.0
    # The first batches are split in two and two; of the last, one rank has a filler.
    assert sorted(len(rank["seen"]) for rank in ranks) == [2, 3]
    assert [rank["num_samples"] for rank in ranks] == [5, 5]


def test_evaluation_begins_with_the_longest_and_prediction_keeps_the_order():
    texts = ["1", "123", "12", "1234"]
    data = data_module(test={"a": [targets(*texts)]}, eval_batch_size=2)
    data.setup("test")
    assert [b["target"] for b in data.test_dataloader()["a"]] == [["1234", "123"], ["12", "1"]]
    data.setup("predict")
    (loader,) = data.predict_dataloader().values()
    assert [b["target"] for b in loader] == [["1", "123"], ["12", "1234"]]


def test_test_sets_have_their_names():
    data = data_module(test={"test": [targets("1")], "far": [targets("2", "3")]})
    data.setup("test")
    loaders = data.test_dataloader()
    assert {name: len(loader.dataset) for name, loader in loaders.items()} == {"test": 1, "far": 2}


def test_prediction_takes_its_own_set_where_there_is_one():
    data = data_module(
        test={"far": [targets("2", "3")]}, predict=[Pairs((("1+1=", None), ("2+2=", None)))]
    )
    data.setup("predict")
    (item,) = data.predict_dataloader().items()
    assert item[0] == "predict"
    (batch,) = item[1]
    assert batch["prompt"] == ["1+1=", "2+2="]
    assert batch["target"] == [None, None]
    assert data.longest_target == 0


def test_prediction_takes_the_test_sets_where_there_is_no_other():
    data = data_module(test={"test": [targets("1")], "far": [targets("2", "3")]})
    data.setup("predict")
    assert list(data.predict_dataloader()) == ["test", "far"]


def test_prediction_without_targets_runs(tmp_path):
    data = data_module(predict=[Pairs((("1+1=", None), ("2+2=", None), ("3+33=", None)))])
    trainer = trainer_for(tmp_path)
    batches = trainer.predict(new_module(), data)
    assert sorted(i for batch in batches for i in batch["index"]) == [0, 1, 2]


# ---- What is said about the data


def test_an_empty_validation_set_is_allowed_in_fit(tmp_path):
    data = data_module(val=[])
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.fit(new_module(), data)
    assert trainer.global_step == 1


def test_all_settings_have_defaults_that_belong_together():
    data = NumberDataModule()
    for stage in ("fit", "test"):
        data.setup(stage)
    (test,) = data.test_dataloader().values()
    sizes = [len(data.train_dataloader().dataset), len(data.val_dataloader().dataset)]
    assert [*sizes, len(test.dataset)] == [2000, 200, 200]


def test_an_own_training_set_is_not_evaluated_on_the_built_in_task():
    data = NumberDataModule(train=[targets("1", "2")])
    data.setup("fit")
    assert data.val_dataloader is None  # so Lightning sees that there is none
    with pytest.raises(ValueError, match=r"data\.val is empty: name a source to validate on"):
        data.setup("validate")
    with pytest.raises(ValueError, match=r"data\.test is empty: name a source to test on"):
        data.setup("test")
    with pytest.raises(ValueError, match=r"data\.predict and data\.test are empty"):
        data.setup("predict")


def test_a_trainer_is_told_what_is_missing_in_words(tmp_path):
    # Lightning gives the stage as an enum, whose own name would be in the message.
    trainer, data = trainer_for(tmp_path), data_module(val=[], test={})
    with pytest.raises(ValueError, match=r"data\.val is empty: name a source to validate on$"):
        trainer.validate(new_module(), data)
    with pytest.raises(ValueError, match=r"data\.test is empty: name a source to test on$"):
        trainer.test(new_module(), data)
    with pytest.raises(ValueError, match=r"data\.predict .* name a source to predict on$"):
        trainer.predict(new_module(), data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size must be at least 1, got 0"),
        ({"eval_batch_size": 0}, r"data\.eval_batch_size must be at least 1, got 0"),
        ({"max_prompt_tokens": 0}, r"data\.max_prompt_tokens must be at least 1, got 0"),
        ({"max_target_tokens": -1}, r"data\.max_target_tokens must be at least 1, got -1"),
        ({"max_tokens_per_batch": 0}, r"data\.max_tokens_per_batch must be at least 1, got 0"),
        ({"pad_to_multiple_of": 0}, r"data\.pad_to_multiple_of must be at least 1, got 0"),
        ({"packing": True}, r"data\.packing needs data\.max_tokens_per_batch"),
        (
            {"packing": True, "max_tokens_per_batch": 99, "group_by_length": True},
            r"data\.group_by_length has no effect on packed rows",
        ),
        (
            {"packing": True, "max_tokens_per_batch": 99, "architecture": "seq2seq"},
            r"data\.packing is for causal models: the encoder",
        ),
        ({"too_long": "cut"}, r"data\.too_long must be one of refuse, leave_out, .* got 'cut'"),
        (
            {"too_long": "cut_prompt", "max_target_tokens": 9},
            r"data\.too_long=cut_prompt has no effect without data\.max_prompt_tokens$",
        ),
        ({"too_long": "leave_out"}, r"has no effect .*max_prompt_tokens or data\.max_target_tok"),
        ({"num_workers": -1}, r"data\.num_workers must be 0 or more, got -1"),
        ({"seed": -1}, r"data\.seed must be 0 or more, got -1"),
        (
            {"not_quantities": ["x", "("]},
            r"data\.not_quantities\[1\]: '\(' is no regular expression",
        ),
        ({"not_quantities": "id"}, r"data\.not_quantities must be a list of regular expressions"),
        (
            {"not_quantities": ["x"], "codec": NumberCodec()},
            r"nothing that data\.not_quantities could mark",
        ),
        ({"changed_numbers": "drop"}, r"changed_numbers must be refuse or count, got 'drop'"),
        ({"test": {"a/b": []}}, r"data\.test: 'a/b' cannot name a test set; use letters"),
        ({"test": {1: []}}, r"data\.test: 1 cannot name a test set"),
        ({"test": {"3digits": []}}, r"'3digits' cannot name .* begin with a letter"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NumberDataModule(**settings)


@pytest.mark.parametrize(
    ("key", "stage", "settings"),
    [
        ("data.train", "fit", {"train": [Pairs((("a", "1"), ("b", None), ("c", None)))]}),
        ("data.val", "fit", {"val": [Pairs((("a", "1"), ("b", None), ("c", None)))]}),
        ("data.test.x", "test", {"test": {"x": [Pairs((("a", "1"), ("b", None), ("c", None)))]}}),
    ],
)
def test_examples_without_target_are_counted_and_refused(key, stage, settings):
    message = rf"{key}: 2 of 3 examples have no target, the first is Pairs\[1\]; name the source's"
    with pytest.raises(ValueError, match=message):
        data_module(**settings).setup(stage)


def test_a_set_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"data\.train holds no example"):
        data_module(train=[]).setup("fit")


def test_a_text_that_is_too_long_is_refused():
    data = data_module(train=[targets("1234")], max_target_tokens=4)
    with pytest.raises(ValueError, match=r"data\.train: .*data\.max_target_tokens=4.*Pairs\[0\]"):
        data.setup("fit")


def test_of_a_prediction_nothing_is_left_out():
    settings = {"max_prompt_tokens": 3, "too_long": "leave_out"}
    texts = Pairs((("1+", "2"), ("1+1+", "2")))
    data = data_module(train=[texts], val=[], predict=[texts], **settings)
    with pytest.warns(UserWarning, match=r"data\.train: 1 of 2 examples .* They are left out"):
        data.setup("fit")
    assert len(data.table("train")) == 1
    with pytest.raises(ValueError, match=r"data\.predict: 1 of 2 examples are longer than"):
        data.setup("predict")


def test_a_gold_that_is_not_finite_is_refused_with_its_row():
    data = data_module(train=[targets("1", "inf", "3")])
    with pytest.raises(ValueError, match=r"data\.train: 1 of 3 targets .* Pairs\[1\]: 'inf'"):
        data.setup("fit")


def test_setting_up_twice_reads_once(monkeypatch):
    read = []
    monkeypatch.setattr(Pairs, "examples", lambda self: read.append(1) or [Example("a", "1", "x")])
    data = data_module(train=[targets("1")], val=[], test={})
    for _ in range(3):
        data.setup("fit")
    assert len(read) == 1
    assert data.training_mean == 1.0


def test_a_fit_that_failed_to_read_is_described_once_it_can():
    data = data_module(train=[targets("3", "5")], val=[Pairs((("a", None),))])
    with pytest.raises(ValueError, match="no target"):
        data.setup("fit")
    data.val_sources = [targets("7")]
    with pytest.warns(UserWarning, match="1 of 1 prompts"):
        data.setup("fit")
    assert data.training_mean == 4.0


@pytest.mark.parametrize("kind", ["digits", "integers"])
def test_the_coverage_of_t5_on_gsm8k_answers_is_counted(assets, kind):
    """Independently: tokens of all answers by their text, as the tokenizer names them."""
    folder = str(assets / "tokenizers/t5")
    source = GSM8K(str(assets / "data/gsm8k/test.jsonl"), target="answer", max_examples=400)
    data = data_module(
        train=[source],
        val=[],
        architecture="seq2seq",
        tokenizer=PretrainedTokenizer(folder),
        number_tokens=kind,
    )
    tokenizer = PretrainedTokenizer(folder).load()
    pieces = [p for e in source.examples() for p in tokenizer.tokenize(e.target)]
    bare = [piece.removeprefix("▁") for piece in pieces]
    is_number = {
        "digits": lambda text: text in set("0123456789"),
        "integers": lambda text: text.isdecimal() and int(text) <= 999,
    }[kind]
    expected = LabelCoverage(
        tokens=len(pieces) + 400,
        digit_bearing=sum(any(c.isdecimal() for c in text) for text in bare),
        numbers=sum(map(is_number, bare)),
    )
    share = expected.numbers / expected.digit_bearing
    if kind == "digits":
        assert share < 0.5
        message = rf"Only {share:.1%} of the label tokens with a digit .* digit_level: true"
        with pytest.warns(UserWarning, match=message):
            data.setup("fit")
    else:
        assert share > 0.5
        data.setup("fit")
    assert data.label_coverage == expected
    assert data.label_coverage.reached == share


def test_digit_level_reaches_every_digit_of_gsm8k_answers(assets):
    source = GSM8K(str(assets / "data/gsm8k/test.jsonl"), target="answer", max_examples=400)
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5"), digit_level=True)
    data = data_module(train=[source], val=[], architecture="seq2seq", tokenizer=tokenizer)
    data.setup("fit")
    coverage = data.label_coverage
    digits = sum(c.isdecimal() for e in source.examples() for c in e.target)
    assert coverage.numbers == coverage.digit_bearing == digits
    assert coverage.reached == 1.0


def test_the_coverage_of_labels_without_digits_is_zero():
    data = data_module(train=[targets("abc")], val=[])
    data.setup("fit")
    assert data.label_coverage == LabelCoverage(tokens=4, digit_bearing=0, numbers=0)
    assert data.label_coverage.reached == 0.0
    assert data.training_mean is None


def training_mean(texts):
    data = data_module(train=[targets(*texts)], val=[])
    data.setup("fit")
    return data.training_mean


def test_the_training_mean_is_that_of_the_last_numbers():
    assert training_mean(["3 + 4 = 7", "none", "-1,000", "0.5"]) == fmean([7, -1000, 0.5])


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=3), min_size=1))
def test_the_training_mean_is_exact(values):
    texts = [f"{value:f}" for value in values]
    exact = sum(map(Fraction, values)) / len(values)
    assert training_mean(texts) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


def test_the_training_mean_of_huge_numbers_does_not_overflow():
    assert training_mean(["1.5e308", "1.7e308"]) == pytest.approx(1.6e308)


def test_numbers_beyond_float64_are_left_out_of_the_training_mean_and_counted():
    message = r"the numbers of 2 of 4 targets are too large for float64"
    with pytest.warns(UserWarning, match=message):
        assert training_mean(["1e400", "2", "-7e999", "4"]) == 3.0
    with pytest.warns(UserWarning, match="1 of 1 targets"):
        assert training_mean(["1e400"]) is None


def test_the_longest_target_is_that_of_all_sets_set_up():
    data = data_module(
        train=[targets("1", "12")], val=[targets("1234")], test={"far": [targets("123456")]}
    )
    with pytest.warns(UserWarning, match="are also prompts of"):
        data.setup("fit")
    assert data.longest_target == 5
    data.setup("test")
    assert data.longest_target == 7


def test_the_longest_target_of_nothing_is_zero():
    assert data_module().longest_target == 0


def test_prompts_that_training_shares_with_evaluation_are_counted():
    data = data_module(
        train=[Friedman(20, seed=1)],
        val=[Friedman(10, seed=1)],
        test={"same": [Friedman(15, seed=1)], "other": [Friedman(10, seed=2)]},
    )
    with pytest.warns(UserWarning, match="also prompts of data.train") as caught:
        data.setup("fit")
    messages = [str(warning.message) for warning in caught]
    assert [message.partition(" are")[0] for message in messages] == [
        "10 of 10 prompts of data.val",
        "15 of 15 prompts of data.test.same",
    ]
    assert "file or seed of its own" in messages[0]


def test_ids_that_training_shares_with_evaluation_are_counted(write):
    def table(name, *ids):
        rows = "".join(f"{name}{i},{i},{key}\n" for i, key in enumerate(ids))
        return Csv(write(f"q,n,key\n{rows}", f"{name}.csv"), "q", "n", id_column="key")

    data = data_module(
        train=[table("a", "x", "y"), table("b", "z", "z"), targets("1")],
        val=[table("c", "w", "z", "x", "z")],
        test={"same": [table("d", "y")], "other": [table("e", "w"), Pairs((("x:", "2"),))]},
    )
    with pytest.warns(UserWarning, match="have an id that data.train has too") as caught:
        data.setup("fit")
    messages = [str(warning.message) for warning in caught if "id that" in str(warning.message)]
    assert [message.partition(":")[0] for message in messages] == [
        "3 of 4 examples of data.val have an id that data.train has too, the first is 'z'",
        "1 of 1 examples of data.test.same have an id that data.train has too, the first is 'y'",
    ]


def test_a_gold_that_is_too_long_is_named_with_its_line(write):
    path = write("q,n\na,12\nb,123456\n", "t.csv")
    data = data_module(train=[Csv(path, "q", "n")], val=[], max_target_tokens=5)
    message = r"data\.train: 1 of 2 .* longer than data\.max_target_tokens=5 .* t\.csv:3 with 7"
    with pytest.raises(ValueError, match=message):
        data.setup("fit")


def test_a_test_file_that_is_not_there_yet_does_not_stop_training(tmp_path):
    data = data_module(test={"far": [JsonLines(str(tmp_path / "no.jsonl"), "p", "t")]})
    with pytest.warns(UserWarning, match=r"data\.test\.far cannot be read yet: .*no\.jsonl"):
        data.setup("fit")
    assert data.training_mean is not None


def test_a_validation_file_that_is_not_there_stops_training(tmp_path):
    data = data_module(val=[JsonLines(str(tmp_path / "no.jsonl"), "p", "t")])
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        data.setup("fit")


def test_loaders_of_sets_that_were_not_read_are_refused():
    data = data_module(test={"far": [targets("1")]})
    with pytest.raises(RuntimeError, match=r"data\.train has not been read yet: call setup\(\)"):
        data.train_dataloader()
    with pytest.raises(RuntimeError, match=r"data\.test\.far has not been read yet"):
        data.test_dataloader()


def test_without_a_trainer_there_are_plain_batches():
    data = data_module(num_workers=2)
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader, BatchLoader)
    batches = list(loader)
    assert len(batches) == len(loader) == math.ceil(NUM_TRAIN / BATCH_SIZE)
    assert "step_totals" not in batches[0]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert int((labels != -100).sum()) == data.label_coverage.tokens


def test_training_batches_hold_similar_lengths_if_asked_to():
    texts = ["1" * (1 + i % 10) for i in range(200)]

    def lengths_per_batch(group_by_length):
        data = data_module(
            train=[targets(*texts)], val=[], batch_size=5, group_by_length=group_by_length
        )
        data.setup("fit")
        batches = list(data.train_dataloader())
        rows = [(batch["labels"] != -100).sum(1) for batch in batches]
        return sum(len(set(row.tolist())) for row in rows) / len(rows)

    # Five at random out of ten lengths are 4.1 different ones; the prompts differ by two.
    assert lengths_per_batch(False) > 3.5
    assert lengths_per_batch(True) < 3


def test_all_loaders_have_the_workers_asked_for(monkeypatch):
    asked = []

    def recorded(*args, num_workers, **settings):
        asked.append(num_workers)
        return DataLoader(*args, **settings)

    monkeypatch.setattr("ntl_lightning.data.loader.DataLoader", recorded)
    data = data_module(num_workers=3, test={"far": [sums(3, "test")]})
    data.setup("fit")
    data.setup("test")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()["far"]):
        next(iter(loader))
    assert asked == [3, 3, 3]


def test_the_seed_decides_the_order():
    def first_epoch(seed):
        data = data_module(seed=seed)
        data.setup("fit")
        return [batch["input_ids"].tolist() for batch in data.train_dataloader()]

    assert first_epoch(1) == first_epoch(1)
    assert first_epoch(1) != first_epoch(2)


def test_labels_are_counted_without_the_ignored():
    data = data_module()
    number, letter, end = data.tokenizer.convert_tokens_to_ids(["7", "x", data.tokenizer.eos_token])
    labels = torch.tensor([[-100, number, end], [letter, number, -100]])
    counts = {"tokens": 4, "numbers": 2, "whole_numbers": 2}
    assert data.count_labels({"labels": labels}) == counts
    nothing = {"labels": torch.full((1, 3), -100)}
    assert data.count_labels(nothing) == dict.fromkeys(counts, 0)
    del counts["whole_numbers"]
    assert data.count_labels({"labels": labels}, whole_numbers=False) == counts


@hypothesis.settings(max_examples=20)
@given(st.lists(st.sampled_from(["7", "12", "1 2", "x", "3.5", "12x"]), min_size=1, max_size=9))
def test_no_number_is_joined_of_two_packed_examples(texts):
    """Though in a row the digits of one answer stand before the next prompt's."""
    data = data_module(train=[Pairs(tuple(("5", text) for text in texts))], val=[])
    data.setup("fit")
    rows = [{**row, "index": i} for i, row in enumerate(data.table("train"))]
    packed = data.count_labels(Collator("causal", 0, row_length=100)(rows))
    alone = [data.count_labels(Collator("causal", 0)([row])) for row in rows]
    assert packed == {name: sum(counts[name] for counts in alone) for name in packed}


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_whole_numbers_are_the_written_ones_without_those_that_are_marked(architecture):
    texts = ("id 17 has 3,456.5 and 8", "id 204 has -12", "id 12", "2024 -> id 7id 8 3")
    data = data_module(
        train=[targets(*texts)],
        val=[],
        batch_size=len(texts),
        architecture=architecture,
        not_quantities=[r"id (\d+)", "20(2)4"],
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    # 3,456.5, 8, 12 and 3; a digit of 2024 is marked.
    expected = {"numbers": 5 + 1 + 2 + 3 + 1, "whole_numbers": 4}
    counts = data.count_labels(batch)
    assert counts == {"tokens": sum(len(text) + 1 for text in texts), **expected}


@pytest.mark.parametrize(
    ("averages", "counted"),
    [(["tokens", "numbers"], False), (["tokens", "whole_numbers"], True)],
)
def test_whole_numbers_are_counted_in_training_where_a_term_is_averaged_over_them(
    tmp_path, averages, counted
):
    data = data_module(train=[targets("12 3")], val=[])
    data.trainer = trainer_for(tmp_path)
    terms = [SimpleNamespace(averaged_over=average) for average in averages]
    data.trainer.strategy.connect(SimpleNamespace(objective=SimpleNamespace(terms=terms)))
    data.setup("fit")
    (batch,) = itertools.islice(data.train_dataloader(), 1)
    expected = {"tokens": 5, "numbers": 3} | ({"whole_numbers": 2} if counted else {})
    assert batch["step_totals"] == expected


def test_whole_numbers_are_counted_for_a_module_that_tells_nothing_of_its_terms(tmp_path):
    data = data_module(train=[targets("12 3")], val=[])
    data.trainer = trainer_for(tmp_path)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch["step_totals"] == {"tokens": 5, "numbers": 3, "whole_numbers": 2}


# ---- Numbers that are no quantities

IDS = ("id 17 has 345", "id 204 has 8", "id 1 has nothing")


def marked(*texts, **settings):
    data = data_module(**{"train": [targets(*texts)], "val": [], **settings})
    data.setup("fit")
    return data


def said_of_training(monkeypatch, *texts, **settings):
    messages = []
    monkeypatch.setattr("ntl_lightning.data.datamodule.rank_zero_info", messages.append)
    data = marked(*texts, **settings)
    (message,) = messages
    return data.label_coverage, message


def test_marked_numbers_are_counted_apart(monkeypatch):
    coverage, message = said_of_training(monkeypatch, *IDS, not_quantities=[r"id (\d+)"])
    tokens = sum(len(text) + 1 for text in IDS)
    assert coverage == LabelCoverage(tokens, digit_bearing=4, numbers=4, not_quantities=6)
    assert f"of these 4 number tokens ({4 / tokens:.1%}), 6 more are marked as no qu" in message


def test_marked_numbers_are_counted_apart_where_the_data_mark_them(tmp_path, monkeypatch):
    (tmp_path / "rooms.csv").write_text("q,room,t\na,12,19.5\nb,7,4\n")
    rooms = Csv(str(tmp_path / "rooms.csv"), "q", "{room}: {t}", not_quantities=("room",))
    coverage, message = said_of_training(monkeypatch, train=[rooms, targets("5")])
    assert (coverage.numbers, coverage.not_quantities) == (5, 3)
    assert "of these 5 number tokens" in message
    assert "3 more are marked as no quantities" in message


def test_nothing_is_said_of_marks_where_there_are_none(monkeypatch):
    coverage, message = said_of_training(monkeypatch, *IDS)
    assert (coverage.numbers, coverage.not_quantities) == (10, 0)
    assert "marked" not in message


def test_marked_tokens_do_not_count_as_out_of_reach():
    """Of width 3, `123` is one token and no single digit: a warning, unless it is an id."""
    settings = {"tokenizer": ArithmeticTokenizer(number_width=3)}
    texts = ("id 123 has 4", "id 456 has 78")
    with pytest.warns(UserWarning, match=r"Only 33\.3% of the label tokens with a digit"):
        marked("123 456 7 ", **settings)
    assert marked(*texts, not_quantities=["id (...)"], **settings).label_coverage == LabelCoverage(
        tokens=11 + 12, digit_bearing=3, numbers=3, not_quantities=0
    )


@pytest.mark.parametrize("pattern", ["code ([0-9]+)", "id", r"(id) [0-9]+", "x*"])
def test_a_pattern_without_effect_on_the_training_data_is_reported(pattern):
    message = r"data\.not_quantities\[1\]: .* finds no digit in any target of data\.train"
    with pytest.warns(UserWarning, match=message) as caught:
        marked(*IDS, not_quantities=["id [0-9]+", pattern])
    (warning,) = caught
    assert repr(pattern) in str(warning.message)
    assert "'id 17 has 345'" in str(warning.message)


def test_a_column_without_effect_on_the_training_data_is_reported(tmp_path):
    (tmp_path / "rooms.csv").write_text("q,room,t\na,hall,19.5\nb,den,4\n")
    rooms = Csv(str(tmp_path / "rooms.csv"), "q", "{room}: {t}", not_quantities=("room",))
    message = r"data\.train\[1\]: what its not_quantities marks never .*'hall: 19\.5'"
    with pytest.warns(UserWarning, match=message):
        marked(train=[targets("1"), rooms])


def test_marks_that_leave_no_number_are_reported():
    with pytest.warns(UserWarning, match=r"not_quantities marks all 6 number tokens"):
        marked("id 17", "id 2048", not_quantities=[r"\d"])


def test_all_sets_have_the_same_marks():
    data = data_module(
        train=[targets("id 1 is 2")],
        val=[Pairs((("a", "id 3 is 4"), ("b", "5")))],
        test={"far": [targets("no number")]},
        predict=[Pairs((("c", "id 6"), ("d", None)))],
        not_quantities=[r"id (\d)"],
    )
    with pytest.warns(UserWarning, match="also prompts of"):
        data.setup("fit")
    data.setup("test")
    data.setup("predict")
    loaders = [
        data.train_dataloader(),
        data.val_dataloader(),
        data.test_dataloader()["far"],
        data.predict_dataloader()["predict"],
    ]
    seen = []
    for (batch,) in loaders:
        assert batch["quantities"].shape == batch["labels"].shape
        marked = (batch["labels"] != -100) & ~batch["quantities"]
        seen.append("".join(data.tokenizer.convert_ids_to_tokens(batch["labels"][marked])))
    assert seen == ["1", "3", "", "6"]


def test_marked_labels_are_tokens_but_no_numbers():
    data = data_module()
    number, letter, end = data.tokenizer.convert_tokens_to_ids(["7", "x", data.tokenizer.eos_token])
    batch = {
        "labels": torch.tensor([[-100, number, end], [letter, number, -100]]),
        "quantities": torch.tensor([[False, False, True], [True, True, False]]),
    }
    assert data.count_labels(batch) == {"tokens": 4, "numbers": 1, "whole_numbers": 1}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_totals_of_a_run_leave_out_what_is_marked(tmp_path, accumulated):
    data = data_module(train=[targets(*IDS)], val=[], batch_size=1, not_quantities=[r"id (\d+)"])
    watch = Watch()
    trainer_for(tmp_path, watch, max_epochs=1, accumulate_grad_batches=accumulated).fit(
        new_module(), data
    )
    ends = {"345": (3, 14), "8": (1, 13), "nothing": (0, 17)}  # numbers and tokens
    tokenizer = data.tokenizer
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for (ids,) in watch.batches]
    counts = [ends[text.rpartition(" ")[2]] for text in texts]
    assert watch.num_labels == [tokens for _, tokens in counts]
    steps = [counts[i : i + accumulated] for i in range(0, 3, accumulated)]
    expected = [sum(numbers for numbers, _ in step) for step in steps for _ in step]
    assert [totals["numbers"] for totals in watch.totals] == expected


def distance_of_the_last_numbers(module, pairs):
    """Mean expected distance to the digits behind the last blank, text by text."""
    tokenizer, distances = module.tokenizer, []
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    for prompt, target in pairs:
        ids = tokenizer(prompt + target)["input_ids"]
        with torch.no_grad():
            logits = module.language_model(torch.tensor([ids])).logits[0]
        number = target.rpartition(" ")[2]
        for place, digit in enumerate(number, len(ids) - len(number)):
            shares = logits[place - 1, digits].double().softmax(0).tolist()
            distances.append(sum(p * abs(v - int(digit)) for v, p in enumerate(shares)))
    return fmean(distances)


@pytest.mark.parametrize("logits", ["auto", "full"])
def test_the_number_losses_of_a_run_pass_over_what_is_marked(tmp_path, logits):
    train, val = (("a", "id 17 has 345"), ("bc", "id 204 has 8")), (("d", "id 6 has 97"),)
    data = data_module(train=[Pairs(train)], val=[Pairs(val)], not_quantities=[r"id (\d+)"])
    module = new_module(optimizer=AdamW(lr=1e-12), logits=logits)
    trainer = trainer_for(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, data)
    logged = trainer.callback_metrics
    assert logged["train/number_tokens"] == 4
    assert logged["val/num_number_tokens"] == 2
    for name, pairs in (("train/ntl_was", train), ("val/ntl_was", val)):
        expected = distance_of_the_last_numbers(module, pairs)
        assert float(logged[name]) == pytest.approx(expected, rel=1e-5)


def test_test_sets_of_which_something_is_left_out_are_not_predicted():
    texts = Pairs((("1+1+1+", "3"), ("1+", "2")))
    data = data_module(
        train=[texts], val=[], test={"far": [texts]}, max_prompt_tokens=3, too_long="leave_out"
    )
    with pytest.warns(UserWarning, match="left out"):
        data.setup("predict")
    with pytest.raises(ValueError, match=r"data\.test\.far is predicted, but 1 of its examples"):
        data.predict_dataloader()


def test_what_training_shares_is_told_of_the_prompts_as_they_were_and_of_what_is_there():
    known = Pairs((("1+2+3=", "6"), ("1+1=", "2")))
    data = data_module(
        train=[known],
        val=[known],
        test={"far": [known]},
        max_prompt_tokens=4,
        too_long="cut_prompt",
    )
    with pytest.warns(UserWarning, match="prompts") as caught:
        data.setup("fit")
    shared = [str(w.message) for w in caught if "also prompts of data.train" in str(w.message)]
    assert [message.split(":")[0] for message in shared] == [
        "2 of 2 prompts of data.val are also prompts of data.train",
        "2 of 2 prompts of data.test.far are also prompts of data.train",
    ]
