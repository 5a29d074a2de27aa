"""What `docs/extending.md` shows must work: terms of one's own in a file outside the package."""

import csv
import re
import runpy
import subprocess
import sys

import pytest
import torch
import yaml

from ntl_lightning.cli import main
from ntl_lightning.losses import CrossEntropy, Objective
from ntl_lightning.numbers import NumberVocabulary
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"docs/extending.md has no {language} block"
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with the files of the page, which is also the current one."""
    for name in ("my_losses.py", "check.py"):
        parts = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
        assert parts, name
        (tmp_path / name).write_text("\n".join(parts), encoding="utf-8")
    (yaml_block,) = blocks("yaml")
    (tmp_path / "my.yaml").write_text(yaml_block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_losses", None)


def test_every_python_block_belongs_to_one_of_the_two_files():
    assert all(re.match(r"# (my_losses|check)\.py\n", block) for block in blocks("python"))


def test_the_check_passes_and_would_not_with_another_quantile(folder):
    runpy.run_path("check.py")
    source = (folder / "check.py").read_text(encoding="utf-8")
    (folder / "check.py").write_text(source.replace("0.9 * e", "0.8 * e"), encoding="utf-8")
    with pytest.raises(AssertionError):
        runpy.run_path("check.py")


@pytest.mark.parametrize("way", ["auto", "full"])
def test_a_term_outside_the_package_trains_and_is_logged(folder, way, monkeypatch):
    calls = {"from_hidden": 0, "forward": 0}
    for name in calls:
        original = getattr(Objective, name)

        def counted(self, *args, _name=name, _original=original, **settings):
            calls[_name] += 1
            return _original(self, *args, **settings)

        monkeypatch.setattr(Objective, name, counted)
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}"
    main(
        [
            *("fit", "--config", "my.yaml", f"--trainer.logger={logger}"),
            *("--trainer.log_every_n_steps=1", f"--model.logits={way}"),
        ]
    )
    used = "from_hidden" if way == "auto" else "forward"
    assert calls[used] == 20
    (metrics,) = folder.glob("logs/**/metrics.csv")
    with metrics.open(encoding="utf-8") as file:
        values = [
            float(row["train/pinball"]) for row in csv.DictReader(file) if row["train/pinball"]
        ]
    assert len(values) == 20
    assert all(value > 0 for value in values)


def test_its_gradient_reaches_the_model_through_the_fused_path(folder):
    """Hidden states to gradients, against the formulas written out in float64."""
    import my_losses

    torch.manual_seed(0)
    vocabulary = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=12)
    hidden = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[3, 9, 11, 0, -100, 2], [10, 1, 2, 11, 7, 4]])
    terms = [
        CrossEntropy(),
        my_losses.Pinball(weight=0.5, quantile=0.9),
        my_losses.ZLoss(weight=0.1),
        my_losses.DigitSum(weight=0.2),
    ]
    got = torch.autograd.grad(
        Objective(terms, vocabulary).from_hidden(hidden, weight, labels).loss, (hidden, weight)
    )

    logits = hidden @ weight.T
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    mean = torch.softmax(logits[..., :10], -1) @ torch.arange(10, dtype=torch.float64)
    error = torch.where(labels < 10, labels - mean, 0.0)
    numbers = (labels >= 0) & (labels < 10)
    pinball = torch.where(error > 0, 0.9 * error, -0.1 * error)[numbers].mean()
    z_loss = (logits.logsumexp(-1)[labels >= 0] ** 2).mean()
    # The numbers as they stand in the labels: 39, 0, 2 and 12, 74.
    runs = [(0, [0, 1]), (0, [3]), (0, [5]), (1, [1, 2]), (1, [4, 5])]
    sums = torch.stack([error[row, columns].sum().abs() for row, columns in runs]).mean()
    want = torch.autograd.grad(ce + 0.5 * pinball + 0.1 * z_loss + 0.2 * sums, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_the_command_finds_the_file_where_it_is_started(folder):
    done = subprocess.run(
        [sys.executable, "-m", "ntl_lightning", "fit", "--config", "my.yaml", "--print_config"],
        capture_output=True,
        text=True,
        check=True,
    )
    terms = yaml.safe_load(done.stdout)["model"]["loss_terms"]
    assert terms[1]["class_path"] == "my_losses.Pinball"
    assert terms[1]["init_args"]["quantile"] == 0.9


def test_a_wrong_setting_of_a_users_term_is_named(folder, capsys):
    source = (folder / "my.yaml").read_text(encoding="utf-8")
    (folder / "my.yaml").write_text(source.replace("0.9", "1.9"), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["fit", "--config", "my.yaml"])
    assert "Pinball.quantile must lie between 0 and 1, got 1.9" in capsys.readouterr().err
