import functools
import math
import re
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from ntl_lightning.numbers.runs import Role
from ntl_lightning.numbers.vocabulary import NumberVocabulary, RefusedToken

REAL = [
    "bert",
    "gemma3",
    "gpt2",
    "gptoss_o200k",
    "granite3",
    "llama2",
    "llama3",
    "mistral_v3",
    "phi3",
    "qwen3",
    "smollm2",
    "t5",
]
BYTE_LEVEL = {"gpt2", "gptoss_o200k", "granite3", "llama3", "qwen3", "smollm2"}
DIGITS = "0123456789"
# What the digit tokens of each vocabulary are, as listed by hand from the files.
MARKED_DIGITS = {
    "t5": {f"▁{digit}" for digit in "123456789"},  # there is no ▁0
    "gpt2": {f"Ġ{digit}" for digit in DIGITS},
    "bert": {f"##{digit}" for digit in DIGITS},
}
T5_IDS = {
    **{"0": 632, "1": 536, "2": 357, "3": 519, "4": 591},
    **{"5": 755, "6": 948, "7": 940, "8": 927, "9": 1298},
    **{"▁1": 209, "▁2": 204, "▁3": 220, "▁4": 314, "▁5": 305},
    **{"▁6": 431, "▁7": 489, "▁8": 505, "▁9": 668},
}


@pytest.fixture(scope="module")
def vocabulary_of(real_tokenizer):
    """Name of a real tokenizer and kind to its number vocabulary, each built once."""
    return functools.cache(
        lambda name, kind="digits": NumberVocabulary.from_tokenizer(real_tokenizer(name), kind=kind)
    )


def word_level(tokens, **special):
    """A tokenizer with exactly these tokens, ids in their order."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level(tokens):
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def as_dict(vocabulary):
    return dict(zip(vocabulary.tokens, vocabulary.values, strict=True))


def reasons(vocabulary):
    return {entry.token: entry.reason for entry in vocabulary.refused}


class TestRealTokenizers:
    @pytest.mark.parametrize("name", REAL)
    def test_the_digits_bare_and_marked_are_all_the_number_tokens(
        self, name, vocabulary_of, real_tokenizer
    ):
        tokenizer = real_tokenizer(name)
        vocabulary = vocabulary_of(name)

        expected = {*DIGITS, *MARKED_DIGITS.get(name, set())}
        assert set(vocabulary.tokens) == expected
        assert len(vocabulary) == len(expected)
        for token_id, value, token in zip(
            vocabulary.token_ids, vocabulary.values, vocabulary.tokens, strict=True
        ):
            assert tokenizer.convert_ids_to_tokens(token_id) == token
            assert value == float(token[-1])
        assert vocabulary.width == len(tokenizer)

    def test_t5_ids_are_those_of_its_file(self, real_tokenizer):
        vocabulary = NumberVocabulary.from_tokenizer(real_tokenizer("t5"), width=32128)
        assert dict(zip(vocabulary.tokens, vocabulary.token_ids, strict=True)) == T5_IDS
        assert vocabulary.width == 32128

    @pytest.mark.parametrize(("name", "token_id"), [("llama2", 29945), ("gemma3", 236810)])
    def test_the_id_of_five(self, name, token_id, vocabulary_of):
        assert vocabulary_of(name).value_table()[token_id] == 5

    def test_byt5_needs_no_file_and_its_latin_letters_are_half_characters(self):
        vocabulary = NumberVocabulary.from_tokenizer(ByT5Tokenizer())
        assert vocabulary.tokens == tuple(DIGITS)
        assert vocabulary.token_ids[5] == 56
        # Its tokens ² ³ ¹ ¼ ½ ¾ are bytes of other letters.
        assert vocabulary.refused == ()

    @pytest.mark.parametrize("name", REAL)
    @pytest.mark.parametrize("kind", ["integers", "numbers"])
    def test_larger_kinds_hold_what_a_pattern_over_the_vocabulary_finds(
        self, name, kind, vocabulary_of, real_tokenizer
    ):
        tokenizer = real_tokenizer(name)
        number = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)" if kind == "numbers" else "[0-9]+"
        # Of all twelve vocabularies only BERT's has `##`, and only byte-level ones have `Ġ`.
        mark = {"bert": "(##)?"}.get(name, "Ġ?" if name in BYTE_LEVEL else "▁?")
        pattern = re.compile(mark + number)
        expected = {
            token: float(Decimal(re.sub("[▁Ġ#]", "", token)))
            for token in tokenizer.get_vocab()
            if pattern.fullmatch(token) and abs(Decimal(re.sub("[▁Ġ#]", "", token))) <= 999
        }

        assert as_dict(vocabulary_of(name, kind)) == expected

    @pytest.mark.parametrize(
        ("name", "integers", "numbers"),
        [("t5", 529, 704), ("gpt2", 1691, 1691), ("llama3", 1110, 1110), ("qwen3", 10, 10)],
    )
    @pytest.mark.filterwarnings("ignore:The number tokens are unbounded")
    def test_unbounded_counts_are_those_of_the_files(self, name, integers, numbers, real_tokenizer):
        tokenizer = real_tokenizer(name)
        for kind, count in [("integers", integers), ("numbers", numbers)]:
            assert len(NumberVocabulary.from_tokenizer(tokenizer, kind=kind, largest=None)) == count

    def test_t5_fuses_signs_and_points(self, vocabulary_of):
        values = as_dict(vocabulary_of("t5", "numbers"))
        expected = {"-7": -7, "▁12.": 12, "6.0": 6, "01.": 1, "3.5": 3.5, "-4": -4}
        assert {token: values[token] for token in expected} == expected

    @pytest.mark.parametrize("name", REAL)
    @pytest.mark.parametrize("kind", ["digits", "integers", "numbers"])
    def test_no_token_is_infinite_exponential_or_outside_ascii(self, name, kind, vocabulary_of):
        for token, value in as_dict(vocabulary_of(name, kind)).items():
            assert re.fullmatch(r"(▁|Ġ|##)?[-+.0-9]+", token)
            assert math.isfinite(value)
            assert abs(value) <= 999

    @pytest.mark.parametrize(
        ("name", "reason", "count"),
        [
            ("gpt2", "infinite or not a number", 10),
            ("qwen3", "infinite or not a number", 18),
            ("gemma3", "infinite or not a number", 19),
            ("llama2", "byte piece", 10),
            ("t5", "sign or decimal point", 175),
        ],
    )
    def test_refused_counts_are_those_of_the_files(self, name, reason, count, vocabulary_of):
        refused = vocabulary_of(name).refused
        assert sum(entry.reason == reason for entry in refused) == count

    @pytest.mark.parametrize(
        ("name", "token_of_three"),
        [("llama3", "Ù£"), ("gptoss_o200k", "Ù£"), ("gemma3", "٣")],
    )
    def test_an_arabic_three_is_refused_also_where_it_is_written_in_bytes(
        self, name, token_of_three, vocabulary_of
    ):
        found = reasons(vocabulary_of(name, "numbers"))
        assert found[token_of_three] == "numeral outside ASCII"

    @pytest.mark.parametrize("name", REAL)
    def test_the_tokenizer_is_unchanged(self, name, real_tokenizer):
        tokenizer = real_tokenizer(name)

        def state():
            token_ids = tokenizer("The answer is 1234.5").input_ids
            return (
                token_ids,
                tokenizer.decode(token_ids),
                tokenizer.get_added_vocab(),
                tokenizer.all_special_ids,
                len(tokenizer),
            )

        before = state()
        NumberVocabulary.from_tokenizer(tokenizer)
        assert state() == before


class TestRules:
    # Token, and what it is worth for digits, integers and numbers.
    TABLE = (
        ("5", 5, 5, 5),
        ("▁5", 5, 5, 5),
        ("Ġ5", 5, 5, 5),
        (" 5", 5, 5, 5),
        ("42", "several digits", 42, 42),
        ("▁007", "several digits", 7, 7),
        ("999", "several digits", 999, 999),
        ("1000", "several digits", "above `largest`", "above `largest`"),
        ("-7", "sign or decimal point", "sign or decimal point", -7),
        ("+3", "sign or decimal point", "sign or decimal point", 3),
        ("▁12.", "sign or decimal point", "sign or decimal point", 12),
        ("6.25", "sign or decimal point", "sign or decimal point", 6.25),
        (".5", "sign or decimal point", "sign or decimal point", 0.5),
        ("-1000.5", "sign or decimal point", "sign or decimal point", "above `largest`"),
        *(
            (token, reason, reason, reason)
            for token, reason in [
                ("inf", "infinite or not a number"),
                ("▁nan", "infinite or not a number"),
                ("Infinity", "infinite or not a number"),
                ("-inf", "infinite or not a number"),
                ("1e5", "exponent"),
                ("1e400", "exponent"),
                ("2.5E-3", "exponent"),
                ("1_000", "underscore"),
                ("0x1F", "hexadecimal, octal or binary"),
                ("0b101", "hexadecimal, octal or binary"),
                ("٣", "numeral outside ASCII"),
                ("３", "numeral outside ASCII"),
                ("▁१२", "numeral outside ASCII"),
                ("²", "numeral outside ASCII"),
                ("½", "numeral outside ASCII"),
                ("Ⅷ", "numeral outside ASCII"),
                ("5²", "numeral outside ASCII"),
                ("▁▁5", "white space beyond one space mark"),
                ("5\n", "white space beyond one space mark"),
                ("▁ 5", "white space beyond one space mark"),
            ]
        ),
        *((token, None, None, None) for token in ["five", "a5", "5,", "##5", "5:", ".", "-", "▁"]),
    )

    @pytest.mark.parametrize("row", TABLE, ids=lambda row: repr(row[0]))
    @pytest.mark.parametrize(("column", "kind"), [(1, "digits"), (2, "integers"), (3, "numbers")])
    def test_a_token_is_worth(self, row, column, kind):
        token, expected = row[0], row[column]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(["<u>", "0", token]), kind=kind)

        value, reason = as_dict(vocabulary).get(token), reasons(vocabulary).get(token)
        assert (reason if value is None else value) == expected
        assert value is None or reason is None

    def test_two_tokens_of_one_value_are_both_numbers(self):
        vocabulary = NumberVocabulary.from_tokenizer(word_level(["<u>", "5", "▁5", "6"]))
        assert vocabulary.values == (5, 5, 6)

    def test_minus_zero_is_zero(self):
        vocabulary = NumberVocabulary.from_tokenizer(word_level(["<u>", "-0"]), kind="numbers")
        assert math.copysign(1, vocabulary.values[0]) == 1

    def test_a_run_of_digits_that_overflows_is_refused_even_without_bound(self):
        tokens = ["<u>", "1", "9" * 400, "9" * 5000]
        vocabulary = NumberVocabulary.from_tokenizer(
            word_level(tokens), kind="integers", largest=None
        )
        assert vocabulary.tokens == ("1",)
        assert set(reasons(vocabulary).values()) == {"infinite or not a number"}

    def test_special_tokens_are_no_numbers_but_plain_added_ones_are(self):
        tokenizer = word_level(["<u>", "1"])
        tokenizer.add_tokens([AddedToken("2", special=True), AddedToken("3", special=False)])
        tokenizer.pad_token = "1"
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)

        assert vocabulary.tokens == ("3",)
        assert vocabulary.refused == (
            RefusedToken(1, "1", "special token"),
            RefusedToken(2, "2", "special token"),
        )
        assert vocabulary.digit_bearing_ids == vocabulary.token_ids

    def test_the_continuing_prefix_counts_in_wordpiece_only_and_is_the_models_own(self):
        vocabulary = {"[UNK]": 0, "5": 1, "@@5": 2, "##5": 3}
        backend = Backend(
            models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix="@@")
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        assert NumberVocabulary.from_tokenizer(tokenizer).tokens == ("5", "@@5")

    def test_byte_level_tokens_are_read_as_text(self):
        # Ù£ are the bytes of an Arabic three, Ċ is a newline; À alone is no whole character.
        tokenizer = byte_level(["a", "5", "Ġ5", "Ù£", "ĠÙ£", "Ċ5", "À", "Â²"])
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        assert vocabulary.tokens == ("5", "Ġ5")
        assert reasons(vocabulary) == {
            "Ù£": "numeral outside ASCII",
            "ĠÙ£": "numeral outside ASCII",
            "Ċ5": "white space beyond one space mark",
            "Â²": "numeral outside ASCII",
        }

    def test_a_byte_level_tokenizer_may_have_added_tokens_in_plain_text(self):
        tokenizer = byte_level(["a", "5"])
        tokenizer.add_tokens([AddedToken("٣"), AddedToken(" 7")])
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        assert vocabulary.tokens == ("5", " 7")
        assert reasons(vocabulary) == {"٣": "numeral outside ASCII"}

    def test_byte_pieces_are_pieces_of_text_only_where_the_tokenizer_falls_back_to_bytes(self):
        tokens = ["<u>", "5", "<0x35>", "<0x41>"]
        tokenizer = word_level(tokens)
        assert NumberVocabulary.from_tokenizer(tokenizer).digit_bearing_ids == (1, 2, 3)

        tokenizer.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse()]
        )
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        assert vocabulary.tokens == ("5",)
        assert vocabulary.digit_bearing_ids == (1, 2)  # <0x41> is A
        assert reasons(vocabulary) == {"<0x35>": "byte piece"}

    @given(
        st.lists(
            st.one_of(
                st.text(alphabet="0123456789+-._eExX▁Ġ #infa٣²５一", min_size=1, max_size=6),
                st.integers(0, 10**5).map(str),
            ),
            min_size=1,
            max_size=30,
            unique=True,
        ),
        st.sampled_from(["digits", "integers", "numbers"]),
        st.integers(9, 10**4),
        st.integers(0, 50),
    )
    def test_made_up_vocabularies(self, tokens, kind, largest, padding):
        tokens = ["<u>", "0", *(token for token in tokens if token != "0")]
        width = len(tokens) + padding
        vocabulary = NumberVocabulary.from_tokenizer(
            word_level(tokens), width=width, kind=kind, largest=largest
        )
        found = as_dict(vocabulary)
        for token in tokens:
            digits = token[1:] if token[0] in "▁Ġ " else token
            allowed = {
                "digits": lambda text: text in tuple(DIGITS),
                "integers": lambda text: text != "" and set(text) <= set(DIGITS),
                "numbers": lambda text: (
                    text != ""
                    and set(text) & set(DIGITS)
                    and set(text[0]) <= set(DIGITS + "+-.")
                    and set(text[1:]) <= set(DIGITS + ".")
                    and text.count(".") <= 1
                ),
            }[kind](digits)
            expected = Decimal(digits) if allowed else None
            if expected is not None and abs(expected) <= largest:
                assert found[token] == float(expected)
            else:
                assert token not in found
            token_id = tokens.index(token)
            bears_digit = any(character in DIGITS for character in token)
            assert bool(vocabulary.is_digit_bearing_table()[token_id]) == bears_digit
            assert bool(vocabulary.is_number_table()[token_id]) == (token in found)

        # Nothing that Python would take for a number goes unmentioned.
        for token in set(tokens) - set(found):
            try:
                float(token)
            except ValueError:
                continue
            assert token in reasons(vocabulary)


class TestTables:
    def test_tables_have_the_width_of_the_logits(self):
        # 15 tokens, logits padded to 43, the digits at 5..14.
        tokens = ["<pad>", "a", "b", "c", ".", *DIGITS]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens), width=43)

        values = vocabulary.value_table()
        assert values.shape == (43,)
        assert values.dtype == torch.float64
        assert values[5:15].tolist() == list(range(10))
        assert values[:5].isnan().all()
        assert values[15:].isnan().all()
        is_number = vocabulary.is_number_table()
        assert is_number.dtype == torch.bool
        assert is_number.nonzero().flatten().tolist() == list(range(5, 15))

    def test_a_digit_at_id_zero_is_a_number_like_any_other(self):
        vocabulary = NumberVocabulary.from_tokenizer(word_level([*DIGITS, "<pad>", "a"]))
        assert vocabulary.token_ids == tuple(range(10))
        assert vocabulary.is_number_table()[0]

    def test_digit_bearing_tokens_are_more_than_the_number_tokens(self):
        tokens = ["<u>", "1", "22", "a3", "b", "4,", "٣"]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens))
        assert vocabulary.token_ids == (1,)
        assert vocabulary.digit_bearing_ids == (1, 2, 3, 5)
        bearing = vocabulary.is_digit_bearing_table()
        assert bearing.tolist() == [False, True, True, True, False, True, False]

    def test_digit_bearing_tokens_beyond_the_logits_are_left_out(self):
        tokenizer = word_level(["<u>", "1", "22"])
        assert NumberVocabulary.from_tokenizer(tokenizer, width=2).digit_bearing_ids == (1,)

    def test_values_by_hand(self):
        vocabulary = NumberVocabulary.from_values({7: 1000.0, 3: 1.0, 5: 10.0}, width=9)
        assert vocabulary.token_ids == (3, 5, 7)
        assert vocabulary.values == (1.0, 10.0, 1000.0)
        assert vocabulary.tokens == ("1", "10", "1000")
        assert vocabulary.digit_bearing_ids == (3, 5, 7)
        assert len(vocabulary) == 3


class TestForms:
    # Token, role, digits, whether it begins a word.
    TABLE = (
        ("5", Role.DIGITS, 1, 0),
        ("▁5", Role.DIGITS, 1, 1),
        ("Ġ5", Role.DIGITS, 1, 1),
        (" 5", Role.DIGITS, 1, 1),
        ("42", Role.DIGITS, 2, 0),
        ("▁007", Role.DIGITS, 3, 1),
        ("123456", Role.DIGITS, 6, 0),
        (".", Role.POINT, 0, 0),
        ("▁.", Role.POINT, 0, 1),
        (",", Role.THOUSANDS, 0, 0),
        ("▁,", Role.THOUSANDS, 0, 1),
        ("-", Role.SIGN, 0, 0),
        ("▁-", Role.SIGN, 0, 1),
        ("+", Role.SIGN, 0, 0),
        ("\u2212", Role.SIGN, 0, 0),
        ("-3", Role.WHOLE, 0, 0),
        ("▁0.5", Role.WHOLE, 0, 1),
        (".5", Role.WHOLE, 0, 0),
        ("12,", Role.WHOLE, 0, 0),
        ("a5", Role.WHOLE, 0, 0),
        ("▁2nd", Role.WHOLE, 0, 1),
        ("5²", Role.WHOLE, 0, 0),
        ("\n5", Role.WHOLE, 0, 1),
        ("No", Role.WORD, 0, 0),
        ("▁the", Role.WORD, 0, 1),
        ("é", Role.WORD, 0, 0),
        ("٣", Role.WORD, 0, 0),
        (")", Role.WORD, 0, 0),
        ("%", Role.WORD, 0, 0),
        ("...", Role.WORD, 0, 0),
        (").", Role.WORD, 0, 0),
        ("a.", Role.WORD, 0, 0),
        # A point in front of digits, which parts them from all that is before it.
        ("(.", Role.POINT, 0, 1),
        ("▁$.", Role.POINT, 0, 1),
        (":", Role.TEXT, 0, 0),
        ("(", Role.TEXT, 0, 0),
        (".,", Role.TEXT, 0, 0),
        ("--", Role.TEXT, 0, 0),
        ("▁", Role.TEXT, 0, 1),
        ("\n", Role.TEXT, 0, 1),
        ("_", Role.TEXT, 0, 0),
    )

    @pytest.mark.parametrize("kind", ["digits", "integers", "numbers"])
    def test_a_token_has_the_form_whatever_kind_is_a_number(self, kind):
        tokens = ["<u>", "0", *(row[0] for row in self.TABLE)]
        table = NumberVocabulary.from_tokenizer(
            word_level(tokens), width=len(tokens) + 3, kind=kind, largest=99
        ).forms_table()

        assert table.dtype == torch.int8
        assert table.shape == (len(tokens) + 3, 3)
        found = {tokens[i]: tuple(table[i].tolist()) for i in range(2, len(tokens))}
        assert found == {row[0]: row[1:] for row in self.TABLE}
        assert table[len(tokens) :].eq(0).all()

    def test_more_digits_than_fit_are_capped(self):
        table = NumberVocabulary.from_tokenizer(word_level(["<u>", "1", "2" * 200])).forms_table()
        assert table.tolist() == [[Role.TEXT, 0, 0], [Role.DIGITS, 1, 0], [Role.DIGITS, 127, 0]]

    def test_special_tokens_are_text_and_those_beyond_the_logits_are_left_out(self):
        tokenizer = word_level(["<u>", "1", "2", "."], pad_token="2")
        table = NumberVocabulary.from_tokenizer(tokenizer, width=3).forms_table()
        assert table.tolist() == [[Role.TEXT, 0, 0], [Role.DIGITS, 1, 0], [Role.TEXT, 0, 0]]

    def test_byte_level_tokens_are_read_as_text(self):
        # Âł is a blank that does not break, âĪĴ a minus, À half a letter.
        tokens = ["5", "Ġ5", "Ġ.", "Ù£", "ĠNo", "Ċ", "Âł", "âĪĴ", "À"]
        table = NumberVocabulary.from_tokenizer(byte_level(tokens)).forms_table()
        assert table.tolist() == [
            [Role.DIGITS, 1, 0],
            [Role.DIGITS, 1, 1],
            [Role.POINT, 0, 1],
            [Role.WORD, 0, 0],
            [Role.WORD, 0, 1],
            [Role.TEXT, 0, 1],
            [Role.TEXT, 0, 1],
            [Role.SIGN, 0, 0],
            [Role.WORD, 0, 0],
        ]

    def test_byte_pieces_are_what_they_stand_for(self):
        tokenizer = word_level(["<u>", "5", "<0x35>", "<0x2E>", "<0x41>", "<0x20>"])
        tokenizer.backend_tokenizer.decoder = decoders.ByteFallback()
        table = NumberVocabulary.from_tokenizer(tokenizer).forms_table()
        assert table.tolist()[2:] == [
            [Role.DIGITS, 1, 0],
            [Role.POINT, 0, 0],
            [Role.WORD, 0, 0],
            [Role.TEXT, 0, 1],
        ]

    @pytest.mark.parametrize(
        ("name", "forms"),
        [
            ("t5", {"▁5": (1, 1, 1), "5": (1, 1, 0), ".": (2, 0, 0), "▁2015": (1, 4, 1)}),
            ("t5", {"-7": (5, 0, 0), "▁12,": (5, 0, 1), "▁": (0, 0, 1)}),
            ("gpt2", {"Ġ12": (1, 2, 1), "345": (1, 3, 0), "Ġ-": (4, 0, 1), ",": (3, 0, 0)}),
            ("gpt2", {"ĠNo": (6, 0, 1), "$.": (2, 0, 1), "ĊĊ": (0, 0, 1)}),
            ("llama3", {"007": (1, 3, 0), "Ġ": (0, 0, 1), "Ġ.": (2, 0, 1), "Ġ(.": (2, 0, 1)}),
            (
                "qwen3",
                {"7": (1, 1, 0), "Ġ-": (4, 0, 1), "<|endoftext|>": (0, 0, 0)},
            ),
            ("bert", {"5": (1, 1, 0), "##5": (1, 1, 0), "##34": (1, 2, 0), "##ing": (6, 0, 0)}),
            ("gemma3", {"5": (1, 1, 0), "▁the": (6, 0, 1), "<eos>": (0, 0, 0), "\n": (0, 0, 1)}),
        ],
    )
    def test_tokens_of_real_vocabularies(self, name, forms, vocabulary_of, real_tokenizer):
        ids, table = real_tokenizer(name).get_vocab(), vocabulary_of(name).forms_table()
        assert {token: tuple(table[ids[token]].tolist()) for token in forms} == forms

    @pytest.mark.parametrize("name", REAL)
    def test_digits_of_real_vocabularies_are_what_a_pattern_finds(
        self, name, vocabulary_of, real_tokenizer
    ):
        mark = {"bert": "(?P<mark>##)?"}.get(name, "(?P<mark>[▁Ġ])?")
        table, expected = vocabulary_of(name).forms_table(), {}
        for token, token_id in real_tokenizer(name).get_vocab().items():
            match = re.fullmatch(mark + "(?P<digits>[0-9]+)", token)
            if match:
                starts_word = match["mark"] is not None and name != "bert"
                expected[token_id] = [Role.DIGITS, len(match["digits"]), starts_word]
        found = (table[:, 0] == Role.DIGITS).nonzero().flatten().tolist()
        assert {i: table[i].tolist() for i in found if not is_byte(name, i, real_tokenizer)} == (
            expected
        )

    def test_number_tokens_without_form_have_that_of_their_text(self):
        vocabulary = NumberVocabulary((1, 3), (5.0, -7.0), ("▁5", "-7"), width=5)
        assert vocabulary.forms_table().tolist() == [
            [Role.TEXT, 0, 0],
            [Role.DIGITS, 1, 1],
            [Role.TEXT, 0, 0],
            [Role.WHOLE, 0, 0],
            [Role.TEXT, 0, 0],
        ]

    def test_values_by_hand_are_written_without_leading_zeros(self):
        values = {0: 0.0, 1: 7.0, 2: 42.0, 3: 1000000.0, 4: -3.0, 5: 0.5}
        table = NumberVocabulary.from_values(values, width=7).forms_table()
        assert table.tolist() == [
            [Role.DIGITS, 1, 0],
            [Role.DIGITS, 1, 0],
            [Role.DIGITS, 2, 0],
            [Role.DIGITS, 7, 0],
            [Role.WHOLE, 0, 0],
            [Role.WHOLE, 0, 0],
            [Role.TEXT, 0, 0],
        ]

    def test_marks_by_hand(self):
        vocabulary = NumberVocabulary.from_values(
            {0: 1.0}, width=7, marks={1: ".", 2: ",", 3: "-", 4: "+", 5: "\u2212"}
        )
        table = vocabulary.forms_table()
        roles = [Role.DIGITS, Role.POINT, Role.THOUSANDS, *[Role.SIGN] * 3, Role.TEXT]
        assert table[:, 0].tolist() == roles
        assert table[:, 1].tolist() == [1, 0, 0, 0, 0, 0, 0]
        assert vocabulary.token_ids == (0,)

    @pytest.mark.parametrize(
        ("marks", "message"),
        [
            ({1: ";"}, r"one of \. , - \+ \u2212, got ';' for id 1"),
            ({0: "."}, r"gives '\.' to id 0, which must be below the width 3 and no number token"),
            ({3: "."}, "to id 3, which must be below the width 3"),
            ({-1: "."}, "to id -1"),
        ],
    )
    def test_wrong_marks(self, marks, message):
        with pytest.raises(ValueError, match=message):
            NumberVocabulary.from_values({0: 1.0}, width=3, marks=marks)

    def test_forms_that_do_not_fit_the_width(self):
        with pytest.raises(ValueError, match="`forms` must hold 3 bytes per token, 15, got 6"):
            NumberVocabulary((1,), (5.0,), ("5",), width=5, forms=bytes(6))


def is_byte(name, token_id, real_tokenizer):
    return real_tokenizer(name).convert_ids_to_tokens(token_id).startswith("<0x")


class TestErrorsAndWarnings:
    def test_a_vocabulary_without_number_says_what_was_looked_for(self):
        tokenizer = word_level(["<u>", "12", "34", "inf"])
        with pytest.raises(
            ValueError,
            match=r"No number token among the 4 tokens.*'▁', 'Ġ', ' ', one ASCII digit "
            r"\(kind 'digits'\).*2 x several digits; 1 x infinite.*Choose another kind",
        ):
            NumberVocabulary.from_tokenizer(tokenizer)

    def test_nothing_below_the_bound_says_the_bound(self):
        with pytest.raises(ValueError, match=r"run of ASCII digits of at most 9 .*above `largest`"):
            NumberVocabulary.from_tokenizer(word_level(["<u>", "12"]), kind="integers", largest=9)

    def test_nothing_that_looks_like_a_number(self):
        with pytest.raises(ValueError, match="Look-alikes that were refused: nothing"):
            NumberVocabulary.from_tokenizer(word_level(["<u>", "a"]))

    def test_a_width_below_a_number_token_is_an_error(self, real_tokenizer):
        with pytest.raises(ValueError, match=r"'9' has id 1298, but the logits are only 1000 wide"):
            NumberVocabulary.from_tokenizer(real_tokenizer("t5"), width=1000)

    def test_an_unknown_kind(self):
        with pytest.raises(ValueError, match="must be one of digits, integers, numbers, got 'all'"):
            NumberVocabulary.from_tokenizer(word_level(["<u>", "1"]), kind="all")

    @pytest.mark.parametrize("largest", [0, -1, math.inf, math.nan])
    def test_a_bound_that_is_none(self, largest):
        with pytest.raises(ValueError, match="`largest` must be a positive number, or None"):
            NumberVocabulary.from_tokenizer(
                word_level(["<u>", "1"]), kind="integers", largest=largest
            )

    def test_a_bound_below_nine_would_cut_the_digits(self):
        with pytest.raises(ValueError, match="`largest` is 5, but kind 'digits'"):
            NumberVocabulary.from_tokenizer(word_level(["<u>", "1"]), largest=5)

    def test_unbounded_values_warn_with_the_largest_and_what_it_costs(self):
        # (1 + 2 + 60000) / 3 = 20001
        tokenizer = word_level(["<u>", "1", "2", "60000"])
        with pytest.warns(UserWarning, match=r"up to 60000 \(token '60000'\).* about 2e\+04 per"):
            vocabulary = NumberVocabulary.from_tokenizer(tokenizer, kind="integers", largest=None)
        assert vocabulary.values == (1, 2, 60000)

    def test_unbounded_values_up_to_ten_thousand_do_not_warn(self):
        tokenizer = word_level(["<u>", "1", "10000"])
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer, kind="integers", largest=None)
        assert vocabulary.values == (1, 10000)

    def test_digits_need_no_bound(self):
        assert len(NumberVocabulary.from_tokenizer(word_level(["<u>", "1"]), largest=None)) == 1

    @pytest.mark.parametrize(
        ("values", "width", "message"),
        [
            ({}, 5, "needs at least one number token"),
            ({5: 1.0}, 5, "'1' has id 5, but the logits are only 5 wide"),
            ({-100: 1.0}, 5, "not negative"),
            ({1: math.inf}, 5, "value of token 'inf' must be finite"),
            ({1: math.nan}, 5, "must be finite"),
            ({1: 1e39}, 5, "must be finite in float32"),
        ],
    )
    def test_wrong_values_by_hand(self, values, width, message):
        with pytest.raises(ValueError, match=message):
            NumberVocabulary.from_values(values, width=width)

    def test_lists_of_different_length(self):
        with pytest.raises(ValueError, match="equally long, got 2, 1 and 1"):
            NumberVocabulary(token_ids=(1, 2), values=(1.0,), tokens=("1",), width=5)

    def test_ids_out_of_order(self):
        with pytest.raises(ValueError, match="must be ascending, distinct"):
            NumberVocabulary(token_ids=(2, 1), values=(1.0, 2.0), tokens=("1", "2"), width=5)
