"""Numbers and polynomials told in sentences, for problems that build on one another.

`Let x = 3 - -4. Let f(a) = 2*a - 9. Let b be f(x).` says that b is 5. Each kind of sentence takes
one module off the budget, and can tell the numbers that it needs in sentences of their own.
"""

from collections.abc import Iterable, Sequence
from math import ceil, log10
from typing import NamedTuple

from ntl_lightning.data.mathematics.algebra import (
    LinearSystem,
    Sum,
    antiderivative,
    draw_coefficients,
    draw_linear_system,
    expansion,
    linear_split,
    polynomial_text,
    power_text,
    signed_sum,
)
from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.expressions import draw_expression, draw_ratio
from ntl_lightning.data.mathematics.values import (
    Number,
    Ratio,
    Scaled,
    difference,
    entropy_of,
    number_text,
)

__all__ = ["Budget", "Composition", "Told", "draw_decimal", "draw_system"]

_LETTERS = "abcdfghijklmnopqrstuvwxyz"  # Without e, which is a number.
_ORDINALS = ("first", "second", "third")

_Polynomial = list[int] | list[int | Ratio]
"""Coefficients; number k is that of power k."""


class Budget(NamedTuple):
    """What may still be spent: modules, each of which takes its share of the entropy."""

    modules: int
    entropy: float

    def peel(self) -> tuple[float, "Budget"]:
        """The entropy of the module itself, and what is left for those below it."""
        own = self.entropy / self.modules
        return own, Budget(self.modules - 1, self.entropy - own)


class Told(NamedTuple):
    """A number or a polynomial as the sentences before it tell it."""

    before: str
    """Sentences about what it needs."""
    sentence: str
    """The sentence that tells it; empty: it is told by its own digits."""
    name: str
    """A letter, or the digits."""
    expression: str | None = None
    """What can stand in the place of sentence and name."""
    letter: str = ""
    """The letter that the expression of a polynomial is in."""

    @property
    def inline(self) -> str:
        """The expression where there is one, else the name."""
        return self.name if self.expression is None else self.expression

    def sentences(self, *, inline: bool = False) -> str:
        """What has to be said before it can be used by its name, or inline."""
        if inline and self.expression is not None:
            return self.before
        return _joined([self.before, self.sentence])


class Composition:
    """The letters of one problem, and the sentences about them."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self._letters = list(_LETTERS)

    def letter(self) -> str:
        """A letter not used before."""
        return self._letters.pop(self.draws.below(len(self._letters)))

    def before(self, told: Iterable[Told], *, inline: bool = False) -> str:
        """All that has to be said before these can be used, in random order."""
        texts = [one.sentences(inline=inline) for one in told]
        self.draws.shuffle(texts)
        return _joined(texts)

    def tell(self, values: Sequence[Number | _Polynomial], budget: Budget) -> list[Told]:
        """Tell these values, with exactly as many modules as the budget has."""
        draws = self.draws
        counts = draws.parts(budget.modules, len(values))
        shares = draws.shares(counts) if budget.modules else [0.0] * len(values)
        return [
            self._tell(value, Budget(count, share * budget.entropy))
            for value, count, share in zip(values, counts, shares, strict=True)
        ]

    def tell_constants(self, constants: Sequence[Number], budget: Budget) -> tuple[list[str], str]:
        """Tell some of these constants, and leave the others.

        Returns:
            The texts of all constants, and the sentences before them.
        """
        texts = list(map(number_text, constants))
        if not budget.modules:
            return texts, ""
        size = self.draws.between(1, min(budget.modules, len(constants)))
        places = self.draws.sample(len(constants), size)
        told = self.tell([constants[place] for place in places], budget)
        for place, one in zip(places, told, strict=True):
            texts[place] = one.name
        return texts, self.before(told)

    def write(self, system: LinearSystem, budget: Budget) -> tuple[str, str, str]:
        """Write equations.

        Returns:
            The letter of the first unknown, the equations, and the sentences before them.
        """
        letters = [self.letter() for _ in system.solution]
        while True:
            equations = system.write(self.draws, letters)
            if equations.constants:  # As `x = -y` has none, which could be told.
                break
        texts, before = self.tell_constants(equations.constants, budget)
        return letters[0], equations.text(texts), before

    def _tell(self, value: Number | _Polynomial, budget: Budget) -> Told:
        choice = self.draws.choice
        if not budget.modules:
            if isinstance(value, list):
                return self._written_polynomial(value)
            return Told("", "", number_text(value))
        if isinstance(value, Scaled):
            return self._sum_or_difference(value, budget)
        if isinstance(value, Ratio):
            return choice((self._sum_or_difference, self._expression))(value, budget)
        if isinstance(value, int):
            tellers = (
                self._sum_or_difference,
                self._expression,
                self._solution_of_one,
                self._solution_of_two,
                self._polynomial_at_a_point,
            )
            return choice(tellers)(value, budget)
        integers = [coefficient for coefficient in value if isinstance(coefficient, int)]
        if len(integers) < len(value):
            return choice((self._uncollected, self._derivative))(value, budget)
        options = (self._uncollected, self._derivative, self._combination)
        return choice(options)(integers, budget)

    def _written_polynomial(self, coefficients: _Polynomial) -> Told:
        letter, name = self.letter(), self.letter()
        text = polynomial_text(coefficients, letter)
        return Told("", f"Let {name}({letter}) = {text}.", name, text, letter)

    def _sum_or_difference(self, value: Number, budget: Budget) -> Told:
        """Tell a number by `Let x = 3 - -4.`."""
        draws = self.draws
        is_sum = draws.coin()
        entropy, rest = budget.peel()
        one = _draw_like(draws, value, max(entropy, entropy_of(value)))
        other = difference(value, one) if is_sum else difference(one, value)
        if draws.coin():
            one, other = (other, one) if is_sum else (difference(0, other), difference(0, one))
        told = self.tell([one, other], rest)
        name = self.letter()
        sign = "+" if is_sum else "-"
        sentence = f"Let {name} = {told[0].name} {sign} {told[1].name}."
        return Told(self.before(told), sentence, name)

    def _expression(self, value: int | Ratio, budget: Budget) -> Told:
        """Tell a number by `Let x be (-4)/(-3 + 1)*6.`."""
        entropy, rest = budget.peel()
        expression = draw_expression(self.draws, value, entropy)
        texts, before = self.tell_constants(expression.constants, rest)
        text = expression.text(texts)
        name = self.letter()
        return Told(before, f"Let {name} be {text}.", name, text)

    def _solution_of_one(self, value: int, budget: Budget) -> Told:
        return self._solution(value, budget, 1)

    def _solution_of_two(self, value: int, budget: Budget) -> Told:
        return self._solution(value, budget, 2)

    def _solution(self, value: int, budget: Budget, degree: int) -> Told:
        """Tell a number by `Suppose 3*x - 6 = x.`."""
        entropy, rest = budget.peel()
        system = draw_system(self.draws, degree, entropy, value)
        unknown, text, before = self.write(system, rest)
        return Told(before, f"Suppose {text}.", unknown)

    def _polynomial_at_a_point(self, value: int, budget: Budget) -> Told:
        """Tell a number by `Let f(x) = 2*x - 3. Let a be f(4).`."""
        draws = self.draws
        entropy, rest = budget.peel()
        share = draws.uniform(1, 1 + entropy / 3)
        point = draws.integer(share)
        entropy = max(0.0, entropy - share)
        degree = draws.between(1, 3)
        coefficients = [0] * (degree + 1)
        missing = value
        shares = draws.shares(range(1, degree + 1))
        for power, share in zip(range(degree, 0, -1), shares, strict=True):
            coefficient = draws.integer(share * entropy)
            if point:
                # What brings the polynomial near its value, so that its constant stays small.
                coefficient += _rounded_quotient(missing, point**power)
            if not coefficient and power == degree:
                coefficient = draws.choice((-1, 1))
            coefficients[power] = coefficient
            missing -= coefficient * point**power
        coefficients[0] = missing
        polynomial, argument = told = self.tell([coefficients, point], rest)
        before = self.before(told)
        name = self.letter()
        text = f"{polynomial.name}({argument.name})"
        return Told(before, f"Let {name} be {text}.", name, text)

    def _combination(self, coefficients: list[int], budget: Budget) -> Told:
        """Tell a polynomial by `Let f(x) = 3*g(x) - 2*h(x).`, with sentences for g and h."""
        entropy, rest = budget.peel()
        a, b, p, q = linear_split(self.draws, coefficients, entropy)
        told = self.tell([a, b, _trimmed(p), _trimmed(q)], rest)
        before, letter, name = self.before(told), self.letter(), self.letter()
        # Factors that are letters come first, and all in alphabetical order, as is usual.
        parts = []
        for factor, function in zip(told[:2], told[2:], strict=True):
            call = f"{function.name}({letter})"
            if factor.sentence:
                parts.append(((0, factor.name), False, f"{factor.name}*{call}"))
            else:
                number = int(factor.name)
                text = call if abs(number) == 1 else f"{abs(number)}*{call}"
                parts.append(((1, function.name), number < 0, text))
        text = signed_sum([(is_negative, term) for _, is_negative, term in sorted(parts)])
        return Told(before, f"Let {name}({letter}) = {text}.", name)

    def _uncollected(self, coefficients: _Polynomial, budget: Budget) -> Told:
        """Tell a polynomial by `Let f(x) = 3*x - 1 - x + 5.`."""
        draws = self.draws
        entropy, rest = budget.peel()
        integers = [c for c in coefficients if isinstance(c, int)]
        if len(integers) == len(coefficients):
            terms: Sequence[Sequence[int | Ratio]] = expansion(draws, integers, entropy)
        else:
            terms = [[coefficient] for coefficient in coefficients]
            rest = Budget(rest.modules, rest.entropy + entropy)
        letter = self.letter()
        monomials = [
            (coefficient, power_text(letter, power))
            for power, some in enumerate(terms)
            for coefficient in some
        ]
        draws.shuffle(monomials)
        total = Sum([])
        for coefficient, letters in monomials:
            total.append(coefficient, letters)
        if not total.constants:
            total.append(0, "")
        texts, before = self.tell_constants(total.constants, rest)
        name = self.letter()
        text = total.text(texts)
        return Told(before, f"Let {name}({letter}) = {text}.", name, text, letter)

    def _derivative(self, coefficients: _Polynomial, budget: Budget) -> Told:
        """Tell a polynomial by `Let f(x) be the second derivative of x**3/6 - 2*x**2 + 9.`."""
        draws = self.draws
        entropy, rest = budget.peel()
        order = draws.between(1, 3)
        entropy = max(0.0, entropy - log10(3))
        primitive: list[int | Ratio] = [*coefficients]
        for _ in range(order):
            primitive = antiderivative(primitive)
        primitive[:order] = draw_coefficients(draws, order - 1, entropy)
        (told,) = self.tell([primitive], rest)
        letter, text = told.letter, told.expression
        if text is None:
            letter = self.letter()
            text = f"{told.name}({letter})"
        before, name = told.sentences(inline=True), self.letter()
        sentence = f"Let {name}({letter}) be the {_ORDINALS[order - 1]} derivative of {text}."
        return Told(before, sentence, name)


def draw_system(
    draws: Draws, degree: int, entropy: float, value: int | None = None
) -> LinearSystem:
    """Draw one or two equations and, where no value is given, the first unknown too."""
    solution = [] if value is None else [value]
    missing = degree - len(solution)
    if missing:
        entropies = [max(1.0, entropy / 4 * share) for share in draws.shares([1] * missing)]
        entropy -= sum(entropies)
        solution += [draws.integer(e) for e in entropies]
    return draw_linear_system(draws, solution, max(1.0, entropy))


def draw_decimal(draws: Draws, entropy: float) -> Scaled:
    """Draw an integer or, as often, a number with decimals."""
    if draws.coin():
        return Scaled(draws.integer(entropy), 0)
    while True:
        digits = draws.integer(entropy)
        places = draws.between(1, ceil(entropy))
        if digits % 10**places:
            return Scaled(digits, places)


def _draw_like(draws: Draws, value: Number, entropy: float) -> Number:
    if isinstance(value, Scaled):
        return draw_decimal(draws, entropy)
    if isinstance(value, Ratio) and draws.coin():
        return draw_ratio(draws, entropy)
    return draws.integer(entropy)


def _rounded_quotient(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


def _trimmed(coefficients: list[int]) -> list[int]:
    """Without zeros of the highest powers."""
    while coefficients and not coefficients[-1]:
        coefficients = coefficients[:-1]
    return coefficients


def _joined(texts: Iterable[str]) -> str:
    return " ".join(text for text in texts if text)
