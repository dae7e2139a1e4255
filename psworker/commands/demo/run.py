"""Runs the demo: the same script in several modes, one job each, on one set of shards."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pscore.errors import ConfigError
from pscore.json_text import to_json
from pscore.text import counted
from pscore.timing.auto import parse_fixed_mode
from psworker.commands.demo import data, report
from psworker.commands.demo.report import Curve, Result
from psworker.commands.demo.train import BATCH
from psworker.commands.run import Launch, LaunchPlan, new_job, worker_command
from psworker.exits import Exit
from psworker.job.own_shards import start_shards
from psworker.job.place import LaunchPlace

STEPS_PER_REFRESH = 5
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The demo's arguments."""

    modes: str  # `ssgd, ssd(steps=5)`: as for `mode=`, separated by commas.
    data: Path | None
    epochs: int
    out: Path
    num_workers: int
    num_shards: int
    num_images: int | None  # None: all.
    seed: int


@dataclass(slots=True)
class DemoRun:
    """Collects the output of one mode's workers."""

    mode: str
    advance: Callable[[int], None]  # Called with the number of steps of rank 0.
    complain: Callable[[str], None]  # Called with other lines.
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # By rank.
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    def hear(self, rank: int, line: str, target: IO[str]) -> None:
        """Parses one line of a worker's output."""
        try:
            report = json.loads(line)
        except ValueError:
            self.complain(f"{self.mode} worker {rank}: {line.rstrip()}")
            return
        with self.lock:
            if "accuracy" in report:
                self.ends[rank] = report
                return
            steps = self.steps.setdefault(rank, [])
            steps.append(report)
            if rank == 0 and len(steps) % STEPS_PER_REFRESH == 0:
                self.advance(len(steps))

    def result(self) -> Result:
        """Returns the result, once every worker has ended."""
        ends = self.ends.values()
        by_step = list(zip(*self.steps.values(), strict=False))
        return Result(
            accuracy=self.ends[0]["accuracy"],
            images_per_s=sum(end["num_images"] / end["seconds"] for end in ends),
            pushed_mb=sum(end["pushed_nbytes"] for end in ends) / MEGABYTE,
            pulled_mb=sum(end["pulled_nbytes"] for end in ends) / MEGABYTE,
            curve=Curve(
                seconds=[max(said["seconds"] for said in step) for step in by_step],
                losses=[sum(said["loss"] for said in step) / len(step) for step in by_step],
            ),
        )


def run_demo(plan: DemoPlan, *, as_json: bool) -> int:
    """Trains in every mode, shows the results, and returns the exit status.

    Raises:
        ConfigError: A mode, the data or the folder for the plot is not usable.
        PacelineError: The shards did not start.
    """
    modes = keyed(plan.modes)
    folder = data.find_folder(plan.data).resolve()
    num_images = len(data.load(folder, plan.num_images)[0].labels)
    num_steps = plan.epochs * (num_images // (BATCH * plan.num_workers))
    if num_steps == 0:
        raise ConfigError(
            f"{num_images} images are too few: one step of {plan.num_workers} workers takes "
            f"{BATCH * plan.num_workers}"
        )
    report.make_folder(plan.out)
    results: dict[str, Result] = {}
    shards = start_shards(plan.num_shards)
    try:
        with _Bar(modes, num_steps) as bar:
            for key, mode in modes.items():
                launch_plan = LaunchPlan(
                    command=_command(plan, mode, folder),
                    place=LaunchPlace.alone(plan.num_workers),
                    servers=shards.addresses,
                    token_file=shards.token_file,
                    job=new_job("demo"),
                )
                run = bar.run(key, mode)
                if status := _launch(launch_plan, run):
                    return Exit.FAILED if status < Exit.INTERRUPTED else status
                results[key] = run.result()
                bar.done(key, results[key])
    finally:
        shards.end()
    title = (
        f"LeNet on Fashion-MNIST: {counted(plan.num_workers, 'worker')} with batches of {BATCH}, "
        f"{counted(plan.num_shards, 'shard')}"
    )
    drawn = report.plot(results, plan.out, title=title, num_steps=num_steps, epochs=plan.epochs)
    report.show(results, drawn)
    if as_json:
        values = {key: result.as_json() for key, result in results.items()}
        sys.stdout.write(to_json(values) + "\n")
    return Exit.OK


def _launch(plan: LaunchPlan, run: DemoRun) -> int:
    """Passes workers' output to `run`, except after they were asked to end."""

    def hear(rank: int, line: str, target: IO[str]) -> None:
        if not launch.is_ending:
            run.hear(rank, line, target)

    launch = Launch(plan, write=hear, tell=run.complain, is_quiet=True)
    return launch.run()


def keyed(text: str) -> dict[str, str]:
    """Returns the modes in `text` by name; by their text where several have one name.

    Raises:
        ConfigError: One of them is not a mode; says which there are.
    """
    modes = [mode.strip() for mode in re.findall(r"(?:[^,(]|\([^)]*\)?)+", text) if mode.strip()]
    if not modes:
        raise ConfigError("no mode given; psworker modes lists them")
    names = [parse_fixed_mode(mode).name for mode in modes]
    several = Counter(names)
    keys = [name if several[name] == 1 else mode for name, mode in zip(names, modes, strict=True)]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"a mode is given twice in {text!r}")
    return dict(zip(keys, modes, strict=True))


def _command(plan: DemoPlan, mode: str, folder: Path) -> tuple[str, ...]:
    words = ["-m", "psworker.commands.demo.train", "--mode", mode, "--data", str(folder)]
    words += ["--epochs", str(plan.epochs), "--seed", str(plan.seed)]
    if plan.num_images is not None:
        words += ["--images", str(plan.num_images)]
    return worker_command(words)


class _Bar:
    """One progress bar for each mode on a terminal, else a line when one is done."""

    def __init__(self, modes: dict[str, str], num_steps: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[outcome]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            key: self._progress.add_task(mode, total=num_steps, start=False, outcome="")
            for key, mode in modes.items()
        }
        self._started_s = 0.0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def run(self, key: str, mode: str) -> DemoRun:
        """Starts the clock of one mode, and returns the collector of its workers' output."""
        task = self._tasks[key]
        self._started_s = time.monotonic()
        self._progress.start_task(task)
        self._progress.update(task, outcome="workers start")
        return DemoRun(
            mode=mode,
            advance=lambda steps: self._progress.update(task, completed=steps, outcome=""),
            complain=self.say,
        )

    def done(self, key: str, result: Result) -> None:
        """Shows the result of a mode."""
        outcome = f"accuracy {result.accuracy:.3f}"
        self._progress.update(self._tasks[key], completed=self._num_steps, outcome=outcome)
        self._progress.stop_task(self._tasks[key])
        if not self._console.is_terminal:
            self.say(f"{key}: {outcome} in {time.monotonic() - self._started_s:.0f} s")

    def say(self, line: str) -> None:
        """Prints a line above the bars."""
        self._console.print(line, markup=False, soft_wrap=True)
