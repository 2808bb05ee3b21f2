"""Admission budgets: how many groups of a run may be admitted and not yet trained or dropped."""

from collections.abc import Iterable, Iterator

from headwater.errors import FailedPrecondition, OutOfBudget

RETRY_AFTER_S = 1.0
"""What a refused client is told; slots are freed once per optimizer step, so sooner is seldom of use."""


class Budgets:
    """Slots of each run. A group holds one from its admission until `release`, whatever became of it in between.

    A group that failed keeps its slot: an attempt may have published it before it died, and only the trainer knows.
    Submitting it again under the same id is free; giving it up is a `release`.
    """

    def __init__(self) -> None:
        self._capacity: dict[str, int] = {}
        self._charged: dict[str, set[str]] = {}

    def set(self, run_id: str, capacity: int, charged_group_ids: Iterable[str]) -> int:
        """Replace the grant and the charged groups of a run; returns how many are charged. 0 closes the run."""
        self._capacity[run_id] = capacity
        self._charged[run_id] = set(charged_group_ids) if capacity else set()
        return len(self._charged[run_id])

    def release(self, run_id: str, group_ids: Iterable[str]) -> int:
        """Free the slots of groups, those that hold none included; returns how many are still charged."""
        charged = self._charged.setdefault(run_id, set()) if run_id in self._capacity else set()
        charged.difference_update(group_ids)
        return len(charged)

    def covers(self, run_id: str) -> bool:
        """Whether groups of the run are charged here; otherwise the queue capacity is their limit."""
        return run_id in self._capacity

    def charge(self, run_id: str, group_id: str) -> None:
        """Take a slot for a group; a group that holds one already keeps it. Raises `OutOfBudget` when all are taken."""
        capacity, charged = self._capacity[run_id], self._charged[run_id]
        if capacity == 0:
            raise FailedPrecondition(
                f"run {run_id!r} takes no prompts: its budget was removed; the trainer grants one with SetBudget",
                reason="BUDGET_REMOVED",
            )
        if group_id in charged:
            return
        if len(charged) >= capacity:
            raise OutOfBudget(
                f"run {run_id!r} has {len(charged)} of {capacity} groups admitted and not yet trained; "
                "wait for an optimizer step, then submit again",
                reason="BUDGET_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        charged.add(group_id)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """(run, capacity, charged) of every run that still has a grant or a charge, sorted by run."""
        for run_id in sorted(self._capacity):
            if self._capacity[run_id]:
                yield run_id, self._capacity[run_id], len(self._charged[run_id])
