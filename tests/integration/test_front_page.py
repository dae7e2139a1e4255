"""The code of the README trains on two workers: three lines, evaluation, saving, clipping."""

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


@pytest.mark.slow
def test_the_code_of_the_readme_trains(tmp_path: Path) -> None:
    first, script = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "train.py").write_text("\n".join([BEFORE, first, LOOP, script, AFTER]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "psworker", "run", "--workers", "2", "--"),
            *(str(tmp_path / "train.py"), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    # Loading goes back to the step that was saved, and one step follows.
    assert done.stdout.count("done at step 81") == 2, done.stdout
