"""The LightningDataModule: sources of text in, batches of token ids out."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, get_args

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ntl_lightning.data.collate import IGNORE_INDEX, Architecture, Collator, TooLong, encode
from ntl_lightning.data.files import shortened
from ntl_lightning.data.loader import BatchLoader, StepTotals
from ntl_lightning.data.order import BatchOrder, TokenBudgetOrder
from ntl_lightning.data.problems import Arithmetic
from ntl_lightning.data.quantities import compile_patterns, matched_spans
from ntl_lightning.data.sources import Example, Source
from ntl_lightning.data.written import ChangedNumbers, check_are_finite, gold_numbers
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberCodec,
    NumberKind,
    NumberVocabulary,
    Tokenizer,
    label_counts,
    last_number,
    num_token_ids,
    number_runs,
)

__all__ = ["LabelCoverage", "NumberDataModule"]

_TRAIN, _VAL, _TEST = (
    Arithmetic("addition", num_examples=2000, split="train"),
    Arithmetic("addition", num_examples=200, split="val"),
    Arithmetic("addition", num_examples=200, split="test"),
)

_DIGIT = re.compile(r"[0-9]")


@dataclass(frozen=True)
class LabelCoverage:
    """How many of the training labels a number loss reaches."""

    tokens: int
    """Label tokens."""
    digit_bearing: int
    """Label tokens whose text has a digit, without those that are marked as no quantities."""
    numbers: int
    """Label tokens that are number tokens, without those that are marked as no quantities."""
    not_quantities: int = 0
    """Number tokens that are marked as no quantities."""
    first_targets: tuple[str, ...] = field(default=(), compare=False)
    """The first target of every source and where it comes from, for messages."""

    @property
    def reached(self) -> float:
        """Share of the digit-bearing label tokens that are number tokens; 0 without any.

        What is marked as no quantity counts neither way.
        """
        return self.numbers / self.digit_bearing if self.digit_bearing else 0.0


@dataclass(frozen=True)
class LabelMarks:
    """What the number losses make of N label tokens."""

    is_number: torch.Tensor
    """(N,) bool: a number token."""
    has_digit: torch.Tensor
    """(N,) bool: a token whose text has a digit."""
    is_quantity: torch.Tensor
    """(N,) bool: not marked as no quantity."""

    def coverage(self) -> LabelCoverage:
        """The marks, counted."""
        return LabelCoverage(
            tokens=len(self.is_number),
            digit_bearing=int((self.has_digit & self.is_quantity).sum()),
            numbers=int((self.is_number & self.is_quantity).sum()),
            not_quantities=int((self.is_number & ~self.is_quantity).sum()),
        )


class NumberDataModule(LightningDataModule):
    """Prompt and target texts from any sources, tokenised, padded, masked and batched.

    Every task is text to text: regression targets too are written as text, and the golds stay text
    until the metrics read them.

    Args:
        train: Sources of the training set, joined. The default is addition of two numbers.
        val: Sources of the validation set, joined; none: no validation. null: none, or with the
            default of `train` the addition that belongs to it.
        test: Named test sets, each with its sources. `test` is logged as `test/...`, any other
            name as `test_<name>/...`. null: as for `val`.
        predict: Sources for `predict`; their targets may be missing. Empty: the test sets.
        batch_size: Examples per batch and process in training.
        max_tokens_per_batch: Take as many examples into a training batch as fit this number of
            tokens per process, padding included, whatever `batch_size` is; this is then for
            evaluation alone. null: batches of `batch_size` examples.
        packing: Put several training examples into each row of a batch, which leaves next to no
            padding, and keep them from seeing each other. For causal models; needs
            `max_tokens_per_batch`. Whether the model can do it is tried out at the first batch.
        eval_batch_size: Examples per batch and process in evaluation; null takes `batch_size`.
            Where it is set, a BatchSizeFinder for evaluation needs
            `batch_arg_name: eval_batch_size`.
        group_by_length: Put training examples of similar length into a batch, which saves padding
            where lengths differ much. Off by default: where the length tells the kind of problem,
            as in arithmetic, every batch holds one kind, and training suffers badly.
        pad_to_multiple_of: Pad sequences and labels of all batches to a multiple of this, as tensor
            cores like it: 8, or 64. null: to the longest.
        num_workers: Processes that collate batches; 0 does it in the main process.
        seed: Decides the order of the training examples, with the epoch; not negative.
        max_prompt_tokens: Longest prompt, in tokens; null takes any.
        max_target_tokens: Longest target, in tokens; null takes any.
        too_long: What becomes of longer examples, in all sets. `refuse` stops. `leave_out` leaves
            them out and says how many; of a prediction nothing is left out. `cut_prompt` cuts
            prompts on their left, never within a number, and says how many; targets are never cut.
        not_quantities: Regular expressions for numbers in targets that are ids or categories and
            no quantities, in all sets: they are learnt by cross entropy alone, the number losses
            pass them over. Every token that overlaps a match is marked; where an expression has
            groups, as `room ([0-9]+)`, those that overlap its groups. Table sources can also name
            columns.
        codec: How target values are written for the model, and answers read back before they are
            scored in the units of the data; every target is then one number. null: targets are
            learnt as they stand in the data.
        changed_numbers: What becomes of targets whose number is another one after tokenising and
            decoding, which even a right answer cannot hit: `refuse` them, or `count` them in a
            warning.
        tokenizer: Set through `model.tokenizer` on the command line.
        architecture: Set by the model on the command line.
        number_tokens: Set through `model.number_tokens` on the command line.
        largest_number_token: Set through `model.largest_number_token` on the command line.

    Raises:
        ValueError: For settings out of range, or that exclude each other; in `setup`, for the
            faults that `encode` names, or if `max_tokens_per_batch` does not hold the longest
            example, or meets a BatchSizeFinder.
    """

    def __init__(
        self,
        train: Sequence[Source] = (_TRAIN,),
        val: Sequence[Source] | None = None,
        test: dict[str, list[Source]] | None = None,
        predict: Sequence[Source] = (),
        batch_size: int = 32,
        max_tokens_per_batch: int | None = None,
        packing: bool = False,
        eval_batch_size: int | None = None,
        group_by_length: bool = False,
        pad_to_multiple_of: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        max_target_tokens: int | None = None,
        too_long: TooLong = "refuse",
        not_quantities: Sequence[str] = (),
        codec: NumberCodec | None = None,
        changed_numbers: ChangedNumbers = "refuse",
        tokenizer: Tokenizer = ArithmeticTokenizer(),
        architecture: Architecture = "causal",
        number_tokens: NumberKind = "digits",
        largest_number_token: float | None = 999,
    ) -> None:
        super().__init__()
        for key, size in (
            ("batch_size", batch_size),
            ("max_tokens_per_batch", max_tokens_per_batch),
            ("eval_batch_size", eval_batch_size),
            ("pad_to_multiple_of", pad_to_multiple_of),
            ("max_prompt_tokens", max_prompt_tokens),
            ("max_target_tokens", max_target_tokens),
        ):
            if size is not None and size < 1:
                raise ValueError(f"data.{key} must be at least 1, got {size}")
        if num_workers < 0:
            raise ValueError(f"data.num_workers must be 0 or more, got {num_workers}")
        if seed < 0:
            raise ValueError(f"data.seed must be 0 or more, got {seed}")
        if too_long not in get_args(TooLong):
            raise ValueError(
                f"data.too_long must be one of {', '.join(get_args(TooLong))}, got {too_long!r}"
            )
        if (too_long == "cut_prompt" and max_prompt_tokens is None) or (
            too_long == "leave_out" and max_prompt_tokens is None and max_target_tokens is None
        ):
            either = "" if too_long == "cut_prompt" else " or data.max_target_tokens"
            raise ValueError(
                f"data.too_long={too_long} has no effect without data.max_prompt_tokens{either}"
            )
        if packing:
            if architecture == "seq2seq":
                raise ValueError(
                    "data.packing is for causal models: the encoder of a seq2seq model would read "
                    "all examples of a row as one. Set data.packing to false; "
                    "data.max_tokens_per_batch with data.group_by_length saves padding too"
                )
            if max_tokens_per_batch is None:
                raise ValueError(
                    "data.packing needs data.max_tokens_per_batch, the tokens of a batch; a "
                    "multiple of the longest example packs well"
                )
            if group_by_length:
                raise ValueError(
                    "data.group_by_length has no effect on packed rows: set it or data.packing to "
                    "false"
                )
        if changed_numbers not in get_args(ChangedNumbers):
            raise ValueError(
                f"data.changed_numbers must be refuse or count, got {changed_numbers!r}"
            )
        if codec is not None and not_quantities:
            raise ValueError(
                "data.codec writes the targets anew as one number each, so there is nothing that "
                "data.not_quantities could mark. Remove one of the two"
            )
        # Nobody's own task should be validated or tested on the built-in one.
        is_built_in = list(train) == [_TRAIN]
        if val is None:
            val = (_VAL,) if is_built_in else ()
        if test is None:
            test = {"test": [_TEST]} if is_built_in else {}
        for name in test:
            if not str(name).isidentifier():
                raise ValueError(
                    f"data.test: {name!r} cannot name a test set; use letters, digits and _, "
                    "and begin with a letter"
                )
        self.train_sources = train
        self.val_sources = val
        if not val:
            # Lightning then sees that there is none, rather than an empty one.
            self.val_dataloader = None  # type: ignore[assignment, method-assign]
        self.test_sources = test
        self.predict_sources = predict
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.packing = packing
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self.eval_batch_size = eval_batch_size
        self.group_by_length = group_by_length
        self.num_workers = num_workers
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.max_target_tokens = max_target_tokens
        self.too_long: TooLong = too_long
        self.not_quantities = compile_patterns(not_quantities, "data.not_quantities")
        self.codec = codec
        """As asked for; a standardised one with its mean and standard deviation once these are
        known, from `setup("fit")` or from the model that is evaluated."""
        self._asked_codec = codec
        self.changed_numbers: ChangedNumbers = changed_numbers
        self.architecture: Architecture = architecture
        self.tokenizer = tokenizer.load()
        self.vocabulary = NumberVocabulary.from_tokenizer(
            self.tokenizer,
            # What the model's logits have beyond is no label.
            width=num_token_ids(self.tokenizer),
            kind=number_tokens,
            largest=largest_number_token,
        )
        self._is_number = self.vocabulary.is_number_table()
        self._is_digit_bearing = self.vocabulary.is_digit_bearing_table()
        self._values = self.vocabulary.value_table()
        self._forms = self.vocabulary.forms_table()
        self.sources: dict[str, Sequence[Source]] = {}
        """Of the sets that were set up: `train`, `val`, `predict`, `test.<name>`."""
        self.num_examples: dict[str, list[int]] = {}
        """Of these sets, how many each source gave, before any were left out."""
        self._tables: dict[str, Dataset] = {}
        # Prompts as the sources gave them, and ids, of the examples that are there.
        self._keys: dict[str, list[tuple[str, str | None]]] = {}
        self._first_targets: tuple[str, ...] = ()
        self._waiting: dict[str, list[Example]] = {}  # for the mean and standard deviation
        self._train_loader: StepTotals | None = None
        self._train_state: dict[str, Any] | None = None
        self.label_coverage: LabelCoverage | None = None
        """Of the training labels, once `setup("fit")` has run."""
        self.training_mean: float | None = None
        """Mean of the numeric training targets, once `setup("fit")` has run."""

    @property
    def longest_target(self) -> int:
        """Tokens of the longest target of the sets that were set up, end of sequence included.

        0 where none was set up, or none has targets.
        """
        return max(
            (pc.max(_num_tokens(table, "target_ids")).as_py() for table in self._tables.values()),
            default=0,
        )

    def setup(self, stage: str) -> None:
        """Read and tokenise the sets of a stage, once.

        Args:
            stage: `fit`, `validate`, `test` or `predict`.
        """
        if stage == "fit":
            self._check_batch_size_finder()
            # The state of a checkpoint comes after this; that of an earlier run does not count.
            self._train_loader = self._train_state = None
            self._set_up("train", self.train_sources)
            if self.val_sources:
                self._set_up("val", self.val_sources)
            if self.label_coverage is None:
                self._describe_training()
                self._report_what_is_shared()
        elif stage == "validate":
            if not self.val_sources:
                raise ValueError("data.val is empty: name a source to validate on")
            self._set_up("val", self.val_sources)
        elif stage == "predict" and self.predict_sources:
            self._set_up("predict", self.predict_sources, needs_target=False)
        else:
            if not self.test_sources:
                if stage == "predict":
                    raise ValueError(
                        "data.predict and data.test are empty: name a source to predict on"
                    )
                raise ValueError("data.test is empty: name a source to test on")
            for name, sources in self.test_sources.items():
                self._set_up(f"test.{name}", sources)

    def _check_batch_size_finder(self) -> None:
        callbacks = self.trainer.callbacks if self.trainer else []  # type: ignore[attr-defined]
        if self.max_tokens_per_batch and any(isinstance(c, BatchSizeFinder) for c in callbacks):
            raise ValueError(
                "data.max_tokens_per_batch decides the size of training batches, so the "
                "BatchSizeFinder in trainer.callbacks would look for what is not used; leave one "
                "of the two out"
            )

    def _set_up(self, name: str, sources: Sequence[Source], needs_target: bool = True) -> None:
        if name in self._tables or name in self._waiting:
            return
        by_source = [source.examples() for source in sources]
        examples = list(chain.from_iterable(by_source))
        if needs_target:
            _check_targets(examples, f"data.{name}")
        check_are_finite(examples, f"data.{name}")
        self.sources[name] = sources
        self.num_examples[name] = [len(given) for given in by_source]
        if name == "train":
            self._fit_codec(examples)
        if self.codec is None or self.codec.is_complete:
            self._tables[name] = self._encoded(name, examples)
        else:
            gold_numbers(examples, f"data.{name}")
            self._waiting[name] = examples
        if name == "train":
            self._first_targets = tuple(f"{e[0].target!r} ({e[0].origin})" for e in by_source if e)
            self._report_marks_without_digits(by_source)

    def _encoded(self, name: str, examples: list[Example]) -> Dataset:
        table = encode(
            examples,
            self.tokenizer,
            self.architecture,
            f"data.{name}",
            max_prompt_tokens=self.max_prompt_tokens,
            max_target_tokens=self.max_target_tokens,
            # A prediction without an answer to every prompt would be of no use.
            too_long="refuse"
            if name == "predict" and self.too_long == "leave_out"
            else self.too_long,
            not_quantities=self.not_quantities,
            codec=self.codec,
            changed_numbers=self.changed_numbers,
        )
        sizes = self.num_examples[name]
        places = np.asarray(_column(table, "place"))
        self._keys[name] = [(examples[i].prompt, examples[i].id) for i in places]
        source = np.repeat(np.arange(len(sizes)), sizes)[places]
        return table.remove_columns("place").add_column("source", source.tolist())

    def _fit_codec(self, examples: list[Example]) -> None:
        """Take what the codec leaves open from the training targets."""
        if self._asked_codec is None or self._asked_codec.is_complete:
            return
        values = [value for value in gold_numbers(examples, "data.train") if value is not None]
        try:
            fitted = self._asked_codec.fitted(values)
        except ValueError as error:
            raise ValueError(f"data.codec: {error}") from error
        if fitted != self.codec:
            # What was written with those of an earlier model is read and written anew.
            self._tables.clear()
            self._waiting.clear()
        self.codec = fitted
        rank_zero_info(
            f"data.codec: the training targets have the mean {fitted.mean:.6g} and the standard "
            f"deviation {fitted.standard_deviation:.6g}."
        )

    def _complete_codec(self) -> None:
        """Take what the codec leaves open from the model, which was trained with it."""
        model = getattr(self.trainer, "lightning_module", None)
        theirs = getattr(model, "codec", None)
        if not isinstance(theirs, NumberCodec) or theirs.mean is None:
            raise ValueError(
                "data.codec is standardised, but its mean and standard deviation are not known: "
                "they are those of the training targets, which the checkpoint of a trained model "
                "holds. Give --ckpt_path, or write both into data.codec"
            )
        assert self.codec is not None
        self.codec = replace(
            self.codec, mean=theirs.mean, standard_deviation=theirs.standard_deviation
        )

    def _report_marks_without_digits(self, by_source: Sequence[Sequence[Example]]) -> None:
        """Say which settings of `not_quantities` cannot have an effect on the training labels."""
        targets = [example.target or "" for examples in by_source for example in examples]
        for number, pattern in enumerate(self.not_quantities):
            if not any(_have_digit(target, matched_spans(pattern, target)) for target in targets):
                rank_zero_warn(
                    f"data.not_quantities[{number}]: {pattern.pattern!r} finds no digit in any "
                    f"target of data.train, so it has no effect. The first target is "
                    f"{targets[0]!r}; where the expression has groups, only these are marked."
                )
        for number, examples in enumerate(by_source):
            marked = [example for example in examples if example.not_quantities]
            if marked and not any(_have_digit(e.target or "", e.not_quantities) for e in marked):
                rank_zero_warn(
                    f"data.train[{number}]: what its not_quantities marks never holds a digit, so "
                    f"it has no effect. The first target is {marked[0].target!r}."
                )

    def table(self, name: str) -> Dataset:
        """A set as it was tokenised: the columns of `encode`, and for each row its `source`.

        Args:
            name: `train`, `val`, `predict` or `test.<name>`.

        Raises:
            RuntimeError: If it has not been set up.
            ValueError: If the codec lacks what only a trained model knows.
        """
        if name in self._waiting:
            # Checkpoints are loaded after `setup`, and before the loaders are asked for.
            if self.codec is not None and not self.codec.is_complete:
                self._complete_codec()
            self._tables[name] = self._encoded(name, self._waiting.pop(name))
        if name not in self._tables:
            raise RuntimeError(f"data.{name} has not been read yet: call setup() with its stage")
        return self._tables[name]

    def label_marks(self, table: Dataset) -> LabelMarks:
        """What the number losses make of the labels of a table, row after row."""
        flat = pc.list_flatten(_column(table, "target_ids"))
        # Where no row has a target, Arrow knows no type.
        ids = torch.tensor(pc.cast(flat, "int64").to_numpy())
        is_quantity = torch.ones(len(ids), dtype=torch.bool)
        if "quantities" in table.column_names:
            flat = pc.list_flatten(_column(table, "quantities"))
            is_quantity = torch.tensor(flat.to_numpy())
        return LabelMarks(self._is_number[ids], self._is_digit_bearing[ids], is_quantity)

    def _describe_training(self) -> None:
        table = self._tables["train"]
        labels = self.label_marks(table)
        coverage = replace(labels.coverage(), first_targets=self._first_targets)
        self.label_coverage = coverage
        marks = "quantities" in table.column_names
        marked = f", {coverage.not_quantities} more are marked as no quantities" if marks else ""
        rank_zero_info(
            f"Training data: {len(table)} examples, {coverage.tokens} label tokens, of these "
            f"{coverage.numbers} number tokens ({coverage.numbers / coverage.tokens:.1%}){marked}; "
            f"the number losses reach {coverage.reached:.1%} of the label tokens with a digit."
        )
        if coverage.digit_bearing and 0 < coverage.reached < 0.5:
            rank_zero_warn(
                f"Only {coverage.reached:.1%} of the label tokens with a digit are number tokens "
                f"of kind {self.vocabulary.kind!r}: the number losses do not see the rest. Use "
                "model.tokenizer with digit_level: true, or another model.number_tokens; "
                "`python -m ntl_lightning inspect-tokenizer` shows how numbers are cut."
            )
        if coverage.not_quantities and not coverage.numbers:
            rank_zero_warn(
                f"not_quantities marks all {coverage.not_quantities} number tokens of the training "
                "labels, which leaves the number losses nothing to act on. Narrow "
                "data.not_quantities and that of the sources, or train with CrossEntropy alone."
            )
        self.training_mean = _mean_number(_column(table, "target").to_pylist())

    def _report_what_is_shared(self) -> None:
        """Say which evaluation prompts and ids are trained on, before it is too late."""
        seen = {prompt for prompt, _ in self._keys["train"]}
        seen_ids = {key for _, key in self._keys["train"]} - {None}
        names = ["val"] if self.val_sources else []
        for name in [*names, *(f"test.{name}" for name in self.test_sources)]:
            keys = self._prompts_and_ids(name)
            shared_ids = [key for _, key in keys if key in seen_ids]
            if shared_ids:
                rank_zero_warn(
                    f"{len(shared_ids)} of {len(keys)} examples of data.{name} have an id that "
                    f"data.train has too, the first is {shortened(str(shared_ids[0]))}: its "
                    "metrics say in part what is remembered. Split the data by id, see "
                    "ntl_lightning.data.Split."
                )
            shared = sum(prompt in seen for prompt, _ in keys)
            if shared:
                rank_zero_warn(
                    f"{shared} of {len(keys)} prompts of data.{name} are also prompts of "
                    "data.train: its metrics say how well these are remembered. Give every set a "
                    "file or seed of its own."
                )

    def _prompts_and_ids(self, name: str) -> list[tuple[str, str | None]]:
        """Those of a set; none where a test set is not at hand during training."""
        if name in self._tables:
            return self._keys[name]
        try:
            examples = _examples(self.test_sources[name.removeprefix("test.")])
        except OSError as error:
            rank_zero_warn(f"data.{name} cannot be read yet: {error}")
            return []
        return [(example.prompt, example.id) for example in examples]

    def _process(self) -> dict[str, int]:
        return {
            "rank": self.trainer.global_rank if self.trainer else 0,
            "world_size": self.trainer.world_size if self.trainer else 1,
        }

    def _collator(self, **settings: Any) -> Collator:
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.tokenizer.eos_token_id
        return Collator(
            self.architecture, pad_id, pad_to_multiple_of=self.pad_to_multiple_of, **settings
        )

    def train_dataloader(self) -> StepTotals | BatchLoader:
        """Shuffled batches, each with the label totals of its optimizer step.

        These are `tokens` and `numbers`, and `whole_numbers` where a term is averaged over them.

        With `trainer.overfit_batches` the order is that of the sources, so that the same batches
        come in every epoch. Without a trainer there are no steps and no totals.
        """
        table, trainer = self.table("train"), self.trainer
        if trainer is None:
            return self._train_batches(table)

        def sum_over_ranks(counts: torch.Tensor) -> torch.Tensor:
            return trainer.strategy.reduce(counts.to(trainer.strategy.root_device), reduce_op="sum")

        self._train_loader = StepTotals(
            self._train_batches(
                table,
                shuffle=trainer.overfit_batches == 0,  # type: ignore[attr-defined]
                epoch=trainer.current_epoch,
                num_batches=lambda: trainer.num_training_batches,
            ),
            count=partial(self.count_labels, whole_numbers=_averages_over_whole_numbers(trainer)),
            accumulation=lambda: trainer.accumulate_grad_batches,
            num_batches=lambda: trainer.num_training_batches,
            sum_over_ranks=sum_over_ranks,
        )
        if self._train_state is not None:
            self._train_loader.load_state_dict(self._train_state)
            self._train_state = None
        return self._train_loader

    def _train_batches(self, table: Dataset, shuffle: bool = True, **settings: Any) -> BatchLoader:
        order = self._train_order(table, shuffle)
        row_length = order.row_length if isinstance(order, TokenBudgetOrder) else None
        return BatchLoader(
            table,
            order,
            self._collator(row_length=row_length),
            num_workers=self.num_workers,
            codec=self.codec,
            **settings,
        )

    def _train_order(self, table: Dataset, shuffle: bool) -> BatchOrder | TokenBudgetOrder:
        settings: dict[str, Any] = {
            "shuffle": shuffle,
            "group_by_length": self.group_by_length and shuffle,
            "seed": self.seed,
            **self._process(),
        }
        if self.max_tokens_per_batch is None:
            return BatchOrder(_lengths(table), self.batch_size, **settings)
        parts = [_num_tokens(table, name).to_numpy() for name in ("prompt_ids", "target_ids")]
        order = TokenBudgetOrder(
            np.add(*parts) if self.architecture == "causal" else np.stack(parts, axis=1),
            self.max_tokens_per_batch,
            packing=self.packing,
            pad_to_multiple_of=self.pad_to_multiple_of,
            **settings,
        )
        rows = f" in packed rows of at most {order.row_length}"
        rank_zero_info(
            f"Training batches: {len(order)} an epoch, with at most {self.max_tokens_per_batch} "
            f"tokens{rows if self.packing else ''}, of which {order.share_of_padding:.1%} is "
            "padding."
        )
        return order

    def state_dict(self) -> dict[str, Any]:
        """Where in the training data a run is.

        Lightning saves this with the loader too, but does not load it where the loader was asked
        for before, as it is for a learning rate that depends on the length of the run.
        """
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let `fit` go on where the checkpoint's run was."""
        if self._train_loader is None:
            self._train_state = state.get("train")
        elif "train" in state:
            # Strategies that shard load checkpoints only after the loader is made.
            self._train_loader.load_state_dict(state["train"])

    def count_labels(self, batch: dict[str, Any], whole_numbers: bool = True) -> dict[str, int]:
        """What loss terms are averaged over, in one batch.

        Args:
            batch: `labels`, and where there are some `quantities` and `first_label`.
            whole_numbers: Count these too, which takes milliseconds.

        Returns:
            `tokens`, all labels; `numbers`, those that are number tokens and quantities;
            `whole_numbers`, the written numbers that consist of such tokens.
        """
        # The first token of a causal model's sequence is predicted by none.
        first = max(batch["first_label"], 1) if "first_label" in batch else 0
        labels = batch["labels"][:, first:]
        is_label = labels != IGNORE_INDEX
        token_ids = labels.where(is_label, 0)
        is_number = is_label & self._is_number[token_ids]
        if "quantities" in batch:
            is_number &= batch["quantities"][:, first:]
        runs = None
        if whole_numbers:
            values = self._values[token_ids].where(is_number, 0.0)
            runs = number_runs(labels, self._forms, is_number, values)
        return {name: int(n) for name, n in label_counts(labels, is_number, runs).items()}

    def _evaluation_loader(self, name: str, *, in_order: bool = False) -> BatchLoader:
        table = self.table(name)
        order = BatchOrder(
            _lengths(table),
            self.eval_batch_size or self.batch_size,
            shuffle=False,
            group_by_length=not in_order,
            **self._process(),
        )
        return BatchLoader(
            table,
            order,
            self._collator(for_evaluation=True),
            num_workers=self.num_workers,
            codec=self.codec,
        )

    def val_dataloader(self) -> BatchLoader:
        """The validation set, every example once."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> dict[str, BatchLoader]:
        """The test sets by name, every example once."""
        return {name: self._evaluation_loader(f"test.{name}") for name in self.test_sources}

    def predict_dataloader(self) -> dict[str, BatchLoader]:
        """The prediction set, or else the test sets, in input order.

        Raises:
            ValueError: If examples of a test set that is to be predicted are left out.
        """
        names = ["predict"] if self.predict_sources else [f"test.{n}" for n in self.test_sources]
        for name in names:
            num_left_out = sum(self.num_examples[name]) - len(self.table(name))
            if num_left_out:
                raise ValueError(
                    f"data.predict is empty, so data.{name} is predicted, but {num_left_out} of "
                    "its examples are left out (data.too_long=leave_out), and predictions would "
                    "not be in the order of its file. Name the file in data.predict"
                )
        return {
            name.removeprefix("test."): self._evaluation_loader(name, in_order=True)
            for name in names
        }


def _averages_over_whole_numbers(trainer: Trainer) -> bool:
    """Whether the model's objective has such a term; true of a model that does not tell."""
    objective = getattr(trainer.lightning_module, "objective", None)
    terms = getattr(objective, "terms", None)
    return terms is None or any(term.averaged_over == "whole_numbers" for term in terms)


def _have_digit(text: str, spans: Iterable[tuple[int, int]]) -> bool:
    return any(_DIGIT.search(text, start, end) for start, end in spans)


def _examples(sources: Iterable[Source]) -> list[Example]:
    return [example for source in sources for example in source.examples()]


def _mean_number(texts: Iterable[str]) -> float | None:
    """Mean of the last number of each text, over the texts that have one."""
    numbers = [number for text in texts if (number := last_number(text)) is not None]
    finite = [number for number in numbers if math.isfinite(float(number))]
    if len(finite) < len(numbers):
        rank_zero_warn(
            f"data.train: the numbers of {len(numbers) - len(finite)} of {len(numbers)} targets "
            "are too large for float64; the mean of the training targets leaves them out."
        )
    # Decimals: a sum of floats may overflow where their mean does not.
    return float(sum(finite) / len(finite)) if finite else None


def _column(table: Dataset, name: str) -> Any:
    return table.with_format("arrow")[:][name]


def _num_tokens(table: Dataset, name: str) -> Any:
    return pc.list_value_length(_column(table, name))


def _lengths(table: Dataset) -> list[int]:
    """(N,) tokens of the examples."""
    lengths: list[int] = pc.add(
        _num_tokens(table, "prompt_ids"), _num_tokens(table, "target_ids")
    ).to_pylist()
    return lengths


def _check_targets(examples: Sequence[Example], where: str) -> None:
    without = [example for example in examples if example.target is None]
    if without:
        raise ValueError(
            f"{where}: {len(without)} of {len(examples)} examples have no target, the first is "
            f"{without[0].origin}; name the source's target column"
        )
