"""A worker that speaks to one shard by hand: enough to make a job, and to send what is wrong."""

from typing import Any

from pscore.net import wire
from pscore.net.credentials import ANYONE, Credentials
from pscore.net.rpc import DATA_SERVICE, SENDER_KEY
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, data_pb2

NUMEL = 4096
WAIT_S = 200.0
HYPER = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]  # Of sgd: the learning rate, and nothing else.


class Worker:
    """Rank `rank` of a job with one tensor `weight` of `NUMEL` elements."""

    def __init__(
        self,
        address: str,
        rank: int = 0,
        num_workers: int = 1,
        *,
        job: str = "train",
        credentials: Credentials = ANYONE,
    ) -> None:
        self.channel = credentials.channel(address)
        self.job = job
        self.control = control_pb2_grpc.ControlStub(self.channel)
        self.push_frame = self.channel.unary_unary(f"/{DATA_SERVICE}/Push", bytes, bytes)
        self.pull_frame = self.channel.unary_unary(f"/{DATA_SERVICE}/Pull", bytes, bytes)
        self.rank = rank
        self.num_workers = num_workers
        self.sender = data_pb2.Sender(job=job, table=0, worker=rank, incarnation=7)
        self.named = ((SENDER_KEY, self.sender.SerializeToString()),)

    def join(self) -> None:
        request = pb.JoinRequest(
            job=self.job,
            rank=self.rank,
            num_workers=self.num_workers,
            incarnation=7,
            host="here",
            pid=1,
            protocol=wire.PROTOCOL,
        )
        self.control.Join(request, timeout=WAIT_S)

    def define(self, num_shards: int = 1, arguments: str = "{}") -> None:
        table = pb.Table(
            name="model",
            tensors=[pb.Tensor(name="weight", shape=[NUMEL], dtype="float32")],
            num_shards=num_shards,
            rule=pb.Plugin(name="ssgd", arguments=arguments),
            compressor=pb.Plugin(name="none"),
            optimizer="sgd",
            num_groups=1,
        )
        request = pb.DefineRequest(job=self.job, worker=self.rank, incarnation=7, table=table)
        self.control.Define(request, timeout=WAIT_S)

    def push(self, header: data_pb2.PushHeader, payload: bytes) -> data_pb2.PushReply:
        header.sender.CopyFrom(self.sender)
        frame = wire.encode(header.SerializeToString(), payload)
        reply, _ = wire.decode(self.push_frame(frame, timeout=WAIT_S, metadata=self.named))
        return data_pb2.PushReply.FromString(bytes(reply))

    def push_weights(self) -> data_pb2.PushReply:
        header = data_pb2.PushHeader(role=data_pb2.ROLE_WEIGHTS, samples=1)
        return self.push(header, bytes(4 * NUMEL))

    def push_gradient(self, step: int = 0) -> data_pb2.PushReply:
        header = data_pb2.PushHeader(step=step, base_version=step, samples=1, hyper=HYPER)
        return self.push(header, bytes(4 * NUMEL))

    def header(self, **values: Any) -> data_pb2.PushHeader:
        return data_pb2.PushHeader(**{"samples": 1, "hyper": HYPER, **values})

    def pull(self, min_version: int, wait_ms: int) -> data_pb2.PullReply:
        header = data_pb2.PullHeader(
            sender=self.sender, clock=0, min_version=min_version, wait_ms=wait_ms
        )
        frame = wire.encode(header.SerializeToString())
        reply, _ = wire.decode(self.pull_frame(frame, timeout=WAIT_S, metadata=self.named))
        return data_pb2.PullReply.FromString(bytes(reply))

    def close(self) -> None:
        self.channel.close()


def nested(depth: int) -> str:
    """Returns what begins like JSON and goes deeper than a decoder's stack."""
    return "[" * depth
