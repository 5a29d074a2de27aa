"""Where examples come from: every task is a list of (prompt, target) texts.

A source is a frozen dataclass of plain values, so that a configuration names it by its class path
and `--help` shows its fields. The work is done in `examples()`, never in the constructor.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Example", "Source"]


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its answer, as texts."""

    prompt: str
    """What the model is given."""
    target: str | None
    """What it should say; None where the answer is not known (only for predict)."""
    origin: str
    """Where it comes from, for people: `train.jsonl:17`, `Friedman[3]`."""


class Source(ABC):
    """Anything that gives examples. A source of your own is a frozen dataclass with one method.

    Name it in a configuration by its class path, like the sources of this package. The same
    fields must always give the same examples in the same order: every process of a distributed
    run makes its own copy of the list.

    >>> @dataclass(frozen=True)
    ... class Doubles(Source):
    ...     count: int = 3
    ...     def examples(self) -> list[Example]:
    ...         return [
    ...             Example(prompt=f"2*{i}=", target=str(2 * i), origin=f"Doubles[{i}]")
    ...             for i in range(self.count)
    ...         ]
    >>> Doubles(count=2).examples()[1]
    Example(prompt='2*1=', target='2', origin='Doubles[1]')
    """

    @abstractmethod
    def examples(self) -> list[Example]:
        """All examples, in a fixed order."""
