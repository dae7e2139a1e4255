"""Rule 9: docs/format.md has the sizes, magics, limits and fields that the code has."""

import re
from math import ceil

import pytest

from pscore.compressors import COMPRESSORS, parse_compressor
from pscore.memory import segment
from pscore.net import wire
from pscore.pb.ps.v1 import state_pb2
from psserver.durability import journal_dir, sealed
from psserver.remote import checkpoint_files
from psserver.slices import arena, journal
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
FLOAT_NBYTES, LONG_NBYTES = 4, 8


def rows_after(text: str) -> list[list[str]]:
    """Returns the cells of the first table at or behind a text of the page, without its head."""
    assert text in PAGE, f"docs/format.md has no {text!r}"
    lines = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(text) :], re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()][2:]


def end_of(rows: list[list[str]]) -> int:
    """Returns where fields of fixed size end; they must follow each other without a gap."""
    offset = 0
    for at, nbytes, *_ in rows:
        if not (at.isdecimal() and nbytes.isdecimal()):
            break
        assert int(at) == offset, at
        offset += int(nbytes)
    return offset


def test_the_frame() -> None:
    assert end_of(rows_after("## Frame")) == wire.PREFIX.size
    assert wire.CHECKED.size + LONG_NBYTES == wire.PREFIX.size
    assert f"`PL`, protocol version ({wire.PROTOCOL}), 0" in PAGE
    assert b"PL" + bytes([wire.PROTOCOL, 0]) == wire.MAGIC
    assert f"larger than {wire.HEADER_NBYTES_MAX} " in PAGE
    assert f"larger than {wire.PAYLOAD_NBYTES_MAX} " in PAGE
    assert wire.FLOAT_NBYTES == FLOAT_NBYTES


PAYLOADS = {row[0].strip("`"): row[1].strip("`") for row in rows_after("## Payloads")}


def test_every_compressor_has_a_row() -> None:
    rows = {name.partition("(")[0] for name in PAYLOADS}
    missing, gone = COMPRESSORS.own.keys() - rows, rows - COMPRESSORS.own.keys()
    assert not missing, f"the table under '## Payloads' of docs/format.md has no {missing}"
    assert not gone, f"the table under '## Payloads' of docs/format.md has {gone}, which is gone"


@pytest.mark.parametrize("numel", [1, 31, 2047, 2048, 2049, 5000, 1 << 20])
@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_the_length_of_a_payload(name: str, numel: int) -> None:
    compressor = parse_compressor(name)
    ratio = compressor.arguments().get("ratio", 0.0)
    in_chunks = numel // 4096 * 64 + min(64, numel % 4096)  # E, of sparseloco.
    known = {"n": numel, "k": max(1, ceil(float(ratio) * numel)), "E": in_chunks, "ceil": ceil}
    nbytes = compressor.payload_nbytes_max(numel)
    if name == "dgc":  # Its ratio has a warm-up, and up to twice as many elements leave.
        assert (nbytes - 4) % 8 == 0
    else:
        assert nbytes == eval(PAYLOADS[name], {"__builtins__": {}}, known)


def test_shared_memory() -> None:
    first = rows_after("## Shared memory")[0]
    assert first[1] == f"{segment.BUFFERS * LONG_NBYTES} S"
    assert f"{segment.PAGE} x p" in PAGE
    assert f"up to a multiple of {segment.LINE}" in PAGE


def test_the_checkpoint() -> None:
    keys = {row[0]: row[1] for row in rows_after("| key of the manifest")}
    assert keys["`format`"] == str(checkpoint_files.FORMAT)
    checkpoint = checkpoint_files.Checkpoint(job="job", num_workers=1)
    manifest = checkpoint_files._manifest(checkpoint, 1, {})
    assert set(re.findall(r"`(\w+)`", " ".join(keys))) == set(manifest)


def test_the_folder_of_a_journal() -> None:
    files = {
        row[0].strip("`").partition("/")[2] or row[0].strip("`") for row in rows_after("## Journal")
    }
    own = {
        getattr(journal_dir, name)
        for name in ("STAMP", "LOCK", "CLOSED", "JOB", "ARENA", "RESIDUALS", "PUBLISHED", "LOST")
    }
    assert files == own | {"T.json", "T.weights", "T.S.R.rows", "T.S.undo"}
    assert f"format ({journal_dir.FORMAT})" in PAGE


def test_the_arena_and_the_weights_file() -> None:
    rows = rows_after("**Arena**")
    assert f"`{arena.MAGIC.decode()}`" in rows[0][2]
    assert end_of(rows[:3]) == len(arena.MAGIC) + 2 * LONG_NBYTES
    assert rows[3][0] == str(arena.PAGE)
    assert f"multiple of {arena.LINE} bytes" in rows[3][2]
    rows = rows_after("**Weights**")
    assert f"`{sealed.MAGIC.decode()}`" in rows[0][2]
    assert end_of(rows) == sealed.WORD * sealed.HEAD_WORDS == int(rows[3][0])


def test_the_root_and_the_halves() -> None:
    rows = rows_after("**Root**")
    assert end_of(rows) == journal.ROOT_NBYTES == LONG_NBYTES * journal.ROOT_NUMEL
    assert [int(row[0]) // LONG_NBYTES for row in rows[1:4]] == [
        journal.PLACE,
        journal.ROOM,
        journal.LENGTH,
    ]
    assert f"-1 before the first, {journal.NONE_MORE} once" in rows[0][2]
    assert f"lower {journal.CHECK_BITS}" in rows[0][2]
    half = rows_after("**Half**")
    assert int(half[0][1]) == journal.MARK_NBYTES
    assert f"0x{journal.MARK:X}" in half[0][2]
    assert [int(row[1]) for row in half[2:]] == [journal.NUMBER.size, journal.CHECK.size]


def test_the_record() -> None:
    shown = {row[0].strip("`"): int(row[1]) for row in rows_after("**Record**")}
    fields = state_pb2.SliceRecord.DESCRIPTOR.fields
    assert shown == {field.name: field.number for field in fields}
