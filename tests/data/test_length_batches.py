import itertools

from hypothesis import given
from hypothesis import strategies as st

from rewarden.data.batches import length_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 5), st.integers(0, 9), st.integers(0, 3))
def test_every_row_is_in_one_batch_and_only_one_batch_is_smaller(
    lengths: list[int], batch_size: int, window: int, seed: int, epoch: int
) -> None:
    batches = length_batches(lengths, batch_size=batch_size, window=window, seed=seed, epoch=epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert sorted(map(len, batches), reverse=True)[:-1] == [batch_size] * max(len(batches) - 1, 0)


@given(LENGTHS, st.integers(1, 7), st.integers(0, 9))
def test_one_window_over_all_rows_puts_equal_lengths_together(lengths: list[int], batch_size: int, seed: int) -> None:
    batches = length_batches(lengths, batch_size=batch_size, window=1 + len(lengths), seed=seed, epoch=0)
    ranges = sorted((min(lengths[row] for row in batch), max(lengths[row] for row in batch)) for batch in batches)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))


def test_the_plan_repeats_for_a_seed_and_changes_with_the_epoch() -> None:
    lengths = list(range(40))
    plans = [length_batches(lengths, batch_size=4, window=3, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert plans[0] == length_batches(lengths, batch_size=4, window=3, seed=0, epoch=0)
    assert all(plans[i] != plans[j] for i in range(4) for j in range(i))
