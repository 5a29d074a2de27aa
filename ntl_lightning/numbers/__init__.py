"""What a number is: in text, and among the tokens of a vocabulary."""

from ntl_lightning.numbers.audit import Audit, audit_tokenizer, render_audit
from ntl_lightning.numbers.codec import NumberCodec
from ntl_lightning.numbers.runs import NumberRuns, Role, label_counts, number_runs
from ntl_lightning.numbers.text import (
    NumberFormat,
    NumberInText,
    find_numbers,
    join_spaced_pieces,
    last_number,
    only_number,
)
from ntl_lightning.numbers.tokenizer import (
    ArithmeticTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    decode_answer,
    decode_answers,
    decodes_with_spaces,
    digit_level_copy,
    num_token_ids,
)
from ntl_lightning.numbers.vocabulary import (
    NumberKind,
    NumberVocabulary,
    RefusalReason,
    RefusedToken,
)

__all__ = [
    "ArithmeticTokenizer",
    "Audit",
    "NumberCodec",
    "NumberFormat",
    "NumberInText",
    "NumberKind",
    "NumberRuns",
    "NumberVocabulary",
    "PretrainedTokenizer",
    "RefusalReason",
    "RefusedToken",
    "Role",
    "Tokenizer",
    "audit_tokenizer",
    "decode_answer",
    "decode_answers",
    "decodes_with_spaces",
    "digit_level_copy",
    "find_numbers",
    "join_spaced_pieces",
    "label_counts",
    "last_number",
    "num_token_ids",
    "number_runs",
    "only_number",
    "render_audit",
]
