"""Where examples come from: every task is a list of (prompt, target) texts.

A source is a frozen dataclass of plain values, so that a configuration names it by its class path
and `--help` shows its fields. The work is done in `examples()`, never in the constructor. `Split`
and `Mixture` take other sources.
"""

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import islice

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

__all__ = ["Example", "Mixture", "Source", "Split", "TextTemplate", "check_max_examples"]

_PIECE = re.compile(
    r"(?P<literal>[^{}]+)|(?P<brace>\{\{|\}\})|\{(?P<field>[^{}]+)\}|(?P<stray>[{}])"
)


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its answer, as texts."""

    prompt: str
    """What the model is given."""
    target: str | None
    """What it should say; None where the answer is not known (only for predict)."""
    origin: str
    """Where it comes from, for people: `train.jsonl:17`, `Friedman[3]`."""
    not_quantities: tuple[tuple[int, int], ...] = ()
    """Start and end of the parts of the target whose numbers are ids or categories, which the
    number losses pass over; counted in characters."""
    id: str | None = None
    """What it is about, where that has a name: its row, its passage, its molecule. Examples with
    the same id belong into the same set."""


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
    Example(prompt='2*1=', target='2', origin='Doubles[1]', not_quantities=(), id=None)
    """

    @abstractmethod
    def examples(self) -> list[Example]:
        """All examples, in a fixed order."""


@dataclass(frozen=True)
class Split(Source):
    """One part of a source, such as its training or its validation set.

    Where an example goes is decided by a hash of the seed and of the example's id, or of its prompt
    where it has none; its place in the source does not matter. So the parts never share an id, or
    where there are none a prompt, and the rows of a file stay where they are when it grows or is
    sorted anew. The parts have about their shares of the examples, not exactly.

    Where a column names the sets, take the `filters` of the table instead.
    """

    source: Source
    """What to split."""
    part: str
    """Which part to give, by its name in `shares`."""
    shares: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"train": 0.8, "val": 0.1, "test": 0.1}
    )
    """Names of the parts and their shares, which add up to 1. Every `Split` of one source must have
    the same, and the same seed; only then do their parts not overlap."""
    seed: int = 0
    """Another seed gives another split. A part that is split again needs another one."""
    max_examples: int | None = None
    """Take at most so many of the part, from its beginning. null: all."""

    def __post_init__(self) -> None:
        """Refuse values that describe no parts.

        Raises:
            ValueError: If the shares are not positive or do not add up to 1, the part is none of
                them, or `max_examples` is not positive.
        """
        shares = ", ".join(f"{name}: {share}" for name, share in self.shares.items())
        if not all(share > 0 for share in self.shares.values()) or not math.isclose(
            math.fsum(self.shares.values()), 1.0
        ):
            raise ValueError(
                f"Split.shares must be positive and add up to 1, got {{{shares}}}. Write for "
                "instance {train: 0.9, val: 0.1}."
            )
        if self.part not in self.shares:
            raise ValueError(
                f"Split.part: {self.part!r} is none of Split.shares, which has {{{shares}}}."
            )
        check_max_examples("Split", self.max_examples)
        if self.seed in _seeds_of_splits(self.source):
            raise ValueError(
                f"Split.seed: its source is split with the seed {self.seed} already, and the same "
                "hash cannot divide it a second time. Take another seed for one of the two."
            )

    def examples(self) -> list[Example]:
        """Read the source and pick the part.

        Raises:
            ValueError: If no example belongs to the part.
        """
        # By name, so that the order in which a configuration lists the shares does not matter.
        start = math.fsum(self.shares[name] for name in self.shares if name < self.part)
        end = math.fsum(self.shares[name] for name in self.shares if name <= self.part)
        if self.part == max(self.shares):
            end = math.inf  # Rounding may leave the sum below 1.
        examples = self.source.examples()
        part = [example for example in examples if start <= self._place(example) < end]
        if not part:
            raise ValueError(
                f"Split: none of the {len(examples)} examples of its source belongs to the part "
                f"{self.part!r} with share {self.shares[self.part]} and seed {self.seed}. Give it "
                "a larger share, or take a set of its own."
            )
        return part[: self.max_examples]

    def _place(self, example: Example) -> float:
        """Where on the line from 0 to 1 an example lies."""
        key = f"{self.seed} {example.prompt if example.id is None else example.id}"
        digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


def _seeds_of_splits(source: Source) -> Iterator[int]:
    """Of all splits that a source is made of."""
    if isinstance(source, Split):
        yield source.seed
        yield from _seeds_of_splits(source.source)
    elif isinstance(source, Mixture):
        for part in source.sources:
            yield from _seeds_of_splits(part)


@dataclass(frozen=True)
class Mixture(Source):
    """Several sources in given proportions, shuffled.

    Each source gives the number of examples that its weight asks for, rounded: drawn without
    repetition where it has more, and all of them again and again where it has fewer, so that no
    example comes more than once more often than another of its source. How many are left out or
    repeated is reported.
    """

    sources: tuple[Source, ...]
    """What to mix."""
    weights: tuple[float, ...]
    """A weight for each source; only their proportions matter."""
    num_examples: int | None = None
    """How many examples in all; null: as many as there can be without a repetition."""
    seed: int = 0
    """Seed of numpy's default generator. Equal fields give equal examples."""

    def __post_init__(self) -> None:
        """Refuse values that describe no mixture.

        Raises:
            ValueError: If there is no source, there are not as many weights as sources, a weight
                is not a positive number, `num_examples` is not positive, or `seed` is negative.
        """
        if not self.sources or len(self.sources) != len(self.weights):
            raise ValueError(
                f"Mixture needs a weight for every source, got {len(self.sources)} sources and "
                f"{len(self.weights)} weights."
            )
        for number, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"Mixture.weights[{number}] must be a positive number, got {weight}."
                )
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(
                "Mixture.num_examples must be 1 or more, or null for no repetition, got "
                f"{self.num_examples}."
            )
        if self.seed < 0:
            raise ValueError(f"Mixture.seed must be 0 or more, got {self.seed}.")

    def examples(self) -> list[Example]:
        """Read the sources and draw from them.

        Raises:
            ValueError: If a source has no examples, or its weight gives it none.
        """
        random = np.random.default_rng(self.seed)
        read = [source.examples() for source in self.sources]
        mixed: list[Example] = []
        for number, (examples, count) in enumerate(zip(read, self._counts(read), strict=True)):
            rounds, rest = divmod(count, len(examples))
            chosen = random.permutation(len(examples))[:rest]
            mixed += examples * rounds + [examples[i] for i in chosen]
            name = f"sources[{number}] ({type(self.sources[number]).__name__})"
            if rounds and rest:
                how = f"each {rounds} or {rounds + 1} times"
            elif rounds:
                how = f"each {'once' if rounds == 1 else f'{rounds} times'}"
            else:
                how = f"{len(examples) - count} are left out"
            rank_zero_info(f"Mixture: {count} examples from the {len(examples)} of {name}, {how}.")
        return [mixed[i] for i in random.permutation(len(mixed))]

    def _counts(self, read: list[list[Example]]) -> list[int]:
        """How many examples each source gives: exact shares, rounded by the largest remainder."""
        # As they are written: 0.1 is a tenth, so that exact proportions come out exactly.
        weights = [Fraction(str(weight)) for weight in self.weights]
        shares = [weight / sum(weights) for weight in weights]
        total = self.num_examples
        if total is None:
            total = math.floor(
                min(len(examples) / share for examples, share in zip(read, shares, strict=True))
            )
        exact = [total * share for share in shares]
        counts = [math.floor(count) for count in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in islice(by_remainder, total - sum(counts)):
            counts[i] += 1
        for number, (examples, count) in enumerate(zip(read, counts, strict=True)):
            if not count or not examples:
                raise ValueError(
                    f"Mixture.sources[{number}] has {len(examples)} examples and gives {count} of "
                    f"{total}. Leave it out, or raise its weight or Mixture.num_examples."
                )
        return counts


@dataclass(frozen=True)
class TextTemplate:
    """A text with fields in braces: `{left}+{right}=`. `{{` and `}}` stand for plain braces.

    A field is everything between its braces, spaces and colons included; there are no format
    specifications.

    >>> template = TextTemplate.parse("Solve {{x}}: {two words}", where="JsonLines.prompt")
    >>> template.fill({"two words": "x=1"})
    'Solve {x}: x=1'
    """

    pieces: tuple[tuple[str, str | None], ...]
    """Pairs of plain text and the field after it, or None."""

    @classmethod
    def parse(cls, text: str, where: str) -> "TextTemplate":
        """Split a text as a user wrote it.

        Args:
            text: The text.
            where: The configuration key it was written at; named in errors.

        Raises:
            ValueError: If a brace has no partner, or there is no field.
        """
        pieces: list[tuple[str, str | None]] = []
        for match in _PIECE.finditer(text):
            if match["stray"]:
                raise ValueError(
                    f"{where}: {text!r} has a brace without its partner, or none between its "
                    f"braces, at character {match.start() + 1}. Write {{name}} for a field, and "
                    "{{ and }} for plain braces."
                )
            pieces.append((match["literal"] or (match["brace"] or "")[:1], match["field"]))
        template = cls(tuple(pieces))
        if not template.fields:
            raise ValueError(f"{where}: {text!r} has no field in braces, such as {{name}}.")
        return template

    @classmethod
    def of_column(cls, name: str) -> "TextTemplate":
        """The template that is one field and nothing else, whatever characters its name has."""
        return cls((("", name),))

    @classmethod
    def of_setting(cls, text: str, columns: Collection[str], where: str) -> "TextTemplate":
        """The template that a setting stands for, which is the name of a column or a text.

        Args:
            text: The setting. It names a column where there is one of that name, or where it has
                no brace; else it is parsed.
            columns: Those of the table.
            where: The configuration key of the setting; named in errors.

        Raises:
            ValueError: As `parse`.
        """
        if text in columns or not ("{" in text or "}" in text):
            return cls.of_column(text)
        return cls.parse(text, where)

    @property
    def fields(self) -> list[str]:
        """The names of the fields, in order, with repetitions."""
        return [field for _, field in self.pieces if field is not None]

    def fill(self, values: Mapping[str, str]) -> str:
        """Put the values of the fields in."""
        return "".join(
            literal if field is None else literal + values[field] for literal, field in self.pieces
        )

    def spans(
        self, values: Mapping[str, str], fields: Collection[str]
    ) -> tuple[tuple[int, int], ...]:
        """Start and end, in the filled text, of what some of the fields put in.

        >>> template = TextTemplate.parse("room {room}: {degrees}", where="Csv.target")
        >>> template.spans({"room": "12", "degrees": "19.5"}, ["room"])
        ((5, 7),)
        """
        spans, end = [], 0
        for literal, field in self.pieces:
            start = end + len(literal)
            end = start if field is None else start + len(values[field])
            if field in fields:
                spans.append((start, end))
        return tuple(spans)


def check_max_examples(source: str, max_examples: int | None) -> None:
    """Refuse a largest number of examples that is not positive.

    Raises:
        ValueError: If it is not; names the source.
    """
    if max_examples is not None and max_examples < 1:
        raise ValueError(
            f"{source}.max_examples must be 1 or more, or null for all, got {max_examples}."
        )
