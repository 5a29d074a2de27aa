"""Which parts of a target are no quantities, and which tokens hold them."""

import functools
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ntl_lightning.cli import NumberCLI
from ntl_lightning.data import Example, encode
from ntl_lightning.data.quantities import compile_patterns, matched_spans, quantity_tokens
from ntl_lightning.numbers import ArithmeticTokenizer
from ntl_lightning.numbers.tokenizer import digit_level_copy
from tests.conftest import ROOT

REAL = ["t5", "gpt2", "llama3", "qwen3", "bert", "llama2", "mistral_v3"]


# ---- Patterns


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"\d+", "7 and 12", ["7", "12"]),
        (r"id (\d+)", "id 7, 8, id 12", ["7", "12"]),
        (r"(\d+):(\d+)", "at 12:30", ["12", "30"]),
        (r"id (?:\d+)", "id 7", ["id 7"]),
        (r"id (\d+)|no (\d+)", "no 3, id 5", ["3", "5"]),
        (r"(?=(\d\d))", "123", ["12", "23"]),
        (r"(\d*)x", "x 4x", ["4"]),
        (r"(?i)ID (\d)", "Id 4", ["4"]),
        (r"((\d)\d)", "12", ["12", "1"]),
        (r"y*", "xx", []),
        (r"id (\d+)", "none", []),
    ],
)
def test_a_pattern_finds_its_groups_or_all_that_it_matches(pattern, text, found):
    assert [text[a:b] for a, b in matched_spans(re.compile(pattern), text)] == found


def test_a_fault_in_a_pattern_is_named_with_its_key_and_place():
    message = r"data\.x\[1\]: 'id \(' is no regular expression: missing \), .* at position 3\."
    with pytest.raises(ValueError, match=message):
        compile_patterns(["fine", "id ("], "data.x")
    with pytest.raises(ValueError, match=r"data\.x\[0\]: 'a\{9{30}\}' .* too large"):
        compile_patterns(["a{" + "9" * 30 + "}"], "data.x")


def test_a_pattern_outside_a_list_is_refused():
    with pytest.raises(ValueError, match=r"data\.x must be a list .* got 'id' alone"):
        compile_patterns("id", "data.x")


# ---- Tokens by their characters


@pytest.mark.parametrize(
    ("spans", "counts"),
    [
        ([], [True, True, True, True]),
        ([(0, 2)], [False, True, True, True]),
        ([(2, 3)], [True, True, True, True]),  # nothing but the blank
        ([(0, 3)], [False, True, True, True]),  # the second token begins with the blank
        ([(4, 5)], [True, False, True, True]),  # a part of a token
        ([(5, 7)], [True, False, False, True]),  # parts of two
        ([(0, 1), (0, 2), (1, 2)], [False, True, True, True]),
        ([(0, 2), (1, 9)], [False, False, False, False]),
    ],
)
def test_a_token_counts_unless_it_shares_a_character_with_a_span(spans, counts):
    text, offsets = "17 345678", [(0, 2), (2, 6), (6, 8), (8, 9)]
    assert quantity_tokens(text, offsets, spans) == counts


def test_a_space_mark_alone_is_in_no_span():
    assert quantity_tokens("a 1", [(0, 1), (1, 2), (2, 2), (2, 3)], [(0, 3)]) == [
        False,
        True,
        True,
        False,
    ]


# ---- Tokens of real tokenizers


@pytest.fixture(scope="module")
def ready(real_tokenizer):
    """Name and digit level to a tokenizer that has an end token."""

    @functools.cache
    def load(name, digit_level):
        if name == "arithmetic":
            return ArithmeticTokenizer(number_width=None if digit_level else 3).load()
        tokenizer = real_tokenizer(name)
        if digit_level:
            tokenizer = digit_level_copy(tokenizer)
        if tokenizer.eos_token is None:
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]", eos_token="[SEP]"
            )
        return tokenizer

    return load


pytestmark = pytest.mark.filterwarnings("ignore:.*not what they were when they come back")

every_tokenizer = pytest.mark.parametrize(
    ("name", "digit_level"), list(itertools.product([*REAL, "arithmetic"], [False, True]))
)


def encoded(tokenizer, text, spans=(), patterns=()):
    """Tokens of a target without its end, and whether each counts."""
    examples = [Example("1", text, "list:1", tuple(spans)), Example("1", "1", "list:2")]
    row, _ = encode(
        examples,
        tokenizer,
        "causal",
        "data.x",
        not_quantities=compile_patterns(patterns, "data.x"),
        # BERT's decoder joins digits that blanks keep apart in the text.
        changed_numbers="count",
    )
    assert row["target_ids"][-1] == tokenizer.eos_token_id
    assert len(row["quantities"]) == len(row["target_ids"])
    return tokenizer.convert_ids_to_tokens(row["target_ids"])[:-1], row["quantities"][:-1]


def digits_of(tokens, counts, wanted):
    """The ASCII digits of the tokens that count, or of those that do not."""
    text = "".join(t for t, c in zip(tokens, counts, strict=True) if c is wanted)
    return re.sub(r"[^0-9]", "", re.sub(r"<0x..>", "", text))


TEXTS = [
    ("id 17 has 345.6, id 2024 has 8", "172024", "34568"),
    ("id 17", "17", ""),
    ("id 17id 18 19", "1718", "19"),
    ("9 8\nid 7\n\n6", "7", "986"),
    ("  1  id   id 1234567 1234567", "1234567", "11234567"),
]


@pytest.mark.parametrize(("text", "marked", "others"), TEXTS)
@every_tokenizer
def test_the_digits_behind_a_word_are_marked_and_no_others(
    ready, name, digit_level, text, marked, others
):
    tokens, counts = encoded(ready(name, digit_level), text, patterns=[r"id +(\d+)"])
    assert digits_of(tokens, counts, False) == marked
    assert digits_of(tokens, counts, True) == others


@pytest.mark.filterwarnings("ignore:data.x. 1 of 2 targets hold characters outside")
@pytest.mark.parametrize(
    "before", ["caf\u00e9 \U0001f600\U0001f600 \u2212", "\u00df\ufb01\u0130e\u0301\t\u00a0"]
)
@pytest.mark.parametrize("digit_level", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_characters_of_several_bytes_and_those_that_are_rewritten_move_no_mark(
    ready, name, digit_level, before
):
    text = f"{before} id 42 und 43"
    tokens, counts = encoded(ready(name, digit_level), text, patterns=[r"id (\d+)"])
    assert digits_of(tokens, counts, False) == "42"
    assert digits_of(tokens, counts, True) == "43"


def bare(token):
    """The characters of a token in a text of ASCII, without white space."""
    marks = {"\u2581": "", "\u0120": "", "\u010a": "", "<0x0A>": ""}
    for mark, text in marks.items():
        token = token.replace(mark, text)
    return re.sub(r"\s", "", token.removeprefix("##"))


# All of these are in every vocabulary, and no token of BERT begins with `##` but its pieces.
ascii_texts = st.text("ab 0123456789 0123456789 .,-+:\n", min_size=1, max_size=25).filter(str.strip)
ranges = st.lists(st.tuples(st.integers(0, 24), st.integers(1, 6)), max_size=4)


@settings(max_examples=25)
@given(ascii_texts, ranges)
@every_tokenizer
def test_tokens_are_found_in_the_text_as_they_are_when_it_is_read_along(
    ready, name, digit_level, text, ranges
):
    """Independently of offsets: the tokens spell the text, white space aside."""
    spans = [(a, min(a + n, len(text))) for a, n in ranges if a < len(text)]
    tokens, counts = encoded(ready(name, digit_level), text, spans, patterns=["$unmatched"])
    places = iter([i for i, character in enumerate(text) if not character.isspace()])
    for token, count in zip(tokens, counts, strict=True):
        own = [next(places) for _ in bare(token)]
        assert "".join(text[i] for i in own) == bare(token)
        if own:
            assert count is not any(a <= i < b for i in own for a, b in spans)
    assert next(places, None) is None


def test_a_token_of_several_digits_is_marked_as_a_whole(ready):
    for digit_level, expected in ((False, ["345"]), (True, ["3"])):
        tokens, counts = encoded(ready("gpt2", digit_level), "345-05", [(0, 1)])
        assert [t for t, c in zip(tokens, counts, strict=True) if not c] == expected


def test_a_token_across_the_end_of_a_span_is_marked(ready):
    tokens, counts = encoded(ready("llama3", False), "12345", [(0, 4)])
    assert (tokens, counts) == (["123", "45"], [False, False])
    tokens, counts = encoded(ready("llama3", True), "12345", [(0, 4)])
    assert counts == [False, False, False, False, True]


# ---- The documentation

PAGE = (ROOT / "docs" / "quantities.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.filterwarnings("ignore:NaN, because they are not defined")
@pytest.mark.parametrize(
    ("block", "marked"),
    list(zip(blocks("yaml"), [{"17", "204"}, {"2024051717", "20240517204"}], strict=True)),
)
def test_the_configurations_of_the_page_run(block, marked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (rows,) = blocks("json")
    Path("rooms.jsonl").write_text(rows, encoding="utf-8")
    Path("rooms.yaml").write_text(block, encoding="utf-8")
    command = ["fit", "--config", "rooms.yaml", "--trainer.accelerator", "cpu"]
    data = NumberCLI([*command, "--trainer.fast_dev_run", "1"]).datamodule
    (batch,) = data.train_dataloader()
    digits = set(data.tokenizer.convert_tokens_to_ids(list("0123456789")))
    assert {
        "".join(
            data.tokenizer.decode([token])
            for token, counts in zip(labels, quantities, strict=True)
            if token in digits and not counts
        )
        for labels, quantities in zip(
            batch["labels"].tolist(), batch["quantities"].tolist(), strict=True
        )
    } == marked
    assert batch["step_totals"]["numbers"] == len("165") + len("230")


def test_the_example_of_the_page_marks_the_room():
    (block,) = blocks("python")
    namespace = {}
    exec(block.replace("\nExample(", "\nexample = Example("), namespace)
    example = namespace["example"]
    assert [example.target[a:b] for a, b in example.not_quantities] == ["17"]


@pytest.mark.parametrize("pattern", re.findall(r"`(\([^`]*\)[^`]*)`", PAGE))
def test_the_expressions_of_the_page_mark_what_they_are_said_to(pattern):
    found = {
        r"(\d{4})-(\d\d)-(\d\d)": ["2024", "05", "17"],
        r"(\d,)+": ["6,"],
        r"((?:\d,)+)": ["4,5,6,"],
    }[pattern]
    text = "2024-05-17, 4,5,6,"
    assert [text[a:b] for a, b in matched_spans(re.compile(pattern), text)][-len(found) :] == found
