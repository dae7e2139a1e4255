"""Step time against what computing and the link allow: `python -m benchmarks.step [--json]`.

A worker and a shard on two hosts of `benchmarks.netlab`, ResNet-50's 161 tensors, and a GPU that is
simulated by sleeping: a third of the compute time in forward, two thirds in backward, spread over
the tensors by their size, so that gradients become ready one after the other. Bandwidth is measured
first, on the same link, both ways at once. The comparison:

    hidden   max(compute, bytes / bandwidth), with the bytes really sent per step, the busier way
    ssgd     a slice leaves when its gradient is ready and comes back when it has arrived, each way
             one after the other: the end of the last one

With `--hosts 4` four hosts have a worker and a shard each, or with `--shards 2` the shards have two
hosts of their own. Then `benchmarks.hosts` measures, beside DDP over Gloo, against `hidden` only;
`--results FILE.json` keeps the figures, beside those of other shards, for docs/links.md.

Step times are means over whole rounds of k = 5 steps. By default compute takes as long as bytes.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import hosts, kit, measured
from benchmarks.netlab import Lab, available, bits_per_s

MODULE = "benchmarks.step"
ROUND_STEPS = 5
WARMUP_STEPS = 5
PROBE_S = 2.0
MODES = {
    "ssgd": ("ssgd", "none"),
    "od": ("od(warmup=5)", "none"),
    "ssd": ("ssd(steps=5, warmup=5)", "none"),
    "ssd-kept": ("ssd(steps=5, warmup=5, mirror=kept)", "none"),
    "ssd-spread1": ("ssd(steps=5, warmup=5, spread=1)", "none"),
    "ssd-spread5": ("ssd(steps=5, warmup=5, spread=5)", "none"),
    "ssd-secant": ("ssd(steps=5, warmup=5, local=secant)", "none"),
    "cd": ("cd(steps=5, warmup=5)", "2bit"),
}


# ----- the simulated GPU


def train(mode: str, compression: str, compute_s: float, rounds: int, *, overlap: bool) -> None:
    """Runs the worker."""
    import torch

    import psworker
    from benchmarks.links.simulated_gpu import SimulatedModel

    torch.set_num_threads(1)
    model = SimulatedModel(kit.resnet50_shapes(), compute_s)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        mode=mode,
        compression=compression,
        overlap=overlap,
    )

    def one_step() -> None:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model(start_s).backward()
        optimizer.step()

    for _ in range(WARMUP_STEPS + ROUND_STEPS):
        one_step()
    traffic = optimizer.traffic
    measured.await_go()
    for _ in range(ROUND_STEPS):  # All messages under way have landed by the end of this wait.
        one_step()
    before = (traffic.pushed_nbytes, traffic.pulled_nbytes)
    times_s, cpu_s = [], measured.own_cpu_s()
    for _ in range(rounds):
        start_s = time.perf_counter()
        for _ in range(ROUND_STEPS):
            one_step()
        times_s.append((time.perf_counter() - start_s) / ROUND_STEPS)
    steps = rounds * ROUND_STEPS
    measured.report(
        {
            "times_s": times_s,
            "cpu_s": (measured.own_cpu_s() - cpu_s) / steps,
            "up_nbytes": (traffic.pushed_nbytes - before[0]) / steps,
            "down_nbytes": (traffic.pulled_nbytes - before[1]) / steps,
            "plane": optimizer._table.session.links[0].transport.name,
        }
    )
    psworker.shutdown()


# ----- the hosts


def serve(host: str) -> None:
    """Runs the shard's host."""
    from psserver.process.embedded import start_embedded

    with start_embedded(1, host=host) as servers:
        cpu = kit.Cpu(1)
        print(json.dumps({"addresses": servers.addresses}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"cpu_s": cpu.seconds()}), flush=True)


def sink(host: str) -> None:
    """Accepts a connection, and sends and receives as fast as it can for a while."""
    with socket.create_server((host, 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        connection, _ = listener.accept()
    measured.report({"bytes_per_s": _both_ways(connection)})


def probe(host: str, port: int) -> None:
    """Runs the other side of `sink`."""
    measured.report({"bytes_per_s": _both_ways(socket.create_connection((host, port)))})


def _both_ways(connection: socket.socket) -> float:
    end_s = time.perf_counter() + PROBE_S

    def send() -> None:
        data = bytes(1 << 20)
        while time.perf_counter() < end_s:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    scratch, received, start_s = bytearray(1 << 20), 0, time.perf_counter()
    counted_s = start_s
    while count := connection.recv_into(scratch):
        received += count
        counted_s = time.perf_counter()
    sender.join()
    return received / (counted_s - start_s)


def measure_link(lab: Lab) -> float:
    """Returns the bytes a second that a link carries, each way while the other is busy too."""
    one = kit.Role(MODULE, "sink", {"host": lab.address(0)}, prefix=lab.inside(0))
    with kit.roles(one):
        port = one.line()["port"]
        two = kit.Role(
            MODULE, "probe", {"host": lab.address(0), "port": port}, prefix=lab.inside(1)
        )
        with kit.roles(two):
            return min(one.line()["bytes_per_s"], two.line()["bytes_per_s"])


def measure_mode(
    lab: Lab, name: str, compute_s: float, rounds: int, *, overlap: bool
) -> dict[str, Any]:
    """Returns the worker's figures in one mode, with the shard's CPU seconds per step."""
    mode, compression = MODES[name]
    shard = kit.Role(MODULE, "serve", {"host": lab.address(0)}, prefix=lab.inside(0))
    with kit.roles(shard):
        servers = shard.line()["addresses"]
        env = kit.worker_environment(servers, 0, 1, "auto", f"step-{name}")
        arguments = {
            "mode": mode,
            "compression": compression,
            "compute_s": compute_s,
            "rounds": rounds,
            "overlap": overlap,
        }
        worker = kit.Role(MODULE, "train", arguments, env, lab.inside(1))
        with kit.roles(worker):
            worker.line()
            cpu_s = _ask(shard, "cpu")
            worker.tell("go")
            result = worker.line()
            result["shard_cpu_s"] = (_ask(shard, "cpu") - cpu_s) / ((rounds + 1) * ROUND_STEPS)
            assert worker.popen.stdin is not None
            worker.popen.stdin.close()
            worker.popen.wait(kit.ROLE_TIMEOUT_S)
        assert shard.popen.stdin is not None
        shard.popen.stdin.close()
        shard.popen.wait(kit.ROLE_TIMEOUT_S)
    return result


def _ask(role: kit.Role, text: str) -> float:
    role.tell(text)
    return float(role.line()["cpu_s"])


# ----- the best possible


def best_ssgd_s(compute_s: float, bytes_per_s: float) -> float:
    """Returns the step time of a worker whose slices leave and come back without a gap."""
    from benchmarks.links.simulated_gpu import FORWARD_SHARE

    numel = kit.numel_of(kit.resnet50_shapes())
    num_slices = -(-numel // (1 << 20))
    slice_s = 4 * numel / num_slices / bytes_per_s
    backward_s = (1 - FORWARD_SHARE) * compute_s
    up_s = down_s = 0.0
    for number in range(1, num_slices + 1):
        ready_s = FORWARD_SHARE * compute_s + backward_s * number / num_slices
        up_s = max(ready_s, up_s) + slice_s
        down_s = max(up_s, down_s) + slice_s
    return down_s


def best_s(name: str, compute_s: float, bytes_per_s: float, result: dict[str, Any]) -> float:
    """Returns the best possible step time."""
    if name == "ssgd":
        return best_ssgd_s(compute_s, bytes_per_s)
    return max(compute_s, max(result["up_nbytes"], result["down_nbytes"]) / bytes_per_s)


def measure_rate(rate: str, options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    """Measures all modes on links of one rate."""
    rows, times_s = [], {}
    figures: dict[str, Any] = {}
    with Lab(2, rate) as lab:
        bytes_per_s = measure_link(lab)
        figures["link_gbps"] = round(8e-9 * bytes_per_s, 3)
        link_s = 4 * kit.numel_of(kit.resnet50_shapes()) / bytes_per_s
        compute_s = options.compute_s or link_s
        for name in options.modes.split(","):
            result = measure_mode(lab, name, compute_s, options.rounds, overlap=options.overlap)
            times_s[name] = kit.median(result["times_s"])
            best = best_s(name, compute_s, bytes_per_s, result)
            rows.append(
                [rate, name, result["plane"], 1e3 * compute_s, 1e-6 * result["up_nbytes"],
                 1e-6 * result["down_nbytes"], 1e3 * times_s[name], 1e3 * best,
                 100 * (times_s[name] / best - 1), result["cpu_s"], result["shard_cpu_s"]]
            )  # fmt: skip
            figures[f"{name}_over_best_percent"] = round(100 * (times_s[name] / best - 1), 2)
            print(f"{rate} {name}: {1e3 * times_s[name]:.0f} ms, best {1e3 * best:.0f}", flush=True)
    if "ssgd" in times_s and "ssd" in times_s:
        figures["ssd_times_ssgd"] = round(times_s["ssgd"] / times_s["ssd"], 3)
    nominal = bits_per_s(rate) / 8e9
    figures["link_share_of_rate"] = round(bytes_per_s / 1e9 / nominal, 3)
    return rows, figures


def measure_hosts(options: argparse.Namespace) -> None:
    """Measures several workers, each on a host of its own, beside DDP over Gloo."""
    figures: dict[str, Any] = {}
    shapes = kit.resnet50_shapes()
    for rate in options.rates.split(","):
        link_s = 4 * kit.numel_of(shapes) / (bits_per_s(rate) / 8)
        case = hosts.Case(
            num_hosts=options.hosts,
            num_dedicated=options.shards,
            rate=rate,
            shapes=shapes,
            compute_s=options.compute_s or link_s,
        )
        modes = {name: hosts.Mode(*MODES[name]) for name in options.modes.split(",")}
        figures[str(case)] = hosts.measure_case(rate, case, modes, options.rounds)
    if options.results is not None:
        keep(options.results, figures)
    if options.json:
        print(json.dumps(figures))


def keep(path: Path, figures: dict[str, Any]) -> None:
    """Writes figures by case to a result file, where those of other cases stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = kit.describe_run(MODULE)
    known |= {case: about | found for case, found in figures.items()}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit")
    overlap = argparse.BooleanOptionalAction
    parser.add_argument("--overlap", action=overlap, default=True, help="push during backward")
    parser.add_argument("--modes", default=",".join(MODES), help="of these")
    parser.add_argument("--compute-s", type=float, help="of a step; default: as the link takes")
    parser.add_argument("--rounds", type=int, default=2, help="of five steps each")
    parser.add_argument(
        "--hosts", type=int, default=1, help="with a worker each; above 1, beside DDP over Gloo"
    )
    parser.add_argument(
        "--shards", type=int, default=0, help="on hosts of their own; 0: one on each worker's host"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE.json", help="with --hosts: keep the figures here"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    options = parser.parse_args()
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; choose from {', '.join(MODES)}")
    if (reason := available()) is not None:
        sys.exit(f"no network namespaces here: {reason}")
    if options.hosts > 1:
        measure_hosts(options)
        return
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    for rate in options.rates.split(","):
        new_rows, figures[rate] = measure_rate(rate, options)
        rows += new_rows
    kit.show(
        "step time, ResNet-50-sized, 1 worker, 1 shard, simulated GPU",
        ["link", "mode", "plane", "compute ms", "MB up", "MB down", "step ms", "best ms", "over %",
         "worker CPU s", "shard CPU s"],
        rows,
    )  # fmt: skip
    kit.plot_bars(
        options.out / "step.png",
        "Step time over what compute and link allow",
        "%",
        {f"{row[0]} {row[1]}": row[8] for row in rows},
    )
    if options.json:
        print(json.dumps(figures))


ROLES = {"train": train, "serve": serve, "sink": sink, "probe": probe}

if __name__ == "__main__" and not measured.serve(sys.argv[1:], ROLES):
    main()
