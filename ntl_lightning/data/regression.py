"""Regression problems made from a seed and written as text: Friedman's three, and any formula."""

import hashlib
import keyword
import math
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

import numpy as np
from numpy.typing import NDArray

from ntl_lightning.data.expressions import CONSTANTS, FUNCTIONS, Expression
from ntl_lightning.data.problems import TENTHS, Split, check_count, check_seed
from ntl_lightning.data.sources import Example, Source, TextTemplate
from ntl_lightning.numbers.text import NumberFormat

__all__ = [
    "Formula",
    "Friedman",
    "Friedman2",
    "Friedman3",
    "InputRange",
    "friedman2_mean",
    "friedman3_mean",
    "friedman_mean",
]

Inputs = NDArray[np.integer | np.floating]

_MOST_STEPS = 2**53  # up to so many, a step's number is exact in float64
_CHUNK = 4096
_MOST_CHUNKS_WITHOUT_A_HIT = 16


def friedman_mean(inputs: Inputs) -> NDArray[np.float64]:
    """The target of `Friedman` before noise.

    With u = (x + 0.5) / 100: 50 + 30 (10 sin(pi u1 u2) + 20 (u3 - 0.5)^2 + 10 u4 + 5 u5).

    Args:
        inputs: Shape (n, 5), from 0 to 99.

    Returns:
        Shape (n,), float64.

    Source: J. Friedman, Multivariate Adaptive Regression Splines, Annals of Statistics 19 (1991),
    here scaled and moved so that nearly all answers have three digits.
    """
    u1, u2, u3, u4, u5 = ((inputs + 0.5) / 100).T
    score = 10 * np.sin(np.pi * u1 * u2) + 20 * (u3 - 0.5) ** 2 + 10 * u4 + 5 * u5
    return np.asarray(50 + 30 * score, dtype=np.float64)


def friedman2_mean(inputs: Inputs) -> NDArray[np.float64]:
    """The target of `Friedman2` before noise: sqrt(x1^2 + (x2 x3 - 1 / (x2 x4))^2).

    Args:
        inputs: Shape (n, 4).

    Returns:
        Shape (n,), float64.

    Source: J. Friedman (1991), as for `friedman_mean`; the impedance of a circuit.
    """
    x1, x2, x3, x4 = inputs.T
    return np.asarray(np.hypot(x1, x2 * x3 - 1 / (x2 * x4)), dtype=np.float64)


def friedman3_mean(inputs: Inputs) -> NDArray[np.float64]:
    """The target of `Friedman3` before noise: arctan((x2 x3 - 1 / (x2 x4)) / x1).

    Args:
        inputs: Shape (n, 4), the first at least 0; there, the limit is taken.

    Returns:
        Shape (n,), float64.

    Source: J. Friedman (1991), as for `friedman_mean`; the phase shift of a circuit.
    """
    x1, x2, x3, x4 = inputs.T
    return np.asarray(np.arctan2(x2 * x3 - 1 / (x2 * x4), x1), dtype=np.float64)


@dataclass(frozen=True)
class InputRange:
    """Where an input of a formula is drawn from: uniform over all values with so many decimals.

    >>> InputRange(low=-1, high=1, decimals=2).text(-5)
    '-0.05'
    """

    low: float
    """Smallest value."""
    high: float
    """Largest value, included."""
    decimals: int = 0
    """Digits behind the decimal point, in the drawing and in the text."""

    def __post_init__(self) -> None:
        """Refuse ranges without a value.

        Raises:
            ValueError: If the ends are not finite, no value with so many decimals lies between
                them, or those that do have too many digits.
        """
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(
                f"InputRange.low and high must be finite, got {self.low} and {self.high}."
            )
        if not 0 <= self.decimals <= 15:
            raise ValueError(f"InputRange.decimals must be from 0 to 15, got {self.decimals}.")
        first, last = self.steps
        if first > last:
            raise ValueError(
                f"InputRange: no number with {self.decimals} decimals lies from {self.low} to "
                f"{self.high}. Give a larger high, or more decimals."
            )
        if max(abs(first), abs(last)) > _MOST_STEPS:
            raise ValueError(
                f"InputRange: numbers from {self.low} to {self.high} with {self.decimals} decimals "
                "have more digits than float64 holds. Give fewer decimals."
            )

    @property
    def steps(self) -> tuple[int, int]:
        """The smallest and largest value in units of the last decimal."""
        low, high = (Decimal(repr(end)).scaleb(self.decimals) for end in (self.low, self.high))
        return (
            int(low.to_integral_value(ROUND_CEILING)),
            int(high.to_integral_value(ROUND_FLOOR)),
        )

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Independent values in units of the last decimal, shape (count,)."""
        return random.integers(*self.steps, size=count, endpoint=True)

    def values(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """The float64 values, those next to what `text` writes."""
        return steps / 10.0**self.decimals

    def text(self, step: int) -> str:
        """A value as it stands in the prompt."""
        return f"{Decimal(step).scaleb(-self.decimals):f}"


@dataclass(frozen=True)
class Friedman(Source):
    """Friedman's first regression problem as text: `47 03 99 12 55=` and the answer `484`.

    Five integers, uniform over 0..99, of which the answer is `friedman_mean` plus normal noise.
    By the definition of the task an answer is limited to 0..999, and is rounded as
    `number_format` writes it. The best possible mean absolute error is that of the noise, 0.798
    of its standard deviation.

    Give every set a seed of its own: the same seed gives the same examples.
    """

    num_examples: int
    """How many examples."""
    seed: int
    """Seed of numpy's default generator. Equal fields give equal examples."""
    noise: float = 30.0
    """Standard deviation of the noise, in units of the answer."""
    number_format: NumberFormat | None = None
    """How the answer is rounded and stated in the data. null: with three digits, such as 047."""

    def __post_init__(self) -> None:
        """Refuse values that describe no data set.

        Raises:
            ValueError: If `num_examples` is not positive, or `seed` or `noise` is negative.
        """
        _check_fields("Friedman", self.num_examples, self.seed, self.noise)

    def examples(self) -> list[Example]:
        """Draw the examples.

        Raises:
            ValueError: If `number_format` has no room for an answer, such as 484 in width 2.
        """
        random = np.random.default_rng(self.seed)
        inputs = random.integers(0, 100, size=(self.num_examples, 5))
        noise = self.noise * random.normal(size=self.num_examples)
        answers = np.clip(friedman_mean(inputs) + noise, 0, 999)
        prompts = (" ".join(f"{x:02d}" for x in row) + "=" for row in inputs.tolist())
        number_format = self.number_format or NumberFormat(width=3)
        return _examples("Friedman", prompts, answers, number_format)


# Friedman's domain, with as many decimals as leave the formula smooth.
_CIRCUIT = (
    InputRange(0, 100, decimals=2),
    InputRange(40 * math.pi, 560 * math.pi, decimals=1),
    InputRange(0, 1, decimals=3),
    InputRange(1, 11, decimals=2),
)


@dataclass(frozen=True)
class _CircuitProblem(Source):
    """What Friedman's second and third problem have in common."""

    num_examples: int
    """How many examples."""
    seed: int
    """Seed of numpy's default generator. Equal fields give equal examples."""
    noise: float
    """Standard deviation of the noise, in units of the answer."""
    number_format: NumberFormat | None = None
    """How the answer is rounded and stated in the data."""

    def __post_init__(self) -> None:
        """Refuse values that describe no data set.

        Raises:
            ValueError: If `num_examples` is not positive, or `seed` or `noise` is negative.
        """
        _check_fields(type(self).__name__, self.num_examples, self.seed, self.noise)

    @abstractmethod
    def _mean(self, inputs: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
        """(n,) the answers to inputs (n, 4) before noise."""

    @abstractmethod
    def _default_format(self) -> NumberFormat:
        """What `number_format: null` means."""

    def examples(self) -> list[Example]:
        """Draw the examples.

        Raises:
            ValueError: If `number_format` has no room for an answer.
        """
        random = np.random.default_rng(self.seed)
        prompts, inputs = _circuits(random, self.num_examples)
        answers = self._mean(inputs) + self.noise * random.normal(size=self.num_examples)
        number_format = self.number_format or self._default_format()
        return _examples(type(self).__name__, prompts, answers, number_format)


@dataclass(frozen=True)
class Friedman2(_CircuitProblem):
    """Friedman's second regression problem as text: `12.50 905.1 0.531 7.31=` and `481`.

    Four decimals, uniform over Friedman's domain, of which the answer is `friedman2_mean` (0 to
    about 1760) plus normal noise, rounded as `number_format` writes it.

    Give every set a seed of its own: the same seed gives the same examples.
    """

    noise: float = 125.0
    """Standard deviation of the noise, in units of the answer. The default is a third of the
    answers' own, as in Friedman's paper."""
    number_format: NumberFormat | None = None
    """How the answer is rounded and stated in the data. null: without decimals."""

    def _mean(self, inputs: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
        return friedman2_mean(inputs)

    def _default_format(self) -> NumberFormat:
        return NumberFormat()


@dataclass(frozen=True)
class Friedman3(_CircuitProblem):
    """Friedman's third regression problem as text: `12.50 905.1 0.531 7.31=` and `1.545`.

    The inputs of `Friedman2`, of which the answer is `friedman3_mean` (nearly always 0 to 1.571)
    plus normal noise, rounded as `number_format` writes it.

    Give every set a seed of its own: the same seed gives the same examples.
    """

    noise: float = 0.1
    """Standard deviation of the noise, in units of the answer. The default is a third of the
    answers' own, as in Friedman's paper."""
    number_format: NumberFormat | None = None
    """How the answer is rounded and stated in the data. null: with three decimals."""

    def _mean(self, inputs: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
        return friedman3_mean(inputs)

    def _default_format(self) -> NumberFormat:
        return NumberFormat(decimals=3)


@dataclass(frozen=True)
class Formula(Source):
    """Regression on a formula of your own: `x=3, y=0.52:` and the answer `9.25`.

    The inputs are drawn independently, and the answer is the formula of them as they are written,
    computed in float64, plus normal noise, rounded as `number_format` writes it. A fixed hash of
    the inputs puts every point into train (80 %), val (10 %) or test (10 %), so that the three are
    disjoint whatever the seeds, prompts and formulas; a point may be drawn more than once. To test
    extrapolation, ask for other ranges than in training.
    """

    expression: str
    """The formula, such as `3*x + sin(y)/2`: numbers, inputs, pi, `+ - * / **`, brackets, and the
    functions abs, arctan, cos, exp, log, log10, sin, sqrt, tan and tanh."""
    inputs: dict[str, InputRange]
    """Name of each input and where it is drawn from: `x: {low: 0, high: 99}`. Their order is
    that of the default prompt and has no other effect."""
    num_examples: int
    """How many examples."""
    split: Split
    """The set to draw from."""
    seed: int = 0
    """Seed of numpy's default generator. Equal fields give equal examples."""
    noise: float = 0.0
    """Standard deviation of the noise, in units of the answer."""
    number_format: NumberFormat | None = None
    """How the answer is rounded and stated in the data. null: with two decimals."""
    template: str | None = None
    """The prompt, with every input in braces. null: `x={x}, y={y}:`, with the names of all."""

    def __post_init__(self) -> None:
        """Refuse values that describe no data set.

        Raises:
            ValueError: If a count, seed or noise makes no sense, an input has a name that means
                something else, the expression has a part that is not allowed, or the template
                does not show all inputs.
        """
        _check_fields("Formula", self.num_examples, self.seed, self.noise)
        if not self.inputs:
            raise ValueError("Formula.inputs is empty: name at least one, x: {low: 0, high: 99}.")
        for name in self.inputs:
            if not str(name).isidentifier() or keyword.iskeyword(name):
                raise ValueError(
                    f"Formula.inputs: {name!r} is no name; use letters, digits and _, and begin "
                    "with a letter."
                )
            as_parsed = unicodedata.normalize("NFKC", name)
            if as_parsed != name:
                raise ValueError(
                    f"Formula.inputs: {name!r} ({name!a}) is read as {as_parsed!r} "
                    f"({as_parsed!a}) in an expression. Name it so, here and in the template."
                )
            if name in FUNCTIONS or name in CONSTANTS:
                raise ValueError(f"Formula.inputs: {name!r} has a meaning already. Rename it.")
        Expression.parse(self.expression, tuple(self.inputs), "Formula.expression")
        if set(self._prompt().fields) != set(self.inputs):
            raise ValueError(
                "Formula.template must have every input in braces and no other field, here "
                f"{', '.join(f'{{{name}}}' for name in self.inputs)}, got {self.template!r}."
            )

    def examples(self) -> list[Example]:
        """Draw the examples.

        Raises:
            ValueError: If the formula is not finite at some point, no point belongs to the set, or
                `number_format` has no room for an answer.
        """
        texts, values = self._points()
        formula = Expression.parse(self.expression, tuple(self.inputs), "Formula.expression")
        answers = formula(values)
        infinite = np.flatnonzero(~np.isfinite(answers))
        if len(infinite):
            first = int(infinite[0])
            point = ", ".join(f"{name}={text[first]}" for name, text in texts.items())
            raise ValueError(
                f"Formula.expression: {self.expression} is {answers[first]} at {point}, and not "
                f"finite at {len(infinite)} of {len(answers)} points. Narrow Formula.inputs."
            )
        noise = np.random.default_rng([self.seed, 1]).normal(size=self.num_examples)
        prompt = self._prompt()
        prompts = (
            prompt.fill(dict(zip(texts, point, strict=True)))
            for point in zip(*texts.values(), strict=True)
        )
        number_format = self.number_format or NumberFormat(decimals=2)
        answers = answers + self.noise * noise
        return _examples("Formula", prompts, answers, number_format, self.split)

    def _prompt(self) -> TextTemplate:
        text = self.template
        if text is None:
            text = ", ".join(f"{name}={{{name}}}" for name in self.inputs) + ":"
        return TextTemplate.parse(text, "Formula.template")

    def _points(self) -> tuple[dict[str, list[str]], dict[str, NDArray[np.float64]]]:
        """The inputs in the order of their names, as texts and as values."""
        random = np.random.default_rng([self.seed, 0])
        # Neither a point nor its set depends on the order in which the inputs are named.
        inputs = dict(sorted(self.inputs.items()))
        points: list[tuple[str, ...]] = []
        steps: list[NDArray[np.int64]] = []
        num_without = 0
        while len(points) < self.num_examples:
            drawn = [where.draw(random, _CHUNK) for where in inputs.values()]
            texts = [
                map(where.text, column.tolist())
                for where, column in zip(inputs.values(), drawn, strict=True)
            ]
            candidates = list(zip(*texts, strict=True))
            kept = [i for i, point in enumerate(candidates) if self._is_of_split(point)]
            points += [candidates[i] for i in kept]
            steps.append(np.stack(drawn)[:, kept])
            num_without = 0 if kept else num_without + 1
            if num_without == _MOST_CHUNKS_WITHOUT_A_HIT:
                raise ValueError(
                    f"Formula.split: none of {num_without * _CHUNK} points drawn from "
                    f"Formula.inputs belongs to {self.split}. Widen the ranges, or give more "
                    "decimals."
                )
        columns = np.concatenate(steps, axis=1)[:, : self.num_examples]
        by_name = zip(*points[: self.num_examples], strict=True)
        return (
            {name: list(texts) for name, texts in zip(inputs, by_name, strict=True)},
            {
                name: where.values(column)
                for (name, where), column in zip(inputs.items(), columns, strict=True)
            },
        )

    def _is_of_split(self, point: tuple[str, ...]) -> bool:
        first, last = TENTHS[self.split]
        # 3 and 3.00 are the same point.
        values = (text.rstrip("0").rstrip(".") if "." in text else text for text in point)
        digest = hashlib.blake2b(" ".join(values).encode(), digest_size=8).digest()
        return first <= int.from_bytes(digest, "big") % 10 < last


def _circuits(random: np.random.Generator, count: int) -> tuple[Iterator[str], Inputs]:
    """Prompts, and inputs of shape (count, 4)."""
    drawn = [where.draw(random, count) for where in _CIRCUIT]
    texts = [
        map(where.text, column.tolist()) for where, column in zip(_CIRCUIT, drawn, strict=True)
    ]
    values = [where.values(column) for where, column in zip(_CIRCUIT, drawn, strict=True)]
    return (" ".join(row) + "=" for row in zip(*texts, strict=True)), np.stack(values, axis=1)


def _examples(
    source: str,
    prompts: Iterable[str],
    answers: NDArray[np.float64],
    number_format: NumberFormat,
    split: Split | None = None,
) -> list[Example]:
    examples = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers.tolist(), strict=True)):
        origin = f"{source}[{index}]" if split is None else f"{source}({split})[{index}]"
        try:
            target = number_format.write(answer)
        except ValueError as error:
            raise ValueError(f"{origin}, written by {source}.number_format: {error}") from error
        examples.append(Example(prompt, target, origin))
    return examples


def _check_fields(source: str, num_examples: int, seed: int, noise: float) -> None:
    check_count(source, num_examples)
    check_seed(source, seed)
    if not 0 <= noise < math.inf:
        raise ValueError(f"{source}.noise must be a number >= 0, got {noise}.")
