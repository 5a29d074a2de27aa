"""Batches in a reproducible order, on any number of ranks, and the totals of an optimizer step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import get_length_grouped_indices

from ntl_lightning.data.collate import Collator

__all__ = ["BatchLoader", "BatchOrder", "StepTotals"]

Counts = dict[str, int]


class BatchOrder:
    """Which examples form which batch, by epoch and rank.

    Every rank sees the same number of batches, and every example is in exactly one batch of one
    rank. Where the last batch has fewer examples than there are ranks, the others get the filler
    index -1, which `BatchLoader` turns into a row without labels.

    Args:
        lengths: Tokens of every example.
        batch_size: Examples per rank and batch.
        shuffle: A new order each epoch; otherwise the order is the same each epoch.
        group_by_length: Put examples of similar length together. Shuffled: within random groups of
            50 batches, as transformers does, with the batches then shuffled. Otherwise: longest
            first.
        seed: With the epoch, it decides the order.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        lengths: list[int],
        batch_size: int,
        *,
        shuffle: bool,
        group_by_length: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.group_by_length = group_by_length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def _global_batches(self) -> list[list[int]]:
        size = self.batch_size * self.world_size
        if not self.shuffle:
            order = list(range(len(self.lengths)))
            if self.group_by_length:
                order.sort(key=lambda i: -self.lengths[i])
            return [order[i : i + size] for i in range(0, len(order), size)]
        state = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(state))
        if not self.group_by_length:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
            return [order[i : i + size] for i in range(0, len(order), size)]
        order = get_length_grouped_indices(self.lengths, size, generator=generator)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def batches(self) -> list[list[int]]:
        """This rank's batches of the epoch, as example numbers."""
        parts = (
            np.array_split(np.array(batch), self.world_size)[self.rank].tolist()
            for batch in self._global_batches()
        )
        return [part or [-1] for part in parts]


class _Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, table: Dataset) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.table[max(index, 0)], "index": index}


class BatchLoader:
    """A loader over encoded examples that can go on in the middle of an epoch.

    Lightning treats it as any iterable with a length: it does not replace its sampler (ranks are
    already told apart), sets its epoch, and saves and restores its state with the checkpoint.
    """

    def __init__(
        self, table: Dataset, order: BatchOrder, collator: Collator, *, num_workers: int = 0
    ) -> None:
        self.dataset = _Rows(table)
        # The names under which Lightning looks for what decides the order.
        self.sampler = self.batch_sampler = order
        self.collator = collator
        self.num_workers = num_workers
        self.num_read = 0
        """Batches read of the current epoch."""
        self._resume: tuple[int, int] | None = None  # epoch, batches already read

    @property
    def batch_size(self) -> int:
        """Examples per rank and batch."""
        return self.sampler.batch_size

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator body runs at the first `next`: the epoch is set by then.
        epoch, start = self._resume or (self.sampler.epoch, 0)
        self._resume = None
        self.num_read = start if epoch == self.sampler.epoch else 0
        loader = DataLoader(
            self.dataset,
            batch_sampler=self.sampler.batches()[self.num_read :],
            collate_fn=self.collator,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self.num_read += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch and number of batches read of it."""
        return {"epoch": self.sampler.epoch, "num_read": self.num_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the batches that the state counts, if its epoch is the one to come."""
        self._resume = (state["epoch"], state["num_read"])


class StepTotals:
    """Hands out the batches of a training loader with the label counts of their optimizer step.

    The batches of one accumulation window are read ahead, their label and number tokens counted
    and summed over all ranks once, and each batch gets the sums as `step_totals`. Dividing a
    batch's summed loss by these gives, after accumulation and averaging over ranks, the gradient
    of the one large batch, whatever the split; the last, shorter window of an epoch included.

    Works around any iterable of batches. A `BatchLoader` inside goes on exactly after the last
    batch handed out; of other loaders that keep a state, the state itself is passed on.

    Args:
        loader: Iterable of batch dictionaries.
        count: Label counts of a batch.
        accumulation: Batches per optimizer step; asked before each window.
        num_batches: Batches that training takes of an epoch; asked before each window.
        sum_over_ranks: Sums a float64 vector over all ranks.
    """

    def __init__(
        self,
        loader: Iterable[dict[str, Any]],
        *,
        count: Callable[[dict[str, Any]], Counts],
        accumulation: Callable[[], int],
        num_batches: Callable[[], float],
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.loader = loader
        self._count = count
        self._accumulation = accumulation
        self._num_batches = num_batches
        self._sum_over_ranks = sum_over_ranks
        self._num_handed_out = 0

    @property
    def sampler(self) -> object:
        """The inner loader's sampler, so that Lightning can set its epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def dataset(self) -> object:
        """The inner loader's dataset."""
        return getattr(self.loader, "dataset", None)

    @property
    def batch_size(self) -> int | None:
        """The inner loader's batch size."""
        return getattr(self.loader, "batch_size", None)

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iterator = iter(self.loader)
        first = next(iterator, None)
        # The inner loader knows where it starts once its first batch was asked for.
        position = getattr(self.loader, "num_read", 1) - 1
        while first is not None:
            accumulation = self._accumulation()
            to_the_step = accumulation - position % accumulation
            size = max(1, min(to_the_step, self._num_batches() - position))
            window = [first, *islice(iterator, int(size) - 1)]
            counted = [self._count(batch) for batch in window]
            names = list(counted[0])
            own = torch.tensor([[c[name] for name in names] for c in counted], dtype=torch.float64)
            totals = dict(zip(names, self._sum_over_ranks(own.sum(0)).tolist(), strict=True))
            for batch in window:
                position += 1
                self._num_handed_out = position
                yield {**batch, "step_totals": totals}
            first = next(iterator, None)

    def state_dict(self) -> dict[str, Any]:
        """The inner loader's state, as of the last batch handed out rather than read ahead."""
        state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}
        return {**state, "num_read": self._num_handed_out} if "num_read" in state else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state on to the inner loader."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)
