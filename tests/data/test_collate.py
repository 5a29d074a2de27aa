import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ntl_lightning.data import Collator, Example, encode
from ntl_lightning.evaluation import Generation, generate
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberCodec,
    NumberFormat,
    PretrainedTokenizer,
)


def examples(*pairs):
    return [Example(prompt, target, f"list:{i}") for i, (prompt, target) in enumerate(pairs, 1)]


def rows(table):
    return [{**row, "index": index} for index, row in enumerate(table)]


def row(prompt_ids, target_ids, index):
    return {
        "prompt_ids": prompt_ids,
        "target_ids": target_ids,
        "prompt": f"prompt {index}",
        "target": f"target {index}",
        "index": index,
    }


def words(text, *, unk=None, eos=None, add_eos=False, bos=None):
    """A tokenizer that knows the words of a text, and cuts at blanks."""
    special = [token for token in (unk, bos, eos) if token]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*special, *text.split()]))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = ([bos] if bos else []) + ["$A"] + ([eos] if add_eos else [])
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[(t, vocabulary[t]) for t in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, eos_token=eos, bos_token=bos
    )


# ---- encode


def test_t5_prompts_and_targets_end_with_its_end_token(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    table = encode(examples(("What is 12+3?", "15"), ("5", "5")), tokenizer, "seq2seq", "data.x")
    assert list(table["prompt_ids"]) == [[363, 19, 586, 1220, 519, 58, 1], [305, 1]]
    assert list(table["target_ids"]) == [[627, 1], [305, 1]]
    assert list(table["prompt"]) == ["What is 12+3?", "5"]
    assert list(table["target"]) == ["15", "5"]


def test_gpt2_prompts_have_no_special_token(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/gpt2")).load()
    table = encode(examples(("1+1=", "2")), tokenizer, "causal", "data.x")
    assert list(table["prompt_ids"]) == [[16, 10, 16, 28]]
    assert list(table["target_ids"]) == [[17, 50256]]


def test_a_llama_prompt_keeps_its_start_token_and_the_target_has_none(assets):
    tokenizer = PretrainedTokenizer(str(assets / "models/stories260k")).load()
    table = encode(examples(("Once upon a time", "12")), tokenizer, "causal", "data.x")
    assert list(table["prompt_ids"]) == [[1, 403, 407, 261, 378]]
    assert list(table["target_ids"]) == [[410, 475, 479, 2]]


@pytest.mark.parametrize(("digit_level", "ids"), [(False, [4513]), (True, [16, 17, 18])])
def test_llama3_numbers_are_cut_as_the_tokenizer_says(assets, digit_level, ids):
    folder = str(assets / "tokenizers/llama3")
    tokenizer = PretrainedTokenizer(folder, digit_level=digit_level).load()
    table = encode(examples(("1+1=", "123")), tokenizer, "causal", "data.x")
    assert list(table["target_ids"]) == [[*ids, 128001]]


def test_a_causal_prompt_loses_the_end_token_that_the_tokenizer_adds(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    table = encode(examples(("5", "5")), tokenizer, "causal", "data.x")
    assert list(table["prompt_ids"]) == [[305]]


@pytest.mark.parametrize("bos", [None, "<s>", "</s>"])
@pytest.mark.parametrize("add_eos", [False, True])
def test_a_causal_prompt_keeps_the_end_token_that_is_written_in_it(bos, add_eos):
    tokenizer = words("a b", eos="</s>", bos=bos, add_eos=add_eos)
    pairs = examples(("a </s> b </s>", "b"), ("a", "b"))
    table = encode(pairs, tokenizer, "causal", "data.x")
    a, b, end = tokenizer.convert_tokens_to_ids(["a", "b", "</s>"])
    start = [tokenizer.convert_tokens_to_ids(bos)] if bos else []
    assert list(table["prompt_ids"]) == [[*start, a, end, b, end], [*start, a]]
    assert list(table["target_ids"]) == [[b, end], [b, end]]


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_an_example_without_target_has_no_label(architecture):
    table = encode(
        examples(("1+1=", None), ("2+2=", "4")),
        ArithmeticTokenizer().load(),
        architecture,
        "data.predict",
    )
    assert list(table["target"]) == [None, "4"]
    assert [len(ids) for ids in table["target_ids"]] == [0, 2]


def test_a_set_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"data\.val holds no example; name a source"):
        encode([], ArithmeticTokenizer().load(), "causal", "data.val")


def test_a_tokenizer_without_end_token_is_refused():
    with pytest.raises(ValueError, match=r"model\.tokenizer has no end-of-sequence token"):
        encode(examples(("a", "a")), words("a"), "causal", "data.train")


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_a_prompt_without_tokens_is_refused(architecture):
    message = r"data\.train: the prompt of list:2 has no token \(''\)"
    with pytest.raises(ValueError, match=message):
        encode(
            examples(("1+1=", "2"), ("", "2")),
            ArithmeticTokenizer().load(),
            architecture,
            "data.train",
        )


def test_a_causal_prompt_of_nothing_but_an_added_end_token_is_refused(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    with pytest.raises(ValueError, match=r"the prompt of list:1 has no token"):
        encode(examples(("", "5")), tokenizer, "causal", "data.train")


def test_prompts_that_are_too_long_are_counted_and_nothing_is_cut():
    tokenizer = ArithmeticTokenizer().load()
    pairs = examples(("1+1=", "2"), ("12+1=", "13"), ("123+1=", "124"))
    encode(pairs, tokenizer, "causal", "data.train", max_prompt_tokens=6, max_target_tokens=4)
    message = (
        r"data\.train: 2 of 3 examples are longer than data\.max_prompt_tokens=4 tokens; the first "
        r"is list:2 with 5, the longest has 6\. Nothing is cut"
    )
    with pytest.raises(ValueError, match=message):
        encode(pairs, tokenizer, "causal", "data.train", max_prompt_tokens=4)
    message = r"1 of 3 .* data\.max_target_tokens=3 tokens; the first is list:3 with 4"
    with pytest.raises(ValueError, match=message):
        encode(pairs, tokenizer, "causal", "data.train", max_target_tokens=3)


def test_examples_that_are_too_long_are_left_out_and_counted():
    pairs = examples(("1+1=", "2"), ("12+1=", "13"), ("1+99=", "100"), ("1+3=", "4"))
    with pytest.warns(UserWarning, match=r"2 of 4 examples") as warned:
        table = encode(
            pairs,
            ArithmeticTokenizer().load(),
            "causal",
            "data.train",
            max_prompt_tokens=5,
            max_target_tokens=2,
            too_long="leave_out",
            not_quantities=[re.compile("4")],
        )
    assert list(table["prompt"]) == ["1+1=", "1+3="]
    assert list(table["quantities"]) == [[True, True], [False, True]]
    (message,) = [str(warning.message) for warning in warned]
    assert message == (
        "data.train: 2 of 4 examples are longer than data.max_target_tokens=2 tokens; the first is "
        "list:2 with 3, the longest has 4. They are left out (data.too_long=leave_out)"
    )


def test_a_set_of_which_nothing_would_be_left_is_refused():
    with pytest.raises(ValueError, match=r"2 of 2 .*leave_out would leave nothing; raise"):
        encode(
            examples(("1+1=", "2"), ("2+2=", "4")),
            ArithmeticTokenizer().load(),
            "causal",
            "data.train",
            max_prompt_tokens=3,
            too_long="leave_out",
        )


def cut(tokenizer, architecture, limit, *pairs, **settings):
    return encode(
        examples(*pairs),
        tokenizer,
        architecture,
        "data.train",
        max_prompt_tokens=limit,
        too_long="cut_prompt",
        **settings,
    )


def test_a_prompt_is_cut_on_the_left_and_not_within_a_number():
    tokenizer = ArithmeticTokenizer().load()
    message = (
        r"data\.train: 2 of 3 prompts are cut on the left to data\.max_prompt_tokens=6 tokens; the "
        r"first is that of list:1 with 9, the longest has 10 \(data\.too_long=cut_prompt\)"
    )
    with pytest.warns(UserWarning, match=message):
        table = cut(
            tokenizer, "causal", 6, ("1234+567=", "1801"), ("1+2=", "3"), ("12+3.45+6=", "21.45")
        )
    # Six tokens would begin with the 4 of 1234, and with the 4 of 3.45.
    assert list(table["prompt"]) == ["+567=", "1+2=", "+6="]
    assert list(table["target"]) == ["1801", "3", "21.45"]
    assert list(table["prompt_ids"]) == tokenizer(list(table["prompt"]))["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "limit", "left"),
    [
        ("10-7=", 3, "7="),  # not -7
        ("12 5 300=", 6, " 300="),  # not 5300
        ("9*10.500.7=", 6, "="),  # a version is no number, and neither is its end
        ("8+1_000=", 4, "="),
    ],
)
def test_no_number_of_a_cut_prompt_is_another_one(prompt, limit, left):
    with pytest.warns(UserWarning, match="1 of 1 prompts are cut"):
        table = cut(ArithmeticTokenizer().load(), "causal", limit, (prompt, "3"))
    assert list(table["prompt"]) == [left]


@pytest.mark.parametrize(
    ("name", "architecture"), [("t5", "seq2seq"), ("gpt2", "causal"), ("llama3", "causal")]
)
@given(limit=st.integers(4, 30))
def test_a_cut_prompt_is_the_end_of_its_text_with_the_special_tokens(
    assets, real_tokenizer, name, architecture, limit
):
    tokenizer = real_tokenizer(name)
    text = "A passage of 1,234 words.\n\nQuestion: what is 56.78 more than 3? Answer:"
    if len(tokenizer(text)["input_ids"]) > limit:
        with pytest.warns(UserWarning, match="1 of 1 prompts are cut on the left"):
            table = cut(tokenizer, architecture, limit, (text, "59.78"))
    else:
        table = cut(tokenizer, architecture, limit, (text, "59.78"))
    ((prompt,), (ids,)) = table["prompt"], table["prompt_ids"]
    assert text.endswith(prompt)
    assert ids == tokenizer(prompt)["input_ids"]
    assert 0 < len(ids) <= limit
    numbers = re.findall(r"[0-9][0-9.,]*[0-9]|[0-9]", prompt)
    assert numbers == ["1,234", "56.78", "3"][3 - len(numbers) :]


def test_a_prompt_of_which_nothing_fits_is_refused(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    message = r"no part of the prompt of list:1 fits data\.max_prompt_tokens=1; raise it"
    with pytest.raises(ValueError, match=message):
        cut(tokenizer, "seq2seq", 1, ("one word", "5"))
    with pytest.raises(ValueError, match=message):
        cut(tokenizer, "seq2seq", 1, ("word ", "5"))
    with pytest.raises(ValueError, match=r"no part of the prompt of list:1 fits .*=3; raise it"):
        cut(ArithmeticTokenizer().load(), "causal", 3, ("12345", "5"))


def test_where_prompts_are_cut_targets_are_refused():
    message = r"1 of 1 examples are longer than data\.max_target_tokens=2 .* Nothing is cut: raise"
    with pytest.raises(ValueError, match=message):
        cut(ArithmeticTokenizer().load(), "causal", 9, ("1+99=", "100"), max_target_tokens=2)


def test_a_tokenizer_that_does_not_tell_where_its_tokens_stand_cannot_cut():
    assert len(cut(ByT5Tokenizer(), "seq2seq", 9, ("1+1=", "2"))) == 1
    with pytest.raises(ValueError, match=r"cut_prompt needs a fast tokenizer .* ByT5Tokenizer"):
        cut(ByT5Tokenizer(), "seq2seq", 3, ("1+1=", "2"))


def test_unknown_characters_of_targets_are_counted():
    tokenizer = ArithmeticTokenizer().load()
    pairs = examples(("a", "5"), ("b", "5 €"), ("c", "7 €"))
    message = (
        r"data\.train: 2 of 3 targets hold characters outside the tokenizer's vocabulary, the "
        r"first is list:2: '5 €'\. The model is taught to say ⟨unknown⟩"
    )
    with pytest.warns(UserWarning, match=message):
        table = encode(pairs, tokenizer, "causal", "data.train")
    assert [tokenizer.unk_token_id in ids for ids in table["target_ids"]] == [False, True, True]


def test_unknown_characters_of_prompts_are_counted():
    pairs = examples(("2×3=", "6"), ("2*4=", "8"))
    message = r"data\.val: 1 of 2 prompts .* list:1: '2×3='\. The model sees ⟨unknown⟩ there"
    with pytest.warns(UserWarning, match=message):
        encode(pairs, ArithmeticTokenizer().load(), "causal", "data.val")


def test_prompts_may_all_hold_unknown_characters():
    with pytest.warns(UserWarning, match=r"2 of 2 prompts"):
        encode(examples(("2×3=", "6"), ("2×4=", "8")), ArithmeticTokenizer().load(), "causal", "x")


def test_t5_does_not_know_the_minus_sign_of_mathematics(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5")).load()
    with pytest.warns(UserWarning, match=r"1 of 2 targets .*list:1: '20 \u2212 13 = 7'"):
        encode(examples(("a", "20 \u2212 13 = 7"), ("b", "20 - 13")), tokenizer, "seq2seq", "x")


def test_a_tokenizer_that_knows_no_target_is_refused():
    with pytest.raises(ValueError, match=r"2 of 2 targets .*No target could ever be answered"):
        encode(
            examples(("1", "五"), ("2", "六")), ArithmeticTokenizer().load(), "causal", "data.train"
        )


def test_an_unknown_token_that_is_the_end_token_is_no_unknown_character():
    tokenizer = words("a b", unk="<end>", eos="<end>")
    assert tokenizer.unk_token_id == tokenizer.eos_token_id
    encode(examples(("a", "b")), tokenizer, "causal", "data.train")


# ---- Numbers that are no quantities


def marking(*rows):
    return [Example(p, t, f"list:{i}", spans) for i, (p, t, *spans) in enumerate(rows, 1)]


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_without_marks_there_is_no_column_and_no_entry_in_the_batch(architecture):
    table = encode(examples(("1+1=", "2")), ArithmeticTokenizer().load(), architecture, "x")
    assert "quantities" not in table.column_names
    assert "quantities" not in Collator(architecture, 0)(rows(table))


def test_marks_of_examples_and_of_patterns_are_joined():
    table = encode(
        marking(("a", "3 45 6", (0, 1)), ("b", "45"), ("c", None)),
        ArithmeticTokenizer().load(),
        "causal",
        "data.x",
        not_quantities=[re.compile("45?"), re.compile("5(6)")],
    )
    assert list(table["quantities"]) == [
        [False, True, False, False, True, True, True],
        [False, False, True],
        [],
    ]


def test_one_example_with_a_mark_gives_all_examples_their_column():
    tokenizer = ArithmeticTokenizer().load()
    table = encode(marking(("a", "1"), ("b", "23", (1, 2))), tokenizer, "causal", "data.x")
    assert list(table["quantities"]) == [[True, True], [True, False, True]]


@pytest.mark.parametrize("span", [(1, 1), (-1, 1), (0, 3), (2, 1)])
def test_a_mark_outside_its_target_is_refused(span):
    message = rf"data\.x: not_quantities of list:2 holds \({span[0]}, {span[1]}\), .* '12'; give"
    with pytest.raises(ValueError, match=message):
        encode(
            marking(("a", "1"), ("b", "12", span)), ArithmeticTokenizer().load(), "causal", "data.x"
        )


def test_a_mark_without_a_target_is_refused():
    with pytest.raises(ValueError, match=r"not_quantities of list:1 .* no part of its target None"):
        encode(marking(("a", None, (0, 1))), ArithmeticTokenizer().load(), "causal", "data.x")


def test_a_tokenizer_that_does_not_tell_where_its_tokens_stand_is_refused_only_with_marks():
    message = r"data\.x: not_quantities needs a fast tokenizer .* ByT5Tokenizer\. Take a fast one"
    with pytest.raises(ValueError, match=message):
        encode(marking(("a", "1", (0, 1))), ByT5Tokenizer(), "seq2seq", "data.x")
    with pytest.raises(ValueError, match=message):
        encode(
            examples(("a", "1")),
            ByT5Tokenizer(),
            "seq2seq",
            "data.x",
            not_quantities=[re.compile("1")],
        )
    assert len(encode(examples(("a", "1")), ByT5Tokenizer(), "seq2seq", "data.x")) == 1
    with pytest.raises(ValueError, match=r"or leave data\.codec\.digit_places out"):
        encode(
            examples(("a", "1")),
            ByT5Tokenizer(),
            "seq2seq",
            "data.x",
            codec=NumberCodec(NumberFormat(), digit_places=True),
        )


MARKED_ROWS = [
    {"prompt_ids": [7, 8, 9], "target_ids": [5, 1], "quantities": [False, True], "index": 4},
    {"prompt_ids": [7], "target_ids": [5, 6, 1], "quantities": [True, False, True], "index": 2},
    {"prompt_ids": [7], "target_ids": [5, 1], "quantities": [True, True], "index": -1},
]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("causal", [[0, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]),
        ("seq2seq", [[0, 1, 0], [1, 0, 1], [0, 0, 0]]),
    ],
)
def test_marks_are_in_the_places_of_their_labels(architecture, expected):
    batch = Collator(architecture, 0)(MARKED_ROWS)
    assert batch["quantities"].dtype == torch.bool
    assert batch["quantities"].shape == batch["labels"].shape
    assert batch["quantities"].tolist() == [[bool(c) for c in row] for row in expected]


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_rows_without_target_have_marks_of_their_shape(architecture):
    table = encode(
        examples(("1+1=", None), ("10+10=", None)),
        ArithmeticTokenizer().load(),
        architecture,
        "data.predict",
        not_quantities=[re.compile("1")],
    )
    batch = Collator(architecture, 0, for_evaluation=True)(rows(table))
    assert batch["quantities"].shape == batch["labels"].shape
    assert not batch["quantities"].any()


@given(st.lists(st.text("0123 =", min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_marked_labels_of_a_batch_are_those_of_each_text(texts):
    tokenizer = ArithmeticTokenizer().load()
    pairs = examples(*(("?" * (1 + len(text) % 3), text) for text in texts))
    digits = set(tokenizer.convert_tokens_to_ids(["1", "2"]))
    for architecture in ("causal", "seq2seq"):
        table = encode(pairs, tokenizer, architecture, "x", not_quantities=[re.compile("[12]")])
        batch = Collator(architecture, 0)(rows(table))
        for labels, quantities in zip(batch["labels"].tolist(), batch["quantities"], strict=True):
            expected = [label != -100 and label not in digits for label in labels]
            assert quantities.tolist() == expected


# ---- Collator


def test_the_end_token_is_learned_also_where_it_is_the_padding(assets):
    """Two texts of different length: two supervised end tokens, and no label on padding."""
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/gpt2")).load()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 50256
    table = encode(examples(("1+1=", "2"), ("10+10=", "20 is it")), tokenizer, "causal", "x")
    batch = Collator("causal", 50256)(rows(table))
    assert batch["input_ids"][0].tolist() == [16, 10, 16, 28, 17, 50256, 50256, 50256]
    assert batch["labels"][0].tolist() == [-100, -100, -100, -100, 17, 50256, -100, -100]
    assert (batch["labels"] == 50256).sum() == 2
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_seq2seq_batch_is_padded_on_the_right_and_labels_with_the_ignored_index():
    collate = Collator("seq2seq", 0, for_evaluation=True)
    batch = collate([row([7, 8, 9], [5, 1], 4), row([7], [5, 6, 1], 2)])
    assert batch["input_ids"].tolist() == [[7, 8, 9], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 1, -100], [5, 6, 1]]
    assert batch["prompt_input_ids"].tolist() == [[7, 8, 9], [7, 0, 0]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["prompt"] == ["prompt 4", "prompt 2"]
    assert batch["target"] == ["target 4", "target 2"]
    assert batch["index"] == [4, 2]
    assert "first_label" not in batch
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "labels"))


def test_causal_prompts_for_generation_are_padded_on_the_left():
    collate = Collator("causal", 0, for_evaluation=True)
    batch = collate([row([7, 8, 9], [5, 1], 0), row([7], [6, 1], 1)])
    assert batch["prompt_input_ids"].tolist() == [[7, 8, 9], [0, 0, 7]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["input_ids"].tolist() == [[7, 8, 9, 5, 1], [7, 6, 1, 0, 0]]


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_a_filler_has_no_label(architecture):
    table = encode(
        examples(("1+1=", "2"), ("10+10=", "20")), ArithmeticTokenizer().load(), architecture, "x"
    )
    real, other = rows(table)
    batch = Collator(architecture, 0)([{**real, "index": -1}, other])
    assert (batch["labels"][0] == -100).all()
    kept = batch["labels"][1][batch["labels"][1] != -100]
    assert kept.tolist() == table[1]["target_ids"]
    alone = Collator(architecture, 0)([{**real, "index": -1}])
    assert (alone["labels"] == -100).all()
    assert alone["labels"].shape[1] >= 1


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_rows_without_target_can_be_predicted(architecture):
    table = encode(
        examples(("1+1=", None), ("10+10=", None)),
        ArithmeticTokenizer().load(),
        architecture,
        "data.predict",
    )
    batch = Collator(architecture, 0, for_evaluation=True)(rows(table))
    assert batch["target"] == [None, None]
    assert (batch["labels"] == -100).all()
    assert batch["prompt_attention_mask"].sum(1).tolist() == [4, 6]


id_lists = st.lists(st.integers(3, 99), min_size=1, max_size=6)
pairs_of_ids = st.lists(
    st.tuples(id_lists, st.lists(st.integers(3, 99), max_size=4).map(lambda ids: [*ids, 1])),
    min_size=1,
    max_size=5,
)


@given(pairs_of_ids, st.sampled_from([0, 1]))
def test_every_token_of_a_causal_batch_is_where_it_belongs(pairs, pad_id):
    batch = Collator("causal", pad_id)(
        [{"prompt_ids": p, "target_ids": t, "index": i} for i, (p, t) in enumerate(pairs)]
    )
    firsts = []
    for (prompt, target), ids, mask, labels in zip(
        pairs, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        length = int(mask.sum())
        assert ids[:length].tolist() == prompt + target
        assert ids[length:].tolist() == [pad_id] * (len(ids) - length)
        assert labels[labels != -100].tolist() == target
        firsts.append(int((labels != -100).nonzero()[0]))
        assert firsts[-1] == len(prompt)
    assert batch["first_label"] == min(firsts)


def test_a_collator_can_be_sent_to_another_process():
    collator = Collator("causal", 0, for_evaluation=True)
    assert pickle.loads(pickle.dumps(collator)) == collator


# ---- Together with a model that has absolute positions


@pytest.fixture(scope="module")
def tiny_gpt2():
    torch.manual_seed(0)
    tokenizer = ArithmeticTokenizer().load()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=40,
        initializer_range=0.5,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config).eval(), tokenizer


PROMPTS = ("1+2=", "12+345=a?")


def test_logits_in_a_training_batch_are_those_of_each_text_alone(tiny_gpt2):
    model, tokenizer = tiny_gpt2
    table = encode(examples(*((p, "7") for p in PROMPTS)), tokenizer, "causal", "x")
    batch = Collator("causal", tokenizer.pad_token_id)(rows(table))
    with torch.no_grad():
        together = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        for prompt, logits in zip(PROMPTS, together, strict=True):
            ids = [*tokenizer(prompt)["input_ids"], *tokenizer("7")["input_ids"]]
            ids.append(tokenizer.eos_token_id)
            alone = model(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(logits[: len(ids)], alone, rtol=1e-5, atol=1e-5)


def test_greedy_answers_in_a_batch_are_those_of_each_prompt_alone(tiny_gpt2):
    model, tokenizer = tiny_gpt2
    assert [len(tokenizer(p)["input_ids"]) for p in PROMPTS] == [4, 9]
    table = encode(examples(*((p, None) for p in PROMPTS)), tokenizer, "causal", "x")
    batch = Collator("causal", tokenizer.pad_token_id, for_evaluation=True)(rows(table))
    answers, _ = generate(
        model,
        tokenizer,
        batch["prompt_input_ids"],
        batch["prompt_attention_mask"],
        Generation(),
        max_new_tokens=12,
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, expected = tokenizer(prompt)["input_ids"], []
        while len(expected) < 12 and tokenizer.eos_token_id not in expected:
            with torch.no_grad():
                logits = model(torch.tensor([ids + expected])).logits
            expected.append(int(logits[0, -1].argmax()))
        assert answer == expected
    assert len({token for answer in answers for token in answer}) > 3


# ---- Packed rows


PACKED_ROWS = [
    {"prompt_ids": [7, 8], "target_ids": [5, 1], "quantities": [False, True], "index": 3},
    {"prompt_ids": [9], "target_ids": [6, 1], "quantities": [True, True], "index": 0},
    {"prompt_ids": [7, 7, 7], "target_ids": [1], "quantities": [True], "index": 1},
]


def test_packed_examples_stand_in_a_row_each_with_positions_of_its_own():
    batch = Collator("causal", 0, row_length=8)(PACKED_ROWS)
    assert batch["input_ids"].tolist() == [[7, 8, 5, 1, 9, 6, 1], [7, 7, 7, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, -100, 5, 1, -100, 6, 1],
        [-100, -100, -100, 1, -100, -100, -100],
    ]
    assert batch["quantities"].tolist() == [
        [False, False, False, True, False, True, True],
        [False, False, False, True, False, False, False],
    ]
    assert batch["first_label"] == 2
    assert batch["num_positions"] == 4
    # Transformers keeps packed examples apart only without a mask.
    assert "attention_mask" not in batch


packed_examples = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=12)


@given(packed_examples, st.integers(8, 30), st.sampled_from([1, 4, 8]))
def test_unpacked_again_a_packed_batch_holds_every_example_whole(sizes, row_length, multiple):
    """Read back by positions alone: an example begins where they do not go on."""
    rows = [
        row([100 + i] * num_prompt, [200 + i] * num_target, i)
        for i, (num_prompt, num_target) in enumerate(sizes)
    ]
    collate = Collator("causal", 0, pad_to_multiple_of=multiple, row_length=row_length)
    batch = collate(rows)
    found = []
    assert batch["input_ids"].shape[1] % multiple == 0
    assert batch["input_ids"].shape[1] < row_length + multiple
    for ids, positions, labels in zip(
        *(batch[name].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True
    ):
        for token, position, label in zip(ids, positions, labels, strict=True):
            if position == 0:
                found.append([])
                # Whatever begins an example is predicted by none before it.
                assert label == -100
            assert position == len(found[-1])
            found[-1].append(token)
            assert label in (-100, token)
            assert position == 0 or (label != -100) == (token >= 200)
    padding = [piece for piece in found if piece == [0]]
    examples = [piece for piece in found if piece != [0]]
    assert examples == [[*r["prompt_ids"], *r["target_ids"]] for r in rows]
    assert sum(map(len, found)) == batch["input_ids"].numel()
    assert len(padding) == batch["input_ids"].numel() - sum(map(len, examples))
    assert batch["num_positions"] == max(map(len, examples))
    columns = (batch["labels"] != -100).any(0).nonzero()
    assert not len(columns) or batch["first_label"] <= columns[0]


def test_a_packed_row_begins_where_the_next_example_has_no_room():
    lengths = [4, 4, 1, 8, 3]
    rows = [row([1] * (n - 1), [2], i) for i, n in enumerate(lengths)]
    batch = Collator("causal", 0, row_length=8)(rows)
    starts = [(ids == 0).nonzero().flatten().tolist() for ids in batch["position_ids"]]
    assert starts == [[0, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0], [0, 3, 4, 5, 6, 7]]


def test_a_packed_filler_has_no_label():
    batch = Collator("causal", 0, row_length=8)([PACKED_ROWS[0] | {"index": -1}])
    assert batch["input_ids"].tolist() == [[7, 8]]
    assert batch["labels"].tolist() == [[-100, -100]]


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="only training batches of causal models can be packed"):
        Collator("seq2seq", 0, row_length=8)
    with pytest.raises(ValueError, match="only training batches of causal models can be packed"):
        Collator("causal", 0, for_evaluation=True, row_length=8)
    with pytest.raises(ValueError, match="an example of 4 tokens is longer than the 3 of a packed"):
        Collator("causal", 0, row_length=3)(PACKED_ROWS)


# ---- Padding to a multiple


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_lengths_are_padded_to_a_multiple_and_mean_the_same(architecture):
    rows = [r | {"prompt": "", "target": ""} for r in PACKED_ROWS]
    plain = Collator(architecture, 0, for_evaluation=True)(rows)
    padded = Collator(architecture, 0, for_evaluation=True, pad_to_multiple_of=8)(rows)
    nothing = {"input_ids": 0, "attention_mask": 0, "labels": -100, "quantities": False}
    for name, value in nothing.items():
        width = plain[name].shape[1]
        assert padded[name].shape[1] == 8 > width
        assert torch.equal(padded[name][:, :width], plain[name])
        assert (padded[name][:, width:] == value).all()
    for name in ("prompt_input_ids", "prompt_attention_mask"):
        assert torch.equal(padded[name], plain[name])
    assert padded.get("first_label") == plain.get("first_label")
