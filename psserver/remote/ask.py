"""Calls all shards at once: asks for their state or readiness, or tells them to end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscore.errors import AccessError, TransportError
from pscore.net.addresses import explain_silence
from pscore.net.credentials import ANYONE, Credentials
from pscore.net.rpc import RETRYABLE, ChannelOptions, error_of
from pscore.net.tls import diagnose
from pscore.pb.ps.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    control_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
)
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.text import join_address
from psserver.exits import CommandError, Exit

ANSWER_S_MAX = 5.0
BUSY_S_MAX = 60.0  # A shard that is connected may be so long about other work.
POLL_S = 0.05
RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


# Options of a channel for calls that may be made twice. A shard with too many connections closes
# some, perhaps theirs; then they are made again, and wait for a shard that is not there yet.
PATIENT: ChannelOptions = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    (
        "grpc.service_config",
        json.dumps(
            {"methodConfig": [{"name": [{}], "retryPolicy": RETRY_POLICY, "waitForReady": True}]}
        ),
    ),
)

Reply = TypeVar("Reply")


def statuses(
    addresses: Sequence[str], credentials: Credentials = ANYONE, *, is_patient: bool = False
) -> list[pb.StatusReply]:
    """Returns the status of the shards at `addresses`, in this order.

    Args:
        is_patient: Make a connection that is refused or closed again for `ANSWER_S_MAX`; wait for
            the answer of a shard that is connected, but busy, for `BUSY_S_MAX`.

    Raises:
        CommandError: One of them does not answer; the message names it.
    """
    if not is_patient:
        return _ask_all(addresses, credentials, _ask_status)
    end_s = time.monotonic() + ANSWER_S_MAX

    def ask(channel: grpc.Channel) -> grpc.CallFuture[pb.StatusReply]:
        timeout_s = BUSY_S_MAX
        try:
            grpc.channel_ready_future(channel).result(max(0.0, end_s - time.monotonic()))
        except grpc.FutureTimeoutError:
            timeout_s = 0.0
        return control_pb2_grpc.ControlStub(channel).Status.future(
            pb.StatusRequest(), timeout=timeout_s
        )

    return _ask_all(addresses, credentials, ask, PATIENT)


def require_order(
    addresses: Sequence[str], replies: Sequence[pb.StatusReply | CommandError]
) -> None:
    """Checks that the addresses are those of all shards of one cluster, in their order.

    Args:
        replies: Status of each address, or the reason that there is none.

    Raises:
        CommandError: They are not.
    """
    for index, (address, reply) in enumerate(zip(addresses, replies, strict=True)):
        if isinstance(reply, CommandError):
            continue
        place = reply.shard.shard, reply.shard.num_shards
        if place != (index, len(addresses)):
            raise CommandError(
                Exit.USAGE,
                f"{address} is shard {place[0]} of {place[1]}, and the list of servers has it as "
                f"shard {index} of {len(addresses)}: give all, in order",
            )


def answers(
    addresses: Sequence[str],
    credentials: Credentials = ANYONE,
    request: pb.StatusRequest | None = None,
) -> list[pb.StatusReply | CommandError]:
    """Returns the status of the shards at `addresses`, in this order, or why there is none.

    Args:
        request: A report of the asker; None: there is none.

    Raises:
        CommandError: None of them answers, or one refuses; the message names it.
    """
    status = partial(_ask_status, request=request)
    return _require_some(_ask_each(addresses, credentials, status))


def _require_some(answers: list[Reply | CommandError]) -> list[Reply | CommandError]:
    """Returns the answers; raises the first if all are errors."""
    silent = [answer for answer in answers if isinstance(answer, CommandError)]
    if silent and len(silent) == len(answers):
        raise silent[0]
    return answers


def follow(addresses: list[str], answers: Sequence[object]) -> None:
    """Replaces the addresses of shards that have moved; `answers` are their status, or errors."""
    for index, answer in enumerate(answers):
        if isinstance(answer, pb.StatusReply) and answer.shard.moved_to:
            addresses[index] = answer.shard.moved_to


def _ask_status(
    channel: grpc.Channel, request: pb.StatusRequest | None = None
) -> grpc.CallFuture[pb.StatusReply]:
    stub = control_pb2_grpc.ControlStub(channel)
    return stub.Status.future(request or pb.StatusRequest(), timeout=ANSWER_S_MAX)


def neighbours(host: str, port: int, credentials: Credentials = ANYONE) -> list[str]:
    """Returns the addresses of all shards of a start whose shard 0 listens on `port`.

    Raises:
        CommandError: Nobody answers there.
    """

    def ask(channel: grpc.Channel) -> grpc.CallFuture[pb.DescribeReply]:
        stub = control_pb2_grpc.ControlStub(channel)
        return stub.Describe.future(pb.DescribeRequest(), timeout=ANSWER_S_MAX)

    (about,) = _ask_all([join_address(host, port)], credentials, ask)
    first = port - about.shard
    return [join_address(host, first + index) for index in range(about.num_shards)]


def drain(
    addresses: Sequence[str], grace_s: float, credentials: Credentials = ANYONE
) -> tuple[list[str], list[CommandError]]:
    """Asks shards to end; returns those that did, when none answers any more, and other errors.

    Raises:
        CommandError: One of them refuses, or still answers in the end.
    """

    def ask(channel: grpc.Channel) -> grpc.CallFuture[pb.DrainReply]:
        stub = control_pb2_grpc.ControlStub(channel)
        return stub.Drain.future(pb.DrainRequest(grace_s=grace_s), timeout=ANSWER_S_MAX)

    replies = _ask_each(addresses, credentials, ask)
    limits_s = {
        address: reply.limit_s
        for address, reply in zip(addresses, replies, strict=True)
        if isinstance(reply, pb.DrainReply)
    }
    limit_s = ANSWER_S_MAX + max(limits_s.values(), default=0.0)
    deadline_s = time.monotonic() + limit_s
    while any(_are_serving(list(limits_s), credentials, "liveness")):
        if time.monotonic() > deadline_s:
            raise CommandError(
                Exit.SHARD_DIED,
                f"{', '.join(limits_s)}: still running after {limit_s:g} s",
            )
        time.sleep(POLL_S)
    return list(limits_s), [each for each in replies if isinstance(each, CommandError)]


def note_last(addresses: Sequence[str], credentials: Credentials, *, is_over: bool) -> None:
    """Announces to shards that the last checkpoints begin, or are over; some may not answer.

    Raises:
        CommandError: One refuses.
    """

    def ask(channel: grpc.Channel) -> grpc.CallFuture[checkpoint_pb2.NoteLastReply]:
        stub = checkpoint_pb2_grpc.CheckpointsStub(channel)
        request = checkpoint_pb2.NoteLastRequest(is_over=is_over)
        return stub.NoteLast.future(request, timeout=ANSWER_S_MAX)

    _ask_each(addresses, credentials, ask)


def forget(
    addresses: Sequence[str],
    job: str,
    credentials: Credentials = ANYONE,
    *,
    is_forced: bool = False,
) -> list[pb.ForgetReply]:
    """Asks shards to forget a job; returns their answers, in this order.

    Raises:
        CommandError: One of them does not answer, or refuses.
    """

    def ask(channel: grpc.Channel) -> grpc.CallFuture[pb.ForgetReply]:
        stub = control_pb2_grpc.ControlStub(channel)
        request = pb.ForgetRequest(job=job, force=is_forced)
        return stub.Forget.future(request, timeout=ANSWER_S_MAX)

    return _ask_all(addresses, credentials, ask)


def readiness(addresses: Sequence[str], credentials: Credentials = ANYONE) -> list[bool]:
    """Returns for each shard whether it answers within `ANSWER_S_MAX` that it is ready.

    A connection that is refused or closed is made again until then.
    """
    return _are_serving(addresses, credentials, "readiness", PATIENT)


def _are_serving(
    addresses: Sequence[str], credentials: Credentials, name: str, options: ChannelOptions = ()
) -> list[bool]:
    """Returns for each shard whether it answers that it serves, by a name of its health."""
    request = health_pb2.HealthCheckRequest(service=name)
    with contextlib.ExitStack() as channels:
        calls = []
        for address in addresses:
            channel = channels.enter_context(credentials.channel(address, options))
            stub = health_pb2_grpc.HealthStub(channel)
            calls.append(stub.Check.future(request, timeout=ANSWER_S_MAX))
        return [_is_serving(call) for call in calls]


def _is_serving(call: grpc.CallFuture[health_pb2.HealthCheckResponse]) -> bool:
    try:
        return bool(call.result().status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False


def publications(
    addresses: Sequence[str], credentials: Credentials = ANYONE
) -> list[publish_pb2.ListReply | CommandError]:
    """Returns what each shard at `addresses` publishes, in this order, or why it is not known.

    Raises:
        CommandError: None of them answers, or one refuses.
    """

    def ask(channel: grpc.Channel) -> grpc.CallFuture[publish_pb2.ListReply]:
        stub = publish_pb2_grpc.PublicationsStub(channel)
        return stub.List.future(publish_pb2.ListRequest(), timeout=ANSWER_S_MAX)

    return _require_some(_ask_each(addresses, credentials, ask))


def _ask_all(
    addresses: Sequence[str],
    credentials: Credentials,
    ask: Callable[[grpc.Channel], grpc.CallFuture[Reply]],
    options: ChannelOptions = (),
) -> list[Reply]:
    """Returns all answers; raises CommandError if a shard does not answer, or refuses."""
    replies: list[Reply] = []
    for answer in _ask_each(addresses, credentials, ask, options):
        if isinstance(answer, CommandError):
            raise answer
        replies.append(answer)
    return replies


def _ask_each(
    addresses: Sequence[str],
    credentials: Credentials,
    ask: Callable[[grpc.Channel], grpc.CallFuture[Reply]],
    options: ChannelOptions = (),
) -> list[Reply | CommandError]:
    """Returns all answers; an error in the place of each that is missing."""
    channels = [credentials.channel(address, options) for address in addresses]
    try:
        calls = [ask(channel) for channel in channels]
        replies: list[Reply | CommandError] = []
        for address, call in zip(addresses, calls, strict=True):
            try:
                replies.append(_answer(address, call, credentials))
            except CommandError as problem:
                if problem.code is Exit.ACCESS:
                    raise
                replies.append(problem)
        return replies
    finally:
        for channel in channels:
            channel.close()


def _answer(address: str, call: grpc.CallFuture[Reply], credentials: Credentials) -> Reply:
    try:
        return call.result()
    except grpc.RpcError as problem:
        raise explained(problem, address, credentials) from problem


def explained(
    failure: grpc.RpcError, address: str, credentials: Credentials, limit_s: float | None = None
) -> CommandError:
    """Returns the error of a call that the process at `address` refused, or did not answer.

    Args:
        limit_s: Seconds in which an answer was waited for; None: `ANSWER_S_MAX`.
    """
    assert isinstance(failure, grpc.Call)
    code, refusal = failure.code(), error_of(failure, address)
    if isinstance(refusal, AccessError):
        return CommandError(Exit.ACCESS, f"{address}: {refusal}")
    is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
    is_shut = code in RETRYABLE and not is_late
    if is_shut and (reason := diagnose(address, credentials)):
        return CommandError(Exit.ACCESS, str(reason))
    advice = f"start servers with: psserver start --port {address.rpartition(':')[2]}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        what = f"{address} is another service, not a shard of psserver"
    elif code in RETRYABLE:
        limit = f" within {limit_s or ANSWER_S_MAX:g} s" if is_late else ""
        what = f"nothing answers at {address}{limit}"
        advice = explain_silence(address) or advice
    else:
        is_word_of_grpc = isinstance(refusal, TransportError)
        ending = Exit.NO_ANSWER if is_word_of_grpc else Exit.UNHEALTHY
        return CommandError(ending, f"{address} refuses: {refusal}")
    return CommandError(Exit.NO_ANSWER, what, advice)
