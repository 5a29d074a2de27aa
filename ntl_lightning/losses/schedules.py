"""How the weight of a loss term changes over the optimizer steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Constant", "LinearWarmup", "WeightSchedule"]


class WeightSchedule(ABC):
    """A factor on a term's weight, by optimizer step."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """The factor at an optimizer step, counted from 0."""


@dataclass(frozen=True)
class Constant(WeightSchedule):
    """The weight as it is written."""

    def factor(self, step: int) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True)
class LinearWarmup(WeightSchedule):
    """The weight rises in a straight line from 0 to what is written.

    >>> [LinearWarmup(steps=4).factor(step) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    steps: int
    """Optimizer steps until the full weight is reached."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"LinearWarmup.steps must be at least 1, got {self.steps}")

    def factor(self, step: int) -> float:
        """`step / steps`, at most 1."""
        return min(1.0, step / self.steps)
