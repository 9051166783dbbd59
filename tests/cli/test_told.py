import time

from rewarden.recipe.told import every


def test_nothing_is_due_before_its_time():
    due = every(1000.0)
    assert [due(), due()] == [False, False]


def test_what_was_told_is_not_due_again_at_once():
    due = every(0.2)
    time.sleep(0.21)
    assert [due(), due()] == [True, False]
