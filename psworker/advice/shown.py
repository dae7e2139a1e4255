"""The answer of `psworker advise` for people: lines that fit a terminal."""

from __future__ import annotations

import shutil
import textwrap

from pscore.timing.choice import AdviceRow
from pscore.timing.closed import COMPUTING
from pscore.timing.evidence import SETTING
from pscore.timing.shown import three_figures
from psworker.advice.report import ERROR_SOURCE, AdviceReport
from psworker.advice.sizes import shown_nbytes, shown_numel

WIDTH_MIN, WIDTH_MAX = 40, 100
HOSTS_MAX = 8  # Hosts of shards whose numbers are shown.
GROUPED = " /host"  # Behind a mode in which a host is a worker.


def terminal_width() -> int:
    """Returns the columns to fill: those of the terminal within limits, 80 without one."""
    return min(max(shutil.get_terminal_size().columns, WIDTH_MIN), WIDTH_MAX)


def lines_of(report: AdviceReport, width: int = 80) -> list[str]:
    """Returns the report as lines.

    Args:
        width: Columns, which only names of files and the lines to write may exceed.
    """
    lines = [f"advice for {shown_numel(report.situation.numel)} parameters", ""]
    sources = report.situation.sources
    name_width = max(map(len, sources))
    for name, each in sources.items():
        lines += _wrapped(f"  {name:<{name_width}}  ", f"{each.value}  [{each.source}]", width)
    lines += ["", *_table(report, width), ""]
    for note in _notes(report):
        lines += _wrapped("", note, width, hang=2)
    lines += ["", *_wrapped("=> ", report.verdict.text, width)]
    if report.verdict.also:
        lines += _wrapped("   ", report.verdict.also, width)
    return [*lines, "", *report.lines]


def _table(report: AdviceReport, width: int) -> list[str]:
    """Returns a line for each way to train; two where they would not fit."""
    cells = [_cells(report, row) for row in report.rows]
    heads = ("way", "ms a step", "+-", "limit", "accuracy")
    wide = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    marks = [" ", *("*" if row is report.verdict.row else " " for row in report.rows)]
    lines = [
        f"{mark} {way:<{wide[0]}}  {ms:>{wide[1]}}  {error:>{wide[2]}}  {limit:<{wide[3]}}  {loss}"
        for mark, (way, ms, error, limit, loss) in zip(marks, [heads, *cells], strict=True)
    ]
    if max(map(len, lines)) <= width:
        return lines
    lines = []
    for mark, (way, ms, error, limit, loss) in zip(marks[1:], cells, strict=True):
        text = f"{ms} ms a step (+- {error}); limit: {limit}; {loss}"
        lines += [f"{mark} {way}", *_wrapped("    ", text, width)]
    return lines


def _cells(report: AdviceReport, row: AdviceRow) -> tuple[str, ...]:
    error = report.error_of(row)
    packed = "" if row.compression == "none" else f" + {row.compression}"
    return (
        f"{row.mode}{packed}{GROUPED if row.grouped else ''}",
        three_figures(1e3 * row.time.step_s),
        "?" if error is None else f"{error:.0%}",
        row.time.limit.removeprefix(f"{COMPUTING} of "),
        row.evidence.short,
    )


def _notes(report: AdviceReport) -> list[str]:
    """Returns what the table and the shards mean, a paragraph each."""
    rows, shards = report.rows, report.shards
    notes = []
    if warmups := {row.mode.partition("(")[0]: row.warmup for row in rows if row.warmup}:
        steps = ", ".join(f"{mode} {number:,}" for mode, number in warmups.items())
        notes.append(f"ms a step: behind the warm-up, whose steps are those of ssgd: {steps} steps")
    if any(row.grouped for row in rows):
        notes.append(
            f'{GROUPED.strip()}: the processes of a host are one worker, local_group="host"'
        )
    if any(row.evidence.seeds for row in rows):
        more = {row.mode.partition("(")[0]: row.evidence.more for row in rows if row.evidence.more}
        notes.append(
            "; ".join(
                [
                    f"accuracy: measured with {SETTING}, 2 or 3 seeds (docs/convergence.md)",
                    *(f"{mode}: {text}" for mode, text in more.items()),
                ]
            )
        )
    if report.beyond:
        notes.append(f"+-: unknown; {'; '.join(report.beyond)}")
    else:
        notes.append(f"+-: {ERROR_SOURCE}")
    if any(row.num_shards for row in rows):
        where = "sites" if report.situation.has_sites else "hosts"
        hosts = sorted(set(shards.hosts))
        places = ", ".join(map(str, hosts[:HOSTS_MAX])) + (", ..." if hosts[HOSTS_MAX:] else "")
        used = "shards" if report.verdict.row.num_shards else "shards, if you use some"
        notes.append(
            f"{used}: {len(shards.hosts)}, on {where} {places}; {shown_nbytes(shards.nbytes)} of "
            "memory each (weights twice, state and sum twice for the journal), their threads busy "
            f"for {shards.cpu_share:.0%} of an ssgd step"
        )
    return notes


def _wrapped(head: str, text: str, width: int, hang: int | None = None) -> list[str]:
    """Returns a text in lines; `hang` spaces begin all but the first, or as many as `head` has."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * (len(head) if hang is None else hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
