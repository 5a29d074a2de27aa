"""What the README shows must work."""

import re
import shlex

import pytest

from ntl_lightning.cli import main
from tests.conftest import ROOT

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


def test_the_commands_name_files_and_subcommands_that_exist():
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert any("pytest" in line for line in commands)
    seen = set()
    for line in commands:
        words = shlex.split(line)
        seen |= {words[i + 1] for i, word in enumerate(words) if word == "ntl_lightning"}
        for i, word in enumerate(words):
            if word == "--config" and words[i + 1].startswith("configs/"):
                assert (ROOT / words[i + 1]).is_file()
    assert seen == {"fit", "test", "predict", "inspect-tokenizer"}
    for path in re.findall(r"`((?:configs|docs|benchmarks)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path
