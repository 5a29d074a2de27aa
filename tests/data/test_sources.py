import csv
import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from ntl_lightning.data.sources import GSM8K, Csv, Example, JsonLines, Source, TextTemplate


def texts(source: Source) -> list[tuple[str, str | None]]:
    return [(e.prompt, e.target) for e in source.examples()]


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path; text is encoded as UTF-8, bytes are written as is."""

    def write(content, name="data.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# ---- Source


def test_a_source_without_examples_cannot_be_made():
    with pytest.raises(TypeError, match="examples"):
        Source()


def test_sources_are_configured_by_class_path(write):
    path = write('{"q": "1+1=", "a": 2}\n')
    parser = ArgumentParser()
    parser.add_argument("--sources", type=list[Source])
    config = parser.parse_object(
        {
            "sources": [
                {
                    "class_path": "ntl_lightning.data.sources.JsonLines",
                    "init_args": {"path": path, "prompt": "q", "target": "a"},
                }
            ]
        }
    )
    (source,) = parser.instantiate_classes(config).sources
    assert source == JsonLines(path, "q", "a")
    assert source.examples() == [Example("1+1=", "2", "data.jsonl:1")]


# ---- Templates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a}", "1"),
        ("{a}+{b b}=", "1+2="),
        ("{a}{a}", "11"),
        ("{{a}} is {a}", "{a} is 1"),
        ("{{{a}}}", "{1}"),
        ("{c:d!r}", "3"),
        ("\\frac{{{a}}}{{{b b}}}\n", "\\frac{1}{2}\n"),
    ],
)
def test_templates_put_values_in(text, expected):
    template = TextTemplate.parse(text, "where")
    assert template.fill({"a": "1", "b b": "2", "c:d!r": "3"}) == expected


def test_values_with_braces_are_not_read_again():
    assert TextTemplate.parse("{a} {b}", "where").fill({"a": "{b}", "b": "}}"}) == "{b} }}"


@pytest.mark.parametrize(
    ("text", "position"), [("{a", 1), ("a}", 2), ("{a} {}", 5), ("{a} {{b}", 8), ("{a{b}}", 1)]
)
def test_braces_without_partners_are_refused(text, position):
    with pytest.raises(ValueError, match=rf"^here: .* at character {position}\b"):
        TextTemplate.parse(text, "here")


@pytest.mark.parametrize("text", ["", "nothing", "{{a}}"])
def test_templates_without_a_field_are_refused(text):
    with pytest.raises(ValueError, match=r"here: .*has no field"):
        TextTemplate.parse(text, "here")


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="{}"), min_size=1), st.text())
def test_any_text_can_be_written_as_a_template(literal, name, value):
    escaped = literal.replace("{", "{{").replace("}", "}}")
    template = TextTemplate.parse(f"{escaped}{{{name}}}{escaped}", "where")
    assert template.fields == [name]
    assert template.fill({name: value}) == literal + value + literal


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
        (GOOD + '{"q": "?", "n": }\n', r":2: not JSON at character 17: Expecting value"),
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
            r":2: the column 'q', .*prompt names, has no value \(null\)",
        ),
        (GOOD + '{"q": "?", "n": NaN}', r":2: the column 'n', .* has no value \(nan\)"),
        (GOOD + '{"q": "?", "n": -Infinity}', r":2: the column 'n', .* has no value \(-inf\)"),
        (GOOD + '{"q": "?", "n": [1]}', r":2: the column 'n', .* holds a list"),
        (GOOD + '{"q": "?", "n": {"a": 1}}', r":2: the column 'n', .* holds an object"),
        (GOOD + '{"q": "?", "n": " "}', r":2: the column 'n', .*\.target names, is empty"),
        (GOOD + '{"q": "", "n": 1}', r":2: the column 'q', .*\.prompt names, is empty"),
        (GOOD + '{"q": "\\ud83d", "n": 1}', r":2: the column 'q' has half of a surrogate pair"),
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


@pytest.mark.parametrize("max_examples", [0, -1])
@pytest.mark.parametrize("name", ["JsonLines", "Csv", "GSM8K"])
def test_max_examples_must_be_positive(name, max_examples):
    make = {
        "JsonLines": lambda n: JsonLines("x", "q", "n", max_examples=n),
        "Csv": lambda n: Csv("x", "q", "n", max_examples=n),
        "GSM8K": lambda n: GSM8K("x", max_examples=n),
    }[name]
    with pytest.raises(ValueError, match=rf"{name}\.max_examples must be .* got {max_examples}"):
        make(max_examples)


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


@given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from("abc"), st.text(max_size=3))))
def test_spans_of_a_template_hold_the_values_of_its_fields(pieces):
    template = TextTemplate((*((text, field) for text, field, _ in pieces), ("end", None)))
    values = {field: value for _, field, value in pieces}
    text = template.fill(values)
    for wanted in ([], ["a"], ["a", "c"]):
        found = [text[a:b] for a, b in template.spans(values, wanted)]
        assert found == [values[field] for _, field, _ in pieces if field in wanted]


_values = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip),
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
        ("q,n,q\na,1,b\n", r"/t\.csv:1: two columns are called 'q'"),
        ('q,n\n"a\nb",1\n"c,2\nd,3\n', r"/t\.csv:4: the row that begins here is not CSV"),
        ('q,n\n"a"b,1\n', r"/t\.csv:2: the row that begins here is not CSV.*written twice"),
        ("q,n\na\rb,1\n", r"/t\.csv:2: the row that begins here is not CSV.*the line ends"),
        ('q,n\r"a","1"\r', r"/t\.csv:1: the row that begins here is not CSV.*tr '\\r' '\\n'"),
        ("q,n\na,1\nb,\n", r"/t\.csv:3: the column 'n', which Csv\.target names, is empty"),
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


# ---- GSM8K

CLIPS = {
    "question": "How many clips?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}


def test_gsm8k_gives_the_reasoning_without_calculator_marks(write):
    source = GSM8K(write(json.dumps(CLIPS)))
    assert source.examples() == [
        Example(
            "How many clips?",
            "She sold 48/2 = 24 in May.\nThat is 48+24 = 72.\n#### 72",
            "data.jsonl:1",
        )
    ]


def test_gsm8k_keeps_calculator_marks_when_asked(write):
    source = GSM8K(write(json.dumps(CLIPS)), calculator_marks="keep")
    assert texts(source) == [("How many clips?", CLIPS["answer"])]


def test_gsm8k_gives_the_answer_alone_when_asked(write):
    assert texts(GSM8K(write(json.dumps(CLIPS)), target="answer")) == [("How many clips?", "72")]


def test_gsm8k_takes_the_first_examples_and_leaves_the_rest_unread(write):
    path = write(json.dumps(CLIPS) + "\nnot JSON\n")
    assert len(GSM8K(path, max_examples=1).examples()) == 1


def test_gsm8k_takes_the_number_after_the_last_hashes(write):
    row = {"question": "?", "answer": "first #### 3 and then\n#### -1,234 "}
    assert texts(GSM8K(write(json.dumps(row)), target="answer")) == [("?", "-1,234")]


def test_gsm8k_leaves_comparisons_in_the_reasoning(write):
    row = {"question": "?", "answer": "50 < 52 and <<60>50=1>> 60 > 50 << 9\n#### 1"}
    assert texts(GSM8K(write(json.dumps(row)))) == [("?", row["answer"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "It is 72."}, r":2: the answer has no '#### '.*It is 72\."),
        ({"question": "?", "answer": "####72"}, r":2: the answer has no '#### '"),
        ({"question": "?", "answer": "x #### many"}, r":2: 'many' after the last '#### ' is not"),
        ({"question": "?", "answer": "#### 7 or 8"}, r":2: '7 or 8' after the last '#### ' is not"),
        ({"question": "?", "answer": "#### 7 clips"}, r":2: '7 clips' after .* is not a number"),
        ({"question": "?", "answer": "#### "}, r":2: '' after the last '#### ' is not a number"),
        ({"question": "?"}, r":2: there is no column 'answer'"),
        ({"question": " ", "answer": "#### 1"}, r":2: the column 'question', .* is empty"),
        ({"question": "?", "answer": ""}, r":2: the column 'answer', .* is empty"),
    ],
)
def test_gsm8k_refuses_rows_without_a_gold_number(write, row, message):
    path = write(json.dumps(CLIPS) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"/data\.jsonl" + message):
        GSM8K(path).examples()


def test_gsm8k_refuses_to_keep_marks_where_there_is_no_reasoning():
    with pytest.raises(ValueError, match=r"GSM8K\.calculator_marks: keep has no effect"):
        GSM8K("x", calculator_marks="keep", target="answer")


@pytest.mark.parametrize(
    ("name", "rows", "marked", "with_comma", "negative", "total"),
    [
        ("train.jsonl", 7473, 7378, 79, 3, 403_114_874),
        ("test.jsonl", 1319, 1301, 14, 2, 9_009_187),
    ],
)
def test_gsm8k_golds_of_the_real_files(assets, name, rows, marked, with_comma, negative, total):
    path = str(assets / "data/gsm8k" / name)
    golds = [str(e.target) for e in GSM8K(path, target="answer").examples()]
    assert len(golds) == rows
    assert sum("," in gold for gold in golds) == with_comma
    assert sum(gold.startswith("-") for gold in golds) == negative
    assert sum(Decimal(gold.replace(",", "")) for gold in golds) == total

    kept = [str(e.target) for e in GSM8K(path, calculator_marks="keep").examples()]
    removed = [str(e.target) for e in GSM8K(path).examples()]
    assert sum("<<" in answer for answer in kept) == marked
    assert not any("<<" in answer or ">>" in answer for answer in removed)
    for gold, answer in zip(golds, removed, strict=True):
        assert answer.endswith(f"\n#### {gold}")
