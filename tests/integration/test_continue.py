"""The table of docs/training.md: the weights and steps from which a saved state continues."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from pscore.rules import RULES, parse_mode
from tests.integration.cluster import ROOT, Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, weights_of

WHOLE, INSIDE, END = 12, 6, 8  # Steps; a round of four ends at 8, and 6 is inside it.
EXACT, ROUND, WEIGHTS, NEVER = (
    "exact",
    "from the last round",
    "from the weights",
    "no two runs agree",
)
MODES = [
    *("ssgd", "asgd", "ssp(bound=2)", "staleness", "dcasgd", "dcasgd(adaptive=True)"),
    *("od(warmup=2)", "od(warmup=2, local='none')", "ssd(steps=3, warmup=2)"),
    *("ssd(steps=3, warmup=2, local='glu')", "cd(steps=3, warmup=2)"),
    *("local(steps=4)", "local(steps=4, overlap='mirror')", "local(steps=4, overlap='late')"),
    *("slowmo(steps=4)", "diloco(steps=4)", "diloco(steps=4, overlap='eager')"),
    *("diloco(steps=4, fragments=2)", "delayed_nesterov(steps=4)"),
    *("allreduce(average_every=4)", "dpsgd(average_every=4)", "sgp(average_every=4)"),
    *("diloco(steps=4, quorum=1)", "local(steps=speed)", "adpsgd(average_every=4)"),
]
# The order of arrival decides, or the speed of each worker.
RACES = ("asgd", "ssp", "staleness", "dcasgd", "adpsgd", "diloco(steps=4, quorum", "local(steps=sp")


def begin(mode: str, job: str) -> tuple[torch.nn.Module, psworker.DistributedOptimizer]:
    psworker.init(job=job)
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, psworker.DistributedOptimizer(inner, model.named_parameters(), mode=mode)


def train(rank: int, model: Any, optimizer: Any, end: int) -> None:
    while optimizer.steps < end:
        optimizer.zero_grad()
        backward(model, *batch(rank, optimizer.steps))
        optimizer.step()


def save(path: Path, model: Any, optimizer: Any) -> None:
    """Saves as README does; rank 0's file is the job's."""
    with optimizer.global_weights():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if psworker.rank() == 0:
            torch.save(state, path)


def ends(me: Station, job: str, folder: Path) -> dict[str, list[Any]]:
    """Returns, by mode: whether a state of 6 and of 8 continues exactly, and its steps."""
    found: dict[str, list[Any]] = {}
    for number, mode in enumerate(MODES):
        if me.num_workers > 1 and mode.startswith(RACES):
            found[mode] = [False, False, 0]
            continue
        model, optimizer = begin(mode, f"{job}-{number}")
        for step in (INSIDE, END):
            train(me.rank, model, optimizer, step)
            save(folder / f"{number}-{step}.pt", model, optimizer)
        train(me.rank, model, optimizer, WHOLE)
        psworker.shutdown()
        whole, same, begun = weights_of(model), [], []
        for step in (INSIDE, END):
            model, optimizer = begin(mode, f"{job}-{number}-{step}")
            state = torch.load(folder / f"{number}-{step}.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begun.append(optimizer.steps)
            train(me.rank, model, optimizer, WHOLE)
            psworker.shutdown()
            again = weights_of(model)
            same.append(all(relative_error(again[name], whole[name]) < 1e-6 for name in whole))
        found[mode] = [*same, begun[0]]
    return found


def describe(inside: bool, end: bool, begun: int) -> str:
    if inside and end:
        return EXACT
    if begun == INSIDE:
        return WEIGHTS
    return f"{ROUND}; {EXACT} at its end" if end else ROUND


def test_the_table_has_every_mode() -> None:
    missing = RULES.own.keys() - {parse_mode(mode).name for mode in MODES}
    assert not missing, f"MODES of this file and the table of docs/training.md lack {missing}"


@pytest.mark.slow
def test_the_table_of_saved_states_is_true(shards: Shards, tmp_path: Path) -> None:
    columns = []
    for num_workers in (1, 2):
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        results = shards.run(ends, new_job(), folder, num_workers=num_workers)
        columns.append(results[0])
        assert all(result == results[0] for result in results)
    rows = []
    for mode in MODES:
        one, several = (describe(*column[mode]) for column in columns)
        several = NEVER if mode.startswith(RACES) else several
        rows.append((f"`{mode}`", one, several))
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = text.partition("## Saved states")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    shown = {(mode, *ends) for modes, *ends in cells for mode in modes.split(", `")}
    missing = [row for row in rows if row not in shown and (row[0][1:], *row[1:]) not in shown]
    assert not missing, "\n".join(map(" | ".join, rows))
