"""Common parts of the data plane's benchmarks: measuring processes, models, tables and plots.

A measuring program starts itself again as `python -m benchmarks.X --role NAME '{json}'` for each
process of a case; that process prints its result as the last line of its standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pscore.json_text import to_json
from psserver.access import certs
from psserver.access.files import Trust
from psserver.process.embedded import start_embedded
from psworker.commands import model_plan

ROOT = Path(__file__).resolve().parents[1]
ROLE_TIMEOUT_S = 300.0
FLAT_NUMEL = 25_600_000
CASES_NUMEL = {"flat": FLAT_NUMEL, "tiny": 1024}
PR_SET_PDEATHSIG = 1


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of torchvision's ResNet-50: 161 tensors, 25,557,032 elements."""
    return [shape for _, shape in model_plan.shapes_of("resnet50")]


def shapes_of(case: str) -> list[tuple[int, ...]]:
    """Returns the tensors of a case: `flat` is one of 25.6 million elements, `tiny` of 1,024."""
    return resnet50_shapes() if case == "keys" else [(CASES_NUMEL[case],)]


def numel_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of elements of all tensors."""
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


# ----- processes


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Role:
    """A process of a case, running one function of a benchmark module."""

    def __init__(
        self,
        module: str,
        name: str,
        arguments: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        python: str | Path = sys.executable,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.what = f"{name} {dict(arguments)}"
        self.popen = subprocess.Popen(
            [*prefix, str(python), "-m", module, "--role", name, json.dumps(dict(arguments))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=end_with_parent,
        )

    def line(self) -> dict[str, Any]:
        """Returns the next line that it prints, which must be JSON."""
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        if not text:
            self.popen.wait()
            written = self.written()[-4000:]
            raise RuntimeError(f"{self.what} ended with {self.popen.returncode}\n{written}")
        value: dict[str, Any] = json.loads(text)
        return value

    def tell(self, text: str = "go") -> None:
        """Writes a line to its standard input; `go` is what `measured.await_go` waits for."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Returns the line that it prints and waits for its end."""
        value = self.line()
        self.popen.wait(ROLE_TIMEOUT_S)
        return value

    def written(self) -> str:
        """Returns what it has written to standard error."""
        nbytes = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), nbytes, 0).decode(errors="replace")

    def end(self) -> None:
        """Ends it in any case."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self._errors):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def roles(*started: Role) -> Iterator[tuple[Role, ...]]:
    """Ends processes in any case."""
    try:
        yield started
    finally:
        for role in started:
            role.end()


class Cpu:
    """CPU seconds of the shards below this process."""

    def __init__(self, num_shards: int) -> None:
        self._processes = psutil.Process().children()[-num_shards:]

    def seconds(self) -> float:
        """Returns the CPU seconds used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def worker_environment(
    servers: Sequence[str], rank: int, num_workers: int, plane: str, job: str
) -> dict[str, str]:
    """Returns the variables that a launcher would set for one worker."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "PACELINE_SERVERS": ",".join(servers),
        "PACELINE_JOB": job,
        "PACELINE_DATA_PLANE": plane,
    }


def run_workers(
    module: str,
    name: str,
    arguments: Mapping[str, Any],
    *,
    plane: str,
    num_workers: int,
    num_shards: int,
    journal_dir: Path | None = None,
) -> tuple[list[dict[str, Any]], list[float]]:
    """Runs one role as every worker of a job on fresh shards, with journals if there is a place.

    The planes `tcp+tls` and `grpc+tls` are `tcp` and `grpc` with mutual TLS and a token.

    Returns:
        The workers' results, and the CPU seconds of all shards before the first and after the
        last of the measured rounds.
    """
    plane, _, secured = plane.partition("+")
    with (
        tempfile.TemporaryDirectory() as folder,
        start_embedded(
            num_shards, trust=make_trust(folder) if secured else None, journal_dir=journal_dir
        ) as servers,
    ):
        cpu = Cpu(num_shards)
        job = f"bench-{os.getpid()}"
        started = [
            Role(
                module,
                name,
                arguments,
                worker_environment(servers.addresses, rank, num_workers, plane, job)
                | (client_variables(folder) if secured else {}),
            )
            for rank in range(num_workers)
        ]
        with roles(*started):
            for role in started:
                role.line()  # Warm.
            marks = [cpu.seconds()]
            for role in started:
                role.tell()
            results = [role.line() for role in started]
            marks.append(cpu.seconds())
            for role in started:
                assert role.popen.stdin is not None
                role.popen.stdin.close()
                role.popen.wait(ROLE_TIMEOUT_S)
    return results, marks


def make_trust(folder: str) -> Trust:
    """Makes certificates and a token; returns how shards use them."""
    certs.make(Path(folder), [], days=1, is_forced=True)
    files = {name: f"{folder}/{name}" for name in certs.FILES}
    return Trust(
        cert=files["server.pem"],
        key=files["server.key"],
        client_ca=files["ca.pem"],
        token_file=files["token"],
    )


def client_variables(folder: str) -> dict[str, str]:
    """Returns the variables that workers of such shards need."""
    return {
        "PACELINE_TLS_CA": f"{folder}/ca.pem",
        "PACELINE_TLS_CERT": f"{folder}/client.pem",
        "PACELINE_TLS_KEY": f"{folder}/client.key",
        "PACELINE_TOKEN_FILE": f"{folder}/token",
    }


# ----- figures


def median(values: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def machine() -> str:
    """Returns the machine that the figures were taken on, in one line."""
    memory = psutil.virtual_memory().total >> 30
    load = os.getloadavg()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {load:.1f}"
    )


def describe_run(module: str) -> dict[str, str]:
    """Returns the command, date, commit and machine of this run of a program, for its results."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
    }


def commit(folder: Path = ROOT) -> str:
    """Returns the commit of a checkout, with a `+` if its files differ from it."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    print(f"\n{title} ({machine()})")
    for row in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))


def publish(found: Mapping[str, Any], text: str, out: Path | None, *, as_json: bool) -> None:
    """Prints the text of a result, writes the result to a file, and prints it as one line of JSON.

    Args:
        found: The result.
        text: Its table and other lines for people.
        out: The file; None: there is none.
        as_json: Whether the line is asked for.
    """
    print(text)
    if out is not None:
        out.write_text(to_json(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(to_json(found))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot_bars(path: Path, title: str, unit: str, bars: Mapping[str, float]) -> None:
    """Writes a PNG of horizontal bars, the first on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(bars)[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.34 * len(names)))
    drawn = axes.barh(names, [bars[name] for name in names], color="#33658a")
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.margins(x=0.15)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"plot: {path}")
