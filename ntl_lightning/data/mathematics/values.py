"""Exact numbers of problems, and how they are written."""

from functools import lru_cache
from math import gcd, log10
from typing import NamedTuple

__all__ = [
    "Number",
    "Ratio",
    "Scaled",
    "decimal_text",
    "difference",
    "entropy_of",
    "number_text",
    "prime_factors",
    "ratio",
]

_PRIMES = [n for n in range(2, 1000) if all(n % k for k in range(2, int(n**0.5) + 1))]


class Ratio(NamedTuple):
    """A fraction in lowest terms whose denominator is 2 or more."""

    numerator: int
    denominator: int


class Scaled(NamedTuple):
    """A number written as a decimal: digits / 10^places."""

    digits: int
    places: int


Number = int | Ratio | Scaled


def ratio(numerator: int, denominator: int) -> int | Ratio:
    """The quotient, an integer where it is one."""
    divisor = gcd(numerator, denominator)
    if denominator < 0:
        divisor = -divisor
    if denominator == divisor:
        return numerator // divisor
    return Ratio(numerator // divisor, denominator // divisor)


def difference(left: Number, right: Number) -> Number:
    """Left - right; a decimal where one of them is."""
    if isinstance(left, Scaled) or isinstance(right, Scaled):
        (a, a_places), (b, b_places) = _decimal(left), _decimal(right)
        places = max(a_places, b_places)
        return Scaled(a * 10 ** (places - a_places) - b * 10 ** (places - b_places), places)
    (a, b), (c, d) = _fraction(left), _fraction(right)
    return ratio(a * d - c * b, b * d)


def _decimal(number: Number) -> tuple[int, int]:
    if isinstance(number, Ratio):
        raise TypeError(f"{number} is not written as a decimal")
    return (number, 0) if isinstance(number, int) else number


def _fraction(number: int | Ratio) -> tuple[int, int]:
    return (number, 1) if isinstance(number, int) else number


def decimal_text(digits: int, places: int) -> str:
    """Digits / 10^places without needless zeros; `places` may be negative.

    >>> decimal_text(-120, 4), decimal_text(120, 1), decimal_text(12, -1)
    ('-0.012', '12', '120')
    """
    if places <= 0:
        return str(digits * 10**-places)
    text = str(abs(digits)).zfill(places + 1)
    text = f"{text[:-places]}.{text[-places:]}".rstrip("0").rstrip(".")
    return f"-{text}" if digits < 0 else text


def number_text(number: Number) -> str:
    """A number as problems write it: `-3`, `2/7`, `0.25`."""
    if isinstance(number, int):
        return str(number)
    if isinstance(number, Ratio):
        return f"{number.numerator}/{number.denominator}"
    return decimal_text(*number)


def entropy_of(number: Number) -> float:
    """The entropy with which this number is about as likely as others."""
    if isinstance(number, Ratio):
        return entropy_of(number.numerator) + entropy_of(number.denominator)
    if isinstance(number, Scaled):
        number = number.digits // gcd(number.digits, 10**number.places)
    return log10(5 * abs(number) + 1)


@lru_cache(maxsize=1 << 16)
def prime_factors(integer: int) -> tuple[tuple[int, int], ...]:
    """Prime factors of a positive integer and how often each is in it.

    What is left after division by all primes below 1000 counts as prime: it serves to choose
    numbers, never to find an answer.
    """
    factors = []
    for prime in _PRIMES:
        if prime * prime > integer:
            break
        power = 0
        while integer % prime == 0:
            integer //= prime
            power += 1
        if power:
            factors.append((prime, power))
    if integer > 1:
        factors.append((integer, 1))
    return tuple(factors)
