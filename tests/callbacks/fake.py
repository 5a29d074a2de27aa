"""A module with the interface that the callbacks ask for, whose answers are given."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

Sample = tuple[str, str | None, str]  # prompt, target, answer


class Indexed(torch.utils.data.Dataset):
    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, Sample]:
        return index, self.samples[index]


def as_answers(batch: list[tuple[int, Sample]]) -> dict[str, list[Any]]:
    return {
        "index": [index for index, _ in batch],
        "prompt": [sample[0] for _, sample in batch],
        "target": [sample[1] for _, sample in batch],
        "answer": [sample[2] for _, sample in batch],
    }


def loader(
    samples: Sequence[Sample], batch_size: int = 2, order: Sequence[int] | None = None
) -> DataLoader:
    return DataLoader(Indexed(samples), batch_size=batch_size, collate_fn=as_answers, sampler=order)


class FakeLM(pl.LightningModule):
    """Logs `metrics` (set -> metric -> value) and answers what the samples hold."""

    def __init__(self, metrics: dict[str, dict[str, float]] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.metrics = metrics or {"val": {"mae": 2.0}, "test": {"mae": 3.0}}
        self.set_names = {
            "val": ["val", "val_extrapolate"],
            "test": ["test", "test_extrapolate"],
            "predict": ["predict_easy", "predict_hard"],
        }

    def set_name(self, stage: str, dataloader_idx: int) -> str:
        return self.set_names[stage][dataloader_idx]

    def log_names(self) -> set[str]:
        return {"train/loss"} | {
            f"{set_name}/{metric}"
            for set_name, metrics in self.metrics.items()
            for metric in metrics
        }

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = (self.weight * 0.5).sum()
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["index"]))
        return loss

    def evaluate(self, batch: dict[str, Any], stage: str, dataloader_idx: int) -> dict[str, Any]:
        set_name = self.set_name(stage, dataloader_idx)
        for metric, value in self.metrics.get(set_name, {}).items():
            self.log(
                f"{set_name}/{metric}",
                value,
                batch_size=len(batch["index"]),
                add_dataloader_idx=False,
                sync_dist=True,
            )
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate(batch, "val", dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate(batch, "test", dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
