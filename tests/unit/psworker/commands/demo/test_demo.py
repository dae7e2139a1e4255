"""The demo's parts: modes, images and report."""

import gzip
import io
import json
import struct
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psworker.commands.demo import data, report
from psworker.commands.demo.report import Curve, Result
from psworker.commands.demo.run import DemoPlan, DemoRun, keyed, run_demo


def write_idx(path: Path, shape: tuple[int, ...], content: bytes, magic: int = 0x0800) -> Path:
    header = struct.pack(f">{1 + len(shape)}I", magic + len(shape), *shape)
    path.write_bytes(gzip.compress(header + content))
    return path


def plan(out: Path, modes: str = "ssgd", num_images: int | None = None) -> DemoPlan:
    return DemoPlan(
        modes=modes,
        data=None,
        epochs=1,
        out=out,
        num_workers=2,
        num_shards=2,
        num_images=num_images,
        seed=1,
    )


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("ssgd", {"ssgd": "ssgd"}),
        (
            "ssgd, asgd,ssd(steps=5, warmup=50)",
            {"ssgd": "ssgd", "asgd": "asgd", "ssd": "ssd(steps=5, warmup=50)"},
        ),
        ("ssd(steps=1), ssd(steps=5)", {t: t for t in ("ssd(steps=1)", "ssd(steps=5)")}),
    ],
)
def test_modes_are_keyed_by_name_where_that_is_enough(text: str, keys: dict[str, str]) -> None:
    assert keyed(text) == keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no mode given"),
        ("ssgd, ssgd", "a mode is given twice"),
        ("ssdg", "no mode 'ssdg'; there are "),
        ("ssd(k=5)", "no argument 'k'; it has "),
        ("ssd(steps=5", r"must look like name or name\(argument=value\)"),
    ],
)
def test_a_text_without_modes_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keyed(text)


def test_the_shipped_images_are_split_in_8000_and_2000() -> None:
    train, test = data.load(data.find_folder(None))
    assert train.images.shape == (8000, 1, 28, 28)
    assert test.images.shape == (2000, 1, 28, 28)
    assert sorted(set(train.labels.tolist())) == sorted(set(test.labels.tolist())) == [*range(10)]
    assert abs(train.images.mean()) < 0.05
    assert abs(train.images.std() - 1.0) < 0.05
    assert len(data.load(data.find_folder(None), 96)[0].labels) == 96


def test_the_published_split_is_taken_where_its_training_part_is(tmp_path: Path) -> None:
    for part, number in (("train", 3), ("t10k", 2)):
        pixels = bytes(number * 28 * 28)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", (number, 28, 28), pixels)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", (number,), bytes(number))
    train, test = data.load(tmp_path)
    assert (len(train.labels), len(test.labels)) == (3, 2)


def test_without_images_it_is_said_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none at .*t10k-images-idx3-ubyte.gz.*--data; they"):
        data.find_folder(tmp_path)


def test_an_idx_file_is_read_in_its_shape(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "f.gz", (1, 2, 3), bytes(range(6)))
    assert data.read_idx(path, 3).tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize(
    ("shape", "content", "magic"),
    [((1, 2, 3), bytes(5), 0x0800), ((1, 2, 3), bytes(7), 0x0800), ((1, 2, 3), bytes(6), 0x0D00)],
)
def test_another_file_than_idx_is_refused(
    tmp_path: Path, shape: tuple[int, ...], content: bytes, magic: int
) -> None:
    path = write_idx(tmp_path / "f.gz", shape, content, magic)
    with pytest.raises(ConfigError, match=r"f.gz is not an idx file of bytes with 3 dimensions"):
        data.read_idx(path, 3)


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"abc", mtime=0)[:-4]], ids=["empty", "other", "cut"]
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"f\.gz"):
        data.read_idx(tmp_path / "f.gz", 3)


def test_too_few_images_for_one_step_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="63 images are too few: one step of 2 workers takes 64"):
        run_demo(plan(tmp_path, num_images=63), as_json=False)


def test_the_lines_of_workers_become_one_result() -> None:
    steps: list[int] = []
    complaints: list[str] = []
    run = DemoRun("ssgd", steps.append, complaints.append)
    target = io.StringIO()
    for rank, losses in ((0, [2.0, 1.0]), (1, [4.0, 3.0])):
        for step, loss in enumerate(losses):
            said = {"step": step, "loss": loss, "seconds": 1.0 + step + rank}
            run.hear(rank, json.dumps(said) + "\n", target)
        end = {
            "accuracy": 0.5 + rank,
            "num_images": 60,
            "seconds": 2.0 + rank,
            "pushed_nbytes": 1_000_000,
            "pulled_nbytes": 500_000,
        }
        run.hear(rank, json.dumps(end) + "\n", target)
    run.hear(1, "a warning\n", target)
    result = run.result()
    assert result.curve == Curve(seconds=[2.0, 3.0], losses=[3.0, 2.0])
    assert result.as_json() == {
        "accuracy": 0.5,
        "images_per_s": 50.0,  # 60 / 2 + 60 / 3
        "pushed_mb": 2.0,
        "pulled_mb": 1.0,
    }
    assert complaints == ["ssgd worker 1: a warning"]


def test_curves_are_means_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SMOOTHED_STEPS", 2)
    assert report.smoothed([1.0, 3.0, 5.0]) == [1.0, 2.0, 4.0]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    curve = Curve(seconds=[0.1, 0.2], losses=[2.0, 1.0])
    result = Result(accuracy=0.5, images_per_s=1.0, pushed_mb=1.0, pulled_mb=1.0, curve=curve)
    drawn = report.plot({"a": result}, tmp_path, title="t", num_steps=2, epochs=1)
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
