"""`psserver drain`, `standby` and `promote`: a shard moves to another process as its job trains."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import grpc

from pscore.errors import AccessError, TransportError
from pscore.net.credentials import Credentials
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import standby_pb2 as pb
from pscore.pb.ps.v1 import standby_pb2_grpc
from psserver.exits import CommandError, Exit
from psserver.remote.ask import explained

ASK_S = 0.1
AGAIN_S = 1.0  # Before a move is tried again.
SILENT_MAX = (
    15  # Questions in a row without an answer: a process that is killed comes back earlier.
)
ANSWER_S_MAX = 10.0
OVER = ("serving", "moved")
MOVES_HERE = "prepared"  # Phase of a process that is about to have the shard.
ONWARD = ("copying", "followed", "frozen", "given")  # Phases of a move, in their order.
GOES_ON = "the shard goes on with it: `psserver status` shows how; or give this command again"
UNDECIDED = "asking"  # After a kill: the shard's process asks whether its standby has the shard.


def move(
    address: str,
    to: str,
    mbit: int,
    credentials: Credentials,
    tell: Callable[[str], None],
    *,
    standby: pb.MoveRequest | None = None,
    deadline_s: float = math.inf,
) -> pb.MoveReply:
    """Moves the shard at `address` to the process at `to`; returns when it is there.

    Args:
        address: The process that has the shard.
        to: An empty process of the same shard; empty: the shard's standby.
        mbit: The most Mbit/s before the pause; 0: no limit.
        credentials: With the token for everything.
        tell: Called with each phase.
        standby: How that process is to be the shard's standby; None: the shard moves there.
        deadline_s: Time of `time.monotonic` until which it waits.

    Raises:
        CommandError: A process refuses or does not answer, or the move was given up: then the shard
            is where it was.
    """
    is_ordered = False
    try:
        with _connected(address, credentials) as stub:
            request = pb.MoveRequest(to=to or _standby(stub, address, deadline_s), mbit=mbit)
            request.stays = standby is not None
            if standby is not None:
                tell(_cost(stub.Move(pb.MoveRequest(), timeout=ANSWER_S_MAX).table_nbytes))
                request.MergeFrom(standby)
            is_ordered, wanted = True, "followed" if request.stays else "moved"
            reply = _await(stub, request, wanted, tell, deadline_s)
    except KeyboardInterrupt:
        tell(GOES_ON if is_ordered else f"nothing was begun: the shard stays at {address}")
        raise
    if reply.phase != wanted:
        raise CommandError(
            Exit.UNHEALTHY,
            f"the shard stays at {address}: "
            f"{reply.problem or 'the move was given up, or the process was started again'}",
        )
    return reply


def leave(
    address: str, wait_s: float, mbit: int, credentials: Credentials, tell: Callable[[str], None]
) -> pb.MoveReply | None:
    """Moves the shard at `address` to its standby, before the process there ends.

    That process takes no shard from now on. If both places of a shard are to end, the one without
    it is let go, and the other one waits for its return.

    Args:
        wait_s: Seconds in which a move is tried again.

    Returns:
        How it has moved; None: that process has no shard that a worker uses.

    Raises:
        CommandError: It has not moved in this time, or the process is gone.
    """
    deadline_s, said, num_silent = time.monotonic() + wait_s, "", 0
    is_needed = _is_needed(address, credentials)
    while is_needed:
        try:
            return move(address, "", mbit, credentials, tell, deadline_s=deadline_s)
        except CommandError as problem:
            if time.monotonic() >= deadline_s:
                raise
            if problem.message != said:
                said = problem.message
                tell(f"{said}; tried again for {wait_s:g} s")
        time.sleep(AGAIN_S)
        try:
            is_needed, num_silent = _is_needed(address, credentials), 0
        except CommandError:
            num_silent += 1
            if num_silent == SILENT_MAX:
                raise
    return None


def _is_needed(address: str, credentials: Credentials) -> bool:
    """Returns whether a process that is about to end has, or gets, a shard that workers use."""
    with _connected(address, credentials) as stub:
        reply = stub.Move(pb.MoveRequest(ends=True), timeout=ANSWER_S_MAX)
    return reply.num_live > 0 or reply.taking == MOVES_HERE


def withdraw(address: str, credentials: Credentials, tell: Callable[[str], None]) -> None:
    """Gives up the standby of the shard at `address`, and the wish for one.

    Raises:
        CommandError: None is wanted, or the shard has moved by now.
    """
    try:
        with _connected(address, credentials) as stub:
            reply = _await(stub, pb.MoveRequest(withdraws=True), "serving", tell)
    except KeyboardInterrupt:
        tell(GOES_ON)
        raise
    if reply.phase == "moved":
        raise CommandError(Exit.UNHEALTHY, f"the shard has moved to {reply.to}")


def _await(
    stub: standby_pb2_grpc.StandbyStub,
    request: pb.MoveRequest,
    wanted: str,
    tell: Callable[[str], None],
    deadline_s: float = math.inf,
) -> pb.MoveReply:
    """Gives an order, and returns the shard's answer when that is over, or has the phase `wanted`.

    It is over too when phases begin again: it was given up, and a standby is filled once more.

    Args:
        tell: Called with each phase.
        deadline_s: Time of `time.monotonic` from which an unfinished one is answered.
    """
    reply, said = stub.Move(request, timeout=ANSWER_S_MAX), ""
    while reply.phase not in (*OVER, wanted):
        if time.monotonic() >= deadline_s:
            break
        if {said, reply.phase} <= set(ONWARD) and ONWARD.index(reply.phase) < ONWARD.index(said):
            break
        if reply.phase != said:
            said = reply.phase
            tell(said)
        time.sleep(ASK_S)
        reply = stub.Move(pb.MoveRequest(), timeout=ANSWER_S_MAX)
    return reply


def _standby(stub: standby_pb2_grpc.StandbyStub, address: str, deadline_s: float) -> str:
    """Returns the address of a shard's standby, also while that is filled, or has taken over."""
    reply = stub.Move(pb.MoveRequest(), timeout=ANSWER_S_MAX)
    while reply.phase == UNDECIDED and time.monotonic() < deadline_s:
        time.sleep(ASK_S)
        reply = stub.Move(pb.MoveRequest(), timeout=ANSWER_S_MAX)
    if reply.phase == "serving":
        raise CommandError(
            Exit.UNHEALTHY,
            f"the shard at {address} has no standby{reply.problem and f' ({reply.problem})'}: name "
            "the process that is to have it, or run `psserver standby` first",
        )
    return reply.to


@contextlib.contextmanager
def _connected(address: str, credentials: Credentials) -> Iterator[standby_pb2_grpc.StandbyStub]:
    """Context manager: yields the calls of a process, whose refusal becomes a CommandError."""
    with credentials.channel(address) as channel:
        try:
            yield standby_pb2_grpc.StandbyStub(channel)
        except grpc.RpcError as failure:
            raise _refusal(failure, address, credentials) from failure


def _refusal(failure: grpc.RpcError, address: str, credentials: Credentials) -> CommandError:
    """Returns the error of a process that refuses, or does not answer."""
    error = error_of(failure, address)
    if isinstance(error, AccessError | TransportError):
        return explained(failure, address, credentials, ANSWER_S_MAX)
    return CommandError(Exit.UNHEALTHY, f"{address}: {error}")


def _cost(nbytes: int) -> str:
    return (
        f"the standby needs {nbytes / 1e6:.1f} MB of memory, and an update of all weights sends at "
        f"most as much: {nbytes / 125_000:.0f} Mbit/s for each update a second"
    )


def promote(address: str, credentials: Credentials) -> list[str]:
    """Makes a standby serve; returns the jobs that continue.

    Raises:
        CommandError: It refuses or does not answer: then it does not serve.
    """
    with _connected(address, credentials) as stub:
        return list(stub.Promote(pb.PromoteRequest(), timeout=ANSWER_S_MAX).jobs)
