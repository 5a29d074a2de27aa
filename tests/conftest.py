"""Fixtures for all tests: no network, no stray files, the real assets where they are present."""

import functools
import lzma
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tensors are small here: more threads only fight for the cores, also in started processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Machines that are busy with other work must not fail a property test by their clock.
settings.register_profile("ntl_lightning", deadline=None)
settings.load_profile("ntl_lightning")

ROOT = Path(__file__).resolve().parent.parent


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """No workers for tests that are named one by one: these would take longer to start."""
    return 0 if any("::" in argument for argument in config.args) else None


def assert_command_is_accepted(words: list[str], folder: Path) -> None:
    """A command of the documentation is parsed with all its options, and then not run.

    Args:
        words: The command from its subcommand on, with paths as seen from the repository.
        folder: An empty one; it becomes the folder of the runs.
    """
    from ntl_lightning.cli import main

    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    (folder / "checkpoints").mkdir(exist_ok=True)
    torch.save({"hyper_parameters": {}}, folder / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit) as stop:
        main([*words, "--trainer.default_root_dir", str(folder), "--print_config"])
    assert stop.value.code == 0


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real tokenizers, data and models (environment variable NTL_ASSETS)."""
    folder = Path(os.environ.get("NTL_ASSETS", ROOT / "../shared")).resolve()
    if not (folder / "tokenizers").is_dir():
        pytest.skip(f"real assets not found in {folder}; set NTL_ASSETS to their folder")
    return folder


@pytest.fixture(scope="session")
def real_tokenizer_folder(
    assets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Name of a real tokenizer (`t5`, `gemma3`) to its folder, .xz files unpacked."""
    unpacked: dict[str, Path] = {}

    def folder(name: str) -> Path:
        source = assets / "tokenizers" / name
        if not any(source.glob("*.xz")):
            return source
        if name not in unpacked:
            unpacked[name] = tmp_path_factory.mktemp(name)
            for file in source.iterdir():
                target = unpacked[name] / file.name.removesuffix(".xz")
                raw = file.read_bytes()
                target.write_bytes(lzma.decompress(raw) if file.suffix == ".xz" else raw)
        return unpacked[name]

    return folder


@pytest.fixture(scope="session")
def real_tokenizer(real_tokenizer_folder: Callable[[str], Path]) -> Callable[[str], object]:
    """Name of a real tokenizer to the loaded one; shared by all tests, so not to be changed."""
    from transformers import AutoTokenizer

    return functools.cache(lambda name: AutoTokenizer.from_pretrained(real_tokenizer_folder(name)))


@pytest.fixture
def free_port() -> int:
    """A TCP port for a process group of this test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # LightningCLI warns when it is called with args while sys.argv holds others.
    monkeypatch.setattr(sys, "argv", ["ntl_lightning"])


@pytest.fixture(autouse=True)
def _leaves_no_files_behind():
    before = {p.name for p in ROOT.iterdir()}
    yield
    stray = {p.name for p in ROOT.iterdir()} - before - {".pytest_cache", ".hypothesis"}
    assert not stray, f"the test left files in the repository: {sorted(stray)}"
