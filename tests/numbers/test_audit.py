import json
import re

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from ntl_lightning.numbers.audit import audit_tokenizer, render_audit
from ntl_lightning.numbers.tokenizer import ArithmeticTokenizer, digit_level_copy


@pytest.fixture
def text_file(tmp_path):
    def write(content):
        path = tmp_path / "numbers.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def word_level(tokens):
    """Tokens are single words; `1` and `22` are words, `333` is unknown unless it is listed."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=tokens[0])


def tokens_of_samples(audit):
    return {sample["text"]: sample["tokens"] for sample in audit["samples"]}


def number_tokens_of_samples(audit):
    return {
        sample["text"]: [
            token
            for token, is_number in zip(sample["tokens"], sample["is_number"], strict=True)
            if is_number
        ]
        for sample in audit["samples"]
    }


class TestVocabularyPart:
    def test_t5(self, real_tokenizer):
        audit = audit_tokenizer(real_tokenizer("t5"), width=32128)
        assert audit["num_number_tokens"] == 19
        assert audit["values"] == list(range(10))
        assert audit["tokenizer_length"] == 32100
        assert audit["logits_width"] == 32128
        assert audit["forms"] == {"bare": 10, "space mark": 9, "continuation": 0}
        assert {"id": 305, "token": "▁5", "value": 5.0} in audit["tokens"]
        assert {"value": 5.0, "tokens": ["▁5", "5"]} in audit["duplicates"]
        assert len(audit["duplicates"]) == 9  # there is no ▁0
        assert audit["refused_counts"] == {
            "several digits": 510,
            "sign or decimal point": 175,
            "infinite or not a number": 1,
        }
        assert {
            "token_id": 15206,
            "token": "▁Nan",
            "reason": "infinite or not a number",
        } in audit["refused"]

    def test_bert_has_continuations(self, real_tokenizer):
        audit = audit_tokenizer(real_tokenizer("bert"))
        assert audit["forms"] == {"bare": 10, "space mark": 0, "continuation": 10}

    def test_unreached_tokens_are_those_with_a_digit_that_are_no_numbers(self):
        audit = audit_tokenizer(word_level(["<u>", "1", "22", "a3", "b", "٣"]))
        assert audit["unreached"] == [
            {"token_id": 2, "token": "22"},
            {"token_id": 3, "token": "a3"},
        ]

    def test_it_can_be_written_as_json_and_read_back(self, real_tokenizer, text_file):
        audit = audit_tokenizer(
            real_tokenizer("t5"), kind="numbers", largest=50, text=text_file("12 and 100")
        )
        assert json.loads(json.dumps(audit)) == audit

    @pytest.mark.parametrize(
        ("name", "cut"),
        [
            ("t5", "▁1, 2 34"),
            ("gpt2", "1 , 234"),
            ("llama2", "▁ 1 , 2 3 4"),
            ("bert", "1 , 234"),
        ],
    )
    def test_samples_are_cut_as_the_files_say(self, name, cut, real_tokenizer):
        audit = audit_tokenizer(real_tokenizer(name))
        assert tokens_of_samples(audit)["1,234"] == cut.split()

    def test_number_tokens_of_the_samples_are_marked(self, real_tokenizer):
        marked = number_tokens_of_samples(audit_tokenizer(real_tokenizer("t5")))
        assert marked["1,234"] == ["2"]
        assert marked["1000000"] == []
        assert marked["½"] == ["▁1", "2"]
        marked = number_tokens_of_samples(audit_tokenizer(digit_level_copy(real_tokenizer("t5"))))
        assert marked["1000000"] == list("1000000")


class TestTextPart:
    def test_numbers_are_reached_in_all_some_or_none_of_their_digits(
        self, real_tokenizer, text_file
    ):
        # T5 cuts: ▁5 | ▁12 | ▁1, 2 34
        text = audit_tokenizer(real_tokenizer("t5"), text=text_file("5\n12\n1,234\n"))["text"]
        assert text["num_numbers"] == 3
        assert text["num_all_digits"] == 1
        assert text["num_some_digits"] == 1
        assert text["num_no_digits"] == 1
        assert text["num_digit_tokens"] == 5
        assert text["num_digit_tokens_reached"] == 2
        assert "Of 3 numbers, 33.3% have all their digits in number tokens" in text["verdict"]
        assert "`digit_level: true`" in text["verdict"]

    def test_digit_level_reaches_every_digit(self, real_tokenizer, text_file):
        file = text_file("In 1999, 12.5 apples cost $1,234 and -7 pears 0.05.\nNothing here.")
        text = audit_tokenizer(digit_level_copy(real_tokenizer("t5")), text=file)["text"]
        assert text["num_numbers"] == text["num_all_digits"] == 5
        assert text["num_digit_tokens"] == text["num_digit_tokens_reached"] == 15
        assert text["verdict"].endswith("A number loss reaches every digit.")

    def test_most_numbers_but_not_all(self, text_file):
        audit = audit_tokenizer(word_level(["<u>", "1", "2", "22"]), text=text_file("1 a 2 b 22"))
        assert audit["text"]["verdict"] == (
            "Of 3 numbers, 66.7% have all their digits in number tokens, 0.0% some, 33.3% none. "
            "A number loss misses part of the digits; with `digit_level: true` it would reach them."
        )

    def test_an_unknown_number_has_no_digit_reached_and_no_token_with_a_digit(self, text_file):
        text = audit_tokenizer(word_level(["<u>", "1"]), text=text_file("1 and 333"))["text"]
        assert (text["num_all_digits"], text["num_no_digits"]) == (1, 1)
        assert (text["num_digit_tokens"], text["num_digit_tokens_reached"]) == (1, 1)

    def test_letters_of_several_bytes_before_a_number_do_not_shift_it(
        self, real_tokenizer, text_file
    ):
        file = text_file("你好，naïve ½ costs 5 and 12")
        text = audit_tokenizer(real_tokenizer("gpt2"), text=file)["text"]
        assert (text["num_all_digits"], text["num_no_digits"]) == (1, 1)

    def test_a_slow_tokenizer(self, text_file):
        audit = audit_tokenizer(ByT5Tokenizer(), text=text_file("é 12.5 and 7"))
        assert audit["text"]["num_all_digits"] == audit["text"]["num_numbers"] == 2
        assert audit["text"]["num_digit_tokens_reached"] == 4

    def test_a_byte_order_mark_is_no_text(self, text_file):
        audit = audit_tokenizer(word_level(["<u>", "1"]), text=text_file(b"\xef\xbb\xbf1"))
        assert audit["text"]["num_all_digits"] == 1

    def test_a_variable_in_the_path(self, text_file, monkeypatch):
        monkeypatch.setenv("NTL_TEXT", text_file("1"))
        assert audit_tokenizer(word_level(["<u>", "1"]), text="${NTL_TEXT}")["text"]

    def test_without_a_file_there_is_no_verdict(self):
        assert audit_tokenizer(word_level(["<u>", "1"]))["text"] is None

    def test_a_missing_file(self):
        with pytest.raises(FileNotFoundError, match=r"--text: there is no file '/no/such\.txt'"):
            audit_tokenizer(word_level(["<u>", "1"]), text="/no/such.txt")

    def test_a_folder(self, tmp_path):
        with pytest.raises(IsADirectoryError, match=r"is a folder\. Give a text file"):
            audit_tokenizer(word_level(["<u>", "1"]), text=str(tmp_path))

    def test_another_encoding(self, text_file):
        file = text_file("für 5 €".encode("latin-1", errors="replace"))
        with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 1: .*iconv"):
            audit_tokenizer(word_level(["<u>", "1"]), text=file)

    def test_a_file_without_numbers(self, text_file):
        with pytest.raises(ValueError, match="has no number that could be looked up"):
            audit_tokenizer(word_level(["<u>", "1"]), text=text_file("seven\n"))


class TestRendered:
    def test_t5_at_a_glance(self, real_tokenizer, text_file):
        file = text_file("5 and 12")
        rendered = render_audit(audit_tokenizer(real_tokenizer("t5"), width=32128, text=file))
        for expected in [
            "T5Tokenizer), 32100 tokens",
            "32128 wide: 28 columns belong to no token",
            "19 number tokens (10 bare, 9 space mark), 10 values",
            "worth 0 1 2 3 4 5 6 7 8 9",
            "9 values have several tokens: 1: '▁1' '1'",
            "686 tokens look like numbers and are none",
            "510 several digits: '▁10' '▁20'",
            "(502 more)",
            "1014 tokens with a digit in them are no number tokens",
            "'1,234'                 ▁1, [2] 34",
            "Of 2 numbers, 50.0% have all their digits",
            "1 of its 2 tokens with digits are number tokens.",
        ]:
            assert expected in rendered

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("t5", "digits"),
            ("t5", "numbers"),
            ("bert", "integers"),
            ("llama3", "integers"),
            ("gemma3", "digits"),
        ],
    )
    def test_no_line_is_wider_than_a_terminal(self, name, kind, real_tokenizer):
        audit = audit_tokenizer(real_tokenizer(name), kind=kind)
        audit["name"] = name
        assert max(len(line) for line in render_audit(audit).splitlines()) <= 96

    def test_a_tokenizer_without_look_alikes(self):
        rendered = render_audit(audit_tokenizer(ArithmeticTokenizer().load()))
        assert "Tokenizer  (without a name)" in rendered
        assert "No token looks like a number and is none" in rendered
        assert "Every token with a digit in it is a number token" in rendered
        assert "several tokens" not in rendered

    def test_the_bound_is_named(self):
        tokenizer = word_level(["<u>", "1", "22", "333"])
        assert "integers up to 99" in render_audit(
            audit_tokenizer(tokenizer, kind="integers", largest=99)
        )
        assert "integers, unbounded" in render_audit(
            audit_tokenizer(tokenizer, kind="integers", largest=None)
        )

    def test_logits_narrower_than_the_tokenizer(self):
        audit = audit_tokenizer(word_level(["<u>", "1", "a", "b"]), width=2)
        assert re.search(r"Logits +2 wide: 2 tokens lie beyond them", render_audit(audit))

    def test_without_a_text_the_option_is_named(self):
        rendered = render_audit(audit_tokenizer(word_level(["<u>", "1", "22"])))
        assert "give --text to see how many of them a text has" in rendered
