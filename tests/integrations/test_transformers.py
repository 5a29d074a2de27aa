"""The real Trainer and the real SFTTrainer, on tiny random models."""

import os
import subprocess
import sys
import types

import pytest
import torch
import torch.multiprocessing as mp
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ntl_lightning.integrations.transformers import NumberAwareLoss
from ntl_lightning.losses import CrossEntropy, LinearWarmup, NumberLevel, Objective, Wasserstein
from ntl_lightning.numbers import NumberVocabulary
from tests.integrations.tiny import (
    DIGIT_IDS,
    NUM_NUMBERS,
    TEXTS,
    WIDTH,
    Gradients,
    collate,
    examples,
    gradient_of_the_whole,
    relative_difference,
    tiny_model,
    tiny_tokenizer,
)

TERMS = (CrossEntropy(), Wasserstein())


def arguments(folder, batch_size, accumulated, **settings):
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=3,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"num_train_epochs": 1, "logging_steps": 1, "learning_rate": 1e-3, **settings},
    )


def trained(folder, kind, batch_size, accumulated, loss=None, texts=TEXTS, terms=TERMS, **settings):
    """A trainer after its training, and the gradients of its steps."""
    model = tiny_model(kind)
    if loss is None:
        loss = NumberAwareLoss.for_model(model, tiny_tokenizer(), terms)
    gradients = Gradients()
    trainer = Trainer(
        model=model,
        args=arguments(folder, batch_size, accumulated, **settings),
        train_dataset=examples(kind, texts),
        data_collator=collate(kind),
        compute_loss_func=loss,
        callbacks=[gradients],
    )
    if isinstance(loss, NumberAwareLoss):
        loss.attach(trainer)
    trainer.train()
    return trainer, gradients.of_steps


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize(("batch_size", "accumulated"), [(16, 1), (4, 4), (2, 8), (3, 6)])
def test_the_gradient_is_that_of_the_whole_however_the_step_is_cut(
    tmp_path, kind, batch_size, accumulated
):
    trainer, gradients = trained(tmp_path, kind, batch_size, accumulated)
    whole = gradient_of_the_whole(kind)
    assert trainer.state.global_step == len(gradients) == 1
    assert relative_difference(gradients[0], whole) < 1e-5
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-5)


@pytest.mark.parametrize("accumulated", [4, 8])
def test_terms_averaged_over_tokens_and_others_are_exact_too(tmp_path, accumulated):
    terms = (CrossEntropy(), Wasserstein(averaged_over="tokens"))
    _, (gradient,) = trained(tmp_path, "llama", 16 // accumulated, accumulated, terms=terms)
    assert relative_difference(gradient, gradient_of_the_whole("llama", "tokens")) < 1e-5
    assert relative_difference(gradient, gradient_of_the_whole("llama", "numbers")) > 1e-2


def test_terms_over_whole_numbers_are_exact_too(tmp_path):
    terms = (CrossEntropy(), NumberLevel(weight=2.0))
    trainer, (whole,) = trained(tmp_path, "gpt2", 16, 1, terms=terms)
    _, (parts,) = trained(tmp_path, "gpt2", 2, 8, terms=terms)
    assert relative_difference(parts, whole) < 1e-5
    assert 0 < trainer.state.log_history[0]["number_level"] < 1
    assert 0 < trainer.evaluate(examples("gpt2"))["eval_number_level"] < 1


def test_a_hook_that_divides_the_number_term_by_its_own_batch_is_wrong(tmp_path):
    """What the trainer's own count leads to: four batches, a number term of up to four times."""
    vocabulary = NumberVocabulary.from_values(DIGIT_IDS, width=WIDTH)
    objective = Objective(TERMS, vocabulary)

    def naive(outputs, labels, num_items_in_batch=None):
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        totals = {**objective.count(labels), "tokens": num_items_in_batch}
        return objective(outputs.logits, labels, denominators=totals).loss

    whole = gradient_of_the_whole("llama")
    _, (once,) = trained(tmp_path, "llama", 16, 1, loss=naive)
    _, (four,) = trained(tmp_path, "llama", 4, 4, loss=naive)
    assert relative_difference(once, whole) < 1e-5
    assert relative_difference(four, whole) > 0.3
    # The number term alone: here all four batches hold numbers.
    number_term = whole - gradient_of_the_whole("llama", weight=0.0)
    share = torch.dot(four - once, number_term) / number_term.norm() ** 2
    assert 2 < 1 + share.item() < 4.5


def test_the_last_shorter_step_of_an_epoch_is_averaged_by_its_own_size(tmp_path):
    """Six batches of 2 in steps of 4 and 2 are two steps of 8 and 4 examples."""
    _, parts = trained(tmp_path, "llama", 2, 4, texts=TEXTS[:12])
    _, wholes = trained(tmp_path, "llama", 8, 1, texts=TEXTS[:12])
    assert len(parts) == len(wholes) == 2
    for part, whole in zip(parts, wholes, strict=True):
        assert relative_difference(part, whole) < 1e-5


def test_labels_without_any_number_train_on_cross_entropy_alone(tmp_path):
    wordy = [text for text in TEXTS if not any(letter.isdigit() for letter in text)]
    trainer, gradients = trained(tmp_path, "llama", 2, 2, texts=wordy)
    _, expected = trained(tmp_path, "llama", 2, 2, texts=wordy, terms=(CrossEntropy(),))
    assert len(gradients) == len(expected) > 1
    for one, other in zip(gradients, expected, strict=True):
        assert relative_difference(one, other) < 1e-6
    logged = trainer.state.log_history[0]
    assert logged["ntl_was"] == 0.0
    assert logged["number_tokens"] == 0.0
    assert logged["loss"] == pytest.approx(logged["cross_entropy"], rel=1e-6)


def test_logs_hold_the_terms_since_the_last_logging_and_they_add_up_to_the_loss(tmp_path):
    settings = {"num_train_epochs": 3, "logging_steps": 4}
    trainer, _ = trained(tmp_path, "llama", 2, 2, **settings)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    for entry in logs:
        total = entry["cross_entropy"] + 0.3 * entry["ntl_was"]
        assert entry["loss"] == pytest.approx(total, rel=1e-5)
        # Four steps are an epoch.
        assert entry["number_tokens"] == pytest.approx(NUM_NUMBERS / 4)
    assert len({entry["ntl_was"] for entry in logs}) == 3
    assert not any("ntl_was" in e for e in trainer.state.log_history if "train_loss" in e)


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_second_training_logs_its_own_steps_alone(tmp_path):
    settings = {"num_train_epochs": 3, "logging_steps": 5, "learning_rate": 0.0}
    trainer, _ = trained(tmp_path, "llama", 2, 2, **settings)
    interrupt = Interrupt()
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [5, 10]
    for entry in logs:
        total = entry["cross_entropy"] + 0.3 * entry["ntl_was"]
        assert entry["loss"] == pytest.approx(total, rel=1e-5)


def test_schedules_follow_the_optimizer_steps(tmp_path):
    terms = (CrossEntropy(), Wasserstein(schedule=LinearWarmup(steps=2)))
    trainer, _ = trained(tmp_path, "llama", 4, 2, terms=terms, num_train_epochs=2)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = [(e["loss"] - e["cross_entropy"]) / e["ntl_was"] for e in logs]
    assert weights == pytest.approx([0.0, 0.15, 0.3, 0.3], abs=1e-5)


def evaluated_by_hand(model, kind, texts, batch_size):
    """Trainer's `eval_loss`: the batches' averages, weighted by examples; and the terms' sums."""
    vocabulary = NumberVocabulary.from_values(DIGIT_IDS, width=WIDTH)
    objective = Objective(TERMS, vocabulary)
    losses, sums, numbers = [], 0.0, 0
    rows = examples(kind, texts)
    for start in range(0, len(rows), batch_size):
        batch = collate(kind)(rows[start : start + batch_size])
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model.eval()(**batch).logits
        if kind != "t5":
            logits, labels = logits[:, :-1], labels[:, 1:]
        result = objective(logits, labels)
        losses += [result.loss.item()] * len(logits)
        sums += result.sums["ntl_was"].item()
        numbers += int(result.counts["numbers"])
    return sum(losses) / len(losses), sums / numbers


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_evaluation_averages_each_batch_and_the_terms_over_the_set(tmp_path, kind):
    trainer, _ = trained(tmp_path, kind, 16, 1)
    sets = {"one": examples(kind, TEXTS[:5]), "two": examples(kind, TEXTS[5:])}
    with torch.no_grad():
        # What somebody looks at in between does not count.
        trainer.compute_loss(trainer.model, collate(kind)(examples(kind)))
    metrics = trainer.evaluate(sets)
    for name, texts in (("one", TEXTS[:5]), ("two", TEXTS[5:])):
        loss, ntl_was = evaluated_by_hand(trainer.model, kind, texts, 3)
        assert metrics[f"eval_{name}_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics[f"eval_{name}_ntl_was"] == pytest.approx(ntl_was, rel=1e-5)
    assert "eval_two_ntl_was" in trainer.state.log_history[-1]
    predicted = trainer.predict(sets["one"])
    assert predicted.metrics["test_ntl_was"] == pytest.approx(metrics["eval_one_ntl_was"], rel=1e-6)
    predictions = predicted.predictions[0] if kind == "t5" else predicted.predictions
    assert predictions.shape[0] == 5
    assert predictions.shape[-1] == WIDTH


def test_an_evaluation_that_generates_has_the_models_own_loss_and_no_terms(tmp_path):
    """The Trainer then asks no loss function, which is said once."""
    model = tiny_model("t5")
    loss = loss_for()
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            predict_with_generate=True,
            generation_max_length=4,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=collate("t5"),
        compute_loss_func=loss,
        compute_metrics=lambda predictions: {},
    )
    loss.attach(trainer)
    with pytest.warns(UserWarning, match="eval_loss is the model's own loss, and there is no"):
        metrics = trainer.evaluate(examples("t5", TEXTS[:3]))
    assert trainer.evaluate(examples("t5", TEXTS[:3]))["eval_loss"] == metrics["eval_loss"]
    batch = collate("t5")(examples("t5", TEXTS[:3]))
    assert metrics["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert not any("ntl_was" in name for name in metrics)


def test_evaluation_between_the_steps_leaves_training_as_it_is(tmp_path):
    _, expected = trained(tmp_path, "llama", 2, 4, num_train_epochs=2)
    model = tiny_model("llama")
    loss = NumberAwareLoss.for_model(model, tiny_tokenizer())
    gradients = Gradients()
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, 2, 4, num_train_epochs=2, eval_strategy="steps", eval_steps=1),
        train_dataset=examples("llama"),
        eval_dataset=examples("llama"),
        data_collator=collate("llama"),
        compute_loss_func=loss,
        callbacks=[gradients],
    )
    loss.attach(trainer)
    trainer.train()
    assert len(gradients.of_steps) == len(expected) == 4
    for one, other in zip(gradients.of_steps, expected, strict=True):
        assert torch.equal(one, other)


EVALUATED = (16, 13, 10, 4)
"""Examples that two processes take by threes: the last batches are filled with 2, 5, 2 and 2."""


def _rank(rank, port, folder):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(1)
    for average in (True, False):
        settings = {"ddp_backend": "gloo", "average_tokens_across_devices": average}
        trainer, gradients = trained(f"{folder}/{rank}", "llama", 2, 4, **settings)
        metrics = {"eval_loss": trainer.evaluate(examples("llama"))["eval_loss"]}
        trainer.model.load_state_dict(tiny_model("llama").state_dict())
        for number in EVALUATED:
            terms = trainer.evaluate(examples("llama", TEXTS[:number]))
            metrics[number] = terms["eval_ntl_was"]
        batch = collate("llama")(examples("llama"))
        with torch.no_grad():
            outputs = trainer.model(**batch)
            call = trainer.compute_loss_func
            metrics["alone"] = call(outputs, batch["labels"]).item()
            metrics["in the Trainer"] = call(outputs, batch["labels"], 3).item()
        results = gradients, trainer.state.log_history[0], metrics
        torch.save(results, f"{folder}/{average}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_gradient_of_the_whole(tmp_path, free_port):
    mp.spawn(_rank, args=(free_port, str(tmp_path)), nprocs=2, join=True)
    whole = gradient_of_the_whole("llama")
    _, ntl_was = evaluated_by_hand(tiny_model("llama"), "llama", TEXTS, 16)
    for average in (True, False):
        (gradient,), logged, metrics = torch.load(tmp_path / f"{average}0.pt")
        (other,), other_logged, _ = torch.load(tmp_path / f"{average}1.pt")
        assert torch.equal(gradient, other)
        total = logged["cross_entropy"] + 0.3 * logged["ntl_was"]
        assert logged["loss"] == pytest.approx(total, rel=1e-5)
        assert logged["ntl_was"] == pytest.approx(other_logged["ntl_was"])
        if average:
            assert relative_difference(gradient, whole) < 1e-5
            assert logged["number_tokens"] == NUM_NUMBERS
            assert logged["ntl_was"] == pytest.approx(ntl_was, rel=1e-5)
        else:
            # Each process is averaged by its own counts, as the user asked.
            assert relative_difference(gradient, whole) > 1e-3
            assert logged["number_tokens"] == NUM_NUMBERS / 2
        # The Trainer multiplies by the processes where it has a count, and not else (as TRL does).
        assert metrics["alone"] == metrics["in the Trainer"] * (2 if average else 1)
        for number in EVALUATED:
            _, expected = evaluated_by_hand(tiny_model("llama"), "llama", TEXTS[:number], 3)
            assert metrics[number] == pytest.approx(expected, rel=1e-6)
        # Not multiplied by the processes; after one step of learning rate 1e-3 nearly the same.
        assert metrics["eval_loss"] == pytest.approx(logged["loss"], rel=0.1)


def test_overwriting_the_logits_gives_the_same_gradients(tmp_path, monkeypatch):
    model = tiny_model("llama")
    loss = NumberAwareLoss.for_model(model, tiny_tokenizer(), overwrite_logits=True)
    seen = []

    def keep(outputs, *arguments, **settings):
        seen.append((outputs.logits, outputs.logits.detach().clone()))
        return call(loss, outputs, *arguments, **settings)

    call = NumberAwareLoss.__call__
    monkeypatch.setattr(NumberAwareLoss, "__call__", lambda self, *args, **kw: keep(*args, **kw))
    trainer, (gradient,) = trained(tmp_path, "llama", 4, 4, loss=loss)
    assert len(seen) == 4
    assert not any(torch.equal(now, before) for now, before in seen)
    assert relative_difference(gradient, gradient_of_the_whole("llama")) < 1e-5
    # Evaluation hands the logits out, so they are left alone.
    logits = trainer.predict(examples("llama", TEXTS[:2])).predictions
    batch = collate("llama")(examples("llama", TEXTS[:2]))
    del batch["labels"]
    with torch.no_grad():
        expected = trainer.model(**batch).logits
    torch.testing.assert_close(torch.from_numpy(logits), expected)


# Set-ups that would give another loss than the one that is written


def trainer_of(folder, kind, loss, cls=Trainer, model=None, **settings):
    return cls(
        model=model or tiny_model(kind),
        args=arguments(folder, 4, 2, **settings),
        train_dataset=examples(kind),
        data_collator=collate(kind),
        compute_loss_func=loss,
    )


def loss_for(kind="llama", **settings):
    vocabulary = NumberVocabulary.from_values(DIGIT_IDS, width=WIDTH)
    return NumberAwareLoss(TERMS, vocabulary, **settings)


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_a_loss_that_is_not_attached_says_so(tmp_path, method):
    trainer = trainer_of(tmp_path, "llama", loss_for())
    trainer.eval_dataset = trainer.train_dataset
    with pytest.raises(RuntimeError, match=r"call loss.attach\(trainer\)"):
        getattr(trainer, method)()


def test_a_trainer_that_does_not_use_the_loss_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, "llama", None)
    with pytest.raises(ValueError, match="make it with compute_loss_func=loss"):
        loss_for().attach(trainer)


def test_a_loss_belongs_to_one_trainer(tmp_path):
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss)
    assert loss.attach(trainer).attach(trainer) is loss
    with pytest.raises(ValueError, match="attached to another trainer"):
        loss.attach(trainer_of(tmp_path, "llama", loss))


def test_a_loss_used_by_another_trainer_than_its_own_says_so(tmp_path):
    loss = loss_for()
    loss.attach(trainer_of(tmp_path, "llama", loss))
    with pytest.raises(RuntimeError, match="or by another trainer than the one"):
        trainer_of(tmp_path, "llama", loss).train()


def test_a_batch_looked_at_outside_a_step_needs_no_grad(tmp_path):
    trainer, _ = trained(tmp_path, "llama", 4, 4)
    with pytest.raises(RuntimeError, match="outside its trainer's step"):
        trainer.compute_loss(trainer.model, collate("llama")(examples("llama")))
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, collate("llama")(examples("llama"))) > 0


class TakesTheModelsLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_trainer_that_never_calls_the_loss_is_stopped_before_its_first_step(tmp_path):
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss, TakesTheModelsLoss)
    loss.attach(trainer)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match="compute_loss of TakesTheModelsLoss does not call"):
        trainer.train()
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_a_trainer_may_go_over_to_another_loss(tmp_path):
    trainer, _ = trained(tmp_path, "llama", 4, 4)
    trainer.compute_loss_func = loss_for()
    trainer.compute_loss_func.attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 1


class ScaledAgain(Trainer):
    loss_is_scaled_for_ga = False


class ReadsLogits(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("cls", "settings", "arguments", "message"),
    [
        (ScaledAgain, {}, {}, "divided by the accumulation steps a second time"),
        (Trainer, {}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 has no effect"),
        (ReadsLogits, {"overwrite_logits": True}, {}, "ReadsLogits has a compute_loss of its own"),
    ],
)
def test_settings_that_contradict_the_loss_are_refused(tmp_path, cls, settings, arguments, message):
    loss = loss_for(**settings)
    with pytest.raises(ValueError, match=message):
        loss.attach(trainer_of(tmp_path, "llama", loss, cls, **arguments))


def test_liger_is_taken_without_the_loss_that_leaves_the_logits_out(tmp_path):
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss)
    # The Trainer asks for the package when it is made, not later.
    trainer.args.use_liger_kernel = True
    with pytest.raises(ValueError, match="set liger_kernel_config="):
        loss.attach(trainer)
    trainer.args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    loss.attach(trainer)
    assert trainer.evaluate(examples("llama"))["eval_ntl_was"] > 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("get_cp_size", lambda: 2, "context and sequence parallelism"),
        ("get_sp_size", lambda: 2, "context and sequence parallelism"),
        ("args", types.SimpleNamespace(n_gpu=2), "sees 2 GPUs"),
    ],
)
def test_parallel_ways_that_it_does_not_know_are_refused(
    tmp_path, monkeypatch, name, value, message
):
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss)
    monkeypatch.setattr(trainer, name, value)
    with pytest.raises(ValueError, match=message):
        loss.attach(trainer)


# peft calls transformers by names that it has renamed.
renamed = pytest.mark.filterwarnings("ignore:.*. is deprecated and will be:FutureWarning")


def with_virtual_tokens(kind, name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
    config = getattr(peft, name)(task_type=task, num_virtual_tokens=3)
    return peft.get_peft_model(tiny_model(kind), config)


@renamed
@pytest.mark.parametrize("name", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_before_the_text_are_refused(tmp_path, name):
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss, model=with_virtual_tokens("llama", name))
    with pytest.raises(ValueError, match=f"{name} puts 3 virtual tokens .* use prefix tuning"):
        loss.attach(trainer)


@renamed
@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "PrefixTuningConfig"), ("t5", "PromptTuningConfig")]
)
def test_virtual_tokens_that_have_no_logits_train(tmp_path, kind, name):
    loss = loss_for()
    trainer = trainer_of(tmp_path, kind, loss, model=with_virtual_tokens(kind, name))
    loss.attach(trainer)
    trainer.train()
    logged = trainer.state.log_history[0]
    total = logged["cross_entropy"] + 0.3 * logged["ntl_was"]
    assert logged["loss"] == pytest.approx(total, rel=1e-5)


def test_capped_logits_are_not_overwritten(tmp_path):
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 30.0
    loss = loss_for(overwrite_logits=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM caps its logits"):
        loss.attach(trainer_of(tmp_path, "llama", loss, model=model))


def test_masked_models_are_not_shifted(tmp_path):
    config = BertConfig(
        vocab_size=WIDTH,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    loss = loss_for()
    trainer = trainer_of(tmp_path, "llama", loss, model=BertForMaskedLM(config))
    loss.attach(trainer)
    batch = collate("llama")(examples("llama"))
    with torch.no_grad():
        outputs = trainer.model(**batch)
        alone = loss(outputs, batch["labels"])
    expected = loss.objective(outputs.logits, batch["labels"])
    assert alone == expected.loss
    torch.testing.assert_close(expected.parts["cross_entropy"], outputs.loss)


class OtherLoss(torch.nn.Module):
    def __init__(self, loss_function=None):
        super().__init__()
        self.inner = tiny_model("llama")
        self.loss_function = loss_function

    def forward(self, input_ids, attention_mask):
        return (self.inner(input_ids=input_ids, attention_mask=attention_mask).logits,)


def test_a_model_whose_shift_is_not_known_needs_to_be_told(tmp_path):
    loss = loss_for()
    with pytest.raises(ValueError, match="give NumberAwareLoss shift_labels=True or False"):
        loss.attach(trainer_of(tmp_path, "llama", loss, model=OtherLoss()))


def test_a_model_of_ones_own_that_returns_tuples_trains(tmp_path):
    loss = loss_for(shift_labels=True)
    gradients = Gradients()
    settings = {"remove_unused_columns": False}
    trainer = trainer_of(tmp_path, "llama", loss, model=OtherLoss(), **settings)
    trainer.args.gradient_accumulation_steps = 4
    trainer.add_callback(gradients)
    loss.attach(trainer)
    trainer.train()
    assert relative_difference(gradients.of_steps[0], gradient_of_the_whole("llama")) < 1e-5


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"labels": None}, "have no `labels`, only input_ids, attention_mask"),
        ("llama", {"shift_labels": 0}, "have `shift_labels`"),
        ("t5", {"decoder_input_ids": None}, r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"),
    ],
)
def test_batches_that_cannot_be_counted_are_refused(tmp_path, kind, change, message):
    def changed(rows):
        batch = collate(kind)(rows) | change
        return {name: value for name, value in batch.items() if value is not None}

    loss = loss_for()
    trainer = trainer_of(tmp_path, kind, loss, remove_unused_columns=False)
    trainer.data_collator = changed
    loss.attach(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_outputs_without_logits_and_batches_without_labels_are_refused(tmp_path):
    loss = loss_for()
    loss.attach(trainer_of(tmp_path, "llama", loss))
    with torch.no_grad():
        with pytest.raises(ValueError, match="the batch has no labels"):
            loss((torch.zeros(1, 2, WIDTH),), None)
        with pytest.raises(ValueError, match="the outputs have no logits"):
            loss({"logits": None}, torch.zeros(1, 2, dtype=torch.long))


def test_the_vocabulary_is_as_wide_as_the_logits_and_the_tokenizer_stays_as_it_is():
    tokenizer = tiny_tokenizer()
    before = tokenizer.get_vocab(), tokenizer("a=123").input_ids
    loss = NumberAwareLoss.for_model(tiny_model("t5"), tokenizer, kind="integers", largest=5)
    assert loss.objective.value_table.shape == (WIDTH,)
    assert sorted(loss.objective.number_ids.tolist()) == list(DIGIT_IDS)[:6]
    assert before == (tokenizer.get_vocab(), tokenizer("a=123").input_ids)


def test_the_module_loads_neither_transformers_nor_accelerate():
    program = (
        "import sys, ntl_lightning.integrations.transformers as ours\n"
        "print([name for name in ('transformers', 'accelerate', 'trl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
