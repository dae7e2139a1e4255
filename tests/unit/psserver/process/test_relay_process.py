"""The process of a relay ends when a part of it does."""

import asyncio
import threading

import pytest

from psserver.access.files import Trust
from psserver.process.relay import RelayPlan, RelayProcess
from psserver.service import web


def test_a_relay_whose_metrics_page_fails_ends_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would serve on, and nobody would hear that its page is gone."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def fail(*_: object) -> None:
        raise LookupError("a bug")

    async def scene() -> None:
        plan = RelayPlan(
            servers=["127.0.0.1:1"],
            job="night",
            table="model",
            host="127.0.0.1",
            port=0,
            trust=Trust(),
            rate=0,
            metrics_port=0,
        )
        running, said = asyncio.create_task(RelayProcess(plan).run()), ""
        while "/metrics" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        monkeypatch.setattr(web, "HttpExchange", fail)
        address = said.partition("http://")[2].partition("/")[0]
        host, _, port = address.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, 30)
        writer.close()
        assert ended.group_contains(LookupError, match="a bug")

    asyncio.run(scene())
