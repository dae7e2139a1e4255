"""Reads the weights of a job that trains: without a rank, and without torch.

    subscriber = psworker.Subscriber("10.0.0.1:7070,10.0.0.1:7071", job="night")
    weights = subscriber.wait()
    while True:
        serve(weights.arrays)
        weights = subscriber.wait(newer_than=weights.version)

The shards publish bfloat16 (`psserver start --publish night:every=4`). A reader holds one version
of all shards; it fetches the deltas to the next one into memory of its own, compares the
fingerprints of all slices, and only then shows it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from pscore.awake import awake_s
from pscore.errors import ConfigError, DecodeError
from pscore.net.addresses import explain_silence, parse_addresses
from pscore.net.credentials import read_credentials
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2, publish_pb2
from pscore.publish import codec
from pscore.publish.codec import Delta, form_of
from pscore.subscription.assembly import EMPTY, Ask, Assembly, Fetch, WatchFor, WeightsVersion
from pscore.subscription.lines import ANSWER_S, ReaderLine, this_process
from pscore.subscription.memory import VersionMemory
from pscore.subscription.weights import Map, PublishedWeights, named, require_dtype, step_of
from pscore.table_spec import TableSpec
from pscore.types import ByteArray

log = logging.getLogger("paceline")
WAIT_S = 5.0  # One long poll.
FIRST_WAIT_S = 0.3  # One before the table is known.
QUIET_S = 10.0  # Of a wait without an end; then its reason is logged.
TABLE = "model"


class Target(Protocol):
    """A holder of weights that a reader keeps at the version that is committed."""

    def prepare(self, weights: PublishedWeights) -> None:
        """Prepares a version that is about to be committed."""

    def apply(self) -> None:
        """Shows the version that was prepared.

        Raises:
            BrokenModuleError: It holds a part of it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The table behind a version, as the shards describe it."""

    spec: TableSpec
    every: int  # Updates, or seconds, from one version to the next.
    lineages: Sequence[int]  # One of each shard.


class ReaderFollower(Protocol):
    """A holder of the bytes that a reader gets, which passes them on: a relay."""

    def landed(
        self, entry: data_pb2.FetchedSlice, payload: ByteArray, lineages: Sequence[int]
    ) -> None:
        """Keeps the bytes that lead to a version of one slice, while others are on their way.

        Args:
            entry: The slice.
            payload: Its deltas, or all of it in bfloat16; bytes of a larger answer.
            lineages: One of each shard.
        """

    def taken(self, weights: PublishedWeights, source: Source) -> None:
        """Shows a version that all slices have."""


class Reader:
    """A reader of one table; used by one thread at a time."""

    def __init__(
        self,
        servers: str | Iterable[str] | None = None,
        *,
        job: str | None = None,
        table: str = TABLE,
        dtype: str = "float32",
        token_file: str | None = None,
        map: Map | None = None,
        follower: ReaderFollower | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            servers: Addresses of all shards in their order, or of a relay; PACELINE_SERVERS if it
                is not given.
            job: Name of the job; PACELINE_JOB if it is not given.
            table: Name of the table; `model` is that of `DistributedOptimizer`.
            dtype: Type of the arrays: `float32`, `float16`, or `bf16` for `uint16`, the bits that
                travel.
            token_file: File with a token that reads the job (`night:read TOKEN`).
            map: Called with each name and array; returns the names and arrays that take its place,
                for tensors that are fused or named otherwise.
            follower: Gets each version as its bytes have come, for other readers; None: none.

        Raises:
            ConfigError: There is no address or no job, or an argument or file is wrong.
        """
        require_dtype(dtype)
        addresses = parse_addresses(servers or os.environ.get("PACELINE_SERVERS"))
        self.job = job or os.environ.get("PACELINE_JOB") or ""
        if not addresses or not self.job:
            missing = "servers= (PACELINE_SERVERS)" if self.job else "job= (PACELINE_JOB)"
            raise ConfigError(f"a reader of weights needs {missing}")
        credentials = read_credentials(job=self.job, token_file=token_file, reads=True)
        self._reader = this_process(1 + secrets.randbits(62))
        self._lines = [
            ReaderLine(
                address=address,
                index=index,
                num_shards=len(addresses),
                credentials=credentials,
                job=self.job,
                table=table,
            )
            for index, address in enumerate(addresses)
        ]
        self._pool = ThreadPoolExecutor(len(addresses), thread_name_prefix="subscriber")
        self._calls: list[Future[Callable[[], None] | None]] = []  # The newest, one of a shard.
        self._dtype, self._map, self._follower = dtype, map, follower
        self._reader.relays = follower is not None
        self._spec: TableSpec | None = None
        self._every = 0
        self._known = ""  # Fingerprint of the declaration that `_layout` follows from.
        self._layout: Layout | None = None
        self._assembly: Assembly | None = None
        self._memory = VersionMemory(0)
        self._landing = threading.Lock()  # Guards `_assembly` and `_memory` while shards answer.
        self._exact = True
        self._weights: PublishedWeights | None = None
        self._staged: PublishedWeights | None = None
        self._targets: list[Target] = []
        self._told_s, self._told = 0.0, ""  # Time and text of the newest line in the log.

    @property
    def weights(self) -> PublishedWeights | None:
        """The version that was committed last; None: none yet."""
        return self._weights

    @property
    def resyncs(self) -> int:
        """Slices that came whole though this reader had held them."""
        return 0 if self._assembly is None else self._assembly.resyncs

    def wait(
        self, newer_than: WeightsVersion | None = None, timeout_s: float | None = None
    ) -> PublishedWeights:
        """Returns the newest version, which is newer than `newer_than`; waits until there is one.

        Args:
            newer_than: The identity of a version, `weights.version`; None: any version will do.
            timeout_s: The longest wait, in seconds; a silent shard has 1.5 s more, and a time in
                which this process is stopped does not count. None: as long as it takes.

        Raises:
            TimeoutError: There was none in time; the message says what is missing.
            PacelineError: A shard refuses this reader.
        """
        self.stage(newer_than, timeout_s)
        return self.commit()

    def stage(
        self, newer_than: WeightsVersion | None = None, timeout_s: float | None = None
    ) -> WeightsVersion:
        """Fetches and checks the newest version, and prepares it for the targets.

        Arguments, and errors raised, are those of `wait`. `commit` shows the version.
        """
        weights = self._fetch(newer_than, timeout_s)
        if weights is not self._weights:
            for target in self._targets:
                target.prepare(weights)
        self._staged = weights
        return weights.version

    def commit(self) -> PublishedWeights:
        """Shows the version that was staged, in the targets too, and returns it.

        Raises:
            ConfigError: None is staged.
            BrokenModuleError: A target could not be changed; it holds a part of the version.
        """
        if self._staged is None:
            raise ConfigError("no version is staged: call stage() before commit()")
        for target in self._targets:
            target.apply()
        self._weights, self._staged = self._staged, None
        self._reader.lineage, self._reader.number = self._weights.version
        self._reader.resyncs = self.resyncs
        return self._weights

    def keep(self, target: Target) -> None:
        """Shows each version that is committed from now on in a target, and one committed before.

        Raises:
            BrokenModuleError: The target holds a part of it.
        """
        if self._weights is not None:
            target.prepare(self._weights)
            target.apply()
        self._targets.append(target)

    def close(self) -> None:
        """Ends the reading; committed weights stay as they are."""
        if self._reader.leaves:
            return
        self._reader.leaves = True
        if os.getpid() != self._reader.pid:  # It is the other process's that reads.
            return
        list(self._pool.map(lambda line: line.close(self._reader), self._lines))
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----- fetching

    def _fetch(
        self, newer_than: WeightsVersion | None, timeout_s: float | None
    ) -> PublishedWeights:
        """Returns the newest version, newer than `newer_than`."""
        self._require_usable()
        end_s = None if timeout_s is None else awake_s() + timeout_s
        self._await_former(timeout_s)
        self._told_s, self._told = time.monotonic(), ""
        self._memory.prepare()
        looked = False  # Whether each shard has said in this call what it has.
        while True:
            held = self._staged or self._weights
            found = self._take()
            if found is not None:
                held = found
            asks = [self._ask(index) for index in range(len(self._lines))]
            is_over = looked and end_s is not None and awake_s() >= end_s
            if held is not None and (newer_than is None or held.version > newer_than):
                if looked and (is_over or found is not None or not self._expects(asks)):
                    return held
            elif is_over:
                raise TimeoutError(
                    self._missing(newer_than, f"within {timeout_s:g} s", self._reason())
                )
            elif end_s is None:
                self._tell(newer_than)
            if found is not None:
                self._staged = found
            wait_s = WAIT_S if looked else 0.0
            if self._assembly is None:  # A shard may have no slice of the table.
                wait_s = min(wait_s, FIRST_WAIT_S)
            if end_s is not None:
                wait_s = max(0.0, min(wait_s, end_s - awake_s()))
            self._do(asks, wait_s, end_s)
            looked = True

    def _expects(self, asks: list[Ask | None]) -> bool:
        """Returns whether a newer version is there that this reader has not taken yet."""
        if any(isinstance(ask, Fetch) for ask in asks):
            return True
        return self._assembly is not None and self._assembly.whole is not None

    def _require_usable(self) -> None:
        if os.getpid() != self._reader.pid:  # Its threads and connections stayed there.
            raise ConfigError(
                f"process {os.getpid()} was forked from process {self._reader.pid}, which has this "
                "reader: make one in each process"
            )
        if self._reader.leaves:
            raise ConfigError("this reader is closed: make another one")

    def _await_former(self, timeout_s: float | None) -> None:
        """Waits for the calls of a wait that an error or Ctrl-C has ended."""
        patience_s = None if timeout_s is None else timeout_s + ANSWER_S
        if wait_for_all(self._calls, patience_s).not_done:
            raise TimeoutError("a shard has yet to answer a call of the wait before")

    def _take(self) -> PublishedWeights | None:
        assembly = self._assembly
        if assembly is None or assembly.ready is None:
            return None
        assert self._layout is not None
        step, version = assembly.step, assembly.take()
        bits = self._memory.show()
        weights = PublishedWeights(
            version=version,
            step=step_of(self._layout, bits, step),
            exact=self._exact,
            arrays=named(self._layout, bits, self._dtype, self._map),
            bits=bits,
            layout=self._layout,
        )
        if self._follower is not None:
            assert self._spec is not None
            source = Source(spec=self._spec, every=self._every, lineages=assembly.lineages)
            self._follower.taken(weights, source)
        return weights

    def _tell(self, newer_than: WeightsVersion | None) -> None:
        """Logs now and then why a wait without an end lasts, if that is another reason."""
        if time.monotonic() - self._told_s >= QUIET_S:
            self._told_s, former, self._told = time.monotonic(), self._told, self._reason()
            if self._told not in ("", former):
                log.warning("%s", self._missing(newer_than, "yet", self._told))

    def _missing(self, newer_than: WeightsVersion | None, until: str, reason: str) -> str:
        """Returns the sentence that there is no newer version."""
        than = "" if newer_than is None else f" newer than {tuple(newer_than)}"
        return f"no version of job {self.job!r}{than} {until}" + (reason and f": {reason}")

    def _reason(self) -> str:
        """Returns why there is no newer version; empty: the job has not come to it."""
        asked = self._lines
        if self._assembly is not None:  # Other shards have no slice of the table.
            asked = [asked[shard] for shard in sorted(set(self._assembly.shard_of.values()))]
        troubles = [line.trouble for line in asked if line.trouble]
        closed = [line.address for line in asked if "refused" in line.trouble]
        troubles += filter(None, map(explain_silence, closed[:1]))
        return "; ".join(dict.fromkeys(troubles))

    def _ask(self, index: int) -> Ask | None:
        if self._assembly is None:
            return WatchFor(lineage=0, after=EMPTY)
        return self._assembly.next(index)

    def _do(self, asks: list[Ask | None], wait_s: float, end_s: float | None) -> None:
        """Asks the shards, at the same time, and notes what they answer."""
        calls: list[Callable[[], Callable[[], None] | None]] = []
        for index, ask in enumerate(asks):
            if isinstance(ask, Fetch):
                calls.append(partial(self._fetch_from, index, ask, end_s))
            elif ask is not None:
                # Those that have what others lack are asked again at once.
                others = any(isinstance(other, Fetch) for other in asks)
                calls.append(partial(self._watch, index, ask, 0.0 if others else wait_s, end_s))
        self._calls = [self._pool.submit(call) for call in calls]
        for note in [call.result() for call in self._calls]:
            if note is not None:
                note()

    def _watch(
        self, index: int, ask: WatchFor, wait_s: float, end_s: float | None
    ) -> Callable[[], None] | None:
        known = self._known
        reply = self._lines[index].watch(ask, wait_s, known, self._reader, end_s)
        return None if reply is None else partial(self._note_news, index, reply, known)

    def _note_news(self, index: int, reply: publish_pb2.WatchReply, known: str) -> None:
        """Notes the newest version of the table that a shard has now.

        Args:
            known: Fingerprint of the table's declaration that it was asked with.
        """
        if reply.HasField("table"):
            self._follow(TableSpec.from_proto(reply.table))
        elif known != self._known:  # Another shard has a table that has grown.
            return
        if self._assembly is not None:
            self._exact, self._every = reply.exact, reply.every
            self._assembly.seen(index, reply.lineage, reply.newest)

    def _follow(self, spec: TableSpec) -> None:
        """Begins with a table, or with another than before: nothing of it is held."""
        known = spec.fingerprint
        if known == self._known:
            return
        if spec.num_shards != len(self._lines):
            raise ConfigError(
                f"job {self.job!r} has {spec.num_shards} shards, and {len(self._lines)} servers "
                "are given: give all of them, in order"
            )
        self._known, self._spec, self._layout = known, spec, spec.layout()
        taken = None if self._assembly is None else self._assembly.taken
        self._assembly = Assembly(
            shard_of={part.index: part.shard for part in self._layout.slices},
            num_shards=len(self._lines),
            taken=taken,
        )
        self._memory = VersionMemory(self._layout.numel)

    def _fetch_from(self, index: int, ask: Ask | None, end_s: float | None) -> None:
        """Fetches from a shard until it has no more of the version, or time is up."""
        while isinstance(ask, Fetch):
            found = self._lines[index].fetch(ask, self._reader.id, end_s)
            if found is None:
                return
            with self._landing:
                self._note_slices(index, *found)
                ask = self._ask(index)
            if end_s is not None and awake_s() >= end_s:
                return

    def _note_slices(self, index: int, reply: data_pb2.FetchReply, payload: ByteArray) -> None:
        assert self._assembly is not None
        assert self._layout is not None
        begin, landed = 0, 0
        for entry in reply.slices:
            if not 0 <= entry.slice < len(self._layout.slices):
                raise DecodeError(f"shard {index} answers with slice {entry.slice}")
            spec = self._layout.slices[entry.slice]
            nbytes = 2 * spec.numel
            if entry.base != EMPTY:
                nbytes = sum(delta.nbytes for delta in entry.deltas)
            part, begin = payload[begin : begin + nbytes], begin + nbytes
            if self._assembly.expects(index, reply.lineage, entry.slice, entry.base, entry.number):
                landed += 1
                self._land(entry, slice(spec.start, spec.stop), part)
        if not landed:
            self._assembly.missed(index)

    def _land(self, entry: data_pb2.FetchedSlice, place: slice, payload: ByteArray) -> None:
        """Writes a slice into the memory of the next version, and checks its fingerprint."""
        assert self._assembly is not None
        try:
            deltas = [Delta(form=codec.Form.DENSE, payload=payload)]
            if entry.base != EMPTY:
                deltas, begin = [], 0
                for delta in entry.deltas:
                    part = payload[begin : begin + delta.nbytes]
                    deltas.append(Delta(form=form_of(delta.form), payload=part))
                    begin += delta.nbytes
            is_true = self._memory.write(place, deltas) == entry.fingerprint
        except DecodeError:
            is_true = False
        if not is_true:
            self._assembly.broke(entry.slice)
            return
        self._assembly.landed(
            entry.slice, entry.number, entry.fingerprint, entry.step, whole=entry.base == EMPTY
        )
        if self._follower is not None:
            self._follower.landed(entry, payload, self._assembly.lineages)
