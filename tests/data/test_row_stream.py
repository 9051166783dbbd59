import dataclasses
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarden.data.stream import Cursor, Stream
from rewarden.errors import DataError, ResumeError

SIZES = st.integers(1, 23)
SEEDS = st.integers(0, 2**40)


@given(SIZES, SEEDS, st.integers(0, 4))
def test_every_row_comes_exactly_once_an_epoch(num_rows: int, seed: int, epochs: int) -> None:
    rows, cursor = Stream(num_rows, seed=seed).take(Cursor(), num_rows * epochs)
    for epoch in range(epochs):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert cursor.epoch * num_rows + cursor.index == num_rows * epochs


@given(SIZES, SEEDS, st.lists(st.integers(0, 31), max_size=8))
def test_any_chunking_gives_the_same_sequence(num_rows: int, seed: int, chunks: list[int]) -> None:
    whole, end = Stream(num_rows, seed=seed).take(Cursor(), sum(chunks))
    stream, cursor, taken = Stream(num_rows, seed=seed), Cursor(), []
    for size in chunks:
        rows, cursor = stream.take(cursor, size)
        assert len(rows) == size
        taken += rows
    assert taken == whole
    assert cursor.epoch * num_rows + cursor.index == end.epoch * num_rows + end.index == sum(chunks)


@given(SIZES, SEEDS, st.integers(0, 60), st.integers(0, 60))
def test_a_saved_cursor_continues_where_it_stood(num_rows: int, seed: int, before: int, after: int) -> None:
    whole, _ = Stream(num_rows, seed=seed).take(Cursor(), before + after)
    _, cursor = Stream(num_rows, seed=seed).take(Cursor(), before)
    saved = json.dumps(dataclasses.asdict(cursor))
    again, _ = Stream(num_rows, seed=seed).take(Cursor(**json.loads(saved)), after)
    assert again == whole[before:]


@given(SIZES, SEEDS, st.integers(1, 9))
def test_epoch_batches_are_the_epoch_cut_in_pieces(num_rows: int, seed: int, size: int) -> None:
    stream = Stream(num_rows, seed=seed)
    batches = list(stream.epoch_batches(2, size))
    rows, _ = stream.take(Cursor(epoch=2), num_rows)
    assert [row for batch in batches for row in batch] == rows
    assert all(len(batch) == size for batch in batches[:-1])
    assert len(batches) == -(-num_rows // size)


def test_orders_differ_between_epochs_and_seeds_and_repeat_for_the_same() -> None:
    orders = [tuple(Stream(50, seed=seed).order(epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert Stream(50, seed=3).order(3) == list(orders[-1])


def test_positions_are_uniform_over_seeds() -> None:
    first = [Stream(4, seed=seed).take(Cursor(), 1)[0][0] for seed in range(2000)]
    counts = [first.count(row) for row in range(4)]
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in counts), counts


def test_the_global_random_state_does_not_matter() -> None:
    random.seed(1)
    rows = Stream(9, seed=0).take(Cursor(), 30)
    random.seed(2)
    assert Stream(9, seed=0).take(Cursor(), 30) == rows


def test_a_changed_order_in_the_hands_of_a_caller_does_not_change_the_stream() -> None:
    stream = Stream(9, seed=0)
    stream.order(0).clear()
    assert sorted(stream.take(Cursor(), 9)[0]) == list(range(9))


def test_no_rows_and_foreign_cursors_are_refused() -> None:
    with pytest.raises(DataError, match="a stream over 0 rows"):
        Stream(0, seed=0)
    with pytest.raises(ResumeError, match=r"epoch 1, index 7\) does not lie in 5 rows; the data changed"):
        Stream(5, seed=0).take(Cursor(epoch=1, index=7), 1)
    with pytest.raises(DataError, match="cannot take -1 rows"):
        Stream(5, seed=0).take(Cursor(), -1)
    with pytest.raises(DataError, match="batches of 0 rows"):
        list(Stream(5, seed=0).epoch_batches(0, 0))
