import csv
import json
import re
from decimal import Decimal

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from ntl_lightning import NumberAwareLM, NumberDataModule
from ntl_lightning.backbones import FromConfig
from ntl_lightning.data import (
    GSM8K,
    SVAMP,
    Csv,
    Example,
    JsonLines,
    MultiRC,
    RJokes,
    RowFilter,
    Source,
    Split,
)
from ntl_lightning.evaluation import Generation
from ntl_lightning.numbers import PretrainedTokenizer
from ntl_lightning.optimization import ConstantLR


def texts(source: Source) -> list[tuple[str, str | None]]:
    return [(e.prompt, e.target) for e in source.examples()]


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


def test_gsm8k_may_be_filtered(write):
    other = {"question": "What?", "answer": "#### 3"}
    path = write(json.dumps(CLIPS) + "\n" + json.dumps(other))
    source = GSM8K(path, target="answer", filters=(RowFilter("question", matches="^How"),))
    assert texts(source) == [("How many clips?", "72")]


# ---- SVAMP

DVDS = {
    "ID": "chal-1",
    "Body": "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars on each pack",
    "Question": "How much do you have to pay to buy each pack?",
    "Equation": "( 76.0 - 25.0 )",
    "Answer": 51.0,
    "Type": "Subtraction",
}


def test_svamp_joins_body_and_question_and_drops_zero_decimals(write):
    rows = [DVDS, {**DVDS, "ID": "chal-2", "Answer": 12.5}, {**DVDS, "ID": "chal-3", "Answer": -3}]
    prompt = f"{DVDS['Body']} {DVDS['Question']}"
    assert SVAMP(write(json.dumps(rows, indent=4), "SVAMP.json")).examples() == [
        Example(prompt, "51", "SVAMP.json[0]", id="chal-1"),
        Example(prompt, "12.5", "SVAMP.json[1]", id="chal-2"),
        Example(prompt, "-3", "SVAMP.json[2]", id="chal-3"),
    ]


def test_svamp_may_be_filtered_by_kind_of_problem(write):
    rows = [DVDS, {**DVDS, "ID": "chal-2", "Type": "Addition"}]
    source = SVAMP(write(json.dumps(rows)), filters=(RowFilter("Type", one_of=("Addition",)),))
    assert [e.id for e in source.examples()] == ["chal-2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"data\.jsonl: the file is empty"),
        ("[]", r"data\.jsonl: the file must be one JSON array of objects, but it is '\[\]'"),
        (
            json.dumps(DVDS),
            r"data\.jsonl: the file must be one JSON array of objects, but it is '\{",
        ),
        ('[\n{"ID": 1},\n{"ID" 2}]', r"data\.jsonl:3: not JSON at character 7: Expecting ':'"),
        ("[1]", r"data\.jsonl\[0\]: not a JSON object"),
        ('[{"ID": 1, "ID": 2}]', r"data\.jsonl: the key 'ID' stands twice"),
        ("[" * 100_000, r"data\.jsonl: lists or objects are nested too deeply"),
        (
            json.dumps([DVDS, {**DVDS, "Answer": "many"}]),
            r"data\.jsonl\[1\]: the Answer 'many' is not a number",
        ),
        (json.dumps([{**DVDS, "Answer": float("nan")}]), r"\[0\]: the column 'Answer', .* \(nan\)"),
        (
            json.dumps([{"ID": 1, "Body": "a"}]),
            r"\[0\]: there is no column 'Question', which SVAMP",
        ),
        (json.dumps([DVDS]).encode("utf-16"), r":1: byte 1 .* iconv -f UTF-16 -t UTF-8"),
        (b'[{"Body": "caf\xe9"}]', r":1: byte 15 .* iconv -f ISO-8859-1 -t UTF-8"),
    ],
)
def test_faults_in_svamp_are_named(write, content, message):
    with pytest.raises(ValueError, match=message):
        SVAMP(write(content)).examples()


def test_svamp_of_the_real_file(assets):
    """Counted with the json module alone."""
    path = assets / "data/svamp/SVAMP.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    examples = SVAMP(str(path)).examples()
    assert len(examples) == len({e.id for e in examples}) == 1000
    assert sum(int(str(e.target)) for e in examples) == 30_563_075
    assert [float(str(e.target)) for e in examples] == [row["Answer"] for row in rows]
    assert examples[1].prompt == f"{rows[1]['Body']} {rows[1]['Question']}"
    shares = {"train": 0.7, "test": 0.3}
    parts = [Split(SVAMP(str(path)), part, shares).examples() for part in shares]
    assert sorted(e.id for part in parts for e in part) == sorted(row["ID"] for row in rows)


# ---- rJokes


def test_rjokes_as_their_authors_write_them(tmp_path):
    """Written as the published script does: no header, no quotes, TABs escaped."""
    jokes = ['Why?\tBecause\t"so".', "It's 5'10\" tall", "a, b\t", "Zoë said: 7 ate 9"]
    rows = list(zip(["0", "3", "11", "1"], jokes, strict=True))
    path = tmp_path / "dev.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        settings = {"quoting": csv.QUOTE_NONE, "quotechar": None, "escapechar": "\\"}
        csv.writer(file, delimiter="\t", lineterminator="\n", **settings).writerows(rows)
    assert path.read_text(encoding="utf-8").count("\\\t") == 3
    assert RJokes(str(path)).examples() == [
        Example(joke, score, f"dev.tsv:{line}") for line, (score, joke) in enumerate(rows, 1)
    ]


def test_all_behind_the_first_tab_is_the_joke(write):
    path = write('2\t"a\tb\r\n0\tc"\t\\\n', "t.tsv")
    assert texts(RJokes(path)) == [('"a\tb', "2"), ('c"\t\\', "0")]


def test_blank_lines_between_jokes_are_passed_over(write):
    assert RJokes(write("2\ta\n\n \n3\tb\n", "t.tsv")).examples() == [
        Example("a", "2", "t.tsv:1"),
        Example("b", "3", "t.tsv:4"),
    ]


def test_rjokes_may_be_filtered_and_cut(write):
    path = write("0\ta\n3\tb\n0\t\n5\tc\n7\td\n")
    filters = (RowFilter("score", at_least=1), RowFilter("joke", matches="[a-c]"))
    assert texts(RJokes(path, filters=filters)) == [("b", "3"), ("c", "5")]
    assert texts(RJokes(path, max_examples=2)) == [("a", "0"), ("b", "3")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"data\.jsonl: the file is empty"),
        ("1\ta\nno tab\n", r"data\.jsonl:2: there is no TAB in 'no tab\\n'"),
        ("1\ta\nscore\tjoke\n", r"data\.jsonl:2: the score 'score' is not a number"),
        ("nan\ta\n", r"data\.jsonl:1: the score 'nan' is not a number"),
        ("1\t \n", r"data\.jsonl:1: the column 'joke', which RJokes names, is empty"),
        (b"1\tcaf\xe9\n", r"data\.jsonl:1: byte 6 .* iconv -f ISO-8859-1"),
        (b"\x1f\x8b\x08\n", r"data\.jsonl: the file is compressed"),
    ],
)
def test_faults_in_rjokes_are_named(write, content, message):
    with pytest.raises(ValueError, match=message):
        RJokes(write(content)).examples()


# ---- MultiRC


def question(text, *answers):
    return {
        "question": text,
        "answers": [
            {"text": answer, "idx": i, **({} if label is None else {"label": label})}
            for i, (answer, label) in enumerate(answers)
        ],
        "idx": 7,
    }


def passage(text, *questions, index=0):
    content = {"text": text, "questions": questions}
    return json.dumps({"idx": index, "version": 1.1, "passage": content})


RIVERS = passage(
    'The "Rhine" is 1,233 km long.\u2028It has 3 sources. ',
    question("How long is it?", ("1,233 km", 1), ("12 km", 0), ("1233 km", 1)),
    question("How many sources?", ("3", 1)),
)


def test_multirc_joins_the_right_answers(write):
    text = 'The "Rhine" is 1,233 km long.\u2028It has 3 sources. '
    other = passage("b", question("c?", ("d", 0), ("e", 1)), index=1)
    path = write(f"{RIVERS}\n{other}\n", "val.jsonl")
    lengths = "1,233 km | 1233 km"
    assert MultiRC(path).examples() == [
        Example(f"{text} Question: How long is it?", lengths, "val.jsonl:1[0]", id=text),
        Example(f"{text} Question: How many sources?", "3", "val.jsonl:1[1]", id=text),
        Example("b Question: c?", "e", "val.jsonl:2[0]", id="b"),
    ]


def test_multirc_without_labels_can_be_predicted(write):
    path = write(passage("a", question("b?", ("c", None), ("d", None))), "test.jsonl")
    assert MultiRC(path).examples() == [Example("a Question: b?", None, "test.jsonl:1[0]", id="a")]


def test_questions_without_a_right_answer_are_left_out_and_counted(write):
    path = write(passage("a", question("b?", ("c", 0)), question("d?", ("e", 1)), question("f?")))
    with pytest.warns(
        UserWarning, match=r"MultiRC\.path: 2 questions .* first is data\.jsonl:1\[0\]"
    ):
        assert texts(MultiRC(path)) == [("a Question: d?", "e")]


def test_multirc_may_be_filtered_and_cut(write):
    path = write(f"{RIVERS}\n{RIVERS}\n")
    source = MultiRC(path, filters=(RowFilter("question", matches="many"),), max_examples=1)
    assert [e.origin for e in source.examples()] == ["data.jsonl:1[1]"]


def test_the_parts_of_a_split_share_no_passage(write):
    lines = [
        passage(f"p{i}", *(question(f"q{j}", (str(j), 1)) for j in range(3))) for i in range(40)
    ]
    source = MultiRC(write("\n".join(lines)))
    shares = {"train": 0.5, "val": 0.5}
    train, val = (Split(source, part, shares).examples() for part in shares)
    assert len(train) + len(val) == 120
    assert not {e.id for e in train} & {e.id for e in val}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"idx": 1}',
            r"data\.jsonl:1: 'passage' must be an object here, got nothing\. .*SuperGLUE",
        ),
        ('{"passage": {"text": "a"}}', r":1: 'questions' must be a list here, got nothing"),
        ('{"passage": {"questions": []}}', r":1: 'text' must be a text or number here"),
        (
            '{"passage": {"text": "a", "questions": [{"question": null, "answers": []}]}}',
            r":1\[0\]: 'question' must be a text or number here, got 'None'",
        ),
        (
            '{"passage": {"text": "a", "questions": [7]}}',
            r":1\[0\]: 'answers' must be a list here, got nothing",
        ),
        (
            passage("a", question("b?", ("c", 1), ("d", None))),
            r"data\.jsonl:1\[0\]: some answers have a label and some have not",
        ),
        (
            f"{RIVERS}\n{passage('a', question('b?', ('c', None)))}",
            r"data\.jsonl:2\[0\] has no labels, but others in .* have",
        ),
        (
            passage(" ", question(" ", ("c", 2))),
            r":1\[0\]: 'label' of an answer must be 0 or 1, got 2",
        ),
        (passage("a", question("b?", (" ", 1))), r":1\[0\]: the column 'answer', .* is empty"),
    ],
)
def test_faults_in_multirc_are_named(write, content, message):
    with pytest.raises(ValueError, match=message):
        MultiRC(write(content)).examples()


# ---- Real files are trained on

SOLUBILITY = "measured log solubility in mols per litre"


def real_source(name, assets):
    data = assets / "data"
    return {
        "gsm8k": lambda: GSM8K(str(data / "gsm8k/train.jsonl"), max_examples=20),
        "svamp": lambda: SVAMP(str(data / "svamp/SVAMP.json"), max_examples=20),
        "esol": lambda: Csv(
            str(data / "esol/delaney-processed.csv"), "smiles", SOLUBILITY, max_examples=20
        ),
        "mathematics": lambda: JsonLines(
            str(data / "mathematics_dataset/train-easy.jsonl"),
            "question",
            "answer",
            filters=(RowFilter("module", one_of=("arithmetic__mul", "numbers__place_value")),),
            max_examples=20,
        ),
    }[name]()


@pytest.mark.parametrize("name", ["gsm8k", "svamp", "esol", "mathematics"])
@pytest.mark.filterwarnings("ignore:data.* hold characters outside the tokenizer's vocabulary")
def test_a_model_takes_steps_on_the_real_files(assets, tmp_path, name):
    source = real_source(name, assets)
    examples = source.examples()
    assert len(examples) == 20
    seed_everything(0)
    settings = {"vocab_size": 32128, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/t5"), digit_level=True)
    module = NumberAwareLM(
        backbone=FromConfig("t5", {**settings, "num_heads": 2}),
        tokenizer=tokenizer,
        lr_schedule=ConstantLR(),
        generation=Generation(during_fit=False),
    )
    data = NumberDataModule(
        train=[source],
        tokenizer=tokenizer,
        architecture="seq2seq",
        batch_size=4,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 3
    assert torch.isfinite(trainer.logged_metrics["train/loss"])
    assert trainer.logged_metrics["train/ntl_was"] > 0
    # Every digit is a number token, whatever stands around it.
    digits = sum(len(re.findall("[0-9]", str(example.target))) for example in examples)
    assert data.label_coverage is not None
    assert data.label_coverage.numbers == data.label_coverage.digit_bearing == digits


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("train-easy", 2600, "142480953.9104525"),
        ("train-medium", 2600, "34990493913.8039168518"),
        ("train-hard", 2600, "105282009091203.7033187151778"),
        ("interpolate", 650, "141657085335.1002556571"),
        ("extrapolate", 350, "4642973770677637598.882919586"),
    ],
)
def test_answers_of_the_real_mathematics_files_have_their_sums(assets, name, count, total):
    path = str(assets / f"data/mathematics_dataset/{name}.jsonl")
    answers = [Decimal(str(e.target)) for e in JsonLines(path, "question", "answer").examples()]
    assert len(answers) == count
    assert sum(answers) == Decimal(total)


def test_solubilities_of_the_real_table_have_their_sum(assets):
    path = str(assets / "data/esol/delaney-processed.csv")
    examples = Csv(path, "smiles", SOLUBILITY, id_column="Compound ID").examples()
    assert len({e.id for e in examples}) == 1128
    assert sum(Decimal(str(e.target)) for e in examples) == Decimal("-3440.515000000000005199")
    rings = Csv(path, "smiles", SOLUBILITY, filters=(RowFilter("Number of Rings", at_least=3),))
    assert len(rings.examples()) == 116 + 63 + 16 + 4 + 3 + 2
