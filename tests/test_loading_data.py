"""The section on loading data of `docs/data.md`: every configuration reads what it says."""

import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from jsonargparse import ArgumentParser

import ntl_lightning.data as data
from ntl_lightning.cli import main
from ntl_lightning.data import Source
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
SECTION = re.split(r"^## ", TEXT.partition("\n## Loading data\n")[2], flags=re.MULTILINE)[0]
BLOCKS = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)

SOLUBILITY = "measured log solubility in mols per litre"
PASSAGE = {
    "text": "The Rhine is 1,233 km long.",
    "questions": [
        {"question": "How long?", "answers": [{"text": "1,233 km", "label": 1}], "idx": 0}
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder with the files that the page names, which is also the current one."""
    sums = [{"a": i, "b": "0.10", "sum": f"{i}.10", "pupil": i % 40} for i in range(17, 217)]
    molecules = [f"CCO{'C' * i},-0.{i},{i % 5},{i % 4}" for i in range(10, 30)]
    problem = {"question": "How many?", "answer": "4+4 = <<4+4=8>>8.\n#### 8"}
    files = {
        "sums.jsonl": "\n".join(map(json.dumps, sums)),
        "molecules.csv": "\n".join([f"smiles,{SOLUBILITY},Number of Rings,fold", *molecules]),
        "STS-B/train.tsv": 'sentence1\tsentence2\tscore\n"A plane.\tA "jet.\t4.2\nA\tB\t0.5\n',
        "gsm8k/train.jsonl": json.dumps(problem),
        "SVAMP.json": json.dumps([{"ID": "1", "Body": "A.", "Question": "B?", "Answer": 51.0}]),
        "rjokes/train.tsv": "3\tKnock\tknock.\n",
        "MultiRC/train.jsonl": json.dumps({"idx": 0, "passage": PASSAGE}),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    table = pa.table({"x1": pa.array([0.1], pa.float32()), "x2": [5.0], "y": [3], "z": [None]})
    pq.write_table(table, tmp_path / "measured.parquet")
    (tmp_path / "openai/gsm8k").mkdir(parents=True)
    (tmp_path / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- {config_name: main, data_files: '*.jsonl'}\n---\n", encoding="utf-8"
    )
    (tmp_path / "openai/gsm8k/train.jsonl").write_text(json.dumps(problem), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


FIRST = [
    ("What is 17 + 0.10?", "17.10", 200),
    ("CCOCCCCCCCCCC -> ", "-0.10", 20),
    ('stsb sentence1: "A plane. sentence2: A "jet.', "4.2", 2),
    ("0.1 5.0=", "3", 1),
    ("How many?", "4+4 = <<4+4=8>>8.\n#### 8", 1),
    ("How many?", "4+4 = 8.\n#### 8", 4),
    ("CCOCCCCCCCCCCCC", "-0.12", 9),
    (None, None, None),
    (None, None, 2000),
]


@pytest.mark.parametrize(("block", "first"), list(zip(BLOCKS, FIRST, strict=True)))
def test_a_configuration_is_accepted_and_reads_its_files(block, first, folder, capsys):
    (folder / "page.yaml").write_text(block, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "page.yaml", "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["data"]
    parser = ArgumentParser()
    parser.add_argument("--train", type=list[Source])
    sources = parser.instantiate_classes(parser.parse_object({"train": printed["train"]})).train
    examples = [example for source in sources for example in source.examples()]
    prompt, target, count = first
    if prompt is not None:
        assert (examples[0].prompt, examples[0].target) == (prompt, target)
    assert count is None or len(examples) == count


def test_the_published_data_sets_are_read_as_the_table_says(folder):
    block = yaml.safe_load(next(block for block in BLOCKS if "RJokes" in block))
    parser = ArgumentParser()
    parser.add_argument("--train", type=list[Source])
    sources = parser.instantiate_classes(parser.parse_object(block["data"])).train
    assert [(e.prompt, e.target) for source in sources[1:] for e in source.examples()] == [
        ("A. B?", "51"),
        ("Knock\tknock.", "3"),
        ("The Rhine is 1,233 km long. Question: How long?", "1,233 km"),
    ]


def test_the_parts_of_the_page_keep_pupils_apart(folder):
    (block,) = (yaml.safe_load(block)["data"] for block in BLOCKS if "id_column" in block)
    parser = ArgumentParser()
    parser.add_argument("--train", type=list[Source])
    parser.add_argument("--val", type=list[Source])
    parts = parser.instantiate_classes(parser.parse_object(block))
    train, val = ({e.id for s in part for e in s.examples()} for part in (parts.train, parts.val))
    assert len(train | val) == 40
    assert not train & val


def test_every_source_that_loads_is_in_the_table():
    rows = re.findall(r"^\| (`.*?`) \|", SECTION.partition("### Tables")[0], re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    loads = {
        name
        for name in data.__all__
        if isinstance(kind := getattr(data, name), type)
        and issubclass(kind, Source)
        and kind.__module__.rpartition(".")[2] in {"sources", "tables", "benchmarks"}
    }
    assert named == loads - {"Source"}


def test_a_configuration_of_the_page_trains(folder):
    block = next(block for block in BLOCKS if "id_column" in block)
    (folder / "page.yaml").write_text(block, encoding="utf-8")
    main(
        [
            *("fit", "--config", "page.yaml", "--trainer.logger=false"),
            *("--trainer.max_steps=2", "--trainer.accelerator=cpu"),
            *("--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"),
        ]
    )
    assert list(folder.rglob("last.ckpt"))
