"""Packed rows train a model exactly as rows of their own."""

import os
import re

import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.backbones import FromConfig, Pretrained
from ntl_lightning.cli import main
from ntl_lightning.evaluation import Generation
from ntl_lightning.losses import CrossEntropy, ExpectedValue, NumberLevel, Wasserstein
from ntl_lightning.numbers import ArithmeticTokenizer, PretrainedTokenizer
from ntl_lightning.optimization import ConstantLR
from tests.conftest import ROOT
from tests.test_module import (
    MIXED,
    TINY_GPT2,
    TINY_LLAMA,
    Pairs,
    PlainSGD,
    relative_difference,
    trainer_for,
)

TINY_QWEN2 = FromConfig("qwen2", {**TINY_LLAMA.settings, "num_key_value_heads": 1})
# Dropout would be drawn otherwise for other shapes.
TINY_GPT2 = FromConfig(
    "gpt2", {**TINY_GPT2.settings, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
)
BACKBONES = {"llama": TINY_LLAMA, "gpt2": TINY_GPT2, "qwen2": TINY_QWEN2}

PLAIN = {"batch_size": 16}
# 16 examples of 6 to 11 tokens in 5 or 6 rows of 25 to 30, which are 3 batches.
PACKED = {"packing": True, "max_tokens_per_batch": 60}


class Steps(Callback):
    """The batches of a run and the loss of each."""

    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.losses.append(outputs["loss"].item())


def one_step(folder, data, backbone=TINY_LLAMA, tokenizer=None, logits="auto", **settings):
    """Minus the gradient of one optimizer step, and its micro-batches."""
    tokenizer = tokenizer or ArithmeticTokenizer()
    seed_everything(0)
    module = NumberAwareLM(
        backbone=backbone,
        tokenizer=tokenizer,
        loss_terms=[
            CrossEntropy(),
            Wasserstein(weight=0.5),
            ExpectedValue(weight=0.2, averaged_over="tokens"),
            NumberLevel(weight=0.2),
        ],
        logits=logits,
        optimizer=PlainSGD(),
        lr_schedule=ConstantLR(),
        generation=Generation(during_fit=False),
    )
    module.configure_model()
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    sources = {"train": [Pairs(MIXED)], "val": [], "not_quantities": ["^1[0-9]*"]}
    steps = Steps()
    trainer = trainer_for(folder, max_steps=1, callbacks=[steps], **settings)
    trainer.fit(module, NumberDataModule(**sources, tokenizer=tokenizer, **data))
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    return after - before, steps


def assert_the_same_step(packed, plain, num_batches):
    """The same loss and gradient, from fewer rows."""
    (change, steps), (expected, whole) = packed, plain
    assert expected.norm() > 1e-2
    assert len(steps.batches) == num_batches
    num_rows = sum(len(batch["labels"]) for batch in steps.batches)
    assert num_rows < len(whole.batches[0]["labels"]) == 16
    assert steps.batches[0]["step_totals"] == whole.batches[0]["step_totals"]
    # Lightning's accumulated parts are already divided by their number.
    (loss,) = whole.losses
    assert sum(steps.losses) == pytest.approx(loss, rel=1e-5)
    assert relative_difference(change, expected) < 1e-5


@pytest.mark.parametrize("logits", ["auto", "full"])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_packed_step_has_loss_and_gradient_of_the_unpacked(tmp_path, name, logits):
    settings = {"backbone": BACKBONES[name], "logits": logits}
    plain = one_step(tmp_path, PLAIN, **settings)
    whole = one_step(tmp_path, {**PACKED, "max_tokens_per_batch": 300}, **settings)
    assert_the_same_step(whole, plain, 1)
    parts = one_step(tmp_path, PACKED, accumulate_grad_batches=3, **settings)
    assert_the_same_step(parts, plain, 3)


@pytest.mark.parametrize("logits", ["auto", "full"])
def test_a_packed_step_of_a_trained_model_is_that_of_the_unpacked(tmp_path, assets, logits):
    folder = str(assets / "models/stories260k")
    settings = {
        "backbone": Pretrained(folder),
        "tokenizer": PretrainedTokenizer(folder),
        "logits": logits,
    }
    plain = one_step(tmp_path, PLAIN, **settings)
    packed = {"packing": True, "max_tokens_per_batch": 80, "pad_to_multiple_of": 8}
    parts = one_step(tmp_path, packed, accumulate_grad_batches=2, **settings)
    assert all(batch["labels"].shape[1] % 8 == 0 for batch in parts[1].batches)
    assert_the_same_step(parts, plain, 2)


def _rank(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    torch.set_num_threads(1)
    ddp = DDPStrategy(process_group_backend="gloo")
    data = {**PACKED, "num_workers": 2}
    change, steps = one_step(folder, data, devices=2, strategy=ddp, accumulate_grad_batches=2)
    torch.save((change, [batch["labels"] for batch in steps.batches]), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_ranks_with_two_workers_make_the_packed_step_of_one(tmp_path, free_port):
    expected, whole = one_step(tmp_path, PLAIN)
    mp.spawn(_rank, args=(free_port, str(tmp_path)), nprocs=2, join=True)
    changes, labels = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)), strict=True)
    assert torch.equal(changes[0], changes[1])
    assert relative_difference(changes[0], expected) < 1e-5
    count = sum(int((batch != -100).sum()) for own in labels for batch in own)
    assert count == whole.batches[0]["step_totals"]["tokens"]


def test_a_row_may_be_longer_than_the_positions_of_the_model_but_no_example(tmp_path):
    short = FromConfig("gpt2", {**TINY_GPT2.settings, "n_positions": 20})
    packed = {"packing": True, "max_tokens_per_batch": 30}
    _, steps = one_step(tmp_path, packed, backbone=short)
    assert steps.batches[0]["labels"].shape[1] > 20
    short = FromConfig("gpt2", {**TINY_GPT2.settings, "n_positions": 10})
    with pytest.raises(ValueError, match="a sequence of 11 tokens is longer than the 10 positions"):
        one_step(tmp_path, {**packed, "max_tokens_per_batch": 300}, backbone=short)


def test_a_model_that_mixes_packed_examples_is_refused_before_its_first_step(tmp_path):
    bloom = FromConfig("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2})
    message = (
        r"model\.backbone cannot be trained with data\.packing: .* logits of a packed example, .* "
        r"Set data\.packing to false"
    )
    with pytest.raises(ValueError, match=message):
        one_step(tmp_path, PACKED, backbone=bloom)


def test_a_model_is_tried_once_a_fit(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("ntl_lightning.module.verify_packing", lambda *args: calls.append(args))
    one_step(tmp_path, PACKED, accumulate_grad_batches=3)
    assert len(calls) == 1
    one_step(tmp_path, PLAIN)
    assert len(calls) == 1


def test_the_configuration_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    section = page.partition("\n### Packed rows\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "page.yaml").write_text(block, encoding="utf-8")
    quick = ["--trainer.limit_train_batches=2", "--model.generation.during_fit=false"]
    main(["fit", "--config", "page.yaml", "--trainer.logger=false", *quick])
    assert list(tmp_path.rglob("last.ckpt"))
