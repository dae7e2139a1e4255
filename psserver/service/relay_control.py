"""The control service of a relay: it describes itself, and knows no job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pscore.net import wire
from pscore.net.listener import Listener
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from pscore.version import VERSION

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]


class RelayControl(control_pb2_grpc.ControlServicer):
    """The description of one shard of a relay; every other call is refused."""

    def __init__(self, index: int, num_shards: int, data: Listener) -> None:
        self._reply = pb.DescribeReply(
            cluster="relay",
            shard=index,
            num_shards=num_shards,
            protocol=wire.PROTOCOL,
            version=VERSION,
            data_port=data.port,
            data_local=data.local,
        )

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: Context
    ) -> pb.DescribeReply:
        """Returns the shard's index."""
        return self._reply
