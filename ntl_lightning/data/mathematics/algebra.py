"""Sums of terms in letters: linear equations and polynomials, drawn so that they come out right."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd
from operator import mul
from typing import NamedTuple

from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.values import (
    Number,
    Ratio,
    entropy_of,
    prime_factors,
    ratio,
)

__all__ = [
    "Equations",
    "LinearSystem",
    "Sum",
    "antiderivative",
    "draw_coefficients",
    "draw_linear_system",
    "expansion",
    "linear_split",
    "polynomial_text",
    "power_text",
    "signed_sum",
]


class Sum:
    """Terms such as `-3*x**2`, whose constants can be replaced by names."""

    def __init__(self, constants: list[Number]) -> None:
        self.constants = constants
        """Of all terms, without their signs. Sums can share a list."""
        self.terms: list[tuple[bool, int | None, str]] = []
        """Whether a term is negative; the number of its constant or None; its letters."""

    def append(self, coefficient: int | Ratio, letters: str) -> None:
        """Add a term. A coefficient of one is not written in front of letters."""
        number = coefficient if isinstance(coefficient, int) else coefficient.numerator
        if letters and isinstance(coefficient, int) and abs(number) == 1:
            self.terms.append((number < 0, None, letters))
            return
        if isinstance(coefficient, int):
            self.constants.append(abs(number))
        else:
            self.constants.append(Ratio(abs(number), coefficient.denominator))
        self.terms.append((number < 0, len(self.constants) - 1, letters))

    def text(self, constants: Sequence[str]) -> str:
        """As one reads it, with these texts in place of the constants."""
        return signed_sum(
            [
                (is_negative, letters)
                if constant is None
                else (
                    is_negative,
                    f"{constants[constant]}*{letters}" if letters else constants[constant],
                )
                for is_negative, constant, letters in self.terms
            ]
        )


class Equations(NamedTuple):
    """Equations whose constants can be replaced by names."""

    sides: list[tuple[Sum, Sum]]
    """Left and right of each."""
    constants: list[Number]
    """Of all."""

    def text(self, constants: Sequence[str]) -> str:
        """As one reads them, with these texts in place of the constants."""
        return ", ".join(
            f"{left.text(constants)} = {right.text(constants)}" for left, right in self.sides
        )


@dataclass(frozen=True)
class LinearSystem:
    """As many linear equations as unknowns, with one solution."""

    matrix: list[list[int]]
    solution: list[int]
    most_terms: int
    """In all equations, where the matrix does not need more."""
    entropy: float
    """Of the way in which the equations are written."""

    @property
    def content(self) -> str:
        """The equations with their terms collected, whatever the letters, sides and order.

        The multiple of an equation counts as another: divided, one equation would be its solution.
        """
        rows = [[*row, total] for row, total in zip(self.matrix, self._totals(), strict=True)]
        # Exchanged sides turn all signs; the larger of the two begins with a positive one.
        return f"equations {sorted(max(row, [-number for number in row]) for row in rows)}"

    def write(self, draws: Draws, letters: Sequence[str]) -> Equations:
        """Draw how the equations are written: terms split, in any order, on both sides."""
        degree = len(self.matrix)
        numbers = [entry for row in self.matrix for entry in row] + self._totals()
        fewest = sum(number != 0 for number in numbers) + 1
        most = max(fewest, self.most_terms)
        terms = _expanded(draws, numbers, draws.between(fewest, most), self.entropy)
        constants: list[Number] = []
        sides = []
        for row in range(degree):
            left, right = Sum(constants), Sum(constants)
            for column, letter in enumerate(letters):
                for coefficient in terms[row * degree + column]:
                    _put_on_a_side(draws, left, right, coefficient, letter)
            for constant in terms[degree * degree + row]:
                _put_on_a_side(draws, left, right, -constant, "")
            for side in (left, right):
                if not side.terms:
                    side.append(0, "")
            sides.append((left, right))
        return Equations(sides, constants)

    def _totals(self) -> list[int]:
        return [sum(map(mul, row, self.solution)) for row in self.matrix]


def draw_linear_system(draws: Draws, solution: list[int], entropy: float) -> LinearSystem:
    """Draw one or two equations with this solution.

    Of two equations, none gives the first unknown by itself.
    """
    share = draws.uniform(1 / 3, 2 / 3)
    matrix = _invertible_matrix(draws, len(solution), share * entropy)
    most_terms = 1 + int(len(solution) * (1 + entropy / 2))
    return LinearSystem(matrix, solution, most_terms, (1 - share) * entropy)


def _put_on_a_side(draws: Draws, left: Sum, right: Sum, coefficient: int, letters: str) -> None:
    if draws.coin():
        left.append(coefficient, letters)
    else:
        right.append(-coefficient, letters)


def _invertible_matrix(draws: Draws, degree: int, entropy: float) -> list[list[int]]:
    entropies = [max(1.0, share * entropy) for share in draws.shares([1] * degree**2)]
    while True:
        entries = [draws.integer(e) for e in entropies]
        if degree == 1:
            if entries[0]:
                return [entries]
            continue
        a, b, c, d = entries
        if b and d and a * d != b * c:
            return [[a, b], [c, d]]


def expansion(draws: Draws, coefficients: Sequence[int], entropy: float) -> list[list[int]]:
    """For each coefficient of a polynomial, several that add up to it."""
    fewest = sum(coefficient != 0 for coefficient in coefficients) + 2
    length = draws.between(fewest, fewest + ceil(entropy) // 2)
    return _expanded(draws, coefficients, length, entropy)


def _expanded(draws: Draws, numbers: Sequence[int], length: int, entropy: float) -> list[list[int]]:
    """For each number the terms that add up to it, in all so many; none for some zeros."""
    counts = [int(number != 0) for number in numbers]
    extra = draws.parts(length - sum(counts), len(numbers))
    counts = [count + more for count, more in zip(counts, extra, strict=True)]
    # A zero that is written once shows that it is one.
    while lonely := [k for k, count in enumerate(counts) if count == 1 and numbers[k] == 0]:
        giver = draws.choice(lonely)
        taker = draws.choice([k for k, count in enumerate(counts) if count and k != giver])
        counts[giver] -= 1
        counts[taker] += 1
    shares = draws.shares([max(0, count - 1) for count in counts])
    return [
        _summing_to(draws, number, count, share * entropy)
        for number, count, share in zip(numbers, counts, shares, strict=True)
    ]


def _summing_to(draws: Draws, total: int, count: int, entropy: float) -> list[int]:
    if count < 2:
        return [total] * count
    # All terms moved by the same amount would sum to the same after the correction below.
    entropy *= count / (count - 1)
    least = max(1.0, entropy_of(-(-total // count)))
    terms = [draws.integer(max(least, share * entropy)) for share in draws.shares([1] * count)]
    missing = total - sum(terms)
    terms = [term + (missing + k) // count for k, term in enumerate(terms)]
    draws.shuffle(terms)
    return terms


def power_text(letter: str, power: int) -> str:
    """A power of a letter: nothing, `x`, `x**2`."""
    return f"{letter}**{power}" if power > 1 else letter * power


def polynomial_text(coefficients: Sequence[int | Ratio], letter: str) -> str:
    """A polynomial as algebra systems print it: `-x**3/6 + 3*x**2 - 1`.

    The highest power comes first, except in a difference such as `7 - 2*x`.
    """
    terms = []
    for power, coefficient in enumerate(coefficients):
        above, below = (coefficient, 1) if isinstance(coefficient, int) else coefficient
        if above:
            letters = power_text(letter, power)
            text = str(abs(above)) if abs(above) > 1 or not power else ""
            text += "*" * bool(text and letters) + letters
            terms.append((above < 0, text if below == 1 else f"{text}/{below}"))
    if not (len(terms) == 2 and not terms[0][0] and terms[1][0] and coefficients[0]):
        terms.reverse()
    return signed_sum(terms) or "0"


def signed_sum(terms: Sequence[tuple[bool, str]]) -> str:
    """Terms, each with whether it is negative, in a row."""
    pieces: list[str] = []
    for is_negative, term in terms:
        pieces.append((" - " if is_negative else " + ") if pieces else "-" * is_negative)
        pieces.append(term)
    return "".join(pieces)


def draw_coefficients(draws: Draws, degree: int, entropy: float) -> list[int]:
    """Draw a polynomial of this degree, of which some coefficients are zero."""
    most = min(1 + int(entropy / 2), degree + 1)
    powers = [degree, *draws.sample(degree, draws.between(1, most) - 1)]
    coefficients = [0] * (degree + 1)
    shares = draws.shares([1] * len(powers))
    for power, share in zip(powers, shares, strict=True):
        coefficients[power] = draws.integer(share * entropy, min_abs=1)
    return coefficients


def antiderivative(coefficients: Sequence[int | Ratio]) -> list[int | Ratio]:
    """A polynomial whose derivative this is, with the constant 0."""
    return [0] + [
        ratio(coefficient, power)
        if isinstance(coefficient, int)
        else ratio(coefficient.numerator, coefficient.denominator * power)
        for power, coefficient in enumerate(coefficients, 1)
    ]


def linear_split(
    draws: Draws, coefficients: Sequence[int], entropy: float
) -> tuple[int, int, list[int], list[int]]:
    """Draw a, b, p and q with a p + b q = these coefficients; neither p nor q is zero."""
    entropy_a = max(1.0, draws.uniform(0, entropy / 3))
    entropy_b = max(1.0, draws.uniform(0, entropy / 3))
    entropy -= entropy_a + entropy_b
    # Solvable where the greatest common divisor of a and b divides every coefficient.
    a = draws.integer(entropy_a, min_abs=1)
    b = draws.integer(entropy_b, min_abs=1, coprime_to=a)
    for prime, power in prime_factors(max(1, gcd(*coefficients))):
        b *= prime ** draws.between(0, power)
    if draws.coin():
        a, b = b, a
    divisor, x, y = _bezout(a, b)
    p, q = [], []
    shares = draws.shares([1] * len(coefficients))
    for coefficient, share in zip(coefficients, shares, strict=True):
        step = draws.integer(share * entropy)
        p.append(x * (coefficient // divisor) + step * (b // divisor))
        q.append(y * (coefficient // divisor) - step * (a // divisor))
    while not any(p) or not any(q):
        power = draws.below(len(coefficients))
        sign = draws.choice((-1, 1))
        p[power] += sign * b
        q[power] -= sign * a
    return a, b, p, q


def _bezout(a: int, b: int) -> tuple[int, int, int]:
    """Their greatest common divisor g, and x and y with a x + b y = g."""
    rest, next_rest, x, next_x, y, next_y = a, b, 1, 0, 0, 1
    while next_rest:
        quotient = rest // next_rest
        rest, next_rest = next_rest, rest - quotient * next_rest
        x, next_x = next_x, x - quotient * next_x
        y, next_y = next_y, y - quotient * next_y
    return (rest, x, y) if rest > 0 else (-rest, -x, -y)
