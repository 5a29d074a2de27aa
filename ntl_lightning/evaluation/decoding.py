"""Answers from a model: by generation, and as the expected value of a one-token number.

B batch, T positions, N label positions, K number tokens.
"""

from dataclasses import dataclass

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Generation", "expected_values", "generate"]


@dataclass(frozen=True)
class Generation:
    """How answers are generated. Greedy unless asked otherwise, whatever the checkpoint prefers."""

    max_new_tokens: int | None = None
    """Length limit of an answer in tokens; null takes the longest target of the data plus 8."""
    num_beams: int = 1
    """Beams of a beam search; 1 is greedy."""
    sample: bool = False
    """Draw tokens at random instead of taking the likeliest."""
    temperature: float = 1.0
    """Divides the logits before sampling; needs `sample: true`."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this share of the mass; needs `sample: true`."""
    during_fit: bool = True
    """Answer the validation prompts also during `fit`; false validates by the losses alone."""

    def __post_init__(self) -> None:
        for key, number in (("max_new_tokens", self.max_new_tokens), ("num_beams", self.num_beams)):
            if number is not None and number < 1:
                raise ValueError(f"model.generation.{key} must be at least 1, got {number}")
        if not self.sample and (self.temperature != 1.0 or self.top_p != 1.0):
            raise ValueError(
                f"model.generation.temperature={self.temperature} and top_p={self.top_p} have no "
                "effect without sample: true"
            )
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "model.generation needs temperature above 0 and top_p in (0, 1], got "
                f"{self.temperature} and {self.top_p}"
            )


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    attention_mask: Tensor,
    settings: Generation,
    max_new_tokens: int,
) -> tuple[list[list[int]], list[bool]]:
    """Let the model answer a batch of prompts.

    Args:
        model: Seq2seq or causal model; may be sharded if its `generate` is registered.
        tokenizer: Names the end-of-sequence and padding tokens.
        input_ids: (B, T) int64 prompts, for causal models padded on the left.
        attention_mask: (B, T) 1 on tokens, 0 on padding.
        settings: Greedy, beam or sampled. Of the checkpoint's own generation configuration only
            the special tokens are used.
        max_new_tokens: Length limit.

    Returns:
        The answers' token ids without prompt and padding, end of sequence included, and for each
        whether it ran into the limit without an end of sequence.
    """
    checkpoints_own = model.generation_config
    ends = checkpoints_own.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    pad_id = tokenizer.pad_token_id
    # transformers fills what a call leaves open from the model's configuration: minimum lengths,
    # banned tokens, penalties. None of that belongs to a measurement.
    model.generation_config = GenerationConfig(
        bos_token_id=checkpoints_own.bos_token_id,
        decoder_start_token_id=checkpoints_own.decoder_start_token_id,
        forced_bos_token_id=checkpoints_own.forced_bos_token_id,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.eos_token_id if pad_id is None else pad_id,
        max_new_tokens=max_new_tokens,
        num_beams=settings.num_beams,
        do_sample=settings.sample,
        **(
            {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
            if settings.sample
            else {}
        ),
    )
    try:
        output: Tensor = model.generate(  # type: ignore[operator]
            input_ids, attention_mask=attention_mask
        )
    finally:
        model.generation_config = checkpoints_own
    start = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    answers, hit_limit = [], []
    for row in output[:, start:].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), None)
        answers.append(row if end is None else row[: end + 1])
        hit_limit.append(end is None)
    return answers, hit_limit


def expected_values(
    labels: Tensor,
    number_probabilities: Tensor,
    number_values: Tensor,
    is_number: Tensor,
    eos_id: int,
) -> list[float | None]:
    """Expected value of each answer that is one number token, from a teacher-forced pass.

    Before the first label the model has seen the prompt alone, so the distribution there is the
    one it would answer with. The mean under it is the best answer for the squared error (RAIL,
    regression-aware inference), and a fair companion to greedy decoding for any loss.

    Args:
        labels: (B, T) aligned label ids, -100 where there is none.
        number_probabilities: (N, K) softmax over the number tokens at the N labels, row-major.
        number_values: (K,) token values.
        is_number: (N,) bool, whether the label is a number token.
        eos_id: The end-of-sequence token, which may follow the number.

    Returns:
        B values; None where the target is not exactly one number token.
    """
    is_label = labels != -100
    per_example = is_label.sum(-1).tolist()
    first = 0
    values: list[float | None] = []
    kept = labels[is_label].tolist()
    numeric = is_number.tolist()
    means = (number_probabilities.double() @ number_values.double()).tolist()
    for count in per_example:
        one_number = count == 1 or (count == 2 and kept[first + 1] == eos_id)
        values.append(means[first] if one_number and numeric[first] else None)
        first += count
    return values
