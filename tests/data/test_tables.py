import csv
import datetime
import json
import re
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntl_lightning.data import (
    GSM8K,
    SVAMP,
    Csv,
    Example,
    HubDataset,
    JsonLines,
    MultiRC,
    Parquet,
    RJokes,
    RowFilter,
    Source,
)


def texts(source: Source) -> list[tuple[str, str | None]]:
    return [(e.prompt, e.target) for e in source.examples()]


# ---- JsonLines


def test_json_lines_give_columns_and_templates(write):
    path = write(
        '{"question": "How many?", "a": 3, "b c": "four", "yes": true}\n'
        '{"question": "Why?", "a": -4, "b c": "Zoë", "yes": false}\n',
        "train.jsonl",
    )
    assert JsonLines(path, "question", "a").examples() == [
        Example("How many?", "3", "train.jsonl:1"),
        Example("Why?", "-4", "train.jsonl:2"),
    ]
    assert texts(JsonLines(path, "{question} {b c}!", "{a} {yes}")) == [
        ("How many? four!", "3 true"),
        ("Why? Zoë!", "-4 false"),
    ]


@pytest.mark.parametrize(
    "number", ["0.10", "1e400", "1E-3", "-0", "5.0", "1" * 5000, "0.1000000000000000055511151231"]
)
def test_json_numbers_keep_their_text(write, number):
    path = write('{"q": "?", "a": ' + number + "}")
    assert texts(JsonLines(path, "q", "a")) == [("?", number)]


def test_a_column_whose_name_has_braces_is_a_column_where_it_exists(write):
    path = write('{"{x}": "column", "x": "field"}')
    assert texts(JsonLines(path, "{x}", "{x}!")) == [("column", "field!")]


def test_without_target_the_answer_is_unknown(write):
    assert texts(JsonLines(write('{"q": "?"}'), "q", None)) == [("?", None)]


def test_blank_lines_are_passed_over_and_counted(write):
    path = write('\n{"q": "a", "n": 1}\n  \r\n\n{"q": "b", "n": 2}\r\n\n')
    assert [(e.prompt, e.origin) for e in JsonLines(path, "q", "n").examples()] == [
        ("a", "data.jsonl:2"),
        ("b", "data.jsonl:5"),
    ]


def test_only_line_feeds_end_a_json_line(write):
    path = write('{"q": "a\u2028b\x85c", "n": 1}\n{"q": "d", "n": 2}')
    assert texts(JsonLines(path, "q", "n")) == [("a\u2028b\x85c", "1"), ("d", "2")]


def test_a_byte_order_mark_of_utf_8_is_accepted(write):
    path = write(b'\xef\xbb\xbf{"q": "\xc3\xa9", "n": 1}')
    assert texts(JsonLines(path, "q", "n")) == [("é", "1")]


def test_max_examples_takes_the_first_and_leaves_the_rest_unread(write):
    path = write('{"q": "a", "n": 1}\n{"q": "b", "n": 2}\nnot JSON\n')
    assert texts(JsonLines(path, "q", "n", max_examples=2)) == [("a", "1"), ("b", "2")]


def test_max_examples_may_exceed_what_there_is(write):
    path = write('{"q": "a", "n": 1}\n{"q": "b", "n": 2}\n')
    assert len(JsonLines(path, "q", "n", max_examples=3).examples()) == 2


def test_paths_may_have_variables(write, tmp_path, monkeypatch):
    write('{"q": "?", "n": 1}', "here.jsonl")
    monkeypatch.setenv("NTL_FOLDER", str(tmp_path))
    assert texts(JsonLines("${NTL_FOLDER}/here.jsonl", "q", "n")) == [("?", "1")]


def test_a_variable_that_is_not_set_is_named_with_its_key(monkeypatch):
    monkeypatch.delenv("NTL_FOLDER", raising=False)
    with pytest.raises(ValueError, match=r"JsonLines\.path: .*NTL_FOLDER"):
        JsonLines("${NTL_FOLDER}/here.jsonl", "q", "n").examples()


def test_relative_paths_start_at_the_working_folder(write, tmp_path, monkeypatch):
    write('{"q": "?", "n": 1}', "here.jsonl")
    monkeypatch.chdir(tmp_path)
    assert texts(JsonLines("here.jsonl", "q", "n")) == [("?", "1")]


def test_a_missing_file_is_named_with_the_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = re.escape(str(tmp_path / "gone.jsonl"))
    with pytest.raises(FileNotFoundError, match=rf"JsonLines\.path: there is no file {place} "):
        JsonLines("gone.jsonl", "q", "n").examples()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"Csv\.path: /.* is a folder"):
        Csv(str(tmp_path), "q", "n").examples()


GOOD = '{"q": "?", "n": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"data\.jsonl: the file is empty"),
        ("\n \n", r"data\.jsonl: the file has blank lines only"),
        (GOOD * 2 + '{"q": "?", "n": }\n', r":3: not JSON at character 17: Expecting value"),
        (GOOD + '{"q": "?"', r":2: not JSON at character 10: Expecting ',' delimiter"),
        ("{\n" + GOOD, r":1: not JSON at character 2: .*Every line must be one whole JSON object"),
        (GOOD + '{"q": "' + "x" * 200, r':2: not JSON .*"q": "x{70}\.\.\.'),
        (GOOD.strip() + "\r" + GOOD, r":1: not JSON at .*Extra data.*convert the line ends"),
        (GOOD + '{"q": ' + "[" * 100_000, r":2: lists or objects are nested too deeply"),
        (GOOD + "[1, 2]\n", r":2: not a JSON object: '\[1, 2\]'"),
        (GOOD + "7\n", r":2: not a JSON object: '7'"),
        ('{"q": "?", "n": 1, "q": "!"}', r":1: the key 'q' stands twice"),
        (GOOD + '{"q": "?"}', r":2: there is no column 'n', which JsonLines\.target names\. .*'q'"),
        (
            GOOD + '{"q": null, "n": 1}',
            r":2: the column 'q', which JsonLines\.prompt names, is empty",
        ),
        (GOOD + '{"q": "?", "n": NaN}', r":2: the column 'n', .* has no value \(nan\)"),
        (GOOD + '{"q": "?", "n": -Infinity}', r":2: the column 'n', .* has no value \(-inf\)"),
        (GOOD + '{"q": "?", "n": [1]}', r":2: the column 'n', .* holds a list"),
        (GOOD + '{"q": "?", "n": {"a": 1}}', r":2: the column 'n', .* holds an object"),
        (GOOD + '{"q": "?", "n": " "}', r":2: the column 'n', .*\.target names, is empty"),
        (GOOD + '{"q": "", "n": 1}', r":2: the column 'q', .*\.prompt names, is empty"),
        (GOOD + '{"q": "\\ud83d", "n": 1}', r":2: the column 'q' has half of a surrogate pair"),
        (
            GOOD + '{"q": "?", "n": "nan"}',
            r":2: the column 'n', .*\.target names, is nan, which",
        ),
        (b"\x1f\x8b\x08\x00", r"/data\.jsonl: the file is compressed\. Unpack it: gunzip "),
        (GOOD.encode("utf-16"), r":1: byte 1 of the line is 0xff, .*iconv -f UTF-16 -t UTF-8"),
        (GOOD.encode("utf-16-be"), r":1: byte 1 of the line is 0x00, .*UTF-16"),
        (b"\xfe\xff" + GOOD.encode("utf-16-be"), r":1: byte 1 of the line is 0xfe, .*UTF-16"),
        (GOOD.encode("utf-32"), r":1: byte 1 of the line is 0xff, .*UTF-32"),
        (GOOD.encode() + b'{"q": "caf\xe9"}', r":2: byte 11 of the line is 0xe9, .*ISO-8859-1"),
        (b'\xef\xbb\xbf{"q": "caf\xe9"}', r":1: byte 14 of the line is 0xe9, .*convert it"),
    ],
)
def test_faults_in_a_file_are_named_with_their_line(write, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        JsonLines(write(content), "q", "n").examples()
    assert "/data.jsonl:" in str(caught.value)


def test_an_unused_column_may_hold_anything(write):
    path = write('{"q": "?", "n": 1, "x": null, "y": [NaN, {}]}')
    assert texts(JsonLines(path, "q", "n")) == [("?", "1")]


def test_a_name_that_is_no_column_lists_those_that_exist(write):
    with pytest.raises(ValueError, match=r"no column 'question', .* are 'q', 'n'\..*braces"):
        JsonLines(write(GOOD), "question", "n").examples()


def test_a_template_with_an_unknown_column_lists_those_that_exist(write):
    with pytest.raises(ValueError, match=r":1: there is no column 'm', .*target.* are 'q', 'n'\."):
        JsonLines(write(GOOD), "q", "{n} and {m}").examples()


def test_a_template_with_a_stray_brace_names_its_key(write):
    with pytest.raises(ValueError, match=r"JsonLines\.target: .*without its partner"):
        JsonLines(write(GOOD), "q", "{n").examples()


def test_no_column_of_a_target_may_be_empty_but_one_of_a_prompt_may(write):
    path = write('{"title": "", "q": "?", "n": 1}')
    assert texts(JsonLines(path, "{title}{q}", "n")) == [("?", "1")]
    with pytest.raises(ValueError, match=r":1: the column 'title', .*target names, is empty"):
        JsonLines(path, "q", "{title}{n}").examples()


MAKE = {
    "JsonLines": lambda **settings: JsonLines("x", "q", "n", **settings),
    "Csv": lambda **settings: Csv("x", "q", "n", **settings),
    "Parquet": lambda **settings: Parquet("x", "q", "n", **settings),
    "HubDataset": lambda **settings: HubDataset("x", "q", "n", "train", **settings),
    "GSM8K": lambda **settings: GSM8K("x", **settings),
    "SVAMP": lambda **settings: SVAMP("x", **settings),
    "RJokes": lambda **settings: RJokes("x", **settings),
    "MultiRC": lambda **settings: MultiRC("x", **settings),
}


@pytest.mark.parametrize("max_examples", [0, -1])
@pytest.mark.parametrize("name", MAKE)
def test_max_examples_must_be_positive(name, max_examples):
    with pytest.raises(ValueError, match=rf"{name}\.max_examples must be .* got {max_examples}"):
        MAKE[name](max_examples=max_examples)


# ---- Columns that are no quantities

TABLES = {
    "JsonLines": '{"q": "?", "room": 12, "t": "19.5", "name": "R12"}\n'
    '{"q": "!", "room": "7b", "t": 4, "name": "x"}\n',
    "Csv": "q,room,t,name\n?,12,19.5,R12\n!,7b,4,x\n",
}


def marked(source):
    return [[e.target[a:b] for a, b in e.not_quantities] for e in source.examples()]


@pytest.mark.parametrize("kind", [JsonLines, Csv])
@pytest.mark.parametrize(
    ("target", "columns", "expected"),
    [
        ("{room}: {t}", ["room"], [["12"], ["7b"]]),
        ("{t} in {{}} {room}{name}", ["room"], [["12"], ["7b"]]),
        ("{room}{t}{room} {name}", ["room", "name"], [["12", "12", "R12"], ["7b", "7b", "x"]]),
        ("room", ["room"], [["12"], ["7b"]]),
        ("{t}", [], [[], []]),
    ],
)
def test_columns_are_marked_where_they_stand_in_the_target(write, kind, target, columns, expected):
    source = kind(write(TABLES[kind.__name__]), "q", target, not_quantities=tuple(columns))
    assert marked(source) == expected


@pytest.mark.parametrize("kind", [JsonLines, Csv])
@pytest.mark.parametrize("column", ["q", "rom", r"room (\d+)"])
def test_a_column_that_is_not_in_the_target_cannot_be_marked(write, kind, column):
    name = kind.__name__
    source = kind(write(TABLES[name]), "q", "{room}: {t}", not_quantities=("t", column))
    message = rf"{name}\.not_quantities: .* is no column of {name}\.target, which has 'room', 't'\."
    with pytest.raises(ValueError, match=message) as error:
        source.examples()
    assert repr(column) in str(error.value)


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_columns_of_no_target_cannot_be_marked(kind):
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"{name}\.not_quantities .* {name}\.target is null"):
        kind("x", "q", None, not_quantities=("room",))


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_text_is_not_taken_for_the_list_of_its_letters(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.not_quantities .* 'room' alone"):
        kind("x", "q", "{room}: {t}", not_quantities="room")


def _is_answer(text):
    return text.strip() and text.strip().lstrip("+-").lower() not in ("nan", "inf", "infinity")


_values = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(_is_answer),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)


@given(rows=st.lists(st.tuples(_values, _values), min_size=1, max_size=5), ascii_only=st.booleans())
def test_what_the_json_module_writes_is_read_back(tmp_path_factory, rows, ascii_only):
    path = tmp_path_factory.mktemp("json") / "rows.jsonl"
    lines = [json.dumps({"q": q, "n": n}, ensure_ascii=ascii_only) for q, n in rows]
    path.write_bytes("\n".join(lines).encode())

    def text(value) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    expected = [(text(q), text(n)) for q, n in rows]
    assert texts(JsonLines(str(path), "q", "n")) == expected


# ---- Csv


def test_csv_gives_columns_and_templates_as_they_stand(write):
    path = write("name,log solubility,x\nAmigdalin,-0.770,1e5\nFen  fur,+3.,007\n", "t.csv")
    assert Csv(path, "name", "log solubility").examples() == [
        Example("Amigdalin", "-0.770", "t.csv:2"),
        Example("Fen  fur", "+3.", "t.csv:3"),
    ]
    assert texts(Csv(path, "{name} at {x}:", "{log solubility} mol"))[1] == (
        "Fen  fur at 007:",
        "+3. mol",
    )


def test_csv_fields_may_be_quoted_and_lines_are_still_counted(write):
    path = write('q,n\n"a, ""b""\nc",1\n\nd,2\n', "t.csv")
    assert Csv(path, "q", "n").examples() == [
        Example('a, "b"\nc', "1", "t.csv:2"),
        Example("d", "2", "t.csv:5"),
    ]


def test_csv_line_ends_of_windows_and_the_mark_of_utf_8_are_accepted(write):
    path = write(b"\xef\xbb\xbfq,n\r\na,1\r\nb,2\r\n", "t.csv")
    assert texts(Csv(path, "q", "n")) == [("a", "1"), ("b", "2")]


def test_csv_may_be_split_by_another_character(write):
    path = write("q\tn\na,b\t1\n", "t.tsv")
    assert texts(Csv(path, "q", "n", delimiter="\t")) == [("a,b", "1")]


def test_csv_cells_may_be_longer_than_the_csv_module_allows(write):
    limit = csv.field_size_limit()
    long = "x" * (limit + 1)
    assert texts(Csv(write(f"q,n\n{long},1\n", "t.csv"), "q", "n")) == [(long, "1")]
    assert csv.field_size_limit() == limit


def test_csv_without_target_and_with_max_examples(write):
    path = write("q\na\nb\n", "t.csv")
    assert texts(Csv(path, "q", None, max_examples=1)) == [("a", None)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"/t\.csv: the file is empty"),
        ("\n\n", r"/t\.csv: the file has no rows below its header"),
        ("q,n\n", r"/t\.csv: the file has no rows below its header"),
        ("q,n\na,1\nb,2,3\n", r"/t\.csv:3: the row has 3 fields, the header 2"),
        ("q,n\n\na\n", r"/t\.csv:3: the row has 1 fields, the header 2"),
        (
            'q,n\n"a\n',
            r"/t\.csv:2: the row that begins .*plain characters, set Csv\.quote: null",
        ),
        ("q,n,q\na,1,b\n", r"/t\.csv:1: two columns are called 'q'"),
        ('q,n\n"a\nb",1\n"c,2\nd,3\n', r"/t\.csv:4: the row that begins here is not CSV"),
        ('q,n\n"a"b,1\n', r"/t\.csv:2: the row that begins here is not CSV.*written twice"),
        ("q,n\na\rb,1\n", r"/t\.csv:2: the row that begins here is not CSV.*the line ends"),
        ('q,n\r"a","1"\r', r"/t\.csv:1: the row that begins here is not CSV.*tr '\\r' '\\n'"),
        ("q,n\na,1\nb,\n", r"/t\.csv:3: the column 'n', which Csv\.target names, is empty"),
        ("q,n\na,1\nb,-inf\n", r"/t\.csv:3: the column 'n', which Csv\.target names, is -inf"),
        ("q,n\na, NaN\n", r"/t\.csv:2: the column 'n', .* is NaN, which no answer can be measured"),
        ("q,n\n,1\n", r"/t\.csv:2: the column 'q', which Csv\.prompt names, is empty"),
        ("q;n\na;1\n", r"/t\.csv:2: there is no column 'q', .*\. The columns here are 'q;n'\."),
        ("q,n\na,1\n".encode("utf-16"), r"/t\.csv:1: byte 1 .* 0xff, .*UTF-16"),
        ("q,n\nb\xe9,1\n".encode("latin-1"), r"/t\.csv:2: byte 2 .* 0xe9, .*ISO-8859-1"),
    ],
)
def test_faults_in_a_table_are_named_with_their_line(write, content, message):
    with pytest.raises(ValueError, match=message):
        Csv(write(content, "t.csv"), "q", "n").examples()


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\\t"])
def test_csv_refuses_a_delimiter_that_is_not_one_character(delimiter):
    with pytest.raises(ValueError, match=r"Csv\.delimiter must be one character"):
        Csv("x", "q", "n", delimiter=delimiter)


def test_a_csv_template_with_an_unknown_column_lists_those_that_exist(write):
    path = write("q,n\na,1\n", "t.csv")
    with pytest.raises(ValueError, match=r"t\.csv:2: there is no column 'm', .* are 'q', 'n'\."):
        Csv(path, "{q} {m}", "n").examples()


@pytest.mark.parametrize("text", ["Nan", "Infinite", "nano", "information", "-"])
def test_words_that_only_look_like_numbers_are_texts(write, text):
    assert texts(Csv(write(f"q,n\na,{text}\n", "t.csv"), "q", "n")) == [("a", text)]


def test_a_prompt_may_say_nan(write):
    assert texts(Csv(write("q,n\nnan,1\n", "t.csv"), "q", "n")) == [("nan", "1")]


GLUE = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane is taking off.\t"
    "An air plane is taking off.\t5.000\n"
    '1\tmain-news\theadlines\t2015\t0002\tnone\tnone\t"Like clockwork\tHe said "no.\t0.800\n'
    "2\tmain-forums\tdeft\t2014\t0003\tnone\tnone\tIt's 5'10\" tall. \tIt's, well, tall.\t3.2\n"
)
PAIR = "stsb sentence1: {sentence1} sentence2: {sentence2}"


def test_sentence_pairs_of_glue_keep_their_unbalanced_quotes(write):
    source = Csv(write(GLUE, "dev.tsv"), PAIR, "score", delimiter="\t", quote=None)
    assert source.examples() == [
        Example(
            "stsb sentence1: A plane is taking off. sentence2: An air plane is taking off.",
            "5.000",
            "dev.tsv:2",
        ),
        Example('stsb sentence1: "Like clockwork sentence2: He said "no.', "0.800", "dev.tsv:3"),
        Example(
            "stsb sentence1: It's 5'10\" tall.  sentence2: It's, well, tall.", "3.2", "dev.tsv:4"
        ),
    ]


def test_sentence_pairs_without_a_header_and_a_score_can_be_predicted(write):
    lines = [line.rpartition("\t")[0] for line in GLUE.splitlines()[1:]]
    names = tuple(GLUE.split("\n")[0].split("\t")[:-1])
    path = write("\n".join(lines), "test.tsv")
    source = Csv(path, PAIR, None, delimiter="\t", quote=None, columns=names)
    labelled = Csv(write(GLUE, "dev.tsv"), PAIR, "score", delimiter="\t", quote=None)
    assert texts(source) == [(prompt, None) for prompt, _ in texts(labelled)]
    assert source.examples()[0].origin == "test.tsv:1"


def test_without_quotes_every_line_is_a_row(write):
    path = write('q\tn\n"a\t1\nb"\t2\n\n', "t.tsv")
    source = Csv(path, "q", "n", delimiter="\t", quote=None)
    assert texts(source) == [('"a', "1"), ('b"', "2")]


def test_fields_may_be_quoted_by_another_character(write):
    path = write("q,n\n'a, \"b','1'\n", "t.csv")
    assert texts(Csv(path, "q", "n", quote="'")) == [('a, "b', "1")]


@pytest.mark.parametrize(
    ("settings", "content", "message"),
    [
        (
            {"quote": None},
            'q,n\n"a,b",1\n',
            r":2: .* 3 fields, the header 2\..*Csv\.quote is null",
        ),
        ({"columns": ("q", "n")}, "a,1\nb\n", r":2: the row has 1 fields, Csv\.columns 2 names\."),
        ({"columns": ("q", "n")}, "\n", r"t\.csv: the file has no rows\."),
    ],
)
def test_rows_that_do_not_fit_the_settings_are_named(write, settings, content, message):
    with pytest.raises(ValueError, match=message):
        Csv(write(content, "t.csv"), "q", "n", **settings).examples()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quote": ""}, r"Csv\.quote must be one character, or null"),
        ({"quote": "\n"}, r"Csv\.quote must be one character, or null"),
        ({"quote": "|", "delimiter": "|"}, r"Csv\.delimiter must be .* other than the quote"),
        ({"columns": "qn"}, r"Csv\.columns must be a list of different names, got 'qn'"),
        ({"columns": ("q", "q")}, r"Csv\.columns must be a list of different names"),
    ],
)
def test_settings_of_csv_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Csv("x", "q", "n", **settings)


_fields = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"))


@given(rows=st.lists(st.tuples(_fields, _fields), min_size=1, max_size=5))
def test_what_the_csv_module_writes_is_read_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("a", "b"), *rows])
    read = texts(Csv(str(path), "[{a}]", None))
    assert read == [(f"[{a}]", None) for a, _ in rows]


def test_solubilities_of_the_real_table_are_read_exactly(assets):
    path = str(assets / "data/esol/delaney-processed.csv")
    column = "measured log solubility in mols per litre"
    examples = Csv(path, "smiles", column).examples()
    assert len(examples) == 1128
    assert examples[1] == Example("Cc1occc1C(=O)Nc2ccccc2", "-3.3", "delaney-processed.csv:3")
    assert texts(Csv(path, "smiles", f"{{{column}}}")) == [(e.prompt, e.target) for e in examples]


def test_answers_of_the_real_mathematics_files_are_read_exactly(assets):
    path = str(assets / "data/mathematics_dataset/extrapolate.jsonl")
    examples = JsonLines(path, "{module}: {question}", "answer").examples()
    assert len(examples) == 350
    assert examples[0].target == "715976.855648917"


def test_a_json_array_is_refused_as_json_lines(assets):
    with pytest.raises(ValueError, match=r"SVAMP\.json:1: .*Every line must be one whole"):
        JsonLines(str(assets / "data/svamp/SVAMP.json"), "Body", "Answer").examples()


# ---- Parquet


@pytest.fixture
def parquet(tmp_path):
    """Writes a Parquet file and returns its path."""

    def parquet(columns, name="t.parquet", **settings) -> str:
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, tmp_path / name, **settings)
        return str(tmp_path / name)

    return parquet


def test_parquet_gives_columns_and_templates(parquet):
    path = parquet({"q": ["a", "b"], "n": [1, -20], "x": ["é", ""]})
    assert Parquet(path, "q", "n").examples() == [
        Example("a", "1", "t.parquet[0]"),
        Example("b", "-20", "t.parquet[1]"),
    ]
    assert texts(Parquet(path, "{q}{x}?", "{n} {{}}")) == [("aé?", "1 {}"), ("b?", "-20 {}")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([0.1, 5.0, -0.0, 1e-7, 1e300]), ["0.1", "5.0", "-0.0", "1e-07", "1e+300"]),
        (pa.array([0.1, 16777216], pa.float32()), ["0.1", "16777216.0"]),
        (pa.array(np.array([0.1, 2.5], np.float16)), ["0.1", "2.5"]),
        (pa.array([2**63 - 1, -(2**63)]), ["9223372036854775807", "-9223372036854775808"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([Decimal("0.10"), Decimal("-3.00")]), ["0.10", "-3.00"]),
        (pa.array([Decimal("0.0000000")]), ["0.0000000"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([datetime.date(2024, 5, 17)]), ["2024-05-17"]),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ["b", "a", "b"]),
        (pa.array(["0.10"], pa.large_string()), ["0.10"]),
    ],
)
def test_values_of_parquet_are_written_without_loss(parquet, values, expected):
    path = parquet({"q": ["?"] * len(values), "n": values})
    assert [target for _, target in texts(Parquet(path, "q", "n"))] == expected


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_single_precision_is_read_back_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    pq.write_table(pa.table({"n": pa.array(values, pa.float32())}), path)
    written = [prompt for prompt, _ in texts(Parquet(str(path), "n", None))]
    assert np.array_equal(np.array(written, np.float32), np.array(values, np.float32))
    assert all(len(text) <= len(repr(value)) for text, value in zip(written, values, strict=True))


def test_rows_are_counted_over_batches_and_row_groups(parquet):
    path = parquet({"n": list(range(2500))}, row_group_size=700)
    examples = Parquet(path, "n", "n").examples()
    assert [e.target for e in examples] == [str(i) for i in range(2500)]
    assert examples[2345].origin == "t.parquet[2345]"


def test_columns_that_are_not_needed_are_not_read(parquet):
    path = parquet(pa.table({"q": ["a"], "n": [1], "wide": [list(range(10))]}))
    whole = Path(path).read_bytes()
    metadata = pq.read_metadata(path).row_group(0)
    (column,) = (c for c in map(metadata.column, range(3)) if c.path_in_schema[:4] == "wide")
    start = column.dictionary_page_offset or column.data_page_offset
    broken = whole[:start] + b"\xff" * column.total_compressed_size
    Path(path).write_bytes(broken + whole[len(broken) :])
    assert texts(Parquet(path, "q", "n")) == [("a", "1")]
    with pytest.raises(ValueError, match=r"t\.parquet: not a Parquet file that can be read"):
        Parquet(path, "wide", "n").examples()


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"prompt": "x"}, "prompt"),
        ({"prompt": "{x}{n}"}, "prompt"),
        ({"target": "x"}, "target"),
        ({"id_column": "x"}, "id_column"),
        ({"filters": (RowFilter("n", at_least=0), RowFilter("x", matches="."))}, r"filters\[1\]"),
    ],
)
def test_columns_that_a_parquet_file_lacks_are_named_with_their_setting(parquet, settings, setting):
    path = parquet({"q": ["a"], "n": [1]})
    message = rf"t\.parquet: there is no column 'x', which Parquet\.{setting} names\. .* 'q', 'n'\."
    with pytest.raises(ValueError, match=message):
        Parquet(**{"path": path, "prompt": "q", "target": None, **settings}).examples()


def test_parquet_stops_at_max_examples(parquet):
    path = parquet({"q": ["a", "b", None], "n": [1, 2, 3]})
    assert texts(Parquet(path, "q", "n", max_examples=2)) == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"q": ["a"]}, r"Parquet\.target names\. The columns here are 'q', 'other'\."),
        ({"q": ["a", "b"], "n": [1, None]}, r"t\.parquet\[1\]: the column 'n', .* \(null\)"),
        ({"q": ["a"], "n": [float("nan")]}, r"t\.parquet\[0\]: the column 'n', .* \(nan\)"),
        ({"q": ["a"], "n": [float("-inf")]}, r"t\.parquet\[0\]: the column 'n', .* \(-inf\)"),
        (
            {"q": ["a"], "n": ["inf"]},
            r"t\.parquet\[0\]: the column 'n', .* is inf, which",
        ),
        ({"q": ["a"], "n": [" "]}, r"t\.parquet\[0\]: the column 'n', .* is empty"),
        ({"q": ["a"], "n": [[1]]}, r"t\.parquet\[0\]: the column 'n', .* holds a list"),
        ({"q": ["a"], "n": [{"a": 1}]}, r"t\.parquet\[0\]: the column 'n', .* holds an object"),
        ({"q": ["a"], "n": [b"1"]}, r"t\.parquet\[0\]: the column 'n', .* holds bytes"),
        ({"q": [], "n": []}, r"/t\.parquet: the table has no rows"),
    ],
)
def test_faults_in_a_parquet_file_are_named_with_their_row(parquet, columns, message):
    path = parquet({**columns, "other": [0] * len(columns["q"])})
    with pytest.raises(ValueError, match=message):
        Parquet(path, "q", "n").examples()


@pytest.mark.parametrize("content", ["", "q,n\na,1\n", b"PAR1 and more PAR1"])
def test_a_file_that_is_no_parquet_is_refused(write, content):
    with pytest.raises(ValueError, match=r"/t\.parquet: not a Parquet file that can be read"):
        Parquet(write(content, "t.parquet"), "q", "n").examples()


def test_two_parquet_columns_of_one_name_are_refused(parquet):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1])], names=["q", "q"])
    with pytest.raises(ValueError, match=r"t\.parquet: two columns are called 'q'"):
        Parquet(parquet(table), "q", "q").examples()


# ---- Data sets of the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of `datasets` of this test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


ROWS = {"q": ["a", "b", "c"], "n": [1.5, 2.0, 3.0]}


@pytest.fixture
def folder(tmp_path, cache):
    """A folder as one has it from the hub: files that name their split."""
    folder = tmp_path / "sums"
    folder.mkdir()
    pq.write_table(pa.table(ROWS), folder / "train-00000-of-00001.parquet")
    pq.write_table(pa.table({"q": ["d"], "n": [4.5]}), folder / "test-00000-of-00001.parquet")
    return str(folder)


def test_a_local_copy_of_a_hub_data_set_is_read_by_split(folder):
    assert HubDataset(folder, "q", "n", "train").examples() == [
        Example("a", "1.5", "sums[train][0]"),
        Example("b", "2.0", "sums[train][1]"),
        Example("c", "3.0", "sums[train][2]"),
    ]
    assert texts(HubDataset(folder, "{q}?", "n", "test")) == [("d?", "4.5")]
    assert texts(HubDataset(folder, "q", None, "train[:1]+test")) == [("a", None), ("d", None)]


def test_a_folder_of_json_lines_is_a_data_set(tmp_path, cache):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "validation.jsonl").write_text('{"q": "a", "n": 7}\n{"q": "b", "n": -8}\n')
    source = HubDataset(str(folder), "q", "n", "validation", id_column="q", not_quantities=("n",))
    assert source.examples() == [
        Example("a", "7", "sums[validation][0]", ((0, 1),), "a"),
        Example("b", "-8", "sums[validation][1]", ((0, 2),), "b"),
    ]


def test_configurations_of_a_data_set_are_named(tmp_path, cache):
    folder = tmp_path / "sums"
    for name in ("easy", "hard"):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"q": [name], "n": [1]}), folder / name / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: easy, data_files: easy/*.parquet}\n"
        "- {config_name: hard, data_files: hard/*.parquet}\n---\n"
    )
    assert texts(HubDataset(str(folder), "q", "n", "train", name="hard")) == [("hard", "1")]
    for name in (None, "medium"):
        with pytest.raises(ValueError, match=rf"with name {name!r}\. datasets says: .*easy.*hard"):
            HubDataset(str(folder), "q", "n", "train", name=name).examples()


def test_saved_data_sets_are_read_with_and_without_splits(tmp_path):
    one = datasets.Dataset.from_dict(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"dev": one}).save_to_disk(tmp_path / "splits")
    expected = [("a", "1.5"), ("b", "2.0"), ("c", "3.0")]
    assert texts(HubDataset(str(tmp_path / "one"), "q", "n", None)) == expected
    assert texts(HubDataset(str(tmp_path / "splits"), "q", "n", "dev")) == expected


def test_a_data_set_without_rows_is_refused(tmp_path, cache):
    datasets.Dataset.from_dict({"n": []}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"the folder /.*/saved, .* has no rows or cannot be read"):
        HubDataset(str(tmp_path / "saved"), "n", "n", None).examples()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("q,n\n")
    with pytest.raises(ValueError, match=r"split 'train' of the folder /.*/files .* no data"):
        HubDataset(str(tmp_path / "files"), "q", "n", "train").examples()


def test_class_labels_are_their_numbers(tmp_path):
    features = datasets.Features({"q": datasets.Value("string"), "n": datasets.ClassLabel(2)})
    saved = datasets.Dataset.from_dict({"q": ["a", "b"], "n": [1, 0]}, features=features)
    saved.save_to_disk(tmp_path / "d")
    assert texts(HubDataset(str(tmp_path / "d"), "q", "n", None)) == [("a", "1"), ("b", "0")]


def test_a_shuffled_data_set_is_read_in_its_order(tmp_path):
    shuffled = datasets.Dataset.from_dict({"n": list(range(50))}).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "d")
    read = texts(HubDataset(str(tmp_path / "d"), "n", "n", None))
    assert [int(n) for n, _ in read] == shuffled["n"][:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "validation"}, r"split 'validation' of the folder /.*/sums .*Unknown split"),
        ({"split": None}, r"HubDataset\.split is null, but only a folder .* save_to_disk"),
        ({"name": "main"}, r"cannot be read with name 'main'\. datasets says: .*main"),
        ({"revision": "v1"}, r"HubDataset\.revision is 'v1', but .* is a local folder"),
        ({"target": "answer"}, r"HubDataset\.target names\. The columns here are 'q', 'n'\."),
        ({"prompt": "{q} {x}"}, r"HubDataset\.prompt names\. The columns here are 'q', 'n'\."),
        ({"split": "train[:0]"}, r"\[:0\]. corresponds to no data"),
    ],
)
def test_settings_that_do_not_fit_a_folder_are_named(folder, settings, message):
    settings = {"path": folder, "prompt": "q", "target": "n", "split": "train", **settings}
    with pytest.raises(ValueError, match=message):
        HubDataset(**settings).examples()


@pytest.mark.parametrize(
    ("saved", "settings", "message"),
    [
        (
            "one",
            {"split": "train"},
            r"is 'train', but .* \(without a split\)\. .*split: null",
        ),
        ("splits", {"split": "train"}, r"split: 'train' is no split of .*, which has 'dev'"),
        ("splits", {"split": None}, r"split: None is no split of .*, which has 'dev'"),
        ("splits", {"split": "dev", "name": "main"}, r"HubDataset\.name is 'main', but .* Leave"),
    ],
)
def test_settings_that_do_not_fit_a_saved_data_set_are_named(tmp_path, saved, settings, message):
    one = datasets.Dataset.from_dict(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"dev": one}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=message):
        HubDataset(str(tmp_path / saved), "q", "n", **settings).examples()


def test_faults_in_a_data_set_are_named_with_their_row(tmp_path):
    datasets.Dataset.from_dict({"q": ["a", "b"], "n": [1, None]}).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"/d\[None\]\[1\]: the column 'n', .* \(null\)"):
        HubDataset(str(tmp_path / "d"), "q", "n", None).examples()


def test_a_broken_file_in_a_folder_is_named(tmp_path, cache, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text('{"q": "a"}\n{"q": "b"\n')
    with pytest.raises(ValueError, match=r"split 'train' of the folder /.*/d cannot be .*JSON"):
        HubDataset(str(tmp_path / "d"), "q", "n", "train").examples()


def test_a_hub_name_without_network_says_how_to_pass_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = (
        r"'openai/gsm8k' is no folder here \(looked for /.*/openai/gsm8k\), .*Without network, "
        r".*hf download --repo-type dataset openai/gsm8k --local-dir FOLDER.*path: FOLDER"
    )
    with pytest.raises(OSError, match=message):
        HubDataset("openai/gsm8k", "question", "answer", "train", name="main").examples()


@pytest.mark.parametrize("path", ["/gone/sums", "./sums", "a/b/c"])
def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"HubDataset\.path: there is no folder"):
        HubDataset(path, "q", "n", "train").examples()


def test_a_file_is_no_data_set(write):
    with pytest.raises(NotADirectoryError, match=r"HubDataset\.path: .* is a file\. Give"):
        HubDataset(write("{}"), "q", "n", "train").examples()


# ---- What all tables have in common


def sources_of(rows, folder, **settings):
    """The same rows, all texts, as every kind of table."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    jsonl, table, parquet = (folder / f"t.{end}" for end in ("jsonl", "csv", "parquet"))
    jsonl.write_text("\n".join(json.dumps(row) for row in rows))
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    pq.write_table(pa.table(columns), parquet)
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
    return [
        JsonLines(str(jsonl), **settings),
        Csv(str(table), **settings),
        Parquet(str(parquet), **settings),
        HubDataset(str(folder / "saved"), split=None, **settings),
    ]


def test_all_tables_give_the_same_examples(tmp_path):
    rows = [
        {
            "q": f'say "{i}",\né',
            "n": f"{i / 4}",
            "level": "hard" if i % 3 else "easy",
            "id": f"r{i}",
        }
        for i in range(20)
    ]
    settings = {
        "prompt": "{q}:",
        "target": "{id} is {n}",
        "not_quantities": ("id",),
        "id_column": "id",
        "filters": (RowFilter("level", one_of=("hard",)), RowFilter("n", at_least=1, at_most=4)),
        "max_examples": 5,
    }
    wanted = [row for row in rows if row["level"] == "hard" and 1 <= float(row["n"]) <= 4][:5]
    for source in sources_of(rows, tmp_path, **settings):
        assert [replace_origin(example) for example in source.examples()] == [
            Example(
                f"{row['q']}:", f"{row['id']} is {row['n']}", "", ((0, len(row["id"])),), row["id"]
            )
            for row in wanted
        ]


def replace_origin(example):
    return Example(example.prompt, example.target, "", example.not_quantities, example.id)


# ---- Filters

LEVELS = (
    '{"q": "a", "n": 1, "level": "easy", "ok": true}\n'
    '{"q": "b", "n": "1,234", "level": "hard", "ok": false}\n'
    '{"q": "c", "n": -0.50, "level": null, "ok": true}\n'
    '{"q": "d", "n": 2e1, "level": " ", "ok": true}\n'
    '{"q": "e", "n": 20, "level": "very hard", "ok": true}\n'
)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([RowFilter("level", one_of=("easy", "hard"))], "ab"),
        ([RowFilter("level", matches="hard")], "be"),
        ([RowFilter("level", matches="^hard$")], "b"),
        ([RowFilter("level", matches="")], "abe"),
        ([RowFilter("n", one_of=(1, "-0.50"))], "ac"),
        ([RowFilter("ok", one_of=(False,))], "b"),
        ([RowFilter("n", at_least=1)], "abde"),
        ([RowFilter("n", at_most=1)], "ac"),
        ([RowFilter("n", at_least=1, at_most=20)], "ade"),
        ([RowFilter("n", at_least=-0.5, at_most=-0.5)], "c"),
        ([RowFilter("n", at_least=1, one_of=("20", "2e1"), matches="0")], "e"),
        ([RowFilter("level", matches="."), RowFilter("ok", one_of=(True,))], "ae"),
    ],
)
def test_filters_keep_what_meets_their_conditions(write, filters, kept):
    source = JsonLines(write(LEVELS), "q", "n", filters=tuple(filters))
    assert "".join(e.prompt for e in source.examples()) == kept


def test_rows_that_could_be_no_example_can_be_left_out(write):
    path = write("q,n\na,1\nb,\nc,n/a\nd,nan\ne,5\n", "t.csv")
    filters = (RowFilter("n", matches=r"^\d+$"),)
    assert texts(Csv(path, "q", "n", filters=filters)) == [("a", "1"), ("e", "5")]


def test_max_examples_counts_what_is_kept(write):
    path = write(LEVELS + "not JSON\n")
    source = JsonLines(path, "q", "n", filters=(RowFilter("n", at_least=1),), max_examples=4)
    assert [e.prompt for e in source.examples()] == ["a", "b", "d", "e"]


def test_what_filters_leave_out_is_counted_and_said(write, monkeypatch):
    said = []
    monkeypatch.setattr("ntl_lightning.data.tables.rank_zero_info", said.append)
    path = write(LEVELS)
    filters = (RowFilter("level", matches="."), RowFilter("ok", one_of=(True,)))
    JsonLines(path, "q", "n", filters=filters).examples()
    JsonLines(path, "q", "n", filters=(RowFilter("n", at_least=-1),)).examples()
    JsonLines(path, "q", "n").examples()
    assert said == [
        f"{path}: the filters keep 2 of 5 rows, and leave out 2 by JsonLines.filters[0] on "
        "'level', 1 by JsonLines.filters[1] on 'ok'.",
        f"{path}: the filters keep 5 of 5 rows.",
    ]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            [RowFilter("level", one_of=("Easy",))],
            r"/data\.jsonl: the filters leave none of 5 rows \(5 by JsonLines\.filters\[0\] on "
            r"'level'\)\. In the first row 'level' is 'easy'\. Correct JsonLines\.filters",
        ),
        (
            [RowFilter("lvl", matches=".")],
            r":1: there is no column 'lvl', which JsonLines\.filters\[0\]",
        ),
        (
            [RowFilter("n", at_least=0), RowFilter("level", at_most=3)],
            r":1: the column 'level', which JsonLines\.filters\[1\] compares with 3, holds 'easy', "
            "which is not a number",
        ),
    ],
)
def test_filters_that_do_not_fit_the_rows_are_named(write, filters, message):
    with pytest.raises(ValueError, match=message):
        JsonLines(write(LEVELS), "q", "n", filters=tuple(filters)).examples()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"The filter of column 'c' has no condition\. Set one_of, matches"),
        ({"one_of": ()}, r"The filter of column 'c' has no condition"),
        ({"one_of": "easy"}, r"RowFilter\.one_of must be a list of values, got 'easy' alone"),
        ({"matches": "("}, r"RowFilter\.matches: '\(' is no regular expression"),
        ({"at_least": 2, "at_most": 1}, r"keeps nothing: no number is at least 2 and at most 1"),
        ({"at_least": float("nan"), "at_most": 1}, r"keeps nothing"),
    ],
)
def test_filters_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RowFilter("c", **settings)


# ---- Ids


def test_ids_are_those_of_their_column(write):
    path = write('{"q": "?", "n": 1, "key": 17}\n{"q": "!", "n": 2, "key": "b"}\n')
    assert [e.id for e in JsonLines(path, "q", "n", id_column="key").examples()] == ["17", "b"]
    with pytest.raises(ValueError, match=r"no column 'id', which JsonLines\.id_column names"):
        JsonLines(path, "q", "n", id_column="id").examples()
    path = write("q,n,key\na,1, \n", "t.csv")
    with pytest.raises(
        ValueError, match=r":2: the column 'key', which Csv\.id_column names, is empty"
    ):
        Csv(path, "q", "n", id_column="key").examples()


def test_limits_are_those_that_are_written(write):
    """In binary, 0.1 and 0.3 lie on other sides of a tenth and three tenths."""
    path = write("x,y\n" + "\n".join(f"a,{n / 10}" for n in range(11)), "data.csv")
    for low in range(11):
        for high in range(low, 11):
            limits = RowFilter("y", at_least=low / 10, at_most=high / 10)
            kept = [target for _, target in texts(Csv(path, "x", "y", filters=(limits,)))]
            assert kept == [f"{n / 10}" for n in range(low, high + 1)]


def test_values_that_no_row_has_are_warned_of(write):
    path = write("x,code\na,no\nb,se\nc,se\nd,01", "data.csv")
    with pytest.warns(UserWarning, match=r"Csv\.filters\[0\]: no row .* 'false', '1' in 'code'"):
        found = texts(Csv(path, "x", None, filters=(RowFilter("code", one_of=(False, "se", 1)),)))
    assert [prompt for prompt, _ in found] == ["b", "c"]
    quoted = RowFilter("code", one_of=("no", "se", "01"))
    assert len(texts(Csv(path, "x", None, filters=(quoted,)))) == 4


def test_rows_of_several_lines_are_reported(write, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("ntl_lightning.data.files.rank_zero_info", said.append)
    path = write('n\tt\n1\t"Hi\n2\tfine\n3\tbye"\n4\tplain', "data.tsv")
    assert len(texts(Csv(path, "t", "n", delimiter="\t"))) == 2
    (message,) = said
    assert "1 rows have quoted fields of several lines, the first begins at" in message
    assert "data.tsv:2" in message
    assert "Csv.quote: null" in message
    assert len(texts(Csv(path, "t", "n", delimiter="\t", quote=None))) == 4
    assert len(said) == 1


def test_a_missing_part_of_a_prompt_is_empty(write, tmp_path):
    lines = write('{"a": 1, "b": null, "y": 2}\n{"a": 3, "b": "x", "y": 4}')
    assert texts(JsonLines(lines, "{a} {b}", "y")) == [("1 ", "2"), ("3 x", "4")]
    table = pa.table({"a": [1, 3], "b": [None, "x"], "c": [0.5, None], "y": [2, 4]})
    pq.write_table(table, tmp_path / "data.parquet")
    path = str(tmp_path / "data.parquet")
    assert texts(Parquet(path, "{a} {b} {c}", "y")) == [("1  0.5", "2"), ("3 x ", "4")]
    with pytest.raises(ValueError, match=r"'c', which Parquet\.target names, has no value"):
        Parquet(path, "a", "c").examples()


def test_blanks_around_an_id_are_no_part_of_it(write):
    path = write("id,y\nC1 ,1\nC1,2", "data.csv")
    assert [e.id for e in Csv(path, "id", "y", id_column="id").examples()] == ["C1", "C1"]


def test_text_of_windows_is_told_from_latin_1(write):
    path = write(b'{"q": "it\x92s", "n": 1}')
    with pytest.raises(ValueError, match="iconv -f WINDOWS-1252"):
        JsonLines(path, "q", "n").examples()
