"""Published weights: torn versions, bytes, refresh and pause, and their cost to training.

    python -m benchmarks.publish --quick --json                          # under 5 minutes

Shards, trainer and readers are processes of this machine, on loopback, without a limit of the rate.

    commits, torn     readers of arrays that are full of their step, while shards are killed
    smaller_than_bf16 AdamW on a small transformer on our docs, at three learning rates: bytes of
                      all bfloat16 weights over bytes of the deltas, from one step to the next
    refresh_ms        from `Publisher.publish` of arrays with 1 % of the elements changed to the
                      commit of a reader; `whole` for a reader that begins
    pause_ms          `commit` into a torch module, of the same change
    training_cost     step time with 8 readers over that with none, less 1; 300 ms a step
    beside            the same weights in ms, as safetensors by a file, as `torch.save` over HTTP,
                      by a broadcast of Gloo between two processes; always whole
"""

from __future__ import annotations

import argparse
import http.server
import io
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kit, measured
from psserver.process.embedded import start_embedded

MODULE = "benchmarks.publish"
RATES = ("3e-6", "1e-5", "1e-4")
WAIT_S = 120.0
CHANGED = 100  # One element of so many.
NUM_READERS = 8
COMPUTE_S = 0.3


# ----- processes


def fill(numel: int, num_arrays: int) -> None:
    """Publishes arrays that are full of the step, until it is told to end."""
    import psworker

    psworker.init()
    arrays = {f"w{index}": np.zeros(numel, dtype=np.float32) for index in range(num_arrays)}
    publisher = psworker.Publisher(arrays)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    step = 0
    while not over.is_set():
        step += 1
        for array in arrays.values():
            array.fill(step % 200)
        publisher.publish(step)
    psworker.shutdown()


def change(numel: int) -> None:
    """Publishes one array with some elements changed, each time that it is told to."""
    import psworker

    psworker.init()
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal(numel).astype(np.float32)}
    publisher = psworker.Publisher(arrays)
    print("{}", flush=True)
    step = 0
    while sys.stdin.readline().strip() == "go":
        step += 1
        arrays["w"][rng.integers(0, numel, numel // CHANGED)] *= np.float32(1.01)
        publisher.publish(step)
        print("{}", flush=True)


def train(numel: int, steps: int) -> dict[str, Any]:
    """Trains one array, and returns the median step time in seconds."""
    import torch

    import psworker

    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.zeros(numel))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1e-4), named_parameters=[("w", weights)]
    )
    grad = torch.randn(numel)
    measured.await_go()
    times = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        weights.grad = grad.clone()
        optimizer.step()
        times.append(time.perf_counter() - begin_s)
    psworker.shutdown()
    return {"step_s": kit.median(times)}


def read(job: str) -> None:
    """Reads versions until it is killed."""
    import psworker

    subscriber = psworker.Subscriber(job=job, dtype="bf16")
    weights = subscriber.wait()
    print("{}", flush=True)
    while True:
        weights = subscriber.wait(newer_than=weights.version)


def broadcast(rank: int, port: int, numel: int, rounds: int) -> dict[str, Any]:
    """Broadcasts bfloat16 by Gloo, and returns the milliseconds of a round."""
    import torch
    from torch import distributed

    where = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    values = torch.zeros(numel, dtype=torch.bfloat16)
    times = []
    for _ in range(rounds):
        distributed.barrier()
        begin_s = time.perf_counter()
        distributed.broadcast(values, 0)
        times.append(1e3 * (time.perf_counter() - begin_s))
    return {"ms": kit.median(times)}


ROLES: dict[str, Callable[..., Any]] = {
    "fill": fill,
    "change": change,
    "train": train,
    "read": read,
    "broadcast": broadcast,
}


# ----- cases


def torn(seconds: float) -> dict[str, int]:
    """Counts versions of two shards that are killed again and again, and those that are mixed."""
    import psutil

    import psworker

    commits = mixed = 0
    with tempfile.TemporaryDirectory() as folder:
        run = _supervised(folder)
        env = kit.worker_environment(run["addresses"], 0, 1, "tcp", "torn")
        try:
            arguments = {"numel": 30_000, "num_arrays": 4}
            with kit.roles(kit.Role(MODULE, "fill", arguments, env)) as (role,):
                with psworker.Subscriber(run["addresses"], job="torn") as subscriber:
                    weights = subscriber.wait(timeout_s=WAIT_S)
                    end_s = kill_s = time.monotonic()
                    end_s += seconds
                    while time.monotonic() < end_s:
                        former = weights.version
                        weights = subscriber.wait(newer_than=former, timeout_s=WAIT_S)
                        commits += 1
                        values = np.concatenate(list(weights.arrays.values()))
                        mixed += not bool((values == weights.step % 200).all())
                        if time.monotonic() - kill_s > 3.0:
                            shards = psutil.Process(run["pid"]).children()
                            os.kill(shards[commits % len(shards)].pid, signal.SIGKILL)
                            kill_s = time.monotonic()
                role.tell("end")
        finally:
            os.kill(run["pid"], signal.SIGTERM)
    return {"commits": commits, "torn": mixed}


def _supervised(folder: str) -> dict[str, Any]:
    """Starts two shards that are started again when they die; returns their run file."""
    import json
    import subprocess

    env = {**os.environ, "XDG_RUNTIME_DIR": folder}
    command = [sys.executable, "-m", "psserver", "start", "--port", "0", "--shards", "2"]
    subprocess.run([*command, "--detach"], env=env, check=True, capture_output=True)
    (path,) = Path(folder).rglob("run.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def smaller(rate: str, steps: int) -> float:
    """Returns bytes of bfloat16 over bytes of deltas, of a transformer that AdamW trains."""
    import torch

    from pscore.publish import codec

    torch.manual_seed(0)
    torch.set_num_threads(2)
    text = b" ".join(path.read_bytes() for path in sorted((kit.ROOT / "docs").glob("*.md")))
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(256, 128),
            "body": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "head": torch.nn.Linear(128, 256),
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


def refresh(numel: int, rounds: int) -> dict[str, Any]:
    """Measures a change from its publication to a reader's commit, and the commit alone."""
    import torch

    import psworker

    with start_embedded(2) as shards:
        env = kit.worker_environment(shards.addresses, 0, 1, "auto", "refresh")
        with kit.roles(kit.Role(MODULE, "change", {"numel": numel}, env)) as (role,):
            role.line()
            begin_s = time.perf_counter()
            subscriber = psworker.Subscriber(shards.addresses, job="refresh", dtype="bf16")
            weights = subscriber.wait(timeout_s=WAIT_S)
            whole_ms = 1e3 * (time.perf_counter() - begin_s)
            module = torch.nn.Module()
            module.w = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
            subscriber.into(module)
            deltas, pauses = [], []
            for _ in range(rounds):
                begin_s = time.perf_counter()
                role.tell()
                subscriber.stage(newer_than=weights.version, timeout_s=WAIT_S)
                staged_s = time.perf_counter()
                weights = subscriber.commit()
                end_s = time.perf_counter()
                deltas.append(1e3 * (end_s - begin_s))
                pauses.append(1e3 * (end_s - staged_s))
                role.line()
            subscriber.close()
            role.tell("end")
    return {
        "refresh_ms": {"delta": round(kit.median(deltas), 2), "whole": round(whole_ms, 2)},
        "pause_ms": round(kit.median(pauses), 3),
    }


def training_cost(numel: int, steps: int) -> dict[str, float]:
    """Returns the share that 8 readers add to the time of a step, by K."""
    times = {}
    for every in (0, 4, 1):
        os.environ["PACELINE_PUBLISH"] = f"*:every={every}" if every else ""
        with start_embedded(2) as shards:
            job = f"cost{every}"
            env = kit.worker_environment(shards.addresses, 0, 1, "auto", job)
            trainer = kit.Role(MODULE, "train", {"numel": numel, "steps": steps}, env)
            number = NUM_READERS if every else 0
            readers = [kit.Role(MODULE, "read", {"job": job}, env) for _ in range(number)]
            with kit.roles(trainer, *readers):
                trainer.line()
                for reader in readers:
                    reader.line()
                trainer.tell()
                times[every] = trainer.result()["step_s"]
    os.environ.pop("PACELINE_PUBLISH")
    return {f"k{every}": round(times[every] / times[0] - 1, 4) for every in (4, 1)}


class _Saved(http.server.BaseHTTPRequestHandler):
    """Answers with the weights as `torch.save` writes them."""

    values: Any = None

    def do_GET(self) -> None:
        """Answers any path."""
        import torch

        file = io.BytesIO()
        torch.save({"w": self.values}, file)
        self.send_response(200)
        self.send_header("Content-Length", str(file.tell()))
        self.end_headers()
        self.wfile.write(file.getvalue())

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def beside(numel: int, rounds: int) -> dict[str, float]:
    """Returns the milliseconds of other ways for the same weights."""
    import torch
    from safetensors.torch import load_file, save_file

    values = torch.zeros(numel, dtype=torch.bfloat16)
    target = torch.zeros_like(values)
    _Saved.values = values
    server = http.server.HTTPServer(("127.0.0.1", 0), _Saved)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"

        def by_file() -> None:
            save_file({"w": values}, path)
            target.copy_(load_file(path)["w"])

        def by_http() -> None:
            url = f"http://127.0.0.1:{server.server_port}/"
            with urllib.request.urlopen(url) as answer:
                target.copy_(torch.load(io.BytesIO(answer.read()))["w"])

        found = {"safetensors": _ms(by_file, rounds), "http": _ms(by_http, rounds)}
    server.shutdown()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [
        kit.Role(MODULE, "broadcast", {"rank": r, "port": port, "numel": numel, "rounds": rounds})
        for r in range(2)
    ]
    with kit.roles(*pair):
        found["gloo"] = round(max(role.result()["ms"] for role in pair), 2)
    return found


def _ms(call: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin_s))
    return round(kit.median(times), 2)


def measure(*, is_quick: bool) -> dict[str, Any]:
    """Measures all cases."""
    numel = 2_000_000 if is_quick else 25_600_000
    rounds = 10 if is_quick else 30
    return {
        **torn(12.0 if is_quick else 600.0),
        "training_cost": training_cost(numel, 12 if is_quick else 200),
        "smaller_than_bf16": {rate: smaller(rate, 12 if is_quick else 100) for rate in RATES},
        **refresh(numel, rounds),
        "beside": beside(numel, rounds),
        "numel": numel,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "commit": kit.commit(),
    }


def main() -> None:
    """Reads the flags, measures, and prints a table."""
    if measured.serve(sys.argv[1:], ROLES):
        return
    parser = argparse.ArgumentParser(description="Published weights.")
    parser.add_argument("--quick", action="store_true", help="2 million elements, few rounds")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    found = measure(is_quick=args.quick)
    lines = [f"{name}: {value}" for name, value in found.items()]
    kit.publish(found, "\n".join(lines), args.out, as_json=args.json)


if __name__ == "__main__":
    main()
