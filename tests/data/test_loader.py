import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ntl_lightning.data import (
    BatchLoader,
    BatchOrder,
    Collator,
    Example,
    StepTotals,
    TokenBudgetOrder,
    encode,
)
from ntl_lightning.numbers import ArithmeticTokenizer

TOKENIZER = ArithmeticTokenizer().load()


def table_of(targets):
    """One example per target; the prompt of example i has i mod 3 + 2 tokens."""
    return encode(
        [Example("=" * (i % 3 + 2), str(t), f"list:{i}") for i, t in enumerate(targets)],
        TOKENIZER,
        "causal",
        "data.test",
    )


def order_of(count, batch_size, **settings):
    settings = {"shuffle": False, "group_by_length": False} | settings
    return BatchOrder([i % 7 + 1 for i in range(count)], batch_size, **settings)


def loader_of(targets, batch_size, *, num_workers=0, num_batches=None, epoch=0, **settings):
    return BatchLoader(
        table_of(targets),
        order_of(len(targets), batch_size, **settings),
        Collator("causal", 0, for_evaluation=True),
        num_workers=num_workers,
        epoch=epoch,
        **({} if num_batches is None else {"num_batches": lambda: num_batches}),
    )


def indices(batches):
    return [batch["index"] for batch in batches]


rank_counts = st.integers(1, 3)
booleans = st.booleans()


# ---- BatchLoader


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 4), rank_counts, booleans, booleans)
def test_a_loader_hands_out_every_example_once(count, batch_size, ranks, shuffle, group):
    seen = []
    for rank in range(ranks):
        loader = loader_of(
            range(count),
            batch_size,
            shuffle=shuffle,
            group_by_length=group,
            rank=rank,
            world_size=ranks,
        )
        batches = list(loader)
        assert len(batches) == len(loader)
        seen += [
            (index, target)
            for batch in batches
            for index, target in zip(batch["index"], batch["target"], strict=True)
            if index >= 0
        ]
    assert sorted(seen) == [(i, str(i)) for i in range(count)]


def test_two_workers_on_each_of_two_ranks_see_each_of_six_examples_once():
    seen = []
    for rank in range(2):
        loader = loader_of(range(6), 1, num_workers=2, rank=rank, world_size=2)
        seen.append([i for batch in loader for i in batch["index"]])
    assert seen == [[0, 2, 4], [1, 3, 5]]


def labelled_numbers(batch):
    """The numbers that a batch is labelled with, one for each end token."""
    ends = {-100: " ", TOKENIZER.eos_token_id: " "}
    return [
        int(number)
        for labels in batch["labels"].tolist()
        for number in "".join(ends.get(i) or TOKENIZER.decode([i]) for i in labels).split()
    ]


@pytest.mark.parametrize("kind", [{}, {"group_by_length": True}, {"packing": True}])
@pytest.mark.parametrize("count", [1, 7, 31])
def test_two_workers_on_each_of_two_ranks_see_each_example_of_a_token_budget_once(kind, count):
    table = table_of(range(count))
    lengths = [len(row["prompt_ids"]) + len(row["target_ids"]) for row in table]
    seen, numbers_of_batches = [], []
    for rank in range(2):
        order = TokenBudgetOrder(lengths, 24, shuffle=True, rank=rank, world_size=2, **kind)
        loader = BatchLoader(
            table, order, Collator("causal", 0, row_length=order.row_length), num_workers=2
        )
        batches = list(loader)
        assert all(batch["input_ids"].numel() <= 24 for batch in batches)
        numbers_of_batches.append(len(batches))
        seen += itertools.chain(*map(labelled_numbers, batches))
    assert sorted(seen) == list(range(count))
    assert numbers_of_batches == [len(order)] * 2


def test_workers_change_nothing():
    alone, helped = (list(loader_of(range(10), 3, shuffle=True, num_workers=n)) for n in (0, 2))
    assert indices(alone) == indices(helped)
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])


def test_what_a_worker_needs_can_be_sent_to_a_fresh_process():
    loader = loader_of(range(5), 2)
    spawned = DataLoader(
        pickle.loads(pickle.dumps(loader.dataset)),
        batch_sampler=[[0, 1], [-1]],
        collate_fn=Collator("causal", 0),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    (first, filler) = list(spawned)
    zero, one, end = TOKENIZER.convert_tokens_to_ids(["0", "1", TOKENIZER.eos_token])
    assert first["labels"].tolist() == [[-100, -100, zero, end, -100], [-100, -100, -100, one, end]]
    assert filler["labels"].tolist() == [[-100, -100]]


def test_five_values_on_two_ranks_have_their_mean():
    """0, 0, 0, 0, 10: a sampler that repeats one value on the second rank would say 1.67."""
    values = []
    for rank in range(2):
        for batch in loader_of([0, 0, 0, 0, 10], 2, rank=rank, world_size=2):
            for index, labels, target in zip(
                batch["index"], batch["labels"], batch["target"], strict=True
            ):
                assert ((labels != -100).sum() > 0) == (index >= 0)
                if index >= 0:
                    values.append(int(target))
    assert len(values) == 5
    assert np.mean(values) == 2.0


def test_each_iteration_is_the_next_epoch():
    loader = loader_of(range(20), 3, shuffle=True, epoch=5)
    for epoch in (5, 6, 7):
        order = order_of(20, 3, shuffle=True)
        order.set_epoch(epoch)
        assert indices(loader) == order.batches()


def test_iterators_that_are_not_used_do_not_count():
    loader = loader_of(range(20), 3, shuffle=True)
    iter(loader)
    unused = iter(loader)
    first = indices(loader)
    assert first == indices(loader_of(range(20), 3, shuffle=True))
    # Lightning may take any of the iterators that it made.
    assert indices(unused) == indices(loader_of(range(20), 3, shuffle=True, epoch=1))


def test_an_epoch_that_is_broken_off_is_followed_by_the_next():
    loader = loader_of(range(20), 3, shuffle=True)
    list(itertools.islice(loader, 2))
    assert indices(loader) == indices(loader_of(range(20), 3, shuffle=True, epoch=1))


def test_iterating_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(loader_of(range(5), 2, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def through_a_checkpoint(state):
    """What is left of a state after a checkpoint that is loaded safely."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), st.integers(0, 30), booleans)
def test_a_loader_goes_on_after_the_batches_of_its_state(count, batch_size, epoch, stop, shuffle):
    def loader():
        return loader_of(range(count), batch_size, shuffle=shuffle, epoch=epoch)

    whole = loader()
    expected = [indices(whole) for _ in range(3)]
    stop %= len(whole) + 1
    first = loader()
    done = indices(itertools.islice(first, stop))
    resumed = loader()
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    # Asked before its first batch, the state is the one that was loaded.
    assert resumed.state_dict() == first.state_dict()
    rest = indices(resumed)
    if stop == len(whole):
        assert done == expected[0]
        assert rest == expected[1]
    else:
        assert done + rest == expected[0]
        assert indices(resumed) == expected[1]


def test_the_state_of_a_limited_epoch_that_is_done_is_that_of_the_next():
    def loader():
        return loader_of(range(20), 2, shuffle=True, num_batches=3)

    first = loader()
    list(itertools.islice(first, 3))
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert indices(resumed) == indices(loader_of(range(20), 2, shuffle=True, epoch=1))


def test_a_state_of_an_epoch_of_another_length_is_named():
    first = loader_of(range(20), 2)
    next(iter(first))
    other = loader_of(range(20), 4)
    with pytest.warns(UserWarning, match=r"after 1 of 10 batches of an epoch that now has 5"):
        other.load_state_dict(first.state_dict())


def budget_loader_of(count, **settings):
    table = table_of(range(count))
    lengths = [len(row["prompt_ids"]) + len(row["target_ids"]) for row in table]
    order = TokenBudgetOrder(lengths, **{"max_tokens": 24, "shuffle": True} | settings)
    return BatchLoader(table, order, Collator("causal", 0, row_length=order.row_length))


@pytest.mark.parametrize(
    ("other", "changed"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"group_by_length": True}, "grouping was"),
    ],
)
def test_a_state_of_an_epoch_in_another_order_is_named(other, changed):
    one = loader_of(range(20), 2, shuffle=True)
    next(iter(one))
    resumed = loader_of(range(20), 2, **{"shuffle": True} | other)
    assert len(resumed) == len(one)
    with pytest.warns(UserWarning, match=rf"after 1 of 10 batches .* in another order \({changed}"):
        resumed.load_state_dict(through_a_checkpoint(one.state_dict()))


@pytest.mark.parametrize("other", [{"group_by_length": True}, {"packing": True}, {"seed": 3}])
def test_a_state_of_other_batches_of_a_token_budget_is_named(other):
    first = budget_loader_of(30)
    next(iter(first))
    with pytest.warns(UserWarning, match="in another order .* seen twice"):
        budget_loader_of(30, **other).load_state_dict(through_a_checkpoint(first.state_dict()))
    same = budget_loader_of(30)
    same.load_state_dict(through_a_checkpoint(first.state_dict()))
    assert same.state_dict() == first.state_dict()


def test_ranks_agree_on_what_decides_the_order():
    states = [loader_of(range(20), 2, rank=rank, world_size=2).state_dict() for rank in (0, 1)]
    assert states[0] == states[1]


def test_a_state_that_does_not_tell_the_order_can_be_loaded():
    loader = loader_of(range(20), 2, shuffle=True)
    loader.load_state_dict({"epoch": 0, "num_read": 3, "length": 10})
    assert indices(loader) == indices(loader_of(range(20), 2, shuffle=True))[3:]


def test_a_state_between_epochs_fits_epochs_of_any_length():
    first = loader_of(range(20), 2)
    list(first)
    other = loader_of(range(20), 4)
    other.load_state_dict(first.state_dict())
    assert len(indices(other)) == 5


# ---- StepTotals


class Stateful:
    """A list of batches that can go on in the middle, and begins anew after the end."""

    def __init__(self, batches):
        self.batches = batches
        self.num_read = 0

    def __iter__(self):
        while self.num_read < len(self.batches):
            self.num_read += 1
            yield self.batches[self.num_read - 1]
        self.num_read = 0

    def state_dict(self):
        return {"at": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["at"]


def batches_of(sizes):
    return [{"number": i, "size": size} for i, size in enumerate(sizes)]


def step_totals(loader, accumulation=1, num_batches=math.inf, sum_over_ranks=lambda counts: counts):
    return StepTotals(
        loader,
        count=lambda batch: {"tokens": batch["size"], "numbers": batch["size"] // 2},
        accumulation=accumulation if callable(accumulation) else lambda: accumulation,
        num_batches=lambda: num_batches,
        sum_over_ranks=sum_over_ranks,
    )


def totals_of_steps(sizes, accumulation, num_batches, start=0):
    """Totals as the optimizer steps: after every `accumulation` batches and after the last."""
    last = min(len(sizes), num_batches)
    totals, window = [], []
    for number in range(start, int(last)):
        window.append(sizes[number])
        if (number + 1) % accumulation == 0 or number + 1 == last:
            step = {"tokens": sum(window), "numbers": sum(size // 2 for size in window)}
            totals += [step] * len(window)
            window = []
    return totals


sizes_of_batches = st.lists(st.integers(0, 50), min_size=1, max_size=12)
limits = st.one_of(st.just(math.inf), st.integers(1, 12))


@given(sizes_of_batches, st.integers(1, 5), limits, booleans)
def test_each_batch_has_the_totals_of_its_optimizer_step(sizes, accumulation, limit, generated):
    batches = batches_of(sizes)
    loader = step_totals(
        (batch for batch in batches) if generated else batches, accumulation, limit
    )
    num_taken = int(min(limit, len(sizes)))
    taken = list(itertools.islice(loader, num_taken))
    assert [batch["number"] for batch in taken] == list(range(num_taken))
    assert [b["step_totals"] for b in taken] == totals_of_steps(sizes, accumulation, limit)
    assert [b["num_labels"] for b in taken] == sizes[:num_taken]
    assert all(batch.keys() == {"number", "size"} for batch in batches)


@given(sizes_of_batches, st.integers(1, 5), limits)
def test_nothing_beyond_the_window_is_read(sizes, accumulation, limit):
    read = []
    batches = (read.append(batch) or batch for batch in batches_of(sizes))
    loader = iter(step_totals(batches, accumulation, limit))
    assert not read
    last = int(min(limit, len(sizes)))
    for number in range(last):
        next(loader)
        assert len(read) == min(last, (number // accumulation + 1) * accumulation)


def test_the_length_is_that_of_the_loader():
    assert len(step_totals(batches_of([1, 2, 3]))) == 3
    with pytest.raises(TypeError):
        len(step_totals(iter([])))


def test_accumulation_may_change_between_windows():
    """As Lightning counts: a step wherever the number of batches is a multiple of it."""
    accumulation = 3
    loader = iter(step_totals(batches_of([1, 2, 4, 8, 16, 32, 64]), lambda: accumulation))
    totals = [next(loader)["step_totals"]["tokens"] for _ in range(3)]
    assert totals == [7, 7, 7]
    accumulation = 2
    totals = [next(loader)["step_totals"]["tokens"] for _ in range(4)]
    assert totals == [8, 48, 48, 64]


def test_the_counts_are_summed_over_ranks_once_per_window_and_exactly():
    summed = []

    def sum_over_ranks(counts):
        summed.append(counts.tolist())
        return counts + 2**24

    loader = step_totals(batches_of([1, 3, 5]), 2, sum_over_ranks=sum_over_ranks)
    totals = [batch["step_totals"] for batch in loader]
    assert summed == [[4, 1], [5, 2]]
    assert totals[0] == {"tokens": 2**24 + 4, "numbers": 2**24 + 1}
    assert totals[2] == {"tokens": 2**24 + 5, "numbers": 2**24 + 2}


def test_each_epoch_begins_with_a_whole_window():
    loader = step_totals(batches_of([1, 2, 4]), 2)
    for _ in range(2):
        assert [b["step_totals"]["tokens"] for b in loader] == [3, 3, 4]
    # Lightning leaves an epoch without asking whether there is more.
    assert [b["step_totals"]["tokens"] for b in itertools.islice(loader, 1)] == [3]
    assert [b["step_totals"]["tokens"] for b in loader] == [3, 3, 4]


@given(sizes_of_batches, st.integers(1, 5), limits, st.integers(0, 12), booleans)
def test_totals_go_on_exactly_after_the_last_batch_handed_out(
    sizes, accumulation, limit, stop, twice
):
    """Also in the middle of a window, whose rest is a step of its own."""
    last = int(min(limit, len(sizes)))
    stop %= last
    first = step_totals(Stateful(batches_of(sizes)), accumulation, limit)
    list(itertools.islice(first, stop))
    state = through_a_checkpoint(first.state_dict())
    resumed = step_totals(Stateful(batches_of(sizes)), accumulation, limit)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    if twice:
        again = step_totals(Stateful(batches_of(sizes)), accumulation, limit)
        again.load_state_dict(resumed.state_dict())
        resumed = again
    rest = list(itertools.islice(resumed, last - stop))
    assert [batch["number"] for batch in rest] == list(range(stop, last))
    assert [b["step_totals"] for b in rest] == totals_of_steps(sizes, accumulation, limit, stop)


@settings(max_examples=40)
@given(
    st.integers(1, 20), st.integers(1, 3), st.integers(1, 4), st.integers(0, 20), limits, booleans
)
def test_a_resumed_run_over_examples_sees_what_is_left(
    count, batch_size, accumulation, stop, limit, shuffle
):
    def loader():
        return StepTotals(
            loader_of(range(count), batch_size, shuffle=shuffle, num_batches=limit),
            count=lambda batch: {"tokens": sum(map(int, batch["target"]))},
            accumulation=lambda: accumulation,
            num_batches=lambda: limit,
            sum_over_ranks=lambda counts: counts,
        )

    whole = loader()
    last = int(min(len(whole), limit))
    expected = [indices(itertools.islice(whole, last)) for _ in range(3)]
    stop %= last + 1
    first = loader()
    done = indices(itertools.islice(first, stop))
    resumed = loader()
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    rest = indices(itertools.islice(resumed, (last - stop) or last))
    if stop == last:
        assert (done, rest) == (expected[0], expected[1])
    else:
        assert done + rest == expected[0]
        assert indices(itertools.islice(resumed, last)) == expected[1]


def test_a_loader_that_keeps_no_state_begins_anew_and_says_so():
    first = step_totals(batches_of([1, 2, 4, 8, 16]), 2)
    list(itertools.islice(first, 3))
    resumed = step_totals(batches_of([1, 2, 4, 8, 16]), 2)
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    with pytest.warns(UserWarning, match=r"after 3 batches .* \(list\) keeps no state"):
        rest = list(resumed)
    # Lightning steps after its fourth batch, the first of these.
    assert [b["step_totals"]["tokens"] for b in rest] == [1, 6, 6, 24, 24]


def test_a_finished_epoch_of_a_loader_without_state_needs_no_warning():
    first = step_totals(batches_of([1, 2, 4]), 2, num_batches=3)
    list(itertools.islice(first, 3))
    resumed = step_totals(batches_of([1, 2, 4]), 2, num_batches=3)
    resumed.load_state_dict(first.state_dict())
    assert [b["step_totals"]["tokens"] for b in resumed] == [3, 3, 4]


def test_after_an_epoch_of_unknown_length_the_next_begins_with_a_whole_window():
    first = step_totals(Stateful(batches_of([1, 2, 4])), 2)
    list(first)
    resumed = step_totals(Stateful(batches_of([1, 2, 4])), 2)
    resumed.load_state_dict(first.state_dict())
    assert [b["step_totals"]["tokens"] for b in resumed] == [3, 3, 4]


def test_the_attributes_that_lightning_looks_for_are_those_of_the_loader():
    inner = DataLoader(list(range(7)), batch_size=2)
    loader = step_totals(inner)
    assert loader.dataset is inner.dataset
    assert loader.batch_sampler is inner.batch_sampler
    assert step_totals([]).dataset is None
    assert step_totals([]).batch_sampler is None
