"""The LightningDataModule: sources of text in, batches of token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ntl_lightning.data.collate import IGNORE_INDEX, Architecture, Collator, encode
from ntl_lightning.data.loader import BatchLoader, BatchOrder, StepTotals
from ntl_lightning.data.problems import Arithmetic
from ntl_lightning.data.sources import Example, Source
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberKind,
    NumberVocabulary,
    Tokenizer,
    last_number,
)

__all__ = ["LabelCoverage", "NumberDataModule"]


@dataclass(frozen=True)
class LabelCoverage:
    """How many of the training labels a number loss reaches."""

    tokens: int
    """Label tokens."""
    digit_bearing: int
    """Label tokens whose text has a digit."""
    numbers: int
    """Label tokens that are number tokens."""

    @property
    def reached(self) -> float:
        """Share of the digit-bearing label tokens that are number tokens; 0 without any."""
        return self.numbers / self.digit_bearing if self.digit_bearing else 0.0


class NumberDataModule(LightningDataModule):
    """Prompt and target texts from any sources, tokenised, padded, masked and batched.

    Every task is text to text: regression targets too are written as text, and the golds stay text
    until the metrics read them.

    Args:
        train: Sources of the training set, joined.
        val: Sources of the validation set, joined.
        test: Named test sets, each with its sources. `test` is logged as `test/...`, any other
            name as `test_<name>/...`.
        predict: Sources for `predict`; their targets may be missing. Empty: the test sets.
        batch_size: Examples per batch and process in training.
        eval_batch_size: The same in evaluation; null takes `batch_size`.
        group_by_length: Put examples of similar length into a batch, which saves padding.
        num_workers: Processes that collate batches; 0 does it in the main process.
        seed: Decides the order of the training examples, with the epoch.
        max_prompt_tokens: Refuse longer prompts; null takes any.
        max_target_tokens: Refuse longer targets; null takes any.
        tokenizer: Set through `model.tokenizer` on the command line.
        architecture: Set by the model on the command line.
        number_tokens: Set through `model.number_tokens` on the command line.
        largest_number_token: Set through `model.largest_number_token` on the command line.

    Raises:
        ValueError: For settings out of range; in `setup`, for the faults that `encode` names.
    """

    def __init__(
        self,
        train: Sequence[Source] = (Arithmetic("addition", num_examples=2000, split="train"),),
        val: Sequence[Source] = (Arithmetic("addition", num_examples=200, split="val"),),
        test: dict[str, list[Source]] | None = None,
        predict: Sequence[Source] = (),
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        group_by_length: bool = True,
        num_workers: int = 0,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        max_target_tokens: int | None = None,
        tokenizer: Tokenizer = ArithmeticTokenizer(),
        architecture: Architecture = "causal",
        number_tokens: NumberKind = "digits",
        largest_number_token: float | None = 999,
    ) -> None:
        super().__init__()
        for key, size in (
            ("batch_size", batch_size),
            ("eval_batch_size", eval_batch_size),
            ("max_prompt_tokens", max_prompt_tokens),
            ("max_target_tokens", max_target_tokens),
        ):
            if size is not None and size < 1:
                raise ValueError(f"data.{key} must be at least 1, got {size}")
        if num_workers < 0:
            raise ValueError(f"data.num_workers must be 0 or more, got {num_workers}")
        if test is None:
            test = {"test": [Arithmetic("addition", num_examples=200, split="test")]}
        for name in test:
            if not name.isidentifier():
                raise ValueError(
                    f"data.test: {name!r} cannot name a test set; use letters, digits and _"
                )
        self.sources: dict[str, Sequence[Source]] = {"train": train, "val": val}
        self.test_sources = test
        self.predict_sources = predict
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.group_by_length = group_by_length
        self.num_workers = num_workers
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.max_target_tokens = max_target_tokens
        self.architecture: Architecture = architecture
        self.tokenizer = tokenizer.load()
        self.vocabulary = NumberVocabulary.from_tokenizer(
            self.tokenizer, kind=number_tokens, largest=largest_number_token
        )
        self._is_number = self.vocabulary.is_number_table()
        self._is_digit_bearing = self.vocabulary.is_digit_bearing_table()
        self._tables: dict[str, Dataset] = {}
        self.label_coverage: LabelCoverage | None = None
        """Of the training labels, once `setup("fit")` has run."""
        self.training_mean: float | None = None
        """Mean of the numeric training targets, once `setup("fit")` has run."""

    @property
    def longest_target(self) -> int:
        """Tokens of the longest target of the sets that were set up, end of sequence included."""
        return max(max(map(len, table["target_ids"])) for table in self._tables.values())

    def setup(self, stage: str) -> None:
        """Read and tokenise the sets of a stage, once."""
        if stage == "fit":
            self._set_up("train", self.sources["train"])
            self._describe_training()
        if stage in ("fit", "validate") and self.sources["val"]:
            self._set_up("val", self.sources["val"])
        if stage == "test" or (stage == "predict" and not self.predict_sources):
            if not self.test_sources:
                raise ValueError(f"data.test is empty: name a set to {stage} on")
            for name, sources in self.test_sources.items():
                self._set_up(f"test.{name}", sources)
        if stage == "predict" and self.predict_sources:
            self._set_up("predict", self.predict_sources, needs_target=False)
        if stage == "validate" and not self.sources["val"]:
            raise ValueError("data.val is empty: name a source to validate on")

    def _set_up(self, name: str, sources: Sequence[Source], needs_target: bool = True) -> None:
        if name in self._tables:
            return
        examples = [example for source in sources for example in source.examples()]
        if needs_target:
            _check_targets(examples, f"data.{name}")
        self._tables[name] = encode(
            examples,
            self.tokenizer,
            self.architecture,
            f"data.{name}",
            max_prompt_tokens=self.max_prompt_tokens,
            max_target_tokens=self.max_target_tokens,
        )

    def _describe_training(self) -> None:
        table = self._tables["train"]
        ids = torch.tensor([i for row in table["target_ids"] for i in row])
        self.label_coverage = LabelCoverage(
            tokens=len(ids),
            digit_bearing=int(self._is_digit_bearing[ids].sum()),
            numbers=int(self._is_number[ids].sum()),
        )
        values = [float(v) for text in table["target"] if (v := last_number(text)) is not None]
        self.training_mean = fmean(values) if values else None
        coverage = self.label_coverage
        rank_zero_info(
            f"Training data: {len(table)} examples, {coverage.tokens} label tokens, of these "
            f"{coverage.numbers} number tokens ({coverage.numbers / coverage.tokens:.1%}); the "
            f"number losses reach {coverage.reached:.1%} of the label tokens with a digit."
        )
        if coverage.digit_bearing and 0 < coverage.reached < 0.5:
            rank_zero_warn(
                f"Only {coverage.reached:.1%} of the label tokens with a digit are number tokens "
                f"of kind {self.vocabulary.kind!r}: the number losses do not see the rest. Use "
                "model.tokenizer with digit_level: true, or another model.number_tokens; "
                "`python -m ntl_lightning inspect-tokenizer` shows how numbers are cut."
            )

    def _order(self, table: Dataset, batch_size: int, **settings: bool) -> BatchOrder:
        lengths = [
            len(p) + len(t) for p, t in zip(table["prompt_ids"], table["target_ids"], strict=True)
        ]
        return BatchOrder(
            lengths,
            batch_size,
            seed=self.seed,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
            **settings,
        )

    def _collator(self, for_evaluation: bool) -> Collator:
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.tokenizer.eos_token_id
        return Collator(self.architecture, pad_id, for_evaluation)

    def train_dataloader(self) -> StepTotals | BatchLoader:
        """Shuffled batches, each with the label totals of its optimizer step."""
        table = self._tables["train"]
        loader = BatchLoader(
            table,
            self._order(table, self.batch_size, shuffle=True, group_by_length=self.group_by_length),
            self._collator(for_evaluation=False),
            num_workers=self.num_workers,
        )
        trainer = self.trainer
        if trainer is None:
            return loader

        def sum_over_ranks(counts: torch.Tensor) -> torch.Tensor:
            counts = counts.to(trainer.strategy.root_device, torch.float32)
            return trainer.strategy.reduce(counts, reduce_op="sum")

        return StepTotals(
            loader,
            count=self.count_labels,
            accumulation=lambda: trainer.accumulate_grad_batches,
            num_batches=lambda: trainer.num_training_batches,
            sum_over_ranks=sum_over_ranks,
        )

    def count_labels(self, batch: dict[str, Any]) -> dict[str, int]:
        """Label tokens and number tokens of a batch, as `tokens` and `numbers`."""
        labels = batch["labels"]
        kept = labels[labels != IGNORE_INDEX]
        return {"tokens": kept.numel(), "numbers": int(self._is_number[kept].sum())}

    def _evaluation_loader(self, name: str, *, in_order: bool = False) -> BatchLoader:
        table = self._tables[name]
        order = self._order(
            table,
            self.eval_batch_size or self.batch_size,
            shuffle=False,
            group_by_length=self.group_by_length and not in_order,
        )
        return BatchLoader(
            table, order, self._collator(for_evaluation=True), num_workers=self.num_workers
        )

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """The validation set, every example once."""
        return self._evaluation_loader("val") if "val" in self._tables else []

    def test_dataloader(self) -> dict[str, BatchLoader]:
        """The test sets by name, every example once."""
        return {name: self._evaluation_loader(f"test.{name}") for name in self.test_sources}

    def predict_dataloader(self) -> dict[str, BatchLoader]:
        """The prediction set, or else the test sets, in input order."""
        names = ["predict"] if self.predict_sources else [f"test.{n}" for n in self.test_sources]
        return {
            name.removeprefix("test."): self._evaluation_loader(name, in_order=True)
            for name in names
        }


def _check_targets(examples: Sequence[Example], where: str) -> None:
    without = [example for example in examples if example.target is None]
    if without:
        raise ValueError(
            f"{where}: {len(without)} of {len(examples)} examples have no target, the first is "
            f"{without[0].origin}; name the source's target column"
        )
