"""Exported row tables as modules of torch: bits of live lookups, and refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pscore.errors import ConfigError
from pscore.rows.spec import ROW_TABLE, RowTable
from psserver.archives import archive_of
from psserver.exits import CommandError
from psserver.remote import checkpoint_files as files
from psworker.rows.exported import load_embedding, update_embedding
from tests.row_driver import RowShards, row_spec
from tests.unit.psserver.ordered import last_of

ONE = np.array([[1.0, 0.0, 0.0]])
USERS = ("users", 0, 3, RowTable(seed=1, init="uniform(1)"))
ITEMS = ("items", 50, 4, RowTable(seed=2, init="normal(1)", max_norm=1.5))


def exported(folder: Path, ids: list[int], name: str) -> tuple[Path, RowShards]:
    """Trains rows of both tables on two shards, and exports one table."""
    shards = RowShards(row_spec(USERS, ITEMS, num_shards=2))
    shards.begin()
    push(shards, 0, ids)
    return export(shards, folder, name), shards


def push(shards: RowShards, step: int, ids: list[int]) -> None:
    grads = np.random.default_rng(step).standard_normal((len(ids), 4))
    shards.push(0, step, [ids, ids], [grads[:, :3], grads], ONE)


def export(
    shards: RowShards,
    folder: Path,
    name: str,
    since: Path | None = None,
    suffix: str = ".safetensors",
) -> Path:
    room = archive_of("rows").room(shards.spec, shards.layout, {})
    for part, store in zip(shards.layout.slices, shards.stores(), strict=True):
        for array, values in last_of(store.export()).items():
            if array not in ("counts", "mark"):
                room.target(part, array, values.nbytes)[:] = values.view(np.uint8)
    state = files.TableState(
        spec=shards.spec, version=1, slices={}, counts=[1, 1], arrays=room.arrays()
    )
    path = folder / f"{name}-{shards.version}{'-changes' if since else ''}{suffix}"
    files.export(path, files.Checkpoint(job="j", num_workers=1, tables=[state]), name, since)
    return path


def test_a_fixed_table_is_a_module_with_the_bits_of_lookups(tmp_path: Path) -> None:
    path, shards = exported(tmp_path, [3, 49, 7], "items")
    module = load_embedding(path, padding_idx=9)
    live = shards.pull([[], np.arange(50)])[1]
    live[9] = 0.0
    np.testing.assert_array_equal(module.weight.detach().numpy(), live)
    assert np.linalg.norm(live, axis=1).max() <= 1.5
    assert module.weight.requires_grad
    assert not module(torch.tensor([9])).any()


def test_a_module_has_the_padding_of_its_table(tmp_path: Path) -> None:
    table = replace(ITEMS[3], padding_idx=9)
    shards = RowShards(row_spec(USERS, (*ITEMS[:3], table), num_shards=2))
    shards.begin()
    push(shards, 0, [3])
    module = load_embedding(export(shards, tmp_path, "items"))
    assert module.padding_idx == 9
    assert not module(torch.tensor([9])).any()


def test_a_table_of_any_ids_needs_a_number_of_rows_that_has_all_of_them(tmp_path: Path) -> None:
    path, shards = exported(tmp_path, [3, 49], "users")
    with pytest.raises(ConfigError, match="has no bound on its ids"):
        load_embedding(path)
    with pytest.raises(ConfigError, match="has 1 updated rows beyond num_embeddings 49"):
        load_embedding(path, 49)
    np.testing.assert_array_equal(
        load_embedding(path, 60).weight.detach().numpy(), shards.pull([np.arange(60), []])[0]
    )


def test_other_files_and_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(3, np.float32)}, path)
    with pytest.raises(ConfigError, match="is not a row table"):
        load_embedding(path)
    with pytest.raises(CommandError, match="no row table or parameter 'tags'; it has 'items'"):
        exported(tmp_path, [3], "tags")


def test_changes_bring_a_module_up_to_date_in_the_order_of_the_exports(tmp_path: Path) -> None:
    """Rows change, come, go, and come back; the files have nothing else."""
    table = replace(ITEMS[3], ttl=2)
    shards = RowShards(row_spec(USERS, (*ITEMS[:3], table), num_shards=2))
    shards.begin()
    push(shards, 0, [3, 49, 7])
    module: torch.nn.Embedding | None = None
    whole: Path | None = None
    changes: list[Path] = []
    for step, ids in enumerate([[3, 20], [20], [21], [3, 9], [9]], 1):
        last, whole = whole, export(shards, tmp_path, "items")
        if last is None:
            module = load_embedding(whole, padding_idx=9)
        else:
            assert module is not None
            changes.append(export(shards, tmp_path, "items", last))
            update_embedding(module, changes[-1])
            wanted = load_embedding(whole, padding_idx=9).weight
            assert torch.equal(module.weight, wanted)
        push(shards, step, ids)
    assert module is not None
    found = [load_file(path) for path in changes]
    assert [sorted(each["ids"].tolist()) for each in found] == [[3, 20], [20], [21], [3, 9]]
    assert [each["gone"].tolist() for each in found] == [[], [7, 49], [3], [20]]
    for path in changes[:2]:
        with pytest.raises(ConfigError, match="since another export"):
            update_embedding(module, path)
    with pytest.raises(ConfigError, match="pass it to update_embedding"):
        load_embedding(changes[0])
    with pytest.raises(ConfigError, match="pass it to load_embedding"):
        update_embedding(module, tmp_path / "items-1.safetensors")
    with pytest.raises(ConfigError, match="does not have the whole of row table 'items'"):
        export(shards, tmp_path, "items", changes[0])
    with pytest.raises(ConfigError, match="is not a row table"):
        export(shards, tmp_path, "items", tmp_path / "none.safetensors")


def test_a_parquet_file_has_the_ids_and_the_bits_of_lookups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    _, shards = exported(tmp_path, [3, 49, 7], "users")
    table = parquet.read_table(export(shards, tmp_path, "users", suffix=".parquet"))
    assert table["id"].to_pylist() == [3, 7, 49]
    rows = np.array(table["row"].to_pylist(), np.float32)
    np.testing.assert_array_equal(rows, shards.pull([[3, 7, 49], []])[0])
    assert json.loads(table.schema.metadata[ROW_TABLE.encode()])["name"] == "users"


def test_a_parquet_file_that_cannot_be_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shards = exported(tmp_path, [3], "users")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        export(shards, tmp_path, "users", suffix=".parquet")
    with pytest.raises(ConfigError, match="no --since"):
        export(shards, tmp_path, "users", since=path, suffix=".parquet")
    assert list(tmp_path.iterdir()) == [path]
