import re
from dataclasses import fields
from decimal import Decimal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from ntl_lightning.numbers import (
    NumberVocabulary,
    digit_level_copy,
    find_numbers,
    label_counts,
    number_runs,
)

DIGITS = "0123456789"
IGNORED = -100
# No letter of exponents, other bases or factors.
CHARACTERS = [*DIGITS, *".,- +k()%\u2212"]
PIECES = [*CHARACTERS, *(f"{n:02d}" for n in range(100)), *(f"{n:03d}" for n in range(1000))]


def word_level(tokens):
    """The vocabulary of a tokenizer with exactly these tokens, ids in their order."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(ids, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENS = ["<u>", *PIECES, *(f"▁{piece}" for piece in PIECES if piece != " ")]
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
VOCABULARY = NumberVocabulary.from_tokenizer(word_level(TOKENS), kind="integers")
FORMS = VOCABULARY.forms_table()
VALUES = VOCABULARY.value_table()


def runs_of(labels, vocabulary=VOCABULARY, quantities=None):
    labels = torch.as_tensor(labels).long()
    values = vocabulary.value_table()[labels.clamp(min=0)]
    is_number = ~values.isnan() & (labels >= 0)
    if quantities is not None:
        is_number &= torch.as_tensor(quantities)
    return number_runs(
        labels, vocabulary.forms_table(), is_number, torch.where(is_number, values, 0.0)
    )


def runs_of_tokens(*tokens, **settings):
    return runs_of([IDS[token] for token in tokens], **settings)


def written_numbers(labels, vocabulary=VOCABULARY):
    """The absolute values that the runs of one row of labels spell, exactly."""
    runs = runs_of(labels, vocabulary)
    value_of = dict(zip(vocabulary.token_ids, vocabulary.values, strict=True))
    values = {}
    for cell, label in enumerate(labels):
        if runs.is_digit[cell]:
            run = int(runs.run[cell])
            value = Decimal(repr(abs(value_of[label]))).scaleb(int(runs.place[cell]))
            values[run] = values.get(run, 0) + value
    assert list(values) == sorted(values)
    assert int(runs.num_runs) == len(values)
    return list(values.values())


def absolute_values(text):
    # A line end is a blank that parts thousands nowhere.
    return [abs(number.value) for number in find_numbers(text.replace(" ", "\n"))]


def with_space_tokens(pieces):
    return [IDS[piece] for piece in pieces]


def with_space_marks(pieces):
    """A blank becomes the space mark of the next piece, but for one before another blank."""
    labels, mark = [], ""
    for piece, following in zip(pieces, (*pieces[1:], None)[: len(pieces)], strict=True):
        if piece == " " and following not in (" ", None):
            mark = "▁"
        else:
            labels.append(IDS[mark + piece])
            mark = ""
    return labels


texts = st.one_of(
    st.text(alphabet=CHARACTERS, max_size=24),
    # Commas and points between few digits are rare in the above.
    st.lists(
        st.sampled_from(["1", "0", "12", "345", "000", "6789", ",", ",", ".", " ", "-", "k"]),
        max_size=12,
    ).map("".join),
)


class TestReading:
    TABLE = (
        ("345", ["345"]),
        ("12,345.60 -7 k3.14", ["12345.60", "7", "3.14"]),
        (".5 -.5 (.5", ["0.5", "0.5", "0.5"]),
        ("k.5 ).5 %.5 ..5", ["5", "5", "5", "5"]),
        ("k .5 ) .5 . .5", ["0.5", "0.5", "0.5"]),
        ("1,234,567", ["1234567"]),
        ("1,234,5", ["1", "234", "5"]),
        ("12,34", ["12", "34"]),
        ("1234,567", ["1234", "567"]),
        ("0,123", ["0", "123"]),
        ("012,345", ["12", "345"]),
        ("1.5,234", ["1.5", "234"]),
        (".500,234", ["0.5", "234"]),
        ("1,234.5,678", ["1", "234.5", "678"]),
        ("1, 234", ["1", "234"]),
        ("1 ,234", ["1", "234"]),
        ("1. 5", ["1", "5"]),
        ("1..5", ["1", "5"]),
        ("1.2.3", []),
        (".5.6", []),
        ("1,456.2.3", ["1"]),
        ("5.", ["5"]),
        ("3-2", ["3", "2"]),
        ("007", ["7"]),
        (",,.-+", []),
        ("", []),
    )

    @pytest.mark.parametrize(("text", "expected"), TABLE, ids=[text for text, _ in TABLE])
    @pytest.mark.parametrize("labels_of", [with_space_tokens, with_space_marks])
    def test_a_text_holds_the_numbers(self, text, expected, labels_of):
        expected = [Decimal(value) for value in expected]
        assert written_numbers(labels_of(list(text))) == expected
        assert absolute_values(text) == expected

    @given(texts)
    @pytest.mark.parametrize("labels_of", [with_space_tokens, with_space_marks])
    def test_any_text_reads_as_find_numbers_reads_it(self, labels_of, text):
        assert written_numbers(labels_of(list(text))) == absolute_values(text)

    @given(texts, st.data())
    @pytest.mark.parametrize("labels_of", [with_space_tokens, with_space_marks])
    def test_however_the_digits_are_cut(self, labels_of, text, data):
        pieces = cut(text, data)
        assert written_numbers(labels_of(pieces)) == absolute_values(text)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("3e5", ["3", "5"]), ("1_000", ["1", "0"]), ("1'000", ["1", "0"]), ("9x.6", ["9", "6"])],
    )
    def test_what_is_not_known_parts_numbers(self, text, expected):
        tokens = ["<u>", *DIGITS, *".,ex_'"]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens))
        labels = [tokens.index(character) for character in text]
        assert written_numbers(labels, vocabulary) == [Decimal(value) for value in expected]

    def test_a_blank_parts_thousands(self):
        assert written_numbers(with_space_marks(list("1 000 000"))) == [1, 0, 0]
        assert [number.value for number in find_numbers("1 000 000")] == [1000000]


def cut(text, data):
    """The text in pieces: runs of digits at random into one to three digits, the rest as it is."""
    pieces = []
    for part in re.findall(r"[0-9]+|[^0-9]", text):
        while part:
            size = data.draw(st.integers(1, 3)) if part[0] in DIGITS else 1
            pieces.append(part[:size])
            part = part[size:]
    return pieces


def expected_cells(pieces):
    """What the cells of the pieces of a text should hold, from the numbers in it, digit by digit.

    A list with, per piece, None or number, place, top place, last place, rest, digit tokens.
    """
    text = "".join(pieces)
    cells, start = [], 0
    numbers = find_numbers(text.replace(" ", "\n"))
    for piece in pieces:
        index = next((n for n, x in enumerate(numbers) if x.start <= start < x.end), None)
        if index is None or not piece.isdigit():
            cells.append(None)
        else:
            number = numbers[index]
            written = number.text.lstrip("+-\u2212").replace(",", "")
            integer, _, decimals = written.partition(".")
            behind = text[start + len(piece) : number.end].replace(",", "")
            # A point to the right: the piece is an integer one.
            right, _, right_decimals = behind.partition(".")
            is_integer = "." in behind or not decimals
            place = len(right) if is_integer else -(len(decimals) - len(behind))
            rest = Decimal(0)
            for n, digit in enumerate(reversed(right if is_integer else "")):
                rest += int(digit) * Decimal(10) ** n
            for n, digit in enumerate(right_decimals if is_integer else behind):
                rest += int(digit) * Decimal(10) ** ((0 if is_integer else place) - 1 - n)
            cells.append((index, place, len(integer) - 1, -len(decimals), rest))
        start += len(piece)
    return [
        cell and (*cell, sum(1 for other in cells if other and other[0] == cell[0]))
        for cell in cells
    ]


class TestFields:
    @given(texts, st.data())
    def test_every_cell_holds_what_counting_by_hand_gives(self, text, data):
        pieces = cut(text, data)
        runs = runs_of(torch.tensor(with_space_tokens(pieces), dtype=torch.int64))
        seen = set()
        number_of_run = {}
        for cell, expected in enumerate(expected_cells(pieces)):
            found = tuple(
                getattr(runs, name)[cell].item()
                for name in ("place", "top_place", "last_place", "rest", "num_digit_tokens")
            )
            assert bool(runs.is_digit[cell]) == (expected is not None)
            if expected is None:
                assert found == (0, 0, 0, 0, 0)
                assert not runs.is_first[cell]
                continue
            number, place, top_place, last_place, rest, num_digit_tokens = expected
            assert found == (
                place,
                top_place,
                last_place,
                pytest.approx(float(rest), rel=1e-14, abs=0),
                num_digit_tokens,
            )
            assert bool(runs.is_first[cell]) == (number not in seen)
            seen.add(number)
            assert number_of_run.setdefault(int(runs.run[cell]), number) == number
        assert len(number_of_run) == len(seen) == int(runs.num_runs)

    def test_a_number_spelled_out(self):
        runs = runs_of_tokens("12", ",", "345", ".", "67", "8")
        assert runs.is_digit.tolist() == [True, False, True, False, True, True]
        assert runs.is_first.tolist() == [True, False, False, False, False, False]
        assert runs.place.tolist() == [3, 0, 0, 0, -2, -3]
        assert runs.top_place[runs.is_digit].tolist() == [4, 4, 4, 4]
        assert runs.last_place[runs.is_digit].tolist() == [-3, -3, -3, -3]
        assert runs.rest.tolist() == [345.678, 0, 0.678, 0, 0.008, 0]
        assert runs.num_digit_tokens.tolist() == [4, 0, 4, 0, 4, 4]
        assert int(runs.num_runs) == 1

    def test_types_and_shapes(self):
        labels = torch.tensor(with_space_tokens("12 3.4 5")).view(2, 1, 4)
        runs = runs_of(labels)
        for field in fields(runs):
            assert getattr(runs, field.name).shape == labels.shape
        for name in ("run", "place", "top_place", "last_place", "num_digit_tokens"):
            assert getattr(runs, name).dtype == torch.int64
        assert runs.is_digit.dtype == runs.is_first.dtype == torch.bool
        assert runs.rest.dtype == torch.float64
        assert runs.num_runs.dtype == torch.int64
        assert runs.num_runs.shape == ()

    @given(texts, st.integers(0, 3))
    def test_runs_are_indices_of_cells(self, text, columns):
        labels = torch.tensor(with_space_tokens(text), dtype=torch.int64)
        labels = labels[:, None].expand(-1, columns)
        run = runs_of(labels).run
        assert ((run >= 0) & (run < max(labels.numel(), 1))).all()

    @pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
    def test_no_label_at_all(self, shape):
        runs = runs_of(torch.zeros(shape, dtype=torch.int64))
        assert all(getattr(runs, field.name).shape == shape for field in fields(runs))
        assert int(runs.num_runs) == 0


class TestRest:
    @given(st.text(alphabet=DIGITS, min_size=1, max_size=15), st.integers(0, 15))
    @example("333333333333333", 0)
    @example("999999999999999", 15)
    def test_up_to_fifteen_digits_it_is_the_nearest_float(self, digits, at):
        text = digits[:at] + "." + digits[at:] if at < len(digits) else digits
        runs = runs_of(with_space_tokens(text))
        for cell, expected in enumerate(expected_cells(list(text))):
            if expected is not None:
                assert runs.rest[cell].item() == float(expected[4])

    @pytest.mark.parametrize("size", [16, 40, 64, 65, 100, 128])
    @pytest.mark.parametrize("point", [False, True])
    def test_long_numbers_are_right_to_the_last_digits_of_a_float(self, size, point):
        digits = ("31415926535897932384626433832795028841971" * 4)[:size]
        text = f"7 {digits[:3]}.{digits[3:]} 9" if point else f"7 {digits} 9"
        runs = runs_of(with_space_tokens(text))
        for cell, expected in enumerate(expected_cells(list(text))):
            if expected is not None:
                assert runs.rest[cell].item() == pytest.approx(float(expected[4]), rel=1e-15, abs=0)

    @pytest.mark.parametrize("zeros", [1, 10, 62, 63, 64, 65, 100, 126])
    def test_the_last_digit_counts_from_afar(self, zeros):
        runs = runs_of(with_space_tokens("1" + "0" * zeros + "7"))
        assert runs.rest.tolist() == [7] * (zeros + 1) + [0]

    def test_what_lies_far_to_the_right_does_not_matter(self):
        runs = runs_of(with_space_tokens("1." + "3" * 1000))
        place = runs.place[0:1002:100].tolist()
        assert place == [0, *range(-99, -1000, -100)]
        assert (runs.rest[2:200] / 10.0 ** runs.place[2:200].double()).tolist() == pytest.approx(
            [1 / 3] * 198, rel=1e-14
        )
        assert runs.rest.isfinite().all()

    def test_integers_beyond_all_floats_stay_finite(self):
        runs = runs_of(with_space_tokens("9" * 1000))
        assert runs.rest.isfinite().all()
        assert runs.place.tolist() == list(range(999, -1, -1))
        assert runs.rest[-17:].tolist() == [float(10**n - 1) for n in range(16, -1, -1)]

    def test_a_large_number_takes_no_digits_from_its_neighbour(self):
        # A sum over all cells would leave nothing of the small number.
        runs = runs_of(with_space_tokens("9" * 40 + " 0.123"))
        assert runs.rest[-5:].tolist() == [0.123, 0, 0.023, 0.003, 0]


class TestBoundaries:
    def test_a_row_ends_a_number(self):
        labels = torch.tensor(with_space_tokens("12.3456.78"))
        runs = runs_of(labels.view(2, 5))
        assert runs.place.tolist() == [[1, 0, 0, -1, -2], [1, 0, 0, -1, -2]]
        assert int(runs.num_runs) == 2
        assert int(runs_of(labels).num_runs) == 0

    @given(st.lists(texts, min_size=1, max_size=4))
    def test_rows_do_not_see_each_other(self, rows):
        width = max(map(len, rows)) + 1
        labels = [[*with_space_tokens(row), *[IGNORED] * (width - len(row))] for row in rows]
        together = runs_of(labels)
        for row, alone in enumerate(map(runs_of, labels)):
            for name in ("is_digit", "is_first", "place", "top_place", "last_place", "rest"):
                assert torch.equal(getattr(together, name)[row], getattr(alone, name))

    def test_a_position_without_target_ends_a_number(self):
        labels = with_space_tokens("12345")
        labels[2] = IGNORED
        assert written_numbers(labels) == [12, 45]
        labels = with_space_tokens("12.45")
        labels[2] = IGNORED
        assert written_numbers(labels) == [12, 45]

    def test_a_point_at_the_very_beginning_is_a_decimal_point(self):
        assert written_numbers([IGNORED, *with_space_tokens(".5")]) == [Decimal("0.5")]

    def test_a_first_digit_and_a_first_point_may_begin_a_word(self):
        assert runs_of_tokens("▁1", "2", "▁3").place.tolist() == [1, 0, 0]
        assert runs_of_tokens("▁-", "1", "2").place.tolist() == [0, 1, 0]
        assert runs_of_tokens("4", "▁.", "5").place.tolist() == [0, 0, -1]


class TestIncomplete:
    def test_a_number_with_a_token_that_is_none_is_passed_over(self):
        tokens = ["<u>", *DIGITS, ".", ",", "▁", "42"]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens))

        def found(*pieces):
            return written_numbers([tokens.index(piece) for piece in pieces], vocabulary)

        # Of kind `digits`, 42 is a token of digits and no number token.
        assert found("1", "42", ".", "5", "▁", "7") == [7]
        assert found("42") == []
        # Its digits count where commas are judged: else 345 would be left over.
        assert found("42", ",", "3", "4", "5") == []
        assert found("3", ",", "42", "0") == []
        assert found("3", ",", "42") == [3]

    def test_a_number_that_is_no_quantity_is_passed_over(self):
        labels = with_space_tokens("12 34")
        runs = runs_of(labels, quantities=[False, False, True, True, True])
        assert runs.is_digit.tolist() == [False, False, False, True, True]
        runs = runs_of(labels, quantities=[True, True, True, True, False])
        assert runs.is_digit.tolist() == [True, True, False, False, False]
        assert int(runs.num_runs) == 1

    def test_a_number_token_with_sign_or_point_is_a_number_of_its_own(self):
        tokens = ["<u>", *DIGITS, ".", ",", "▁", "-3", "0.5", "12."]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens), kind="numbers")
        labels = [tokens.index(token) for token in ("-3", "▁", "4", "2", "▁", "0.5", ".", "▁")]
        runs = runs_of(labels, vocabulary)
        assert runs.is_digit.tolist() == [True, False, True, True, False, True, False, False]
        assert runs.is_first.tolist() == [True, False, True, False, False, True, False, False]
        assert runs.place.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
        assert runs.top_place.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
        assert runs.rest.tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
        assert runs.num_digit_tokens.tolist() == [1, 0, 2, 2, 0, 1, 0, 0]
        assert len({int(run) for run in runs.run[runs.is_digit]}) == int(runs.num_runs) == 3

    @pytest.mark.parametrize(
        "pieces",
        [
            ["-3", "5"],  # -35
            ["12.", "5"],  # 12.5
            ["4", "0.5"],
            ["-3", ".", "5"],  # -3.5
            ["-3", ",", "0", "0", "0"],  # -3,000
            ["a5", "3"],  # a53
            ["3", "5", "a5"],
            ["1", ".", "5", "a5"],
        ],
    )
    def test_where_it_touches_digits_neither_is_read(self, pieces):
        tokens = ["<u>", *DIGITS, ".", ",", "▁", "-3", "0.5", "12.", "a5"]
        vocabulary = NumberVocabulary.from_tokenizer(word_level(tokens), kind="numbers")
        labels = [tokens.index(token) for token in [*pieces, "▁", "7"]]
        assert written_numbers(labels, vocabulary) == [7]


class TestTracing:
    LABELS = with_space_tokens("1,234.5 k.5 1.2.3 0,123")

    def arguments(self, labels):
        is_number = (labels >= 0) & ~VALUES[labels.clamp(min=0)].isnan()
        return labels, FORMS, is_number, torch.where(is_number, VALUES[labels.clamp(min=0)], 0.0)

    def test_it_compiles_as_one_graph(self):
        labels = torch.tensor(self.LABELS + [IGNORED] * 2)[None].expand(3, -1)
        compiled = torch.compile(number_runs, fullgraph=True, backend="eager")
        expected, found = number_runs(*self.arguments(labels)), compiled(*self.arguments(labels))
        for field in fields(expected):
            assert torch.equal(getattr(expected, field.name), getattr(found, field.name))

    def test_it_never_looks_at_a_value_on_the_host(self):
        # Tensors of the meta device have none to look at.
        labels = torch.tensor(self.LABELS)[None]
        runs = number_runs(*(tensor.to("meta") for tensor in self.arguments(labels)))
        for field in fields(runs):
            tensor = getattr(runs, field.name)
            assert tensor.device.type == "meta"
            assert tensor.shape == labels.shape


class TestLabelCounts:
    def test_counts(self):
        labels = torch.tensor([[*with_space_tokens("12 k"), IGNORED, IDS["7"]]])
        is_number = torch.tensor([[True, True, False, False, False, True]])
        runs = runs_of(labels)
        counts = label_counts(labels, is_number, runs)
        assert {name: count.item() for name, count in counts.items()} == {
            "tokens": 5,
            "numbers": 3,
            "whole_numbers": 2,
        }
        assert all(count.dtype == torch.int64 and count.shape == () for count in counts.values())
        assert label_counts(labels, is_number).keys() == {"tokens", "numbers"}


class TestRealTokenizers:
    TEXT = "12,345.60 and -7 or 3.14, .5 (in 1,234 of 7,89) No.5 007 1999. $2,000.75: 10 50% 1.2.3"
    NUMBERS = ("12345.6", "7", "3.14", "0.5", "1234", "7", "89", "5", "7", "1999", "2000.75")

    @pytest.mark.parametrize(
        "name",
        [
            *("gemma3", "gpt2", "gptoss_o200k", "granite3", "llama2", "llama3"),
            *("mistral_v3", "phi3", "qwen3", "smollm2", "t5"),
        ],
    )
    def test_at_digit_level_the_text_is_read_as_find_numbers_reads_it(self, name, real_tokenizer):
        tokenizer = digit_level_copy(real_tokenizer(name))
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        labels = tokenizer.encode(self.TEXT, add_special_tokens=False)
        expected = [Decimal(number) for number in (*self.NUMBERS, "10", "50")]
        assert written_numbers(labels, vocabulary) == expected
        assert [abs(number.value) for number in find_numbers(self.TEXT)] == expected

    @pytest.mark.parametrize("name", ["gpt2", "gptoss_o200k", "llama3", "qwen3", "gemma3"])
    @pytest.mark.filterwarnings("ignore:The number tokens are unbounded")
    def test_so_it_is_with_tokens_of_several_digits(self, name, real_tokenizer):
        tokenizer = real_tokenizer(name)
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer, kind="integers", largest=None)
        labels = tokenizer.encode(self.TEXT, add_special_tokens=False)
        expected = [abs(number.value) for number in find_numbers(self.TEXT)]
        assert written_numbers(labels, vocabulary) == expected

    @pytest.mark.parametrize("kind", ["digits", "integers", "numbers"])
    @pytest.mark.filterwarnings("ignore:The number tokens are unbounded")
    def test_t5_whose_tokens_hold_points_and_signs_reads_only_what_is_there(
        self, kind, real_tokenizer
    ):
        tokenizer = real_tokenizer("t5")
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer, kind=kind, largest=None)
        labels = tokenizer.encode(self.TEXT, add_special_tokens=False)
        # ▁12, 34 5.6 0; ▁3. 14; ▁1, 2 34; ▁7, 89; ▁$2 ,000. 75 and ▁50% are no numbers.
        expected = {
            "digits": ["0.5", "5"],
            "integers": ["0.5", "5", "7", "1999", "10"],
            "numbers": ["7", "0.5", "5", "7", "1999", "10"],
        }[kind]
        assert written_numbers(labels, vocabulary) == [Decimal(value) for value in expected]

    def test_bert_parts_digits_only_where_something_stands_between(self, real_tokenizer):
        tokenizer = digit_level_copy(real_tokenizer("bert"))
        vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
        labels = tokenizer.encode("1,234.5 of 12 34 and 7", add_special_tokens=False)
        assert written_numbers(labels, vocabulary) == [Decimal("1234.5"), 1234, 7]
