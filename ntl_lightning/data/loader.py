"""Batches that go on in the middle of an epoch, and the totals of an optimizer step."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from ntl_lightning.data.collate import Collator
from ntl_lightning.data.order import BatchOrder, TokenBudgetOrder
from ntl_lightning.numbers import NumberCodec

__all__ = ["BatchLoader", "StepTotals"]


# Columns that no batch needs.
_FOR_PEOPLE = ("origin", "place", "source", "is_cut")


class _Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a table with their numbers; the filler -1 borrows the texts of row 0."""

    def __init__(self, table: Dataset) -> None:
        unused = [name for name in _FOR_PEOPLE if name in table.column_names]
        self.table = table.remove_columns(unused)

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        columns = self.table[[max(index, 0) for index in indices]] | {"index": indices}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class BatchLoader:
    """A loader over encoded examples that can go on in the middle of an epoch.

    Each iteration is an epoch of its own and the next in number, whoever iterates: a run that
    goes on from a checkpoint gets the batches that it would have got without the interruption,
    even where the trainer counts a broken-off epoch as a whole one.

    Args:
        table: What `encode` returns.
        order: The batches; its epoch is set here.
        collator: Makes a batch of rows.
        num_workers: Processes that collate; 0 does it in this process.
        epoch: The first epoch.
        num_batches: Batches that training takes of an epoch, if less than all; asked for whenever
            the state is. After these the state is that of the next epoch's beginning.
        codec: What wrote the labels of the table, if anything did; a model that is given loaders
            alone reads its answers by it.
    """

    def __init__(
        self,
        table: Dataset,
        order: BatchOrder | TokenBudgetOrder,
        collator: Collator,
        *,
        num_workers: int = 0,
        epoch: int = 0,
        num_batches: Callable[[], float] = lambda: math.inf,
        codec: NumberCodec | None = None,
    ) -> None:
        self.codec = codec
        self.dataset = _Rows(table)  # Lightning's batch size finder asks for its length
        self._order = order
        self._decided_by = order.decided_by()
        self._collator = collator
        self._num_workers = num_workers
        self._num_batches = num_batches
        self._epoch = epoch
        self._num_read = 0
        self._goes_on = True  # whether the next iteration begins here, or with the next epoch

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator's body runs at the first `next`: iterators that are never used do not count.
        if not self._goes_on:
            self._epoch, self._num_read = self._epoch + 1, 0
        self._goes_on = False
        self._order.set_epoch(self._epoch)
        loader = DataLoader(
            self.dataset,
            batch_sampler=self._order.batches()[self._num_read :],
            collate_fn=self._collator,
            num_workers=self._num_workers,
            pin_memory=torch.cuda.is_available(),
            # Otherwise every iteration, of evaluation too, would advance the global random state.
            generator=torch.Generator(),
        )
        for batch in loader:
            self._num_read += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches read of it, how many it has, and what decides their order."""
        epoch, num_read = self._epoch, self._num_read
        if num_read >= min(len(self), self._num_batches()):
            epoch, num_read = epoch + 1, 0
        return {
            "epoch": epoch,
            "num_read": num_read,
            "length": len(self),
            "order": dict(self._decided_by),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that the state counts."""
        self._epoch, self._num_read = state["epoch"], state["num_read"]
        self._goes_on = True
        # Older checkpoints do not tell what decided the order.
        was, now = state.get("order", self._decided_by), self._decided_by
        changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        if self._num_read and (state["length"] != len(self) or changed):
            settings = [f"{key} was {was.get(key)}, is {now.get(key)}" for key in changed]
            rank_zero_warn(
                f"The checkpoint was saved after {self._num_read} of {state['length']} batches of "
                f"an epoch that now has {len(self)}, in another order"
                f"{' (' if settings else ''}{'; '.join(settings)}{')' if settings else ''}. With "
                "other data, batches, seed or processes, some examples of this epoch are seen "
                "twice and others not at all."
            )


class StepTotals:
    """Hands out the batches of a training loader with the label counts of their optimizer step.

    The batches of one accumulation window are read ahead, their label and number tokens counted
    and summed over all ranks once, and each batch gets the sums as `step_totals`. Dividing a
    batch's summed loss by these gives, after accumulation and averaging over ranks, the gradient
    of the one large batch, whatever the split; the last, shorter window of an epoch included.
    Each batch also gets its own label tokens as `num_labels`, so that no device is asked for them.

    Works around any iterable of batches. Around one that keeps a state (`state_dict` and
    `load_state_dict`), such as `BatchLoader`, an interrupted epoch goes on exactly after the last
    batch handed out. Gradients that were accumulated when the run was interrupted are lost, and
    the rest of the window is a step of its own.

    Args:
        loader: Iterable of batch dictionaries.
        count: Label counts of a batch, by name; `tokens`, the labels other than -100, among them.
        accumulation: Batches per optimizer step; asked for before each window.
        num_batches: Batches that training takes of an epoch; asked for before each window.
        sum_over_ranks: Sums an int64 vector over all ranks.
    """

    def __init__(
        self,
        loader: Iterable[dict[str, Any]],
        *,
        count: Callable[[dict[str, Any]], dict[str, int]],
        accumulation: Callable[[], int],
        num_batches: Callable[[], float],
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._loader = loader
        self._count = count
        self._accumulation = accumulation
        self._num_batches = num_batches
        self._sum_over_ranks = sum_over_ranks
        self._position = 0
        # While read-ahead batches wait: the loader's state after the first batch of the window,
        # and how many batches that come after it are handed out.
        self._waiting: tuple[Any, int] | None = None
        self._goes_on = True

    @property
    def dataset(self) -> object:
        """The loader's dataset, for Lightning's batch size finder."""
        return getattr(self._loader, "dataset", None)

    @property
    def codec(self) -> NumberCodec | None:
        """What wrote the labels, where the loader tells."""
        return getattr(self._loader, "codec", None)

    @property
    def batch_sampler(self) -> object:
        """The loader's batch sampler, for Lightning to set the epoch of its sampler."""
        return getattr(self._loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iterator = iter(self._loader)
        if not self._goes_on:
            self._position, self._waiting = 0, None
        self._goes_on = False
        if self._position and not _keeps_state(self._loader):
            rank_zero_warn(
                f"The run goes on after {self._position} batches of an epoch, but its training "
                f"loader ({type(self._loader).__name__}) keeps no state and begins anew. Give it "
                "`state_dict` and `load_state_dict`, or take NumberDataModule."
            )
        if self._waiting is not None:
            deque(islice(iterator, self._waiting[1]), maxlen=0)
        first = next(iterator, None)
        while first is not None:
            accumulation = self._accumulation()
            to_the_step = accumulation - self._position % accumulation
            size = max(1, min(to_the_step, self._num_batches() - self._position))
            after_first = self._loader_state() if size > 1 else None
            window = [first, *islice(iterator, int(size) - 1)]
            counts = [self._count(batch) for batch in window]
            totals = self._totals(counts)
            for number, batch in enumerate(window):
                self._position += 1
                self._waiting = (after_first, number) if number < len(window) - 1 else None
                num_labels = counts[number]["tokens"]
                yield {**batch, "step_totals": totals, "num_labels": num_labels}
            first = next(iterator, None)
        self._position = 0

    def _totals(self, counts: list[dict[str, int]]) -> dict[str, int]:
        own = torch.tensor(
            [sum(column) for column in zip(*(c.values() for c in counts), strict=True)]
        )
        return dict(zip(counts[0], self._sum_over_ranks(own).tolist(), strict=True))

    def _loader_state(self) -> Any:
        return cast(Any, self._loader).state_dict() if _keeps_state(self._loader) else None

    def state_dict(self) -> dict[str, Any]:
        """Where in the epoch the last batch handed out was, and the loader's state there."""
        state, num_skipped = self._waiting or (self._loader_state(), 0)
        position = self._position if self._position < self._num_batches() else 0
        return {"position": position, "num_skipped": num_skipped, "loader": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was handed out."""
        self._position, self._waiting, self._goes_on = state["position"], None, True
        if _keeps_state(self._loader):
            cast(Any, self._loader).load_state_dict(state["loader"])
            if state["num_skipped"]:
                self._waiting = (state["loader"], state["num_skipped"])


def _keeps_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
