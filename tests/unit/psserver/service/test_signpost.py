"""A call that is under way when its shard is taken over is not answered by the former process."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from psserver.service.signpost import Signpost

SERVICE = "ps.v1.Control"


async def ask(method: str, signpost: Signpost, kept: asyncio.Event, *, is_held: bool) -> bytes:
    """Calls a method that changes something at once; the change is kept later."""
    called = asyncio.Event()

    async def answer(raw: bytes, context: Any) -> bytes:
        called.set()
        return b"done"

    handlers = {method: grpc.unary_unary_rpc_method_handler(cast(Any, answer))}
    server = grpc.aio.server(interceptors=[signpost])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = cast(Any, channel).unary_unary(f"/{SERVICE}/{method}")
        reply = asyncio.ensure_future(call(b""))
        await called.wait()
        if is_held:
            signpost.hold()
        kept.set()
        try:
            return bytes(await reply)
        finally:
            await server.stop(None)


@pytest.mark.parametrize("method", ["Barrier", "Change", "Choose", "Define", "Join", "Meet"])
def test_an_answer_stays_here_if_calls_are_held_before_it_is_kept(method: str) -> None:
    async def scene(*, is_held: bool) -> bytes:
        kept = asyncio.Event()

        async def await_kept() -> None:
            await kept.wait()

        return await ask(method, Signpost(await_kept, lambda: False), kept, is_held=is_held)

    assert asyncio.run(scene(is_held=False)) == b"done"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        asyncio.run(scene(is_held=True))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
