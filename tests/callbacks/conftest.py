"""A Trainer that is quiet, small, and writes below `tmp_path` only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

MakeTrainer = Callable[..., pl.Trainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    def make(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
        return pl.Trainer(
            **{
                "default_root_dir": tmp_path,
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 1,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                "callbacks": list(callbacks),
                **settings,
            }
        )

    return make
