"""The results that the README and the configurations speak of: trained for real, so mostly slow."""

import json
import re
from difflib import ndiff
from pathlib import Path

import pytest

from ntl_lightning.cli import main
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.timeout(1200),
    # Before they are trained, models answer without a number, or always with the same.
    pytest.mark.filterwarnings(
        "ignore:NaN, because they are not defined",
        "ignore:AnswerPlots. no answer of",
    ),
]


def run(command: str, config: str, folder: Path, *options: str) -> dict[str, dict[str, float]]:
    """Run a command as the configuration's header has it; what it wrote to `metrics.json`."""
    main(
        [
            command,
            *("--config", str(ROOT / "configs" / config)),
            *("--trainer.default_root_dir", str(folder)),
            *("--trainer.enable_progress_bar", "false"),
            *options,
        ]
    )
    path = max(folder.rglob("metrics.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_quick_starts_differ_in_the_losses_and_the_name_only() -> None:
    with_ntl, without = (
        (ROOT / "configs" / name).read_text(encoding="utf-8").splitlines()
        for name in ("quickstart.yaml", "quickstart_ce.yaml")
    )
    changes = [line for line in ndiff(with_ntl, without) if line[0] in "+-"]
    assert [line for line in changes if not line[2:].startswith("#")] == [
        "-   default_root_dir: runs/quickstart",
        "+   default_root_dir: runs/quickstart_ce",
        "-     - class_path: ntl_lightning.losses.Wasserstein",
        "-       init_args: {weight: 2.0, largest_distance: 9.0}",
    ]


@pytest.mark.slow
def test_the_number_loss_more_than_halves_the_error_of_the_quick_start(tmp_path: Path) -> None:
    metrics = {}
    for config in ("quickstart.yaml", "quickstart_ce.yaml"):
        folder = tmp_path / config
        run("fit", config, folder)
        metrics[config] = run("test", config, folder, "--ckpt_path", "last")["test"]
    assert metrics["quickstart.yaml"]["mae"] < 65
    assert metrics["quickstart.yaml"]["r2"] > 0.7
    assert metrics["quickstart_ce.yaml"]["mae"] > 90


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:test without --ckpt_path")
def test_a_pretrained_model_learns_to_add(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NTL_ASSETS", str(assets))
    config = "arithmetic/stories260k.yaml"
    before = run("test", config, tmp_path / "before")["test"]
    run("fit", config, tmp_path / "after")
    after = run("test", config, tmp_path / "after", "--ckpt_path", "last")["test"]
    assert before["exact_match"] == 0
    assert after["exact_match"] >= 0.95


def test_the_configuration_of_gsm8k_trains_on_every_problem(assets: Path) -> None:
    text = (ROOT / "configs" / "gsm8k" / "t5_tiny.yaml").read_text(encoding="utf-8")
    steps, batch_size = (
        int(value)
        for key in ("max_steps", "batch_size")
        for value in re.findall(rf"^  {key}: (\d+)$", text, re.MULTILINE)
    )
    problems = (assets / "data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    assert "max_examples" not in text
    assert len(problems) == 7473
    assert steps * batch_size > len(problems)
