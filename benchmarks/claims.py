"""The headline claims of papers, run through the product: `python -m benchmarks.claims`.

Each claim names the command that measures it, the paper's figure, and ours, which is read from the
command's result file. A command that has left its result is not run again, so that an interrupted
run continues; `--again` measures all. The page `claims.md` in `--out` has one table and the plots
of the commands. A claim that does not hold stands there with its figure and the reason. `--results`
keeps the table, with date, commit and machine of each figure. `make results` runs all: about forty
minutes on two cores, as root for the shaped links.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kit
from benchmarks.hosts import DDP
from benchmarks.markdown import table

OUT = Path("bench-out/claims")
DATA = Path("../shared/data/fashion-mnist")
POINT = 0.01  # Of accuracy.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim: the paper's figure, and the place of ours."""

    paper: str  # The claim, with its source.
    measures: str  # Key of the command in `COMMANDS`.
    figure: Callable[[Any], str]  # Reads our figure from the command's result, as text.
    holds: Callable[[Any], bool]  # Reads whether the claim holds.
    why: Callable[[Any], str] = lambda result: ""  # Reads why it does not, if it does not.

    def cells(self, result: Any) -> tuple[str, str, str]:
        """Returns our figure, whether the claim holds, and the reason if it does not, as text."""
        if result is None:
            return "its command has no result", "?", ""
        holds = self.holds(result)
        return self.figure(result), "yes" if holds else "no", "" if holds else self.why(result)


RUNS = ("ssgd", "asgd", "od mirror", "dcasgd adaptive", "staleness n=4")
# Arguments of `python -m`; `{result}` is a file, `{out}` a folder, `{data}` that of Fashion-MNIST.
COMMANDS = {
    "hosts": "benchmarks.hosts --cases four_hosts --rounds 3 --results {result} "
    "--draw {out}/links.png",
    "accuracy": "benchmarks.accuracy --data {data} --epochs 2 --only ssgd 'mirror k=5' "
    "--keep {result} --out {out}",
    "learning": "benchmarks.convergence --sweep full --data {data} --epochs 1 --seeds 1 2 --only "
    f"{' '.join(map(repr, RUNS))} --results {{result}} --out {{out}}",
    "stragglers": "benchmarks.decentralised --parts straggler --seeds 1 --results {result}",
    "pipeline": "benchmarks.pipeline --quick --links 1gbit --results {result}",
    "predictions": "benchmarks.predictions --quick --results {result}",
}


def _gain(result: Any, slow: str, fast: str) -> float:
    """Returns how much faster a mode is on four hosts, as a share of its step."""
    times: dict[str, float] = result["four_hosts"]["step_ms"]
    return times[slow] / times[fast] - 1


def _most(result: Any, slow: str, fast: str) -> float:
    """Returns how much faster the mode could be if each step took as long as its bytes need."""
    times, bounds = result["four_hosts"]["step_ms"], result["four_hosts"]["bound_ms"]
    return float(times[slow] / bounds[fast] - 1)


def _of(result: Any, name: str, field: str) -> float:
    """Returns the mean of a figure over the seeds of a run of `benchmarks.convergence`."""
    return statistics.fmean(run[field] for run in result if run["name"] == name)


def _points(result: Any, name: str, other: str) -> float:
    """Returns the points of accuracy between two runs."""
    return (_of(result, name, "accuracy") - _of(result, other, "accuracy")) / POINT


def _spread(result: Any, name: str) -> float:
    """Returns the points of accuracy between the best and the worst seed of a run."""
    found = [run["accuracy"] for run in result if run["name"] == name]
    return (max(found) - min(found)) / POINT


def _worst(result: Any) -> str:
    """Returns the case of `benchmarks.predictions` with the largest error."""

    def error(row: Any) -> float:
        return abs(float(row["simulated_ms"] / row["measured_ms"] - 1))

    worst = max(result["rows"], key=error)
    return f"{worst['mode']} at {worst['links']}"


def _slows(result: Any, mode: str) -> float:
    """Returns how many times longer a mode takes with a worker at a hundredth of the speed."""
    figures = result["straggler"]["figures"][mode]
    return float(figures["100x"] / figures["1x"])


CLAIMS = (
    Claim(
        paper="SSD-SGD (arXiv:2012.05396): up to 110 % faster than SSGD",
        measures="hosts",
        figure=lambda r: (
            f"{_gain(r, 'ssgd', 'ssd'):+.0%}; against DDP over Gloo {_gain(r, DDP, 'ssd'):+.0%}"
        ),
        holds=lambda r: _gain(r, "ssgd", "ssd") >= 1.1,
        why=lambda r: (
            "it pushes the whole model at each step, and the links limit that: at most "
            f"{_most(r, 'ssgd', 'ssd'):+.0%} with these"
        ),
    ),
    Claim(
        paper="SSD-SGD: the accuracy of SSGD",
        measures="accuracy",
        figure=lambda r: (
            f"{(r['mirror k=5']['accuracy'] - r['ssgd']['accuracy']) / POINT:+.1f} points"
        ),
        holds=lambda r: r["mirror k=5"]["accuracy"] >= r["ssgd"]["accuracy"] - 0.5 * POINT,
    ),
    Claim(
        paper="OD-SGD (arXiv:2005.06728): at least ASGD's speed at SSGD's accuracy",
        measures="learning",
        figure=lambda r: (
            f"{_of(r, 'asgd', 'sim_s') / _of(r, 'od mirror', 'sim_s'):.2f} times "
            f"asgd's speed, {_points(r, 'od mirror', 'ssgd'):+.1f} points from ssgd"
        ),
        holds=lambda r: (
            _of(r, "od mirror", "sim_s") <= _of(r, "asgd", "sim_s")
            and _points(r, "od mirror", "ssgd") >= -0.5
        ),
    ),
    Claim(
        paper="CD-SGD (arXiv:2106.10796): 30 % less time than 2-bit pushes alone",
        measures="hosts",
        figure=lambda r: f"{1 / (1 + _gain(r, 'ssgd_2bit', 'cd')) - 1:+.0%} time",
        holds=lambda r: _gain(r, "ssgd_2bit", "cd") >= 0.3 / 0.7,
        why=lambda r: (
            "each fifth push is not compressed: on these links its bytes alone take "
            f"{r['four_hosts']['bound_ms']['cd']:.0f} ms a step, those of 2-bit pushes "
            f"{r['four_hosts']['bound_ms']['ssgd_2bit']:.0f} ms"
        ),
    ),
    Claim(
        paper="DC-ASGD (arXiv:1609.08326): more accurate than ASGD",
        measures="learning",
        figure=lambda r: f"{_points(r, 'dcasgd adaptive', 'asgd'):+.1f} points from asgd",
        holds=lambda r: _points(r, "dcasgd adaptive", "asgd") > 0,
        why=lambda r: (
            f"asgd loses {-_points(r, 'asgd', 'ssgd'):.1f} points to ssgd here, with 4 workers; "
            f"two seeds of one epoch differ by {_spread(r, 'dcasgd adaptive'):.1f}"
        ),
    ),
    Claim(
        paper="Staleness-aware ASGD (arXiv:1511.05950): more accurate than ASGD",
        measures="learning",
        figure=lambda r: f"{_points(r, 'staleness n=4', 'asgd'):+.1f} points from asgd",
        holds=lambda r: _points(r, "staleness n=4", "asgd") > 0,
        why=lambda r: (
            "it divides the learning rate by the staleness, and one epoch is short for that; two "
            f"seeds differ by {_spread(r, 'staleness n=4'):.1f} points"
        ),
    ),
    Claim(
        paper="AD-PSGD (arXiv:1710.06952): a worker at a hundredth of the speed slows nobody",
        measures="stragglers",
        figure=lambda r: (
            f"{_slows(r, 'adpsgd'):.2f} times the time; all-reduce "
            f"{_slows(r, 'allreduce'):.0f} times"
        ),
        holds=lambda r: _slows(r, "adpsgd") < 1.1,
    ),
    Claim(
        paper="PipeDream (arXiv:1806.03377): up to 5.3 times data parallelism, VGG-16",
        measures="pipeline",
        figure=lambda r: (
            f"{r['1gbit']['pipeline'] / r['1gbit']['ssgd']:.1f} times ssgd, "
            f"{r['1gbit']['pipeline'] / r['1gbit']['ddp']:.1f} times DDP, at 1 Gbit/s"
        ),
        holds=lambda r: r["1gbit"]["pipeline"] >= 5.3 * r["1gbit"]["ddp"],
        why=lambda r: (
            "its slowest stage limits it: `plan` predicts "
            f"{r['1gbit']['predicted'] / r['1gbit']['ddp']:.1f} times DDP on these links"
        ),
    ),
    Claim(
        paper="psworker advise: step times within 10 %, before a run",
        measures="predictions",
        figure=lambda r: (
            f"median {r['median_error']:.1%}, worst {r['worst_error']:.1%} of {r['cases']} cases"
        ),
        holds=lambda r: r["worst_error"] <= 0.1 and r["ranking_right"],
        why=lambda r: (
            f"the worst is {_worst(r)}; the order of modes is "
            f"{'right' if r['ranking_right'] else 'wrong'}"
        ),
    ),
)


def read_result(path: Path) -> Any:
    """Returns a result file: JSON, or a list of the lines of `.jsonl` files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def measure(name: str, out: Path, data: Path, *, again: bool, is_asked: bool = True) -> Any:
    """Returns the result of a command, run now if it has left none; None: it has none.

    Args:
        name: Key in `COMMANDS`.
        out: Folder of the results.
        data: Folder of Fashion-MNIST.
        again: Whether to run it in any case.
        is_asked: Whether to run it at all.
    """
    result = out / f"{name}.{'jsonl' if name == 'learning' else 'json'}"
    done = out / f"{name}.done"  # A result that its command adds to says not when it is whole.
    if not is_asked:
        return read_result(result) if done.exists() else None
    if again:
        result.unlink(missing_ok=True)
        done.unlink(missing_ok=True)
    if not done.exists():
        words = shlex.split(COMMANDS[name].format(result=result, out=out, data=data))
        started_s = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *words], check=False).returncode
        print(f"{name}: {time.monotonic() - started_s:.0f} s, exit code {code}", flush=True)
        if code or not result.exists():
            return None
        done.touch()
    return read_result(result)


def rows_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the table of claims, by the names of its columns.

    Args:
        results: Results of the commands, by key; None: it has none.
    """
    rows = []
    for claim in CLAIMS:
        figure, holds, why = claim.cells(results[claim.measures])
        command = COMMANDS[claim.measures].replace("{data}", str(DATA))
        command = re.split(r" --\w+ \{", command)[0]
        rows.append({
            "claim": claim.paper,
            "measured here": figure,
            "holds": holds,
            "why not": why,
            "command": f"python -m {command}",
        })  # fmt: skip
    return rows


def page(results: dict[str, Any], plots: Sequence[str]) -> str:
    """Returns the page with all claims.

    Args:
        results: Results of the commands, by key; None: it has none.
        plots: Names of the plots beside the page.
    """
    rows = rows_of(results)
    cells = [[*list(row.values())[:-1], f"`{row['command']}`"] for row in rows]
    shown = [f"![{name}]({name})" for name in plots]
    return "\n\n".join(["# Claims of papers, measured", table(list(rows[0]), cells), *shown]) + "\n"


def about(result: Any) -> dict[str, str]:
    """Returns date, commit and machine of a command's result, where it has them."""
    if isinstance(result, list):
        result = result[0]
    parts = (result, *result.values())
    found = next((one for one in parts if isinstance(one, dict) and "date" in one), {})
    return {name: found[name] for name in ("date", "commit", "machine") if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--again", action="store_true", help="measure also where results exist")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results and the page")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="keep the table here")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        name: measure(
            name, options.out, options.data, again=options.again, is_asked=name in options.only
        )
        for name in COMMANDS
    }
    plots = sorted(path.name for path in options.out.glob("*.png"))
    (options.out / "claims.md").write_text(page(results, plots), encoding="utf-8")
    print(options.out / "claims.md")
    if options.results is not None:
        runs = {name: about(result) for name, result in results.items() if result is not None}
        kept = kit.describe_run("benchmarks.claims") | {"runs": runs, "claims": rows_of(results)}
        options.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
