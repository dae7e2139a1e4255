"""Rows in checkpoints: out of some shards, into files, and back into another number of shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pscore.errors import ConfigError, DecodeError, RemoteProtocolError, TableFullError
from pscore.rows.spec import LRU_MIN, Rows, RowTable
from pscore.rules import ASGD, SSGD
from pscore.rules.base import Rule
from psserver.archives import archive_of
from psserver.archives.base import Room, Tensors
from psserver.exits import CommandError
from psserver.remote import checkpoint
from psserver.remote import checkpoint_files as files
from psserver.rows import gone
from tests.row_driver import RowShards, crowded, row_spec
from tests.unit.psserver.ordered import last_of

HYPER = np.array([[0.1, 0.9, 0.999, 1e-8, 0.0]])
TABLES = (
    ("users", 0, 4, RowTable(seed=1, init="uniform(1)")),
    ("items", 1 << 20, 3, RowTable(seed=2, init="normal(1)", max_rows=300)),
)
GOING = (
    ("users", 0, 4, RowTable(seed=1, init="uniform(1)", min_count=2, ttl=3)),
    ("items", 1 << 20, 3, RowTable(seed=2, init="normal(1)", lru=LRU_MIN)),
)
IDS = [np.arange(500, dtype=np.uint64) << np.uint64(50), crowded(2, 300)]


def push(shards: RowShards, step: int) -> None:
    drawn = np.random.default_rng(step)
    ids = [drawn.choice(IDS[0], 90, replace=False), drawn.choice(IDS[1], 50, replace=False)]
    grads = [drawn.standard_normal((90, 4)), drawn.standard_normal((50, 3))]
    shards.push(0, step, ids, grads, HYPER)


def trained(num_shards: int, steps: int, tables: Any = TABLES) -> RowShards:
    shards = RowShards(row_spec(*tables, optimizer="sparse_adam", num_shards=num_shards))
    shards.begin()
    for step in range(steps):
        push(shards, step)
    return shards


def marks_of(shards: RowShards) -> list[tuple[int, ...]]:
    return [tuple(last_of(store.export())["mark"].tolist()) for store in shards.stores()]


def captured(
    shards: RowShards,
    base: Mapping[str, Tensors] | None = None,
    marks: Sequence[tuple[int, ...]] = (),
    room: Room | None = None,
) -> Mapping[str, Tensors]:
    """Returns the numbers of all slices, as the reader of a checkpoint puts them together."""
    room = room or archive_of("rows").room(shards.spec, shards.layout, base or {})
    for index, (part, store) in enumerate(zip(shards.layout.slices, shards.stores(), strict=True)):
        arrays = last_of(store.export(marks[index])) if marks else last_of(store.export())
        for name, array in arrays.items():
            if name not in ("counts", "mark"):
                data = array.view(np.uint8)
                room.target(part, name, data.nbytes)[:] = data
    return room.arrays()


def restored(
    num_shards: int,
    arrays: Mapping[str, Tensors],
    counts: list[int],
    version: int,
    tables: Any = TABLES,
) -> RowShards:
    """Returns shards with the numbers of a checkpoint, received as an upload receives them."""
    shards = RowShards(row_spec(*tables, optimizer="sparse_adam", num_shards=num_shards))
    archive, layout = archive_of("rows"), shards.layout
    about = archive.about(shards.spec, layout, arrays)
    staged = archive.staged(shards.spec, layout.slices, about)
    parts: dict[int, dict[str, np.ndarray]] = {part.index: {} for part in layout.slices}
    for part, name, array in archive.parts(shards.spec, layout, arrays, list(parts)):
        dtype, numel = staged[part.index][name]
        assert (array.dtype.str, array.size) == (dtype, numel)
        parts[part.index][name] = array
    for index, store in enumerate(shards.stores()):
        store.restore({**parts[index], "counts": np.array(counts)}, version)
        clocks = [e.jobs["rows"].job.table(0).clocks for e in shards.engines]
        next(c[index] for c in clocks if index in c).restore(version, {0: version})
    return shards


@pytest.mark.parametrize(
    ("num_shards", "tables"), [(1, TABLES), (3, TABLES), (4, TABLES), (1, GOING), (3, GOING)]
)
def test_rows_come_back_on_another_number_of_shards(
    num_shards: int, tables: Any, tmp_path: Path
) -> None:
    before = trained(2, 5, tables)
    state = files.TableState(
        spec=before.spec, version=5, slices={}, counts=[5, 5], arrays=captured(before)
    )
    path = files.write(tmp_path, files.Checkpoint(job="j", num_workers=1, tables=[state]), keep=1)
    _, found = files.read(path, "j", lambda _: None)
    (table,) = found.tables
    after = restored(num_shards, dict(table.arrays), table.counts, 5, tables)
    for store in after.stores():
        store.check_invariants()
    for rows, wanted in zip(
        after.pull(IDS, with_state=True), before.pull(IDS, with_state=True), strict=True
    ):
        np.testing.assert_array_equal(rows, wanted)
    for each in (before, after):
        push(each, 5)
    assert after.version == before.version == 6
    for name in ("rows", "ids_waiting"):
        held = [sum(s.count_held()[name] for s in shards.stores()) for shards in (before, after)]
        assert held[0] == held[1]
    for rows, wanted in zip(after.pull(IDS), before.pull(IDS), strict=True):
        np.testing.assert_array_equal(rows, wanted)


FULL = (
    ("users", 0, 4, RowTable(seed=1, init="uniform(1)", max_rows=40)),
    ("items", 1 << 20, 3, RowTable(seed=2, init="normal(1)", lru=LRU_MIN)),
)


def test_a_full_table_comes_back_with_more_room() -> None:
    before = trained(1, 0, FULL)
    users, items = IDS[0][:40], IDS[1][:0]
    before.push(0, 0, [users, items], [np.ones((40, 4)), np.ones((0, 3))], HYPER)
    more = [IDS[0][:60], items], [np.ones((60, 4)), np.ones((0, 3))]
    with pytest.raises(TableFullError):
        before.push(0, 1, *more, HYPER)
    state = files.TableState(
        spec=before.spec, version=1, slices={}, counts=[1, 1], arrays=captured(before)
    )
    taken = files.Checkpoint(job="j", num_workers=1, tables=[state])
    for wrong, message in (
        ("users", "must be TABLE=N"),
        ("users=x", "must be TABLE=N"),
        ("films=9", "no row table 'films'; there are users, items"),
        ("users=0", "max_rows of 'users' is 0, must be 1 or more"),
        ("items=99999", "'items' keeps its newest .* max_rows is for tables without lru"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpoint.give_room(taken, [wrong])
    checkpoint.give_room(taken, ["users=100"])
    content = taken.tables[0].spec.content
    assert isinstance(content, Rows)
    assert [table.max_rows for table in content.tables] == [100, 0]
    tables = [(*FULL[0][:3], content.tables[0]), FULL[1]]
    after = restored(1, captured(before), [1, 1], 1, tables)
    np.testing.assert_array_equal(after.pull([users, items])[0], before.pull([users, items])[0])
    after.push(0, 1, *more, HYPER)
    assert sum(store.count_held()["rows"] for store in after.stores()) == 60
    with pytest.raises(RemoteProtocolError, match=r"60, .* room for 40; .* --max-rows users=N"):
        restored(1, captured(after), [1, 1], 2, FULL)


def require_equal(found: Mapping[str, Tensors], wanted: Mapping[str, Tensors]) -> None:
    assert found.keys() == wanted.keys()
    for array, tensors in wanted.items():
        for name, values in tensors.items():
            np.testing.assert_array_equal(found[array][name], values, f"{array} of {name}")


@pytest.mark.parametrize("gap", [1, 4])
@pytest.mark.parametrize("tables", [TABLES, GOING], ids=["all", "going"])
def test_an_earlier_copy_and_the_changes_since_are_the_whole(tables: Any, gap: int) -> None:
    """Rows that have changed, gone or come back, and ids that wait; each copy is the next base."""
    shards = trained(2, 1, tables)
    base, marks = captured(shards), marks_of(shards)
    for step in range(1, 21):
        push(shards, step)
        if step % gap == gap - 1:
            found = captured(shards, base, marks)
            require_equal(found, captured(shards))
            changes = last_of(shards.stores()[0].export(marks[0]))
            assert "gone.0" in changes
            assert len(changes["ids.0"]) <= 90 * gap
            base, marks = found, marks_of(shards)


class Cut(NamedTuple):
    """A checkpoint that was written, as the next one's base."""

    arrays: files.Written
    marks: list[tuple[int, ...]]


def refused(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


def cut_of(
    shards: RowShards, step: int, folder: Path, former: Cut | None
) -> tuple[Cut, Path, files.Written]:
    """Writes a checkpoint with the changes since a former one, as the schedule does."""
    base = former.arrays if former else None
    room = archive_of("rows").room(shards.spec, shards.layout, base or {})
    arrays = captured(shards, room=room, marks=former.marks if former else ())
    state = files.TableState(
        spec=shards.spec,
        version=step,
        slices={},
        counts=[step, step],
        arrays=arrays,
        base=base,
        changes=room.changes,
    )
    taken = files.Checkpoint(job="j", num_workers=1, tables=[state])
    path = files.write(folder, taken, keep=2)
    (table,) = files.in_files(path, taken).tables
    assert isinstance(table.arrays, files.Written)
    return Cut(table.arrays, marks_of(shards)), path, table.arrays


def nlinks(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_nlink for file in path.glob("*.safetensors")}


@pytest.mark.parametrize("rule", [SSGD(), ASGD()], ids=lambda rule: rule.name)
def test_checkpoints_in_files_hold_what_has_changed_since_the_one_before(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder is whole; files are written anew when there are many, or cannot be linked."""
    spec = row_spec(*GOING, optimizer="sparse_adam", num_shards=2, rule=rule)
    shards, counts = RowShards(spec), list[int]()
    cut: Cut | None = None
    path, found = tmp_path, dict[str, Tensors]()
    shards.begin()
    monkeypatch.setattr(files, "CHANGES_SHARE", 0)
    for step in range(30):
        push(shards, step)
        if step == 27:
            monkeypatch.setattr(os, "link", refused)
        cut, path, written = cut_of(shards, step + 1, tmp_path, cut)
        counts.append(written.num_changes)
        found = dict(files.read(path, "j", lambda _: None)[1].tables[0].arrays)
        require_equal(found, captured(shards))
        manifest = json.loads((path / files.MANIFEST).read_text())
        assert manifest["format"] == (4 if counts[-1] else 3)
    assert counts == [*range(21), *range(6), 0, 0, 0]
    after = captured(restored(3, dict(found), [30, 30], 30, GOING))
    require_equal(after, captured(shards))
    file = next(iter(path.glob("*.safetensors")))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CommandError, match="has changed since it was written"):
        files.read(path, "j", lambda _: None)


def test_changes_are_few_bytes_and_the_rest_is_linked(tmp_path: Path) -> None:
    shards = trained(1, 12)
    cut: Cut | None = None
    folders: list[Path] = []
    for step in range(12, 14):
        cut, path, _ = cut_of(shards, step, tmp_path, cut)
        folders.append(path)
        ids = [IDS[0][:5], IDS[1][:5]]
        shards.push(0, step, ids, [np.ones((5, 4)), np.ones((5, 3))], HYPER)
    own = {name for name, count in nlinks(folders[1]).items() if count == 1}
    assert own == {"changes-1.safetensors"}
    assert set(nlinks(folders[1])) == {*nlinks(folders[0]), *own}


def test_changes_that_are_not_known_are_a_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, after rows were loaded, and when more ids have gone than are noted."""
    shards = RowShards(row_spec(*GOING, optimizer="sparse_adam"), 1, tmp_path)
    shards.begin()
    push(shards, 0)
    (mark,) = marks_of(shards)
    push(shards, 1)
    assert "gone.0" in last_of(shards.stores()[0].export(mark))
    shards.kill(0)
    base = captured(shards)
    assert "gone.0" not in last_of(shards.stores()[0].export(mark))
    (mark,) = marks_of(shards)
    shards.load([[1 << 50], []], [np.ones((1, 12)), np.ones((0, 9))])
    assert "gone.0" not in last_of(shards.stores()[0].export(mark))
    require_equal(captured(shards, base, [mark]), captured(shards))
    monkeypatch.setattr(gone, "IDS_MAX", 30)
    push(shards, 2)
    (mark,) = marks_of(shards)
    for step in range(3, 9):
        push(shards, step)
    assert "gone.0" not in last_of(shards.stores()[0].export(mark))


def test_tables_without_an_updated_row_are_saved_and_come_back() -> None:
    arrays = captured(trained(2, 0))
    assert arrays["weights"]["users"].shape == (0, 4)
    again = captured(restored(3, arrays, [0, 0], 0))
    assert again["weights"]["items"].shape == (0, 3)


def test_files_hold_the_rows_of_each_table_by_id() -> None:
    shards = trained(2, 3)
    arrays = captured(shards)
    assert sorted(arrays) == ["exp_avg", "exp_avg_sq", "ids", "versions", "weights"]
    ids = arrays["ids"]["items"]
    assert ids.tolist() == sorted(ids.tolist())
    np.testing.assert_array_equal(arrays["weights"]["items"], shards.pull([[], ids])[1])
    assert set(arrays["versions"]["items"].tolist()) <= {1, 2, 3}


def test_a_file_of_another_row_table_is_refused(tmp_path: Path) -> None:
    shards = trained(1, 2)
    arrays = dict(captured(shards))
    arrays["exp_avg"] = {name: values[:, :2] for name, values in arrays["exp_avg"].items()}
    state = files.TableState(spec=shards.spec, version=2, slices={}, counts=[2, 2], arrays=arrays)
    path = files.write(tmp_path, files.Checkpoint(job="j", num_workers=1, tables=[state]), keep=1)
    with pytest.raises(CommandError, match="is not of its row table"):
        files.read(path, "j", lambda _: None)


def test_rows_of_another_slice_or_beyond_the_bound_are_refused() -> None:
    shards = trained(2, 2)
    first, second = shards.stores()
    with pytest.raises(DecodeError, match="of another slice"):
        second.restore(last_of(first.export()), 2)
    small = row_spec(("users", 0, 4, RowTable(max_rows=10)))
    archive = archive_of("rows")
    with pytest.raises(RemoteProtocolError, match="are 11, and it has room for 10"):
        archive.staged(small, small.layout().slices, {"rows": [[11]]})
