"""The ring, the files and how they are joined."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from pscore.errors import ConfigError
from pscore.observe import timeline
from pscore.observe.timeline import Timeline, join, open_timeline


def test_without_a_path_there_is_none() -> None:
    assert open_timeline("", "worker", 0) is None
    assert open_timeline(None, "shard", 0) is None


def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    for kind, name in (("worker", "trace.worker3.json"), ("shard", "trace.shard3.json")):
        opened = open_timeline(tmp_path / "trace.json", kind, 3)
        assert opened is not None
        assert opened.path == tmp_path / name
    bare = open_timeline(tmp_path / "trace", "worker", 0)
    assert bare is not None
    assert bare.path.name == "trace.worker0.json"


def test_only_the_last_spans_are_kept_and_the_file_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Timeline(tmp_path / "a.json", "worker 0", spans_max=3)
    for number in range(5):
        recorded.span("forward", number, end_ns=number + 1, step=number)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        recorded.write()
    trace = json.loads((tmp_path / "a.json").read_text())
    steps = [event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert steps == [2, 3, 4]
    assert trace["otherData"]["dropped"] == 2
    assert "the last 3 spans, 2 before them are gone" in caplog.text
    assert join([tmp_path / "a.json"], tmp_path / "all.json") == [
        "worker 0: 3 spans, 2 before them are gone"
    ]


def test_a_track_has_as_many_rows_as_it_needs(tmp_path: Path) -> None:
    recorded = Timeline(tmp_path / "a.json", "worker 0")
    for begin_ns, end_ns in ((0, 10), (5, 15), (10, 20), (15, 30)):
        recorded.span("push", begin_ns, end_ns=end_ns, track="push")
    recorded.write()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    tids = [event["tid"] - timeline.TRACK_TID for event in events if event["ph"] == "X"]
    assert tids == [0, 1, 0, 1]


def written(path: Path, process: str, host: str, offset_ns: int, ts: float) -> Path:
    event: dict[str, Any] = {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": ts, "dur": 1.0}
    about = {"process": process, "dropped": 0, "host": host, "wall_minus_monotonic_ns": offset_ns}
    path.write_text(json.dumps({"traceEvents": [event | {"args": {}}], "otherData": about}))
    return path


def test_hosts_are_brought_together_by_their_wall_clocks(tmp_path: Path) -> None:
    """Of one host the monotonic clock decides, though its wall clock was set in between."""
    wall_ns = 1_700_000_000_000_000_000
    files = [
        written(tmp_path / "a", "worker 0", "one", wall_ns, 100.0),
        written(tmp_path / "b", "worker 1", "one", wall_ns + 5_000_000_000, 107.5),
        written(tmp_path / "c", "shard 0", "two", wall_ns + 250_000, -50.25),
    ]
    join(files, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [
        (1, 0.0),
        (2, 7.5),
        (3, 99.75),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [], "otherData": {}}'])
def test_a_wrong_timeline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json is not the timeline of one process"):
        join([tmp_path / "a.json"], tmp_path / "all.json")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        join([tmp_path / "none.json"], tmp_path / "all.json")


def test_a_file_that_cannot_be_written_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Timeline(tmp_path / "none" / "a.json", "worker 0")
    recorded.span("forward", recorded.now_ns())
    recorded.write()
    assert "no timeline: cannot write" in caplog.text


def test_a_device_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    Timeline(tmp_path / "pipe", "worker 0").write()
    assert "no timeline: cannot write" in caplog.text
    assert (tmp_path / "pipe").is_fifo()
