"""Random numbers for problems: a seed in, the same numbers out, whatever the version of numpy."""

from collections.abc import Iterator, MutableSequence, Sequence
from math import ceil, gcd, log
from typing import TypeVar

import numpy as np

from ntl_lightning.data.mathematics.values import prime_factors

__all__ = ["Draws"]

_T = TypeVar("_T")
_BATCH = 4096
_ONE_WORD = 1 << 32  # More than this many outcomes take two words, or the choice is not even.


class Draws:
    """A stream of random numbers, drawn from numpy in batches.

    Only the 64-bit words of PCG64 are numpy's, which numpy promises never to change; its
    distributions may change, so these are made here. Logarithms and powers are those of the C
    library: where two of these round a last bit differently, a rare number may differ. *Entropy*
    is in decimal digits: an integer of entropy e is one of about 10^e.
    """

    def __init__(self, seed: int) -> None:
        self.word = _words(np.random.PCG64(seed)).__next__
        """A random integer of 64 bits."""

    def fraction(self) -> float:
        """Uniform over [0, 1)."""
        return (self.word() >> 11) * 2.0**-53

    def uniform(self, low: float, high: float) -> float:
        """Uniform over [low, high)."""
        return low + (high - low) * self.fraction()

    def below(self, count: int) -> int:
        """Uniform over 0 to count - 1."""
        if count <= _ONE_WORD:
            return (self.word() * count) >> 64
        return ((self.word() << 64 | self.word()) * count) >> 128

    def between(self, low: int, high: int) -> int:
        """Uniform over low to high, both included."""
        return low + self.below(high - low + 1)

    def coin(self) -> bool:
        """True as often as False."""
        return self.word() >= 1 << 63

    def choice(self, options: Sequence[_T]) -> _T:
        """One of the options."""
        return options[(self.word() * len(options)) >> 64]

    def shuffle(self, items: MutableSequence[_T]) -> None:
        """Put the items in random order."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]

    def sample(self, count: int, size: int) -> list[int]:
        """Draw `size` different ones of 0 to count - 1, in random order."""
        items = list(range(count))
        for place in range(size):
            other = self.between(place, count - 1)
            items[place], items[other] = items[other], items[place]
        return items[:size]

    def parts(self, total: int, count: int) -> list[int]:
        """Cut a total into `count` integers >= 0; all ways to do so are equally likely."""
        if count == 2:
            left = self.below(total + 1)
            return [left, total - left]
        bars = sorted(self.sample(total + count - 1, count - 1))
        ends = zip([-1, *bars], [*bars, total + count - 1], strict=True)
        return [right - left - 1 for left, right in ends]

    def shares(self, weights: Sequence[int]) -> list[float]:
        """Shares of one, from the Dirichlet distribution of these weights.

        A weight of zero gets no share; where all are zero, one of them gets all.
        """
        sizes = [self._gamma(weight) for weight in weights]
        total = sum(sizes)
        if total == 0.0:
            sizes[self.below(len(sizes))] = total = 1.0
        return [size / total for size in sizes]

    def _gamma(self, shape: int) -> float:
        """A gamma variable of a whole shape: the sum of so many exponential ones."""
        product = 1.0
        for _ in range(shape):
            product *= 1.0 - self.fraction()
        return -log(product)

    def integer(
        self, entropy: float, *, signed: bool = True, min_abs: int = 0, coprime_to: int = 1
    ) -> int:
        """An integer of this entropy.

        Args:
            entropy: Decimal digits; below zero there are still a few integers.
            signed: Whether about half of them are negative; if not, none is.
            min_abs: The least absolute value.
            coprime_to: The integer shares no prime factor with this one.
        """
        size: float = 10.0**entropy + min_abs
        coprime_to = abs(coprime_to)
        if coprime_to > 1:
            for prime, _ in prime_factors(coprime_to):
                size /= 1 - 1 / prime
            size += 1
        elif coprime_to == 0:  # Only ones share no factor with it.
            return 1 if not signed or self.coin() else -1
        high = ceil(size / 2 if signed else size)
        low = -high if signed else min_abs
        while True:
            integer = low + self.below(high - low + 1)
            if abs(integer) >= min_abs and (coprime_to == 1 or gcd(integer, coprime_to) == 1):
                return integer


def _words(bits: np.random.PCG64) -> Iterator[int]:
    while True:
        yield from bits.random_raw(_BATCH).tolist()
