"""How many real tokens a second a model is trained on, by the way its batches are made.

    python benchmarks/batching.py --csv batching.csv

A length distribution with coefficient of variation 0.8 (log-normal, mean 64 tokens, half of them
prompt), a causal model with random weights, and batches of the same examples in five ways: so many
padded examples (the baseline, no bucketing), the same grouped by length, a budget of padded tokens,
the same grouped by length, and packed rows. The budget is an average batch of the baseline with its
padding, so that all need about the same memory. What is timed is training without Lightning:
collating, forward, loss from hidden states, backward and optimizer.

Each round trains every candidate, in random order, on an epoch of its batches, so that all see the
same examples. A result is the median, over the rounds, of the ratio of tokens per second to the
baseline in the same round. With one thread, seconds are those that the CPU worked for this process,
which other work on the machine does not change; otherwise those of the clock on the wall.

Before anything is timed, the loss of the same examples is compared, unpacked and packed.
"""

import argparse
import csv
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loss_cost import facts, quartiles
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ntl_lightning.data import BatchOrder, Collator, TokenBudgetOrder
from ntl_lightning.losses import CrossEntropy, Objective, Wasserstein
from ntl_lightning.numbers import NumberVocabulary
from ntl_lightning.output_head import OutputHead, Projection
from ntl_lightning.probes import verify_packing

VARIATION = 0.8
Order = BatchOrder | TokenBudgetOrder


@dataclass(frozen=True)
class Candidate:
    """One way to make batches."""

    name: str
    order: Order

    @property
    def collator(self) -> Collator:
        """Packs where the order does."""
        return Collator("causal", 0, row_length=getattr(self.order, "row_length", None))


def lengths_of(count: int, mean: float) -> list[int]:
    """Log-normal lengths of at least 4 tokens and at most 16 times the mean."""
    sigma = np.sqrt(np.log1p(VARIATION**2))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    lengths: list[int] = np.clip(np.rint(drawn), 4, 16 * mean).astype(int).tolist()
    return lengths


def examples_of(lengths: list[int], width: int) -> list[dict[str, Any]]:
    """Random tokens; the first half of each is prompt."""
    generator = np.random.default_rng(1)
    rows = []
    for index, length in enumerate(lengths):
        ids = generator.integers(1, width, length).tolist()
        rows.append(
            {"prompt_ids": ids[: length // 2], "target_ids": ids[length // 2 :], "index": index}
        )
    return rows


def padded_tokens(lengths: list[int], candidate: Candidate) -> list[int]:
    """Tokens of every batch of an epoch, padding included."""
    collate = candidate.collator
    return [
        collate(
            [{"prompt_ids": [0], "target_ids": [0] * (lengths[i] - 1), "index": i} for i in batch]
        )["input_ids"].numel()
        for batch in candidate.order.batches()
    ]


def candidates(lengths: list[int], batch_size: int) -> list[Candidate]:
    """All of them; the first is the baseline."""
    plain = BatchOrder(lengths, batch_size, shuffle=True, group_by_length=False)
    baseline = Candidate(f"padded, {batch_size} examples", plain)
    budget = int(statistics.fmean(padded_tokens(lengths, baseline)))
    budget = max(budget, max(lengths))

    def tokens(**settings: bool) -> TokenBudgetOrder:
        return TokenBudgetOrder(lengths, budget, shuffle=True, **settings)

    grouped = BatchOrder(lengths, batch_size, shuffle=True, group_by_length=True)
    return [
        baseline,
        Candidate(f"padded, {batch_size} examples, grouped by length", grouped),
        Candidate(f"padded, {budget} tokens", tokens()),
        Candidate(f"padded, {budget} tokens, grouped by length", tokens(group_by_length=True)),
        Candidate(f"packed, {budget} tokens", tokens(packing=True)),
    ]


class Training:
    """A model with its optimizer, trained batch by batch."""

    def __init__(self, depth: int, layers: int, width: int, positions: int, device: str) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=width,
            hidden_size=depth,
            intermediate_size=4 * depth,
            num_hidden_layers=layers,
            num_attention_heads=max(depth // 64, 1),
            max_position_embeddings=positions,
        )
        self.device = device
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(device).train()
        verify_packing(self.model, width, torch.device(device))
        values = {token: float(token % 10) for token in range(1, 11)}
        vocabulary = NumberVocabulary.from_values(values, width=width)
        self.objective = Objective([CrossEntropy(), Wasserstein(weight=0.3)], vocabulary).to(device)
        self.head = OutputHead(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean over the batch's labels."""
        first = max(batch["first_label"] - 1, 0)
        labels = batch["labels"][:, first + 1 :].to(self.device)
        inputs = {
            name: batch[name].to(self.device)
            for name in ("input_ids", "attention_mask", "position_ids")
            if name in batch
        }

        def compute(projection: Projection) -> torch.Tensor:
            seen = projection.without_first(first)
            hidden = seen.hidden[:, :-1]
            return self.objective.from_hidden(hidden, seen.weight, labels).loss

        return self.head.loss(compute, **inputs, use_cache=False)

    def step(self, batch: dict[str, Any]) -> None:
        """One update."""
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def tokens_per_second(
    training: Training, rows: list[dict[str, Any]], compared: list[Candidate], rounds: int
) -> dict[Candidate, list[float]]:
    """Real tokens per second of each candidate in each round."""
    on_one_thread = training.device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if on_one_thread else time.perf_counter
    num_tokens = sum(len(row["prompt_ids"]) + len(row["target_ids"]) for row in rows)

    def train(candidate: Candidate, batches: list[list[int]]) -> float:
        start, collate = clock(), candidate.collator
        for batch in batches:
            training.step(collate([rows[i] for i in batch]))
        if training.device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    for candidate in compared:
        train(candidate, candidate.order.batches()[:1])
    speeds: dict[Candidate, list[float]] = {candidate: [] for candidate in compared}
    order = random.Random(0)
    for epoch in range(rounds):
        for candidate in order.sample(compared, len(compared)):
            candidate.order.set_epoch(epoch)
            speeds[candidate].append(num_tokens / train(candidate, candidate.order.batches()))
    return speeds


def check(training: Training, rows: list[dict[str, Any]], row_length: int) -> None:
    """The loss of packed examples is that of the same in rows of their own."""
    with torch.no_grad():
        plain = training.loss(Collator("causal", 0)(rows)).item()
        packed = training.loss(Collator("causal", 0, row_length=row_length)(rows)).item()
    # Written so that NaN fails too.
    if not abs(packed / plain - 1) <= 1e-4:
        sys.exit(f"the loss of packed rows is {packed}, that of the same examples {plain}")


@dataclass(frozen=True)
class Row:
    """One candidate; a line of the CSV."""

    candidate: str
    batches: int
    padding: float
    tokens_per_second: float
    ratio: float
    ratio_quartile_1: float
    ratio_quartile_3: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second by the way of batching.")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of every candidate (5)")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--mean", type=float, default=64, help="tokens of an example (64)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--depth", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048, help="vocabulary (2048)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the results here too")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    about = facts(options.rounds, options.threads, options.device)
    lengths = lengths_of(options.examples, options.mean)
    rows = examples_of(lengths, options.width)
    compared = candidates(lengths, options.batch_size)
    training = Training(options.depth, options.layers, options.width, max(lengths), options.device)
    check(training, rows[: options.batch_size], max(lengths))
    speeds = tokens_per_second(training, rows, compared, options.rounds)
    results = []
    for candidate in compared:
        first, median, third = quartiles(speeds[candidate], speeds[compared[0]])
        padded = padded_tokens(lengths, candidate)
        results.append(
            Row(
                candidate=candidate.name,
                batches=len(padded),
                padding=1 - sum(lengths) / sum(padded),
                tokens_per_second=statistics.median(speeds[candidate]),
                ratio=median,
                ratio_quartile_1=first,
                ratio_quartile_3=third,
            )
        )
    variation = statistics.pstdev(lengths) / statistics.fmean(lengths)
    about["lengths"] = (
        f"{options.examples} examples, mean {statistics.fmean(lengths):.0f}, longest "
        f"{max(lengths)}, coefficient of variation {variation:.2f}"
    )
    about["model"] = (
        f"llama, {options.layers} layers, hidden size {options.depth}, vocabulary {options.width}"
    )
    print("\n".join(f"- {name}: {value}" for name, value in about.items()))
    print("\n| batches | an epoch | padding | real tokens per second, to the first (quartiles) |")
    print("|---" * 4 + "|")
    for row in results:
        print(
            f"| {row.candidate} | {row.batches} | {row.padding:.1%} | {row.ratio:.2f} "
            f"({row.ratio_quartile_1:.2f} to {row.ratio_quartile_3:.2f}) |"
        )
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            records = [asdict(row) | about for row in results]
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)


if __name__ == "__main__":
    main()
