"""The code of the README and of row tables trains on two workers as it stands there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import ROOT
from tests.integration.recipes import blocks

BEFORE = """
import sys
import torch
from torch.utils.data import Subset, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(64, 4)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
"""
LOOP = """
assert len(data) == 32
for _ in range(20):
    for pair in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(pair[0]), pair[1])
        loss.backward()
        optimizer.step()
path = f"{sys.argv[1]}/saved-{psworker.rank()}.pt"
found = []
evaluate = lambda model: found.append(model.weight.detach().clone())
optimizer.zero_grad()
loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
"""
AFTER = """
assert torch.allclose(found[0], torch.ones(1, 4), atol=0.05), found
print(psworker.rank(), "done at step", optimizer.steps)
"""

ROWS = """
for step in range(3):
    seen = users(torch.randint(-(2**63), 2**63 - 1, (8,))), films(torch.randint(1_000_000, (8, 5)))
    optimizer.zero_grad()
    model["top"](torch.cat(seen, dim=1)).square().mean().backward()
    optimizer.step()
print("done at step", optimizer.steps)
"""


@pytest.mark.slow
def test_the_code_of_the_readme_trains(tmp_path: Path) -> None:
    first, script = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    # Loading goes back to the step that was saved, and one step follows.
    require_done(tmp_path, [BEFORE, first, LOOP, script, AFTER], 81)


@pytest.mark.slow
def test_the_code_of_row_tables_trains(tmp_path: Path) -> None:
    (code,) = blocks((ROOT / "docs" / "rows.md").read_text(encoding="utf-8"))
    require_done(tmp_path, [code, ROWS], 3)


def require_done(folder: Path, parts: list[str], step: int) -> None:
    """Runs a script on two workers, both of which have to say that they are done at a step."""
    (folder / "train.py").write_text("\n".join(parts))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "psworker", "run", "--workers", "2", "--"),
            *(str(folder / "train.py"), str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count(f"done at step {step}\n") == 2, done.stdout
