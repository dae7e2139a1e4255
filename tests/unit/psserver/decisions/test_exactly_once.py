"""Push, pull, acknowledge, retry, crash, restart, join, leave in any order, against a model.

Hypothesis writes the story; the shard's own state machines decide, and the model only counts the
pushes that are in the weights and the answers that their workers got. A message once sent may be
delivered at any time, again and again, even if its sender has died. The shard is killed too,
and continues from its journal. In elastic jobs workers join later, others take the places of the
lost, and no step may close while there are too few.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pscore.compressors.none import NoCompression
from pscore.errors import ReplacedError
from pscore.rules import parse_mode
from pscore.table_spec import TableSpec
from pscore.types import Pull, Push, Role, TensorSpec, Verdict
from psserver.decisions.membership import Member, Presence
from psserver.decisions.open_step import OpenStep
from psserver.decisions.orders import Acknowledge, Add, Answer, Update
from psserver.decisions.progress import Progress
from psserver.decisions.shard import Actions, Address, Job, Shard
from psserver.durability.records import members_of, members_to_json

LEASE_S = 10.0
WORKERS = 3
HYPER = np.zeros((1, 6))
AT = Address("job", 0, 0)
NEEDS_TWO = ("ssgd(backup=1)", "staleness(splits=2)")
MODES = ("asgd", "ssgd", "ssgd(backup=1)", "ssp(bound=1)", "staleness(splits=2)")


@dataclass(eq=False)
class Message:
    """One push: its own token, and its own gradient."""

    worker: int
    incarnation: int
    push: Push
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass
class Worker:
    """A worker, as its own process sees it."""

    rank: int
    incarnation: int = 0
    restart: int = -1
    is_live: bool = False
    has_pulled: bool = False
    step: int = 0
    version: int = 0
    waits: Message | None = None  # Not acknowledged yet.
    pull: Pull | None = None


class Story(RuleBasedStateMachine):
    """Everything that may happen to one slice."""

    @initialize(mode=st.sampled_from(MODES), least=st.integers(0, 2))
    def begin(self, mode: str, least: int) -> None:
        self.rule = parse_mode(mode)
        self.least = 2 if least and mode in NEEDS_TWO else least  # 0: not elastic.
        self.lives = 100  # Processes so far.
        self.shard = Shard(0, 1, LEASE_S)
        self.now_s = 0.0
        self.workers = [Worker(rank) for rank in range(WORKERS)]
        self.sent: list[Message] = []
        self.weights: Counter[Message] = Counter()
        self.sums: dict[int, Counter[Message]] = {}
        self.versions = [0]
        self.first_job: Job | None = None  # Nobody's coming back may begin another.
        for worker in self.workers[: self.least or WORKERS]:
            self._join(worker)
        self.spec = TableSpec(
            name="w",
            tensors=(TensorSpec(name="w", shape=(16,), dtype="float32"),),
            num_shards=1,
            rule=self.rule,
            compressor=NoCompression(),
            optimizer="sgd",
            num_groups=1,
        )
        self.shard.define(self.job, self.spec)
        self.first_job = self.job
        load = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
        self.shard.decide_push(self.job, AT, load, "weights")

    @property
    def job(self) -> Job:
        return self.shard.jobs["job"]

    # ----- what may happen

    @rule(rank=st.integers(0, WORKERS - 1))
    def sends_a_push(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.is_live and worker.has_pulled and worker.waits is None:
            push = Push(worker=rank, step=worker.step, base_version=worker.version, hyper=HYPER)
            worker.waits = Message(rank, worker.incarnation, push)
            worker.step += 1
            self.sent.append(worker.waits)
            self._deliver(worker.waits)

    @rule(ranks=st.permutations(range(WORKERS)), num=st.integers(1, WORKERS))
    def some_make_a_step(self, ranks: list[int], num: int) -> None:
        """Invariants between two events, in any order of arrival."""
        for act in (self.asks_for_weights, self.sends_a_push, self.asks_for_weights):
            for rank in ranks[:num]:
                act(rank)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_push_arrives_again(self, data: st.DataObject) -> None:
        recent = self.sent[-8:] if data.draw(st.booleans()) else self.sent
        self._deliver(data.draw(st.sampled_from(recent)))

    @rule(rank=st.integers(0, WORKERS - 1))
    def asks_for_weights(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.is_live and worker.waits is None:
            clock = worker.step if worker.has_pulled else 0
            oldest = self.rule.min_version(clock - 1) if clock else 0
            worker.pull = Pull(worker=rank, clock=clock, min_version=oldest)
            self._do(self.shard.decide_pull(self.job, AT, worker.pull, worker.pull))

    @rule(rank=st.integers(0, WORKERS - 1))
    def crashes(self, rank: int) -> None:
        self.workers[rank].is_live = False

    @rule(rank=st.integers(0, WORKERS - 1))
    def comes_back(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.is_live and (worker.restart >= 0 or not self.job.membership.is_idle):
            self._join(worker)

    @precondition(lambda self: self.least and not self.job.membership.is_idle)
    @rule()
    def another_takes_a_free_place(self) -> None:
        members = self.job.membership.members.values()
        if sum(member.presence is Presence.LIVE for member in members) < WORKERS:
            self._join(Worker(-1))

    @rule(rank=st.integers(0, WORKERS - 1))
    def leaves(self, rank: int) -> None:
        worker = self.workers[rank]
        others = set(self.job.membership.expected()) - {rank}
        if worker.is_live and worker.waits is None and others:
            worker.is_live = False
            self._do(self.shard.decide_leave("job", rank, worker.incarnation, "done"))

    @rule()
    def the_shard_is_killed(self) -> None:
        """Its decisions are in its journal; waiting workers ask again."""
        former, (table,) = self.job, self.job.tables.values()
        clock = table.clock(0)
        record = {"num_workers": WORKERS, "members": members_to_json(former)}
        members = members_of(record, self.now_s)
        self.shard = Shard(0, 1, LEASE_S)
        self.first_job = self.shard.restore("job", WORKERS, members, self.least)
        table, _ = self.shard.define(self.job, self.spec)
        counted = {
            rank: Progress(steps.clock, set(steps.ahead), set(steps.late), steps.skipped)
            for rank, steps in clock.counted.items()
        }
        open_steps = {
            key: OpenStep(key, held=dict(open_step.held), added=list(open_step.added))
            for key, open_step in clock.open_steps.items()
        }
        actions = table.clock(0).resume(clock.version, counted, open_steps)
        self._do([(AT, action) for action in actions])

    @rule(seconds=st.sampled_from((1.0, 4.0, LEASE_S + 1.0)))
    def time_passes(self, seconds: float) -> None:
        """Live workers renew their lease; crashed ones do not."""
        self.now_s += seconds
        for worker in self.workers:
            if worker.is_live:
                self._heard(worker.rank, worker.incarnation)
        lost, actions = self.shard.tick(self.now_s)
        self._do(actions)
        for _, member in lost:
            assert not self.workers[member.rank].is_live or seconds > LEASE_S

    # ----- what must be true

    @invariant()
    def every_push_is_counted_as_often_as_its_worker_was_told(self) -> None:
        held = self._held()
        for message in self.sent:
            count = self.weights[message] + held[message]
            assert count <= 1, f"{message} is counted {count} times"
            told = set(message.verdicts)
            if told & {Verdict.ACCEPTED, Verdict.DUPLICATE}:
                assert count == 1, f"{message} was acknowledged, and is not there"
                assert Verdict.TOO_LATE not in told
            if Verdict.TOO_LATE in told:
                assert count == 0, f"{message} was refused, and is counted"

    def teardown(self) -> None:
        """In the end, nothing that was acknowledged is left outside of the weights.

        All are lost. If none had finished, the steps that were open wait until the job continues:
        no step closes without the gradients of workers that will come back.
        """
        self.now_s += 2 * LEASE_S
        version, held = self.versions[-1], self._held()
        _, actions = self.shard.tick(self.now_s)
        self._do(actions)
        states = {member.presence for member in self.job.membership.members.values()}
        if self.rule.by_step and Presence.LEFT not in states:
            assert (self.versions[-1], self._held()) == (version, held)
            self._all_come_back_and_catch_up()
        if self.rule.by_step:
            assert not self._held(), self._held()
        assert self.versions == list(range(len(self.versions)))

    # ----- inside

    def _all_come_back_and_catch_up(self) -> None:
        """All workers join again; those behind push until all have made the same steps."""
        back = [worker for worker in self.workers if worker.restart >= 0]
        for worker in back:
            self._join(worker)
        for worker in back:
            self.asks_for_weights(worker.rank)
        last = max(worker.step for worker in back)
        for step in range(last + 1):
            for worker in back:
                if worker.step == step:
                    self.sends_a_push(worker.rank)
                    self.asks_for_weights(worker.rank)

    def _join(self, worker: Worker) -> None:
        worker.restart += 1
        self.lives += 1
        worker.incarnation = self.lives
        worker.is_live, worker.has_pulled, worker.waits = True, False, None
        worker.step = worker.version = 0
        member = Member(
            rank=worker.rank,
            incarnation=worker.incarnation,
            restart=worker.restart,
            host="a",
            pid=worker.incarnation,
            heard_s=self.now_s,
            returns=worker.restart > 0,
        )
        job, actions = self.shard.decide_join("job", WORKERS, member, self.least)
        worker.rank = member.rank
        self.workers[worker.rank] = worker
        assert self.first_job in (None, job)
        self._do(actions)

    def _heard(self, rank: int, incarnation: int) -> bool:
        try:
            self.shard.heard("job", rank, incarnation, self.now_s)
        except ReplacedError:
            return False
        return True

    def _deliver(self, message: Message) -> None:
        if self._heard(message.worker, message.incarnation):
            self._do(self.shard.decide_push(self.job, AT, message.push, message))
        elif self.workers[message.worker].waits is message:
            self.workers[message.worker].is_live = False  # It is told so, and comes back.

    def _held(self) -> Counter[Message]:
        """Returns what is counted and waits for its update: in sums, and for lower ranks."""
        held: Counter[Message] = Counter()
        for one in self.sums.values():
            held += one
        for open_step in self.job.table(0).clock(0).open_steps.values():
            held.update(token for _, token in open_step.held.values() if isinstance(token, Message))
        return held

    def _do(self, actions: Actions) -> None:
        for _, action in actions:
            if isinstance(action, Add):
                assert isinstance(action.token, Message)
                into = self.sums.setdefault(action.open_step, Counter())
                assert action.is_first == (not into)
                into[action.token] += 1
            elif isinstance(action, Update):
                self._require_enough()
                self.weights += self.sums.pop(action.open_step, Counter())
                self.versions.append(action.version)
            elif isinstance(action, Acknowledge) and isinstance(action.token, Message):
                self._acknowledged(action.token, action.verdict)
            elif isinstance(action, Answer):
                self._answered(action)

    def _require_enough(self) -> None:
        """A step closes: enough workers are there or have finished; never if all were lost."""
        states = [member.presence for member in self.job.membership.members.values()]
        if Presence.LIVE in states:
            assert len(states) - states.count(Presence.LOST) >= self.least
        else:
            assert Presence.LEFT in states

    def _acknowledged(self, message: Message, verdict: Verdict) -> None:
        message.verdicts.append(verdict)
        worker = self.workers[message.worker]
        if worker.waits is message:
            worker.waits = None

    def _answered(self, action: Answer) -> None:
        worker = self.workers[action.worker]
        if worker.pull is None or worker.pull is not action.token or not worker.is_live:
            return
        assert action.version >= worker.pull.min_version
        worker.version, worker.pull = action.version, None
        if not worker.has_pulled:
            closed = action.version if self.rule.by_step else 0
            worker.step = max(action.clock, closed)
        worker.step = max(worker.step, action.version) if self.rule.by_step else worker.step
        worker.has_pulled = True


@pytest.mark.slow
def test_every_push_counts_once_whatever_happens() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Story,
        settings=settings(
            max_examples=150,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )
