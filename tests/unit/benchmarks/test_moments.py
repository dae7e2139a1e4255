"""Moments of the kill loop: a process stops in one while a file asks for it, and waits counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from benchmarks.survival import cluster, moments, proof


class Sender:
    """Something with a moment that counts only where there is something to send."""

    def __init__(self) -> None:
        self.unsent: list[int] = []
        self.sent = threading.Event()

    def resume(self) -> None:
        self.sent.set()


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sender:
    """A sender of process 3, whose moment is the call of `resume` with something unsent."""
    monkeypatch.setattr(Sender, "resume", Sender.resume)  # Restored at the end.
    moment = Sender, "resume", lambda sender: bool(sender.unsent)
    monkeypatch.setattr(moments, "MOMENTS", {"resend": moment})
    moments.attach(tmp_path, 3)
    return Sender()


def test_a_process_stops_in_a_moment_while_a_file_asks_for_it(
    tmp_path: Path, sender: Sender
) -> None:
    hold = tmp_path / "hold-resend-3"
    hold.touch()
    sender.unsent.append(1)
    thread = threading.Thread(target=sender.resume)
    thread.start()
    while not hold.with_suffix(".reached").exists():
        time.sleep(0.001)
    assert not sender.sent.is_set()
    hold.unlink()
    thread.join()
    assert sender.sent.is_set()


@pytest.mark.parametrize("asked", ["hold-resend-2", "hold-join-3"])
def test_a_process_stops_in_its_own_moments_only(
    tmp_path: Path, sender: Sender, asked: str
) -> None:
    (tmp_path / asked).touch()
    sender.unsent.append(1)
    sender.resume()
    assert sender.sent.is_set()


def test_a_moment_without_anything_to_send_is_none(tmp_path: Path, sender: Sender) -> None:
    hold = tmp_path / "hold-resend-3"
    hold.touch()
    sender.resume()
    assert not hold.with_suffix(".reached").exists()


def test_a_worker_that_makes_no_progress_counts_as_stuck_once_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Running:
        popen = type("Popen", (), {"poll": staticmethod(lambda: None)})

    now_s = [1000.0]
    monkeypatch.setattr("benchmarks.survival.cluster.time.monotonic", lambda: now_s[0])
    watched = cluster.Cluster(cluster.Setup(workers=2))
    watched.progress = cluster.Progress([tmp_path / "0.book", tmp_path / "1.book"])
    watched.roles = [Running(), Running()]  # type: ignore[list-item]
    watched.folder = tmp_path
    watched.imported(0).touch()  # The second one imports for ever.

    def acknowledge(step: int) -> None:
        with (tmp_path / "0.book").open("ab") as book:
            book.write(proof.RECORD.pack(proof.ACKNOWLEDGED, 0, step, step, 0, now_s[0]))

    for step in range(3):
        if step:
            acknowledge(step)
        watched.tend()
        now_s[0] += cluster.STUCK_S
        watched.tend()
        assert watched.num_stuck == step
        for _ in range(2):
            now_s[0] += 1.0
            watched.tend()
            assert watched.num_stuck == step + 1


@pytest.mark.parametrize("moment", sorted(moments.MOMENTS))
def test_each_moment_is_a_function_of_the_product(moment: str) -> None:
    where, name, _ = moments.MOMENTS[moment]
    assert callable(getattr(where, name))
