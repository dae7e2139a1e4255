"""`psworker demo`: real shards, real workers, real images, and the output that it promises."""

import json
import os
from pathlib import Path

import psutil
import pytest

from tests.integration import warm


@pytest.mark.slow
def test_the_demo_trains_and_ends_with_json(tmp_path: Path) -> None:
    warm.run(["-c", ""], env={}, timeout=200)  # Now there is a server to fork from.
    others = set(psutil.Process().children(recursive=True))  # Those of other tests.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = ["-m", "psworker", "demo", "--json", "--out", str(tmp_path)]
    command += ["--epochs", "1", "--images", "640", "--modes", "ssgd, ssd(steps=5, warmup=2)"]
    done = warm.run(command, env=kept, timeout=800)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == ["ssgd", "ssd"]
    pushed_mb = 2 * 10 * 4 * 61_706 / 1e6  # Workers, steps, bytes of a number, parameters.
    for values in results.values():
        assert list(values) == ["accuracy", "images_per_s", "pushed_mb", "pulled_mb"]
        assert 0.0 < values["accuracy"] < 1.0
        assert values["images_per_s"] > 0
        assert values["pushed_mb"] == pytest.approx(pushed_mb, rel=0.01)
    assert results["ssd"]["pulled_mb"] < results["ssgd"]["pulled_mb"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"loss curves: {tmp_path / 'loss.png'}" in done.stdout
    assert "Traceback" not in done.stderr
    assert not set(psutil.Process().children(recursive=True)) - others
