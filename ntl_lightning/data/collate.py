"""From text to padded batches: the only place that tokenises, pads and masks.

B batch, T positions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ntl_lightning.data.quantities import matched_spans, quantity_tokens
from ntl_lightning.data.sources import Example

__all__ = ["IGNORE_INDEX", "Architecture", "Collator", "encode"]

IGNORE_INDEX = -100
Architecture = Literal["seq2seq", "causal"]
"""`seq2seq`: the prompt goes to an encoder; `causal`: prompt and answer are one sequence."""


def encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    architecture: Architecture,
    where: str,
    *,
    max_prompt_tokens: int | None = None,
    max_target_tokens: int | None = None,
    not_quantities: Sequence[re.Pattern[str]] = (),
) -> Dataset:
    """Tokenise examples into an Arrow table with `prompt`, `target`, `prompt_ids`, `target_ids`.

    Where there are patterns, or examples that mark parts of their target, the table also has
    `quantities`: for every target token, whether a number there counts as a quantity. A token that
    shares a character other than white space with a marked part does not.

    Prompt and target are tokenised apart, because at inference the prompt stands alone. The prompt
    gets the special tokens that the tokenizer itself adds (for a causal model without a closing
    end-of-sequence token), the target gets an end-of-sequence token and nothing else.

    Args:
        examples: Texts; a target of None (prediction) gives empty `target_ids`.
        tokenizer: Must have an end-of-sequence token.
        architecture: What the model expects.
        where: The set's configuration key, for messages.
        max_prompt_tokens: Longest prompt that is let through, in tokens, special ones included.
        max_target_tokens: Longest target that is let through, in tokens, the end included.
        not_quantities: Patterns searched in the targets; what they find (their groups, where they
            have some) is no quantity.

    Raises:
        ValueError: If there is no example, a prompt has no token, a text is longer than its limit
            (nothing is cut), the tokenizer has no end-of-sequence token, or every target has
            characters that it does not know; if there is something to mark and the tokenizer is
            not a fast one, or a marked part lies outside its target.
    """
    if not examples:
        raise ValueError(f"{where} holds no example; name a source that has some")
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "model.tokenizer has no end-of-sequence token, so an answer could not be told to stop; "
            "use a tokenizer whose eos_token is set"
        )
    prompts = [example.prompt for example in examples]
    prompt_ids = _token_ids(tokenizer, prompts)
    if architecture == "causal" and _closes_prompts(tokenizer, prompts[0]):
        prompt_ids = [ids[:-1] for ids in prompt_ids]
    for ids, example in zip(prompt_ids, examples, strict=True):
        if not ids:
            raise ValueError(
                f"{where}: the prompt of {example.origin} has no token ({example.prompt!r}); a "
                "model needs at least one to answer to"
            )
    marks = bool(not_quantities) or any(example.not_quantities for example in examples)
    if marks:
        _check_marks(examples, tokenizer, where)
    targets = [example.target for example in examples if example.target is not None]
    encoding = _encoding(tokenizer, targets, add_special_tokens=False, return_offsets_mapping=marks)
    encoded = iter(encoding["input_ids"])
    target_ids = [[] if example.target is None else [*next(encoded), eos] for example in examples]
    for limit, sequences, key in (
        (max_prompt_tokens, prompt_ids, "max_prompt_tokens"),
        (max_target_tokens, target_ids, "max_target_tokens"),
    ):
        _check_lengths(limit, sequences, examples, key, where)
    _report_unknown(tokenizer, "prompt", prompt_ids, examples, where)
    _report_unknown(tokenizer, "target", target_ids, examples, where)
    columns: dict[str, Any] = {
        "prompt": prompts,
        "target": [example.target for example in examples],
        "prompt_ids": prompt_ids,
        "target_ids": target_ids,
    }
    if marks:
        columns["quantities"] = _quantities(examples, encoding["offset_mapping"], not_quantities)
    return Dataset.from_dict(columns)


def _check_marks(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{where}: not_quantities needs a fast tokenizer (one with a tokenizer.json), which "
            f"tells where its tokens stand in a text; {tokenizer.name_or_path!r} is a "
            f"{type(tokenizer).__name__}. Take a fast one, or leave not_quantities out"
        )
    for example in examples:
        for start, end in example.not_quantities:
            if not 0 <= start < end <= len(example.target or ""):
                raise ValueError(
                    f"{where}: not_quantities of {example.origin} holds ({start}, {end}), which is "
                    f"no part of its target {example.target!r}; give start and end in characters"
                )


def _quantities(
    examples: Sequence[Example],
    offsets: Sequence[Sequence[tuple[int, int]]],
    patterns: Sequence[re.Pattern[str]],
) -> list[list[bool]]:
    """Of every target token, the end token included, whether a number there is a quantity.

    `offsets` are those of the examples that have a target.
    """
    remaining = iter(offsets)
    quantities: list[list[bool]] = []
    for example in examples:
        if example.target is None:
            quantities.append([])
            continue
        spans = list(example.not_quantities)
        for pattern in patterns:
            spans += matched_spans(pattern, example.target)
        quantities.append([*quantity_tokens(example.target, next(remaining), spans), True])
    return quantities


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    ids: list[list[int]] = _encoding(tokenizer, texts, add_special_tokens=add_special_tokens)[
        "input_ids"
    ]
    return ids


def _encoding(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], **settings: bool
) -> Mapping[str, Any]:
    if not texts:
        return {"input_ids": [], "offset_mapping": []}
    encoding: Mapping[str, Any] = tokenizer(
        texts, return_attention_mask=False, return_token_type_ids=False, **settings
    )
    return encoding


def _closes_prompts(tokenizer: PreTrainedTokenizerBase, prompt: str) -> bool:
    """Whether the tokenizer itself ends prompts with the end-of-sequence token, as T5's does.

    The last token alone does not tell: a prompt may end with that token as it was written.
    """
    (plain,) = _token_ids(tokenizer, [prompt], add_special_tokens=False)
    (full,) = _token_ids(tokenizer, [prompt])
    return full[-1:] == [tokenizer.eos_token_id] and full[-max(len(plain), 1) :] != plain


def _check_lengths(
    limit: int | None,
    sequences: Sequence[Sequence[int]],
    examples: Sequence[Example],
    key: str,
    where: str,
) -> None:
    if limit is None:
        return
    too_long = [i for i, ids in enumerate(sequences) if len(ids) > limit]
    if too_long:
        first, longest = too_long[0], max(map(len, sequences))
        raise ValueError(
            f"{where}: {len(too_long)} of {len(examples)} examples are longer than data.{key}="
            f"{limit} tokens; the first is {examples[first].origin} with "
            f"{len(sequences[first])}, the longest has {longest}. Nothing is cut: raise the limit "
            "or leave these examples out"
        )


def _report_unknown(
    tokenizer: PreTrainedTokenizerBase,
    part: Literal["prompt", "target"],
    sequences: Sequence[Sequence[int]],
    examples: Sequence[Example],
    where: str,
) -> None:
    unknown = tokenizer.unk_token_id
    # Byte-level vocabularies name a token that is never needed as unknown, often the eos itself.
    if unknown is None or unknown == tokenizer.eos_token_id:
        return
    hit = [i for i, ids in enumerate(sequences) if unknown in ids]
    if not hit:
        return
    first = examples[hit[0]]
    message = (
        f"{where}: {len(hit)} of {len(examples)} {part}s hold characters outside the tokenizer's "
        f"vocabulary, the first is {first.origin}: {getattr(first, part)!r}"
    )
    if part == "target" and len(hit) == len(examples):
        raise ValueError(f"{message}. No target could ever be answered; use another tokenizer")
    sees = "is taught to say" if part == "target" else "sees"
    rank_zero_warn(f"{message}. The model {sees} {tokenizer.unk_token} there")


def _pad(
    sequences: Sequence[Sequence[int]], value: int, side: Literal["left", "right"] = "right"
) -> Tensor:
    width = max(map(len, sequences))
    padded = [
        [*ids, *[value] * (width - len(ids))]
        if side == "right"
        else [*[value] * (width - len(ids)), *ids]
        for ids in sequences
    ]
    return torch.tensor(padded, dtype=torch.long)


@dataclass(frozen=True)
class Collator:
    """Rows of `encode` to a padded batch.

    The batch holds `input_ids`, `attention_mask` (B, T) and `labels`: for `seq2seq` the target
    (B, T'), for `causal` the sequence itself with -100 on prompt and padding (B, T), not shifted.
    Padding is on the right and told apart by its place, so an end-of-sequence token that doubles
    as padding is still learned. For `causal`, `first_label` is the first column with a label.
    With `for_evaluation`, the prompts alone come along as `prompt_input_ids` and
    `prompt_attention_mask`, padded on the left for `causal` (generation goes on at the right end),
    and the texts `prompt`, `target` and the row numbers `index` as lists.

    Where the rows have `quantities`, the batch has it too, in the shape of `labels`: bool, False
    where a number is an id or category, and where there is no label.
    """

    architecture: Architecture
    pad_id: int
    for_evaluation: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Pad the rows; a row with `index` -1 is a filler and has no label."""
        prompts = [row["prompt_ids"] for row in rows]
        targets = [row["target_ids"] if row["index"] >= 0 else [] for row in rows]
        if self.architecture == "causal":
            inputs = [[*p, *t] for p, t in zip(prompts, targets, strict=True)]
        else:
            inputs = prompts
        batch: dict[str, Any] = {
            "input_ids": _pad(inputs, self.pad_id),
            "attention_mask": _pad([[1] * len(ids) for ids in inputs], 0),
            "labels": _pad(self._at_labels(prompts, targets, IGNORE_INDEX), IGNORE_INDEX),
        }
        if "quantities" in rows[0]:
            quantities = [row["quantities"] if row["index"] >= 0 else [] for row in rows]
            batch["quantities"] = _pad(self._at_labels(prompts, quantities, 0), 0).bool()
        if self.architecture == "causal":
            batch["first_label"] = min(map(len, prompts))
        if self.for_evaluation:
            side: Literal["left", "right"] = "left" if self.architecture == "causal" else "right"
            batch["prompt_input_ids"] = _pad(prompts, self.pad_id, side)
            batch["prompt_attention_mask"] = _pad([[1] * len(p) for p in prompts], 0, side)
            for key in ("prompt", "target", "index"):
                batch[key] = [row[key] for row in rows]
        return batch

    def _at_labels(
        self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], nothing: int
    ) -> list[Sequence[int]]:
        """What belongs to the target tokens, in the places of their labels."""
        if self.architecture == "causal":
            return [[*[nothing] * len(p), *t] for p, t in zip(prompts, targets, strict=True)]
        # A target column is needed even where no row has a target (prediction).
        return [t or [nothing] for t in targets]
