"""Problems of DeepMind's mathematics data set, made from a seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.modules import (
    EXTRAPOLATION_MODULES,
    INTERPOLATION_MODULES,
    TRAINING_MODULES,
    Difficulty,
    Module,
)
from ntl_lightning.data.sources import Example, Source

__all__ = ["TENTHS", "Mathematics", "tenth"]

Split = Literal["train", "val", "interpolate", "extrapolate"]

_MODULES: Mapping[Split, Mapping[str, Module]] = {
    "train": TRAINING_MODULES,
    "val": TRAINING_MODULES,
    "interpolate": INTERPOLATION_MODULES,
    "extrapolate": EXTRAPOLATION_MODULES,
}
# Tenths of all problems. Changing these or the hash moves problems from one set to another.
TENTHS: Mapping[Split, Sequence[int]] = {
    "train": range(7),
    "val": [7],
    "interpolate": [8],
    "extrapolate": [9],
}
_LONGEST_QUESTION = 160
_LONGEST_ANSWER = 30
# Draws in a row without a new problem, after which there are taken to be none.
_PATIENCE = 20_000


@dataclass(frozen=True)
class Mathematics(Source):
    """Problems of the kinds, forms and ranges of DeepMind's mathematics data set.

    Thirteen modules are for training and interpolation, seven more ask for larger numbers and
    longer expressions. Questions and answers have the forms of the original, so that a model
    trained on these can be tested on the original's files; all answers are integers or decimals,
    exact. As there, questions have at most 160 characters and answers at most 30.

    A fixed hash of a problem, whatever its wording and the names of its letters, puts it into
    train (70 %), val, interpolate or extrapolate (10 % each): these are disjoint whatever the
    seeds, modules and difficulties. Of a composed problem the last question decides, with the
    values put in. No question comes twice.

    Source: D. Saxton et al., Analysing Mathematical Reasoning Abilities of Neural Models,
    arXiv:1904.01557, and its package mathematics_dataset 1.0.1. Modules and sets are those of
    arXiv:2411.02083.
    """

    num_examples: int
    """How many examples of every module."""
    split: Split
    """The set to draw from. `interpolate` and `extrapolate` are tests: the first of problems as in
    training, the second of harder ones."""
    modules: tuple[str, ...] | None = None
    """Modules, such as `arithmetic__mul`; null: all of the set, 13 or (extrapolate) 7."""
    difficulty: Difficulty | None = None
    """Which third of the range of train and val: `easy`, `medium` or `hard`; null: all of it. The
    tests have a difficulty of their own."""
    seed: int = 0
    """Equal fields give equal examples. More examples begin with the same ones, module by
    module."""

    def __post_init__(self) -> None:
        """Refuse values that describe no problems.

        Raises:
            ValueError: If `num_examples` is not positive or `seed` negative; if a module is
                unknown, named twice or not one of the set, or there is none; if a test is given
                a difficulty.
        """
        if self.num_examples < 1:
            raise ValueError(
                f"Mathematics.num_examples must be 1 or more, got {self.num_examples}."
            )
        if self.seed < 0:
            raise ValueError(f"Mathematics.seed must be 0 or more, got {self.seed}.")
        if self.difficulty is not None and self.split in ("interpolate", "extrapolate"):
            raise ValueError(
                f"Mathematics.difficulty: {self.difficulty} has no effect on {self.split}, whose "
                "difficulty is fixed. Remove it."
            )
        if self.modules is None:
            return
        if isinstance(self.modules, str) or not self.modules:
            raise ValueError(
                f"Mathematics.modules must be a list of modules, got {self.modules!r}. Write "
                f"[{next(iter(_MODULES[self.split]))}], or null for all."
            )
        for name in self.modules:
            if name not in TRAINING_MODULES and name not in EXTRAPOLATION_MODULES:
                raise ValueError(
                    f"Mathematics.modules: there is no module {name!r}. For train, val and "
                    f"interpolate there are {', '.join(TRAINING_MODULES)}; for extrapolate "
                    f"{', '.join(EXTRAPOLATION_MODULES)}."
                )
            if name not in _MODULES[self.split]:
                raise ValueError(
                    f"Mathematics.modules: {name} is not a module of {self.split}, which has "
                    f"{', '.join(_MODULES[self.split])}."
                )
            if self.modules.count(name) > 1:
                raise ValueError(f"Mathematics.modules names {name} twice. Remove one.")

    def examples(self) -> list[Example]:
        """Draw the examples, module after module.

        Raises:
            ValueError: If a module has fewer problems of this kind than asked for.
        """
        examples = []
        for name in self.modules or _MODULES[self.split]:
            for index, (question, answer) in enumerate(self._problems(name)):
                origin = f"Mathematics({self.split}, {name})[{index}]"
                examples.append(Example(question, answer, origin))
        return examples

    def _problems(self, name: str) -> Iterator[tuple[str, str]]:
        module = _MODULES[self.split][name]
        draws = Draws(_hash(f"{self.seed} {name} {self.split} {self.difficulty}"))
        tenths = TENTHS[self.split]
        found: set[str] = set()
        idle = 0
        while len(found) < self.num_examples:
            idle += 1
            if idle > _PATIENCE:
                level = f"{self.difficulty} " if self.difficulty else ""
                raise ValueError(
                    f"Mathematics.num_examples asks for {self.num_examples} of each module, but "
                    f"no more than {len(found)} {level}problems of {self.split} were found for "
                    f"{name}. Ask for fewer, or for another difficulty."
                )
            problem = module.draw(draws, self.difficulty)
            if tenth(problem.content) not in tenths:
                continue
            question, answer = problem.write()
            if len(question) > _LONGEST_QUESTION or len(answer) > _LONGEST_ANSWER:
                continue
            if question not in found:
                found.add(question)
                idle = 0
                yield question, answer


def tenth(content: str) -> int:
    """Which tenth of all problems one belongs to, from 0 to 9; depends on nothing but it."""
    return _hash(content) % 10


def _hash(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
