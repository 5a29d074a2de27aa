"""What the README shows must work."""

import re
import shlex

import pytest

from ntl_lightning.cli import main
from ntl_lightning.numbers import ArithmeticTokenizer
from tests.conftest import ROOT, assert_command_is_accepted

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"README has no {language} block"
    return found


def test_the_python_examples_run(capsys):
    namespace = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "tensor" in capsys.readouterr().out
    assert namespace["result"].loss.isfinite()
    assert namespace["Cubed"]().name == "ntl_cubed"


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_configurations_are_accepted(block, tmp_path, capsys):
    path = tmp_path / "readme.yaml"
    path.write_text(block, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    assert "google-t5/t5-small" in capsys.readouterr().out


def own_commands():
    """The words of every `python -m ntl_lightning ...`, from the subcommand on."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(command) for line in lines for command in line.split("&&")]
    return [words[3:] for words in commands if words[:3] == ["python", "-m", "ntl_lightning"]]


def test_every_subcommand_that_matters_is_shown():
    shown = {words[0] for words in own_commands()}
    assert shown == {"fit", "test", "predict", "inspect-data", "inspect-tokenizer"}
    assert len(own_commands()) == TEXT.count("python -m ntl_lightning")


@pytest.mark.parametrize("words", own_commands(), ids=" ".join)
def test_the_commands_are_accepted(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if words[0] == "inspect-tokenizer":
        # Folders and files by the names that the README has for a tokenizer and a text.
        ArithmeticTokenizer().load().save_pretrained("google-t5/t5-small")
        (tmp_path / "my_data.txt").write_text("7 + 8 = 15", encoding="utf-8")
        main(words)
        assert "Of 3 numbers, 100.0% have all their digits in number tokens" in (
            capsys.readouterr().out
        )
        return
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    assert_command_is_accepted(words, tmp_path)


def test_the_files_that_are_named_exist():
    paths = re.findall(r"`((?:configs|docs|benchmarks)/[\w./]*)`", TEXT)
    assert len(paths) > 3
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_no_mark_of_a_figure_to_come_is_left(path):
    assert re.findall(r"@[A-Z_]+@", path.read_text(encoding="utf-8")) == []
