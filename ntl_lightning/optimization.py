"""Optimizers and learning-rate schedules as configuration."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Adafactor as HuggingFaceAdafactor

__all__ = [
    "Adafactor",
    "AdamW",
    "ConstantLR",
    "CosineLR",
    "InverseSquareRootLR",
    "LRSchedule",
    "OptimizerSpec",
]


class OptimizerSpec(ABC):
    """An optimizer's settings. Subclass it as a frozen dataclass to plug in another optimizer."""

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's trainable parameters."""


class LRSchedule(ABC):
    """How the learning rate changes, by optimizer step.

    The warm-ups here reach the peak with their last step and begin above zero, so that no step is
    wasted; those of transformers give the first step a rate of zero.
    """

    @abstractmethod
    def build(self, optimizer: Optimizer, num_steps: int | None) -> LRScheduler:
        """The scheduler; `num_steps` is the whole run, None where it has no end."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups of the trainable parameters: matrices decay, biases and norm weights do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def _check_lr(lr: float, where: str) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"{where}.lr must be a positive number, got {lr}")


@dataclass(frozen=True)
class AdamW(OptimizerSpec):
    """`torch.optim.AdamW`; biases and norm weights are not decayed."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""

    def __post_init__(self) -> None:
        _check_lr(self.lr, "AdamW")

    def build(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's trainable parameters."""
        return torch.optim.AdamW(
            parameter_groups(model, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps
        )


@dataclass(frozen=True)
class Adafactor(OptimizerSpec):
    """transformers' Adafactor with an outside learning rate, as T5 was pre-trained."""

    lr: float = 1e-3
    """Peak learning rate (relative to each parameter's scale where `scale_parameter` is on)."""
    scale_parameter: bool = True
    """Multiply the learning rate by the root mean square of each parameter."""
    weight_decay: float = 0.0
    """Weight decay of matrices."""

    def __post_init__(self) -> None:
        _check_lr(self.lr, "Adafactor")

    def build(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's trainable parameters."""
        return HuggingFaceAdafactor(
            parameter_groups(model, self.weight_decay),
            lr=self.lr,
            scale_parameter=self.scale_parameter,
            relative_step=False,
            warmup_init=False,
        )


def _warmup_steps(warmup: float, num_steps: int | None, where: str) -> int:
    if warmup >= 1 or warmup == 0:
        return int(warmup)
    if num_steps is None:
        raise ValueError(
            f"{where}.warmup={warmup} is a share of the run, but the run has no end; set "
            "trainer.max_steps or trainer.max_epochs, or give the warm-up in steps (1 or more)"
        )
    return max(1, round(warmup * num_steps))


def _rising(step: int, warmup: int) -> float:
    """Share of the peak at a step, counted from 0, of a linear warm-up of so many steps."""
    return min(1.0, (step + 1) / max(warmup, 1))


def _check_warmup(warmup: float, where: str) -> None:
    if not (math.isfinite(warmup) and warmup >= 0) or (warmup > 1 and warmup != int(warmup)):
        raise ValueError(
            f"{where}.warmup must be a share of the run (below 1) or a whole number of steps, "
            f"got {warmup}"
        )


@dataclass(frozen=True)
class CosineLR(LRSchedule):
    """Linear warm-up, then half a cosine down to `final_factor` of the peak at the run's end."""

    warmup: float = 0.05
    """Optimizer steps (1 or more), or the share of the run (below 1)."""
    final_factor: float = 0.1
    """Learning rate at the end, as a share of the peak."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, "CosineLR")
        if not 0 <= self.final_factor <= 1:
            raise ValueError(f"CosineLR.final_factor must be 0 to 1, got {self.final_factor}")

    def build(self, optimizer: Optimizer, num_steps: int | None) -> LRScheduler:
        """The scheduler; a run without an end is refused."""
        if num_steps is None:
            raise ValueError(
                "CosineLR falls until the run's end, but the run has none; set trainer.max_steps "
                "or trainer.max_epochs, or take InverseSquareRootLR or ConstantLR"
            )
        warmup = _warmup_steps(self.warmup, num_steps, "CosineLR")

        def factor(step: int) -> float:
            if step < warmup:
                return _rising(step, warmup)
            share = min(1.0, (step + 1 - warmup) / max(num_steps - warmup, 1))
            cosine = (1 + math.cos(math.pi * share)) / 2
            return self.final_factor + (1 - self.final_factor) * cosine

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class InverseSquareRootLR(LRSchedule):
    """Linear warm-up, then the peak times the root of warm-up steps over steps."""

    warmup: float = 1000
    """Optimizer steps (1 or more), or the share of the run (below 1)."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, "InverseSquareRootLR")
        if self.warmup == 0:
            raise ValueError("InverseSquareRootLR.warmup must be above 0, got 0")

    def build(self, optimizer: Optimizer, num_steps: int | None) -> LRScheduler:
        """The scheduler; needs no end of the run where the warm-up is in steps."""
        steps = _warmup_steps(self.warmup, num_steps, "InverseSquareRootLR")
        return LambdaLR(
            optimizer,
            lambda step: min(_rising(step, steps), math.sqrt(steps / max(step + 1, steps))),
        )


@dataclass(frozen=True)
class ConstantLR(LRSchedule):
    """Linear warm-up, then the peak for good."""

    warmup: float = 0
    """Optimizer steps (1 or more), or the share of the run (below 1)."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, "ConstantLR")

    def build(self, optimizer: Optimizer, num_steps: int | None) -> LRScheduler:
        """The scheduler; needs no end of the run where the warm-up is in steps."""
        steps = _warmup_steps(self.warmup, num_steps, "ConstantLR")
        return LambdaLR(optimizer, lambda step: _rising(step, steps))
