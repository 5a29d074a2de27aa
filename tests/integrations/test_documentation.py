"""The examples of docs/other_trainers.md run as they stand, on tiny models."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import DataCollatorForSeq2Seq

from tests.integrations.tiny import TEXTS, collate, examples, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:.*compute_loss_func. is deprecated:FutureWarning"),
    # trl and peft call transformers by names that it has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning"),
]

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "other_trainers.md").read_text()


def blocks() -> list[tuple[str, str, str]]:
    """Section, what the block's first line says after `python`, and the code."""
    found = []
    for section in TEXT.split("\n## ")[1:]:
        title = section.splitlines()[0]
        for kind, code in re.findall(r"^```python *(\w*)\n(.*?)^```", section, re.S | re.M):
            found.append((title, kind, code))
    return found


def codes(title: str, kind: str) -> list[str]:
    return [code for section, of, code in blocks() if (section, of) == (title, kind)]


@pytest.fixture
def names(tmp_path):
    """What the examples leave to the reader."""
    model = tiny_model("llama")
    rows = examples("llama")
    collator = collate("llama")
    return {
        "model": model,
        "tokenizer": tiny_tokenizer(),
        "folder": str(tmp_path),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "loader": [collator(rows[:8]), collator(rows[8:])],
        "batches": [collator(rows[:8]), collator(rows[8:])],
        "train_dataset": rows,
        "eval_dataset": rows[:3],
        "data_collator": collator,
    }


def run(sources: list[str], names: dict) -> dict:
    for source in sources:
        exec(compile(source, "docs/other_trainers.md", "exec"), names)
    return names


def test_every_example_is_run_by_one_of_the_tests_here():
    kinds = [(title, kind) for title, kind, _ in blocks()]
    assert kinds == [
        ("A plain PyTorch loop", ""),
        ("A plain PyTorch loop", ""),
        ("The Hugging Face Trainer", ""),
        ("The Hugging Face Trainer", ""),
        ("The Hugging Face Trainer", "seq2seq"),
        ("TRL's SFTTrainer", "trl"),
        ("TRL's SFTTrainer", "trl"),
        ("Coming from ntloss", "ntloss"),
        ("Coming from ntloss", "ntloss"),
        ("Coming from ntloss", "ntloss"),
    ]
    assert TEXT.count("```python") == len(kinds)


def test_the_plain_loop(names, capsys):
    first, second = codes("A plain PyTorch loop", "")
    run([first], names)
    assert "'ntl_was': tensor(" in capsys.readouterr().out
    before = [p.detach().clone() for p in names["model"].parameters()]
    run([second], names)
    whole = collate("llama")(examples("llama"))
    labels = names["aligned"](whole.pop("labels"))
    after = [p.detach().clone() for p in names["model"].parameters()]
    for parameter, value in zip(names["model"].parameters(), before, strict=True):
        parameter.data.copy_(value)
    names["objective"](names["model"](**whole).logits, labels).loss.backward()
    for parameter, old, new in zip(names["model"].parameters(), before, after, strict=True):
        torch.testing.assert_close((old - new) / 1e-3, parameter.grad, rtol=1e-2, atol=2e-4)


def test_the_trainer(names):
    run(codes("The Hugging Face Trainer", ""), names)
    logs = names["trainer"].state.log_history
    assert {"loss", "cross_entropy", "ntl_was", "number_tokens"} <= set(logs[0])
    assert "eval_ntl_was" in logs[-1]
    assert len(names["loss"].objective.terms) == 2


def test_the_trainer_of_an_encoder_decoder_model(names):
    names["model"] = tiny_model("t5")
    names["train_dataset"] = examples("t5")
    run(codes("The Hugging Face Trainer", "seq2seq"), names)
    assert isinstance(names["trainer"].data_collator, DataCollatorForSeq2Seq)
    assert names["trainer"].state.global_step == 3


def test_the_sft_trainer(names, monkeypatch):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    # Its default is bfloat16, which it does not allow without a GPU.
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True, bf16=False))
    pairs = [text.split("=") for text in TEXTS]
    names["train_dataset"] = Dataset.from_list(
        [{"prompt": f"{question}=", "completion": answer} for question, answer in pairs]
    )
    names["tokenizer"].chat_template = None
    first, second = codes("TRL's SFTTrainer", "trl")
    run([first], names)
    assert names["trainer"].state.global_step > 0
    run([second], names)
    assert names["trainer"].state.global_step > 0


def test_coming_from_ntloss(names):
    names["logits"] = torch.randn(2, 3, len(names["tokenizer"]), requires_grad=True)
    names["labels"] = torch.tensor([[3, 14, 12], [11, -100, 4]])
    run(codes("Coming from ntloss", "ntloss"), names)
    torch.testing.assert_close(names["same"], names["loss"])
    assert names["logits"].grad.any()
