"""The examples run as their first lines say; and torchrun, whose first worker keeps the shards."""

import json
import os
import re
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration import warm
from tests.integration.cluster import Shards

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT / "examples" / "mnist.py"
ELASTIC = ROOT / "examples" / "elastic.py"
ROLLOUTS = ROOT / "examples" / "rollouts.py"
SERVE = ROOT / "examples" / "serve.py"
SHORT = ("--epochs", "1", "--max-steps", "3", "--log-interval", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

# Rank 0 ends long before rank 1, which needs the shards that rank 0 has started.
UNEVEN = """
import torch, psworker
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=1.0)
optimizer = psworker.DistributedOptimizer(optimizer, [("weight", weight)], mode="ssgd")
psworker.barrier()
for step in range(2 if psworker.rank() == 0 else 40):
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
print("steps", step + 1, "weight", weight.tolist())
"""


def python(*arguments: object, **environment: str) -> str:
    """Runs Python to its end, which must be a good one, and returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    done = warm.run(arguments, env=kept | environment, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\d\.\d{4})", text)


def test_the_mnist_example_marks_three_lines() -> None:
    marks = re.findall(r"# Paceline, line (\d) of 3(.*)", MNIST.read_text())
    assert [int(number) for number, _ in marks] == [1, 2, 3]
    ours = re.findall(r"^.*(?:psworker\.|import psworker).*$", MNIST.read_text(), re.MULTILINE)
    assert len(ours) == 3


@pytest.mark.slow
def test_the_mnist_example_runs_alone_on_a_shard_of_its_own() -> None:
    said = python(MNIST, *SHORT)
    assert len(losses(said)) == 3
    assert "test: accuracy 0." in said


@pytest.mark.slow
def test_the_mnist_example_runs_on_two_workers_that_end_with_one_model() -> None:
    said = python("-m", "psworker", "run", "--workers", 2, "--", MNIST, *SHORT)
    by_rank = [losses("".join(re.findall(rf"\[{rank}\].*", said))) for rank in (0, 1)]
    assert [len(found) for found in by_rank] == [3, 3]
    assert by_rank[0] != by_rank[1], "both train on the same images"
    accuracies = re.findall(r"accuracy (\d\.\d{4})", said)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1


@pytest.mark.slow
def test_under_torchrun_shards_stay_until_the_last_worker_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    said = python(*TORCHRUN, script, PACELINE_JOB="a/b")
    assert "steps 2 weight [-2.0, -2.0, -2.0]" in said
    assert "steps 40 weight [-40.0, -40.0, -40.0]" in said


@pytest.mark.slow
def test_the_example_of_a_sharded_model_runs_on_one_host() -> None:
    said = python(*TORCHRUN, ROOT / "examples" / "sharded.py", "--width", 32, "--steps", 10)
    assert "step 10: loss" in said


@pytest.mark.slow
def test_the_elastic_example_continues_from_its_file(tmp_path: Path) -> None:
    """In the middle of a round, which is what `local(steps=4)` stops in after 22 steps."""
    common = (ELASTIC, "--mode", "local(steps=4)", "--file", tmp_path / "state.pt")
    said = [python(*common, "--steps", steps) for steps in (22, 42)]
    shown = [re.findall(r"step (\d+): loss", text) for text in said]
    assert shown == [["0", "20"], ["20", "40"]]  # The file holds step 20: its round began there.
    assert ["22 steps, 704 samples" in said[0], "42 steps, 1344 samples" in said[1]] == [True] * 2


RUN = ("-m", "psworker", "run", "--workers", 2, "--shards", 2, "--")


@pytest.mark.slow
def test_the_click_model_learns_from_rows_of_any_id() -> None:
    script = ROOT / "examples" / "dlrm.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 105
    said = python(*RUN, script, "--samples", 60_000, "--rows-mode", "asgd")
    found = re.search(r"AUC (0\.\d+), best possible 0\.8", said)
    assert found is not None, said
    assert float(found[1]) > 0.65


@pytest.mark.slow
def test_the_recommender_of_sessions_learns_the_next_item() -> None:
    said = python(*RUN, ROOT / "examples" / "sequences.py", "--steps", 300)
    found = re.search(r"among the first 10 of 100: (0\.\d+)", said)
    assert found is not None, said
    assert float(found[1]) > 0.2  # By chance 0.1.


@pytest.mark.slow
def test_vectors_of_words_are_learnt_from_their_parts() -> None:
    said = python(*RUN, ROOT / "examples" / "word2vec.py", "--steps", 100)
    assert len(losses(said)) == 1
    assert re.search(r"near night: .*night", said)


@pytest.mark.slow
def test_the_rollouts_example_plays_with_the_version_that_it_was_told_to(shards: Shards) -> None:
    """Its learners require the stamp of each batch, and end if it is another."""
    given = {"PACELINE_SERVERS": ",".join(shards.addresses)}
    said = python(ROLLOUTS, "--updates", 5, "--staleness", 2, **given)
    assert "update 5: an episode lasts " in said


@pytest.mark.slow
def test_the_example_of_a_server_answers_with_newer_weights(tmp_path: Path) -> None:
    assert len(SERVE.read_text().splitlines()) < 100
    with Shards(1, env={"PACELINE_PUBLISH": "night:every=4"}) as started, ExitStack() as stack:
        env = os.environ | {"PACELINE_SERVERS": ",".join(started.addresses)}
        trainer = stack.enter_context(warm.Popen([SERVE, "train"], env=env))
        stack.callback(trainer.kill)
        given: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "text": True}
        server = stack.enter_context(warm.Popen([SERVE, 0], **given))
        stack.callback(server.kill)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        versions: set[tuple[int, int]] = set()
        while len(versions) < 3:
            with urllib.request.urlopen(url) as answer:
                said = json.load(answer)
            versions.add(tuple(said["version"]))
            assert len(said["text"]) == len("the ") + 40
        assert len({lineage for lineage, _ in versions}) == 1
