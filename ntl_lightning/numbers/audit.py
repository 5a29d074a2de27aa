"""What a tokenizer does to numbers, for people: the report behind `inspect-tokenizer`."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from ntl_lightning.numbers.text import find_numbers
from ntl_lightning.numbers.vocabulary import SPACE_MARKS, NumberKind, NumberVocabulary
from ntl_lightning.paths import expand_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Audit",
    "DuplicateAudit",
    "RefusedAudit",
    "SampleAudit",
    "TextAudit",
    "TokenAudit",
    "UnreachedAudit",
    "audit_tokenizer",
    "render_audit",
]

SAMPLES = (
    "12.34",
    "-7",
    " 42",
    "1,234",
    "1000000",
    "3.5e-4",
    "٣",
    "½",
    "x = 12.34, n=-7",
    "The answer is 1234.5",
)

_COLUMNS = 96
_MOST_TOKENS_SHOWN = 40
_EXAMPLES_SHOWN = 8


class TokenAudit(TypedDict):
    """A number token."""

    id: int
    token: str
    value: float


class RefusedAudit(TypedDict):
    """A token that looks like a number and is none."""

    token_id: int
    token: str
    reason: str


class DuplicateAudit(TypedDict):
    """A value that several tokens have."""

    value: float
    tokens: list[str]


class UnreachedAudit(TypedDict):
    """A token with a digit in it that is no number token."""

    token_id: int
    token: str


class SampleAudit(TypedDict):
    """A text and its tokens, with a mark at the number tokens."""

    text: str
    tokens: list[str]
    is_number: list[bool]


class TextAudit(TypedDict):
    """How much of a text's numbers the number tokens reach."""

    file: str
    num_numbers: int
    num_all_digits: int
    """Numbers whose digits are all in number tokens."""
    num_some_digits: int
    num_no_digits: int
    num_digit_tokens: int
    """Tokens of the text with a digit in them."""
    num_digit_tokens_reached: int
    verdict: str


class Audit(TypedDict):
    """Everything `inspect-tokenizer` says; plain values, so that it can be written as JSON."""

    name: str
    tokenizer_class: str
    tokenizer_length: int
    logits_width: int
    kind: str
    largest: float | None
    num_number_tokens: int
    values: list[float]
    tokens: list[TokenAudit]
    forms: dict[str, int]
    duplicates: list[DuplicateAudit]
    refused: list[RefusedAudit]
    refused_counts: dict[str, int]
    unreached: list[UnreachedAudit]
    samples: list[SampleAudit]
    text: TextAudit | None


def audit_tokenizer(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    kind: NumberKind = "digits",
    largest: float | None = 999,
    width: int | None = None,
    text: str | None = None,
) -> Audit:
    r"""Report which tokens are numbers, which are not and why, and how numbers are cut.

    Args:
        tokenizer: Any tokenizer of transformers; it is not changed.
        kind: See `NumberVocabulary.from_tokenizer`.
        largest: See there.
        width: Width of the model's logits; None for the largest id plus one.
        text: Path of a UTF-8 text file whose numbers are to be looked up; `~` and `${VAR}` work.
            It is read as it stands, line by line: in JSON Lines also keys and `\u00e9` are text.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        ValueError: If it is not UTF-8 or has no number, or as `NumberVocabulary.from_tokenizer`.
    """
    vocabulary = NumberVocabulary.from_tokenizer(tokenizer, width=width, kind=kind, largest=largest)
    found = list(zip(vocabulary.token_ids, vocabulary.tokens, vocabulary.values, strict=True))
    tokens_of_value = defaultdict(list)
    for _, token, value in found:
        tokens_of_value[value].append(token)
    is_number = set(vocabulary.token_ids)
    unreached = [i for i in vocabulary.digit_bearing_ids if i not in is_number]
    names = cast("list[str]", tokenizer.convert_ids_to_tokens(unreached))
    return Audit(
        name=str(tokenizer.name_or_path),
        tokenizer_class=type(tokenizer).__name__,
        tokenizer_length=len(tokenizer),
        logits_width=vocabulary.width,
        kind=kind,
        largest=largest,
        num_number_tokens=len(vocabulary),
        values=sorted(tokens_of_value),
        tokens=[TokenAudit(id=i, token=token, value=value) for i, token, value in found],
        forms=_count_forms(vocabulary.tokens),
        duplicates=[
            DuplicateAudit(value=value, tokens=tokens)
            for value, tokens in sorted(tokens_of_value.items())
            if len(tokens) > 1
        ],
        refused=[
            RefusedAudit(token_id=entry.token_id, token=entry.token, reason=entry.reason)
            for entry in vocabulary.refused
        ],
        refused_counts=dict(Counter(entry.reason for entry in vocabulary.refused).most_common()),
        unreached=[
            UnreachedAudit(token_id=token_id, token=token)
            for token_id, token in zip(unreached, names, strict=True)
        ],
        samples=[_audit_sample(tokenizer, sample, is_number) for sample in SAMPLES],
        text=None if text is None else _audit_text(tokenizer, vocabulary, text),
    )


def _count_forms(tokens: Iterable[str]) -> dict[str, int]:
    forms = {"bare": 0, "space mark": 0, "continuation": 0}
    for token in tokens:
        if token[0] in "0123456789+-.":
            forms["bare"] += 1
        elif token[0] in SPACE_MARKS:
            forms["space mark"] += 1
        else:
            forms["continuation"] += 1
    return forms


def _audit_sample(
    tokenizer: "PreTrainedTokenizerBase", text: str, is_number: set[int]
) -> SampleAudit:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return SampleAudit(
        text=text,
        tokens=cast("list[str]", tokenizer.convert_ids_to_tokens(token_ids)),
        is_number=[token_id in is_number for token_id in token_ids],
    )


def _audit_text(
    tokenizer: "PreTrainedTokenizerBase", vocabulary: NumberVocabulary, file: str
) -> TextAudit:
    is_number = set(vocabulary.token_ids)
    is_digit_bearing = set(vocabulary.digit_bearing_ids)
    reach = Counter[str]()
    digit_tokens = Counter[bool]()
    for line in _read_text(file).splitlines(keepends=True):
        spans = [(number.start, number.end) for number in find_numbers(line)]
        if not spans:
            continue
        token_ids, reached = _cut(tokenizer, line, is_number)
        digit_tokens.update(i in is_number for i in token_ids if i in is_digit_bearing)
        for start, end in spans:
            digits = [at in reached for at in range(start, end) if "0" <= line[at] <= "9"]
            reach["all" if all(digits) else "some" if any(digits) else "none"] += 1
    if not reach:
        raise ValueError(f"--text: {file!r} has no number that could be looked up.")
    return TextAudit(
        file=file,
        num_numbers=reach.total(),
        num_all_digits=reach["all"],
        num_some_digits=reach["some"],
        num_no_digits=reach["none"],
        num_digit_tokens=digit_tokens.total(),
        num_digit_tokens_reached=digit_tokens[True],
        verdict=_verdict(reach),
    )


def _read_text(file: str) -> str:
    path = Path(expand_path(file, "--text"))
    if path.is_dir():
        raise IsADirectoryError(f"--text: {str(path)!r} is a folder. Give a text file.")
    if not path.exists():
        raise FileNotFoundError(
            f"--text: there is no file {str(path)!r} (looked for {path.absolute()})."
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text: {str(path)!r} is not UTF-8 (byte {error.start}: {error.reason}). Convert it, "
            f"e.g. with `iconv -f latin1 -t utf-8`."
        ) from error


def _cut(
    tokenizer: "PreTrainedTokenizerBase", line: str, is_number: set[int]
) -> tuple[list[int], set[int]]:
    """Ids of a line, and the indices of its characters that lie in number tokens."""
    if tokenizer.is_fast:
        encoding = tokenizer(
            line, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        pieces = list(zip(encoding["input_ids"], encoding["offset_mapping"], strict=True))
        return encoding["input_ids"], {
            at
            for token_id, (start, end) in pieces
            if token_id in is_number
            for at in range(start, end)
        }
    # Slow tokenizers know no offsets, but those of today cut by bytes or characters.
    digits = {
        digit
        for digit in "0123456789"
        if is_number.issuperset(tokenizer.encode(digit, add_special_tokens=False))
    }
    return tokenizer.encode(line, add_special_tokens=False, verbose=False), {
        at for at, character in enumerate(line) if character in digits
    }


def _verdict(reach: Counter[str]) -> str:
    total = reach.total()
    share = {name: f"{reach[name] / total:.1%}" for name in ("all", "some", "none")}
    facts = (
        f"Of {total} numbers, {share['all']} have all their digits in number tokens, "
        f"{share['some']} some, {share['none']} none."
    )
    if reach["all"] == total:
        return f"{facts} A number loss reaches every digit."
    if 2 * reach["all"] >= total:
        return (
            f"{facts} A number loss misses part of the digits; with `digit_level: true` it would "
            f"reach them."
        )
    return (
        f"{facts} A number loss would leave most numbers to cross entropy alone. Set "
        f"`digit_level: true` (then every digit is a number token), or choose a kind that takes "
        f"longer tokens."
    )


def render_audit(audit: Audit) -> str:
    """The audit as plain text of at most 96 columns, long lists cut short with their counts."""
    kind = audit["kind"]
    if kind != "digits":
        bound = audit["largest"]
        kind += ", unbounded" if bound is None else f" up to {bound:g}"
    lines = [
        f"Tokenizer  {audit['name'] or '(without a name)'} ({audit['tokenizer_class']}), "
        f"{audit['tokenizer_length']} tokens",
        f"Logits     {audit['logits_width']} wide{_width_note(audit)}",
        f"Kind       {kind}",
        "",
        *_render_number_tokens(audit),
        "",
        *_render_refused(audit),
        "",
        *_render_unreached(audit),
        "",
        "How text is cut (number tokens in brackets)",
        *_render_samples(audit["samples"]),
    ]
    text = audit["text"]
    if text is not None:
        reached, bearing = text["num_digit_tokens_reached"], text["num_digit_tokens"]
        facts = f"{reached} of its {bearing} tokens with digits are number tokens."
        lines += ["", f"Numbers in {text['file']}", *_wrap(text["verdict"]), *_wrap(facts)]
    return "\n".join(lines)


def _width_note(audit: Audit) -> str:
    extra = audit["logits_width"] - audit["tokenizer_length"]
    if extra > 0:
        return f": {extra} columns belong to no token, and are no numbers"
    return f": {-extra} tokens lie beyond them" if extra < 0 else ""


def _render_number_tokens(audit: Audit) -> list[str]:
    forms = ", ".join(f"{count} {form}" for form, count in audit["forms"].items() if count)
    values = audit["values"]
    lines = [
        f"{audit['num_number_tokens']} number tokens ({forms}), {len(values)} values",
        *_wrap("worth " + _some([f"{value:g}" for value in values], _MOST_TOKENS_SHOWN)),
        *_wrap(
            _some(
                [f"{entry['token']!r}={entry['id']}" for entry in audit["tokens"]],
                _MOST_TOKENS_SHOWN,
            )
        ),
    ]
    if audit["duplicates"]:
        examples = [
            f"{entry['value']:g}: {' '.join(map(repr, entry['tokens']))}"
            for entry in audit["duplicates"]
        ]
        lines += _wrap(
            f"{len(examples)} values have several tokens: {_some(examples, _EXAMPLES_SHOWN, '; ')}"
        )
    return lines


def _render_refused(audit: Audit) -> list[str]:
    if not audit["refused"]:
        return ["No token looks like a number and is none"]
    lines = [f"{len(audit['refused'])} tokens look like numbers and are none"]
    for reason, count in audit["refused_counts"].items():
        examples = [repr(entry["token"]) for entry in audit["refused"] if entry["reason"] == reason]
        lines += _wrap(f"{count:6d} {reason}: {_some(examples, _EXAMPLES_SHOWN)}", indent=9)
    return lines


def _render_unreached(audit: Audit) -> list[str]:
    if not audit["unreached"]:
        return ["Every token with a digit in it is a number token"]
    examples = [repr(entry["token"]) for entry in audit["unreached"]]
    hint = [] if audit["text"] else ["  (give --text to see how many of them a text has)"]
    return [
        f"{len(examples)} tokens with a digit in them are no number tokens",
        *_wrap(_some(examples, _EXAMPLES_SHOWN)),
        *hint,
    ]


def _render_samples(samples: list[SampleAudit]) -> list[str]:
    column = max(len(repr(sample["text"])) for sample in samples)
    lines = []
    for sample in samples:
        cut = " ".join(
            f"[{token}]" if number else token
            for token, number in zip(sample["tokens"], sample["is_number"], strict=True)
        )
        lines += _wrap(f"{sample['text']!r:<{column}}  {cut}", indent=column + 4)
    return lines


def _some(items: list[str], most: int, separator: str = " ") -> str:
    shown = separator.join(islice(items, most))
    return shown if len(items) <= most else f"{shown} ... ({len(items) - most} more)"


def _wrap(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent="  ",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
