from pathlib import Path
from types import SimpleNamespace

import pytest

from ntl_lightning.callbacks.files import keep_previous, replaced_file, run_folder


def test_run_folder_is_the_loggers_or_else_the_root_folder(tmp_path: Path) -> None:
    assert run_folder(SimpleNamespace(log_dir="logs/version_3")) == Path("logs/version_3")
    assert run_folder(SimpleNamespace(log_dir=None, default_root_dir="root")) == Path("root")


def test_remote_run_folder_is_refused_instead_of_made_as_a_local_one() -> None:
    with pytest.raises(ValueError, match=r"'s3://bucket/run'.*local"):
        run_folder(SimpleNamespace(log_dir="s3://bucket/run"))


def test_previous_files_get_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    assert keep_previous(path) is None
    for content in ("first", "second"):
        path.write_text(content)
        keep_previous(path)
    assert not path.exists()
    assert (tmp_path / "predictions.1.jsonl").read_text() == "first"
    assert (tmp_path / "predictions.2.jsonl").read_text() == "second"


def test_file_is_replaced_only_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.json"
    with replaced_file(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()

    def is_interrupted() -> None:
        with replaced_file(path) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        is_interrupted()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
