"""Pushes and pulls of one table over the network, through one data plane per shard.

`Exchange` is the `PushPull` of a replica. It keeps a future for each slice under way. A slice has
at most one push and one pull under way, so the bytes in flight are bounded by the size of the
model. A gradient must not change until its push is acknowledged: a failure makes the worker send it
again, and with shared memory the shard reads it in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from pscore.errors import LOST, ConfigError, JobMismatchError, LimitError
from pscore.net import wire
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Push, Role
from psworker.compression.pull_estimate import PulledEstimate
from psworker.connection.accounts.missed import Missed
from psworker.connection.accounts.trace import note_pull, note_push
from psworker.connection.accounts.traffic import Traffic, pulled_nbytes
from psworker.connection.exchange.answer_wait import AnswerWait
from psworker.connection.exchange.headers import PreparedHeaders
from psworker.connection.exchange.payloads import Payloads
from psworker.connection.exchange.refills import Refills
from psworker.connection.exchange.residuals import Residuals
from psworker.connection.exchange.shared_grads import SharedGrads
from psworker.connection.exchange.together import Together
from psworker.connection.membership import taking_part
from psworker.connection.membership.session import AgreedTable, Session
from psworker.replica.ports import PullBuffer
from psworker.transports import OutgoingPush, PullCall, RequestFuture, Transport

log = logging.getLogger("paceline")
WAIT_MS = 5_000  # A pull that cannot be answered by then is answered with the reason.


class Exchange:
    """Pushes and pulls of one table.

    Attributes:
        table: Its index at the shards.
        grads: `(memory.numel,) float32` on the host, read there by shards of this host, or None.
        missed: Steps of this worker that did not count, or not in every slice.
        origin: The push and the step from which steps are counted.
        payloads: Makes the pushes, and keeps the residuals.
        answers: Waits for the shards' answers.
        together: A context in which pushes and pulls leave together.
        minibatch: Number of the minibatch of the next pushes; -1: they name none.
        refills: Brings the slices to a shard that has come back empty, if they are held here.
        has_updates: Whether some answer had an update in it; else all are of the first weights.
    """

    def __init__(
        self,
        session: Session,
        spec: TableSpec,
        *,
        share: bool = False,
        own: Sequence[int] | None = None,
        memory: Layout | None = None,
        agreed: AgreedTable | None = None,
    ) -> None:
        """Declares the table at every shard, unless it is declared.

        Args:
            share: Whether gradients and weights are in shared memory where that is possible.
            own: The slices that this process pushes and pulls in training; None: all.
            memory: Where the slices lie in `grads` and in residuals; None: as in the layout.
            agreed: The table as the shards have it; None: it is declared here.

        Raises:
            JobMismatchError: The job's table of this name is another one; names the difference.
        """
        self.session, self.spec, self.layout = session, spec, spec.layout()
        own, memory = range(len(self.layout.slices)) if own is None else own, memory or self.layout
        self.traffic, self.missed = Traffic(), Missed(len(own), session.rank)
        self._timeline = session.timeline
        self._num_changes = 0  # Changes of the mode so far, and absences of this worker.
        self.minibatch, self.has_updates = -1, False
        self.table, self.origin = (agreed or session.define(spec))[:2]
        self._known_as: tuple[object, data_pb2.Sender] = None, data_pb2.Sender()
        self._pull_headers = PreparedHeaders(data_pb2.PullHeader)
        self._shared = SharedGrads(session, memory, self._sender) if share else None
        self.grads = None if self._shared is None else self._shared.array
        self._estimates = self._make_estimates()
        self._pushes: dict[int, Future[data_pb2.PushReply]] = {}
        self._pulls: dict[int, tuple[PullCall, PullBuffer]] = {}
        self._pulled_steps: dict[int, int] = {}  # The steps that the last pulls wait for.
        self.refills = Refills(
            self, self._sender, self._shared, self._pushes, self._pulls, self._send, self._request
        )
        self.together = Together()
        self.answers = AnswerWait(
            session, spec.name, self.layout, self._raise_failed, self.together.let_go
        )
        self.payloads = Payloads(
            memory,
            spec.compressor,
            own,
            shared=self._shared,
            sender=self._sender,
            traffic=self.traffic,
            timeline=self._timeline,
        )
        self._residuals = Residuals(
            session, self.table, self.layout, self.payloads.feedback, self._pushes
        )
        session.pushes.add(self)

    @property
    def compresses_pulls(self) -> bool:
        """Whether what is pulled in training is an estimate of the weights."""
        return not self.spec.pull_compressor.is_raw

    # ----- PushPull

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends one slice; `grad` must not change until `acknowledged(index)` has returned."""
        self.refills.require_whole(index)
        self.acknowledged(index)
        feedback = self.payloads.choose(index, push.present, grad, compress=compress or flush)
        self._residuals.begin(index, push.step)
        outgoing = self.payloads.prepare(
            index, push, grad, feedback, flush=flush, minibatch=self.minibatch
        )
        if self._timeline is not None:
            note_push(self._timeline, outgoing, grad.nbytes)
        self.missed.sent(index, push.step)
        self._send(index, outgoing, grad.nbytes)

    def pull(
        self, index: int, clock: int, min_version: int, pull_buffer: PullBuffer, *, with_state: bool
    ) -> None:
        """Requests one slice: its weights, or the estimate of them."""
        self.refills.require_whole(index)
        header = self._pull_header(index, pull_buffer, with_state=with_state)
        header.clock, header.min_version = clock, min_version
        state = [tensor.numpy() for tensor in pull_buffer.state] if with_state else []
        call = PullCall(
            header=header,
            weights=pull_buffer.weights.numpy(),
            state=state,
            copy_on_wait=pull_buffer.copy_on_wait,
        )
        held = self._estimates[index]
        if held is not None and not (with_state or pull_buffer.exact or pull_buffer.is_look):
            header.estimate, header.held, call.held = True, held.fingerprint, held
        if self._timeline is not None:
            note_pull(self._timeline, call)
        self._pulled_steps[index] = max(clock, min_version) - 1
        self._request(index, call, pull_buffer)

    def maps_weights(self, index: int) -> bool:
        """Returns whether a slice's weights are in shared memory and pulled uncompressed."""
        is_mapped = self._shared is not None and self._shared.is_mapped(index)
        return is_mapped and self._estimates[index] is None

    def maps_grads(self, indices: Iterable[int]) -> bool:
        """Returns whether the shards of slices have mapped `grads`, so they acknowledge soon."""
        shared = self._shared
        return shared is not None and all(shared.is_mapped(index) for index in indices)

    # ----- waiting

    def run(self, waits: Iterable[int]) -> None:
        """Drives a replica's generator: waits for each pull that it yields.

        Raises:
            PacelineError: A pull or push was refused, or a shard does not answer.
        """
        for index in waits:
            reply, pull_buffer = self._landed(index)
            pull_buffer.counts = np.array(reply.counts, dtype=np.int64) if reply.counts else None
            pull_buffer.version, pull_buffer.clock = reply.version, reply.clock
            self.has_updates |= reply.version > 0
            self.missed.compare(index, reply.counted - 1)
            self.traffic.pulled_nbytes += pulled_nbytes(reply, pull_buffer)
            self.traffic.num_pulls += 1
        self.missed.report_lost(self.spec.rule)

    def _landed(self, index: int) -> tuple[data_pb2.PullReply, PullBuffer]:
        """Returns the answer to a pull, and its memory, where the numbers are."""
        step = self._pulled_steps.get(index, -1)
        what = "the first weights" if step < 0 else f"the weights after step {step}"
        while True:
            call, pull_buffer = self._pulls[index]
            try:
                reply = self.answers.wait(call.done, index, what)
            except LOST as problem:
                self.refills.mend(problem)
                continue
            if call.fetch is None or call.fetch():
                return reply, pull_buffer
            call.done, call.fetch = RequestFuture(), None
            self._request(index, call, pull_buffer)

    def has_landed(self, index: int) -> bool:
        """Returns whether no pull of a slice is under way."""
        return index not in self._pulls or self._pulls[index][0].done.done()

    def next_landed(self, indices: Sequence[int]) -> int:
        """Returns the first of some slices without a pull under way; waits until there is one.

        Raises:
            PacelineError: A pull or push was refused, or a shard does not answer.
        """
        for index in indices:
            if self.has_landed(index):
                return index
        while True:
            answers = {index: self._pulls[index][0].done for index in indices}
            try:
                return self.answers.wait_for_any(answers, "weights of an earlier step")
            except LOST as problem:
                self.refills.mend(problem)

    def is_busy(self) -> bool:
        """Returns whether a push has not been acknowledged yet."""
        return any(not future.done() for future in self._pushes.values())

    def acknowledged(self, index: int) -> None:
        """Waits until the last push of a slice is acknowledged: its gradient is free again."""
        while (future := self._pushes.get(index)) is not None:
            what = f"room for step {self.missed.pushed.get(index, 0)}"
            try:
                reply = self.answers.wait(future, index, what)
            except LOST as problem:
                self.refills.mend(problem)
                continue
            del self._pushes[index]
            if reply.verdict == data_pb2.VERDICT_TOO_LATE:
                self.traffic.num_too_late += 1
                self.missed.late(self.session.rank, index, self.spec.rule)
            self._residuals.settle(index, reply)

    def flush(self) -> None:
        """Waits until every push is acknowledged."""
        for index in list(self._pushes):
            self.acknowledged(index)

    def give_up_step(self, step: int | None, problem: BaseException) -> None:
        """Gives up the step under way, if any, and logs whether it counts (`Missed.give_up`)."""
        unanswered = [i for i, push in self._pushes.items() if not _is_answered(push)]
        came = self.missed.give_up(step, unanswered, self.spec.rule)
        why = str(problem) or type(problem).__name__
        log.warning("worker %d rejoins, %s: %s", self.session.rank, came, why)

    def _raise_failed(self) -> None:
        """Raises the error of a push that could not leave: answers may depend on it."""
        for future in self._pushes.values():
            if future.done() and (problem := future.exception()) is not None:
                raise problem

    def restart(self) -> None:
        """Forgets pushes and pulls under way, which may have been counted; residuals stay.

        Raises:
            JobMismatchError: The job was restored with slices of another length.
            PacelineError: A shard refused something, or does not answer.
        """
        agreed = self.session.define(self.spec, again=self.has_updates, adopts=True)
        if agreed.content != self.spec.content:
            raise JobMismatchError(
                f"job {self.session.job!r} was restored from a checkpoint whose slices have "
                "another length: start this worker again, and it takes those"
            )
        self.table, self.origin = agreed[:2]
        self.missed.doubt(self.session.rank)
        self._pushes.clear()
        self.refills.restart()
        self.session.pushes.add(self)
        self._pulls.clear()
        self.session.pace.forget()
        self._estimates = self._make_estimates()
        self.payloads.restart()
        self._residuals.restart(self.table)
        if self._shared is not None:
            self._shared.attach()

    def ask_origin(self) -> None:
        """Asks the shards from where steps are counted, after a state was loaded."""
        self.table, self.origin = self.session.define(self.spec, again=True)[:2]
        self.missed.forget()

    def change(self, rule: Rule, step: int) -> None:
        """Changes the table's rule, on every shard and for every worker.

        Raises:
            ConfigError: A shard cannot take it; all continue in the former mode.
            JobMismatchError: Another worker has named another mode.
        """
        self.flush()
        self._num_changes += 1
        try:
            taking_part.step_aside(self.session, self.table, self._num_changes, step, rule)
            self.session.barrier("mode", holds=True)
            taking_part.change(self.session, self.table, self._num_changes, rule)
        except (ConfigError, LimitError) as problem:  # All continue in the former mode.
            taking_part.come_back(self.session, self.table, self._num_changes, 0)
            raise ConfigError(str(problem)) from problem
        self.spec = replace(self.spec, rule=rule)
        self.ask_origin()

    def step_aside(self, step: int) -> None:
        """Asks the shards not to wait for this worker's pushes until `come_back`."""
        self.flush()
        self._num_changes += 1
        taking_part.step_aside(self.session, self.table, self._num_changes, step)

    def come_back(self, minibatch: int) -> None:
        """Returns to the steps; forgets all pushes and pulls, so the weights have to be pulled.

        Args:
            minibatch: All minibatches before it are in the weights that the job had to begin with.
        """
        taking_part.come_back(self.session, self.table, self._num_changes, minibatch)
        self.restart()

    # ----- loading

    def load(
        self, index: int, role: Role, arrays: list[FloatArray], counts: list[int], step: int = 0
    ) -> None:
        """Uploads the weights of one slice at a step, or its weights and state."""
        header = data_pb2.PushHeader(
            sender=self._sender(),
            slice=index,
            step=step,
            role=data_pb2.Role.Name(int(role)),
            counts=counts,
        )
        parts = [wire.as_bytes(np.ascontiguousarray(array)) for array in arrays]
        self.refills.require_whole(index)
        self.acknowledged(index)
        self._send(index, OutgoingPush(header=header, payload=lambda: parts))

    # ----- error feedback

    def compressor_state(self) -> dict[str, FloatArray]:
        """Returns the state of error feedback, `(layout.numel,)` each; pushes must be flushed."""
        return self.payloads.state()

    def load_compressor_state(self, state: Mapping[str, FloatArray]) -> None:
        """Replaces the state of error feedback; it is the same for any number of shards."""
        self.payloads.load(state)

    def _make_estimates(self) -> list[PulledEstimate | None]:
        """Returns each slice's estimate; None where pulls are not compressed."""
        who = f"worker {self.session.rank}"
        return [
            PulledEstimate(self.spec.pull_compressor, spec.numel, f"slice {spec.index} of {who}")
            if spec.compress and self.compresses_pulls
            else None
            for spec in self.layout.slices
        ]

    def _send(self, index: int, outgoing: OutgoingPush, nbytes: int = 0) -> None:
        """Sends a push, whose gradient has `nbytes`."""
        self.refills.keep(index, outgoing)
        self._pushes[index] = outgoing.done
        self.session.pace.follow(outgoing.done)
        self._transport(index, nbytes).push(outgoing)

    def _request(self, index: int, call: PullCall, pull_buffer: PullBuffer) -> None:
        """Sends a pull, and takes it for the last one of its slice."""
        self._pulls[index] = call, pull_buffer
        self.session.pace.follow(call.done)
        self._transport(index).pull(call)

    def _transport(self, index: int, nbytes: int = 0) -> Transport:
        """Returns the data plane of a slice; its next request has a gradient of `nbytes`."""
        self.session.require_own()
        transport = self.session.links[self.layout.slices[index].shard].transport
        self.together.note(transport, nbytes)
        return transport

    def _pull_header(
        self, index: int, pull_buffer: PullBuffer, *, with_state: bool
    ) -> data_pb2.PullHeader:
        sender = self._sender()

        def make() -> data_pb2.PullHeader:
            return data_pb2.PullHeader(
                sender=sender,
                slice=index,
                with_state=with_state,
                wait_ms=WAIT_MS,
                begins=pull_buffer.begins,
                look=pull_buffer.is_look,
            )

        about = sender, with_state, pull_buffer.begins, pull_buffer.is_look
        return self._pull_headers.copy(index, about, make)

    def _sender(self) -> data_pb2.Sender:
        """Returns the table and this worker as they stand in messages; not to be changed."""
        session = self.session
        now = session.job, self.table, session.rank, session.incarnation
        if now != self._known_as[0]:
            job, table, worker, incarnation = now
            self._known_as = (
                now,
                data_pb2.Sender(job=job, table=table, worker=worker, incarnation=incarnation),
            )
        return self._known_as[1]


def _is_answered(push: Future[data_pb2.PushReply]) -> bool:
    return push.done() and push.exception() is None
