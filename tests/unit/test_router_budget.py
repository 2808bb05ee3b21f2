"""Admission budgets of the router."""

import pytest
from headwater_router.budget import Budgets

from headwater.errors import FailedPrecondition, OutOfBudget


def test_a_full_budget_refuses_and_says_when_to_retry():
    budgets = Budgets()
    budgets.set("run", 2, [])
    budgets.charge("run", "a")
    budgets.charge("run", "b")
    with pytest.raises(OutOfBudget) as caught:
        budgets.charge("run", "c")
    assert caught.value.retry_after_s is not None
    assert "2 of 2" in caught.value.message


def test_a_group_that_is_charged_already_is_not_charged_again():
    budgets = Budgets()
    budgets.set("run", 1, [])
    budgets.charge("run", "a")
    budgets.charge("run", "a")
    assert list(budgets) == [("run", 1, 1)]


def test_release_frees_a_slot_and_may_be_repeated():
    budgets = Budgets()
    budgets.set("run", 1, [])
    budgets.charge("run", "a")
    assert budgets.release("run", ["a", "never-seen"]) == 0
    assert budgets.release("run", ["a"]) == 0
    budgets.charge("run", "b")


def test_set_replaces_capacity_and_charges():
    budgets = Budgets()
    budgets.set("run", 3, [])
    budgets.charge("run", "a")
    assert budgets.set("run", 2, ["x", "y"]) == 2
    with pytest.raises(OutOfBudget):
        budgets.charge("run", "a")
    budgets.charge("run", "x")


def test_a_removed_budget_refuses_without_a_promise():
    budgets = Budgets()
    budgets.set("run", 2, ["a"])
    assert budgets.set("run", 0, []) == 0
    with pytest.raises(FailedPrecondition, match="SetBudget"):
        budgets.charge("run", "b")
    assert list(budgets) == []


def test_only_runs_with_a_grant_are_covered():
    budgets = Budgets()
    budgets.set("run", 2, [])
    assert budgets.covers("run")
    assert not budgets.covers("other")
    assert budgets.release("other", ["a"]) == 0
    assert not budgets.covers("other")
