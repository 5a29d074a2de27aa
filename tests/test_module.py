"""NumberAwareLM: exact averages, the one shift, training mode, evaluation and what is logged."""

import importlib
import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.backbones import FromConfig, Pretrained
from ntl_lightning.data import Example, Source
from ntl_lightning.evaluation import Generation
from ntl_lightning.losses import (
    CrossEntropy,
    ExpectedValue,
    LinearWarmup,
    NumberLevel,
    Wasserstein,
)
from ntl_lightning.numbers import ArithmeticTokenizer, PretrainedTokenizer
from ntl_lightning.optimization import AdamW, ConstantLR, LRSchedule, OptimizerSpec

# Untrained models say little that can be read as a number.
pytestmark = [
    pytest.mark.filterwarnings("ignore:NaN, because they are not defined"),
    pytest.mark.filterwarnings("ignore:.* are also prompts of data.train"),
]

TINY_LLAMA = FromConfig(
    "llama",
    {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    },
)
TINY_GPT2 = FromConfig("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64})
TINY_T5 = FromConfig("t5", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2})


@dataclass(frozen=True)
class Pairs(Source):
    """Prompts and targets given as they are."""

    pairs: tuple[tuple[str, str], ...]

    def examples(self):
        return [Example(p, t, f"Pairs[{i}]") for i, (p, t) in enumerate(self.pairs)]


@dataclass(frozen=True)
class PlainSGD(OptimizerSpec):
    """Leaves the gradient as it is: the change of the weights is -lr times it."""

    lr: float = 1.0

    def build(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)


def trainer_for(tmp_path, **settings):
    return Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
            **settings,
        }
    )


def fitted(tmp_path, module, data, **settings):
    trainer = trainer_for(tmp_path, **settings)
    trainer.fit(module, data)
    return trainer


# Some examples without any number, so that micro-batches differ as much as they can: sorted, the
# second rank of two would see no number at all.
MIXED = tuple((f"{i}+{i}=", str(2 * i) * (1 + i % 3)) for i in range(8)) + tuple(
    (f"say {c}:", c * (1 + i % 3)) for i, c in enumerate("abcdefgh")
)


def exactness_module(averaged_over):
    """Terms averaged over numbers or tokens, and one over whole numbers."""
    seed_everything(0)
    return NumberAwareLM(
        backbone=TINY_LLAMA,
        loss_terms=[
            CrossEntropy(),
            Wasserstein(weight=0.5, averaged_over=averaged_over),
            ExpectedValue(weight=0.2, averaged_over=averaged_over),
            NumberLevel(weight=0.2),
        ],
        optimizer=PlainSGD(),
        lr_schedule=ConstantLR(),
        generation=Generation(during_fit=False),
    )


def change_of_weights(tmp_path, averaged_over, batch_size, **settings):
    module = exactness_module(averaged_over)
    module.configure_model()
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    data = NumberDataModule(train=[Pairs(MIXED)], val=[], batch_size=batch_size)
    fitted(tmp_path, module, data, max_epochs=1, **settings)
    return torch.cat([p.detach().flatten() for p in module.parameters()]) - before


def relative_difference(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("averaged_over", ["numbers", "tokens"])
@pytest.mark.parametrize(("batch_size", "accumulated"), [(4, 4), (1, 16), (5, 4), (3, 6)])
def test_accumulated_micro_batches_give_the_gradient_of_the_whole(
    tmp_path, averaged_over, batch_size, accumulated
):
    whole = change_of_weights(tmp_path, averaged_over, 16)
    assert whole.norm() > 1e-2
    parts = change_of_weights(
        tmp_path, averaged_over, batch_size, accumulate_grad_batches=accumulated
    )
    assert relative_difference(parts, whole) < 1e-5


@pytest.mark.parametrize("averaged_over", ["numbers", "tokens"])
def test_the_last_shorter_window_of_an_epoch_is_averaged_by_its_own_size(tmp_path, averaged_over):
    """6 batches in windows of 4 and 2 equal 2 steps of batches of 8 and 4 examples."""

    def run(batch_size, accumulated):
        module = exactness_module(averaged_over)
        data = NumberDataModule(
            train=[Pairs(MIXED[:12])], val=[], batch_size=batch_size, group_by_length=False
        )
        trainer = fitted(tmp_path, module, data, max_epochs=1, accumulate_grad_batches=accumulated)
        assert trainer.global_step == 2
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert relative_difference(run(2, 4), run(8, 1)) < 1e-5


def _rank(rank, port, averaged_over, folder, share_order):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    torch.set_num_threads(1)
    if share_order:
        # As given, unshuffled: rank 0 gets the examples with numbers, rank 1 those without.
        from ntl_lightning.data import BatchOrder

        BatchOrder._global_batches = lambda self: [list(range(len(self.lengths)))]
    change = change_of_weights(
        folder,
        averaged_over,
        8,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
    )
    torch.save(change, f"{folder}/rank{rank}.pt")


@pytest.mark.parametrize("averaged_over", ["numbers", "tokens"])
def test_two_ranks_give_the_gradient_of_the_whole_also_when_one_has_no_number(
    tmp_path, averaged_over, free_port
):
    whole = change_of_weights(tmp_path, averaged_over, 16)
    mp.spawn(_rank, args=(free_port, averaged_over, str(tmp_path), True), nprocs=2, join=True)
    changes = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert torch.equal(changes[0], changes[1])
    assert relative_difference(changes[0], whole) < 1e-5


def test_causal_labels_are_shifted_once_and_only_here():
    module = NumberAwareLM(backbone=TINY_LLAMA)
    module.configure_model()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    labels = torch.tensor([[-100, -100, 7, 8, 9]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "first_label": 2,
    }
    module.eval()
    logits, aligned = module(batch)
    assert aligned.tolist() == [[7, 8, 9, -100]]
    whole = module.model(input_ids=ids).logits
    torch.testing.assert_close(logits, whole[:, 1:], rtol=1e-5, atol=1e-6)


def test_seq2seq_labels_are_not_shifted_and_start_with_one_start_token():
    module = NumberAwareLM(backbone=TINY_T5)
    module.configure_model()
    seen = {}
    module.model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    labels = torch.tensor([[30, 31, 1, -100]])
    batch = {
        "input_ids": torch.tensor([[5, 6, 1]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
        "labels": labels,
    }
    logits, aligned = module(batch)
    start, pad = module.model.config.decoder_start_token_id, module.model.config.pad_token_id
    assert seen["decoder_input_ids"].tolist() == [[start, 30, 31, 1]]
    assert start == pad
    assert torch.equal(aligned, labels)
    assert logits.shape[:2] == labels.shape


@pytest.mark.parametrize("backbone", [TINY_LLAMA, TINY_GPT2])
def test_one_digit_per_position_is_seen_by_the_number_loss_after_the_shift(backbone):
    """`a37.`: logits that say 3, 7 and . at the right places cost no NTL over 2 numbers."""
    module = NumberAwareLM(backbone=backbone, loss_terms=[Wasserstein()])
    module.configure_model()
    ids = torch.tensor([module.tokenizer("a37.")["input_ids"]])
    said = torch.full((1, 4, module.vocabulary.width), 0.0)
    for position, token in enumerate(ids[0, 1:]):
        said[0, position, token] = 60.0
    module.model.forward = lambda logits_to_keep, **inputs: type("Output", (), {"logits": said})
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    result = module.objective(*module({**batch, "first_label": 1}))
    assert result.counts["numbers"] == 2
    assert result.parts["ntl_was"].item() == pytest.approx(0, abs=1e-6)


class ModeWatch(Callback):
    def __init__(self):
        self.modes = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.modes.append(all(m.training for m in pl_module.model.modules()))


def test_a_pretrained_model_trains_in_train_mode_at_every_step(tmp_path):
    seed_everything(0)
    tokenizer = ArithmeticTokenizer()
    config = FromConfig("t5", {**TINY_T5.settings, "dropout_rate": 0.5})
    config.build(tokenizer.load()).save_pretrained(tmp_path / "model")
    module = NumberAwareLM(backbone=Pretrained(str(tmp_path / "model")), tokenizer=tokenizer)
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[Pairs(MIXED)], batch_size=8, architecture="seq2seq"
    )
    watch = ModeWatch()
    fitted(tmp_path, module, data, max_epochs=2, callbacks=[watch], num_sanity_val_steps=1)
    assert watch.modes == [True] * 4


@dataclass(frozen=True)
class TenStepWarmup(LRSchedule):
    def build(self, optimizer, num_steps):
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


class RateWatch(Callback):
    def __init__(self):
        self.factors = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.factors.append(round(trainer.optimizers[0].param_groups[0]["lr"], 6))


@pytest.mark.parametrize(
    ("accumulated", "factors"),
    [
        (1, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
        (2, [0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5]),
    ],
)
def test_the_learning_rate_moves_with_every_optimizer_step(tmp_path, accumulated, factors):
    module = NumberAwareLM(
        backbone=TINY_LLAMA, optimizer=AdamW(lr=1.0), lr_schedule=TenStepWarmup()
    )
    data = NumberDataModule(train=[Pairs(MIXED)], val=[], batch_size=4)
    watch = RateWatch()
    trainer = fitted(
        tmp_path,
        module,
        data,
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        callbacks=[watch],
    )
    assert watch.factors == factors
    assert trainer.estimated_stepping_batches == 8 / accumulated


def test_epoch_averages_weigh_every_number_not_every_batch(tmp_path):
    """Two batches, 1 number with loss 9 and 9 numbers with loss 1: 1.8, not 5."""
    module = NumberAwareLM(
        backbone=TINY_LLAMA,
        loss_terms=[CrossEntropy(), Wasserstein()],
        generation=Generation(during_fit=False),
    )
    module.configure_model()
    ids = module.tokenizer.convert_tokens_to_ids([str(d) for d in range(10)])

    def forward(batch):
        labels = batch["labels"]
        logits = torch.zeros(*labels.shape, module.vocabulary.width)
        logits[..., ids[9] if (labels == ids[0]).sum() == 1 else ids[1]] = 60.0
        return logits, labels

    module.forward = forward
    module._check_batch = lambda *args: None
    rows = torch.full((2, 1, 9), -100)
    rows[0, 0, 0] = ids[0]
    rows[1, 0, :] = ids[0]
    batches = [{"labels": row, "index": [0], "prompt": ["p"], "target": ["0"]} for row in rows]
    trainer = trainer_for(tmp_path)
    module.generation = Generation(max_new_tokens=1)
    module._answer = lambda batch: (["0"], [False])
    (logged,) = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    assert logged["val/ntl_was"] == pytest.approx(1.8, rel=1e-6)
    per_token = math.log(math.exp(60) + module.vocabulary.width - 1)
    assert logged["val/cross_entropy"] == pytest.approx(per_token, rel=1e-6)
    assert logged["val/perplexity"] == pytest.approx(math.exp(per_token), rel=1e-5)
    assert logged["val/loss"] == pytest.approx(per_token + 0.3 * 1.8, rel=1e-6)
    assert logged["val/num_number_tokens"] == 10


def test_validation_without_any_readable_answer_ends_and_says_what_is_undefined(tmp_path):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA, generation=Generation(max_new_tokens=1))
    module.configure_model()
    module._answer = lambda batch: (["no number"] * len(batch["index"]), [True])
    data = NumberDataModule(train=[Pairs(MIXED[:2])], val=[Pairs(MIXED[:1])], batch_size=1)
    trainer = trainer_for(tmp_path)
    with pytest.warns(UserWarning, match="r2"):
        (logged,) = trainer.validate(module, data, verbose=False)
    assert math.isnan(logged["val/r2"])
    assert math.isnan(logged["val/mae"])
    assert logged["val/invalid_rate"] == 1
    assert logged["val/exact_match"] == 0
    assert logged["val/num_samples"] == 1


def never_ending(module):
    """A model that says the same letter for ever."""
    module.configure_model()
    letter = module.tokenizer.convert_tokens_to_ids("a")
    module.model.lm_head.weight.data.zero_()
    bias = torch.zeros(module.vocabulary.width)
    bias[letter] = 10.0
    head = module.model.lm_head.forward
    module.model.lm_head.forward = lambda hidden: head(hidden) + bias
    return module


@pytest.mark.parametrize(("limit", "length"), [(33, 33), (None, 4 + 8)])
def test_answers_are_as_long_as_configured_or_as_the_data_asks_never_twenty(
    tmp_path, limit, length
):
    module = never_ending(
        NumberAwareLM(backbone=TINY_LLAMA, generation=Generation(max_new_tokens=limit))
    )
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[Pairs((("1+1=", "abc"), ("2+2=", "4")))], batch_size=2
    )
    seen = []

    class Watch(Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, *rest):
            seen.extend(outputs["answer"])

    trainer = trainer_for(tmp_path, callbacks=[Watch()])
    (logged,) = trainer.validate(module, data, verbose=False)
    assert [len(answer) for answer in seen] == [length, length]
    assert logged["val/length_limit_rate"] == 1


@pytest.mark.parametrize(
    "preferences",
    [
        {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0},
        {"min_length": 10},
        {"min_new_tokens": 6},
        {"suppress_tokens": [0, 1, 2, 20, 21]},
        {"begin_suppress_tokens": [20, 21, 22]},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0},
        {"no_repeat_ngram_size": 1, "max_length": 3},
    ],
    ids=lambda preferences: "+".join(preferences),
)
def test_answers_are_greedy_whatever_the_checkpoint_prefers(preferences):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA, generation=Generation(max_new_tokens=6))
    module.configure_model()
    module.eval()
    ids = torch.tensor([module.tokenizer("1+1=")["input_ids"]])
    batch = {"prompt_input_ids": ids, "prompt_attention_mask": torch.ones_like(ids)}
    for key, value in preferences.items():
        setattr(module.model.generation_config, key, value)
    answers = {module._answer(batch)[0][0] for _ in range(3)}
    for _ in range(6):
        ids = torch.cat([ids, module.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert answers == {module.tokenizer.decode(ids[0, 4:], skip_special_tokens=True)}
    for key, value in preferences.items():
        assert getattr(module.model.generation_config, key) == value


def test_the_expected_value_answer_is_the_mean_before_the_first_label(tmp_path):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[Pairs((("1+1=", "2"), ("3+3=", "6"), ("9+9=", "18")))]
    )
    trainer = trainer_for(tmp_path)
    (logged,) = trainer.validate(module, data, verbose=False)
    module.eval()
    errors = []
    for prompt, value in (("1+1=", 2), ("3+3=", 6)):
        scores = module.model(torch.tensor([module.tokenizer(prompt)["input_ids"]])).logits[0, -1]
        digits = module.tokenizer.convert_tokens_to_ids([str(d) for d in range(10)])
        q = torch.softmax(scores[digits].double(), -1)
        errors.append(abs((q * torch.arange(10)).sum().item() - value))
    assert logged["val/expected_value_mae"] == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert logged["val/expected_value_rate"] == pytest.approx(2 / 3)


def test_training_stops_before_it_starts_where_no_label_can_be_a_number(tmp_path):
    text = tuple((p, "yes") for p, _ in MIXED)
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(train=[Pairs(text), Pairs((("?", "no"),))], val=[])
    message = (
        r"no label of the training data is a number token .* 0 of 67 label tokens hold a digit; "
        r"the first target of each source of data\.train: 'yes' \(Pairs.*\), 'no' \(Pairs.*\)\), so"
    )
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, module, data, max_epochs=1)
    plain = NumberAwareLM(backbone=TINY_LLAMA, loss_terms=[CrossEntropy()])
    fitted(tmp_path, plain, NumberDataModule(train=[Pairs(text)], val=[]), max_epochs=1)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_t5_in_float16_is_refused_with_the_reason(tmp_path, precision, monkeypatch):
    module = NumberAwareLM(backbone=TINY_T5)
    module.configure_model()
    module._trainer = type("T", (), {"precision": precision, "datamodule": None})()
    monkeypatch.setattr(NumberAwareLM, "trainer", property(lambda self: self._trainer))
    with pytest.raises(
        ValueError, match=f"activations of t5 .*precision={precision}.* use bf16-mixed"
    ):
        module.on_fit_start()


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_float16_weights_of_t5_are_refused_in_every_stage(tmp_path, stage):
    tokenizer = ArithmeticTokenizer()
    TINY_T5.build(tokenizer.load()).half().save_pretrained(tmp_path / "m")
    module = NumberAwareLM(backbone=Pretrained(str(tmp_path / "m"), dtype="float16"))
    sets = {"train": [Pairs(MIXED)], "val": [Pairs(MIXED)], "test": {"test": [Pairs(MIXED)]}}
    data = NumberDataModule(**sets, architecture="seq2seq")
    with pytest.raises(ValueError, match="activations of t5 models leave float16's range"):
        getattr(trainer_for(tmp_path, max_epochs=1), stage)(module, data)


def test_weights_in_float16_are_not_trained_in_vain(tmp_path):
    tokenizer = ArithmeticTokenizer()
    TINY_LLAMA.build(tokenizer.load()).half().save_pretrained(tmp_path / "m")
    module = NumberAwareLM(backbone=Pretrained(str(tmp_path / "m"), dtype="float16"))
    data = NumberDataModule(train=[Pairs(MIXED)])
    with pytest.raises(ValueError, match="weights in float16 cannot be trained"):
        fitted(tmp_path, module, data, max_epochs=1)


def test_bfloat16_keeps_a_large_t5_loss_within_one_percent(tmp_path):
    losses = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        seed_everything(0)
        module = NumberAwareLM(backbone=TINY_T5, loss_terms=[CrossEntropy(), Wasserstein()])
        module.configure_model()
        for name, parameter in module.model.named_parameters():
            if name.endswith("DenseReluDense.wo.weight"):
                parameter.data *= 1e5
        data = NumberDataModule(train=[Pairs(MIXED)], val=[], batch_size=16, architecture="seq2seq")
        trainer = fitted(tmp_path, module, data, max_epochs=1, precision=precision)
        losses[precision] = trainer.callback_metrics["train/loss"].item()
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.01)
    assert losses["bf16-true"] == pytest.approx(losses["32-true"], rel=0.01)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_golds_are_exact_under_true_half_precision(tmp_path, precision):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    module.configure_model()
    module._answer = lambda batch: (["1232.0"] * len(batch["index"]), [False] * 2)
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[Pairs((("a", "1234.5"), ("b", "1234.5")))], batch_size=2
    )
    trainer = trainer_for(tmp_path, precision=precision)
    with pytest.warns(UserWarning, match="r2"):
        (logged,) = trainer.validate(module, data, verbose=False)
    assert logged["val/mae"] == 2.5


@pytest.mark.parametrize("terms", [(CrossEntropy(), Wasserstein()), (NumberLevel(),)])
def test_all_promised_names_are_logged_and_no_others(tmp_path, terms):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA, loss_terms=terms)
    data = NumberDataModule(train=[Pairs(MIXED)], val=[Pairs(MIXED)], batch_size=8)
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    assert set(trainer.callback_metrics) == module.log_names()


def test_several_named_test_sets_are_logged_apart(tmp_path):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(
        train=[Pairs(MIXED)],
        val=[],
        test={"test": [Pairs(MIXED[:4])], "far": [Pairs(MIXED[4:7])]},
    )
    trainer = trainer_for(tmp_path)
    logged = {}
    for part in trainer.test(module, data, verbose=False):
        logged |= part
    logged = {key.split("/dataloader_idx_")[0]: value for key, value in logged.items()}
    assert logged["test/num_samples"] == 4
    assert logged["test_far/num_samples"] == 3


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
@pytest.mark.parametrize(
    ("backbone", "made_for", "kind"),
    [(TINY_T5, "causal", "seq2seq"), (TINY_LLAMA, "seq2seq", "causal")],
)
def test_a_batch_made_for_the_other_architecture_is_refused(
    tmp_path, stage, backbone, made_for, kind
):
    module = NumberAwareLM(backbone=backbone)
    sets = {"train": [Pairs(MIXED)], "val": [Pairs(MIXED)], "test": {"test": [Pairs(MIXED)]}}
    data = NumberDataModule(**sets, architecture=made_for)
    with pytest.raises(ValueError, match=f"not made for a {kind} model"):
        getattr(trainer_for(tmp_path, max_epochs=1), stage)(module, data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": ArithmeticTokenizer()}, r"data\.tokenizer is not model\.tokenizer"),
        ({"number_tokens": "digits"}, r"data\.number_tokens='digits' .* not those of the model"),
        ({"largest_number_token": 99}, r"data\.largest_number_token=99 are not those"),
    ],
)
def test_data_that_count_other_numbers_than_the_model_are_refused(tmp_path, settings, message):
    """Otherwise the losses would be divided by the wrong counts."""
    shared = {"tokenizer": ArithmeticTokenizer(number_width=3), "number_tokens": "integers"}
    module = NumberAwareLM(backbone=TINY_LLAMA, **shared)
    data = NumberDataModule(train=[Pairs(MIXED)], **{**shared, **settings})
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, module, data, max_epochs=1)


def test_sequences_longer_than_the_models_positions_are_refused(tmp_path):
    short = FromConfig("gpt2", {**TINY_GPT2.settings, "n_positions": 5})
    data = NumberDataModule(train=[Pairs((("1+1=", "12345"),))])
    with pytest.raises(ValueError, match="10 tokens is longer than the 5 positions"):
        fitted(tmp_path, NumberAwareLM(backbone=short), data, max_epochs=1)


def test_where_padding_alone_exceeds_the_models_positions_its_setting_is_named(tmp_path):
    short = FromConfig("gpt2", {**TINY_GPT2.settings, "n_positions": 11})
    data = NumberDataModule(train=[Pairs((("1+1=", "12345"),))], pad_to_multiple_of=8)
    message = r"of 10 tokens 16 long, more than the 11 positions .* data\.pad_to_multiple_of"
    with pytest.raises(ValueError, match=message):
        fitted(tmp_path, NumberAwareLM(backbone=short), data, max_epochs=1)


def test_answers_stop_where_the_models_positions_end(tmp_path):
    backbone = FromConfig("gpt2", {**TINY_GPT2.settings, "n_positions": 8})
    module = NumberAwareLM(backbone=backbone, generation=Generation(max_new_tokens=50))
    module.configure_model()
    module.eval()
    for tokens, length in (("1+1=", 4), ("1+1=2+3", 1)):
        ids = torch.tensor([module.tokenizer(tokens)["input_ids"]])
        batch = {"prompt_input_ids": ids, "prompt_attention_mask": torch.ones_like(ids)}
        module.model.generation_config.eos_token_id = None
        answers, _ = module._answer(batch)
        assert len(answers[0]) <= length
    ids = torch.ones(1, 8, dtype=torch.long)
    batch = {"prompt_input_ids": ids, "prompt_attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match="8 tokens leaves no room for an answer in the 8"):
        module._answer(batch)


def test_a_seq2seq_model_without_a_shift_of_its_own_starts_with_the_start_token(tmp_path):
    backbone = FromConfig(
        "m2m_100",
        {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 64,
        },
    )
    module = NumberAwareLM(backbone=backbone)
    data = NumberDataModule(train=[Pairs(MIXED)], architecture="seq2seq")
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_a_loader_without_step_totals_is_warned_of_under_accumulation(tmp_path):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    ids = torch.tensor([[5, 6, 7, 25]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "first_label": 1,
    }
    trainer = trainer_for(tmp_path, max_epochs=1, accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="gives no step totals"):
        trainer.fit(module, DataLoader([batch] * 4, batch_size=None))


def test_the_steps_behind_the_weights_are_known_to_another_trainer(tmp_path):
    seed_everything(0)
    terms = [CrossEntropy(), Wasserstein(weight=1.0, schedule=LinearWarmup(steps=2))]
    module = NumberAwareLM(backbone=TINY_LLAMA, loss_terms=terms)
    data = NumberDataModule(train=[Pairs(MIXED)], test={"test": [Pairs(MIXED)]}, batch_size=4)
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    (same,) = trainer.test(module, data, verbose=False)
    (other,) = trainer_for(tmp_path).test(module, data, verbose=False)
    assert module.trained_steps == 4
    assert other["test/loss"] == same["test/loss"]
    assert other["test/loss"] == pytest.approx(
        other["test/cross_entropy"] + other["test/ntl_was"], rel=1e-5
    )


def test_a_fit_without_validation_leaves_the_length_of_its_targets(tmp_path):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(train=[Pairs(MIXED)])
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = NumberAwareLM.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.max_new_tokens == data.longest_target + 8


def test_prediction_without_a_known_length_says_so_before_it_starts(tmp_path):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="max_new_tokens is not set and the data"):
        trainer_for(tmp_path).predict(module, DataLoader([{"input_ids": ids}], batch_size=None))


def test_results_of_an_evaluation_are_kept_in_float64(tmp_path):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    module.configure_model()
    module._answer = lambda batch: (["16777217", "16777218"], [False] * 2)
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[Pairs((("a", "0"), ("b", "1")))], batch_size=2
    )
    trainer_for(tmp_path).validate(module, data, verbose=False)
    assert module.evaluation_results["val"]["mae"] == 16777217.0


def test_objects_in_place_of_settings_are_refused():
    with pytest.raises(TypeError, match=r"model\.tokenizer must be a Tokenizer, got"):
        NumberAwareLM(tokenizer=ArithmeticTokenizer().load())
    with pytest.raises(
        TypeError, match=r"model\.backbone must be a Backbone, got LlamaForCausalLM"
    ):
        NumberAwareLM(backbone=TINY_LLAMA.build(ArithmeticTokenizer().load()))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (CrossEntropy(), r"model\.loss_terms must be a list of LossTerm, got CrossEntropy itself"),
        (["ce"], r"model\.loss_terms must be a list of LossTerm, got str"),
    ],
)
def test_loss_terms_of_the_wrong_kind_are_refused(terms, message):
    with pytest.raises(TypeError, match=message):
        NumberAwareLM(backbone=TINY_LLAMA, loss_terms=terms)


def test_the_model_is_asked_for_before_it_is_built():
    with pytest.raises(RuntimeError, match="call configure_model"):
        _ = NumberAwareLM(backbone=TINY_LLAMA).language_model


def test_what_evaluation_needs_of_the_training_data_is_in_the_checkpoint(tmp_path):
    seed_everything(0)
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(train=[Pairs(MIXED)], val=[Pairs(MIXED)], batch_size=8)
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = NumberAwareLM.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.training_mean == module.training_mean
    assert loaded.max_new_tokens == module.max_new_tokens
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    test = NumberDataModule(test={"test": [Pairs(MIXED)]})
    (logged,) = trainer_for(tmp_path).test(loaded, test, verbose=False)
    assert "test/training_mean_mae" in logged


@pytest.mark.parametrize("digit_level", [False, True])
def test_t5_with_its_real_tokenizer_sees_prefixed_digits(assets, tmp_path, digit_level):
    """The answer `5` is the one token `▁5`: it counts as a number."""
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5"), digit_level=digit_level)
    backbone = FromConfig("t5", {**TINY_T5.settings, "vocab_size": 32128})
    module = NumberAwareLM(backbone=backbone, tokenizer=tokenizer)
    module.configure_model()
    assert module.model.lm_head.weight.shape[0] == 32128
    result = module.objective(torch.zeros(1, 2, 32128), torch.tensor([[305, 1]]))
    assert result.counts["numbers"] == 1
    assert result.parts["ntl_was"].item() > 0


# From hidden states or from logits

TINY_BERT = FromConfig(
    "bert",
    {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "is_decoder": True,
    },
)
TINY_GRANITE = FromConfig("granite", {**TINY_LLAMA.settings, "logits_scaling": 5.0})
WAYS = {"llama": TINY_LLAMA, "gpt2": TINY_GPT2, "bert": TINY_BERT, "t5": TINY_T5}
WAYS["granite"] = TINY_GRANITE


def trained(tmp_path, backbone=TINY_LLAMA, module_settings=None, **settings):
    """The module, its last loss and how two steps changed the weights."""
    seed_everything(0)
    module = NumberAwareLM(
        backbone=backbone,
        optimizer=PlainSGD(lr=0.1),
        lr_schedule=ConstantLR(),
        generation=Generation(during_fit=False),
        **(module_settings or {}),
    )
    module.configure_model()
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    data = NumberDataModule(
        train=[Pairs(MIXED)], val=[], batch_size=8, architecture=module.architecture
    )
    trainer = fitted(tmp_path, module, data, max_epochs=1, **settings)
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    return module, trainer.callback_metrics["train/loss"].item(), after - before


class WidthWatch(Callback):
    """Widths of what the output head returns."""

    def __init__(self):
        self.widths = []

    def on_fit_start(self, trainer, pl_module):
        head = pl_module.model.get_output_embeddings()
        head.register_forward_hook(lambda m, i, output: self.widths.append(output.shape[-1]))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", WAYS)
def test_training_from_hidden_states_is_training_from_logits(tmp_path, name, precision):
    found = {}
    for logits in ("auto", "full"):
        watch = WidthWatch()
        module, *found[logits] = trained(
            tmp_path,
            WAYS[name],
            module_settings={"logits": logits},
            precision=precision,
            callbacks=[watch],
        )
        width = module.vocabulary.width
        # Its own logits once, known numbers in their place once, then nothing of that width.
        tried = [width, width, 0] if logits == "auto" else []
        assert watch.widths == [*tried, *([0] * 2 if logits == "auto" else [width] * 2)]
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    assert found["auto"][0] == pytest.approx(found["full"][0], rel=tolerance)
    assert relative_difference(found["auto"][1], found["full"][1]) < tolerance


def test_dropout_is_drawn_alike_in_both_ways(tmp_path):
    backbone = FromConfig("t5", {**TINY_T5.settings, "dropout_rate": 0.3})
    losses = {
        logits: trained(tmp_path, backbone, module_settings={"logits": logits})[1]
        for logits in ("auto", "full")
    }
    assert losses["auto"] == pytest.approx(losses["full"], rel=1e-5)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ("auto", "The training loss is computed from hidden states, without holding the logits"),
        ("full", "The training loss is computed from the model's logits."),
    ],
)
def test_the_way_of_the_loss_is_said_once_a_fit(tmp_path, caplog, logits, message):
    with caplog.at_level("INFO"):
        module, *_ = trained(tmp_path, module_settings={"logits": logits})
        data = NumberDataModule(train=[Pairs(MIXED)], val=[], batch_size=8)
        fitted(tmp_path, module, data, max_epochs=1)
    said = [record.getMessage() for record in caplog.records]
    assert sum(message in line for line in said) == 2


@dataclass(frozen=True)
class Squared(FromConfig):
    """A model that squares its logits, which nobody could know."""

    def build(self, tokenizer):
        model = super().build(tokenizer)
        usual = type(model).forward

        def forward(self, logits_to_keep=0, **inputs):
            output = usual(self, logits_to_keep=logits_to_keep, **inputs)
            output.logits = output.logits**2
            return output

        model.__class__ = type("SquaredLM", (type(model),), {"forward": forward})
        return model


def test_a_model_that_changes_its_logits_trains_on_them_and_says_so_once(tmp_path):
    backbone = Squared("llama", TINY_LLAMA.settings)
    with pytest.warns(UserWarning, match="from the model's logits, which takes more") as warned:
        _, loss, change = trained(tmp_path, backbone)
    (warning,) = [w for w in warned if "which takes more" in str(w.message)]
    assert "something else than scaling and soft capping" in str(warning.message)
    assert "model.logits=full silences this" in str(warning.message)
    _, full_loss, full_change = trained(tmp_path, backbone, module_settings={"logits": "full"})
    assert loss == full_loss
    assert torch.equal(change, full_change)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compiled_language_model_trains_on_its_logits(tmp_path):
    @dataclass(frozen=True)
    class Compiled(FromConfig):
        def build(self, tokenizer):
            model = super().build(tokenizer)
            model.compile(backend="eager")
            return model

    module = NumberAwareLM(backbone=TINY_LLAMA)
    module.backbone = Compiled("llama", TINY_LLAMA.settings)
    data = NumberDataModule(train=[Pairs(MIXED)], val=[])
    with pytest.warns(UserWarning, match="which takes more .* it is compiled"):
        fitted(tmp_path, module, data, max_epochs=1)


def test_the_way_is_chosen_anew_in_every_fit(tmp_path):
    module, *_ = trained(tmp_path)
    module.model.lm_head.forward = lambda hidden: hidden @ module.model.lm_head.weight.T
    data = NumberDataModule(train=[Pairs(MIXED)], val=[])
    with pytest.warns(UserWarning, match="which takes more .* no plain linear layer"):
        fitted(tmp_path, module, data, max_epochs=1)


def test_another_word_for_the_way_is_refused():
    with pytest.raises(ValueError, match=r"model\.logits must be auto or full, got 'none'"):
        NumberAwareLM(backbone=TINY_LLAMA, logits="none")


TINY_QWEN2 = FromConfig(
    "qwen2", {**TINY_LLAMA.settings, "num_key_value_heads": 1, "tie_word_embeddings": True}
)


class Sharded(NumberAwareLM):
    """Sharded over the ranks by FSDP2, layer by layer."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=mesh)


class ChangeWatch(Callback):
    """How training changed the weights."""

    def on_train_start(self, trainer, pl_module):
        self.before = self.weights(pl_module)

    def on_train_end(self, trainer, pl_module):
        self.change = self.weights(pl_module) - self.before

    def weights(self, module):
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
        return torch.cat([p.detach().flatten() for p in whole])


def change_of_tied_weights(folder, kind, batch_size, **settings):
    seed_everything(0)
    module = kind(
        backbone=TINY_QWEN2,
        optimizer=PlainSGD(),
        lr_schedule=ConstantLR(),
        generation=Generation(during_fit=False),
    )
    data = NumberDataModule(train=[Pairs(MIXED)], val=[], batch_size=batch_size)
    watch = ChangeWatch()
    fitted(folder, module, data, max_epochs=1, callbacks=[watch], **settings)
    assert module._output_head is not None
    return watch.change


def _sharded_rank(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    torch.set_num_threads(1)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    change = change_of_tied_weights(folder, Sharded, 8, devices=2, strategy=strategy)
    torch.save(change, f"{folder}/rank{rank}.pt")


def test_a_sharded_model_gets_the_gradient_of_the_whole_from_hidden_states(tmp_path, free_port):
    whole = change_of_tied_weights(tmp_path, NumberAwareLM, 16)
    mp.spawn(_sharded_rank, args=(free_port, str(tmp_path)), nprocs=2, join=True)
    changes = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert torch.equal(changes[0], changes[1])
    assert relative_difference(changes[0], whole) < 1e-5


# Numbers that are no quantities

ROOMS = (("where is 12?", "7 in room 345"), ("and 5?", "81 in room 2"))


@pytest.mark.parametrize("backbone", [TINY_LLAMA, TINY_T5], ids=["causal", "seq2seq"])
@pytest.mark.parametrize("logits", ["auto", "full"])
def test_numbers_that_are_no_quantities_are_none_for_the_number_losses(tmp_path, backbone, logits):
    """3 digits of quantities; the 4 of the rooms count for cross entropy alone."""
    seed_everything(0)
    module = NumberAwareLM(backbone=backbone, logits=logits)
    sets = {"train": [Pairs(ROOMS)], "val": [Pairs(ROOMS)]}
    marked = NumberDataModule(
        **sets, architecture=module.architecture, not_quantities=["room ([0-9]+)"]
    )
    trainer = fitted(tmp_path, module, marked, max_epochs=1)
    assert trainer.callback_metrics["train/number_tokens"] == 3
    assert trainer.callback_metrics["val/num_number_tokens"] == 3
    (logged,) = trainer.validate(module, marked, verbose=False)
    plain = NumberDataModule(**sets, architecture=module.architecture)
    (all_numbers,) = trainer.validate(module, plain, verbose=False)
    assert all_numbers["val/num_number_tokens"] == 7
    assert logged["val/cross_entropy"] == pytest.approx(all_numbers["val/cross_entropy"], rel=1e-6)
    rooms = NumberDataModule(
        **sets, architecture=module.architecture, not_quantities=["([0-9]+) in"]
    )
    (of_rooms,) = trainer.validate(module, rooms, verbose=False)
    together = 3 * logged["val/ntl_was"] + 4 * of_rooms["val/ntl_was"]
    assert together / 7 == pytest.approx(all_numbers["val/ntl_was"], rel=1e-5)


def test_training_where_no_number_is_a_quantity_is_refused(tmp_path):
    module = NumberAwareLM(backbone=TINY_LLAMA)
    data = NumberDataModule(train=[Pairs(ROOMS)], val=[], not_quantities=["[0-9]+"])
    with (
        pytest.warns(UserWarning, match=r"marks all 7 number tokens of the training labels"),
        pytest.raises(ValueError, match=r"all 7 number tokens .*could never act\. Mark fewer"),
    ):
        fitted(tmp_path, module, data, max_epochs=1)
    module = NumberAwareLM(backbone=TINY_LLAMA, loss_terms=[CrossEntropy()])
    trainer = fitted(tmp_path, module, data, max_epochs=1)
    assert trainer.callback_metrics["train/number_tokens"] == 0
    assert trainer.callback_metrics["train/loss"] > 0


@pytest.mark.parametrize("backbone", [TINY_LLAMA, TINY_T5], ids=["causal", "seq2seq"])
def test_evaluation_is_the_same_on_devices_whose_values_one_waits_for(
    tmp_path, backbone, monkeypatch
):
    seed_everything(0)
    module = NumberAwareLM(backbone=backbone)
    pairs = (("3 + 4 =", "7"), ("one?", "81 and 2"), ("5?", "5"), ("what?", "no number"))
    data = NumberDataModule(val=[Pairs(pairs)], architecture=module.architecture, batch_size=2)
    trainer = trainer_for(tmp_path)
    (looking,) = trainer.validate(module, data, verbose=False)
    statistics_module = importlib.import_module("ntl_lightning.losses.token_statistics")
    monkeypatch.setattr(statistics_module, "can_look", lambda tensor: False)
    (waiting,) = trainer.validate(module, data, verbose=False)
    assert looking["val/expected_value_rate"] == 0.5
    assert waiting.keys() == looking.keys()
    for name, value in looking.items():
        assert waiting[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name


def test_the_mask_is_shifted_with_the_labels():
    """Prompt and target of 2 + 4 tokens, of which only one is a quantity."""
    module = NumberAwareLM(backbone=TINY_LLAMA, loss_terms=[Wasserstein()])
    ids = torch.tensor([module.tokenizer("a=3471")["input_ids"]])
    quantities = torch.zeros_like(ids, dtype=torch.bool)
    quantities[0, 4] = True
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(torch.arange(6) < 2, -100),
        "quantities": quantities,
        "first_label": 2,
    }
    module.configure_model()
    logits, labels = module(batch)
    result = module.objective(logits, labels, quantities=module._quantities(batch))
    assert result.counts["numbers"] == 1
    assert result.statistics.label_values[result.statistics.is_number].tolist() == [7]
