"""Published weights: torn versions, bytes, refresh and pause, and their cost to training.

    python -m benchmarks.publish --quick --json                          # under 5 minutes
    python -m benchmarks.publish --only cost --out FILE                  # keeps the others

`--by NAME` measures `torn` with one way of training only, and keeps the others of the file. Each
takes some minutes, or with `--quick` one; each other part but `joins` takes less than 4.

Times are of hosts with links of 1 Gbit/s (`benchmarks/netlab.py`, needs root; else loopback): the
shards on one host with the publisher, the trainer on another, each of 8 readers on its own.

    commits, torn     versions that 4 readers, two of them behind a relay, take of arrays that are
                      full of their step, while shards, relay and readers are killed; in turn a
                      `Publisher` and the modes of `FILLED` fill them (`--quick`: the first); one
                      that is older than the one before, or not full of its step, is torn and makes
                      the exit code 1
    smaller_than_bf16 AdamW on a transformer of 10.9 million weights (`--quick`: 0.5) on our docs,
                      at three learning rates: bytes of all bfloat16 weights over bytes of the
                      deltas, from one step to the next
    refresh_ms        with 1 % of the elements changed, from the end of `Publisher.publish` to the
                      commit of the last of 8 readers; `whole` for one that begins; `relayed`
                      with all elements changed, for 8 readers on the host of a relay
    pause_ms          `commit` into a torch module, of the same change; `flip_ms` without one
    training_cost     step time with 8 readers over that with none, less 1; 300 ms a step, and 1 %
                      of the bfloat16 weights change in it; `relayed` behind a relay
    joins             readers that join, get all weights and leave during such steps, 2.7 a second,
                      those of a shard together at most at 4.5 % of the link (`--publish-mbit`);
                      `p99` is the share that they add to the 99th percentile of the step time, over
                      steps of the same training in pauses of the readers; 9 minutes
    beside            the same weights in ms for one reader, all of them: a file of safetensors
                      over HTTP and loaded, `torch.save` over HTTP, a broadcast of Gloo; `xor`:
                      1 % changed, as the exclusive or of both versions in zlib over HTTP
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import io
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kit, measured, netlab
from pscore.json_text import to_json
from pscore.publish import codec
from psserver.process.embedded import start_embedded

MODULE = "benchmarks.publish"
RATES = ("3e-6", "1e-5", "1e-4")
WAIT_S = 120.0
CHANGED = 100  # One element of so many.
NUM_READERS = 8
RELAYED, RELAY_PORT = 5, 24_700  # Changes through a relay, behind the first, and its port.
COMPUTE_S, STEP_S = 0.3, 0.37
RATE = "1gbit"
COMMITS_PER_KILL, LOOK_S = 400, 0.05
COUNTED = 20  # Versions that a reader takes between two reports.
COMMITS, QUICK_S = 100_000, 40.0  # Processes are killed until readers have taken so many.
KILLED = ("shard", "relay", "reader")
PUBLISHER = "publisher"
FILLED = {  # Modes, by name; none for a `Publisher`.
    PUBLISHER: "",
    "ssgd": "ssgd",
    "ssd": "ssd(steps=2, warmup=1)",
    "diloco": "diloco(steps=2, warmup=1, outer_lr=1.0, outer_momentum=0.0)",
}
CYCLE = 200  # Whole numbers below 256 are exact in bfloat16.
COST_NUMEL = 2_000_000  # The trainer sends and gets them within a third of a step.
NUM_JOINING, JOINS, QUICK_JOINS = 4, 1000, 100  # Hosts whose readers come and go, and how often.
JOIN_EVERY_S, AT_ONCE, PAUSE_S = 1.5, 25, 16.0  # On each host; after so many there are none.
JOIN_MBIT = 45  # `--publish-mbit`: to all readers of each of two shards on one link.
LR = 1e-6  # With weights around 0.02 it changes about 1 % of them in bfloat16.


# ----- processes


def serve(host: str) -> None:
    """Runs two shards until it is told to end."""
    with start_embedded(2, host=host) as shards:
        print(json.dumps({"addresses": shards.addresses}), flush=True)
        sys.stdin.readline()


def fill(numel: int, num_arrays: int, mode: str) -> None:
    """Publishes arrays that are full of the step, until it is told to end.

    Args:
        mode: That in which a worker trains them; empty: a `Publisher` publishes them.
    """
    import torch

    import psworker

    psworker.init()
    arrays = {f"w{index}": torch.zeros(numel) for index in range(num_arrays)}
    publish = psworker.Publisher(arrays).publish if not mode else _trained(arrays, mode)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    step = 0
    while not over.is_set():
        step += 1
        for array in arrays.values():
            array.fill_(step % CYCLE)
        publish(step)
    psworker.shutdown()


def _trained(arrays: dict[str, Any], mode: str) -> Callable[[int], None]:
    """Returns the step of a worker with which the weights become full of the step's number."""
    import torch

    import psworker

    named = [(name, torch.nn.Parameter(array.clone())) for name, array in arrays.items()]
    weights = [one for _, one in named]
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), named_parameters=named, mode=mode, publish_every=1
    )

    def make_step(step: int) -> None:
        for one in weights:
            one.grad = torch.full_like(one, (step - 1) % CYCLE - step % CYCLE)
        optimizer.step()

    return make_step


def take() -> None:
    """Reads versions of `fill`, and reports how many, and how many were mixed or older."""
    import psworker

    subscriber = psworker.Subscriber()
    weights, torn = subscriber.wait(timeout_s=WAIT_S), 0
    while True:
        for _ in range(COUNTED):
            former = weights.version
            weights = subscriber.wait(newer_than=former, timeout_s=WAIT_S)
            values = np.concatenate(list(weights.arrays.values()))
            is_mixed = not bool((values == weights.step % CYCLE).all())
            torn += is_mixed or weights.version <= former
        print(json.dumps({"commits": COUNTED, "torn": torn}), flush=True)
        torn = 0


def change(numel: int) -> None:
    """Publishes one array with some elements changed, or `all`, each time that it is told to."""
    import psworker

    psworker.init()
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal(numel).astype(np.float32)}
    publisher = psworker.Publisher(arrays)
    print("{}", flush=True)
    step = 0
    while (told := sys.stdin.readline().strip()) in ("go", "all"):
        step += 1
        if told == "all":
            arrays["w"] *= np.float32(-1.01)
        else:
            arrays["w"][rng.integers(0, numel, numel // CHANGED)] *= np.float32(1.01)
        publisher.publish(step)
        print(json.dumps({"end_s": time.monotonic()}), flush=True)


def follow(numel: int, has_module: bool) -> None:
    """Reads each version of `change`, and reports the moment and the length of its commit."""
    import psworker

    module: Any = None
    if has_module:
        import torch

        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.zeros(numel))
    with psworker.Subscriber() as early:  # Loads all code.
        early.wait(timeout_s=WAIT_S)
    measured.await_go()
    begin_s = time.monotonic()
    subscriber = psworker.Subscriber(dtype="bf16")
    weights = subscriber.wait(timeout_s=WAIT_S)
    print(json.dumps({"whole_ms": 1e3 * (time.monotonic() - begin_s)}), flush=True)
    if has_module:
        subscriber.into(module)
    while True:
        subscriber.stage(newer_than=weights.version)
        staged_s = time.monotonic()
        weights = subscriber.commit()
        end_s = time.monotonic()
        print(json.dumps({"end_s": end_s, "pause_ms": 1e3 * (end_s - staged_s)}), flush=True)


def train(numel: int, steps: int) -> dict[str, Any]:
    """Trains one array, and returns the median step time, and begin and end of each step, in s."""
    import torch

    import psworker

    torch.set_num_threads(1)
    weights = torch.nn.Parameter(0.02 * torch.randn(numel))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=LR), named_parameters=[("w", weights)]
    )
    grad = torch.randn(numel)
    measured.await_go()
    times = []
    for _ in range(steps):
        begin_s = time.monotonic()
        time.sleep(COMPUTE_S)
        weights.grad = grad.clone()
        optimizer.step()
        times.append((begin_s, time.monotonic()))
    psworker.shutdown()
    taken_s = [end_s - begin_s for begin_s, end_s in times[measured.WARM_ROUNDS :]]
    return {"step_s": kit.median(taken_s), "times": times}


def join(joins: int) -> dict[str, Any]:
    """Reads one version with each of many readers, which come at even intervals and leave.

    Returns:
        `times`: begin and end of each in seconds.
    """
    import psworker

    # Readers have machines of their own; here they share two cores with the trainer and shards.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    measured.await_go()
    begin_s, times = time.monotonic(), []
    for number in range(joins):
        due_s = begin_s + number * JOIN_EVERY_S + number // AT_ONCE * PAUSE_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        come_s = time.monotonic()
        with psworker.Subscriber(dtype="bf16") as subscriber:
            subscriber.wait(timeout_s=WAIT_S)
        times.append((come_s, time.monotonic()))
    return {"times": times}


def read() -> None:
    """Reads versions until it is killed."""
    import psworker

    subscriber = psworker.Subscriber(dtype="bf16")
    weights = subscriber.wait()
    print("{}", flush=True)
    while True:
        weights = subscriber.wait(newer_than=weights.version)


class _Given(http.server.BaseHTTPRequestHandler):
    """Answers `/safetensors` and any other path with the weights, as they are saved then."""

    values: Any = None
    versions: Any = None  # Two, as bits of bfloat16.

    def do_GET(self) -> None:
        """Answers with a file."""
        import torch
        from safetensors.torch import save

        file = io.BytesIO()
        if self.path == "/safetensors":
            file.write(save({"w": self.values}))
        elif self.path == "/xor":
            file.write(zlib.compress(np.bitwise_xor(*self.versions), level=1))
        else:
            torch.save({"w": self.values}, file)
        self.send_response(200)
        self.send_header("Content-Length", str(file.tell()))
        self.end_headers()
        self.wfile.write(file.getvalue())

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def give(host: str, numel: int) -> None:
    """Serves weights over HTTP until it is told to end."""
    import torch

    _Given.values = torch.zeros(numel, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(numel).astype(np.float32)
    former = codec.round_to_bf16(weights)
    weights[rng.integers(0, numel, numel // CHANGED)] *= np.float32(1.01)
    _Given.versions = former, codec.round_to_bf16(weights)
    server = http.server.ThreadingHTTPServer((host, 0), _Given)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_port}), flush=True)
    sys.stdin.readline()


def get(url: str, numel: int, rounds: int) -> dict[str, float]:
    """Returns the milliseconds in which weights come over HTTP and are in place."""
    import torch
    from safetensors.torch import load

    target = torch.zeros(numel, dtype=torch.bfloat16)

    def fetched(path: str) -> bytes:
        with urllib.request.urlopen(f"{url}/{path}") as answer:
            content: bytes = answer.read()
        return content

    def by_safetensors() -> None:
        target.copy_(load(fetched("safetensors"))["w"])

    def by_torch() -> None:
        target.copy_(torch.load(io.BytesIO(fetched("torch")))["w"])

    bits = np.zeros(numel, dtype=np.uint16)

    def by_xor() -> None:
        np.bitwise_xor(bits, np.frombuffer(zlib.decompress(fetched("xor")), np.uint16), out=bits)

    ways = {"safetensors": by_safetensors, "http": by_torch, "xor": by_xor}
    return {name: _ms(way, rounds) for name, way in ways.items()}


def broadcast(rank: int, host: str, port: int, numel: int, rounds: int) -> dict[str, Any]:
    """Broadcasts bfloat16 by Gloo, and returns the milliseconds of a round."""
    import torch
    from torch import distributed

    where = f"tcp://{host}:{port}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    values = torch.zeros(numel, dtype=torch.bfloat16)

    def one_round() -> None:
        distributed.broadcast(values, 0)
        distributed.barrier()

    return {"ms": _ms(one_round, rounds)}


def _ms(call: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin_s))
    return round(kit.median(times), 2)


ROLES: dict[str, Callable[..., Any]] = {
    role.__name__: role
    for role in (serve, fill, take, change, follow, train, join, read, give, get, broadcast)
}


# ----- hosts


class Hosts:
    """Hosts with links of 1 Gbit/s; without a lab, this machine."""

    def __init__(self, lab: netlab.Lab | None) -> None:
        """Uses the lab."""
        self._lab = lab

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return "127.0.0.1" if self._lab is None else self._lab.address(host)

    def start(
        self, host: int, role: str, env: dict[str, str] | None = None, /, **given: Any
    ) -> Any:
        """Starts a role on a host."""
        return kit.Role(MODULE, role, given, env, self.inside(host))

    def inside(self, host: int) -> list[str]:
        """Returns the words before a command that runs on a host."""
        return [] if self._lab is None else self._lab.inside(host)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """Yields so many hosts."""
    if netlab.available() is not None:
        yield Hosts(None)
        return
    with netlab.Lab(number, RATE) as lab:
        yield Hosts(lab)


# ----- cases


class _Readers:
    """Readers in processes of their own, whose reports are counted."""

    def __init__(self, places: list[list[str]]) -> None:
        """Starts one for each list of servers."""
        self.commits = self.torn = 0
        self._places = places
        self._roles: list[kit.Role] = []
        self._lock = threading.Lock()
        for servers in places:
            self._roles.append(self._start(servers))

    def _start(self, servers: list[str]) -> kit.Role:
        role = kit.Role(MODULE, "take", {}, kit.worker_environment(servers, 0, 1, "tcp", "torn"))
        threading.Thread(target=self._count, args=(role,), daemon=True).start()
        return role

    def _count(self, role: kit.Role) -> None:
        with contextlib.suppress(RuntimeError):  # It was killed.
            while True:
                said = role.line()
                with self._lock:
                    self.commits += said["commits"]
                    self.torn += said["torn"]

    def kill(self, index: int) -> None:
        """Kills a reader, and starts another in its place."""
        self._roles[index].popen.kill()
        self._roles[index] = self._start(self._places[index])

    def advance(self, publisher: kit.Role, end_s: float) -> bool:
        """Waits for some versions; returns whether they have come before `end_s`.

        Raises:
            RuntimeError: A process has ended by itself.
        """
        wanted = self.commits + COMMITS_PER_KILL
        while time.monotonic() < end_s and self.commits < wanted:
            time.sleep(LOOK_S)
            for role in (publisher, *self._roles):
                if role.popen.poll() is not None:
                    raise RuntimeError(f"{role.what} has ended: {role.written()[-2000:]}")
        return self.commits >= wanted

    def end(self) -> None:
        """Kills all."""
        for role in self._roles:
            role.popen.kill()


def torn(*, is_quick: bool, ways: Iterable[str] = ()) -> dict[str, Any]:
    """Counts versions that readers take while all but the publisher are killed.

    Args:
        ways: Names in `FILLED`; none: all, or the first of a quick run.
    """
    ways = ways or (FILLED if not is_quick else [PUBLISHER])
    return _summed({way: torn_by(way, is_quick) for way in ways})


def _summed(by: dict[str, Any]) -> dict[str, Any]:
    """Returns the counts of each way of training, and their sums."""
    sums = {name: sum(one[name] for one in by.values()) for name in ("commits", "torn")}
    kills = {what: sum(one["kills"][what] for one in by.values()) for what in KILLED}
    return {**sums, "kills": kills, "by": by}


def torn_by(way: str, is_quick: bool) -> dict[str, Any]:
    """Counts versions of one way of training."""
    kills = dict.fromkeys(KILLED, 0)
    draw = random.Random(way)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = _supervised(folder)
        stack.callback(os.kill, run["pid"], signal.SIGTERM)
        env = kit.worker_environment(run["addresses"], 0, 1, "tcp", "torn")
        given = {"numel": 10_000, "num_arrays": 4, "mode": FILLED[way]}
        publisher = kit.Role(MODULE, "fill", given, env)
        stack.enter_context(kit.roles(publisher))
        port = _free_pair()
        words = ["relay", "--job", "torn", "--servers", ",".join(run["addresses"])]
        command = [sys.executable, "-m", "psserver", *words, "--listen", f"127.0.0.1:{port}"]
        relay = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(lambda: relay.kill())
        behind = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        readers = _Readers([run["addresses"], behind] * 2)
        stack.callback(readers.end)
        readers.advance(publisher, math.inf)  # On a busy machine processes start for long.
        end_s = time.monotonic() + (QUICK_S if is_quick else math.inf)
        while readers.commits < COMMITS // len(FILLED) and readers.advance(publisher, end_s):
            what = draw.choice(sorted(kills))
            kills[what] += 1
            if what == "shard":
                shard = draw.choice(read_run(folder)["shards"])
                if shard["pid"] is not None:  # None while it is away.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(shard["pid"], signal.SIGKILL)
            elif what == "reader":
                readers.kill(draw.randrange(4))
            else:
                relay.kill()
                relay.wait()
                relay = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    return {"commits": readers.commits, "torn": readers.torn, "kills": kills}


def _free_pair() -> int:
    """Returns the first of two free ports in a row."""
    for port in range(24_000, 60_000, 17):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise RuntimeError("no free ports")


def _supervised(folder: str) -> dict[str, Any]:
    """Starts two shards that are started again when they die; returns their run file."""
    env = {**os.environ, "XDG_RUNTIME_DIR": folder}
    command = [sys.executable, "-m", "psserver", "start", "--port", "0", "--shards", "2"]
    subprocess.run([*command, "--detach"], env=env, check=True, capture_output=True)
    return read_run(folder)


def read_run(folder: str) -> dict[str, Any]:
    """Returns the only run file below a folder."""
    (path,) = Path(folder).rglob("run.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def smaller(*, is_quick: bool) -> dict[str, Any]:
    """Returns how often the deltas are smaller than all weights in bfloat16, by learning rate."""
    given = (128, 2, 12) if is_quick else (384, 6, 40)
    return {"smaller_than_bf16": {rate: smaller_at(rate, *given) for rate in RATES}}


def smaller_at(rate: str, width: int, layers: int, steps: int) -> float:
    """Returns bytes of bfloat16 over bytes of deltas, of a transformer that AdamW trains."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(2)
    text = b" ".join(path.read_bytes() for path in sorted((kit.ROOT / "docs").glob("*.md")))
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layer = torch.nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(256, width),
            "body": torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            "head": torch.nn.Linear(width, 256),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
    bits = codec.round_to_bf16(_flat(model))
    ratios = []
    for step in range(60 + steps):
        if step == 60:  # The transformer has begun to learn, at a usual rate.
            optimizer.param_groups[0]["lr"] = float(rate)
        begin = torch.randint(len(codes) - 65, (8,))
        rows = torch.stack([codes[at : at + 65] for at in begin])
        hidden = model["body"](model["embed"](rows[:, :-1]), mask=mask, is_causal=True)
        scores = model["head"](hidden).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        delta = codec.move(bits, _flat(model))
        if step > 60:
            ratios.append(bits.nbytes / max(1, delta.payload.nbytes))
    return round(kit.median(ratios), 1)


def _flat(model: Any) -> np.ndarray:
    parts = [one.detach().numpy().reshape(-1) for one in model.parameters()]
    return np.concatenate(parts)


def refresh(*, is_quick: bool) -> dict[str, Any]:
    """Measures a change from its publication to the commits of readers, and the commit alone."""
    numel, rounds = size_of(is_quick)
    with hosts(1 + NUM_READERS) as lab, contextlib.ExitStack() as stack:
        shards = lab.start(0, "serve", host=lab.address(0))
        stack.enter_context(kit.roles(shards))
        servers = shards.line()["addresses"]
        env = kit.worker_environment(servers, 0, 1, "auto", "refresh")
        publisher = lab.start(0, "change", env, numel=numel)
        stack.enter_context(kit.roles(publisher))
        publisher.line()
        places = range(1, 1 + NUM_READERS)
        whole_ms, deltas, pauses = _follow(lab, env, places, publisher, numel, ["go"] * rounds)
        with _relay(lab, 1, servers, "refresh") as addresses:
            env |= {"PACELINE_SERVERS": ",".join(addresses)}
            told = ["all"] * (1 + RELAYED)
            _, relayed, _ = _follow(lab, env, [1] * NUM_READERS, publisher, numel, told)
    return {
        "refresh_ms": {
            "delta": round(kit.median(deltas), 2),
            "whole": round(whole_ms, 2),
            "relayed": round(kit.median(relayed[1:]), 2),
        },
        "pause_ms": round(kit.median([into for into, *_ in pauses]), 3),
        "flip_ms": round(kit.median([one for _, *flips in pauses for one in flips]), 3),
        "numel": numel,
    }


def _follow(
    lab: Hosts,
    env: dict[str, str],
    places: Iterable[int],
    publisher: kit.Role,
    numel: int,
    told: Iterable[str],
) -> tuple[float, list[float], list[list[float]]]:
    """Returns milliseconds: for all weights, for each change, and of each reader's commit of it.

    Args:
        places: Host of each reader; the first has a module.
        told: Changes that the publisher is told to make.
    """
    deltas, pauses = [], []
    with contextlib.ExitStack() as stack:
        readers: list[kit.Role] = []
        for host in places:
            given = {"numel": numel, "has_module": not readers}
            readers.append(lab.start(host, "follow", env, **given))
            stack.enter_context(kit.roles(readers[-1]))
        for reader in readers:
            reader.line()  # It is ready.
        for reader in readers:
            reader.tell()
        whole_ms = max(reader.line()["whole_ms"] for reader in readers)
        for change in told:
            publisher.tell(change)
            end_s = publisher.line()["end_s"]
            said = [reader.line() for reader in readers]
            deltas.append(1e3 * (max(one["end_s"] for one in said) - end_s))
            pauses.append([one["pause_ms"] for one in said])
    return whole_ms, deltas, pauses


@contextlib.contextmanager
def _relay(lab: Hosts, host: int, servers: Sequence[str], job: str) -> Iterator[list[str]]:
    """Runs a relay on a host; yields its addresses."""
    words = ["relay", "--job", job, "--servers", ",".join(servers), "--insecure"]
    words += ["--listen", f"{lab.address(host)}:{RELAY_PORT}"]
    command = [*lab.inside(host), sys.executable, "-m", "psserver", *words]
    relay = subprocess.Popen(command, cwd=kit.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        yield relay.stdout.readline().strip().partition("=")[2].split(",")
    finally:
        relay.kill()
        relay.wait()


def training_cost(*, is_quick: bool) -> dict[str, Any]:
    """Returns the share that 8 readers add to the time of a step, by K."""
    steps = 30 if is_quick else 60
    none_s = _step_s(0, steps)
    cost = {f"k{every}": round(_step_s(every, steps) / none_s - 1, 4) for every in (4, 1)}
    relayed = {
        f"k{every}": round(_step_s(every, steps, is_relayed=True) / none_s - 1, 4)
        for every in ((1,) if is_quick else (4, 1))
    }
    return {"training_cost": cost, "relayed_cost": relayed, "step_s": round(none_s, 4)}


def _step_s(every: int, steps: int, *, is_relayed: bool = False) -> float:
    """Returns the median step time in seconds while 8 readers read; with `every` 0 there is none.

    Args:
        is_relayed: Whether they read from a relay, on the host of the first.
    """
    with contextlib.ExitStack() as stack:
        training = _training(2 + NUM_READERS, every, steps)
        lab, env, trainer = stack.enter_context(training)
        if is_relayed:
            servers = env["PACELINE_SERVERS"].split(",")
            behind = stack.enter_context(_relay(lab, 2, servers, env["PACELINE_JOB"]))
            env = env | {"PACELINE_SERVERS": ",".join(behind)}
        places = range(2, 2 + NUM_READERS if every else 2)
        readers = [lab.start(host, "read", env) for host in places]
        stack.enter_context(kit.roles(*readers))
        for reader in readers:
            reader.line()
        trainer.tell()
        return float(trainer.result()["step_s"])


@contextlib.contextmanager
def _training(
    num_hosts: int, every: int, steps: int, mbit: int = 0
) -> Iterator[tuple[Hosts, dict[str, str], kit.Role]]:
    """Runs shards and a trainer, which waits to be told; yields hosts, variables and trainer."""
    with hosts(num_hosts) as lab, contextlib.ExitStack() as stack:
        published = {"PACELINE_PUBLISH": f"*:every={every}" if every else ""}
        published["PACELINE_PUBLISH_MBIT"] = str(mbit)
        shards = lab.start(0, "serve", published, host=lab.address(0))
        stack.enter_context(kit.roles(shards))
        env = kit.worker_environment(shards.line()["addresses"], 0, 1, "auto", "cost")
        trainer = lab.start(1, "train", env, numel=COST_NUMEL, steps=steps)
        stack.enter_context(kit.roles(trainer))
        trainer.line()
        yield lab, env, trainer


def joins(*, is_quick: bool) -> dict[str, Any]:
    """Returns how many readers join and leave, and the share that they add to slow steps."""
    each = (QUICK_JOINS if is_quick else JOINS) // NUM_JOINING
    took_s = each * JOIN_EVERY_S + (each // AT_ONCE) * PAUSE_S
    with _training(2 + NUM_JOINING, 4, int(took_s / STEP_S), JOIN_MBIT) as (lab, env, trainer):
        readers = [lab.start(2 + host, "join", env, joins=each) for host in range(NUM_JOINING)]
        with kit.roles(*readers):
            for role in readers:
                role.line()
            for role in (trainer, *readers):
                role.tell()
            steps = trainer.result()["times"][measured.WARM_ROUNDS :]
            stays = [stay for role in readers for stay in role.result()["times"]]
    times: dict[bool, list[float]] = {False: [], True: []}  # By whether a reader was there.
    for begin_s, end_s in steps:
        is_read = any(come_s < end_s and begin_s < gone_s for come_s, gone_s in stays)
        times[is_read].append(end_s - begin_s)
    without_s, with_s = (float(np.percentile(times[is_read], 99)) for is_read in (False, True))
    found = {"number": len(stays), "p99": round(with_s / without_s - 1, 4)}
    return {"joins": {**found, "steps": len(times[True]), "steps_without": len(times[False])}}


def beside(*, is_quick: bool) -> dict[str, Any]:
    """Returns the milliseconds of other ways for the same weights."""
    numel, rounds = size_of(is_quick)
    found: dict[str, float] = {}
    with hosts(2) as lab:
        with kit.roles(lab.start(0, "give", host=lab.address(0), numel=numel)) as (giver,):
            url = f"http://{lab.address(0)}:{giver.line()['port']}"
            with kit.roles(lab.start(1, "get", url=url, numel=numel, rounds=rounds)) as (getter,):
                found |= getter.result()
        given = {"host": lab.address(0), "port": 29511, "numel": numel, "rounds": rounds}
        env = {} if lab.address(0) == "127.0.0.1" else {"GLOO_SOCKET_IFNAME": "net"}
        pair = [lab.start(rank, "broadcast", env, rank=rank, **given) for rank in range(2)]
        with kit.roles(*pair):
            found["gloo"] = max(role.result()["ms"] for role in pair)
    return {"beside": found}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "torn": torn,
    "cost": training_cost,
    "joins": joins,
    "bytes": smaller,
    "refresh": refresh,
    "beside": beside,
}


def size_of(is_quick: bool) -> tuple[int, int]:
    """Returns the number of elements, and of rounds."""
    return (2_000_000, 10) if is_quick else (25_600_000, 30)


def main() -> None:
    """Reads the flags, measures, and prints a table."""
    if measured.serve(sys.argv[1:], ROLES):
        return
    parser = argparse.ArgumentParser(description="Published weights.")
    parser.add_argument("--quick", action="store_true", help="2 million elements, few rounds")
    parser.add_argument("--only", choices=list(MEASURES), help="measure this part")
    parser.add_argument("--by", choices=list(FILLED), help="of `torn`, only this way of training")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    link = RATE if netlab.available() is None else "loopback"
    for name in [args.only] if args.only else MEASURES:
        given = {"ways": [args.by]} if args.by and name == "torn" else {}
        part = MEASURES[name](is_quick=args.quick, **given)
        print(f"{name}: {part}", flush=True)
        if args.only and args.out is not None and args.out.exists():
            found = json.loads(args.out.read_text(encoding="utf-8"))
        if given:
            part = _summed(found.get("by", {}) | part["by"])
        found |= part
        about = {"is_quick": args.quick, "link": link, **kit.describe_run(MODULE)}
        found.setdefault("parts", {})[name] = about
        if args.out is not None:
            args.out.write_text(to_json(found, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(to_json(found))
    sys.exit(bool(found.get("torn")))


if __name__ == "__main__":
    main()
