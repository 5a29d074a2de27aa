"""Where a run keeps its files, and how they are written so that nothing is lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer

__all__ = ["is_trial_run", "keep_previous", "replaced_file", "run_folder"]


def is_trial_run(trainer: Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which writes no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def run_folder(trainer: Trainer) -> Path:
    """The folder of this run: that of the first logger, or `default_root_dir` without one.

    Must be called on all ranks: rank 0 tells the others its folder.

    Raises:
        ValueError: If the folder is on a remote file system, where our files cannot be written.
    """
    folder = str(trainer.log_dir or trainer.default_root_dir)
    if "://" in folder:
        raise ValueError(
            f"the run folder is {folder!r}, but metrics, figures and predictions are written to "
            "local folders only. Set trainer.default_root_dir or the logger's save_dir to one."
        )
    return Path(folder)


def keep_previous(path: Path) -> Path | None:
    """Move an existing file out of the way of a new one: `a.jsonl` to `a.1.jsonl`, `a.2.jsonl`, ...

    Returns:
        The new path of the old file; None if there was none.
    """
    if not path.exists():
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    return kept


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    A reader sees the old file or the new one, never a part of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
