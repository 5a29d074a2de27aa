"""How the weight of a loss term changes over the optimizer steps."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Constant", "Cosine", "LinearWarmup", "StepRange", "WeightSchedule"]


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


@dataclass(frozen=True)
class Cosine(WeightSchedule):
    """The weight goes from one level to another along half a cosine wave, and stays there.

    >>> [round(Cosine(steps=4, start=1.0, end=0.2).factor(step), 3) for step in range(6)]
    [1.0, 0.883, 0.6, 0.317, 0.2, 0.2]
    """

    steps: int
    """Optimizer steps until `end` is reached."""
    start: float = 1.0
    """Factor at step 0."""
    end: float = 0.0
    """Factor from step `steps` on."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Cosine.steps must be at least 1, got {self.steps}")
        for key in ("start", "end"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Cosine.{key} must be a number of at least 0, got {value}")
        if self.start == self.end:
            raise ValueError(
                f"Cosine.start and end are both {self.start}: nothing changes; use Constant and "
                "the term's weight"
            )

    def factor(self, step: int) -> float:
        """Between `start` and `end`, halfway at `steps / 2`; both are met exactly."""
        share = (1 - math.cos(math.pi * min(1.0, step / self.steps))) / 2
        return self.start * (1 - share) + self.end * share


@dataclass(frozen=True)
class StepRange(WeightSchedule):
    """The term acts in a range of optimizer steps only; elsewhere it is logged without a gradient.

    >>> [StepRange(first=2, last=4).factor(step) for step in range(6)]
    [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    """

    first: int = 0
    """First optimizer step, counted from 0, at which the term acts."""
    last: int | None = None
    """Last optimizer step at which the term acts. null: to the end of the training."""

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"StepRange.first must be at least 0, got {self.first}")
        if self.last is not None and self.last < self.first:
            raise ValueError(
                f"StepRange.last must be at least first={self.first}, or null, got {self.last}"
            )

    def factor(self, step: int) -> float:
        """1 from `first` to `last`, both included, else 0."""
        return float(self.first <= step and (self.last is None or step <= self.last))
