"""The bytes of a call that sends pieces of journals."""

import pytest

from pscore.pb.ps.v1 import standby_pb2 as pb
from psserver.standby import target
from psserver.standby.spans import JournalPiece

PIECES = [
    JournalPiece(path="night/job", data=b"{}", size=2, reserved=2),
    JournalPiece(path="night/0.weights", offset=4096, data=bytes(1 << 20), size=1 << 40),
    JournalPiece(path="day", is_gone=True),
    *(JournalPiece(path="night/arena", data=bytes(nbytes)) for nbytes in (0, 127, 128, 16384)),
]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("pieces", [[], PIECES])
def test_pieces_are_encoded_as_protobuf_does_it(pieces: list[JournalPiece], more: bool) -> None:
    wanted = pb.PutRequest(id="a move", more=more)
    for piece in pieces:
        wanted.pieces.add(
            path=piece.path,
            offset=piece.offset,
            data=piece.data,
            size=piece.size,
            reserved=piece.reserved,
            gone=piece.is_gone,
        )
    assert pb.PutRequest.FromString(target.encoded("a move", pieces, more)) == wanted


def test_the_call_has_the_name_that_the_service_has() -> None:
    method = pb.DESCRIPTOR.services_by_name["Standby"].methods_by_name["Put"]
    assert f"/{method.containing_service.full_name}/{method.name}" == target.PUT
