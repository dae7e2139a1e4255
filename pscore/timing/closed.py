"""The seconds of a step in closed form, as computing, links and shards allow it.

    ssgd           max(c, g + max(L, Q, P)) + t
    od, ssd, cd    the mean over the period of max(c, L, Q, P, r)
    rounds         (H c + max(L, Q, P) + t) / H;  overlapped  max(H c, L, Q, P) / H
    all-reduce     max(c + v R, f + v (c - f) + R),  R = 2 (N - 1) / N n / b;  NCCL, 2 hosts: n / b

c is the computing of the slowest worker that a step waits for, f its forward part, g the time until
each shard has a first slice, L the payload of the busiest link over its rate, Q the seconds of a
shard's threads, P those of a worker, r a round trip, t the way of a last slice there and back, and
v the share of a bucket of DDP in the model. Bytes between two processes of a host take no link.
`python -m benchmarks.predictions` compares it, and the simulation of every message (pssim/timing),
with runs on shaped links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.partition import SLICE_NUMEL_MAX
from pscore.rules.base import Rule
from pscore.timing.deployment import FORWARD_SHARE, Deployment
from pscore.timing.plans import StepTraffic, mean_of, traffic_by_step, without_warmup

RAW = NoCompression()
COMPUTING, LATENCY = "computing", "round trips"
SHARD_CPU, WORKER_CPU = "shard CPU", "worker CPU"
UPDATE_ARRAYS = 2  # Arrays that a local update reads or writes, beside the weights.
BUCKET_NBYTES = 25 << 20  # DDP's default: as much is exchanged at once.

Parts: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step of a mode, and the parts that it consists of."""

    # Seconds of a step, as a mean over the period of the mode, by the part that they are spent on;
    # time hidden behind another part is not among them.
    parts_s: Parts
    pushed_nbytes: float  # Payload bytes that a worker pushes, as a mean per step.
    pulled_nbytes: float  # The same, of its pulls.

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts_s.values())

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])

    @property
    def waited(self) -> float:
        """Share of a step in which a worker does not compute."""
        computing = sum(s for name, s in self.parts_s.items() if name.startswith(COMPUTING))
        return 1 - computing / self.step_s


def closed_form(deployment: Deployment, rule: Rule, compressor: Compressor = RAW) -> StepTime:
    """Returns the time of a step of a mode behind its warm-up.

    Raises:
        ConfigError: The mode does not fit the number of workers, or its workers exchange models
            with each other, other than by all-reduce.
    """
    if rule.gossip:
        if not rule.alike:
            raise ConfigError(f"no closed form for {rule.name}: its workers mix their models")
        return ring_form(deployment, overlap=False)
    rule = without_warmup(rule)
    rule.require_workers(deployment.num_workers)
    steps = traffic_by_step(deployment.slices, rule, (compressor, RAW), deployment.num_state)
    form = _ClosedForm(deployment, rule, compressor)
    spent: Counter[str] = Counter()  # Seconds of the whole period.
    if rule.outer_optimizer and not any(each.blocks for each in steps):
        spent.update(form.hidden_rounds(steps))
    else:
        for each in steps:
            spent.update(form.round_step(each) if rule.outer_optimizer else form.step(each))
    pushed, pulled = mean_of([(each.pushed, each.pulled) for each in steps])
    return StepTime(
        parts_s={name: seconds / len(steps) for name, seconds in spent.items() if seconds},
        pushed_nbytes=pushed,
        pulled_nbytes=pulled,
    )


def shard_cpu_s(deployment: Deployment, rule: Rule) -> float:
    """Returns the seconds of a step that the threads of the busiest shard need, hidden or not.

    Raises:
        ConfigError: The mode does not fit the number of workers.
    """
    steps = traffic_by_step(deployment.slices, rule, (RAW, RAW), deployment.num_state)
    pushed, pulled = mean_of([(each.pushed, each.pulled) for each in steps])
    return _ClosedForm(deployment, rule, RAW).shard_s(pushed, pulled)


def ring_form(deployment: Deployment, *, overlap: bool = True) -> StepTime:
    """Returns the time of a step of all-reduce; no shards take part.

    A ring passes each host once, so that hosts of several workers send no byte twice. Between few
    hosts NCCL adds up within each host first (`MachineRates.tree_hosts`).

    Args:
        overlap: Whether buckets are exchanged during backward, as DDP does.
    """
    workers, compute_s = deployment.num_workers, deployment.computing_s()
    nbytes = 2 * (workers - 1) / workers * deployment.nbytes
    hosts = set(deployment.worker_hosts)
    is_far = len(hosts) > 1
    # The ends of the exchange between hosts, of which each sends as much as in a ring.
    ends = len(hosts) if len(hosts) <= deployment.rates.tree_hosts else workers
    far_nbytes = 2 * (ends - 1) / ends * deployment.nbytes
    link_s = far_nbytes / min(map(deployment.payload_rate, hosts)) if is_far else 0.0
    cpu_s = nbytes / deployment.rates.ring
    name, ring_s = ("links", link_s) if link_s >= cpu_s else (WORKER_CPU, cpu_s)
    latency_s = (ends - 1) * deployment.round_trip_s if is_far else 0.0
    share = min(1.0, BUCKET_NBYTES / deployment.nbytes) if overlap else 1.0
    computing = _computing(deployment)
    ready_s = compute_s * (FORWARD_SHARE + (1 - FORWARD_SHARE) * share)
    if compute_s + share * ring_s >= ready_s + ring_s:
        parts = {computing: compute_s, name: share * ring_s, LATENCY: latency_s}
    else:
        parts = {computing: ready_s, name: ring_s, LATENCY: latency_s}
    return StepTime(parts_s=parts, pushed_nbytes=nbytes, pulled_nbytes=nbytes)


class _ClosedForm:
    """The steps of one mode on one deployment."""

    def __init__(self, deployment: Deployment, rule: Rule, compressor: Compressor) -> None:
        self._deployment = deployment
        self._compressor = compressor
        self._has_local = rule.local_update() is not None
        self._by_step = rule.by_step
        workers = deployment.num_workers
        waited_for = rule.fan_in(workers, workers) if rule.by_step else 1
        self._compute_s = deployment.computing_s(waited_for)
        self._computing = _computing(deployment, waited_for)
        self._nbytes = deployment.nbytes
        # A coarse layout has longer slices than a job.
        self._num_slices = max(
            len(deployment.slices), self._nbytes // FLOAT_NBYTES // SLICE_NUMEL_MAX
        )
        shares = deployment.shares()
        self._largest = max(shares)
        share = dict.fromkeys(deployment.hosts, 0.0)  # Share of the model on a host's shards.
        for shard, host in enumerate(deployment.shard_hosts):
            share[host] += shares[shard]
        self._is_spread = len(share) > 1
        number = Counter(deployment.worker_hosts)
        has_shards = set(deployment.worker_hosts) == set(deployment.shard_hosts)
        # Hosts are alike but for few: workers, share, bytes per second and name of the link.
        self._kinds = dict.fromkeys(
            (
                number[host],
                share[host],
                deployment.payload_rate(host),
                self._link(host, "links" if has_shards else "shards' links" if share[host] else ""),
            )
            for host in share
        )

    # ----- steps

    def step(self, step: StepTraffic) -> Parts:
        """Returns the parts of a step of a mode without rounds."""
        name, seconds = self._longest(step.pushed, step.pulled)
        if not step.blocks:
            computing_s = self._compute_s + self._local_s()
            trip_s = self._trip_s()
            if computing_s >= max(seconds, trip_s):
                return {self._computing: computing_s}
            return {name: seconds} if seconds >= trip_s else {LATENCY: trip_s}
        first_s = self._first_s()
        tail = self._tail(step.pushed, name)
        if first_s + seconds <= self._compute_s:
            return {self._computing: self._compute_s} | tail
        return {self._computing: first_s} | tail | {name: seconds + tail.get(name, 0.0)}

    def round_step(self, step: StepTraffic) -> Parts:
        """Returns the same, of a step of a mode with rounds that wait for their answers."""
        if not (step.is_round and step.blocks):
            return {self._computing: self._compute_s}
        name, seconds = self._longest(step.pushed, step.pulled)
        tail = self._tail(step.pushed, name)
        return {self._computing: self._compute_s} | tail | {name: seconds + tail.get(name, 0.0)}

    def hidden_rounds(self, steps: Sequence[StepTraffic]) -> Parts:
        """Returns the same, of a whole period whose rounds are hidden behind computing."""
        pushed = sum(each.pushed for each in steps)
        name, seconds = self._longest(pushed, sum(each.pulled for each in steps))
        computing_s = len(steps) * self._compute_s
        return {self._computing: computing_s} if computing_s >= seconds else {name: seconds}

    # ----- parts

    def _longest(self, pushed: float, pulled: float) -> tuple[str, float]:
        """Returns the part that needs longest for each worker's bytes, and its seconds."""
        deployment, rates = self._deployment, self._deployment.rates
        found = {SHARD_CPU: self.shard_s(pushed, pulled)}
        for here, share, rate, name in self._kinds:
            far = deployment.num_workers - here
            out = here * (1 - share) * pushed + far * share * pulled
            into = here * (1 - share) * pulled + far * share * pushed
            found[name] = max(found.get(name, 0.0), max(out, into) / rate)
        packs = pushed > 0 and not self._compressor.is_raw
        packed_s = self._nbytes / rates.encode if packs else 0.0
        byte_s = 1 / rates.worker + (1 / rates.tls if deployment.tls else 0.0)
        own_s = max(packed_s + pushed * byte_s, pulled * byte_s)  # One thread for each way.
        own_s += self._num_slices * rates.message_s if pushed + pulled else 0.0
        group = deployment.group
        sum_s = 2 * (group - 1) / group * self._nbytes / rates.ring
        found[WORKER_CPU] = own_s / group + (sum_s if pushed else 0.0)
        name = max(found, key=lambda part: found[part])
        return name, found[name]

    def _link(self, host: int, kind: str) -> str:
        """Returns the name of a host's link: hosts of one kind share a name."""
        if self._deployment.link_factors.get(host, 1.0) != 1.0:
            return f"link of host {host}"
        return kind or "workers' links"

    def shard_s(self, pushed: float, pulled: float) -> float:
        """Returns the seconds of the busiest shard's threads."""
        deployment, rates = self._deployment, self._deployment.rates
        workers, nbytes = deployment.num_workers, self._nbytes
        if not pushed + pulled:
            return 0.0
        add_s = pushed / rates.receive
        if pushed and not self._compressor.is_raw:
            add_s = max(add_s, nbytes / rates.decode)
        bytes_s = add_s + pulled / rates.send
        bytes_s += (pushed + pulled) / rates.tls if deployment.tls else 0.0
        update_s = nbytes / rates.update if pushed else 0.0
        message_s = 2 * workers * self._num_slices / deployment.num_shards * rates.message_s
        return (self._largest * (workers * bytes_s + update_s) + message_s) / deployment.threads

    def _tail(self, pushed: float, name: str) -> Parts:
        """Returns the way of a last slice there and back, which nothing is left to hide."""
        deployment, rates = self._deployment, self._deployment.rates
        last = FLOAT_NBYTES * min(
            SLICE_NUMEL_MAX, max(each.numel for each in deployment.slices)
        )  # A coarse layout has longer slices than a job.
        packed = last * min(1.0, pushed / self._nbytes)
        way_s = max(
            (deployment.num_workers - here) * packed / rate
            for here, share, rate, _ in self._kinds
            if share
        )
        shard_s = last / rates.receive + last / rates.update
        found = {SHARD_CPU: shard_s, LATENCY: self._trip_s()}
        found[name] = found.get(name, 0.0) + way_s
        return found

    def _trip_s(self) -> float:
        return self._deployment.round_trip_s if self._is_spread else 0.0

    def _first_s(self) -> float:
        """Returns the seconds from the begin of a step until each shard has a first slice."""
        deployment = self._deployment
        if not (deployment.overlap and self._by_step):
            return self._compute_s
        first = {each.shard: each.numel for each in reversed(deployment.slices)}
        share = sum(first.values()) * FLOAT_NBYTES / self._nbytes
        return self._compute_s * (FORWARD_SHARE + (1 - FORWARD_SHARE) * share)

    def _local_s(self) -> float:
        """Returns the seconds of a local update, which nothing hides."""
        if not self._has_local:
            return 0.0
        return UPDATE_ARRAYS * self._nbytes / self._deployment.rates.local


def _computing(deployment: Deployment, waited_for: int | None = None) -> str:
    """Returns the name of computing: that of one worker, if a step waits for a slow one."""
    slow = {rank: factor for rank, factor in deployment.slow.items() if factor > 1}
    waits = waited_for is None or waited_for > deployment.num_workers - len(slow)
    if not slow or not waits:
        return COMPUTING
    return f"{COMPUTING} of worker {max(slow, key=lambda rank: slow[rank])}"
