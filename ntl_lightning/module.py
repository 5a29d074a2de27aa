"""`NumberAwareLM`: where a language model, the loss terms and the metrics meet.

B batch, T positions, V vocabulary, N label positions.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from ntl_lightning.backbones import FLOAT16_OVERFLOWS, Backbone, FromConfig, num_scores
from ntl_lightning.evaluation import (
    Generation,
    NumericMetrics,
    TermAverages,
    expected_values,
    generate,
)
from ntl_lightning.losses import (
    IGNORE_INDEX,
    CrossEntropy,
    LossTerm,
    Objective,
    ObjectiveResult,
    Wasserstein,
)
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberCodec,
    NumberFormat,
    NumberKind,
    NumberVocabulary,
    Tokenizer,
    decode_answers,
    last_number,
    num_token_ids,
)
from ntl_lightning.optimization import AdamW, CosineLR, LRSchedule, OptimizerSpec
from ntl_lightning.output_head import OutputHead, Projection, UnknownHead
from ntl_lightning.probes import CannotPack, verify_packing

__all__ = ["NumberAwareLM"]

Stage = Literal["val", "test", "predict"]

_ANSWER_MARGIN = 8  # tokens that an answer may be longer than the longest target
_PROBE_LENGTH = 8  # tokens of the sequences that a new model is tried on


class NumberAwareLM(LightningModule):
    """Trains a seq2seq or causal language model with number-aware loss terms.

    Logged: `train/loss` and `train/<term>` of this rank's micro-batch, `train/number_tokens` of the
    whole optimizer step, `train/learning_rate`; and per validation or test set (`val`, `test`,
    `test_<name>`) `loss`, `<term>`, `perplexity`, `token_accuracy`, `num_label_tokens`,
    `num_number_tokens` (from the true prefix) and the `NumericMetrics` of the generated answers.

    Averages are exact: with `NumberDataModule` (or any loader in `StepTotals`) the gradient does
    not depend on how an optimizer step is split into micro-batches and ranks. With other loaders
    each batch is averaged by its own counts. A batch is what `Collator` makes: `input_ids`,
    `attention_mask`, `labels`, for causal models `first_label`, where some numbers are no
    quantities `quantities`, and in evaluation `prompt_input_ids`, `prompt_attention_mask` and the
    lists `prompt`, `target`, `index`. Packed training batches have `position_ids` and
    `num_positions` in place of `attention_mask`; the first one is preceded by a trial whether the
    model keeps packed examples apart.

    Args:
        backbone: The language model.
        tokenizer: Its tokenizer. Nothing is added to it.
        number_tokens: Which tokens count as numbers: single digits, integers, or all numbers.
        largest_number_token: Largest value of one token; null takes any, and warns.
        loss_terms: The objective; each term is averaged, weighted, scheduled and logged.
        logits: `auto` takes the training loss from the hidden states and the output matrix, and
            never holds all logits in memory, where the first training step finds that these give
            the model's own logits. `full` always takes the model's logits.
        generation: How answers are made in evaluation and prediction.
        optimizer: The optimizer.
        lr_schedule: The learning rate, by optimizer step.

    Raises:
        TypeError: If an argument is an object where its settings are wanted.
        ValueError: For settings that cannot work, as early as they are known.
    """

    def __init__(
        self,
        backbone: Backbone = FromConfig(),
        tokenizer: Tokenizer = ArithmeticTokenizer(),
        number_tokens: NumberKind = "digits",
        largest_number_token: float | None = 999,
        loss_terms: Sequence[LossTerm] = (CrossEntropy(), Wasserstein()),
        logits: Literal["auto", "full"] = "auto",
        generation: Generation = Generation(),
        optimizer: OptimizerSpec = AdamW(),
        lr_schedule: LRSchedule = CosineLR(),
    ) -> None:
        super().__init__()
        arguments: dict[str, object] = {
            "backbone": backbone,
            "tokenizer": tokenizer,
            "number_tokens": number_tokens,
            "largest_number_token": largest_number_token,
            "loss_terms": loss_terms,
            "logits": logits,
            "generation": generation,
            "optimizer": optimizer,
            "lr_schedule": lr_schedule,
        }
        for name, kind in _KINDS.items():
            if not isinstance(arguments[name], kind):
                raise TypeError(
                    f"model.{name} must be a {kind.__name__}, got "
                    f"{type(arguments[name]).__name__}; give the settings, the object is built here"
                )
        for term in loss_terms if isinstance(loss_terms, Sequence) else [loss_terms]:
            if not isinstance(loss_terms, Sequence) or not isinstance(term, LossTerm):
                raise TypeError(
                    f"model.loss_terms must be a list of LossTerm, got {type(term).__name__}"
                    f"{'' if isinstance(loss_terms, Sequence) else ' itself'}"
                )
        if logits not in ("auto", "full"):
            raise ValueError(f"model.logits must be auto or full, got {logits!r}")
        self.save_hyperparameters()
        if "_instantiator" not in self.hparams:
            # Built in Python: keep plain values, so that checkpoints load with weights_only=True.
            plain = {name: _plain(value, f"model.{name}") for name, value in arguments.items()}
            self.save_hyperparameters(
                {**plain, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
            )
        self.backbone = backbone
        self.generation = generation
        self.optimizer_spec = optimizer
        self.lr_schedule = lr_schedule
        self.tokenizer = tokenizer.load()
        config = backbone.config(self.tokenizer)
        self.architecture: Literal["seq2seq", "causal"] = (
            "seq2seq" if config.is_encoder_decoder else "causal"
        )
        self.vocabulary = NumberVocabulary.from_tokenizer(
            self.tokenizer,
            width=max(config.get_text_config().vocab_size, num_token_ids(self.tokenizer)),
            kind=number_tokens,
            largest=largest_number_token,
        )
        self.objective = Objective(loss_terms, self.vocabulary)
        self.logits: Literal["auto", "full"] = logits
        self._output_head: OutputHead | None = None
        self._has_chosen_head = False
        self._can_pack = False
        self.model: PreTrainedModel | None = None
        self.training_mean: float | None = None
        """Mean of the numeric training targets, kept in the checkpoint."""
        self.codec: NumberCodec | None = None
        """How the data write target values, and so how answers are read; kept in the checkpoint."""
        self.evaluation_results: dict[str, dict[str, float]] = {}
        """Set name -> metric -> value of the latest evaluation, in float64."""
        self._longest_target = 0
        self._warned_of_averages = False
        self.trained_steps = 0
        """Optimizer steps behind the weights, also where a checkpoint is only evaluated."""
        self._averages: dict[str, TermAverages] = {}
        self._metrics: dict[str, NumericMetrics] = {}

    def configure_model(self) -> None:
        """Build the language model, once; on the device and in the precision of the strategy."""
        if self.model is not None:
            return
        # Pretrained models come in evaluation mode, without dropout.
        self.model = self.backbone.build(self.tokenizer).train()
        width = num_scores(self.model)
        if width != self.vocabulary.width:
            raise ValueError(
                f"model.backbone scores {width} tokens, but its configuration and tokenizer say "
                f"{self.vocabulary.width}"
            )
        self._can_skip_logits = "logits_to_keep" in signature(self.model.forward).parameters
        # Soft-capped logits are read again in the backward pass of the cap.
        self._overwrite_logits = not getattr(
            self.model.config.get_text_config(), "final_logit_softcapping", None
        )

    @property
    def language_model(self) -> PreTrainedModel:
        """The transformers model; built by `configure_model`."""
        if self.model is None:
            raise RuntimeError("the model is not built yet: call configure_model() first")
        return self.model

    @property
    def _datamodule(self) -> object | None:
        return getattr(self.trainer, "datamodule", None)

    # Forward

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Logits and the labels they are to predict, position by position.

        Args:
            batch: `input_ids`, `attention_mask` or for packed rows `position_ids` (B, T); `labels`
                (B, T) for causal models with `first_label`, the first column with a label, or
                (B, T') for seq2seq.

        Returns:
            logits (B, T'', V) and labels (B, T''), aligned.
        """
        self._check_batch(batch)
        inputs, skipped = self._inputs(batch)
        logits = self.language_model(**inputs).logits
        return logits[:, skipped:] if skipped else logits, self._aligned(batch["labels"], batch)

    def _inputs(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Arguments of the model, and how many of its first positions predict no label."""
        model, labels = self.language_model, batch["labels"]
        # Transformers tells packed examples apart only where there is no mask and no cache.
        inputs = {key: batch[key] for key in ("input_ids", _kept_apart_by(batch))}
        inputs["use_cache"] = False
        if self.architecture == "seq2seq":
            return {**inputs, "decoder_input_ids": _decoder_inputs(model, labels)}, 0
        first = _first_predicting(batch)
        if self._can_skip_logits:
            return {**inputs, "logits_to_keep": labels.shape[1] - first}, 0
        return inputs, first

    def _aligned(self, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """What belongs to the labels, (B, T) labels or bool, at the positions that predict them."""
        if self.architecture == "seq2seq":
            return values
        nothing = IGNORE_INDEX if values.dtype == torch.long else 0
        last = values.new_full((len(values), 1), nothing)
        return torch.cat([values[:, _first_predicting(batch) + 1 :], last], dim=1)

    def _quantities(self, batch: Mapping[str, Any]) -> Tensor | None:
        quantities = batch.get("quantities")
        return None if quantities is None else self._aligned(quantities, batch)

    def _check_batch(self, batch: Mapping[str, Any], *also: str) -> None:
        wanted = {"input_ids", _kept_apart_by(batch), "labels", *also}
        if self.architecture == "causal":
            wanted.add("first_label")
        missing = sorted(wanted - set(batch))
        if missing or ("first_label" in batch) == (self.architecture == "seq2seq"):
            raise ValueError(
                f"the batch is not made for a {self.architecture} model (it holds "
                f"{', '.join(sorted(batch))}; missing: {', '.join(missing) or 'nothing'}). Pass "
                "NumberDataModule(architecture=model.architecture), or make batches with "
                "ntl_lightning.data.Collator"
            )
        longest = self._max_positions
        width = batch.get("num_positions", batch["input_ids"].shape[1])
        if longest is not None and width > longest:
            mask = batch.get("attention_mask")
            if mask is not None and mask.sum(dim=1).max() <= longest:
                raise ValueError(
                    f"padding makes sequences of {int(mask.sum(dim=1).max())} tokens {width} long, "
                    f"more than the {longest} positions of model.backbone "
                    "(max_position_embeddings); lower data.pad_to_multiple_of, or take a divisor "
                    f"of {longest}"
                )
            raise ValueError(
                f"a sequence of {width} tokens is longer than the {longest} positions of "
                "model.backbone (max_position_embeddings); shorten the texts, see "
                "data.max_prompt_tokens and data.max_target_tokens, or take a longer model"
            )

    @property
    def _max_positions(self) -> int | None:
        config = self.language_model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None)

    # Training

    def setup(self, stage: str) -> None:
        """Refuse data that were prepared with another idea of what a number is."""
        theirs = getattr(self._datamodule, "vocabulary", None)
        if not isinstance(theirs, NumberVocabulary):
            return
        tokenizer: Any = getattr(self._datamodule, "tokenizer", self.tokenizer)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError("data.tokenizer is not model.tokenizer: give both the same settings")
        if (theirs.token_ids, theirs.values) != (
            self.vocabulary.token_ids,
            self.vocabulary.values,
        ):
            raise ValueError(
                f"data.number_tokens={theirs.kind!r} and data.largest_number_token="
                f"{theirs.largest} are not those of the model, {self.vocabulary.kind!r} and "
                f"{self.vocabulary.largest}: give both the same settings"
            )

    def _start(self, *, training: bool) -> None:
        """Before anything runs: what is known of the data, and whether the precision can work."""
        self._longest_target = max(
            self._longest_target, getattr(self._datamodule, "longest_target", 0)
        )
        precision = str(self.trainer.precision)
        model = self.language_model
        is_float16 = precision == "16-true" or any(
            parameter.dtype == torch.float16 for parameter in model.parameters()
        )
        model_type = model.config.model_type
        if model_type in FLOAT16_OVERFLOWS and (is_float16 or precision == "16-mixed"):
            raise ValueError(
                f"the activations of {model_type} models leave float16's range and the loss "
                f"becomes NaN (trainer.precision={precision}); use bf16-mixed or 32-true, and "
                "float32 or bfloat16 for model.backbone.dtype"
            )
        if training and is_float16:
            raise ValueError(
                "weights in float16 cannot be trained: their updates vanish. Leave "
                "model.backbone.dtype at float32 and set trainer.precision to 16-mixed or "
                "bf16-mixed"
            )

    def on_fit_start(self) -> None:
        """Refuse runs that cannot learn what they are meant to."""
        self._start(training=True)
        self._output_head, self._has_chosen_head, self._can_pack = None, False, False
        self.training_mean = getattr(self._datamodule, "training_mean", None)
        coverage = getattr(self._datamodule, "label_coverage", None)
        if coverage is not None and coverage.numbers == 0 and self.objective.needs_numbers:
            if coverage.not_quantities:
                raise ValueError(
                    f"all {coverage.not_quantities} number tokens of the training labels are "
                    "marked as no quantities (not_quantities of data or of its sources), so the "
                    "number losses could never act. Mark fewer, or train with CrossEntropy alone"
                )
            raise ValueError(
                f"no label of the training data is a number token (model.number_tokens="
                f"{self.vocabulary.kind!r}; {coverage.digit_bearing} of {coverage.tokens} label "
                "tokens hold a digit; the first target of each source of data.train: "
                f"{', '.join(coverage.first_targets)}), so the number losses could never act. Try "
                "model.tokenizer with digit_level: true or model.number_tokens=integers, look at "
                "`python -m ntl_lightning inspect-tokenizer`, or train with CrossEntropy alone"
            )

    def on_train_start(self) -> None:
        """Remember how the targets are written, now that a checkpoint has been loaded."""
        self._take_codec(self.trainer.train_dataloader)

    def _take_codec(self, loaders: object) -> None:
        """Read answers as the data write targets; refuse what the weights were not trained with."""
        if hasattr(self._datamodule, "codec"):
            theirs: NumberCodec | None = self._datamodule.codec
        else:
            # Loaders of a data module may be given without it.
            codecs = {getattr(loader, "codec", None) for loader in _flat(loaders)} - {None}
            if not codecs:
                return
            if len(codecs) > 1:
                raise ValueError(
                    "the targets of the loaders are written by different codecs, so answers could "
                    "not be read alike; evaluate them one after the other"
                )
            (theirs,) = codecs
        begins_anew = self.trainer.state.fn == "fit" and self.trainer.ckpt_path is None
        if theirs != self.codec and self.trained_steps and not begins_anew:
            raise ValueError(
                f"data.codec is {theirs or 'not set'}, but the model was trained with "
                f"{self.codec or 'none'}: its answers would be read wrongly. Set data.codec as in "
                "training (with the same mean and standard_deviation, if the training data have "
                "changed since); a data module that has taken these from another model keeps them, "
                "so make a new one for each model"
            )
        self.codec = theirs

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The objective on one micro-batch, scaled so that accumulated gradients are exact."""
        self._check_batch(batch)
        totals = batch.get("step_totals")
        num_parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        if totals is None and num_parts > 1 and not self._warned_of_averages:
            self._warned_of_averages = True
            rank_zero_warn(
                "The training loader gives no step totals, so each batch is averaged by its own "
                "token counts and gradients depend on how a step is split. Wrap the loader in "
                "ntl_lightning.data.StepTotals."
            )
        if "position_ids" in batch and not self._can_pack:
            self._verify_packing()
        if not self._has_chosen_head:
            self._choose_head()
        settings = {
            "quantities": self._quantities(batch),
            "denominators": totals,
            "step": self.global_step,
            "num_labels": batch.get("num_labels"),
        }
        if self._output_head is None:
            logits, labels = self(batch)
            result = self.objective(
                logits, labels, overwrite_logits=self._overwrite_logits, **settings
            )
            loss = result.loss
        else:
            loss, result = self._from_hidden(self._output_head, batch, settings)
        self._log_training(result, totals or result.counts, len(batch["labels"]))
        if totals is None:
            return loss
        # Lightning divides by the accumulated batches, the strategy by the ranks.
        return loss * num_parts

    def _from_hidden(
        self, head: OutputHead, batch: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> tuple[Tensor, ObjectiveResult]:
        inputs, skipped = self._inputs(batch)
        labels = self._aligned(batch["labels"], batch)
        results: list[ObjectiveResult] = []

        def compute(projection: Projection) -> Tensor:
            seen = projection.without_first(skipped)
            results.append(
                self.objective.from_hidden(
                    seen.hidden,
                    seen.weight,
                    labels,
                    seen.bias,
                    scale=seen.scale,
                    soft_cap=seen.soft_cap,
                    low_rank=seen.low_rank,
                    **settings,
                )
            )
            return results[0].loss

        return head.loss(compute, **inputs), results[0]

    def _verify_packing(self) -> None:
        """Refuse to train a model on packed rows that does not keep their examples apart.

        At the first packed batch, for the reason of `_choose_head`; all ranks do it alike.
        """
        try:
            verify_packing(self.language_model, self.vocabulary.width, self.device)
        except CannotPack as reason:
            raise ValueError(
                "model.backbone cannot be trained with data.packing: of packed examples each would "
                f"see the others. About the model: {reason}. Set data.packing to false, where "
                "data.group_by_length saves padding too; or, if model.backbone.attention is a "
                "flash attention, which packs single rows only, take sdpa"
            ) from reason
        self._can_pack = True

    def _choose_head(self) -> None:
        """Decide whether the loss is computed from hidden states; all ranks do it alike.

        Not before the first training step: only then are the weights where the strategy wants
        them, and the precision is that of training.
        """
        self._has_chosen_head = True
        if self.logits == "full":
            rank_zero_info("The training loss is computed from the model's logits.")
            return
        try:
            head = OutputHead(self.language_model)
            head.verify(**self._inputs(self._probe())[0])
        except UnknownHead as reason:
            rank_zero_warn(
                "The training loss is computed from the model's logits, which takes more memory "
                f"than from its hidden states. About the model: {reason}. model.logits=full "
                "silences this."
            )
            return
        self._output_head = head
        rank_zero_info(
            "The training loss is computed from hidden states, without holding the logits "
            "(model.logits=auto)."
        )

    def _probe(self) -> dict[str, Any]:
        """Two short sequences, one of them padded, that look the same on all ranks."""
        length = min(_PROBE_LENGTH, self._max_positions or _PROBE_LENGTH)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocabulary.width, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - length // 4 :] = 0
        ids, mask = ids.to(self.device), mask.to(self.device)
        first_label = max(length // 2, 1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids,
            "first_label": first_label,
        }

    def on_train_batch_end(self, *args: Any) -> None:
        """Remember the steps behind the weights, also for another Trainer."""
        self.trained_steps = self.global_step

    def _log_training(
        self, result: ObjectiveResult, totals: Mapping[Any, Tensor | float], size: int
    ) -> None:
        self.log("train/loss", result.value, prog_bar=True, batch_size=size)
        self.log_dict(
            {f"train/{name}": value for name, value in result.parts.items()}, batch_size=size
        )
        numbers = torch.as_tensor(totals["numbers"], dtype=torch.float32)
        self.log("train/number_tokens", numbers, batch_size=size)
        (group, *_) = self.trainer.optimizers[0].param_groups
        self.log("train/learning_rate", group["lr"], batch_size=size)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The configured optimizer; its schedule advances with every optimizer step."""
        optimizer = self.optimizer_spec.build(self.language_model)
        for group in optimizer.param_groups:
            # The optimizer's state goes into checkpoints, which hold nothing but plain values.
            group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
        steps = self.trainer.estimated_stepping_batches
        num_steps = int(steps) if steps != float("inf") else None
        scheduler = self.lr_schedule.build(optimizer, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    # Evaluation

    def _loaders(self, stage: Stage) -> object:
        return getattr(self.trainer, f"{stage}_dataloaders")

    def set_name(self, stage: Stage, dataloader_idx: int) -> str:
        """Name of an evaluation set in the logs: the stage, or `<stage>_<name>`."""
        loaders = self._loaders(stage)
        if isinstance(loaders, Mapping):
            name = list(loaders)[dataloader_idx]
            return stage if name == stage else f"{stage}_{name}"
        several = isinstance(loaders, Sequence) and len(loaders) > 1
        return f"{stage}_{dataloader_idx}" if several else stage

    def log_names(self) -> set[str]:
        """Names under which `fit` logs, for callbacks that monitor one."""
        terms = {term.name: term.averaged_over for term in self.objective.terms}
        per_set = {"loss", *TermAverages.names(terms)}
        if self.generation.during_fit:
            per_set |= set(
                NumericMetrics.names(
                    # Known only once the data are read; a callback may ask before.
                    training_mean=True,
                    length_limit=True,
                    expected_values=True,
                )
            )
        train = {"loss", "number_tokens", "learning_rate", *terms}
        return {f"train/{name}" for name in train} | {f"val/{name}" for name in per_set}

    def _start_evaluation(self, stage: Stage) -> None:
        loaders = self._loaders(stage)
        count = len(loaders) if isinstance(loaders, Mapping | Sequence) else 1
        terms = {term.name: term.averaged_over for term in self.objective.terms}
        names = [self.set_name(stage, index) for index in range(count)]
        self._averages = {name: TermAverages(terms).to(self.device) for name in names}
        self._metrics = {
            name: NumericMetrics(self.training_mean, codec=self.codec).to(self.device)
            for name in names
        }
        self._token_values = self._values_of_tokens()

    def _values_of_tokens(self) -> Tensor:
        """What each number token is worth as an answer, float64 (K,); NaN where it is nothing."""
        values: Sequence[float | Decimal | None] = self.vocabulary.values
        if self.codec is not None:
            values = [self.codec.inverse(Decimal(repr(value))) for value in self.vocabulary.values]
        numbers = [float("nan") if value is None else float(value) for value in values]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def on_validation_start(self) -> None:
        """Take the length limit and the codec from the data."""
        self._start(training=False)
        self._take_codec(self._loaders("val"))

    def on_test_start(self) -> None:
        """Take the length limit and the codec from the data."""
        self._start(training=False)
        self._take_codec(self._loaders("test"))

    def on_validation_epoch_start(self) -> None:
        """Fresh metrics for every named set."""
        self._start_evaluation("val")

    def on_test_epoch_start(self) -> None:
        """Fresh metrics for every named set."""
        self._start_evaluation("test")

    @property
    def max_new_tokens(self) -> int:
        """Length limit of answers: as configured, or the longest target seen plus 8."""
        if self.generation.max_new_tokens is not None:
            return self.generation.max_new_tokens
        if not self._longest_target:
            raise ValueError(
                "model.generation.max_new_tokens is not set and the data does not tell its longest "
                "target; set it"
            )
        return self._longest_target + _ANSWER_MARGIN

    def _answer(self, batch: Mapping[str, Any]) -> tuple[list[str], list[bool]]:
        prompts = batch["prompt_input_ids"]
        limit, positions = self.max_new_tokens, self._max_positions
        if positions is not None:
            used = prompts.shape[1] if self.architecture == "causal" else 1
            if used >= positions:
                raise ValueError(
                    f"a prompt of {used} tokens leaves no room for an answer in the {positions} "
                    "positions of model.backbone (max_position_embeddings)"
                )
            limit = min(limit, positions - used)
        ids, hit_limit = generate(
            self.language_model,
            self.tokenizer,
            prompts,
            batch["prompt_attention_mask"],
            self.generation,
            limit,
        )
        return decode_answers(self.tokenizer, ids), hit_limit

    def _read(self, answers: Sequence[str]) -> list[Decimal | None]:
        """The numbers in answers, in the units of the targets."""
        read = last_number if self.codec is None else self.codec.read
        return [read(answer) for answer in answers]

    def _evaluation_step(
        self, batch: dict[str, Any], stage: Stage, dataloader_idx: int
    ) -> dict[str, list[Any]]:
        self._check_batch(batch, *_EVALUATION_KEYS)
        name = self.set_name(stage, dataloader_idx)
        logits, labels = self(batch)
        kept = labels != IGNORE_INDEX
        result = self.objective(
            logits,
            labels,
            quantities=self._quantities(batch),
            step=self.trained_steps,
            # So that the statistics are those of the positions with a label on every device.
            num_labels=int(kept.sum()),
        )
        self._averages[name].update(
            result.sums,
            result.counts["tokens"],
            result.counts["numbers"],
            (logits.argmax(-1) == labels)[kept].sum(),
            result.counts.get("whole_numbers", 0),
        )
        rows = [i for i, index in enumerate(batch["index"]) if index >= 0]
        if stage == "val" and self.trainer.state.fn == "fit" and not self.generation.during_fit:
            return {}
        answers, hit_limit = self._answer(batch)
        statistics = result.statistics
        means = expected_values(
            labels,
            statistics.number_probabilities,
            self._token_values,
            statistics.is_number,
            self.tokenizer.eos_token_id,
        )
        output: dict[str, list[Any]] = {
            "prompt": batch["prompt"],
            "target": batch["target"],
            "answer": answers,
            "value": self._read(answers),
            "index": batch["index"],
        }
        output = {key: [values[i] for i in rows] for key, values in output.items()}
        self._metrics[name].update(
            output["answer"],
            output["target"],
            hit_length_limit=[hit_limit[i] for i in rows],
            expected_values=[means[i] for i in rows],
        )
        return output

    def validation_step(
        self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, list[Any]]:
        """Losses from the true prefix, and answers by generation, on a validation set."""
        return self._evaluation_step(batch, "val", dataloader_idx)

    def test_step(
        self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, list[Any]]:
        """Losses from the true prefix, and answers by generation, on a test set."""
        return self._evaluation_step(batch, "test", dataloader_idx)

    def _log_evaluation(self) -> None:
        answered = self.trainer.state.fn != "fit" or self.generation.during_fit
        for name, averages in self._averages.items():
            values = averages.compute()
            values["loss"] = self.objective.combine(values, self.trained_steps)
            if answered:
                values |= self._metrics[name].compute()
            if not self.trainer.sanity_checking:
                self.evaluation_results[name] = {key: v.item() for key, v in values.items()}
            self.log_dict(
                {f"{name}/{key}": value.to(self.device) for key, value in values.items()},
                # All ranks hold the same, already reduced values.
                sync_dist=True,
            )

    def on_validation_epoch_end(self) -> None:
        """Log the averages and metrics of every validation set."""
        self._log_evaluation()

    def on_test_epoch_end(self) -> None:
        """Log the averages and metrics of every test set."""
        self._log_evaluation()

    def on_predict_start(self) -> None:
        """Take the length limit and the codec from the data, or say that the limit is missing."""
        self._start(training=False)
        self._take_codec(self._loaders("predict"))
        _ = self.max_new_tokens

    def predict_step(
        self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, list[Any]]:
        """Answers by generation; targets are passed through where the data has them."""
        self._check_batch(batch, *_EVALUATION_KEYS)
        answers, _ = self._answer(batch)
        rows = [i for i, index in enumerate(batch["index"]) if index >= 0]
        output = {key: batch[key] for key in ("prompt", "target", "index")}
        output |= {"answer": answers, "value": self._read(answers)}
        return {key: [values[i] for i in rows] for key, values in output.items()}

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what evaluation needs to know of the training data."""
        checkpoint["number_aware"] = {
            "training_mean": self.training_mean,
            "longest_target": self._longest_target,
            "codec": None if self.codec is None else asdict(self.codec),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` kept."""
        kept = checkpoint.get("number_aware", {})
        self.training_mean = kept.get("training_mean")
        self._longest_target = kept.get("longest_target", 0)
        codec = kept.get("codec")
        if codec is not None:
            number_format = codec["number_format"] and NumberFormat(**codec["number_format"])
            codec = NumberCodec(**{**codec, "number_format": number_format})
        self.codec = codec
        self.trained_steps = checkpoint.get("global_step", 0)


def _flat(loaders: object) -> list[object]:
    """One loader, a list or a mapping of some, as a list."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, Sequence) else [loaders]


def _kept_apart_by(batch: Mapping[str, Any]) -> str:
    """The entry that says what each token may see: of packed rows or of others."""
    return "position_ids" if "position_ids" in batch else "attention_mask"


def _first_predicting(batch: Mapping[str, Any]) -> int:
    """The position before the first label, which predicts it; earlier ones need no logits."""
    return max(batch["first_label"] - 1, 0)


def _decoder_inputs(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The labels moved right by one behind the start token, (B, T')."""
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return shift(labels=labels)
    config = model.config
    start = labels.new_full((len(labels), 1), config.decoder_start_token_id)
    moved = torch.cat([start, labels[:, :-1]], dim=1)
    return moved.masked_fill(moved == IGNORE_INDEX, config.pad_token_id)


_EVALUATION_KEYS = ("prompt_input_ids", "prompt_attention_mask", "prompt", "target", "index")

_KINDS: dict[str, type] = {
    "backbone": Backbone,
    "tokenizer": Tokenizer,
    "generation": Generation,
    "optimizer": OptimizerSpec,
    "lr_schedule": LRSchedule,
}


def _plain(value: object, where: str) -> Any:
    """A setting as jsonargparse reads it: plain values, and class paths with their arguments."""
    if is_dataclass(value) and not isinstance(value, type):
        arguments = {
            field.name: _plain(getattr(value, field.name), f"{where}.{field.name}")
            for field in fields(value)
        }
        if isinstance(value, ABC):
            kind = type(value)
            return {
                "class_path": f"{kind.__module__}.{kind.__qualname__}",
                "init_args": arguments,
            }
        return arguments
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Enum):
        return value.name  # as jsonargparse reads it
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} must be made of plain values, got {type(value).__name__}")
