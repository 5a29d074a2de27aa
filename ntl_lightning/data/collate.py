"""From text to padded batches: the only place that tokenises, pads and masks.

B batch, T positions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ntl_lightning.data.order import padded_length
from ntl_lightning.data.quantities import matched_spans, quantity_tokens
from ntl_lightning.data.sources import Example
from ntl_lightning.data.written import ChangedNumbers, check_numbers_survive, written
from ntl_lightning.numbers import NumberCodec, find_numbers

__all__ = ["IGNORE_INDEX", "Architecture", "Collator", "TooLong", "encode"]

IGNORE_INDEX = -100
Architecture = Literal["seq2seq", "causal"]
"""`seq2seq`: the prompt goes to an encoder; `causal`: prompt and answer are one sequence."""
TooLong = Literal["refuse", "leave_out", "cut_prompt"]
"""What becomes of an example with a prompt or target beyond its limit; no target is ever cut."""


def encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    architecture: Architecture,
    where: str,
    *,
    max_prompt_tokens: int | None = None,
    max_target_tokens: int | None = None,
    too_long: TooLong = "refuse",
    not_quantities: Sequence[re.Pattern[str]] = (),
    codec: NumberCodec | None = None,
    changed_numbers: ChangedNumbers = "refuse",
) -> Dataset:
    """Tokenise examples into an Arrow table with `prompt`, `target`, `prompt_ids`, `target_ids`.

    For people it also has `origin`, `place`, the example's number among those given, and `is_cut`,
    whether its prompt was cut.

    With a codec, `target_ids` are of the target as the codec writes it; `target` stays the text of
    the source, which is what answers are compared with.

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
        too_long: `refuse` lets no longer example pass. `leave_out` leaves them out, with a warning
            that counts them. `cut_prompt` cuts the text of a longer prompt on its left, because the
            question mostly stands next to the answer, and never within a number, with a warning
            too; a longer target is refused.
        not_quantities: Patterns searched in the targets; what they find (their groups, where they
            have some) is no quantity.
        codec: Writes the targets, each of which must then be one number and nothing else.
        changed_numbers: Whether a target whose number does not come back from the tokenizer is an
            error, or counted in a warning.

    Raises:
        ValueError: If there is no example, a prompt has no token, a text is longer than its limit
            and refused, all examples are left out, nothing of a prompt fits, the tokenizer has no
            end-of-sequence token, or every target has characters that it does not know; if there
            is something to mark or a prompt to cut and the tokenizer is not a fast one, or a marked
            part lies outside its target; if a number is changed by the tokenizer, or the codec
            cannot write a target.
    """
    if not examples:
        raise ValueError(f"{where} holds no example; name a source that has some")
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "model.tokenizer has no end-of-sequence token, so an answer could not be told to stop; "
            "use a tokenizer whose eos_token is set"
        )
    closes = architecture == "causal" and _closes_prompts(tokenizer, examples[0].prompt)

    def prompts_to_ids(prompts: list[str]) -> list[list[int]]:
        return [ids[:-1] if closes else ids for ids in _token_ids(tokenizer, prompts)]

    prompt_ids = prompts_to_ids([example.prompt for example in examples])
    for ids, example in zip(prompt_ids, examples, strict=True):
        if not ids:
            raise ValueError(
                f"{where}: the prompt of {example.origin} has no token ({example.prompt!r}); a "
                "model needs at least one to answer to"
            )
    whole = prompt_ids
    if too_long == "cut_prompt" and max_prompt_tokens is not None:
        examples, prompt_ids = _cut_prompts(
            examples, prompt_ids, tokenizer, prompts_to_ids, max_prompt_tokens, where
        )
    golds = [example.target for example in examples]
    if codec is not None:
        examples = written(examples, codec, where, changed_numbers)
    marks = bool(not_quantities) or any(example.not_quantities for example in examples)
    if marks:
        _check_marks(examples, tokenizer, where, codec)
    targets = [example.target for example in examples if example.target is not None]
    encoding = _encoding(tokenizer, targets, add_special_tokens=False, return_offsets_mapping=marks)
    encoded = iter(encoding["input_ids"])
    target_ids = [[] if example.target is None else [*next(encoded), eos] for example in examples]
    columns: dict[str, Any] = {
        "prompt": [example.prompt for example in examples],
        "target": golds,
        "prompt_ids": prompt_ids,
        "target_ids": target_ids,
        "origin": [example.origin for example in examples],
        "place": list(range(len(examples))),
        "is_cut": [ids is not others for ids, others in zip(prompt_ids, whole, strict=True)],
    }
    if marks:
        columns["quantities"] = _quantities(examples, encoding["offset_mapping"], not_quantities)
    for limit, name, key in (
        (max_prompt_tokens, "prompt_ids", "max_prompt_tokens"),
        (max_target_tokens, "target_ids", "max_target_tokens"),
    ):
        kept = _within(limit, columns[name], examples, key, where, too_long)
        if len(kept) < len(examples):
            examples = [examples[i] for i in kept]
            columns = {column: [values[i] for i in kept] for column, values in columns.items()}
    _report_unknown(tokenizer, "prompt", columns["prompt_ids"], examples, where)
    _report_unknown(tokenizer, "target", columns["target_ids"], examples, where)
    check_numbers_survive(
        examples,
        columns["target_ids"],
        tokenizer,
        where,
        codec=codec,
        changed_numbers=changed_numbers,
    )
    return Dataset.from_dict(columns)


def _check_marks(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    codec: NumberCodec | None,
) -> None:
    if not tokenizer.is_fast:
        # With a codec nothing else marks parts of a target.
        key = "not_quantities" if codec is None else "data.codec.digit_places"
        raise ValueError(
            f"{where}: {key} needs a fast tokenizer (one with a tokenizer.json), which "
            f"tells where its tokens stand in a text; {tokenizer.name_or_path!r} is a "
            f"{type(tokenizer).__name__}. Take a fast one, or leave {key} out"
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


def _within(
    limit: int | None,
    sequences: Sequence[Sequence[int]],
    examples: Sequence[Example],
    key: str,
    where: str,
    too_long: TooLong,
) -> list[int]:
    """The examples that are no longer than the limit, where longer ones may be left out."""
    kept = [i for i, ids in enumerate(sequences) if limit is None or len(ids) <= limit]
    if len(kept) == len(examples):
        return kept
    first = next(i for i, ids in enumerate(sequences) if len(ids) > (limit or 0))
    longer = (
        f"{where}: {len(examples) - len(kept)} of {len(examples)} examples are longer than "
        f"data.{key}={limit} tokens; the first is {examples[first].origin} with "
        f"{len(sequences[first])}, the longest has {max(map(len, sequences))}"
    )
    if too_long != "leave_out":
        raise ValueError(
            f"{longer}. Nothing is cut: raise the limit, or set data.too_long to leave_out (which "
            f"data.predict passes over){'' if key == 'max_target_tokens' else ' or cut_prompt'}"
        )
    if not kept:
        raise ValueError(f"{longer}. data.too_long=leave_out would leave nothing; raise the limit")
    rank_zero_warn(f"{longer}. They are left out (data.too_long=leave_out)")
    return kept


def _cut_prompts(
    examples: Sequence[Example],
    prompt_ids: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    prompts_to_ids: Callable[[list[str]], list[list[int]]],
    limit: int,
    where: str,
) -> tuple[list[Example], list[list[int]]]:
    """The examples with no prompt longer than the limit, and their prompts' tokens."""
    too_long = [i for i, ids in enumerate(prompt_ids) if len(ids) > limit]
    examples, cut_ids = list(examples), list(prompt_ids)
    if not too_long:
        return examples, cut_ids
    if not tokenizer.is_fast:
        raise ValueError(
            f"{where}: data.too_long=cut_prompt needs a fast tokenizer (one with a "
            "tokenizer.json), which tells where its tokens stand in a text; "
            f"{tokenizer.name_or_path!r} is a {type(tokenizer).__name__}"
        )
    for i in too_long:
        text, ids = examples[i].prompt, prompt_ids[i]
        while len(ids) > limit:
            text = _without_first_tokens(text, len(ids) - limit, tokenizer)
            if not text.strip():
                raise ValueError(
                    f"{where}: no part of the prompt of {examples[i].origin} fits "
                    f"data.max_prompt_tokens={limit}; raise it"
                )
            (ids,) = prompts_to_ids([text])
        examples[i], cut_ids[i] = replace(examples[i], prompt=text), ids
    first = too_long[0]
    rank_zero_warn(
        f"{where}: {len(too_long)} of {len(examples)} prompts are cut on the left to "
        f"data.max_prompt_tokens={limit} tokens; the first is that of {examples[first].origin} "
        f"with {len(prompt_ids[first])}, the longest has {max(map(len, prompt_ids))} "
        "(data.too_long=cut_prompt)"
    )
    return examples, cut_ids


def _without_first_tokens(text: str, count: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text behind so many tokens, and behind the number that the cut would go through."""
    encoding = _encoding(tokenizer, [text], add_special_tokens=False, return_offsets_mapping=True)
    (offsets,) = encoding["offset_mapping"]
    if count >= len(offsets):
        return ""
    cut = max(offsets[count][0], 1)
    whole = find_numbers(text)
    # What is left is read as it was: no part of a number, and no sign or group that was none.
    while cut < len(text):
        left = [(cut + number.end, number.value) for number in find_numbers(text[cut:])]
        if left == [(number.end, number.value) for number in whole if number.start >= cut]:
            break
        cut += 1
    return text[cut:]


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
    sequences: Sequence[Sequence[int]],
    value: int,
    multiple: int = 1,
    side: Literal["left", "right"] = "right",
) -> Tensor:
    width = padded_length(max(map(len, sequences)), multiple)
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

    With `row_length` several examples stand one behind the other in a row. `position_ids` (B, T),
    which begin at 0 with each example and are 0 in the padding, take the place of `attention_mask`:
    given these alone, transformers keeps apart what begins anew. `num_positions` is the length of
    the longest example.
    """

    architecture: Architecture
    pad_id: int
    for_evaluation: bool = False
    pad_to_multiple_of: int = 1
    """To which multiples lengths are padded; those of prompts for generation, which grow by one
    token at a time, are not."""
    row_length: int | None = None
    """Pack examples into rows of at most so many tokens, in their order, each into the row of the
    one before it while there is room; None: a row for each. Only for training causal models."""

    def __post_init__(self) -> None:
        """Refuse to pack what cannot be packed.

        Raises:
            ValueError: With `row_length` for seq2seq, or for evaluation.
        """
        if self.row_length is not None and (self.architecture == "seq2seq" or self.for_evaluation):
            raise ValueError("only training batches of causal models can be packed")

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Pad or pack the rows; a row with `index` -1 is a filler and has no label.

        Raises:
            ValueError: If an example is longer than `row_length`.
        """
        prompts = [row["prompt_ids"] for row in rows]
        targets = [row["target_ids"] if row["index"] >= 0 else [] for row in rows]
        causal = self.architecture == "causal"
        inputs = [[*p, *t] for p, t in zip(prompts, targets, strict=True)] if causal else prompts
        labels = self._at_labels(prompts, targets, IGNORE_INDEX)
        quantities = None
        if "quantities" in rows[0]:
            marks = [row["quantities"] if row["index"] >= 0 else [] for row in rows]
            quantities = self._at_labels(prompts, marks, 0)
        batch: dict[str, Any] = {}
        if self.row_length is None:
            mask = [[1] * len(ids) for ids in inputs]
            batch["attention_mask"] = _pad(mask, 0, self.pad_to_multiple_of)
        else:
            examples = _fill_rows(list(map(len, inputs)), self.row_length)
            # What begins an example is not to be answered from the one before it.
            labels = [[IGNORE_INDEX, *ids[1:]] for ids in labels]
            positions = _joined([range(len(ids)) for ids in inputs], examples)
            batch["position_ids"] = _pad(positions, 0, self.pad_to_multiple_of)
            batch["num_positions"] = max(map(len, inputs))
            inputs, labels = _joined(inputs, examples), _joined(labels, examples)
            quantities = quantities and _joined(quantities, examples)
            prompts = [prompts[first] for first, *_ in examples]
        batch["input_ids"] = _pad(inputs, self.pad_id, self.pad_to_multiple_of)
        batch["labels"] = _pad(labels, IGNORE_INDEX, self.pad_to_multiple_of)
        if quantities is not None:
            batch["quantities"] = _pad(quantities, 0, self.pad_to_multiple_of).bool()
        if causal:
            batch["first_label"] = min(map(len, prompts))
        if self.for_evaluation:
            side: Literal["left", "right"] = "left" if causal else "right"
            batch["prompt_input_ids"] = _pad(prompts, self.pad_id, side=side)
            batch["prompt_attention_mask"] = _pad([[1] * len(p) for p in prompts], 0, side=side)
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


def _fill_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """The examples of each row, by their numbers."""
    if max(lengths) > row_length:
        raise ValueError(
            f"an example of {max(lengths)} tokens is longer than the {row_length} of a packed row"
        )
    rows: list[list[int]] = []
    room = 0
    for example, length in enumerate(lengths):
        if length > room:
            rows.append([])
            room = row_length
        rows[-1].append(example)
        room -= length
    return rows


def _joined(sequences: Sequence[Sequence[int]], rows: list[list[int]]) -> list[Sequence[int]]:
    return [[*chain.from_iterable(sequences[example] for example in row)] for row in rows]
