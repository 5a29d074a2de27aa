"""The losses in the Hugging Face `Trainer`, and in trainers built on it such as TRL's.

The Trainer hands a loss function one count, that of the label tokens of the optimizer step. A term
averaged over the numbers needs another one; divided by its own batch's numbers it would weigh more
the more batches are accumulated. So the loss is attached to its trainer and counts for itself.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from ntl_lightning.losses import (
    IGNORE_INDEX,
    CrossEntropy,
    LossTerm,
    Objective,
    Positions,
    Wasserstein,
)
from ntl_lightning.numbers import NumberKind, NumberVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

__all__ = ["NumberAwareLoss"]


class NumberAwareLoss:
    """Loss terms as the `compute_loss_func` of a Hugging Face `Trainer`, exact under accumulation.

    Two lines beside the usual ones:

        loss = NumberAwareLoss.for_model(model, tokenizer)
        trainer = Trainer(model=model, ..., compute_loss_func=loss)
        loss.attach(trainer)

    Every term's sum is divided by the count of what it is averaged over in the whole optimizer
    step: all accumulated batches and, as `average_tokens_across_devices` (the default) has it, all
    processes. The gradient is then the same however a step is cut. In evaluation each batch is
    averaged by its own counts.

    Training logs get each term's average beside `loss` (`cross_entropy`, `ntl_was`; their weighted
    sum is `loss`) and `number_tokens`, the number labels per optimizer step. Evaluation metrics get
    `eval_<term>`, the exact average over the set.

    A model's own extra losses, such as the router loss of mixtures of experts, are not added.

    Args:
        terms: The loss terms, see `Objective`.
        vocabulary: Which tokens are numbers; its width is that of the model's logits.
        shift_labels: Whether position t's logits are for the label at t + 1. None: as the model's
            own loss does, that is for causal models but not for encoder-decoder and masked ones.
        overwrite_logits: Let training use the logits' memory for the gradient, see
            `token_statistics`. Refused for trainers that may read the logits after the loss and
            for models that cap them; evaluation never overwrites.

    Raises:
        ValueError: If the terms are not valid.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        vocabulary: NumberVocabulary,
        *,
        shift_labels: bool | None = None,
        overwrite_logits: bool = False,
    ) -> None:
        self.objective = Objective(terms, vocabulary)
        self.shift_labels = shift_labels
        self.overwrite_logits = overwrite_logits
        self._trainer: Any = None
        self._shifts = False
        self._totals: dict[Positions, float] = {}
        self._num_batches = 0
        self._batches_left = 0
        self._steps_since_log = 0
        self._has_warned = False
        self._training = _Sums()
        self._evaluation = _Sums()

    @classmethod
    def for_model(
        cls,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        terms: Sequence[LossTerm] = (CrossEntropy(), Wasserstein()),
        *,
        kind: NumberKind = "digits",
        largest: float | None = 999,
        shift_labels: bool | None = None,
        overwrite_logits: bool = False,
    ) -> Self:
        """The loss with the number tokens of a tokenizer, as wide as the model's logits.

        Args:
            model: A transformers model, or a PEFT model around one.
            tokenizer: The tokenizer the data are made with; it is not changed.
            terms: The loss terms. Default: cross entropy + 0.3 NTL-WAS.
            kind: Which tokens are numbers, see `NumberVocabulary.from_tokenizer`.
            largest: Largest value of a number token, see `NumberVocabulary.from_tokenizer`.
            shift_labels: See the class.
            overwrite_logits: See the class.

        Raises:
            ValueError: If the tokenizer has no number token, or one beyond the model's logits.
        """
        vocabulary = NumberVocabulary.from_tokenizer(
            tokenizer,
            width=model.config.get_text_config().vocab_size,
            kind=kind,
            largest=largest,
        )
        return cls(terms, vocabulary, shift_labels=shift_labels, overwrite_logits=overwrite_logits)

    def attach(self, trainer: "Trainer") -> Self:
        """Count the labels of this trainer's optimizer steps, and write the terms into its logs.

        Wraps `get_batch_samples`, `log` and `evaluation_loop` of this one trainer, and adds a
        callback to it.

        Raises:
            ValueError: If the trainer was made without `compute_loss_func`, belongs to another
                loss, or is set up in a way in which the loss would not be what it says.
        """
        if self._trainer is trainer:
            return self
        if self._trainer is not None:
            raise ValueError("this loss is attached to another trainer; make one for each trainer")
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._check_adapter(model)
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        self._check(trainer, model)
        self._shifts = _shifts_labels(model) if self.shift_labels is None else self.shift_labels
        self._trainer = hooked = cast("Any", trainer)
        self.objective.to(trainer.args.device)
        hooked.get_batch_samples = self._with_counts(trainer.get_batch_samples)
        hooked.log = self._with_training_terms(trainer.log)
        hooked.evaluation_loop = self._with_evaluation_terms(trainer.evaluation_loop)
        trainer.add_callback(_training_callback(self))
        return self

    def _check(self, trainer: Any, model: Any) -> None:
        if trainer.compute_loss_func is not self:
            raise ValueError(
                f"{type(trainer).__name__} does not use this loss; make it with "
                "compute_loss_func=loss, and then call loss.attach(trainer)"
            )
        args = trainer.args
        if args.n_gpu > 1:
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs, which the Trainer would join by "
                "DataParallel with a loss that is too large by that factor; start one process a "
                "GPU with torchrun or accelerate, or set CUDA_VISIBLE_DEVICES to one"
            )
        if trainer.get_cp_size() > 1 or trainer.get_sp_size() > 1:
            raise ValueError(
                "context and sequence parallelism cut the labels before the loss sees them; "
                "train without (cp_size=1, sp_size=1)"
            )
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect beside "
                "compute_loss_func; set it to 0"
            )
        if trainer.loss_is_scaled_for_ga is False:
            raise ValueError(
                f"{type(trainer).__name__}.loss_is_scaled_for_ga is False, so the loss would be "
                "divided by the accumulation steps a second time; set it to None or True"
            )
        if args.use_liger_kernel and (args.liger_kernel_config or {}).get(
            "fused_linear_cross_entropy", True
        ):
            raise ValueError(
                "use_liger_kernel=True gives the loss no logits in evaluation; set "
                'liger_kernel_config={"fused_linear_cross_entropy": False}'
            )
        if self.overwrite_logits:
            self._check_nobody_reads_the_logits(trainer, model)

    @staticmethod
    def _check_adapter(model: Any) -> None:
        config = getattr(model, "active_peft_config", None)
        if config is None or not config.is_prompt_learning:
            return
        without_logits = ["PREFIX_TUNING", "CARTRIDGE"]
        if _is_encoder_decoder(model):
            # Their tokens are the encoder's alone.
            without_logits += ["PROMPT_TUNING", "P_TUNING"]
        if config.peft_type not in without_logits:
            raise ValueError(
                f"{type(config).__name__} puts {config.num_virtual_tokens} virtual tokens before "
                "the text, so the model's logits are not beside the labels; use prefix tuning, "
                "whose virtual tokens have no logits, or LoRA"
            )

    @staticmethod
    def _check_nobody_reads_the_logits(trainer: Any, model: Any) -> None:
        from transformers import Trainer

        if type(trainer).compute_loss is not Trainer.compute_loss:
            raise ValueError(
                f"overwrite_logits=True: {type(trainer).__name__} has a compute_loss of its own "
                "that may read the logits after the loss; leave it False"
            )
        config = getattr(model, "config", None)
        if config is not None and getattr(
            config.get_text_config(), "final_logit_softcapping", None
        ):
            raise ValueError(
                f"overwrite_logits=True: {type(model).__name__} caps its logits and reads them in "
                "the backward pass; leave it False"
            )

    def _with_counts(self, get_batch_samples: Callable[..., Any]) -> Callable[..., Any]:
        def counted(
            epoch_iterator: Any, num_batches: int, device: torch.device
        ) -> tuple[list[Any], Any]:
            samples, num_items = get_batch_samples(epoch_iterator, num_batches, device)
            if samples:
                self._start_step(samples, device)
            return samples, num_items

        return counted

    def _start_training(self) -> None:
        """Forget what a run left behind that ended between two loggings, or was interrupted."""
        self._totals = {}
        self._num_batches = self._batches_left = self._steps_since_log = 0
        self._training.clear()

    def _check_called(self) -> None:
        """Refuse an optimizer step in which the trainer took its loss from elsewhere."""
        if self._trainer.compute_loss_func is self and self._batches_left == self._num_batches:
            raise RuntimeError(
                f"compute_loss of {type(self._trainer).__name__} does not call the loss, so the "
                "training would be without it; let it return super().compute_loss(...), or call "
                "self.compute_loss_func(outputs, labels, num_items_in_batch=...) there"
            )

    def _start_step(self, batches: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        """Count the labels of all batches of an optimizer step."""
        for batch in batches:
            self._check_batch(batch)
        counted_on = next(self.objective.buffers()).device
        counts = [
            self.objective.count(self._aligned(batch["labels"].to(counted_on))) for batch in batches
        ]
        names = list(counts[0])
        totals = torch.stack(
            [torch.as_tensor(sum(count[name] for count in counts)) for name in names]
        ).to(device)
        num_processes = self._num_distinct_batches()
        if num_processes > 1:
            gathered = self._trainer.accelerator.gather(totals).view(-1, len(names))
            totals = gathered.sum(0) / (len(gathered) / num_processes)
        self._totals = dict(zip(names, totals.tolist(), strict=True))
        self._num_batches = self._batches_left = len(batches)
        self._steps_since_log += 1
        self._training.add({"number_tokens": self._totals["numbers"]})

    def _check_batch(self, batch: Mapping[str, Tensor]) -> None:
        if batch.get("labels") is None:
            raise ValueError(f"the batches have no `labels`, only {', '.join(batch)}")
        if "shift_labels" in batch:
            raise ValueError(
                "the batches have `shift_labels`, which the Trainer does not hand to a loss "
                "function; leave them out: the labels are shifted here"
            )
        if (
            _is_encoder_decoder(self._trainer.model)
            and "decoder_input_ids" not in batch
            and "decoder_inputs_embeds" not in batch
        ):
            raise ValueError(
                "with a compute_loss_func the Trainer calls an encoder-decoder model without "
                "`labels`, so the batches need `decoder_input_ids`; "
                "DataCollatorForSeq2Seq(tokenizer, model=model) makes them"
            )

    def _num_distinct_batches(self) -> int:
        """Processes that the step is averaged over; tensor-parallel ones share their batch."""
        trainer = self._trainer
        if not trainer.args.average_tokens_across_devices:
            return 1
        return trainer.accelerator.num_processes // trainer.get_tp_size()

    def _aligned(self, labels: Tensor) -> Tensor:
        """The labels, position by position beside the logits that are to predict them."""
        if not self._shifts:
            return labels
        # Not by cutting the logits' last position off, which would copy all of them.
        return torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]

    def __call__(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The objective on one batch, scaled for what the Trainer does with it afterwards.

        Args:
            outputs: The model's output with `logits` (B, T, V), or a tuple that begins with them.
            labels: (B, T) int64, `-100` where there is no target.
            num_items_in_batch: The Trainer's count of label tokens; only whether there is one is
                looked at.

        Raises:
            RuntimeError: If the loss was not attached to its trainer, or is called in training
                other than once for each batch of the trainer's step.
            ValueError: If there are no labels or no logits, or shapes disagree.
        """
        if self._trainer is None:
            raise RuntimeError(
                "NumberAwareLoss does not know its trainer, so it cannot count the numbers of an "
                "optimizer step; call loss.attach(trainer) after making the trainer"
            )
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if labels is None or logits is None:
            raise ValueError(
                "the batch has no labels" if labels is None else "the outputs have no logits"
            )
        labels = self._aligned(labels.to(logits.device))
        self.objective.to(logits.device)
        num_processes = self._num_distinct_batches()
        applied = 1 if num_items_in_batch is None else num_processes
        if torch.is_grad_enabled():
            # The strategy averages the gradients of the processes, hence their number on top.
            return self._train(logits, labels, num_processes) / applied
        return self._evaluate(logits, labels) / applied

    def _train(self, logits: Tensor, labels: Tensor, scale: int) -> Tensor:
        if self._batches_left == 0:
            raise RuntimeError(
                "NumberAwareLoss was called in training outside its trainer's step, more than once "
                "for a batch, or by another trainer than the one that it is attached to: the "
                "counts to divide by are not known. To look at the loss of a batch, use "
                "torch.no_grad() or loss.objective; for another trainer make another loss"
            )
        self._batches_left -= 1
        result = self.objective(
            logits,
            labels,
            denominators=self._totals,
            step=self._trainer.state.global_step,
            overwrite_logits=self.overwrite_logits,
        )
        self._training.add(
            {
                term.name: result.sums[term.name]
                * (scale / max(self._totals[term.averaged_over], 1))
                for term in self.objective.terms
            }
        )
        return result.loss * scale

    def _evaluate(self, logits: Tensor, labels: Tensor) -> Tensor:
        step = self._trainer.state.global_step
        result = counted = self.objective(logits, labels, step=step)
        num_own = self._num_rows_of_the_set(len(labels))
        if num_own < len(labels):
            labels = labels.clone()
            labels[num_own:] = IGNORE_INDEX
            counted = self.objective(logits, labels, step=step)
        self._evaluation.add(counted.sums)
        self._evaluation.add({f"number of {over}": n for over, n in counted.counts.items()})
        return result.loss

    def _num_rows_of_the_set(self, num_rows: int) -> int:
        """Rows of a batch before those that accelerate repeats to fill the set's last batch."""
        accelerator = self._trainer.accelerator
        state = accelerator.gradient_state
        if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return num_rows
        # Tensor-parallel processes share their rows, and follow each other.
        rank = accelerator.process_index // self._trainer.get_tp_size()
        return min(max(state.remainder - rank * num_rows, 0), num_rows)

    def _with_training_terms(self, log: Callable[..., None]) -> Callable[..., None]:
        def logged(logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs and self._steps_since_log:
                accelerator = self._trainer.accelerator
                # Like `loss`: the mean over the steps since the last logging, and the processes.
                share = self._steps_since_log * accelerator.num_processes
                self._steps_since_log = 0
                sums = self._training.pop(accelerator)
                logs = logs | {name: total / share for name, total in sums.items()}
            log(logs, start_time)

        return logged

    def _with_evaluation_terms(self, evaluation_loop: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(
            dataloader: Any,
            description: str,
            prediction_loss_only: bool | None = None,
            ignore_keys: list[str] | None = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            self._evaluation.clear()
            output = evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            sums = self._evaluation.pop(self._trainer.accelerator)
            if not sums and f"{metric_key_prefix}_loss" in output.metrics:
                self._warn_of_another_loss(metric_key_prefix)
            for term in self.objective.terms if sums else ():
                count = sums[f"number of {term.averaged_over}"]
                average = sums[term.name] / count if count else 0.0
                output.metrics[f"{metric_key_prefix}_{term.name}"] = average
            return output

        return evaluated

    def _warn_of_another_loss(self, prefix: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(self._trainer).__name__} does not call the loss in evaluation (none does with "
            f"predict_with_generate=True): {prefix}_loss is the model's own loss, and there is no "
            f"{prefix}_{self.objective.terms[0].name}",
            stacklevel=2,
        )


class _Sums:
    """Running sums by name, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            value = torch.as_tensor(value)
            # Counts of a long evaluation do not fit into float32; MPS has nothing larger.
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            value = value.to(dtype)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def clear(self) -> None:
        self._sums = {}

    def pop(self, accelerator: Any) -> dict[str, float]:
        """The sums over all processes, which must all ask; then start again."""
        if not self._sums:
            return {}
        names = list(self._sums)
        stacked = torch.stack([self._sums[name].to(accelerator.device) for name in names])
        self.clear()
        totals = accelerator.gather(stacked).view(-1, len(names)).sum(0)
        return dict(zip(names, totals.tolist(), strict=True))


def _training_callback(loss: NumberAwareLoss) -> Any:
    # transformers is imported when a trainer is there, not with this module.
    from transformers import TrainerCallback

    class Training(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            loss._start_training()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            loss._check_called()

    return Training()


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _shifts_labels(model: Any) -> bool:
    """Whether the model's own loss shifts the labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    if _is_encoder_decoder(model):
        return False
    loss = getattr(model, "loss_function", None)
    if loss is ForCausalLMLoss or loss is ForMaskedLMLoss:
        return loss is ForCausalLMLoss
    raise ValueError(
        f"cannot tell whether {type(model).__name__} predicts the next token (causal) or the same "
        "one; give NumberAwareLoss shift_labels=True or False"
    )
