"""The contents of one open step, and the update that closes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pscore.types import Push, Role
from psserver.decisions.orders import Action, Add, Update
from psserver.decisions.progress import Token


@dataclass(slots=True)
class OpenStep:
    """Pushes of one step, or those since the last update of an asynchronous mode."""

    key: int  # The step, or 0 in an asynchronous mode. Invariant: its key in `open_steps`.
    # By rank: counted, not yet added. Invariant: no rank of `added`, each under its own rank.
    held: dict[int, tuple[Push, Token]] = field(default_factory=dict)
    # Added, each with its weight in the mean. Invariant: in a mode by step one push of each worker
    # and step, all of this step or, where late pushes count, also of earlier ones.
    added: list[tuple[Push, float]] = field(default_factory=list)

    # Workers of an asynchronous mode whose push was left out, as others have ended.
    passed: set[int] = field(default_factory=set)
    # Workers whose push is added. Invariant: those of `added`.
    workers: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = {push.worker for push, _ in self.added}

    @property
    def is_last(self) -> bool:
        """Whether its pushes are the last models of workers that have ended."""
        return bool(self.added) and self.added[0][0].role is Role.LAST_MODEL

    def ranks(self) -> set[int]:
        """Returns the workers whose push is in."""
        return self.workers.union(self.held)

    def add(self, push: Push, token: Token, weight: float, factor: float = 1.0) -> Add:
        """Adds a push and returns the order to do so."""
        self.added.append((push, weight))
        self.workers.add(push.worker)
        is_first = len(self.added) == 1
        return Add(
            token=token, open_step=self.key, push=push, weight=weight * factor, is_first=is_first
        )

    def fill(
        self, ranks: Sequence[int], fan_in: int, *, in_order: bool, is_weighted: bool
    ) -> list[Action]:
        """Adds held pushes.

        Args:
            ranks: All workers whose push is in or expected, in order.
            fan_in: Workers that the step takes a push of.
            in_order: Whether in the order of the ranks: the step waits for all of them.
            is_weighted: Whether each gradient has its number of samples as weight.
        """
        actions: list[Action] = []
        for rank in ranks if in_order else list(self.held):
            if rank in self.held and len(self.workers) < fan_in:
                push, token = self.held.pop(rank)
                weight = push.samples if is_weighted or push.samples == 0 else 1.0
                actions.append(self.add(push, token, weight))
            elif in_order and rank not in self.workers:
                break
        return actions

    def update(self, version: int) -> Update:
        """Returns the order to make `version` by the weighted mean of all that was added."""
        assert not self.held, f"step {self.key} closed without {sorted(self.held)}"
        # The newest step's: late pushes may be of the warm-up.
        first, total, present = self.added[0][0], 0.0, 0
        for push, weight in self.added:
            if (push.step, -push.worker) > (first.step, -first.worker):
                first = push
            total += weight
            present |= push.present if weight > 0 else 0
        assert first.hyper is not None
        return Update(
            open_step=self.key,
            scale=1.0 / total if total > 0 else 0.0,
            present=present,
            hyper=first.hyper,
            version=version,
        )

    def unlike(self) -> tuple[Push, Push] | None:
        """Returns two pushes of one step with unlike hyper-parameters; None: there are none."""
        pushes = [push for push, weight in self.added if weight > 0]
        for push in pushes[1:]:
            one, other = pushes[0].hyper, push.hyper
            if one is other or one is None or other is None or push.step != pushes[0].step:
                continue
            # Bytes first: this is asked in every step of every slice.
            if one.tobytes() != other.tobytes() and not np.array_equal(one, other):
                return pushes[0], push
        return None

    def check_invariants(self, *, by_step: bool) -> None:
        """Asserts what the comments at the fields say."""
        assert self.held or self.added, f"step {self.key} is open and empty"
        assert all(push.worker == rank for rank, (push, _) in self.held.items())
        assert self.workers == {push.worker for push, _ in self.added}
        if by_step:
            pushes = [push for push, _ in (*self.held.values(), *self.added)]
            named = {(push.worker, push.step) for push in pushes}
            assert len(named) == len(pushes), f"a push is in step {self.key} twice"
            assert all(push.step <= self.key for push in pushes)
            assert all(push.step == self.key for push, _ in self.held.values())
