"""The kinds of problems, by the names of their modules in the original data set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log10
from typing import Literal, NamedTuple

from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.expressions import draw_expression, lengths
from ntl_lightning.data.mathematics.sentences import (
    Budget,
    Composition,
    draw_decimal,
    draw_system,
)
from ntl_lightning.data.mathematics.values import Scaled, decimal_text, difference, number_text

__all__ = [
    "EXTRAPOLATION_MODULES",
    "INTERPOLATION_MODULES",
    "TRAINING_MODULES",
    "Difficulty",
    "Module",
]

Difficulty = Literal["easy", "medium", "hard"]


class Problem(NamedTuple):
    """A problem before it is put into words."""

    content: str
    """What is asked, whatever the wording and the letters; decides the set it belongs to."""
    write: Callable[[], tuple[str, str]]
    """Draws the wording; gives question and answer."""


@dataclass(frozen=True)
class Module:
    """One kind of problem."""

    draw_problem: Callable[[Draws, Budget], Problem]
    """From random numbers and a budget to a problem."""
    entropy: tuple[float, float] = (3.0, 10.0)
    """Least and most decimal digits of randomness in a problem."""
    num_modules: tuple[int, int] = (1, 1)
    """Fewest and most modules that a problem is composed of."""

    def draw(self, draws: Draws, difficulty: Difficulty | None) -> Problem:
        """Draw a problem.

        Args:
            draws: Where randomness comes from.
            difficulty: The third of the range of entropies to draw from; None: all of it.
        """
        low, high = self.entropy
        if difficulty is not None:
            third = (high - low) / 3
            low += third * ("easy", "medium", "hard").index(difficulty)
            high = low + third
        modules = draws.between(*self.num_modules)
        return self.draw_problem(draws, Budget(modules, draws.uniform(low, high)))


def _add_or_sub(draws: Draws, budget: Budget) -> Problem:
    left, right = _draw_pair(draws, budget.entropy)
    is_sum = draws.coin()
    a, b = number_text(left), number_text(right)
    total = difference(left, Scaled(-right.digits, right.places) if is_sum else right)

    def write() -> tuple[str, str]:
        answer = number_text(total)
        templates = _SUMS
        if not is_sum:
            templates = _DIFFERENCES if answer[0] == "-" else _DIFFERENCES + _DISTANCES
        return draws.choice(templates).format(a=a, b=b), answer

    return Problem("+".join(sorted((a, b))) if is_sum else f"{a} - {b}", write)


def _mul(draws: Draws, budget: Budget) -> Problem:
    left, right = _draw_pair(draws, budget.entropy)
    a, b = number_text(left), number_text(right)

    def write() -> tuple[str, str]:
        product = decimal_text(left.digits * right.digits, left.places + right.places)
        return draws.choice(_PRODUCTS).format(a=a, b=b), product

    return Problem("*".join(sorted((a, b))), write)


def _draw_pair(draws: Draws, entropy: float) -> tuple[Scaled, Scaled]:
    one = max(1.0, draws.uniform(0, entropy))
    return draw_decimal(draws, one), draw_decimal(draws, max(1.0, entropy - one))


def _calculate(
    draws: Draws, budget: Budget, *, add_sub: bool, mul_div: bool, longer: bool
) -> Problem:
    """An expression; a longer one has more operations than any in training."""
    own = max(1.0, budget.entropy / 4)
    value = draws.integer(own)
    length = None
    if longer:
        _, most = lengths(Module.entropy[1])
        length = draws.between(most + 1, most + 3)
    expression = draw_expression(
        draws,
        value,
        max(1.0, budget.entropy - own),
        add_sub=add_sub,
        mul_div=mul_div,
        length=length,
    )

    def write() -> tuple[str, str]:
        return draws.choice(_EXPRESSIONS).format(expression.text()), str(value)

    # Not the text, which is not needed at all where the problem turns out to be of another set.
    return Problem(f"expression {expression.constants}", write)


def _linear(draws: Draws, budget: Budget, *, degree: int) -> Problem:
    entropy, rest = budget.peel()
    system = draw_system(draws, degree, entropy)

    def write() -> tuple[str, str]:
        unknown, equations, before = Composition(draws).write(system, rest)
        return _after(before, f"Solve {equations} for {unknown}."), str(system.solution[0])

    return Problem(system.content, write)


def _sequence_next_term(draws: Draws, budget: Budget) -> Problem:
    degree = draws.between(1, 3)
    coefficients = []
    for power, share in enumerate(draws.shares([1] * (degree + 1))):
        # All powers contribute about as much to the terms shown.
        scale = 0.5 * (degree - 2 * power) * log10(degree + 2)
        entropy = share * budget.entropy + scale
        coefficients.append(draws.integer(entropy, min_abs=int(power == degree)))

    def write() -> tuple[str, str]:
        count = degree + 2 + draws.below(4)
        *shown, answer = (
            sum(coefficient * n**power for power, coefficient in enumerate(coefficients))
            for n in range(1, count + 2)
        )
        return draws.choice(_SEQUENCES).format(", ".join(map(str, shown))), str(answer)

    return Problem(f"sequence {coefficients}", write)


def _div_remainder(draws: Draws, budget: Budget) -> Problem:
    entropy, rest = budget.peel()
    own = 1 + draws.uniform(0, entropy / 3)
    remainder = draws.integer(own, signed=False)
    entropy = max(0.0, entropy - own)
    share = draws.fraction()
    quotient = draws.integer(share * entropy, signed=False, min_abs=1)
    divisor = remainder + draws.integer((1 - share) * entropy, signed=False, min_abs=1)
    dividend = quotient * divisor + remainder

    def write() -> tuple[str, str]:
        composition = Composition(draws)
        told = composition.tell([dividend, divisor], rest)
        question = draws.choice(_REMAINDERS).format(a=told[0].inline, b=told[1].inline)
        return _after(composition.before(told, inline=True), question), str(remainder)

    return Problem(f"{dividend} mod {divisor}", write)


def _place_value(draws: Draws, budget: Budget) -> Problem:
    digits = str(draws.integer(budget.entropy, signed=False, min_abs=1))
    place = draws.below(len(digits))
    answer = digits[-1 - place]
    question = f"What is the {_place_name(place)} digit of {digits}?"
    return Problem(question, lambda: (question, answer))


def _round_number(draws: Draws, budget: Budget) -> Problem:
    entropy, rest = budget.peel()
    power = draws.between(-7, 6)
    own = 1 + draws.uniform(0, entropy / 2)
    rounded = draws.integer(own)
    more = ceil(max(1.0, entropy - own))
    half = 10**more // 2
    # Halves are rounded away from zero.
    remainder = draws.between(-half + (rounded <= 0), half - (rounded >= 0))
    digits = (rounded * 10**more + remainder) * 10 ** max(0, power - more)
    scale = 10 ** max(0, more - power)
    number = Scaled(digits, more - power) if digits % scale else digits // scale

    def write() -> tuple[str, str]:
        composition = Composition(draws)
        told = composition.tell([number], rest)
        question = draws.choice(_ROUNDINGS).format(told[0].name, _accuracy(draws, power))
        return _after(composition.before(told), question), decimal_text(rounded, -power)

    return Problem(f"round {number_text(number)} {power}", write)


def _accuracy(draws: Draws, power: int) -> str:
    """What to round to, a power of ten."""
    if power > 0:
        return f"the nearest {draws.choice((str(10**power), _POWERS_OF_TEN[power]))}"
    if power == 0 and draws.coin():
        return "the nearest integer"
    plural = "" if power == -1 else "s"
    count = draws.choice((str(-power), _SMALL_NUMBERS[-power]))
    return f"{count} {draws.choice(('decimal place', 'dp'))}{plural}"


def _place_name(place: int) -> str:
    """The name of a digit's place; 0 is that of the units."""
    if place < 3:
        return ("units", "tens", "hundreds")[place]
    return ("", "ten ", "hundred ")[place % 3] + _GROUPS[place // 3 - 1]


def _after(before: str, question: str) -> str:
    return f"{before} {question}" if before else question


_SUMS: tuple[str, ...] = (
    "{a} + {b}",
    "{a}+{b}",
    "Work out {a} + {b}.",
    "Calculate {a} + {b}.",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Add together {a} and {b}.",
    "Put together {a} and {b}.",
    "Sum {a} and {b}.",
    "Total of {a} and {b}.",
)
_DIFFERENCES: tuple[str, ...] = (
    "{a} - {b}",
    "Work out {a} - {b}.",
    "Calculate {a} - {b}.",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "What is {a} take away {b}?",
    "What is {b} less than {a}?",
    "Subtract {b} from {a}.",
)
_DISTANCES = tuple(
    f"What is the {noun} between {pair}?"
    for noun in ("distance", "difference")
    for pair in ("{a} and {b}", "{b} and {a}")
)
_PRODUCTS = (
    "{a}*{b}",
    "{a} * {b}",
    "{a} times {b}",
    "Calculate {a}*{b}.",
    "Work out {a} * {b}.",
    "Multiply {a} and {b}.",
    "Product of {a} and {b}.",
    "What is the product of {a} and {b}?",
    "What is {a} times {b}?",
)
_EXPRESSIONS = (
    "{}",
    "What is {}?",
    "What is the value of {}?",
    "Calculate {}.",
    "Evaluate {}.",
)
_SEQUENCES = (
    "What comes next: {}?",
    "What is next in {}?",
    "What is the next term in {}?",
)
_REMAINDERS = (
    "Calculate the remainder when {a} is divided by {b}.",
    "What is the remainder when {a} is divided by {b}?",
)
_ROUNDINGS = (
    "Round {} to {}.",
    "What is {} rounded to {}?",
)
_GROUPS = ("thousands", "millions", "billions", "trillions")
_POWERS_OF_TEN = (
    "one",
    "ten",
    "one hundred",
    "one thousand",
    "ten thousand",
    "one hundred thousand",
    "one million",
)
_SMALL_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")

_COMPOSED = (2, 4)
_ADD_OR_SUB = "arithmetic__add_or_sub"

TRAINING_MODULES: Mapping[str, Module] = {
    "algebra__linear_1d": Module(partial(_linear, degree=1)),
    "algebra__linear_1d_composed": Module(partial(_linear, degree=1), num_modules=_COMPOSED),
    "algebra__linear_2d": Module(partial(_linear, degree=2)),
    "algebra__linear_2d_composed": Module(partial(_linear, degree=2), num_modules=_COMPOSED),
    "algebra__sequence_next_term": Module(_sequence_next_term),
    _ADD_OR_SUB: Module(_add_or_sub, entropy=(4.0, 16.0)),
    "arithmetic__add_sub_multiple": Module(
        partial(_calculate, add_sub=True, mul_div=False, longer=False)
    ),
    "arithmetic__mul": Module(_mul),
    "numbers__div_remainder": Module(_div_remainder),
    "numbers__div_remainder_composed": Module(_div_remainder, num_modules=_COMPOSED),
    "numbers__place_value": Module(_place_value),
    "numbers__round_number": Module(_round_number),
    "numbers__round_number_composed": Module(_round_number, num_modules=_COMPOSED),
}

INTERPOLATION_MODULES: Mapping[str, Module] = {
    name: replace(module, entropy=(12.0, 12.0) if name == _ADD_OR_SUB else (8.0, 8.0))
    for name, module in TRAINING_MODULES.items()
}

EXTRAPOLATION_MODULES: Mapping[str, Module] = {
    "arithmetic__add_or_sub_big": Module(_add_or_sub, entropy=(16.0, 20.0)),
    "arithmetic__add_sub_multiple_longer": Module(
        partial(_calculate, add_sub=True, mul_div=False, longer=True), entropy=(10.0, 12.0)
    ),
    "arithmetic__mixed_longer": Module(
        partial(_calculate, add_sub=True, mul_div=True, longer=True), entropy=(10.0, 12.0)
    ),
    "arithmetic__mul_big": Module(_mul, entropy=(10.0, 12.0)),
    "arithmetic__mul_div_multiple_longer": Module(
        partial(_calculate, add_sub=False, mul_div=True, longer=True), entropy=(10.0, 12.0)
    ),
    "numbers__place_value_big": Module(_place_value, entropy=(12.0, 12.0)),
    "numbers__round_number_big": Module(_round_number, entropy=(12.0, 12.0)),
}
"""Larger numbers and longer expressions than in training."""
