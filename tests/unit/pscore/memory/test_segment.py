"""Shared memory: two maps of one segment, where the buffers lie, and a copy that was torn."""

import fcntl
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from pscore.memory.segment import Segment, WeightsMap
from pscore.net import sockets, wire
from pscore.pb.ps.v1 import data_pb2
from pscore.types import SliceSpec
from psworker.transports import PullCall
from psworker.transports.shared_memory import Attachment, SharedMemoryTransport


def spec(index: int, numel: int) -> SliceSpec:
    return SliceSpec(index=index, shard=0, start=0, stop=numel, segments=())


SPECS = [spec(0, 1000), spec(2, 17), spec(5, 4096)]


def test_one_map_reads_the_bytes_that_another_writes() -> None:
    ours = Segment.create(8192)
    theirs = Segment.attach(os.dup(ours.fd), 8192)
    ours.floats(64, 10)[:] = np.arange(10)
    assert theirs.floats(64, 10).tolist() == list(range(10))


def test_the_memory_stays_when_the_descriptors_are_closed() -> None:
    ours = Segment.create(4096)
    theirs = Segment.attach(os.dup(ours.fd), 4096)
    values = ours.floats(0, 4)
    ours.close()
    theirs.close()
    values[:] = 7.0
    assert theirs.floats(0, 4).tolist() == [7.0] * 4


def test_a_segment_shorter_than_declared_is_refused_and_its_descriptor_closed() -> None:
    ours = Segment.create(4096)
    copy = os.dup(ours.fd)
    with pytest.raises(OSError, match="segment of 4096 bytes, 8192 declared"):
        Segment.attach(copy, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


def test_a_segment_cannot_be_shortened_or_extended() -> None:
    """Else an access of the other process to the lost pages would end it (SIGBUS)."""
    ours = Segment.create(8192)
    for nbytes in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(ours.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ours.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("may_be_file", [False, True])
def test_memory_that_its_owner_could_shorten_is_refused(may_be_file: bool) -> None:
    fd = os.memfd_create("paceline", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(OSError, match="not sealed: its owner could shorten it"):
        Segment.attach(fd, 8192, may_be_file=may_be_file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_is_accepted_only_where_it_may_be_one(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    with pytest.raises(OSError, match="not sealed"):
        Segment.attach(os.open(path, os.O_RDWR), 8192)
    assert Segment.attach(os.open(path, os.O_RDWR), 8192, may_be_file=True).nbytes == 8192


def test_a_segment_has_no_name_in_the_file_system() -> None:
    ours = Segment.create(4096)
    assert os.readlink(f"/proc/self/fd/{ours.fd}") == "/memfd:paceline (deleted)"


def test_buffers_and_versions_of_all_slices_are_disjoint_and_aligned() -> None:
    layout = WeightsMap(SPECS)
    segment = Segment.create(layout.nbytes)
    for part in SPECS:
        for number, buffer in enumerate(layout.buffers(segment, part.index)):
            assert buffer.ctypes.data % 64 == 0
            assert not buffer.any(), "the memory of two buffers overlaps"
            buffer[:] = 10 * part.index + number + 1
        assert not layout.versions(segment, part.index).any()
        layout.versions(segment, part.index)[:] = (part.index, -1)
    for part in SPECS:
        for number, buffer in enumerate(layout.buffers(segment, part.index)):
            assert np.all(buffer == 10 * part.index + number + 1)
        assert layout.versions(segment, part.index).tolist() == [part.index, -1]


@pytest.mark.parametrize(("published", "is_whole"), [(7, True), (-1, False), (9, False)])
def test_a_copy_of_weights_that_changed_meanwhile_is_dropped(
    published: int, is_whole: bool
) -> None:
    """-1: they are being written; 9: they have been written over since the notice."""
    layout = WeightsMap(SPECS)
    segment = Segment.create(layout.nbytes)
    attachment = Attachment(
        sender=data_pb2.Sender(table=3),
        grads=segment,
        layout=layout,
        specs=SPECS,
        weights=segment,
        maps={
            part.index: (layout.buffers(segment, part.index), layout.versions(segment, part.index))
            for part in SPECS
        },
    )
    transport = SharedMemoryTransport.__new__(SharedMemoryTransport)  # Without its connections.
    transport._attachments = {3: attachment}
    buffers, versions = attachment.maps[2]
    versions[1], buffers[1][:] = published, 5.0
    call = PullCall(
        header=data_pb2.PullHeader(sender=attachment.sender, slice=2),
        weights=np.zeros(17, np.float32),
        state=[],
    )
    reply = data_pb2.PullReply(ready=True, version=7, buffer=2)
    assert transport._copy(call, reply) is is_whole
    if is_whole:
        assert np.all(call.weights == 5.0)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["notice", "frame"])
def test_weights_in_use_are_written_only_when_they_are_fetched(is_mapped: bool) -> None:
    """A frame instead of a notice: slow readers had all buffers of the shard that are mapped."""
    transport = SharedMemoryTransport.__new__(SharedMemoryTransport)  # Without its connections.
    layout = WeightsMap(SPECS)
    segment = Segment.create(layout.nbytes)
    maps = layout.buffers(segment, 2), layout.versions(segment, 2)
    maps[1][0], maps[0][0][:] = 7, 5.0
    attachment = Attachment(
        sender=data_pb2.Sender(table=3), grads=segment, layout=layout, specs=SPECS, maps={2: maps}
    )
    transport._attachments = {3: attachment}
    call = PullCall(
        header=data_pb2.PullHeader(sender=attachment.sender, slice=2),
        weights=np.zeros(17, np.float32),
        state=[],
        copy_on_wait=True,
    )
    sent = b"" if is_mapped else np.full(17, 5.0, np.float32).tobytes()
    reply = data_pb2.PullReply(ready=True, version=7, buffer=int(is_mapped))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.encode(b"", sent))
        incoming = sockets.read_header(ours)
        assert incoming is not None
        assert transport._on_pulled(data_pb2.Envelope(pulled=reply), call, incoming) is None
    assert call.done.result() == reply
    assert not call.weights.any()
    assert call.fetch is not None
    assert call.fetch()
    assert np.all(call.weights == 5.0)
