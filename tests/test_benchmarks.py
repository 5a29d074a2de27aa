"""The benchmarks run in miniature and refuse wrong losses; how fast anything is, is not tested."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conftest import ROOT

CANDIDATES = [
    "F.cross_entropy",
    "F.cross_entropy + ntloss, reweigh off",
    "F.cross_entropy + ntloss, reweigh on",
    "ours, CE + NTL-WAS, new buffer",
    "ours, CE + NTL-WAS, overwritten",
    "ours, CE, overwritten",
    "ours in the Hugging Face Trainer",
]
UPCAST = "F.cross_entropy of a float32 copy"


@pytest.fixture
def loss_cost(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import loss_cost

    return loss_cost


def test_loss_cost_prints_its_tables_and_writes_the_csv(tmp_path):
    arguments = ["--rounds", "2", "--rows", "16", "--width", "1200", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/loss_cost.py", *arguments, "--csv", tmp_path / "cost.csv"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for fact in ("CPU", "threads", "versions", "commit", "command"):
        assert any(line.startswith(f"- {fact}: ") for line in lines)
    header = "| candidate | K=10 f=0.1 | K=10 f=0.5 | K=1000 f=0.1 | K=1000 f=0.5 | "
    # Two baselines in float32; three in bfloat16, where there is the copy too.
    assert sum(line.startswith(header) for line in lines) == 5
    for name in CANDIDATES:
        assert sum(line.startswith(f"| {name} |") for line in lines) >= 3

    with (tmp_path / "cost.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # 4 settings each: 7 candidates and the sum against ours alone; 8, 8 and the sum.
    assert len(rows) == 4 * (7 + 1) + 4 * (8 + 8 + 1)
    for row in rows:
        assert float(row["milliseconds"]) > 0
        assert float(row["ratio_quartile_1"]) <= float(row["ratio"])
        assert float(row["ratio"]) <= float(row["ratio_quartile_3"])
        assert (row["gradient_error"] == "") == row["candidate"].endswith("reweigh on")
        if row["candidate"] == row["baseline"]:
            assert float(row["ratio"]) == 1
    assert {row["candidate"] for row in rows if row["dtype"] == "float32"} == set(CANDIDATES)
    assert {row["candidate"] for row in rows if row["dtype"] == "bfloat16"} == {
        *CANDIDATES,
        UPCAST,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
def test_extra_memory_of_known_cases(loss_cost):
    setting = loss_cost.Setting("float32", 10, 0.5, rows=64, width=32_128, device="cpu")

    def extra(candidate):
        return loss_cost.extra_memory(candidate, setting, threads=1)

    # The log-probabilities and the gradients of `nll_loss` and `log_softmax`.
    assert extra(loss_cost.CE) == pytest.approx(3, abs=0.1)
    assert extra(loss_cost.OURS_NEW_BUFFER) == pytest.approx(1, abs=0.1)
    assert extra(loss_cost.OURS_OVERWRITTEN) == pytest.approx(0, abs=0.1)


def test_hidden_cost_prints_its_tables_and_writes_the_csv(tmp_path):
    arguments = ["--rounds", "2", "--size", "64", "16", "1200", "--rows-per-chunk", "8"]
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/hidden_cost.py", *arguments, "--threads", "1"),
            *("--precision", "float32", "bfloat16", "--csv", tmp_path / "cost.csv"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for size in ("float32, N = 64, D = 16, V = 1200, K = 10", "bfloat16, N = 64, D = 16"):
        assert size in done.stdout
    with (tmp_path / "cost.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {row["candidate"] for row in rows}
    assert {"ours, CE", "ours, CE + NTL-WAS", "ours, CE + NTL-WAS, 8 rows a chunk"} <= names
    assert len(rows) == 7 + 8
    for row in rows:
        assert float(row["milliseconds"]) > 0
        if row["candidate"] == "head + F.cross_entropy":
            assert float(row["ratio"]) == 1


@pytest.fixture
def batching(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import batching

    return batching


def test_batching_prints_its_table_and_writes_the_csv(tmp_path, batching, monkeypatch, capsys):
    sizes = ["--examples", "60", "--mean", "12", "--batch-size", "4"]
    model = ["--depth", "16", "--layers", "1", "--width", "50", "--threads", "1", "--rounds", "2"]
    arguments = [*sizes, *model, "--csv", str(tmp_path / "batching.csv")]
    monkeypatch.setattr(sys, "argv", ["batching.py", *arguments])
    batching.main()
    said = capsys.readouterr().out
    with (tmp_path / "batching.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    padding = [float(row["padding"]) for row in rows]
    assert len(rows) == 5
    assert all(f"| {row['candidate']} | {row['batches']} |" in said for row in rows)
    assert float(rows[0]["ratio"]) == 1
    assert padding[0] > padding[3] > padding[4] >= 0


def test_the_lengths_of_the_batching_benchmark_vary_as_it_says(batching):
    lengths = batching.lengths_of(100_000, 64)
    assert np.mean(lengths) == pytest.approx(64, rel=0.01)
    assert np.std(lengths) / np.mean(lengths) == pytest.approx(0.8, abs=0.01)


def test_a_model_that_trains_otherwise_on_packed_rows_ends_the_program(batching, monkeypatch):
    training = batching.Training(16, 1, 50, 64, "cpu")
    rows = batching.examples_of([4, 9, 6], 50)
    batching.check(training, rows, 20)
    monkeypatch.setattr(training, "loss", lambda batch: torch.tensor(float(len(batch["labels"]))))
    with pytest.raises(SystemExit, match=r"the loss of packed rows is 1\.0, that of .* 3\.0"):
        batching.check(training, rows, 20)


@pytest.mark.parametrize("fault", ["value", "gradient"])
def test_a_wrong_loss_from_hidden_states_ends_the_program(monkeypatch, fault):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import hidden_cost

    def build(problem):
        right = hidden_cost.plain(problem, upcast=False)

        def wrong(hidden, weight, labels):
            loss = right(hidden, weight, labels)
            return loss + 0.001 if fault == "value" else 1.01 * loss - 0.01 * loss.detach()

        return wrong

    setting = hidden_cost.Setting("float32", 8, 4, 50, 10, "cpu")
    candidate = hidden_cost.Candidate("too fast", build, hidden_cost.CE)
    with pytest.raises(SystemExit, match="too fast is off"):
        hidden_cost.check(candidate, setting.problem())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["value", "gradient", "nan"])
def test_a_wrong_loss_ends_the_program_however_fast_it_is(loss_cost, dtype, fault):
    def wrong(logits, labels):
        loss = loss_cost.cross_entropy(logits.float(), labels)
        if fault == "value":
            return loss + 0.001
        return loss * torch.nan if fault == "nan" else 1.01 * loss - 0.01 * loss.detach()

    problem = loss_cost.Problem(loss_cost.Setting(dtype, 10, 0.5, 8, 50, "cpu"))
    candidate = loss_cost.Candidate("too fast", "CE", lambda problem: wrong)
    with pytest.raises(SystemExit, match="too fast does not compute CE"):
        loss_cost.check({candidate: candidate.build(problem)}, problem)


def test_every_run_starts_from_the_same_logits(loss_cost):
    problem = loss_cost.Problem(loss_cost.Setting("float32", 10, 0.5, 8, 50, "cpu"))
    before = problem.logits.detach().clone()
    problem.run(loss_cost.OURS_OVERWRITTEN.build(problem))
    assert not torch.equal(problem.logits, before)
    problem.refill()
    assert torch.equal(problem.logits, before)


def test_the_share_of_number_labels_is_as_asked(loss_cost):
    problem = loss_cost.Problem(loss_cost.Setting("float32", 10, 0.25, 40, 50, "cpu"))
    assert torch.isin(problem.labels, problem.number_ids).sum() == 10


def run_benchmark(*arguments: object) -> str:
    """What a script prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_problem_generation_prints_its_table_and_writes_the_csv(tmp_path):
    # Stands in for the original package, whose Python is another one.
    stub = tmp_path / "mathematics_dataset"
    stub.mkdir()
    (stub / "__init__.py").touch()
    (stub / "generate.py").write_text(
        "from collections import defaultdict\n"
        "FLAGS = init_modules = lambda *arguments: None\n"
        "filtered_modules = defaultdict(lambda: defaultdict(lambda: (lambda: sum(range(9999)))))\n"
        "sample_from_module = lambda module: module()\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)

    options = ("--rounds", 2, "--count", 2, "--original", python, "--csv", tmp_path / "cost.csv")
    printed = run_benchmark("benchmarks/problem_generation.py", *options)
    assert "| train | arithmetic__add_sub_multiple | " in printed
    with (tmp_path / "cost.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (13 + 1) + (13 + 1) + (7 + 1)
    for row in rows:
        assert float(row["microseconds"]) > 0
        assert float(row["ratio_quartile_1"]) <= float(row["ratio"])
        assert float(row["ratio"]) <= float(row["ratio_quartile_3"])


def test_problem_generation_says_when_the_original_package_cannot_be_used():
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/problem_generation.py", "--original", sys.executable),
            *("--rounds", "1", "--count", "1"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "cannot run the original package" in done.stderr
    assert "No module named 'mathematics_dataset'" in done.stderr


def test_mathematics_forms_prints_a_row_for_each_module_of_each_set(assets):
    folder = assets / "data" / "mathematics_dataset"
    printed = run_benchmark("benchmarks/mathematics_forms.py", folder, "--count", 3)
    lines = printed.splitlines()
    assert len(lines) == 2 + 13 + 13 + 7
    assert {line.count("|") for line in lines} == {9}
