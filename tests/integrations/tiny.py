"""Tiny random models, a tokenizer with the ten digits, and batches of very unequal numbers."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "+", "=", ".", "d"]
DIGITS = [str(digit) for digit in range(10)]
DIGIT_IDS = {len(WORDS) + digit: float(digit) for digit in range(10)}
WIDTH = 24
"""Of the logits; four columns more than there are tokens."""


def tiny_tokenizer(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(words or [*WORDS, *DIGITS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_model(kind: str) -> PreTrainedModel:
    """`llama`, `gpt2` or `t5`, with the same weights every time and no dropout."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=WIDTH,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            **special,
        )
        return LlamaForCausalLM(config)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=WIDTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.3,
            **special,
        )
        return GPT2LMHeadModel(config)
    config = T5Config(
        vocab_size=WIDTH,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **special,
    )
    return T5ForConditionalGeneration(config)


TEXTS = [
    "a=7",
    "b=cab",
    "c=123456789012",
    "a+b=cc.",
    "3d=1415",
    "a=b",
    "b=2",
    "cab=dad",
    "a=99999999",
    "c=d.c.",
    "d=0.5",
    "a=abcabcabc",
    "b=7",
    "b=8",
    "a=12345",
    "c=c",
]
"""From no number to twelve digits; the sixteen texts differ in length too."""

NUM_NUMBERS = 35
"""Of all the texts' labels that are number tokens; a first token is asked of no causal model."""


def examples(kind: str, texts: list[str] = TEXTS) -> list[dict[str, list[int]]]:
    """Causal: the text, with its answer as labels or, if it begins with a digit, all of it.

    t5: the answer alone.
    """
    tokenizer = tiny_tokenizer()
    made = []
    for text in texts:
        question, answer = text.split("=")
        prompt = tokenizer(question + "=").input_ids
        target = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        if kind == "t5":
            made.append({"input_ids": prompt, "labels": target})
        else:
            masked = prompt if text[0].isdigit() else [-100] * len(prompt)
            made.append({"input_ids": prompt + target, "labels": masked + target})
    return made


def collate(kind: str):
    """Pads on the right; for t5 with the decoder's inputs, as DataCollatorForSeq2Seq makes them."""

    def pad(rows: list[list[int]], value: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        inputs = [row["input_ids"] for row in rows]
        labels = pad([row["labels"] for row in rows], -100)
        batch = {
            "input_ids": pad(inputs, 0),
            "attention_mask": pad([[1] * len(row) for row in inputs], 0),
            "labels": labels,
        }
        if kind == "t5":
            start = torch.zeros(len(rows), 1, dtype=torch.long)
            batch["decoder_input_ids"] = torch.cat(
                [start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, 0)], 1
            )
        return batch

    return collated


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self):
        self.of_steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.of_steps.append(flat_gradient(model))


def flat_gradient(model):
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.requires_grad])


def relative_difference(one, other):
    return ((one - other).norm() / other.norm()).item()


def gradient_of_the_whole(kind, over="numbers", weight=0.3, texts=TEXTS):
    """Cross entropy and NTL-WAS by their formulas, over all examples at once."""
    model = tiny_model(kind)
    batch = collate(kind)(examples(kind, texts))
    labels = batch.pop("labels")
    logits = model(**batch).logits
    if kind != "t5":
        logits, labels = logits[:, :-1], labels[:, 1:]
    rows, targets = logits[labels != -100], labels[labels != -100]
    values = torch.tensor(list(DIGIT_IDS.values()))
    total, numbers = rows.new_zeros(()), 0
    for row, target in zip(rows, targets.tolist(), strict=True):
        if target in DIGIT_IDS:
            q = row[list(DIGIT_IDS)].softmax(0)
            total = total + (q * (values - DIGIT_IDS[target]).abs()).sum()
            numbers += 1
    count = numbers if over == "numbers" else len(targets)
    (cross_entropy(rows, targets) + weight * total / count).backward()
    return flat_gradient(model)
