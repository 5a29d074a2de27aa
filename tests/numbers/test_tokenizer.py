import json
import lzma
import os
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Config, PreTrainedTokenizerFast, T5Config

from ntl_lightning.numbers.text import find_numbers
from ntl_lightning.numbers.tokenizer import (
    ArithmeticTokenizer,
    PretrainedTokenizer,
    decode_answer,
    decode_answers,
    decodes_with_spaces,
    digit_level_copy,
    num_token_ids,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary

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
# The same, where a test loads or saves each: the two largest take seconds.
EACH_LOADED = [
    pytest.param(name, marks=pytest.mark.slow) if name in {"gemma3", "gptoss_o200k"} else name
    for name in REAL
]
SENTENCE = "The answer is 1234.5"
PRINTABLE = st.text(alphabet=[*map(chr, range(0x20, 0x7F)), "\n"])


def digits_from_ten():
    """The digits have the ids 10 to 19, and 3 to 9 are left out."""
    vocabulary = {"<pad>": 0, "<end>": 1, "<unk>": 2, **{str(d): 10 + d for d in range(10)}}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def plain(tokens):
    """Tokens without space marks."""
    return [token.lstrip("▁Ġ") for token in tokens if token.strip("▁Ġ")]


def word_level(tokens, **special):
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=tokens[0], **special)


def folder_with_class(source, target, tokenizer_class):
    """A copy of a tokenizer folder whose configuration names another class."""
    shutil.copy(source / "tokenizer.json", target)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = tokenizer_class
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="session")
def digit_level(real_tokenizer):
    """Name of a real tokenizer to its digit-level copy, each made once."""
    copies = {}

    def copy(name):
        if name not in copies:
            copies[name] = digit_level_copy(real_tokenizer(name))
        return copies[name]

    return copy


class TestPretrained:
    # Ids from the files, see the tokens they stand for.
    @pytest.mark.parametrize(
        ("name", "token_ids"),
        [
            ("t5", [37, 1525, 19, 3, 14574, 12451, 1]),
            ("gpt2", [464, 3280, 318, 1105, 2682, 13, 20]),
            ("llama2", [1, 450, 1234, 338, 29871, 29896, 29906, 29941, 29946, 29889, 29945]),
            ("bert", [101, 1996, 3437, 2003, 13138, 2549, 1012, 1019, 102]),
        ],
    )
    def test_a_folder(self, name, token_ids, real_tokenizer_folder):
        tokenizer = PretrainedTokenizer(str(real_tokenizer_folder(name))).load()
        assert tokenizer(SENTENCE).input_ids == token_ids

    @pytest.mark.parametrize("name", EACH_LOADED)
    def test_every_real_tokenizer_is_cut_as_its_file_says_without_a_warning(
        self, name, real_tokenizer_folder
    ):
        folder = real_tokenizer_folder(name)
        tokenizer = PretrainedTokenizer(str(folder)).load()
        assert tokenizer.pad_token is not None
        if (folder / "tokenizer.json").exists():
            own = Backend.from_file(str(folder / "tokenizer.json"))
            own.no_padding()
            for text in ["x = 12.34, n=-7", " 42", "1000000", "a  b"]:
                assert tokenizer.tokenize(text) == own.encode(text, add_special_tokens=False).tokens

    def test_a_variable_in_the_path(self, real_tokenizer_folder, monkeypatch):
        monkeypatch.setenv("NTL_FOLDER", str(real_tokenizer_folder("t5").parent))
        assert len(PretrainedTokenizer("${NTL_FOLDER}/t5").load()) == 32100

    def test_a_packed_tokenizer_is_unpacked_and_nothing_is_written_beside_it(
        self, real_tokenizer_folder, tmp_path
    ):
        source = real_tokenizer_folder("t5")
        packed = lzma.compress((source / "tokenizer.json").read_bytes(), preset=0)
        (tmp_path / "tokenizer.json.xz").write_bytes(packed)
        shutil.copy(source / "tokenizer_config.json", tmp_path)
        before = sorted(tmp_path.iterdir())

        tokenizer = PretrainedTokenizer(str(tmp_path)).load()
        assert tokenizer(SENTENCE).input_ids == [37, 1525, 19, 3, 14574, 12451, 1]
        assert tokenizer.name_or_path == str(tmp_path)
        assert sorted(tmp_path.iterdir()) == before
        tokenizer.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "tokenizer.json").exists()

    @pytest.mark.parametrize(("name", "pad_id"), [("gpt2", 50256), ("llama2", 2), ("t5", 0)])
    def test_a_missing_pad_token_is_the_end_token_without_a_new_id(
        self, name, pad_id, real_tokenizer_folder
    ):
        folder = real_tokenizer_folder(name)
        tokenizer = PretrainedTokenizer(str(folder)).load()
        untouched = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.pad_token_id == pad_id
        assert len(tokenizer) == len(untouched)
        assert tokenizer.get_added_vocab() == untouched.get_added_vocab()

    def test_neither_pad_nor_end_token(self, tmp_path):
        word_level(["<unk>", "1"]).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"neither a pad nor an end token.*`eos_token`"):
            PretrainedTokenizer(str(tmp_path)).load()

    @pytest.mark.parametrize(
        ("name", "declared", "text", "tokens"),
        [
            ("llama3", "GPT2Tokenizer", "1000000", ["100", "000", "0"]),
            ("llama2", "LlamaTokenizer", " 42", ["▁▁", "4", "2"]),
        ],
    )
    def test_a_pipeline_that_transformers_would_replace_is_kept_with_a_warning(
        self, name, declared, text, tokens, real_tokenizer, real_tokenizer_folder, tmp_path
    ):
        folder = folder_with_class(real_tokenizer_folder(name), tmp_path, declared)
        assert AutoTokenizer.from_pretrained(folder).tokenize(text) != tokens

        with pytest.warns(UserWarning, match=f"as {declared}.*does not cut as its tokenizer.json"):
            tokenizer = PretrainedTokenizer(str(folder)).load()
        assert tokenizer.tokenize(text) == tokens
        original = real_tokenizer(name)
        assert tokenizer(SENTENCE).input_ids == original(SENTENCE).input_ids
        assert tokenizer.eos_token == original.eos_token

    def test_a_sentencepiece_file_that_transformers_rebuilds_otherwise_warns(
        self, real_tokenizer_folder, tmp_path
    ):
        pytest.importorskip("sentencepiece")
        shutil.copy(real_tokenizer_folder("llama2") / "tokenizer.model", tmp_path)
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.warns(UserWarning, match=r"does not cut as its tokenizer.model does"):
            PretrainedTokenizer(str(tmp_path)).load()

    def test_a_sentencepiece_file_that_is_rebuilt_as_it_was_does_not_warn(
        self, real_tokenizer_folder, tmp_path
    ):
        pytest.importorskip("sentencepiece")
        source = real_tokenizer_folder("t5")
        shutil.copy(source / "spiece.model", tmp_path)
        shutil.copy(source / "tokenizer_config.json", tmp_path)
        tokenizer = PretrainedTokenizer(str(tmp_path)).load()
        assert tokenizer(SENTENCE).input_ids == [37, 1525, 19, 3, 14574, 12451, 1]

    def test_without_sentencepiece_the_pieces_cannot_be_compared(
        self, real_tokenizer_folder, tmp_path, monkeypatch
    ):
        word_level(["<unk>", "1", "</s>"], eos_token="</s>").save_pretrained(tmp_path / "one")
        source = real_tokenizer_folder("gpt2")  # loads from vocab.json and merges.txt
        for file in source.iterdir():
            shutil.copy(file, tmp_path)
        (tmp_path / "unrelated.model").write_bytes(b"")
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
        assert len(PretrainedTokenizer(str(tmp_path)).load()) == 50257

    def test_a_missing_folder(self):
        with pytest.raises(FileNotFoundError, match=r"tokenizer.name_or_path: there is no folder"):
            PretrainedTokenizer("/no/such/folder").load()

    def test_a_relative_path_that_is_no_folder(self):
        with pytest.raises(FileNotFoundError, match=r"looked for /.*/no/such"):
            PretrainedTokenizer("./no/such").load()

    def test_a_file(self, real_tokenizer_folder):
        with pytest.raises(NotADirectoryError, match=r"is a file. Give the folder"):
            PretrainedTokenizer(str(real_tokenizer_folder("t5") / "tokenizer.json")).load()

    def test_a_folder_without_tokenizer(self, tmp_path):
        (tmp_path / "notes.txt").write_text("nothing here")
        with pytest.raises(ValueError, match=r"holds notes.txt. It should hold tokenizer.json"):
            PretrainedTokenizer(str(tmp_path)).load()

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(ValueError, match="holds nothing"):
            PretrainedTokenizer(str(tmp_path)).load()

    def test_a_hub_name_without_network_says_how_to_pass_a_folder(self):
        with pytest.raises(OSError, match=r"'no-one/nothing' is no folder here.*Without network"):
            PretrainedTokenizer("no-one/nothing").load()

    def test_a_hub_name_in_the_cache_is_cut_as_its_file_says(self, real_tokenizer_folder, tmp_path):
        # The place of the cache is read when the hub's library is imported: a new process.
        repository = tmp_path / "models--lab--llama"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "v2").write_text("0" * 40)
        folder_with_class(real_tokenizer_folder("llama2"), snapshot, "LlamaTokenizer")
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
        code = (
            "from ntl_lightning.numbers import PretrainedTokenizer\n"
            "tokenizer = PretrainedTokenizer('lab/llama', revision='v2').load()\n"
            "print(tokenizer.convert_tokens_to_ids(tokenizer.tokenize(' 42')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "HF_HUB_CACHE": str(tmp_path),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "[259, 29946, 29906]"  # ▁▁ 4 2
        assert "does not cut as its tokenizer.json says" in " ".join(done.stderr.split())

    def test_a_revision_of_a_folder_has_no_effect_and_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"revision is 'v1'.*has no revisions"):
            PretrainedTokenizer(str(tmp_path), revision="v1").load()

    def test_an_unset_variable(self, monkeypatch):
        monkeypatch.delenv("NTL_MISSING", raising=False)
        with pytest.raises(ValueError, match=r"tokenizer.name_or_path: .*NTL_MISSING"):
            PretrainedTokenizer("${NTL_MISSING}/t5").load()

    def test_digit_level(self, real_tokenizer_folder):
        tokenizer = PretrainedTokenizer(str(real_tokenizer_folder("t5")), digit_level=True).load()
        assert tokenizer.tokenize("1234.5") == ["▁", "1", "2", "3", "4", ".", "5"]


class TestDigitLevel:
    @pytest.mark.parametrize("name", REAL)
    def test_every_number_is_cut_into_single_digits(self, name, digit_level):
        copy = digit_level(name)
        assert plain(copy.tokenize("1234.5")) == ["1", "2", "3", "4", ".", "5"]
        for text in ["x = 12.34, n=-7", "1,234", "0012", "3.5e-4", "room 101b"]:
            with_digits = [token for token in copy.tokenize(text) if re.search("[0-9]", token)]
            assert with_digits == re.findall("[0-9]", text)

    @pytest.mark.parametrize("name", REAL)
    def test_ids_and_vocabulary_are_the_old_ones(self, name, digit_level, real_tokenizer):
        copy, original = digit_level(name), real_tokenizer(name)
        assert copy.get_vocab() == original.get_vocab()
        assert len(copy) == len(original)
        assert copy.added_tokens_decoder == original.added_tokens_decoder
        assert copy.special_tokens_map == original.special_tokens_map
        assert copy.all_special_ids == original.all_special_ids
        assert copy.model_max_length == original.model_max_length
        assert copy.chat_template == original.chat_template
        assert copy.padding_side == original.padding_side
        assert copy.truncation_side == original.truncation_side
        assert copy.model_input_names == original.model_input_names
        assert copy.clean_up_tokenization_spaces == original.clean_up_tokenization_spaces
        assert copy.name_or_path == original.name_or_path

    @pytest.mark.parametrize("name", REAL)
    def test_text_without_digits_has_the_tokens_it_had(self, name, digit_level, real_tokenizer):
        text = "Naïve? 你好, però — d'accord!\n\n  Done."
        assert digit_level(name)(text).input_ids == real_tokenizer(name)(text).input_ids

    def test_letters_whose_bytes_look_numeric_are_not_cut(self, digit_level):
        # In byte-level vocabularies 你 is ä½ł; ½ and ² are numeric to Unicode, but no digits here.
        tokens = digit_level("gpt2").tokenize("你 ½ 2²")
        assert tokens == ["ä½", "ł", "ĠÂ½", "Ġ", "2", "Â²"]

    @pytest.mark.parametrize("name", [name for name in REAL if name != "bert"])
    def test_text_decodes_to_what_it_decoded_to(self, name, digit_level, real_tokenizer):
        copy, original = digit_level(name), real_tokenizer(name)
        for text in [SENTENCE, "Natalia sold 48/2 = (48/2=24) 24 clips, -7.25 % of 1,234."]:
            decoded = [
                tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
                for tokenizer in (copy, original)
            ]
            assert decoded[0] == decoded[1]
            assert text in decoded[0]

    def test_bert_is_read_back_as_one_number(self, digit_level):
        copy = digit_level("bert")
        token_ids = copy(SENTENCE).input_ids
        assert copy.decode(token_ids, skip_special_tokens=True) == "the answer is 1 2 3 4. 5"
        assert decode_answer(copy, token_ids) == "the answer is 1234.5"
        assert [n.text for n in find_numbers(decode_answer(copy, token_ids))] == ["1234.5"]

    @pytest.mark.parametrize("name", REAL)
    def test_the_digit_tokens_are_all_that_bears_digits(self, name, digit_level):
        copy = digit_level(name)
        vocabulary = NumberVocabulary.from_tokenizer(copy)
        token_ids = copy("In 1999, 12.5 apples cost $1,234 and -7 pears 0.05.").input_ids
        bearing = set(token_ids) & set(vocabulary.digit_bearing_ids)
        assert len(bearing) == 8  # 0 1 2 3 4 5 7 9
        assert bearing <= set(vocabulary.token_ids)

    @pytest.mark.parametrize("name", EACH_LOADED)
    def test_it_cuts_the_same_after_saving_and_loading(self, name, digit_level, tmp_path):
        copy = digit_level(name)
        copy.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        text = "Compute 1000000 / 3.14159 = naïve ½ 你好"
        assert again(text).input_ids == copy(text).input_ids
        assert again.special_tokens_map == copy.special_tokens_map
        assert again.added_tokens_decoder == copy.added_tokens_decoder
        assert again.chat_template == copy.chat_template
        assert again.model_max_length == copy.model_max_length

    @pytest.mark.parametrize(
        ("name", "config"),
        [("t5", T5Config()), ("gpt2", GPT2Config()), ("smollm2", GPT2Config())],
        ids=["t5", "gpt2", "smollm2 beside a gpt2 model"],
    )
    def test_a_model_config_beside_it_does_not_change_the_cut(
        self, name, config, digit_level, tmp_path
    ):
        config.save_pretrained(tmp_path)
        digit_level(name).save_pretrained(tmp_path)
        for tokenizer in [
            AutoTokenizer.from_pretrained(tmp_path),
            PretrainedTokenizer(str(tmp_path)).load(),
        ]:
            tokens = plain(tokenizer.tokenize("1000000 and 1234.5"))
            assert tokens == ["1", *"000000", "and", *"1234.5"]

    @pytest.mark.parametrize("name", ["t5", "gpt2", "llama3", "bert", "qwen3", "granite3"])
    def test_the_original_is_unchanged(self, name, real_tokenizer):
        tokenizer = real_tokenizer(name)
        before = tokenizer(SENTENCE).input_ids, str(tokenizer.backend_tokenizer.pre_tokenizer)
        digit_level_copy(tokenizer)
        after = tokenizer(SENTENCE).input_ids, str(tokenizer.backend_tokenizer.pre_tokenizer)
        assert after == before

    def test_it_may_be_done_twice(self, digit_level):
        twice = digit_level_copy(digit_level("t5"))
        assert twice(SENTENCE).input_ids == digit_level("t5")(SENTENCE).input_ids

    def test_padding_of_an_earlier_batch_is_not_taken_over(self, real_tokenizer_folder):
        tokenizer = AutoTokenizer.from_pretrained(real_tokenizer_folder("t5"))
        tokenizer(["1", "2"], padding="max_length", max_length=9, truncation=True)
        assert len(digit_level_copy(tokenizer)("12").input_ids) == 4  # ▁ 1 2 </s>

    def test_a_slow_tokenizer(self):
        with pytest.raises(ValueError, match=r"needs a fast tokenizer.*ByT5Tokenizer"):
            digit_level_copy(ByT5Tokenizer())

    def test_a_vocabulary_without_some_digits(self):
        tokenizer = word_level(["<unk>", *"01234568", "79"])
        with pytest.raises(ValueError, match="no token for 7, 9"):
            digit_level_copy(tokenizer)

    def test_special_tokens_keep_their_manners(self, tmp_path):
        # RoBERTa's mask takes the blank before it.
        tokenizer = word_level(["<unk>", *"0123456789"])
        tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True)})
        tokenizer.add_special_tokens({"extra_special_tokens": ["<calc>"]})
        copy = digit_level_copy(tokenizer)
        copy.save_pretrained(tmp_path)
        for made in [copy, AutoTokenizer.from_pretrained(tmp_path)]:
            assert made.added_tokens_decoder == tokenizer.added_tokens_decoder
            assert made.added_tokens_decoder[11].lstrip
            assert made.mask_token_id == 11
            assert made.extra_special_tokens == ["<calc>"]
            assert made.all_special_ids == tokenizer.all_special_ids


class TestArithmetic:
    @pytest.mark.parametrize("number_width", [None, 2, 3, 4])
    def test_any_printable_ascii_text_comes_back(self, number_width):
        tokenizer = ArithmeticTokenizer(number_width=number_width).load()

        @given(st.one_of(PRINTABLE, st.text(alphabet="0123456789 .-<pad>", max_size=20)))
        def comes_back(text):
            token_ids = tokenizer(text).input_ids
            assert tokenizer.decode(token_ids) == text
            assert decode_answer(tokenizer, [*token_ids, tokenizer.eos_token_id, -100]) == text
            assert tokenizer.unk_token_id not in token_ids

        comes_back()

    @given(PRINTABLE)
    def test_exactly_the_runs_of_three_digits_are_one_token(self, text):
        tokens = self.width_three.tokenize(text)
        expected = []
        for run in re.split("([0-9]+)", text):
            expected += [run] if len(run) == 3 and run.isdigit() else list(run)
        assert tokens == expected

    width_three = ArithmeticTokenizer(number_width=3).load()

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("484", ["484"]),
            ("47", ["4", "7"]),
            ("1234", ["1", "2", "3", "4"]),
            ("-007", ["-", "007"]),
            ("0.484", ["0", ".", "484"]),
            ("123456", [*"123456"]),
            ("f(123)=999\n", [*"f(", "123", *")=", "999", "\n"]),
        ],
    )
    def test_width_three(self, text, tokens):
        assert self.width_three.tokenize(text) == tokens

    def test_by_default_every_digit_stands_alone(self):
        tokenizer = ArithmeticTokenizer().load()
        assert tokenizer.tokenize("12+484=496") == list("12+484=496")
        assert len(tokenizer) == 3 + 1 + 95

    def test_nothing_is_put_around_a_text(self):
        tokenizer = ArithmeticTokenizer().load()
        assert len(tokenizer("5").input_ids) == 1
        assert tokenizer("").input_ids == []
        assert tokenizer.bos_token is None

    def test_a_text_that_spells_a_special_token_of_other_models_is_text(self):
        tokenizer = ArithmeticTokenizer().load()
        assert tokenizer.tokenize("<pad></s>") == list("<pad></s>")

    def test_other_characters_are_one_unknown_each(self):
        tokenizer = ArithmeticTokenizer().load()
        unknown = tokenizer.unk_token_id
        digit = tokenizer.convert_tokens_to_ids("3")
        assert tokenizer("é3٣\t").input_ids == [unknown, digit, unknown, unknown]

    def test_its_number_tokens(self):
        digits = NumberVocabulary.from_tokenizer(self.width_three)
        assert digits.values == tuple(range(10))
        integers = NumberVocabulary.from_tokenizer(self.width_three, kind="integers")
        assert sorted(integers.values) == sorted([*range(10), *range(1000)])
        token_id = self.width_three.convert_tokens_to_ids("042")
        assert integers.value_table()[token_id] == 42

    @pytest.mark.parametrize("number_width", [None, 3])
    def test_it_can_be_saved_and_loaded(self, number_width, tmp_path):
        tokenizer = ArithmeticTokenizer(number_width=number_width).load()
        tokenizer.save_pretrained(tmp_path)
        text = "y(-1.5, 484) =\n 1234"
        for again in [
            AutoTokenizer.from_pretrained(tmp_path),
            PretrainedTokenizer(str(tmp_path)).load(),
        ]:
            assert again(text).input_ids == tokenizer(text).input_ids
            assert again.decode(again(text).input_ids) == text
            assert again.special_tokens_map == tokenizer.special_tokens_map

    @pytest.mark.parametrize("number_width", [-1, 0, 1, 5])
    def test_other_widths(self, number_width):
        with pytest.raises(ValueError, match=f"must be 2, 3 or 4, or null.*got {number_width}"):
            ArithmeticTokenizer(number_width=number_width).load()


class TestDecoding:
    @pytest.mark.parametrize("name", REAL)
    def test_only_bert_decodes_with_spaces(self, name, real_tokenizer):
        assert decodes_with_spaces(real_tokenizer(name)) == (name == "bert")

    def test_byte_and_arithmetic_tokenizers_decode_without_spaces(self):
        assert not decodes_with_spaces(ByT5Tokenizer())
        assert not decodes_with_spaces(ArithmeticTokenizer().load())

    @pytest.mark.parametrize("tokens", [["<unk>", "1", "2"], ["<unk>", "12", ".", "34"]])
    def test_words_without_a_decoder_are_joined_by_spaces(self, tokens):
        assert decodes_with_spaces(word_level(tokens))

    def test_ignored_labels_never_reach_the_tokenizer(self, real_tokenizer):
        assert decode_answer(real_tokenizer("t5"), [305, 1, -100, -100]) == "5"

    def test_ids_beyond_the_tokenizer_have_no_text(self, real_tokenizer):
        # A head of 32128 may name ids from 32100 on.
        assert decode_answer(real_tokenizer("t5"), [305, 32127, 1]) == "5"
        assert decode_answer(ByT5Tokenizer(), [56, 500, 1]) == "5"

    def test_ids_may_be_left_out_of_a_vocabulary(self):
        tokenizer = digits_from_ten()
        assert (len(tokenizer), num_token_ids(tokenizer)) == (13, 20)
        assert tokenizer("407").input_ids == [14, 10, 17]
        assert decode_answer(tokenizer, [14, 10, 17, 1, -100]) == "407"
        # 5 has no token, and 20 lies beyond all.
        assert decode_answer(tokenizer, [14, 5, 20, 17]) == "47"
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        assert (vocabulary.token_ids, vocabulary.width) == (tuple(range(10, 20)), 20)

    def test_special_tokens_are_left_out(self, real_tokenizer):
        tokenizer = real_tokenizer("llama2")
        assert decode_answer(tokenizer, tokenizer(SENTENCE).input_ids) == SENTENCE

    def test_no_answer_is_an_empty_text(self, real_tokenizer):
        assert decode_answer(real_tokenizer("t5"), []) == ""
        assert decode_answer(real_tokenizer("t5"), [-100, 1]) == ""

    @pytest.mark.parametrize("name", ["bert", "t5", "llama2"])
    def test_many_answers_are_decoded_as_each_alone(self, real_tokenizer, name):
        tokenizer = real_tokenizer(name)
        rows = [tokenizer(text).input_ids for text in ("-1,234.5", "", SENTENCE)] + [[-100]]
        assert decode_answers(tokenizer, rows) == [decode_answer(tokenizer, row) for row in rows]
        assert decode_answers(tokenizer, []) == []

    def test_blanks_of_the_text_stay(self, real_tokenizer):
        # Cleaning up would turn ` .` into `.` and ` 's` into `'s`.
        tokenizer = real_tokenizer("gpt2")
        text = "1 , 2 . 5 's"
        assert decode_answer(tokenizer, tokenizer(text).input_ids) == text
