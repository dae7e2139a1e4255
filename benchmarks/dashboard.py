"""CPU that one look of the dashboard costs a shard, with 64 workers on 8 shards.

    python -m benchmarks.dashboard --json

The workers are memberships without a process: each has joined every shard, has reported three
values and its pace, and sends nothing more. Then the shards are left alone for a while, and after
that they are asked without a pause, as `psserver dashboard` asks them; the difference of their CPU
times over the number of looks is the cost of one. A page asks once a second. The result is in
docs/results/dashboard.json.

`--poll-s 3600` starts `psserver dashboard` itself besides, asks its page once a second as a browser
does, for an hour, and measures the CPU of each shard, and the CPU and memory of the page's process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks import kit
from pscore.net import wire
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from psserver.dashboard.history import History
from psserver.dashboard.watch import Asker, ShardWatch

RESULT = Path(__file__).parents[1] / "docs" / "results" / "dashboard.json"
SHARDS, WORKERS = 8, 64
LEASE_S = 3000.0
ANSWER_S = 30.0
TENSORS = 40  # Of the model, so that each shard has several slices.


def psserver(folder: str, *words: str) -> str:
    """Runs a command of psserver to its end; returns what it has printed."""
    line = [sys.executable, "-m", "psserver", *words, "--state-dir", folder]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def join(addresses: list[str]) -> None:
    """Makes the workers members of one job on all shards, with a table and reports."""
    tensors = [pb.Tensor(name=f"w{n}", shape=[256, 256], dtype="float32") for n in range(TENSORS)]
    table = pb.Table(
        name="model",
        tensors=tensors,
        num_shards=len(addresses),
        rule=pb.Plugin(name="ssgd", arguments="{}"),
        compressor=pb.Plugin(name="none"),
        optimizer="sgd",
        num_groups=1,
    )
    for address in addresses:
        with ANYONE.channel(address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            life = 0
            for rank in range(WORKERS):
                about: dict[str, Any] = {"job": "watched", "incarnation": 100 + rank}
                control.Join(
                    pb.JoinRequest(
                        **about, rank=rank, num_workers=WORKERS, host=f"host{rank}", pid=rank + 1,
                        protocol=wire.PROTOCOL, life=life,
                    ),
                    timeout=ANSWER_S,
                )  # fmt: skip
                if rank == 0:
                    request = pb.DefineRequest(**about, worker=0, table=table)
                    control.Define(request, timeout=ANSWER_S)
                values = {"loss": 0.5, "tokens": 1e6, "tokens_per_s": 1e4}
                pace = pb.Pace(num_steps=1000, steps_s=250.0, waits_s=50.0, requests_s=200.0)
                beat = pb.HeartbeatRequest(**about, worker=rank, reported=values, pace=pace)
                control.Heartbeat(beat, timeout=ANSWER_S)


def cpu_s(pids: list[int]) -> list[float]:
    """Returns the CPU seconds of processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return [each.user + each.system for each in times]


def poll(folder: str, pids: list[int], seconds: float) -> dict[str, Any]:
    """Asks the page of a real dashboard once a second; returns shares of a core and memory."""
    line = [sys.executable, "-m", "psserver", "dashboard", "--state-dir", folder]
    page = subprocess.Popen([*line, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        found = re.search(r":(\d+)", page.stdout.readline())
        assert found is not None
        port = int(found[1])
        view_of(port, ANSWER_S)
        own = psutil.Process(page.pid)
        before, before_s, before_mb = cpu_s([*pids, page.pid]), time.monotonic(), mb(own)
        views = 0
        while (now_s := time.monotonic()) < before_s + seconds:
            views += len(view_of(port, ANSWER_S)["status"]["jobs"][0]["workers"]) == WORKERS
            time.sleep(max(0.0, now_s + 1.0 - time.monotonic()))
        took_s = time.monotonic() - before_s
        *shards, its = (
            100 * (b - a) / took_s for a, b in zip(before, cpu_s([*pids, page.pid]), strict=True)
        )
        return {
            "seconds": round(took_s),
            "views": views,
            "shard_percent_of_core": {
                "median": round(kit.median(shards), 3),
                "max": round(max(shards), 3),
            },
            "page_percent_of_core": round(its, 3),
            "page_mb": {"start": round(before_mb, 1), "end": round(mb(own), 1)},
        }
    finally:
        page.terminate()
        page.wait()


def view_of(port: int, patience_s: float) -> Any:
    """Returns what the page asks for, as soon as the page is served."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/view", timeout=10) as reply:
                found = json.load(reply)
            if found["status"]:
                return found
        except OSError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.2)


def mb(process: psutil.Process) -> float:
    """Returns the resident memory of a process in MB."""
    return float(process.memory_info().rss) / 1e6


def measure(seconds: float, poll_s: float) -> dict[str, Any]:
    """Returns the cost of a look; the shards are alone, and then asked, for `seconds` each."""
    with tempfile.TemporaryDirectory() as folder:
        ready = psserver(
            folder, "start", "--shards", str(SHARDS), "--port", "0", "--lease-s", str(LEASE_S),
            "--metrics-port", "0", "--durability", "memory", "--detach",
        )  # fmt: skip
        addresses = ready.strip().splitlines()[-1].partition("=")[2].split(",")
        try:
            join(addresses)
            history = History()
            watch = ShardWatch(Asker(addresses, ANYONE), history)
            watch.look()
            status = history.view()["status"]
            assert len(status["jobs"][0]["workers"]) == WORKERS
            pids = [shard["pid"] for shard in status["shards"]]
            start = cpu_s(pids)
            time.sleep(seconds)
            alone = cpu_s(pids)
            num_looks, end_s = 0, time.monotonic() + seconds
            while time.monotonic() < end_s:
                watch.look()
                num_looks += 1
            asked = cpu_s(pids)
            watch.end()
            polled = {"poll": poll(folder, pids, poll_s)} if poll_s else {}
        finally:
            psserver(folder, "stop")
    costs = [(c - b) - (b - a) for a, b, c in zip(start, alone, asked, strict=True)]
    return {
        "shards": SHARDS,
        "workers": WORKERS,
        "looks": num_looks,
        "seconds": seconds,
        "look_ms": {
            "median": round(1e3 * kit.median(costs) / num_looks, 3),
            "max": round(1e3 * max(costs) / num_looks, 3),
        },
        "alone_percent_of_core": round(
            100 * kit.median([b - a for a, b in zip(start, alone, strict=True)]) / seconds, 3
        ),
        "machine": kit.machine(),
        "commit": kit.commit(),
        **polled,
    }


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the two parts")
    parser.add_argument("--poll-s", type=float, default=0.0, help="of a real dashboard")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    found = measure(args.seconds, args.poll_s)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    look = found["look_ms"]
    columns = ("shards", "workers", "looks", "ms of a look", "% of a core at 1 a second")
    row = (SHARDS, WORKERS, found["looks"], look["median"], look["median"] / 10)
    kit.show("CPU of a shard for one look of the dashboard", columns, [row])
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
