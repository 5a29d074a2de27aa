import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ntl_lightning.data import GSM8K, BatchOrder, TokenBudgetOrder
from ntl_lightning.numbers import PretrainedTokenizer


def order_of(count, batch_size, **settings):
    settings = {"shuffle": False, "group_by_length": False} | settings
    return BatchOrder([i % 7 + 1 for i in range(count)], batch_size, **settings)


counts = st.integers(1, 60)
batch_sizes = st.integers(1, 7)
rank_counts = st.integers(1, 3)
booleans = st.booleans()


@pytest.fixture(scope="module")
def gsm8k_lengths(assets):
    tokenizer = PretrainedTokenizer(str(assets / "tokenizers/gpt2")).load()
    examples = GSM8K(str(assets / "data/gsm8k/train.jsonl")).examples()
    texts = [f"{example.prompt}{example.target}" for example in examples]
    return [len(ids) for ids in tokenizer(texts)["input_ids"]]


# ---- BatchOrder


@given(counts, batch_sizes, rank_counts, booleans, booleans, st.integers(0, 2**40), counts)
def test_every_example_is_in_exactly_one_batch_of_one_rank(
    count, batch_size, ranks, shuffle, group_by_length, seed, epoch
):
    by_rank = []
    for rank in range(ranks):
        order = order_of(
            count,
            batch_size,
            shuffle=shuffle,
            group_by_length=group_by_length,
            seed=seed,
            rank=rank,
            world_size=ranks,
        )
        order.set_epoch(epoch)
        by_rank.append(order.batches())
        assert len(order) == len(by_rank[-1]) == math.ceil(count / (batch_size * ranks))
    everything = [i for batches in by_rank for batch in batches for i in batch]
    assert sorted(i for i in everything if i >= 0) == list(range(count))
    for step in zip(*by_rank, strict=True):
        sizes = [sum(i >= 0 for i in batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch_size
        # A filler stands alone, where a rank would have nothing.
        assert all(batch == [-1] for batch in step if -1 in batch)
        assert all(len(batch) > 0 for batch in step)


@pytest.mark.parametrize("group_by_length", [False, True])
def test_each_epoch_has_an_order_of_its_own_that_seed_and_epoch_decide(group_by_length):
    def batches(seed, epoch):
        order = order_of(100, 5, shuffle=True, group_by_length=group_by_length, seed=seed)
        order.set_epoch(epoch)
        return order.batches()

    drawn = [batches(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert drawn == [batches(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in itertools.combinations(drawn, 2))


def test_without_shuffling_the_order_is_that_of_the_data_or_longest_first():
    lengths = [2, 5, 3, 5, 1]
    order = BatchOrder(lengths, 2, shuffle=False, group_by_length=False)
    assert order.batches() == [[0, 1], [2, 3], [4]]
    order = BatchOrder(lengths, 2, shuffle=False, group_by_length=True)
    assert order.batches() == [[1, 3], [2, 0], [4]]


def test_a_shuffled_order_is_a_uniform_permutation():
    """The place of example 0 among 5, over 2000 epochs."""
    order = order_of(5, 1, shuffle=True)
    places = []
    for epoch in range(2000):
        order.set_epoch(epoch)
        places.append(order.batches().index([0]))
    assert stats.chisquare(np.bincount(places, minlength=5)).pvalue > 0.001


def padded(batches, lengths):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def test_grouping_by_length_saves_padding_on_gsm8k_and_stays_random(gsm8k_lengths):
    lengths = gsm8k_lengths

    def batches(epoch, group_by_length):
        order = BatchOrder(lengths, 16, shuffle=True, group_by_length=group_by_length)
        order.set_epoch(epoch)
        return order.batches()

    apart, grouped = batches(0, False), batches(0, True)
    waste = [padded(b, lengths) / sum(lengths) - 1 for b in (apart, grouped)]
    assert waste[0] > 0.5
    assert waste[1] < 0.05
    # Which lengths come when says nothing, and who shares a batch changes from epoch to epoch.
    means = [np.mean([lengths[i] for i in batch]) for batch in grouped]
    assert stats.spearmanr(means, range(len(means))).pvalue > 0.001
    assert stats.spearmanr(means[1:], means[:-1]).pvalue > 0.001

    def neighbours(batches):
        return {pair for batch in batches for pair in itertools.combinations(sorted(batch), 2)}

    first, second = neighbours(grouped), neighbours(batches(1, True))
    assert len(first & second) < 0.1 * len(first)


# ---- TokenBudgetOrder


def width(lengths, multiple):
    """Of a batch, the longest as it is padded, summed over the parts."""
    return sum(math.ceil(max(part) / multiple) * multiple for part in zip(*lengths, strict=True))


def first_fit(lengths, room):
    """How many rows of `room` tokens take these lengths, each in the first row that has place."""
    rows = []
    for length in lengths:
        fitting = next((row for row in rows if sum(row) + length <= room), None)
        if fitting is None:
            rows.append([length])
        else:
            fitting.append(length)
    return len(rows)


def next_fit(batch, lengths, row_length):
    """Rows as they are filled in the order of the batch."""
    rows = [[]]
    for i in batch:
        if sum(lengths[j] for j in rows[-1]) + lengths[i] > row_length:
            rows.append([])
        rows[-1].append(i)
    return rows


budgets = st.integers(16, 90)
multiples = st.sampled_from([1, 4])
one_part = st.lists(st.tuples(st.integers(1, 16)), min_size=1, max_size=60)
two_parts = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=60)
epochs = st.integers(0, 2**40)


def by_rank(lengths, budget, ranks, epoch, **settings):
    orders = [
        TokenBudgetOrder(lengths, budget, rank=rank, world_size=ranks, **settings)
        for rank in range(ranks)
    ]
    for order in orders:
        order.set_epoch(epoch)
    return orders, [order.batches() for order in orders]


def assert_every_example_once(orders, batches, count):
    (length,) = {len(order) for order in orders} | {len(own) for own in batches}
    assert length > 0
    everything = [i for own in batches for batch in own for i in batch]
    assert sorted(i for i in everything if i >= 0) == list(range(count))
    assert all(batch == [-1] for own in batches for batch in own if -1 in batch or not batch)
    # No rank waits for another with nothing to do, but in the last step.
    assert all(batch != [-1] for own in batches for batch in own[:-1])


@given(st.one_of(one_part, two_parts), budgets, multiples, rank_counts, booleans, booleans, epochs)
def test_every_example_is_in_one_batch_that_fits_the_budget(
    lengths, budget, multiple, ranks, shuffle, group_by_length, epoch
):
    settings = {"shuffle": shuffle, "group_by_length": group_by_length}
    orders, batches = by_rank(
        lengths, budget, ranks, epoch, pad_to_multiple_of=multiple, seed=7, **settings
    )
    assert_every_example_once(orders, batches, len(lengths))
    for batch in itertools.chain(*batches):
        taken = [lengths[i] for i in batch if i >= 0]
        if taken:
            assert len(taken) * width(taken, multiple) <= budget


@given(one_part, budgets, multiples, rank_counts, booleans, epochs)
def test_every_example_is_in_one_packed_row_of_one_batch_that_fits_the_budget(
    lengths, budget, multiple, ranks, shuffle, epoch
):
    lengths = [length for (length,) in lengths]
    orders, batches = by_rank(
        lengths, budget, ranks, epoch, packing=True, pad_to_multiple_of=multiple, shuffle=shuffle
    )
    assert_every_example_once(orders, batches, len(lengths))
    row_length = orders[0].row_length
    assert row_length % multiple == 0
    assert row_length >= max(lengths)
    for batch in itertools.chain(*batches):
        rows = next_fit([i for i in batch if i >= 0], lengths, row_length)
        assert len(rows) <= orders[0].rows_per_batch
        assert len(rows) * row_length <= budget


@given(one_part, budgets)
def test_packing_leaves_hardly_more_rows_than_there_must_be(lengths, budget):
    """Longest first, whichever row with place is taken, 11/9 of the fewest are enough, and one."""
    lengths = [length for (length,) in lengths]
    order = TokenBudgetOrder(lengths, budget, packing=True, shuffle=True)
    rows = [row for batch in order.batches() for row in next_fit(batch, lengths, order.row_length)]
    assert len(rows) <= 11 / 9 * first_fit(sorted(lengths, reverse=True), order.row_length) + 1
    assert all(sum(lengths[i] for i in row) <= order.row_length for row in rows)


def test_packed_rows_are_as_short_as_little_padding_allows():
    def rows(lengths, **settings):
        order = TokenBudgetOrder(lengths, 96, packing=True, shuffle=True, **settings)
        return order.rows_per_batch, order.row_length, order.share_of_padding

    # One with another fills a row of the longest.
    assert rows([16, 10, 6, 8, 8] * 12) == (6, 16, 0)
    # Rows of 10 and 24 would leave a tenth and a quarter; those of 48 and 96 a sixteenth.
    assert rows([10, *[9] * 95])[:2] == (1, 96)
    assert rows([13, *[8] * 100], pad_to_multiple_of=8)[:2] == (6, 16)


def test_without_shuffling_batches_are_filled_in_the_order_of_the_examples():
    def batches(**settings):
        order = TokenBudgetOrder([4, 1, 2, 2, 6, 1], 8, shuffle=False, **settings)
        assert len(order) == len(order.batches())
        return order.batches()

    assert batches() == [[0, 1], [2, 3], [4], [5]]
    assert batches(group_by_length=True) == [[0, 2], [3, 1, 5], [4]]
    assert batches(pad_to_multiple_of=4) == [[0, 1], [2, 3], [4], [5]]
    # Rows of 8: 6 + 2, 4 + 2 + 1 + 1.
    assert batches(packing=True) == [[0, 3, 1, 5], [4, 2]]


def test_prompts_and_targets_of_a_seq2seq_model_are_padded_apart():
    order = TokenBudgetOrder([(1, 5), (5, 1)], 19, shuffle=False)
    assert order.batches() == [[0], [1]]
    order = TokenBudgetOrder([(1, 5), (5, 1)], 20, shuffle=False)
    assert order.batches() == [[0, 1]]


KINDS = [{"packing": True}, {"group_by_length": True}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_of_a_token_budget_has_an_order_of_its_own_of_the_same_length(kind):
    lengths = [i % 7 + 1 for i in range(100)]

    def batches(seed, epoch):
        order = TokenBudgetOrder(lengths, 30, shuffle=True, seed=seed, **kind)
        order.set_epoch(epoch)
        return order.batches()

    drawn = [batches(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert drawn == [batches(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in itertools.combinations(drawn, 2))
    assert len({len(b) for b in drawn[:2]}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_comes_at_any_time_and_beside_any_other_of_a_length(kind):
    """The batch of example 0, and who of its length is in it, over 600 epochs."""
    lengths = [3, 3, 3, 3, 1, 1, 2, 2]
    order = TokenBudgetOrder(lengths, 6, shuffle=True, **kind)
    places, beside = Counter(), Counter()
    for epoch in range(600):
        order.set_epoch(epoch)
        ((place, batch),) = [(p, b) for p, b in enumerate(order.batches()) if 0 in b]
        places[place] += 1
        beside.update(set(batch) & {1, 2, 3})
    assert set(beside) == {1, 2, 3}
    assert stats.chisquare(list(beside.values())).pvalue > 0.001
    if not kind.get("packing"):
        assert stats.chisquare([places[p] for p in range(len(order))]).pvalue > 0.001


def test_an_example_beyond_the_budget_is_refused_with_its_padded_length():
    message = (
        r"data\.max_tokens_per_batch=7 does not hold the longest training example, which takes 8 "
        r"tokens with its padding; raise it"
    )
    with pytest.raises(ValueError, match=message):
        TokenBudgetOrder([3, 5], 7, shuffle=True, pad_to_multiple_of=4)
    with pytest.raises(ValueError, match=message):
        TokenBudgetOrder([(3, 5), (1, 2)], 7, shuffle=True)


def test_the_padding_of_a_token_budget_on_gsm8k(gsm8k_lengths):
    lengths = gsm8k_lengths

    def share_of_padding(**kind):
        order = TokenBudgetOrder(lengths, 4096, shuffle=True, **kind)
        if order.row_length is None:
            expected = 1 - sum(lengths) / padded(order.batches(), lengths)
            assert order.share_of_padding == pytest.approx(expected)
        return order.share_of_padding

    assert share_of_padding() > 0.3
    assert share_of_padding(group_by_length=True) < 0.03
    assert share_of_padding(packing=True) < 0.02
