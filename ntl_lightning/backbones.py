"""Language models from transformers: by name, from a folder, or with random weights."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from ntl_lightning.numbers import num_token_ids
from ntl_lightning.paths import expand_path

__all__ = ["FLOAT16_OVERFLOWS", "Backbone", "FromConfig", "Pretrained", "num_scores"]

FLOAT16_OVERFLOWS = frozenset(
    {"t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"}
)
"""Model types whose feed-forward activations leave float16's range (T5 was made for bfloat16)."""

# Text last: what reads as a number is one.
Setting = bool | int | float | list[int] | list[float] | list[str] | str | None


class Backbone(ABC):
    """Which language model is trained, and where its weights come from."""

    @abstractmethod
    def config(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
        """The transformers configuration; no weights are loaded."""

    @abstractmethod
    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The model, with a row of embeddings for every token."""


def _model_class(config: PreTrainedConfig, where: str) -> Any:
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder:
            raise ValueError(
                f"{where}: {config.model_type} is an encoder that sees the answer it should "
                "predict; choose a causal or seq2seq model (or set is_decoder: true and train it "
                "as one)"
            )
        return AutoModelForCausalLM
    raise ValueError(
        f"{where}: transformers has no language model of type {config.model_type!r} that writes "
        "text from left to right; choose a seq2seq or causal model such as t5, llama or gpt2"
    )


def num_scores(model: PreTrainedModel) -> int:
    """Width of the model's logits: the rows of its output matrix."""
    return len(cast(Tensor, model.get_output_embeddings().weight))


def _fit_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grow the embeddings where the tokenizer has more tokens; never shrink them.

    Checkpoints often have more rows than their tokenizer has tokens (T5: 32128 and 32100);
    cutting these off would make the weights unloadable for everyone else.
    """
    rows, needed = num_scores(model), num_token_ids(tokenizer)
    if needed > rows:
        rank_zero_info(f"The embeddings grow from {rows} to {needed} rows.")
        model.resize_token_embeddings(needed)


@dataclass(frozen=True)
class Pretrained(Backbone):
    """A pretrained model, from the Hugging Face hub or a local folder."""

    name_or_path: str
    """Hub name (`google-t5/t5-small`) or folder; `~` and `${VARIABLE}` are put in."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights. Leave it at float32 and set `trainer.precision` for mixed precision."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = None
    """Attention implementation; null lets transformers choose."""
    revision: str | None = None
    """Hub branch, tag or commit; null is the main branch."""

    def _load(self, load: Any, **settings: Any) -> Any:
        where = "model.backbone.name_or_path"
        path = expand_path(self.name_or_path, where)
        try:
            return load(path, revision=self.revision or "main", **settings)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where}: no model could be loaded from {path!r}. It must be a folder with "
                "config.json and weights, or a name on the Hugging Face hub, which needs the "
                f"network or a cached copy. transformers said: {error}"
            ) from error

    def config(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
        """The checkpoint's configuration.

        Raises:
            ValueError: If there is no such model.
        """
        return self._load(AutoConfig.from_pretrained)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Load the weights.

        Raises:
            ValueError: If there is no such model, or it is no language model.
        """
        load = _model_class(self.config(tokenizer), "model.backbone.name_or_path").from_pretrained
        model = self._load(
            load, dtype=getattr(torch, self.dtype), attn_implementation=self.attention
        )
        _fit_embeddings(model, tokenizer)
        return model


@dataclass(frozen=True)
class FromConfig(Backbone):
    """A model of a transformers architecture with random weights."""

    model_type: str = "llama"
    """transformers' name of the architecture: `llama`, `gpt2`, `t5`, `qwen2`, ..."""
    settings: dict[str, Setting] = field(
        default_factory=lambda: {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "max_position_embeddings": 512,
        }
    )
    """Fields of the architecture's configuration class; unnamed ones keep transformers' defaults.
    The vocabulary size and the ids of special tokens come from the tokenizer unless named."""

    def config(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
        """The configuration, fitted to the tokenizer.

        Raises:
            ValueError: If the architecture or a field is unknown, or the vocabulary is smaller
                than the tokenizer's.
        """
        where = "model.backbone"
        try:
            default = AutoConfig.for_model(self.model_type)
        except ValueError as error:
            raise ValueError(
                f"{where}.model_type: transformers knows no architecture {self.model_type!r}; "
                "examples are llama, gpt2, qwen2, t5"
            ) from error
        # transformers takes any keyword; a misspelt one would silently do nothing.
        known = set(default.to_dict()) | set(default.attribute_map)
        unknown = sorted(set(self.settings) - known)
        if unknown:
            raise ValueError(
                f"{where}.settings: {self.model_type} has no field {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known))}"
            )
        pad, needed = tokenizer.pad_token_id, num_token_ids(tokenizer)
        settings: dict[str, Any] = {
            "vocab_size": needed,
            "pad_token_id": tokenizer.eos_token_id if pad is None else pad,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            **self.settings,
        }
        if default.is_encoder_decoder:
            settings.setdefault("decoder_start_token_id", settings["pad_token_id"])
        if settings["vocab_size"] < needed:
            raise ValueError(
                f"{where}.settings.vocab_size={settings['vocab_size']} is smaller than the "
                f"tokenizer, which has ids up to {needed - 1}; leave it out"
            )
        try:
            return AutoConfig.for_model(self.model_type, **settings)
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise ValueError(f"{where}.settings do not fit {self.model_type}: {error}") from error

    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The model with random weights, from torch's global random state.

        Raises:
            ValueError: As `config`; or if the architecture is no language model.
        """
        config = self.config(tokenizer)
        return _model_class(config, "model.backbone.model_type").from_config(config)
