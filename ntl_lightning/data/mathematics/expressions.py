"""Arithmetic expressions with a given value: `-3 + (8 - 2)*5/4`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, log10

from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.values import Ratio, prime_factors

__all__ = ["Expression", "draw_expression", "draw_ratio", "lengths"]

_Tree = int | tuple[str, "_Tree", "_Tree"]
"""A leaf's number in reading order; or the sign of an operation and its two operands."""
_Fraction = tuple[int, int]
"""Numerator and denominator > 0, in lowest terms."""


@dataclass(frozen=True)
class Expression:
    """An expression whose constants can be replaced by names."""

    tree: _Tree
    constants: list[int]
    """In reading order."""

    def text(self, constants: Sequence[str] | None = None) -> str:
        """As one reads it, with brackets where they are needed.

        Args:
            constants: Texts to stand in place of the constants. None: their own digits.
        """
        return _text(self.tree, constants or list(map(str, self.constants)))[0]


def lengths(entropy: float) -> tuple[int, int]:
    """The fewest and the most operations of an expression of this entropy."""
    return 3, 3 + int(entropy / 2)


def draw_expression(
    draws: Draws,
    value: int | Ratio,
    entropy: float,
    *,
    add_sub: bool = True,
    mul_div: bool = True,
    length: int | None = None,
) -> Expression:
    """Draw an expression that has this value.

    Args:
        draws: Where randomness comes from.
        value: What the expression is worth. Its constants are integers all the same.
        entropy: Decimal digits of randomness, the length's included where it is drawn.
        add_sub: Whether sums and differences may occur.
        mul_div: Whether products and quotients may occur.
        length: How many operations. None: drawn from `lengths`.
    """
    if length is None:
        fewest, most = lengths(entropy)
        length = draws.between(fewest, most)
        entropy -= log10(most - fewest + 1)
    # Different trees give the same expression.
    entropy += _log10_trees(length)
    growth = _Growth(draws, add_sub, mul_div, constants=[])
    fraction = (value, 1) if isinstance(value, int) else (value.numerator, value.denominator)
    return Expression(growth.tree(fraction, length, entropy), growth.constants)


def draw_ratio(draws: Draws, entropy: float) -> Ratio:
    """Draw a fraction that is no integer; numerator and denominator share the entropy."""
    share = draws.fraction()
    numerator = draws.integer(share * entropy, min_abs=1)
    rest = (1 - share) * entropy
    return Ratio(numerator, draws.integer(rest, signed=False, min_abs=2, coprime_to=numerator))


@dataclass(frozen=True)
class _Growth:
    """An expression being drawn."""

    draws: Draws
    add_sub: bool
    mul_div: bool
    constants: list[int]
    """Found so far, in reading order."""

    def tree(self, value: _Fraction, count: int, entropy: float) -> _Tree:
        """Draw a tree of `count` operations."""
        numerator, denominator = value
        if count == 0:
            self.constants.append(numerator)
            return len(self.constants) - 1
        options = "+-" if self.add_sub and (count > 1 or denominator == 1) else ""
        if self.mul_div:
            if count > 1 or (denominator == 1 and entropy <= _factoring_entropy(numerator)):
                options += "*"
            options += "/"
        sign = self.draws.choice(options)
        own = entropy / count
        if sign in "+-":
            rational = self.mul_div and count > 2
            operands = _summands(self.draws, sign, value, own, rational=rational)
        elif sign == "*":
            operands = _factors(self.draws, value, own, count)
        else:
            operands = _quotient(self.draws, value, own, count)
        left, right = operands
        if count == 1:
            return sign, self.tree(left, 0, 0.0), self.tree(right, 0, 0.0)
        # An operand that is no integer needs an operation: constants are integers.
        least_left, least_right = int(left[1] > 1), int(right[1] > 1)
        more_left, more_right = self.draws.parts(count - 1 - least_left - least_right, 2)
        counts = least_left + more_left, least_right + more_right
        share_left, share_right = self.draws.shares(counts)
        entropy -= own
        return (
            sign,
            self.tree(left, counts[0], share_left * entropy),
            self.tree(right, counts[1], share_right * entropy),
        )


@cache
def _log10_trees(size: int) -> float:
    """Of the number of binary trees with so many operations, the Catalan number."""
    return sum(log10((size + k) / k) for k in range(2, size + 1))


def _summands(
    draws: Draws, sign: str, value: _Fraction, entropy: float, rational: bool
) -> tuple[_Fraction, _Fraction]:
    """Two operands whose sum or difference is the value."""
    one: _Fraction = (
        draw_ratio(draws, entropy) if rational and draws.coin() else (draws.integer(entropy), 1)
    )
    (a, b), (c, d) = value, one
    first = draws.coin()
    if sign == "+":
        other = _lowest(a * d - c * b, b * d)
        return (one, other) if first else (other, one)
    if first:
        return one, _lowest(c * b - a * d, b * d)
    return _lowest(a * d + c * b, b * d), one


def _factors(
    draws: Draws, value: _Fraction, entropy: float, count: int
) -> tuple[_Fraction, _Fraction]:
    """Two operands whose product is the value."""
    numerator, denominator = value
    if count == 1:
        left, right = _split(draws, numerator)
        operands = (left, 1), (right, 1)
    elif count == 2:
        left, right = _split(draws, numerator)
        entropy -= _factoring_entropy(numerator)
        multiplier = draws.integer(entropy, min_abs=1, coprime_to=left)
        operands = _lowest(left, multiplier * denominator), (right * multiplier, 1)
    else:
        dividend, divisor = _quotient(draws, value, entropy, count)
        operands = dividend, _lowest(divisor[1], divisor[0])
    return operands if draws.coin() else (operands[1], operands[0])


def _quotient(
    draws: Draws, value: _Fraction, entropy: float, count: int
) -> tuple[_Fraction, _Fraction]:
    """Dividend and divisor whose quotient is the value."""
    numerator, denominator = value
    if count == 1:
        multiplier = draws.integer(entropy, min_abs=1)
        return (numerator * multiplier, 1), (denominator * multiplier, 1)
    if count == 2:
        if numerator == 0 or draws.coin():
            divisor = draws.integer(entropy, min_abs=1, coprime_to=denominator)
            return _lowest(divisor * numerator, denominator), (divisor, 1)
        dividend = draws.integer(entropy, min_abs=1, coprime_to=numerator)
        return (dividend, 1), _lowest(dividend * denominator, numerator)
    below, above = _split(draws, numerator)
    under, over = _split(draws, denominator)
    entropy -= _factoring_entropy(numerator) + _factoring_entropy(denominator)
    share = draws.fraction()
    up = draws.integer(share * entropy, min_abs=1, coprime_to=under * below)
    down = draws.integer((1 - share) * entropy, signed=False, min_abs=1, coprime_to=above * over)
    return _lowest(up * above, down * under), _lowest(up * over, down * below)


def _lowest(numerator: int, denominator: int) -> _Fraction:
    if denominator == 1:
        return numerator, 1
    divisor = gcd(numerator, denominator)
    if denominator < 0:
        divisor = -divisor
    return numerator // divisor, denominator // divisor


def _split(draws: Draws, integer: int) -> tuple[int, int]:
    """Two integers with this product."""
    if integer == 0:
        return 1, 0
    left = -1 if integer < 0 and draws.coin() else 1
    for prime, power in prime_factors(abs(integer)):
        left *= prime ** draws.between(0, power)
    return left, integer // left


def _factoring_entropy(integer: int) -> float:
    """The entropy of a choice among all ways to write the integer as a product of two."""
    if integer == 0:
        return 0.0
    sign = log10(2) if integer < 0 else 0.0
    return sign + sum(log10(power + 1) for _, power in prime_factors(abs(integer)))


def _text(tree: _Tree, constants: Sequence[str]) -> tuple[str, str]:
    """The text, and its outermost operation; a sign of a constant binds as a product does."""
    if isinstance(tree, int):
        text = constants[tree]
        return text, "*" if text[0] == "-" else ""
    sign, left_tree, right_tree = tree
    left, left_sign = _text(left_tree, constants)
    right, right_sign = _text(right_tree, constants)
    brackets_left, brackets_right = _BRACKETS[sign]
    if left_sign and left_sign in brackets_left:
        left = f"({left})"
    if right_sign and right_sign in brackets_right:
        right = f"({right})"
    gap = " " if sign in "+-" else ""
    return f"{left}{gap}{sign}{gap}{right}", sign


# Operations that stand in brackets to the left and to the right of a sign.
_BRACKETS = {"+": ("-", "-"), "-": ("", "+-"), "*": ("+-", "+-"), "/": ("+-*/", "+-*/")}
