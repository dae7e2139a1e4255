"""Kernels and steps on a GPU: `python -m benchmarks.gpu [--json] [--results FILE.json]`.

Two parts. **Kernels**: each compressor's encoding and each local update, beside a copy of the same
gradient on the device (`benchmarks/compressors.py`). **Steps**: 1, 2 and 4 processes train
ResNet-50 and a GPT of 124 million parameters with shards on the same machine, in `ssgd`, `ssd`,
`cd` and `diloco`; before each, the same processes make the same steps at the same time with plain
torch, each for itself. The difference is communication that is not hidden:

    share = 1 - (plain step) / (step)

Processes are spread over the GPUs of the machine; where there are fewer GPUs than processes, both
kinds of step share them. The figures are written after each run, so that a run that is cut off
leaves those before it. No run begins later than `--minutes` after the start; the result names those
left out. Without a GPU, `--device cpu --models tiny` runs the same program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import kit, measured
from psserver.process.embedded import start_embedded

MODULE = "benchmarks.gpu"
CYCLE = 10  # Steps of a round: a multiple of each mode's own cycle.
PLAIN = "plain"
KERNEL_ROUNDS = 15
KERNEL_COLUMNS = ("what", "best_ms", "gbps", "x_copy", "of_copy")
COLUMNS = ("model", "processes", "mode", "plain_ms", "step_ms", "not_hidden")


class Mode(NamedTuple):
    """A mode and its compressor."""

    rule: str
    compression: str = "none"


MODES = {
    "ssgd": Mode("ssgd"),
    "ssd": Mode("ssd(steps=5, warmup=5)"),
    "cd": Mode("cd(steps=5, warmup=5)", "2bit"),
    "diloco": Mode(f"diloco(steps={CYCLE})"),
}


class Model(NamedTuple):
    """A model, and the inputs of one step of a process."""

    name: str  # Of `psworker/commands/models.py`; empty: a small one.
    batch: int
    width: int = 0  # Tokens of a row; 0: images.


MODELS = {"resnet50": Model("resnet50", 64), "gpt": Model("gpt2", 8, 1024), "tiny": Model("", 16)}


# ----- one process


def work(model: str, device: str) -> None:
    """Trains once for each line of standard input, which is a run's JSON."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    rank = int(os.environ["RANK"])
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    print("{}", flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        os.environ["PACELINE_JOB"] = run.pop("job")
        train(MODELS[model], where, **run)


def train(model: Model, device: Any, *, mode: str, compression: str, rounds: int) -> None:
    """Makes steps in one mode; `plain` is torch's optimizer alone."""
    import torch

    torch.manual_seed(int(os.environ["RANK"]))
    module, inputs, classes = make(model, device)
    optimizer: Any = make_optimizer(model, module)
    if mode != PLAIN:
        import psworker

        optimizer = psworker.DistributedOptimizer(
            optimizer,
            module.named_parameters(),
            mode=mode,
            compression=compression,
            local_group=None,
            overlap=True,
        )

    def one_round() -> float:
        start_s = time.perf_counter()
        for _ in range(CYCLE):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                scores = module(inputs)
            loss = torch.nn.functional.cross_entropy(scores.float().flatten(0, -2), classes)
            loss.backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start_s) / CYCLE

    one_round()  # Over the warm-up of the mode.
    measured.await_go()
    steps_s = [one_round() for _ in range(rounds)]
    print(json.dumps({"steps_s": steps_s}), flush=True)
    sys.stdin.readline()  # Until all have finished.
    if mode != PLAIN:
        psworker.shutdown()
    print("{}", flush=True)


def make(model: Model, device: Any) -> tuple[Any, Any, Any]:
    """Returns a model, and the inputs and classes of its step, on a device."""
    import torch

    from psworker.commands import models

    if not model.name:
        layers = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10)]
        tiny = torch.nn.Sequential(*layers).to(device)
        rows = torch.randn(model.batch, 64, device=device)
        return tiny, rows, torch.randint(10, (model.batch,), device=device)
    module = models.make_model(model.name, str(device))
    if not model.width:
        module = module.to(memory_format=torch.channels_last)
        images = torch.randn(model.batch, *models.IMAGE, device=device)
        images = images.to(memory_format=torch.channels_last)
        return module, images, torch.randint(models.CLASSES, (model.batch,), device=device)
    shape = model.batch, model.width
    tokens = torch.randint(models.VOCABULARY, shape, device=device)
    return module, tokens, tokens.roll(-1, 1).flatten()


def make_optimizer(model: Model, module: Any) -> Any:
    """Returns SGD with momentum for images, AdamW for tokens."""
    import torch

    if model.width:
        return torch.optim.AdamW(module.parameters(), lr=1e-4)
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


# ----- the measuring process


def measure(
    model: str, num_processes: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each mode; no figures of one that would begin too late."""
    num_shards = min(4, max(1, (os.cpu_count() or 1) // 2))
    with start_embedded(num_shards) as servers:
        places = (servers.addresses, num_processes, "auto", "gpu")
        started = [
            kit.Role(
                MODULE,
                "work",
                {"model": model, "device": options.device},
                kit.worker_environment(places[0], rank, *places[1:]),
            )
            for rank in range(num_processes)
        ]
        with kit.roles(*started):
            for role in started:
                role.line()
            plain_s = 0.0
            for name, mode in {PLAIN: Mode(PLAIN), **options.chosen}.items():
                if name != PLAIN and time.monotonic() > options.deadline_s:
                    yield {"model": model, "processes": num_processes, "mode": name}
                    continue
                job = f"{model}-{num_processes}-{name}"
                run = {"mode": mode.rule, "compression": mode.compression, "job": job}
                step_s = one_run(started, run | {"rounds": options.rounds})
                if name == PLAIN:
                    plain_s = step_s
                    continue
                yield {
                    "model": model,
                    "processes": num_processes,
                    "mode": name,
                    "plain_ms": round(1e3 * plain_s, 2),
                    "step_ms": round(1e3 * step_s, 2),
                    "not_hidden": round(max(0.0, 1 - plain_s / step_s), 3),
                }


def one_run(started: Sequence[kit.Role], run: dict[str, Any]) -> float:
    """Returns the seconds of a step of one run: the slowest process's median round."""
    for role in started:
        role.tell(json.dumps(run))
    for role in started:
        role.line()
    for role in started:
        role.tell()
    results = [role.line() for role in started]
    for role in started:
        role.tell("end")
    for role in started:
        role.line()
    return max(kit.median(result["steps_s"]) for result in results)


def device_name(device: str) -> str:
    """Returns the name of the device, with the versions of torch, CUDA and CuPy."""
    import importlib.metadata

    import torch

    if device == "cpu":
        return f"CPU, torch {torch.__version__}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cupy = [one for one in ("cupy-cuda12x", "cupy-cuda13x") if _is_installed(one)]
    versions = [f"{one} {importlib.metadata.version(one)}" for one in cupy] or ["no CuPy"]
    return f"{len(names)} x {names[0]}, torch {torch.__version__}, {versions[0]}"


def _is_installed(name: str) -> bool:
    import importlib.metadata

    return any(found.metadata["Name"] == name for found in importlib.metadata.distributions())


def parse() -> argparse.Namespace:
    """Returns the options, or ends with the reason if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", default="resnet50,gpt", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="of these")
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=2, help=f"of {CYCLE} steps each")
    parser.add_argument("--minutes", type=float, default=5.0, help="no run begins after these")
    parser.add_argument("--numel", type=int, default=25_600_000, help="elements for the kernels")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="write the figures here")
    options = parser.parse_args()
    for what, given, known in (("model", options.models, MODELS), ("mode", options.modes, MODES)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"no {what} {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    options.chosen = {name: MODES[name] for name in options.modes.split(",")}
    options.deadline_s = time.monotonic() + 60 * options.minutes
    return options


def main() -> None:
    options = parse()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --models tiny tries the program")
    figures: dict[str, Any] = {
        **kit.describe_run(MODULE),
        "device": device_name(options.device),
        "numel": options.numel,
        "kernels": [],
        "steps": [],
    }
    from benchmarks import compressors

    where = torch.empty(0, device=options.device).device
    for item in compressors.on_device(options.numel, KERNEL_ROUNDS, compressors.NAMES, where):
        figures["kernels"].append(dict(zip(KERNEL_COLUMNS, item.row(), strict=True)))
    keep(figures, options.results)
    for model in options.models.split(","):
        for num_processes in map(int, options.processes.split(",")):
            for row in measure(model, num_processes, options):
                figures["steps"].append(row)
                keep(figures, options.results)
    rows = [[row.get(name, "left out") for name in COLUMNS] for row in figures["steps"]]
    kit.show(figures["device"], COLUMNS, rows)
    if options.json:
        print(json.dumps(figures))


def keep(figures: dict[str, Any], path: Path | None) -> None:
    """Writes the figures so far."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


ROLES = {"work": work}

if __name__ == "__main__" and not measured.serve(sys.argv[1:], ROLES):
    main()
