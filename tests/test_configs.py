"""Every configuration runs, says how it is run, and the options change only on purpose."""

import itertools
import os
import re
import shlex
from dataclasses import fields, is_dataclass
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
import yaml

from ntl_lightning import backbones, data, losses, numbers, optimization
from ntl_lightning.backbones import Backbone
from ntl_lightning.cli import main
from ntl_lightning.data import Arithmetic, InputRange, RowFilter, Source
from ntl_lightning.losses import LossTerm, WeightSchedule
from ntl_lightning.numbers import NumberCodec, NumberFormat, Tokenizer
from ntl_lightning.optimization import LRSchedule, OptimizerSpec
from tests.conftest import ROOT, assert_command_is_accepted

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
SNAPSHOT = Path(__file__).parent / "snapshots" / "options.txt"
# What a configuration chooses by class path, and the modules that offer it.
CHOICES = {
    Backbone: backbones,
    Tokenizer: numbers,
    LossTerm: losses,
    WeightSchedule: losses,
    OptimizerSpec: optimization,
    LRSchedule: optimization,
    Source: data,
}

every_config = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(CONFIGS))
)


def header(path: Path) -> list[str]:
    """The comment that a file opens with, line by line without the `#`."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return lines


def takes_hours(path: Path) -> bool:
    """Whether its model is of a size that even one step takes minutes without a GPU."""
    return any(line.startswith("Takes: hours") for line in header(path))


def test_there_are_configurations() -> None:
    assert CONFIGS / "quickstart.yaml" in FILES


@every_config
def test_a_configuration_opens_with_what_it_is_and_its_own_commands(path: Path) -> None:
    what, *rest = header(path)
    assert re.fullmatch(r"[A-Z].*\.", what)
    assert rest[0].startswith("Run:")
    commands = [line.removeprefix("Run:").strip() for line in rest if "ntl_lightning" in line]
    name = str(path.relative_to(ROOT))
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "ntl_lightning"]
        assert words[words.index("--config") + 1] == name
    assert [shlex.split(command)[3] for command in commands] == ["fit", "test"]
    if "${NTL_ASSETS}" in path.read_text(encoding="utf-8"):
        assert any(line.startswith("Needs: NTL_ASSETS") for line in rest)


@every_config
def test_the_commands_of_a_configuration_are_accepted(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "${NTL_ASSETS}" in path.read_text(encoding="utf-8"):
        monkeypatch.setenv("NTL_ASSETS", str(request.getfixturevalue("assets")))
    for line in header(path):
        if "ntl_lightning" in line:
            words = shlex.split(line.removeprefix("Run:"))
            assert_command_is_accepted(words[3:], tmp_path)


@every_config
def test_a_configuration_has_its_sections_in_order_and_names_classes_in_full(path: Path) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(content) == ["seed_everything", "trainer", "model", "data"]
    class_paths = re.findall(r"class_path: *([^,}\s]+)", path.read_text(encoding="utf-8"))
    assert class_paths
    assert [name for name in class_paths if "." not in name] == []


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if takes_hours(path) else []) for path in FILES],
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
@pytest.mark.filterwarnings(
    "ignore:NaN, because they are not defined",
    "ignore:AnswerPlots. no answer of",
    "ignore:test without --ckpt_path",
    "ignore:data.* hold characters outside the tokenizer's vocabulary",
)
def test_a_configuration_runs(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "${NTL_ASSETS}" in path.read_text(encoding="utf-8"):
        monkeypatch.setenv("NTL_ASSETS", str(request.getfixturevalue("assets")))
    for command in ("fit", "test"):
        main(
            [
                command,
                *("--config", str(path)),
                *("--trainer.default_root_dir", str(tmp_path)),
                *("--trainer.fast_dev_run", "1"),
                *("--trainer.enable_progress_bar", "false"),
                *("--data.eval_batch_size", "4"),
            ]
        )
    assert not list(tmp_path.iterdir())


def test_the_papers_multiplication_has_every_number_of_digits() -> None:
    file = CONFIGS / "arithmetic" / "multiplication_paper.yaml"
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
    sizes = {}
    for (source,) in settings["test"].values():
        pairs = [
            tuple(map(int, example.prompt.removesuffix("=").split("*")))
            for example in Arithmetic(**source["init_args"]).examples()
        ]
        digits = {(len(str(left)), len(str(right))) for left, right in pairs}
        assert len(digits) == 1
        sizes[digits.pop()] = len(set(pairs))
    assert set(sizes) == {*itertools.product(range(1, 7), repeat=2)}
    # Of a one-digit and at most a two-digit number the test set has not 500 pairs.
    few = {cell: size for cell, size in sizes.items() if size != 500}
    assert few == {(1, 1): 7, (1, 2): 90, (2, 1): 90}
    for split in ("train", "val"):
        cells = [
            (*source["init_args"]["left_digits"], *source["init_args"]["right_digits"])
            for source in settings[split]
        ]
        assert cells == [
            (left, left, right, right) for left in range(1, 6) for right in range(1, 6)
        ]
    validated = [Arithmetic(**source["init_args"]).examples() for source in settings["val"]]
    assert [len(examples) for examples in validated[1:]] == [20] * 24


def option_names(settings: dict[str, Any], prefix: str) -> list[str]:
    """Dotted names of the options; what is chosen by class path is one option."""
    names = []
    for key, value in settings.items():
        name = f"{prefix}.{key}"
        nested = isinstance(value, dict) and value and "class_path" not in value
        names += option_names(value, name) if nested else [name]
    return names


def class_arguments() -> list[str]:
    """Dotted names of the arguments of every class that a configuration can name."""
    parts = (NumberFormat, NumberCodec, InputRange, RowFilter)
    names = [f"{part.__name__}.{field.name}" for part in parts for field in fields(part)]
    for base, package in CHOICES.items():
        for class_name in package.__all__:
            kind = getattr(package, class_name)
            if not isinstance(kind, type) or not issubclass(kind, base) or isabstract(kind):
                continue
            if is_dataclass(kind):
                path = f"{package.__name__}.{class_name}"
                names += [path, *(f"{path}.{field.name}" for field in fields(kind))]
    return names


def test_the_options_are_those_of_the_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    del printed["trainer"]  # Lightning's own.
    sections = {name: value for name, value in printed.items() if isinstance(value, dict)}
    found = [name for key in sections for name in option_names(sections[key], key)]
    found += class_arguments()
    if os.environ.get("NTL_UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == SNAPSHOT.read_text(encoding="utf-8").splitlines(), (
        "The options have changed, and with them everybody's configurations. If that is meant, "
        "write the snapshot anew and add a line to CHANGELOG.md: "
        "NTL_UPDATE_SNAPSHOTS=1 pytest tests/test_configs.py -k snapshot"
    )
