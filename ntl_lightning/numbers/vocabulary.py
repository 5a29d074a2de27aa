"""Which tokens of a vocabulary are numbers, and what each of them is worth.

Shapes: V width of the logits, K number tokens.
"""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from tokenizers import decoders, models
from torch import Tensor

from ntl_lightning.numbers.runs import Role
from ntl_lightning.numbers.tokenizer import num_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NumberKind", "NumberVocabulary", "RefusalReason", "RefusedToken"]

NumberKind = Literal["digits", "integers", "numbers"]
"""`digits`: one ASCII digit. `integers`: a run of ASCII digits. `numbers`: also sign and point."""

RefusalReason = Literal[
    "special token",
    "infinite or not a number",
    "exponent",
    "underscore",
    "hexadecimal, octal or binary",
    "numeral outside ASCII",
    "white space beyond one space mark",
    "byte piece",
    "sign or decimal point",
    "several digits",
    "above `largest`",
]
"""Why a token that looks like a number is none; all the reasons there are."""

SPACE_MARKS = ("▁", "Ġ", " ")

_UNBOUNDED_WARNING_FROM = 1e4
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_DIGIT_RUN = re.compile(r"[0-9]+")
_ASCII_DIGIT = re.compile(r"[0-9]")
_ASCII_CANDIDATE = re.compile(r"[0-9]|inf|nan", re.IGNORECASE)
_BASE_PREFIX = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F_]+")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK_ROLES = {
    ".": Role.POINT,
    ",": Role.THOUSANDS,
    "-": Role.SIGN,
    "+": Role.SIGN,
    "\u2212": Role.SIGN,
}
# `(.` and `=.`, but not `).` or `...`: what `find_numbers` takes for a decimal point.
_LEADING_POINT = re.compile(r"(?<![^\W_])(?<![)\]}%.])\.\Z")
_MOST_DIGITS = 127
_MEANING: dict[NumberKind, str] = {
    "digits": "one ASCII digit",
    "integers": "a run of ASCII digits",
    "numbers": "an ASCII number, a sign and a decimal point allowed",
}


@dataclass(frozen=True)
class RefusedToken:
    """A token that looks like a number to Python (`float`, `str.isnumeric`) but is none here."""

    token_id: int
    token: str
    """As in the vocabulary, with its space mark."""
    reason: RefusalReason


@dataclass(frozen=True)
class NumberVocabulary:
    """The K number tokens of a vocabulary with their values, and the width V of the logits.

    Built once per model, from a tokenizer (`from_tokenizer`) or by hand (`from_values`). Several
    tokens may have one value: `5`, `▁5` and `05` are all worth 5.

    Raises:
        ValueError: If there is no number token, an id is outside the width or not in ascending
            order, a value is infinite or NaN, or the lists differ in length.
    """

    token_ids: tuple[int, ...]
    """Ids of the number tokens, ascending (K)."""
    values: tuple[float, ...]
    """What each is worth, in the order of `token_ids` (K)."""
    tokens: tuple[str, ...]
    """The tokens as in the vocabulary, with space marks, in the order of `token_ids` (K)."""
    width: int
    """Width V of the logits; may exceed the number of tokens (T5: 32128 against 32100)."""
    kind: NumberKind = "numbers"
    largest: float | None = None
    """Tokens worth more in absolute value are no numbers; None: unbounded."""
    digit_bearing_ids: tuple[int, ...] = ()
    """Ids below the width of all tokens, special ones aside, with an ASCII digit in their text.

    A superset of `token_ids`: what it holds besides is written in digits but not supervised.
    """
    refused: tuple[RefusedToken, ...] = ()
    forms: bytes = field(default=b"", repr=False)
    """The rows of `forms_table`, one after another. Empty: only number tokens have a role, that of
    their text in `tokens`."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("A number vocabulary needs at least one number token, got none.")
        if not len(self.token_ids) == len(self.values) == len(self.tokens):
            raise ValueError(
                f"`token_ids`, `values` and `tokens` must be equally long, got "
                f"{len(self.token_ids)}, {len(self.values)} and {len(self.tokens)}."
            )
        if list(self.token_ids) != sorted(set(self.token_ids)) or self.token_ids[0] < 0:
            raise ValueError(
                f"`token_ids` must be ascending, distinct and not negative, got {self.token_ids}."
            )
        if self.token_ids[-1] >= self.width:
            raise ValueError(
                f"The number token {self.tokens[-1]!r} has id {self.token_ids[-1]}, but the logits "
                f"are only {self.width} wide (`width`). Give the width of the model's output, and "
                f"a tokenizer that belongs to this model."
            )
        for token, value in zip(self.tokens, self.values, strict=True):
            if not abs(value) <= _LARGEST_FLOAT32:
                raise ValueError(
                    f"The value of token {token!r} must be finite in float32, in which losses are "
                    f"computed, got {value}."
                )
        if self.forms and len(self.forms) != 3 * self.width:
            raise ValueError(
                f"`forms` must hold 3 bytes per token, {3 * self.width}, got {len(self.forms)}."
            )

    def __len__(self) -> int:
        """The number K of number tokens."""
        return len(self.token_ids)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        width: int | None = None,
        kind: NumberKind = "digits",
        largest: float | None = 999,
    ) -> Self:
        """Find the number tokens of a tokenizer, without changing it.

        A number token is one whose text, after at most one space mark (`▁`, `Ġ`, a blank, and for
        WordPiece its continuing prefix `##`), is a number of the given kind: `5`, `▁5` and `##5`
        are 5, and for `integers` `007` is 7. Never numbers: special tokens, infinities, NaN,
        exponents, underscores, other bases, digits outside ASCII (byte-level tokens are read as
        text), byte pieces such as `<0x35>`. What looks like a number and is none is listed in
        `refused`.

        Args:
            tokenizer: A fast or slow tokenizer of transformers.
            width: Width V of the logits; None for the largest id plus one.
            kind: `digits`, `integers` or `numbers`, see `NumberKind`.
            largest: Largest absolute value that is still a number token, None for no bound. No
                effect on `digits`, where less than 9 is an error.

        Raises:
            ValueError: If there is no such token, one has an id beyond the width, or `kind` or
                `largest` is not valid.

        Warns:
            UserWarning: If `largest` is None and some value is above 1e4: such values dominate
                every loss that measures distances.
        """
        _check_kind_and_largest(kind, largest)
        vocabulary = tokenizer.get_vocab()
        width = num_token_ids(tokenizer) if width is None else width
        read_text = _TokenText(tokenizer)
        special_ids = set(tokenizer.all_special_ids)
        special_ids.update(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)

        numbers: list[tuple[int, float, str]] = []
        refused: list[RefusedToken] = []
        digit_bearing: list[int] = []
        forms = _Forms(width)
        for token, token_id in vocabulary.items():
            special = token_id in special_ids
            byte = read_text.byte(token)
            text, starts_word = (byte, False) if byte else read_text.split(token, token_id)
            if not special:
                forms.add(token_id, text, starts_word)
            if text.isascii() and not _ASCII_CANDIDATE.search(text):
                continue
            if byte is not None:
                if _ASCII_DIGIT.fullmatch(byte):
                    digit_bearing.append(token_id)
                    refused.append(RefusedToken(token_id, token, "byte piece"))
                continue
            if not special and _ASCII_DIGIT.search(token):
                digit_bearing.append(token_id)
            number = _read(text, kind, largest)
            if number is None:
                continue
            if special:
                refused.append(RefusedToken(token_id, token, "special token"))
            elif isinstance(number, str):
                refused.append(RefusedToken(token_id, token, number))
            else:
                numbers.append((token_id, number, token))

        numbers.sort()
        refused.sort(key=lambda entry: entry.token_id)
        if not numbers:
            raise ValueError(_nothing_found(tokenizer, kind, largest, refused, read_text.marks))
        if largest is None and kind != "digits":
            _warn_about_large_values(numbers)
        return cls(
            token_ids=tuple(token_id for token_id, _, _ in numbers),
            values=tuple(value for _, value, _ in numbers),
            tokens=tuple(token for _, _, token in numbers),
            width=width,
            kind=kind,
            largest=largest,
            digit_bearing_ids=tuple(sorted(i for i in digit_bearing if i < width)),
            refused=tuple(refused),
            forms=bytes(forms.table),
        )

    @classmethod
    def from_values(
        cls,
        values: Mapping[int, float],
        *,
        width: int,
        marks: Mapping[int, str] | None = None,
    ) -> Self:
        """A vocabulary by hand, for own tokenizers.

        An integer that is not negative is taken for a token of its digits without leading zeros
        (`forms_table`), any other value for a token with a sign or point.

        Args:
            values: Token id to value.
            width: Width V of the logits.
            marks: Ids of the tokens that are, alone, a decimal point, a thousands comma or a sign
                to one of `. , - + \u2212`. Without them every run of adjacent number tokens is an
                integer.

        Raises:
            ValueError: If `values` is empty, an id is outside the width, or a value not finite; if
                a mark is none of these, outside the width, or also a number token.

        >>> NumberVocabulary.from_values({5: 0.0, 6: 1.0}, width=8).value_table()
        tensor([nan, nan, nan, nan, nan, 0., 1., nan], dtype=torch.float64)
        """
        token_ids = tuple(sorted(values))
        marks = {} if marks is None else marks
        for token_id, mark in marks.items():
            if mark not in _MARK_ROLES:
                raise ValueError(
                    f"`marks` must be tokens that are one of {' '.join(_MARK_ROLES)}, got {mark!r} "
                    f"for id {token_id}."
                )
            if token_id in values or not 0 <= token_id < width:
                raise ValueError(
                    f"`marks` gives {mark!r} to id {token_id}, which must be below the width "
                    f"{width} and no number token."
                )
        vocabulary = cls(
            token_ids=token_ids,
            values=tuple(float(values[token_id]) for token_id in token_ids),
            tokens=tuple(f"{values[token_id]:g}" for token_id in token_ids),
            width=width,
            digit_bearing_ids=token_ids,
        )
        forms = _Forms(width)
        for token_id in token_ids:
            forms.add(token_id, _text_of_value(values[token_id]), starts_word=False)
        for token_id, mark in marks.items():
            forms.add(token_id, mark, starts_word=False)
        return replace(vocabulary, forms=bytes(forms.table))

    def is_number_table(self) -> Tensor:
        """True at the number tokens: bool (V,)."""
        return self._table_of(self.token_ids)

    def is_digit_bearing_table(self) -> Tensor:
        """True at the tokens with an ASCII digit in their text: bool (V,)."""
        return self._table_of(self.digit_bearing_ids)

    def value_table(self) -> Tensor:
        """The value of every token, NaN where it is no number: float64 (V,)."""
        table = torch.full((self.width,), math.nan, dtype=torch.float64)
        table[list(self.token_ids)] = torch.tensor(self.values, dtype=torch.float64)
        return table

    def forms_table(self) -> Tensor:
        """How every token is written, as `number_runs` needs it: int8 (V, 3).

        Column 0 is the token's `Role`. Column 1 is the number of its digits if it is a run of ASCII
        digits (of more than 127, 127), else 0. Column 2 is 1 if the token begins a new word, for it
        carries a space mark or begins with white space. (`(.` is a point and begins a word, too:
        nothing before it belongs to the number.) All this is a matter of the token's text: also a
        token of digits that is no number token has the role `DIGITS`.
        """
        table = bytearray(self.forms)
        if not table:
            forms = _Forms(self.width)
            for token_id, token in zip(self.token_ids, self.tokens, strict=True):
                mark = next((mark for mark in SPACE_MARKS if token.startswith(mark)), "")
                forms.add(token_id, token[len(mark) :], bool(mark))
            table = forms.table
        return torch.frombuffer(table, dtype=torch.int8).view(self.width, 3)

    def _table_of(self, token_ids: tuple[int, ...]) -> Tensor:
        table = torch.zeros(self.width, dtype=torch.bool)
        table[list(token_ids)] = True
        return table


class _Forms:
    """Collects the rows of `NumberVocabulary.forms_table`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.table = bytearray(3 * width)

    def add(self, token_id: int, text: str, starts_word: bool) -> None:
        """Note a token by its text behind its space mark; ids beyond the width are passed over."""
        if token_id >= self.width:
            return
        at = 3 * token_id
        if text.isalpha():
            # Nearly every token: the rest would take as long as all else that is asked of it.
            self.table[at] = Role.WORD
            self.table[at + 2] = starts_word
            return
        role, num_digits = _role(text), 0
        if role is Role.DIGITS:
            num_digits = min(len(text), _MOST_DIGITS)
        elif role is Role.WORD and _LEADING_POINT.search(text):
            role, starts_word = Role.POINT, True
        self.table[at : at + 3] = bytes((role, num_digits, starts_word or text[:1].isspace()))


def _role(text: str) -> Role:
    if text in _MARK_ROLES:
        return _MARK_ROLES[text]
    if _DIGIT_RUN.fullmatch(text):
        return Role.DIGITS
    if _ASCII_DIGIT.search(text):
        return Role.WHOLE
    # The replacement character stands for part of a letter.
    return Role.WORD if text and (text[-1].isalnum() or text[-1] in ")]}%.\ufffd") else Role.TEXT


def _text_of_value(value: float) -> str:
    return str(int(value)) if value >= 0 and value == int(value) else f"{value:g}"


class _TokenText:
    """Reads the tokens of one tokenizer as text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.added = tokenizer.added_tokens_decoder.keys()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoding = {"ByteFallback"} if backend is None else _decoder_types(backend.decoder)
        model = None if backend is None else backend.model
        self.is_slow = backend is None
        self.byte_level = "ByteLevel" in decoding
        self.byte_pieces = "ByteFallback" in decoding or getattr(model, "byte_fallback", False)
        continuing = (
            model.continuing_subword_prefix if isinstance(model, models.WordPiece) else None
        )
        self.marks = (*([continuing] if continuing else []), *SPACE_MARKS)

    def byte(self, token: str) -> str | None:
        """The character of a byte piece (`<0x35>` is `5`), None for every other token."""
        if not (self.byte_pieces and token.startswith("<0x")):
            return None
        match = _BYTE_PIECE.fullmatch(token)
        return chr(int(match.group(1), 16)) if match else None

    def split(self, token: str, token_id: int) -> tuple[str, bool]:
        """The text of a token behind its mark, and whether that was a space mark."""
        if self.byte_level and not token.isascii() and token_id not in self.added:
            token = _text_of_byte_level(token)
        mark = ""
        if token.startswith(self.marks):
            mark = next(mark for mark in self.marks if token.startswith(mark))
            token = token[len(mark) :]
        if self.is_slow and not token.isascii():
            # ByT5 names its bytes by the characters of latin-1: its `²` is half a letter.
            token = self.tokenizer.convert_tokens_to_string([token])
        return token, mark in SPACE_MARKS


def _decoder_types(decoder: decoders.Decoder | None) -> set[str]:
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _byte_level_alphabet() -> dict[int, int]:
    # GPT-2's table: visible latin-1 characters stand for themselves, the other bytes, in order,
    # for the characters from 256 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {byte: byte for byte in visible} | {256 + n: byte for n, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _text_of_byte_level(token: str) -> str:
    try:
        raw = bytes(_BYTE_OF_CHARACTER[ord(character)] for character in token)
    except KeyError:
        return token
    return raw.decode("utf-8", errors="replace")


def _read(text: str, kind: NumberKind, largest: float | None) -> float | RefusalReason | None:
    """The value of a token's text, the reason why it is none, or None for what is no number."""
    if _NUMBER.fullmatch(text) is None:
        return _reason_against(text)
    if _DIGIT_RUN.fullmatch(text) is None and kind != "numbers":
        return "sign or decimal point"
    if len(text) > 1 and kind == "digits":
        return "several digits"
    value = float(text) + 0.0  # `-0` is 0.0
    if not abs(value) <= _LARGEST_FLOAT32:
        return "infinite or not a number"
    if largest is not None and abs(value) > largest:
        return "above `largest`"
    return value


def _reason_against(text: str) -> RefusalReason | None:
    bare = text.strip().lstrip("".join(SPACE_MARKS))
    if _BASE_PREFIX.fullmatch(bare):
        return "hexadecimal, octal or binary"
    try:
        value = float(bare)
    except ValueError:
        return "numeral outside ASCII" if bare.isnumeric() else None
    if not bare.isascii():
        return "numeral outside ASCII"
    if _NUMBER.fullmatch(bare):
        return "white space beyond one space mark"
    if "_" in bare:
        return "underscore"
    if math.isfinite(value) or _ASCII_DIGIT.search(bare):
        return "exponent"
    return "infinite or not a number"


def _check_kind_and_largest(kind: NumberKind, largest: float | None) -> None:
    if kind not in get_args(NumberKind):
        raise ValueError(f"`kind` must be one of {', '.join(get_args(NumberKind))}, got {kind!r}.")
    if largest is None:
        return
    if not (math.isfinite(largest) and largest > 0):
        raise ValueError(f"`largest` must be a positive number, or None, got {largest}.")
    if kind == "digits" and largest < 9:
        raise ValueError(
            f"`largest` is {largest:g}, but kind 'digits' has all ten digits or none. Leave "
            f"`largest` out, or choose kind 'integers'."
        )


def _warn_about_large_values(numbers: list[tuple[int, float, str]]) -> None:
    _, value, token = max(numbers, key=lambda number: abs(number[1]))
    if abs(value) <= _UNBOUNDED_WARNING_FROM:
        return
    mean = sum(abs(value) for _, value, _ in numbers) / len(numbers)
    warnings.warn(
        f"The number tokens are unbounded (`largest` is None) and go up to {abs(value):g} "
        f"(token {token!r}). An undecided model then pays a number loss of about {mean:.3g} per "
        f"number, thousands of times the cross entropy, and nothing else is learnt. Set `largest` "
        f"(999, say), or bound the distances of the loss.",
        stacklevel=3,
    )


def _nothing_found(
    tokenizer: "PreTrainedTokenizerBase",
    kind: NumberKind,
    largest: float | None,
    refused: list[RefusedToken],
    marks: tuple[str, ...],
) -> str:
    bound = "" if kind == "digits" or largest is None else f" of at most {largest:g}"
    counts = Counter(entry.reason for entry in refused)
    found = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common()) or "nothing"
    return (
        f"No number token among the {len(tokenizer)} tokens of {tokenizer.name_or_path!r} "
        f"({type(tokenizer).__name__}). Looked for tokens that are, after at most one of the space "
        f"marks {', '.join(map(repr, marks))}, {_MEANING[kind]}{bound} (kind {kind!r}). "
        f"Look-alikes that were refused: {found}. Choose another kind (digits, integers, numbers) "
        f"or a larger `largest`, or take a tokenizer that has single digits; `digit_level: true` "
        f"only helps where the vocabulary has them."
    )
