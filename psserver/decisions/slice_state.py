"""The state of one slice, and the questions about it that change nothing."""

from __future__ import annotations

from pscore.rules.base import Rule
from pscore.types import Pull, Push
from psserver.decisions.open_step import OpenStep
from psserver.decisions.open_steps import OpenSteps
from psserver.decisions.parking import Parking
from psserver.decisions.participants import Participants
from psserver.decisions.progress import Minibatches, Progress, Token
from psserver.decisions.slice_workers import SliceWorkers
from psserver.decisions.window import Window


class SliceState:
    """Version, pushes and pulls of one slice; a `SliceClock` changes them."""

    def __init__(self, rule: Rule, participants: Participants) -> None:
        """Starts without weights.

        Raises:
            ConfigError: The mode's arguments do not fit the number of workers.
        """
        rule.require_workers(participants.num_workers)
        # Updates decided; -1 until the initial weights are here. Invariant: never falls.
        self.version = -1
        # Staleness of each worker's newest push, in updates. Invariant: not negative.
        self.staleness: dict[int, int] = {}
        # Minibatches of the pushes that are counted, of those that name theirs.
        self.minibatches = Minibatches()
        # The first two pushes of one step with unlike hyper-parameters; None: there were none.
        self.unlike: tuple[Push, Push] | None = None
        # Pushes not counted. Invariant: empty without weights.
        self.parking = Parking()
        self._workers = SliceWorkers(participants)
        self._open = OpenSteps(rule, self._workers)
        # In the order of their arrival. Invariant: none is readable once a message was handled.
        self._pulls: dict[Token, Pull] = {}
        self.window = Window.of(rule)  # The window of the open step.
        # When the job began, or its present life. Invariant: not above `version`, but for a version
        # of 0 before there are weights.
        self._first_version = 0

    @property
    def rule(self) -> Rule:
        """The table's mode."""
        return self._open.rule

    @property
    def counted(self) -> dict[int, Progress]:
        """Progress of each worker, by rank."""
        return self._workers.counted

    @property
    def open_steps(self) -> dict[int, OpenStep]:
        """Contents of the open steps, by step, or under 0 in an asynchronous mode."""
        return self._open.steps

    def clock(self, worker: int) -> int:
        """Returns the number of steps received from `worker` without a gap."""
        return self._workers.clock(worker)

    def clock_min(self) -> int:
        """Returns the smallest clock of all workers that are still expected.

        Without any no worker is behind another one: it is the largest clock so far.
        """
        workers = self._workers
        expected = workers.expected(max(self.version, 0))
        return min((workers.clock(rank) for rank in expected), default=workers.clock_max())

    def progress(self) -> int:
        """Returns the pushes that lie behind the job: the slowest worker's, or the last one's."""
        if self.rule.by_step:
            return max(self.version, 0)
        return self.clock_min()

    # ----- for people and tests

    def ranks_in(self) -> list[int]:
        """Returns the ranks whose push is in the open step, in order."""
        open_step = self._open.steps.get(max(self.version, 0))
        return [] if open_step is None else sorted(open_step.ranks())

    @property
    def is_short(self) -> bool:
        """Whether there are fewer workers than the job needs: nothing is counted meanwhile."""
        return self._workers.is_short

    def missing(self) -> tuple[int, list[int]]:
        """Returns the step that is open, and the expected ranks that have not pushed it."""
        if not self.rule.by_step:
            slowest = self.clock_min()
            ranks = self._workers.expected(0)
            return slowest, [rank for rank in ranks if self.clock(rank) <= slowest]
        step = max(self.version, 0)
        return step, self._open.missing(step, self.parking)

    @property
    def waiting(self) -> set[int]:
        """Ranks of workers that wait: for the answer to a pull, or with a parked push."""
        pulls = {pull.worker for pull in self._pulls.values()}
        return pulls | {push.worker for push in self.parking}

    @property
    def num_waiting(self) -> int:
        """Number of workers that wait."""
        return len(self.waiting)

    @property
    def is_awaited(self) -> bool:
        """Whether a worker waits: for the answer to a pull, or with a parked push."""
        return bool(self._pulls or self.parking)

    @property
    def beginning(self) -> set[int]:
        """Ranks of workers that wait to begin behind a step in which their push is."""
        return {pull.worker for pull in self._pulls.values() if pull.begins}

    def check_invariants(self) -> None:
        """Asserts what the comments at the fields say, for tests and the simulator."""
        assert self.version >= -1
        assert self.version >= 0 or not self.parking
        assert all(updates >= 0 for updates in self.staleness.values()), self.staleness
        self._open.check_invariants(self.version, self.parking)
        self._workers.check_invariants()
        self.parking.check_invariants()
