"""Load a tokenizer, make it digit-level, or build the small one for arithmetic; read answers back.

Everything here is made of the tokenizers of transformers; a loaded one never gets new ids.
"""

import lzma
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ntl_lightning.numbers.text import join_spaced_pieces
from ntl_lightning.paths import expand_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "ArithmeticTokenizer",
    "PretrainedTokenizer",
    "Tokenizer",
    "decode_answer",
    "decode_answers",
    "decodes_with_spaces",
    "digit_level_copy",
    "num_token_ids",
]

_CONFIG_KEY = "tokenizer.name_or_path"
_PACKED_FILE = "tokenizer.json.xz"
# Texts on which pipelines were seen to differ: leading and double blanks, long digit runs, signs.
_PROBES = (
    " 42",
    "1000000",
    "3.14159",
    "x = 12.34, n=-7",
    "Let's say:  The answer is 1,234.5",
    "a\n\n 1.",
    "½ é",
)


class Tokenizer(ABC):
    """Which tokenizer a model uses: plain values, from which `load` makes the tokenizer."""

    @abstractmethod
    def load(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, with a pad token; every call gives a new one."""


@dataclass(frozen=True)
class PretrainedTokenizer(Tokenizer):
    """A tokenizer of the hub or of a local folder.

    The text is cut as the folder's own `tokenizer.json` says. Where transformers replaces that
    pipeline by the one of the class named in `tokenizer_config.json` and thereby cuts other
    tokens, the file is used and a warning says so. A tokenizer without a pad token pads with its
    end token; neither gets a new id.
    """

    name_or_path: str
    """Hub name, or a folder with tokenizer.json (also tokenizer.json.xz); ~ and ${VAR} work."""
    digit_level: bool = False
    """Cut every number into single digits, without new ids, see `digit_level_copy`."""
    revision: str | None = None
    """Branch, tag or commit on the hub; not for folders."""

    def load(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer.

        Raises:
            FileNotFoundError: If the folder does not exist.
            NotADirectoryError: If the path is a file.
            OSError: If the name cannot be fetched from the hub.
            ValueError: If the folder holds no tokenizer that transformers can load, there is
                neither a pad nor an end token, `digit_level` is asked of a tokenizer that is not
                fast, or `revision` of a folder.
        """
        name = expand_path(self.name_or_path, _CONFIG_KEY)
        folder = Path(name)
        if folder.is_file():
            raise NotADirectoryError(
                f"{_CONFIG_KEY}: {name!r} is a file. Give the folder that it lies in."
            )
        if folder.is_dir():
            tokenizer = self._load_folder(folder)
        elif name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
            raise FileNotFoundError(
                f"{_CONFIG_KEY}: there is no folder {name!r} (looked for {folder.absolute()}). "
                f"Give an existing folder, or a hub name such as 'google-t5/t5-small'."
            )
        else:
            tokenizer = self._load_from_hub(name)
        _pad_with_the_end_token(tokenizer)
        return digit_level_copy(tokenizer) if self.digit_level else tokenizer

    def _load_folder(self, folder: Path) -> "PreTrainedTokenizerBase":
        if self.revision is not None:
            raise ValueError(
                f"tokenizer.revision is {self.revision!r}, but {str(folder)!r} is a local folder, "
                f"which has no revisions. Leave `revision` out."
            )
        if (folder / "tokenizer.json").exists() or not (folder / _PACKED_FILE).exists():
            return _load_unpacked(folder)
        with tempfile.TemporaryDirectory(prefix="ntl_tokenizer_") as unpacked:
            _unpack(folder, Path(unpacked))
            tokenizer = _load_unpacked(Path(unpacked))
        tokenizer.name_or_path = str(folder)
        return tokenizer

    def _load_from_hub(self, name: str) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer
        from transformers.utils.hub import cached_file

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=self.revision)
        except (OSError, ValueError, ImportError) as error:
            raise OSError(
                f"{_CONFIG_KEY}: {name!r} is no folder here (looked for {Path(name).absolute()}), "
                f"and no tokenizer of that name came from the Hugging Face hub or its cache. "
                f"Without network, download it elsewhere and give the path of the folder, e.g. "
                f"/data/t5-small. transformers says: {error}"
            ) from error
        file = cached_file(
            name,
            "tokenizer.json",
            revision=self.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return _with_pipeline_of(file, tokenizer, name, self.revision) if file else tokenizer


def _load_unpacked(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        files = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ValueError(
            f"{_CONFIG_KEY}: no tokenizer could be loaded from the folder {str(folder)!r}, which "
            f"holds {files}. It should hold tokenizer.json and tokenizer_config.json, as written "
            f"by `save_pretrained`. transformers says: {error}"
        ) from error
    file = folder / "tokenizer.json"
    if file.exists():
        return _with_pipeline_of(str(file), tokenizer, str(folder), None)
    _warn_if_not_as_sentencepiece(folder, tokenizer)
    return tokenizer


def _unpack(folder: Path, target: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name != _PACKED_FILE:
            (target / path.name).symlink_to(path.absolute())
    with lzma.open(folder / _PACKED_FILE) as packed, open(target / "tokenizer.json", "wb") as file:
        shutil.copyfileobj(packed, file)


def _with_pipeline_of(
    file: str | os.PathLike[str],
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
    revision: str | None,
) -> "PreTrainedTokenizerBase":
    # transformers 5 gives GPT2Tokenizer, LlamaTokenizer and others the pre-tokenizer of their
    # class, whatever tokenizer.json says: `1000000` becomes `100 00 00` for `100 000 0`.
    from transformers import PreTrainedTokenizerFast

    declared = type(tokenizer)
    if declared is PreTrainedTokenizerFast or not getattr(tokenizer, "is_fast", False):
        return tokenizer
    own = Backend.from_file(os.fspath(file))
    own.no_truncation()
    own.no_padding()
    difference = _first_difference(
        lambda text: own.encode(text, add_special_tokens=False).tokens, tokenizer
    )
    if difference is None:
        return tokenizer
    warnings.warn(
        f"{name!r}: as {declared.__name__}, which its configuration names, transformers does not "
        f"cut as its tokenizer.json says ({difference}). The file is used: it is what models are "
        f"trained with. Write `tokenizer_class: PreTrainedTokenizerFast` in its "
        f"tokenizer_config.json to have this everywhere.",
        stacklevel=4,
    )
    return PreTrainedTokenizerFast.from_pretrained(name, revision=revision or "main")


def _warn_if_not_as_sentencepiece(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    # transformers 5 rebuilds the merges of Llama's tokenizer.model in another order.
    pieces = sorted(folder.glob("*.model"))
    if not pieces:
        return
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        return
    processor = SentencePieceProcessor(model_file=str(pieces[0]))
    difference = _first_difference(lambda text: processor.encode(text, out_type=str), tokenizer)
    if difference is not None:
        warnings.warn(
            f"{str(folder)!r} has no tokenizer.json, and transformers does not cut as its "
            f"{pieces[0].name} does ({difference}). Add the tokenizer.json that belongs to the "
            f"model.",
            stacklevel=4,
        )


def _first_difference(
    cut: Callable[[str], list[str]], tokenizer: "PreTrainedTokenizerBase"
) -> str | None:
    for text in _PROBES:
        expected, got = cut(text), tokenizer.tokenize(text)
        if expected != got:
            return f"{text!r} gives {' '.join(got)} for {' '.join(expected)}"
    return None


def _pad_with_the_end_token(tokenizer: "PreTrainedTokenizerBase") -> None:
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ValueError(
            f"{_CONFIG_KEY}: {tokenizer.name_or_path!r} has neither a pad nor an end token, so "
            f"answers cannot end. Name its `eos_token` in its tokenizer_config.json."
        )
    tokenizer.pad_token = tokenizer.eos_token


@dataclass(frozen=True)
class ArithmeticTokenizer(Tokenizer):
    r"""A character tokenizer for arithmetic that needs no file.

    One token per printable ASCII character and for the newline, plus pad, end and unknown; any
    text of these characters is decoded to itself. Nothing is added around a text. With
    `number_width=3`, each maximal run of exactly three digits is one token (`484`; but `4 7` and
    `1 2 3 4`), so that `000` to `999` are single tokens; see `NumberVocabulary`'s kind `integers`.
    """

    number_width: int | None = None
    """Digit runs of exactly this length (2 to 4) are one token; null: every digit stands alone."""

    def load(self) -> "PreTrainedTokenizerFast":
        """Build the tokenizer.

        Raises:
            ValueError: If `number_width` is not 2, 3, 4 or None.

        >>> tokenizer = ArithmeticTokenizer(number_width=3).load()
        >>> tokenizer.tokenize("47+437=484")
        ['4', '7', '+', '437', '=', '484']
        """
        from transformers import PreTrainedTokenizerFast

        if self.number_width not in (None, 2, 3, 4):
            raise ValueError(
                f"tokenizer.number_width must be 2, 3 or 4, or null for single digits, got "
                f"{self.number_width}."
            )
        # Brackets outside ASCII: no text of printable ASCII can be taken for a special token.
        pad, end, unknown = "⟨pad⟩", "⟨end⟩", "⟨unknown⟩"
        tokens = [pad, end, unknown, "\n", *map(chr, range(0x20, 0x7F))]
        pattern = r"[\s\S]"
        if self.number_width is not None:
            w = self.number_width
            tokens += [f"{value:0{w}d}" for value in range(10**w)]
            pattern = rf"(?<![0-9])[0-9]{{{w}}}(?![0-9])|{pattern}"
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        backend = Backend(models.WordLevel(vocabulary, unk_token=unknown))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=pad,
            eos_token=end,
            unk_token=unknown,
            clean_up_tokenization_spaces=False,
        )


def digit_level_copy(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerFast":
    """A copy of a fast tokenizer that cuts every number into single digits.

    Each ASCII digit becomes a piece of its own *behind* the tokenizer's own pre-tokenizer (before
    it, T5 would put a space mark at every digit). Vocabulary, ids and special tokens stay the same,
    and so do the tokens of everything that is not an ASCII digit. The copy is a
    `PreTrainedTokenizerFast`, because the model-specific classes of transformers 5 forget a changed
    pre-tokenizer when they are saved and loaded; it cuts the same after that.

    Why not `pre_tokenizers.Digits`: it also takes `²`, `½` and the like for digits, and these stand
    for bytes of letters in byte-level tokenizers, so that GPT-2 would cut other tokens in `你好`.

    Args:
        tokenizer: A fast tokenizer; it is left as it is.

    Raises:
        ValueError: If the tokenizer is not fast, or its vocabulary lacks a single digit.
    """
    from transformers import PreTrainedTokenizerFast

    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"Digit level needs a fast tokenizer (one with a tokenizer.json), but "
            f"{tokenizer.name_or_path!r} is a {type(tokenizer).__name__}. Byte and character "
            f"tokenizers are digit-level already: leave `digit_level` out."
        )
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        extra_special_tokens=tokenizer.extra_special_tokens,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=tokenizer.model_input_names,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
    copy.name_or_path = tokenizer.name_or_path
    backend = copy.backend_tokenizer
    digits = pre_tokenizers.Split(Regex("[0-9]"), "isolated")
    own = backend.pre_tokenizer
    backend.pre_tokenizer = digits if own is None else pre_tokenizers.Sequence([own, digits])
    missing = [digit for digit in "0123456789" if not _has_digit(copy, digit)]
    if missing:
        raise ValueError(
            f"{tokenizer.name_or_path!r} cannot be made digit-level: its vocabulary has no token "
            f"for {', '.join(missing)}. Take another tokenizer, or leave `digit_level` out."
        )
    return copy


def _has_digit(tokenizer: "PreTrainedTokenizerFast", digit: str) -> bool:
    token_ids = tokenizer.encode(f"{digit}{digit}", add_special_tokens=False)
    return decode_answer(tokenizer, token_ids).strip() == f"{digit}{digit}"


def decodes_with_spaces(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the decoder puts blanks between the pieces of a number, as BERT's does.

    `12.34` then comes back as `12. 34`; `join_spaced_pieces` undoes this.
    """
    token_ids = cast("list[int]", tokenizer.convert_tokens_to_ids(["1", "2"]))
    if None in token_ids or tokenizer.unk_token_id in token_ids:
        token_ids = tokenizer.encode("12.34", add_special_tokens=False)
    return " " in _decode(tokenizer, token_ids).strip()


def num_token_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The least number of embeddings and logits that hold every token: the largest id plus one.

    More than `len(tokenizer)` where ids are left out.
    """
    return max(tokenizer.get_vocab().values()) + 1


def decode_answer(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """The text of one answer: generated ids, or labels with their -100.

    Ids without a token are left out: negative ones such as the label -100, and those of the
    padding of a model's head beyond the tokenizer. So are special tokens. Blanks that the decoder
    puts between pieces are taken out of numbers.

    Args:
        tokenizer: The tokenizer that made the ids.
        token_ids: Ids of one row.
    """
    return decode_answers(tokenizer, [token_ids])[0]


def decode_answers(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Sequence[int]]
) -> list[str]:
    """The texts of many answers, each as `decode_answer` gives it."""
    kept = [[token_id for token_id in row if token_id >= 0] for row in rows]
    if not tokenizer.is_fast:
        # Fast ones pass over ids without a token; ByT5 would make characters of them.
        size = num_token_ids(tokenizer)
        kept = [[token_id for token_id in row if token_id < size] for row in kept]
    texts = [_decode(tokenizer, row) for row in kept]
    if any(" " in text for text in texts) and decodes_with_spaces(tokenizer):
        return [join_spaced_pieces(text) for text in texts]
    return texts


def _decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast("str", text)
