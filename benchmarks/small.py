"""Small models: where a step's fixed cost shows. `python -m benchmarks.small [--json]`.

Two questions. How many ssgd steps a second a model of 20,000 parameters in 6 tensors makes with one
worker and one shard (targets: 800 through shared memory, 300 over TCP); and which part of plain
torch's steps per second a LeNet and a ResNet-20 keep in ssd (targets: 80 % and 95 %). Inputs are
random; forward and backward are real; worker and plain torch take turns in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import kit, measured

MODULE = "benchmarks.small"
WARM_STEPS = 20
WIDTHS = (64, 128, 80, 16)  # 19,936 parameters in 6 tensors.


def make_model(name: str) -> tuple[Any, tuple[int, ...]]:
    """Returns a model and the shape of its inputs."""
    import torch

    from psworker.commands.demo.train import LeNet

    torch.manual_seed(0)
    nn = torch.nn
    if name == "mlp":
        layers: list[Any] = []
        for wide, narrow in itertools.pairwise(WIDTHS):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        return nn.Sequential(*layers[:-1]), (16, WIDTHS[0])
    if name == "lenet":
        return LeNet(), (64, 1, 28, 28)
    return _resnet20(), (64, 3, 32, 32)


def _resnet20() -> Any:
    import torch

    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, wide: int, narrow: int) -> None:
            super().__init__()
            stride = 1 if wide == narrow else 2
            self.body = nn.Sequential(
                nn.Conv2d(wide, narrow, 3, stride, 1, bias=False),
                nn.BatchNorm2d(narrow),
                nn.ReLU(),
                nn.Conv2d(narrow, narrow, 3, 1, 1, bias=False),
                nn.BatchNorm2d(narrow),
            )
            self.pad = narrow - wide

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            around = x
            if self.pad:
                around = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.pad))
            return torch.relu(self.body(x) + around)

    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *head)


class Trainer:
    """One model that makes steps."""

    def __init__(self, name: str, mode: str | None) -> None:
        import torch

        self.model, shape = make_model(name)
        self.inputs = torch.randn(shape)
        outputs = self.model(self.inputs[:2]).shape[1]
        self.classes = torch.randint(0, outputs, (shape[0],))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if mode is not None:
            import psworker

            self.optimizer = psworker.DistributedOptimizer(
                self.optimizer,
                named_parameters=self.model.named_parameters(),
                mode=mode,
                overlap=True,
            )

    def step(self) -> None:
        """Makes one step."""
        import torch

        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.inputs), self.classes).backward()
        self.optimizer.step()

    def steps_per_s(self, steps: int) -> float:
        """Makes steps; returns how many a second."""
        start_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps / (time.perf_counter() - start_s)


def worker(name: str, mode: str, turns: int, steps: int, threads: int) -> None:
    """Runs the worker and plain torch in turns."""
    import torch

    import psworker

    torch.set_num_threads(threads)
    plain, ours = Trainer(name, None), Trainer(name, mode)
    for trainer in (plain, ours):
        trainer.steps_per_s(WARM_STEPS)
    measured.await_go()
    rates: dict[str, list[float]] = {"plain": [], "ours": []}
    cpu_s = measured.own_cpu_s()
    for _ in range(turns):
        rates["plain"].append(plain.steps_per_s(steps))
        rates["ours"].append(ours.steps_per_s(steps))
    measured.report({**rates, "cpu_s": measured.own_cpu_s() - cpu_s})
    psworker.shutdown()


def measure(name: str, mode: str, plane: str, options: argparse.Namespace) -> list[Any]:
    """Returns the line of the table of one case."""
    steps = {"mlp": 200, "lenet": 40, "resnet20": 4}[name]
    arguments = {
        "name": name,
        "mode": mode,
        "turns": options.turns,
        "steps": steps,
        "threads": options.threads,
    }
    results, marks = kit.run_workers(
        MODULE, "worker", arguments, plane=plane, num_workers=1, num_shards=1
    )
    rates = results[0]
    share = kit.median([b / a for a, b in zip(rates["plain"], rates["ours"], strict=True)])
    shard_ms = 1e3 * (marks[1] - marks[0]) / (options.turns * steps)
    plain, ours = kit.median(rates["plain"]), kit.median(rates["ours"])
    return [name, mode, plane, plain, ours, max(rates["ours"]), 100 * share, shard_ms]


CASES = (
    ("mlp", "ssgd", "local"),
    ("mlp", "ssgd", "tcp"),
    ("mlp", "ssgd", "grpc"),
    ("lenet", "ssd(steps=5, warmup=10)", "local"),
    ("resnet20", "ssd(steps=5, warmup=10)", "local"),
)
KEYS = {
    "shm_steps_per_s": ("mlp", "local", 4),
    "tcp_steps_per_s": ("mlp", "tcp", 4),
    "grpc_steps_per_s": ("mlp", "grpc", 4),
    "lenet_percent": ("lenet", "local", 6),
    "resnet20_percent": ("resnet20", "local", 6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="torch's, of the worker")
    parser.add_argument("--models", default="mlp,lenet,resnet20")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    options = parser.parse_args()
    chosen = [case for case in CASES if case[0] in options.models.split(",")]
    rows = [measure(*case, options) for case in chosen]
    kit.show(
        "small models, 1 worker, 1 shard",
        ["model", "mode", "plane", "torch /s", "ours /s", "best /s", "% of torch", "shard ms/step"],
        rows,
    )
    kit.plot_bars(
        options.out / "small.png",
        "Small models, 1 worker, 1 shard",
        "% of plain torch's steps per second",
        {f"{row[0]} {row[1]} {row[2]}": row[6] for row in rows},
    )
    if options.json:
        figures = {
            key: round(row[column], 2)
            for key, (name, plane, column) in KEYS.items()
            for row in rows
            if (row[0], row[2]) == (name, plane)
        }
        print(json.dumps(figures))


if __name__ == "__main__" and not measured.serve(sys.argv[1:], {"worker": worker}):
    main()
