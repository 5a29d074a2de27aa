import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from ntl_lightning.data import GSM8K, Csv, Example, encode
from ntl_lightning.data.written import check_are_finite, gold_numbers, written
from ntl_lightning.numbers import (
    ArithmeticTokenizer,
    NumberCodec,
    NumberFormat,
    PretrainedTokenizer,
)

QUICK = ["bert", "gpt2", "llama2", "t5"]
# Large vocabularies, which take seconds to load.
OTHERS = ["gemma3", "gptoss_o200k", "granite3", "llama3", "mistral_v3", "phi3", "qwen3", "smollm2"]
TWO_DECIMALS = NumberCodec(NumberFormat(decimals=2))


def examples(*targets):
    return [Example(f"{i}:", text, f"data.csv:{i}") for i, text in enumerate(targets, 2)]


def tables(targets, tokenizer=None, **settings):
    tokenizer = tokenizer or ArithmeticTokenizer().load()
    return encode(examples(*targets), tokenizer, "causal", "data.train", **settings)


@pytest.fixture
def says(monkeypatch):
    """What is reported, as a list."""
    said = []
    monkeypatch.setattr("ntl_lightning.data.written.rank_zero_info", said.append)
    return said


# ---- what a codec takes


@pytest.mark.parametrize("bad", ["12 kg", "1 or 2", "50%", "nan", "inf", "seven", "", "1.2.3"])
def test_a_codec_takes_one_number_and_nothing_else(bad):
    with pytest.raises(ValueError, match=r"data.train: data.codec .* 1 of 3 are not.*data.csv:3"):
        tables(["1", bad, "3"], codec=TWO_DECIMALS)


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_golds_are_exact(value):
    assert gold_numbers(examples(f"{value:f}"), "data.x") == [value]


def test_a_target_that_is_not_known_stays_so():
    (known, unknown) = written(examples("1.234", None), TWO_DECIMALS, "data.predict")
    assert (known.target, unknown.target) == ("1.23", None)


@pytest.mark.parametrize(
    ("codec", "target", "reason"),
    [
        (NumberCodec(NumberFormat(decimals=2), "log10"), "-3", "-3 has no logarithm"),
        (NumberCodec(NumberFormat(width=2)), "484", "more than the width 2"),
    ],
)
def test_a_value_that_cannot_be_written_is_named(codec, target, reason):
    with pytest.raises(ValueError, match=rf"data.csv:3, written by data.codec: .*{reason}"):
        tables(["1", target], codec=codec)


@pytest.mark.parametrize("target", ["1.7976931348623157e308", "-1e400", "1e400"])
def test_a_value_that_no_answer_could_stand_for_is_refused_or_counted(target):
    codec = NumberCodec(NumberFormat(decimals=1), "signed_log10")
    with pytest.raises(
        ValueError, match=r"data.train: 1 of 2 targets are too large .* the first is data.csv:3: "
    ):
        tables(["5", target], codec=codec)
    with pytest.warns(UserWarning, match=r"1 of 2 targets are too large .* count as invalid"):
        table = tables(["5", target], codec=codec, changed_numbers="count")
    assert list(table["target"]) == ["5", target]


def test_marks_in_a_target_that_is_written_anew_are_refused():
    marked = Example("p", "17", "data.csv:2", ((0, 1),))
    with pytest.raises(ValueError, match=r"nothing that not_quantities could mark.*data.csv:2"):
        written([marked], TWO_DECIMALS, "data.train")


def test_labels_are_written_and_targets_stay_as_they_are():
    table = tables(["1000", "0.1", "20"], codec=NumberCodec(NumberFormat(decimals=3), "log10"))
    assert list(table["target"]) == ["1000", "0.1", "20"]
    tokenizer = ArithmeticTokenizer().load()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in table["target_ids"]]
    assert texts == ["3.000", "-1.000", "1.301"]


def test_the_limit_is_that_of_what_is_written():
    with pytest.raises(ValueError, match=r"max_target_tokens=4 tokens; the first is data.csv:2"):
        tables(["7"], codec=TWO_DECIMALS, max_target_tokens=4)
    tables(["7.123456"], codec=TWO_DECIMALS, max_target_tokens=5)


def test_the_places_of_digits_are_no_quantities():
    codec = NumberCodec(NumberFormat(decimals=1), digit_places=True)
    (row,) = tables(["12.5"], codec=codec)
    assert len(row["target_ids"]) == len("_1_1__2_0__5_-1_") + 1
    marked = [i for i, is_quantity in enumerate(row["quantities"]) if not is_quantity]
    assert marked == [3, 8, 13, 14]


# ---- what the number format rounds away


def test_rounding_is_counted_with_the_largest_errors(says):
    tables(["1.25", "100.004", "7", "0.01"], codec=TWO_DECIMALS)
    assert says == [
        "data.train: data.codec rounds 1 of 4 targets, by at most 0.004 (absolute; data.csv:3: "
        "100.004 is written 100.00) and 4e-05 (relative; data.csv:3: 100.004 is written 100.00)."
    ]
    says.clear()
    tables(["1250", "0.04", "1e-9"], codec=NumberCodec(NumberFormat(decimals=1)))
    (said,) = says
    assert "rounds 2 of 3 targets, by at most 0.04 (absolute; data.csv:3" in said
    assert "and 1 (relative; data.csv:3" in said


def test_nothing_is_said_where_nothing_is_rounded(says):
    tables(["1.25", "3"], codec=TWO_DECIMALS)
    assert says == []


# ---- what a tokenizer loses


def forgetful(what):
    """A tokenizer that never sees some characters."""
    tokenizer = ArithmeticTokenizer().load()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(what), "")
    return tokenizer


def test_a_number_that_the_tokenizer_changes_is_refused_with_its_origin():
    with pytest.raises(
        ValueError,
        match=r"data.train: the numbers of 1 of 3 targets .* data.csv:3: 'it is -5' is decoded to "
        r"'it is 5', and -5 has become 5.*data.changed_numbers: count",
    ):
        tables(["it is 5", "it is -5", "7"], forgetful("-"))


def test_a_number_that_the_tokenizer_loses_is_refused():
    with pytest.raises(ValueError, match="and 7 has become None"):
        tables(["is 7"], forgetful("7"))


def test_numbers_that_are_changed_can_be_counted():
    with pytest.warns(UserWarning, match=r"the numbers of 2 of 3 targets .* count as wrong"):
        table = tables(["-5", "-5", "7"], forgetful("-"), changed_numbers="count")
    assert list(table["target"]) == ["-5", "-5", "7"]


def test_only_the_number_that_is_scored_must_survive():
    tables(["-5 and 3", "no number-"], forgetful("-"))


def test_what_a_codec_wrote_must_survive_too():
    codec = NumberCodec(NumberFormat(decimals=2), "log10")
    with pytest.raises(ValueError, match=r"'-1.00' is decoded to '1.00'"):
        tables(["10", "0.1"], forgetful("-"), codec=codec)
    with pytest.raises(ValueError, match=r"12 has become None"):
        tables(["12"], forgetful("_"), codec=NumberCodec(NumberFormat(), digit_places=True))


def test_long_targets_are_shortened_to_their_end():
    with pytest.raises(ValueError, match=r"'\.\.\.a{50,54} -5' is decoded to"):
        tables(["a" * 500 + " -5"], forgetful("-"))


# ---- real tokenizers and real data


def tokenizer_of(folder, digit_level):
    return PretrainedTokenizer(str(folder), digit_level=digit_level).load()


@pytest.mark.parametrize("digit_level", [False, True])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
@pytest.mark.filterwarnings("ignore:.*outside the tokenizer's vocabulary")
@pytest.mark.filterwarnings("ignore:.*transformers does not cut as its tokenizer.json says")
def test_no_real_tokenizer_changes_a_number_of_real_data(
    assets, real_tokenizer_folder, name, digit_level
):
    tokenizer = tokenizer_of(real_tokenizer_folder(name), digit_level)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token or tokenizer.pad_token
    esol = Csv(
        str(assets / "data/esol/delaney-processed.csv"),
        prompt="smiles",
        target="measured log solubility in mols per litre",
    ).examples()
    gsm8k = str(assets / "data/gsm8k/test.jsonl")
    reasoning = GSM8K(gsm8k, max_examples=200).examples()
    answers = GSM8K(gsm8k, target="answer").examples()
    for name, rows in (("esol", esol), ("reasoning", reasoning), ("answers", answers)):
        encode(rows, tokenizer, "causal", f"data.{name}")
    for codec in (
        NumberCodec(NumberFormat(decimals=2, width=2, plus_sign=True)),
        NumberCodec(NumberFormat(significant_digits=3, scientific=True)),
        NumberCodec(NumberFormat(decimals=3), "signed_log10"),
        NumberCodec(NumberFormat(decimals=1), percent=True),
        NumberCodec(NumberFormat(decimals=2), digit_places=True),
    ):
        encode(esol[:200], tokenizer, "causal", "data.esol", codec=codec)


@pytest.mark.slow
@pytest.mark.parametrize("digit_level", [False, True])
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
@pytest.mark.filterwarnings("ignore:.*outside the tokenizer's vocabulary")
@pytest.mark.filterwarnings("ignore:.*transformers does not cut as its tokenizer.json says")
def test_no_real_tokenizer_changes_an_answer_of_gsm8k(
    assets, real_tokenizer_folder, name, digit_level
):
    tokenizer = tokenizer_of(real_tokenizer_folder(name), digit_level)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token or tokenizer.pad_token
    for file in ("train", "test"):
        rows = GSM8K(str(assets / f"data/gsm8k/{file}.jsonl")).examples()
        encode(rows, tokenizer, "causal", f"data.{file}")


# ---- NaN and infinity


@pytest.mark.parametrize("bad", ["nan", "NaN", " -inf", "Infinity", "+INF"])
def test_what_is_not_finite_is_refused_among_numbers(bad):
    with pytest.raises(ValueError, match=r"data.x: 1 of 3 targets .* data.csv:3: "):
        check_are_finite(examples("1", bad, "2.5"), "data.x")


def test_a_word_among_words_may_look_like_one():
    check_are_finite(examples("aunt", "Nan", "7"), "data.x")
    check_are_finite(examples("1", None, "2"), "data.x")


def test_a_set_of_nothing_else_is_refused():
    with pytest.raises(ValueError, match="2 of 2 targets"):
        check_are_finite(examples("nan", "inf"), "data.x")
