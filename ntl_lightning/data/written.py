"""Targets as the model is to write them, and whether a tokenizer gives their numbers back."""

import re
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from ntl_lightning.data.sources import Example
from ntl_lightning.numbers import NumberCodec, decode_answers, last_number, only_number

__all__ = ["ChangedNumbers", "check_are_finite", "check_numbers_survive", "gold_numbers", "written"]

ChangedNumbers = Literal["refuse", "count"]
"""What becomes of targets whose number does not come back from the tokenizer."""

_NOT_FINITE = re.compile(r"\s*[-+]?(?:nan|inf|infinity)\s*", re.IGNORECASE)


def check_are_finite(examples: Sequence[Example], where: str) -> None:
    """Refuse NaN and infinity among targets that are numbers and nothing else.

    Raises:
        ValueError: If there are some; where other targets are words, `nan` may be one too.
    """
    targets = [(example, example.target) for example in examples if example.target is not None]
    bad = [(example, text) for example, text in targets if _NOT_FINITE.fullmatch(text)]
    if bad and all(_NOT_FINITE.fullmatch(t) or only_number(t) is not None for _, t in targets):
        first, text = bad[0]
        raise ValueError(
            f"{where}: {len(bad)} of {len(examples)} targets are no finite numbers, the first is "
            f"{first.origin}: {text!r}. Leave these rows out, or put in what was measured"
        )


def gold_numbers(examples: Sequence[Example], where: str) -> list[Decimal | None]:
    """The values of targets that a codec is to write, exactly; None where there is no target.

    Raises:
        ValueError: If a target is anything but one number.
    """
    values = [None if e.target is None else only_number(e.target) for e in examples]
    bad = [
        example
        for example, value in zip(examples, values, strict=True)
        if value is None and example.target is not None
    ]
    if bad:
        raise ValueError(
            f"{where}: data.codec writes targets that are one number and nothing else, but "
            f"{len(bad)} of {len(examples)} are not, the first is {bad[0].origin}: "
            f"{reprlib.repr(bad[0].target)}. Name a column that holds numbers alone, leave these "
            "rows out, or leave data.codec out"
        )
    return values


def written(
    examples: Sequence[Example],
    codec: NumberCodec,
    where: str,
    changed_numbers: ChangedNumbers = "refuse",
) -> list[Example]:
    """The examples with their targets as the codec writes them.

    How many are rounded by that, and how much at most, is reported.

    Raises:
        ValueError: If a target is anything but one number, cannot be written, or has parts that
            are marked as no quantities; if `changed_numbers` is `refuse` and what is written
            stands for no number of float64, as that of 1e400 does on a logarithmic scale.
    """
    marked = next((example for example in examples if example.not_quantities), None)
    if marked is not None:
        raise ValueError(
            f"{where}: data.codec writes the targets anew as one number each, so there is nothing "
            f"that not_quantities could mark, as it does in {marked.origin}. Remove one of the two"
        )
    result, num_rounded = [], 0
    lost: list[tuple[Example, str]] = []
    largest: dict[str, tuple[Decimal, Example, str]] = {}
    for example, value in zip(examples, gold_numbers(examples, where), strict=True):
        if value is None:
            result.append(example)
            continue
        try:
            text = codec.write(value)
        except ValueError as error:
            raise ValueError(
                f"{where}: {example.origin}, written by data.codec: {error}"
            ) from error
        result.append(replace(example, target=text, not_quantities=codec.place_spans(text)))
        read = codec.read(text)
        if read is None:
            lost.append((example, text))
            continue
        if read == value:
            continue
        num_rounded += 1
        errors = {"absolute": abs(read - value)}
        if value:
            errors["relative"] = errors["absolute"] / abs(value)
        for kind, size in errors.items():
            if kind not in largest or size > largest[kind][0]:
                largest[kind] = (size, example, text)
    if lost:
        _report_lost(lost, len(examples), where, changed_numbers)
    if num_rounded:
        worst = " and ".join(
            f"{float(size):.2g} ({kind}; {example.origin}: {example.target} is written {text})"
            for kind, (size, example, text) in largest.items()
        )
        rank_zero_info(
            f"{where}: data.codec rounds {num_rounded} of {len(examples)} targets, by at most "
            f"{worst}."
        )
    return result


def _report_lost(
    lost: Sequence[tuple[Example, str]], count: int, where: str, changed_numbers: ChangedNumbers
) -> None:
    first, text = lost[0]
    message = (
        f"{where}: {len(lost)} of {count} targets are too large to be read back from what "
        f"data.codec writes; the first is {first.origin}: {_end(first.target or '')} is written "
        f"{text}, which float64 does not hold"
    )
    if changed_numbers == "refuse":
        raise ValueError(
            f"{message}. Even a right answer would have no value: leave these rows out, or set "
            "data.changed_numbers: count"
        )
    rank_zero_warn(f"{message}. Right answers to these count as invalid, though as exact matches.")


def check_numbers_survive(
    examples: Sequence[Example],
    target_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    codec: NumberCodec | None,
    changed_numbers: ChangedNumbers,
) -> None:
    """Decode every target and compare its number, the one that is scored, with the one written.

    Args:
        examples: With their targets as they are tokenised.
        target_ids: Token ids of the targets, empty where there is none.
        tokenizer: The tokenizer that made them.
        where: The set's configuration key, for messages.
        codec: What wrote the targets and reads answers; None: these are read by `last_number`.
        changed_numbers: Whether targets whose number has changed are an error, or counted in a
            warning.

    Raises:
        ValueError: If a number has changed and `changed_numbers` is `refuse`.
    """
    read = last_number if codec is None else codec.written_number
    ids_of = {
        example.target: ids
        for example, ids in zip(examples, target_ids, strict=True)
        if example.target is not None
    }
    decoded = dict(zip(ids_of, decode_answers(tokenizer, list(ids_of.values())), strict=True))
    # Reading takes longer than all the rest, and most tokenizers give texts back as they were.
    changed = {
        text: back for text, back in decoded.items() if text != back and read(text) != read(back)
    }
    bad = [example for example in examples if example.target in changed]
    if not bad:
        return
    first = bad[0].target or ""
    back = changed[first]
    message = (
        f"{where}: the numbers of {len(bad)} of {len(examples)} targets are not what they were "
        f"when they come back from the tokenizer; the first is {bad[0].origin}: {_end(first)} is "
        f"decoded to {_end(back)}, and {read(first)} has become {read(back)}"
    )
    if changed_numbers == "count":
        rank_zero_warn(f"{message}. Right answers to these count as wrong.")
        return
    raise ValueError(
        f"{message}. Even a right answer would count as wrong: write the numbers otherwise (see "
        "data.codec), use another tokenizer, leave these rows out, or set data.changed_numbers: "
        "count"
    )


def _end(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else "..." + text[3 - length :])
