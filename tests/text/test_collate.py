"""Collation and masks look at positions only."""

import pytest
import torch

from rewarden.errors import DataError
from rewarden.text.collate import collate, role_mask
from rewarden.types import Span

SPANS = (
    Span(role="template", turn=0, start=0, stop=1),
    Span(role="user", turn=0, start=1, stop=3),
    Span(role="assistant", turn=0, start=3, stop=5),
    Span(role="user", turn=1, start=5, stop=6),
    Span(role="assistant", turn=1, start=6, stop=9, ended="eos"),
)


def test_rows_are_filled_up_on_the_right_and_the_mask_says_what_is_real():
    batch = collate([[5, 6, 7], [8], []])
    assert batch.ids_BT.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert batch.mask_BT.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert batch.length_B.tolist() == [3, 1, 0]
    assert batch.ids_BT.dtype == torch.long


def test_no_rows_give_an_empty_batch():
    batch = collate([])
    assert batch.ids_BT.shape == batch.mask_BT.shape == (0, 0)
    assert batch.length_B.shape == (0,)


def test_real_tokens_that_equal_the_filler_stay_real():
    # Report 1: with pad == eos, masks made from ids hide the true end of turn.
    batch = collate([[0, 4, 0], [0]])
    assert batch.mask_BT.tolist() == [[True, True, True], [True, False, False]]


def test_rows_of_a_batch_are_the_batch_of_the_rows():
    rows = [(1, 2, 3, 4), (5,), (6, 7)]
    part, alone = collate(rows).rows(torch.tensor([2, 1])), collate([rows[2], rows[1]])
    assert torch.equal(part.ids_BT, alone.ids_BT)
    assert torch.equal(part.mask_BT, alone.mask_BT)
    assert torch.equal(part.length_B, alone.length_B)


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({}, [3, 4, 6, 7, 8]),
        ({"turn": 0}, [3, 4]),
        ({"turn": 1}, [6, 7, 8]),
        ({"turn": 2}, []),
        ({"sampled": True}, [6, 7, 8]),
        ({"sampled": False}, [3, 4]),
        ({"role": "user"}, [1, 2, 5]),
        ({"role": "user", "turn": 1}, [5]),
        ({"role": "template"}, [0]),
        ({"role": "system"}, []),
    ],
)
def test_masks_are_one_function_with_other_arguments(options, positions):
    mask_BT = role_mask([SPANS, ()], 11, **options)
    assert mask_BT.shape == (2, 11)
    assert mask_BT[0].nonzero().flatten().tolist() == positions
    assert not mask_BT[1].any()


def test_a_span_beyond_the_batch_is_refused():
    with pytest.raises(DataError, match=r"row 0: span \[6, 9\) reaches beyond the 8 tokens"):
        role_mask([SPANS], 8)
