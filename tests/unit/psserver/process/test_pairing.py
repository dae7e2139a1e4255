"""A place that has lost its journals asks the register where its shard is, before it serves."""

from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psserver.durability.sealed import read_json
from psserver.process.pairing import note_given
from psserver.process.shard_plan import PairPlan
from psserver.standby.folder_register import FolderRegister
from psserver.standby.succession import Claim

OWN, OTHER = "a:1", "b:1"


def plan_of(register: Path | str, *, is_first: bool = True) -> PairPlan:
    return PairPlan(other=OTHER, own=OWN, is_first=is_first, register=str(register), failover_s=1.0)


def claimed(register: Path, address: str) -> None:
    claim = Claim(epoch=1, holder="it", address=address)
    assert FolderRegister(register, "shard-1-of-2").create(claim)


@pytest.fixture
def register(tmp_path: Path) -> Path:
    (tmp_path / "register").mkdir()
    return tmp_path / "register"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shard-1-of-2").mkdir()
    return tmp_path / "shard-1-of-2"


def test_a_shard_that_the_other_place_has_was_given_there(folder: Path, register: Path) -> None:
    claimed(register, OTHER)
    note_given(folder, plan_of(register))
    assert read_json(folder / "given.json") == {"id": "it", "to": OTHER}


def test_a_shard_that_a_former_process_has_is_not_begun_anew(folder: Path, register: Path) -> None:
    claimed(register, OWN)
    with pytest.raises(ConfigError, match="start it again once the standby has taken over"):
        note_given(folder, plan_of(register))
    with pytest.raises(ConfigError, match="the register at"):
        note_given(folder, plan_of(folder / "none"))


def test_a_new_shard_and_a_place_that_knows_itself_begin_as_they_are(
    folder: Path, register: Path
) -> None:
    note_given(folder, plan_of(register))
    claimed(register, OTHER)
    note_given(folder, plan_of(register, is_first=False))
    note_given(folder, plan_of(""))
    (folder / "register.json").write_text("{}")
    note_given(folder, plan_of(register))
    assert not (folder / "given.json").exists()
