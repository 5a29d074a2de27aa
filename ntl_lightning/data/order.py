"""Which examples form which batch: reproducible by seed and epoch, on any number of ranks.

N examples, P parts that are padded apart: the sequence of a causal model, or the prompt and the
target of a seq2seq model.
"""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["BatchOrder", "TokenBudgetOrder", "padded_length"]

_BATCHES_PER_GROUP = 50
_FEWEST_GROUPS = 4
_LITTLE_PADDING = 0.05  # of packed rows

T = TypeVar("T")
Lengths = TypeVar("Lengths", int, npt.NDArray[np.int_])


def padded_length(length: Lengths, multiple: int) -> Lengths:
    """The next multiple of `multiple` that is not less than `length`."""
    return -(-length // multiple) * multiple


class _Order(ABC):
    """What every order knows: the epoch, and which part of a step is this rank's."""

    def __init__(self, *, shuffle: bool, seed: int, rank: int, world_size: int) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.epoch = epoch

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch])

    def _of_this_rank(self, step: Sequence[T]) -> Sequence[T]:
        rank, ranks = self.rank, self.world_size
        return step[len(step) * rank // ranks : len(step) * (rank + 1) // ranks]

    @abstractmethod
    def _grouping(self) -> npt.NDArray[np.int_]:
        """What decides, with the settings, which examples come together."""

    def decided_by(self) -> dict[str, int | bool]:
        """What decides the batches of an epoch, on all ranks alike: plain values, for checkpoints.

        `grouping` is a checksum of what the lengths and the size of batches lead to.
        """
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "processes": self.world_size,
            "grouping": zlib.crc32(self._grouping().astype("<i8").tobytes()),
        }

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch, the same for every epoch and rank."""

    @abstractmethod
    def batches(self) -> list[list[int]]:
        """This rank's batches of the epoch, as example numbers."""


class BatchOrder(_Order):
    """Batches of so many examples.

    Every rank sees the same number of batches, and every example is in exactly one batch of one
    rank. Where the last batch has fewer examples than there are ranks, the others get the filler
    index -1, which `BatchLoader` turns into a row without labels.

    Args:
        lengths: Tokens of every example.
        batch_size: Examples per rank and batch.
        shuffle: A new order each epoch; otherwise the order is the same each epoch.
        group_by_length: Put examples of similar length together. Shuffled: by length within random
            groups of at most 50 batches, at least four groups, and the batches then shuffled, as
            `group_by_length` of transformers does. Otherwise: longest first.
        seed: With the epoch, it decides the order; not negative.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool,
        group_by_length: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        self.lengths = lengths
        self.batch_size = batch_size
        self.group_by_length = group_by_length

    def __len__(self) -> int:
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def _grouping(self) -> npt.NDArray[np.int_]:
        # Without grouping, lengths have no effect.
        lengths = self.lengths if self.group_by_length else [len(self.lengths)]
        return np.array([self.batch_size, self.group_by_length, *lengths])

    def _global_batches(self) -> list[list[int]]:
        size, count = self.batch_size * self.world_size, len(self.lengths)
        random = self._random()
        order = random.permutation(count) if self.shuffle else np.arange(count)
        if self.group_by_length:
            group = count
            if self.shuffle:
                group = size * max(1, min(_BATCHES_PER_GROUP, count // (size * _FEWEST_GROUPS)))
            longest_first = -np.asarray(self.lengths)[order]
            order = order[np.lexsort((longest_first, np.arange(count) // group))]
        batches = [order[i : i + size].tolist() for i in range(0, count, size)]
        if self.shuffle and self.group_by_length:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return batches

    def batches(self) -> list[list[int]]:
        """This rank's batches of the epoch, as example numbers."""
        return [list(self._of_this_rank(batch)) or [-1] for batch in self._global_batches()]


class TokenBudgetOrder(_Order):
    """Batches of as many examples as fit a number of tokens, padding included.

    Which lengths come together is drawn once, so that every epoch has the same number of batches
    and the same padding, as training loops expect. Every epoch draws anew which of the examples of
    one length stands where, and in what order the batches come. Ranks and the filler index -1 are
    those of `BatchOrder`.

    Args:
        lengths: (N,) or (N, P) tokens of every example, at least one each.
        max_tokens: Most tokens of a batch of one rank: its examples times the sum over the parts
            of the padded longest.
        packing: Batches of packed rows in place of padded examples. Best fit, longest first: an
            example goes to the row that it leaves the least room in. Takes (N,) lengths.
        shuffle: A new order each epoch; otherwise the examples are taken as they come, and the
            order is the same each epoch.
        group_by_length: Put examples of similar length together; has no effect on packed rows.
        pad_to_multiple_of: To which multiples lengths are padded.
        seed: With the epoch, it decides the order; not negative.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: If the longest example alone has more than `max_tokens`.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_tokens: int,
        *,
        packing: bool = False,
        shuffle: bool,
        group_by_length: bool = False,
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        parts = np.asarray(lengths)
        parts = parts.reshape(len(parts), -1)
        padded = padded_length(parts, pad_to_multiple_of)
        longest = int(padded.sum(axis=1).max())
        if longest > max_tokens:
            raise ValueError(
                f"data.max_tokens_per_batch={max_tokens} does not hold the longest training "
                f"example, which takes {longest} tokens with its padding; raise it, or see "
                "data.max_prompt_tokens and data.too_long"
            )
        # Examples of one kind have the same lengths; kinds are in the order of these.
        self._kinds = np.unique(parts, axis=0, return_inverse=True)[1].reshape(-1)
        order = np.arange(len(parts))
        if shuffle:
            order = np.random.default_rng([seed, 0, 1]).permutation(len(parts))
        self.rows_per_batch: int | None = None
        """With packing, the most rows of a batch: many short ones, because attention costs the
        square of a row, but fewer where more than 5 % would be padding."""
        self.row_length: int | None = None
        """With packing, the most tokens of a row."""
        if packing:
            longest_first = order[np.argsort(-parts[order, 0], kind="stable")]
            num_padded = math.inf
            num_rows = max_tokens // longest
            while num_rows and num_padded * (1 - _LITTLE_PADDING) > parts.sum():
                row_length = max_tokens // num_rows // pad_to_multiple_of * pad_to_multiple_of
                rows = _packed(longest_first, parts[:, 0], row_length)
                widest = max(int(parts[row].sum()) for row in rows)
                needed = len(rows) * padded_length(widest, pad_to_multiple_of)
                if needed < num_padded:
                    self._units, num_padded = rows, needed
                    self.rows_per_batch, self.row_length = num_rows, row_length
                num_rows //= 2
        else:
            if group_by_length:
                order = order[np.argsort(-parts[order].sum(axis=1), kind="stable")]
            self._units = _filled(order, padded, max_tokens)
            num_padded = sum(len(u) * int(padded[u].max(axis=0).sum()) for u in self._units)
        self._units.sort(key=min)  # so that without shuffling they come as their examples do
        self.share_of_padding = 1 - int(parts.sum()) / num_padded
        """Of all tokens of an epoch."""

    def __len__(self) -> int:
        return -(-len(self._units) // self._units_per_step)

    def _grouping(self) -> npt.NDArray[np.int_]:
        sizes = [self._units_per_step, *map(len, self._units)]
        return np.concatenate([sizes, *self._units, self._kinds])

    @property
    def _units_per_step(self) -> int:
        return (self.rows_per_batch or 1) * self.world_size

    def batches(self) -> list[list[int]]:
        """This rank's batches of the epoch, as example numbers; with packing, row by row."""
        units = self._units
        if self.shuffle:
            random = self._random()
            place = np.empty_like(self._kinds)
            place[np.argsort(self._kinds, kind="stable")] = np.lexsort(
                (random.random(len(place)), self._kinds)
            )
            example_at = place.tolist()
            units = [[example_at[i] for i in units[k]] for k in random.permutation(len(units))]
        size = self._units_per_step
        steps = [units[i : i + size] for i in range(0, len(units), size)]
        return [[i for unit in self._of_this_rank(s) for i in unit] or [-1] for s in steps]


def _filled(
    order: npt.NDArray[np.int_], padded: npt.NDArray[np.int_], max_tokens: int
) -> list[list[int]]:
    """Batches, each with as many of the next examples as fit; `padded` (N, P)."""
    batches: list[list[int]] = []
    widths = [0] * padded.shape[1]
    for example in order.tolist():
        lengths = padded[example].tolist()
        wider = [max(pair) for pair in zip(widths, lengths, strict=True)]
        if not batches or (len(batches[-1]) + 1) * sum(wider) > max_tokens:
            batches.append([])
            wider = lengths
        batches[-1].append(example)
        widths = wider
    return batches


def _packed(
    longest_first: npt.NDArray[np.int_], lengths: npt.NDArray[np.int_], row_length: int
) -> list[list[int]]:
    """Rows of at most so many tokens: each example goes where it leaves the least room."""
    rows: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(row_length + 1)]
    # Bit r: there is a row with room for exactly r tokens.
    rooms = 0
    for example, length in zip(
        longest_first.tolist(), lengths[longest_first].tolist(), strict=True
    ):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, []
            rows.append(row)
        row.append(example)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
