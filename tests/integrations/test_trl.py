"""The real SFTTrainer, with the callable that the Trainer takes."""

import pytest
import torch

from ntl_lightning.integrations.transformers import NumberAwareLoss
from tests.integrations.tiny import (
    TEXTS,
    Gradients,
    gradient_of_the_whole,
    relative_difference,
    tiny_model,
    tiny_tokenizer,
)

trl = pytest.importorskip("trl", reason="trl is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*compute_loss_func. is deprecated:FutureWarning"),
    # trl and peft call transformers by names that it has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning"),
]


def pairs():
    from datasets import Dataset

    halves = [text.split("=") for text in ANSWERS]
    return Dataset.from_list([{"prompt": f"{q}=", "completion": a} for q, a in halves])


def trained(folder, batch_size, accumulated, model=None, **settings):
    model = tiny_model("llama") if model is None else model
    tokenizer = tiny_tokenizer()
    loss = NumberAwareLoss.for_model(model, tokenizer)
    gradients = Gradients()
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulated,
            max_grad_norm=0.0,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=pairs(),
        eval_dataset=pairs(),
        processing_class=tokenizer,
        compute_loss_func=loss,
        callbacks=[gradients],
    )
    loss.attach(trainer)
    trainer.train()
    return trainer, gradients.of_steps


# TRL masks the prompt, also of the text that begins with a digit.
ANSWERS = [text for text in TEXTS if not text[0].isdigit()]


@pytest.mark.parametrize(("batch_size", "accumulated"), [(15, 1), (4, 4), (2, 8)])
def test_the_gradient_is_that_of_the_whole_however_the_step_is_cut(
    tmp_path, batch_size, accumulated
):
    trainer, (gradient,) = trained(tmp_path, batch_size, accumulated)
    whole = gradient_of_the_whole("llama", texts=ANSWERS)
    assert relative_difference(gradient, whole) < 1e-5
    logged = trainer.state.log_history[0]
    total = logged["cross_entropy"] + 0.3 * logged["ntl_was"]
    assert logged["loss"] == pytest.approx(total, rel=1e-5)
    # TRL's own, which it computes after the loss.
    assert {"mean_token_accuracy", "entropy"} <= set(logged)


def test_evaluation_is_the_average_of_the_batches(tmp_path):
    trainer, _ = trained(tmp_path, 4, 4, learning_rate=0.0, per_device_eval_batch_size=15)
    metrics = trainer.evaluate()
    logged = trainer.state.log_history[0]
    assert metrics["eval_loss"] == pytest.approx(logged["loss"], rel=1e-5)
    assert metrics["eval_ntl_was"] == pytest.approx(logged["ntl_was"], rel=1e-5)
    assert "eval_mean_token_accuracy" in metrics


def test_packed_sequences_are_not_asked_for_the_next_one_s_first_token(tmp_path):
    """Padding-free: the batch is one row, in which every sequence keeps to itself."""
    trainer, (gradient,) = trained(tmp_path, 5, 3, padding_free=True, max_length=None)
    padded, (expected,) = trained(tmp_path, 15, 1)
    assert relative_difference(gradient, expected) < 1e-5
    numbers, expected = (t.state.log_history[0]["number_tokens"] for t in (trainer, padded))
    assert numbers == expected > 0


def test_trl_is_not_given_logits_to_overwrite(tmp_path):
    model = tiny_model("llama")
    loss = NumberAwareLoss.for_model(model, tiny_tokenizer(), overwrite_logits=True)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False),
        train_dataset=pairs(),
        processing_class=tiny_tokenizer(),
        compute_loss_func=loss,
    )
    with pytest.raises(ValueError, match="SFTTrainer has a compute_loss of its own"):
        loss.attach(trainer)


def test_adapters_train_with_it(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def gradient_of(batch_size, accumulated):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("llama"), config)
        _, (gradient,) = trained(tmp_path, batch_size, accumulated, model=model)
        return gradient

    whole = gradient_of(15, 1)
    assert whole.norm() > 1e-3
    assert relative_difference(gradient_of(2, 8), whole) < 1e-5
