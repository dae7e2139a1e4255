"""Errors of calls, in plain words."""

import socketserver
import threading

import grpc
import pytest

from pscore.errors import ServerUnavailableError
from pscore.net.rpc import error_of
from pscore.pb.ps.v1 import control_pb2, control_pb2_grpc


class WebPage(socketserver.BaseRequestHandler):
    """Refuses the first bytes of HTTP/2, as the page of a shard's metrics does."""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")


def failed(address: str) -> Exception:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        control_pb2_grpc.ControlStub(channel).Describe(control_pb2.DescribeRequest(), timeout=60)
    return error_of(caught.value, address)


def test_a_web_page_and_a_closed_port_are_named_as_such() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), WebPage) as server:
        threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        page = failed(address)
        server.shutdown()
    assert isinstance(page, ServerUnavailableError)
    assert str(page).startswith(f"{address}: a web page is there, perhaps a shard's metrics; give")
    assert str(failed("127.0.0.1:1")) == "127.0.0.1:1: connection refused: nothing listens there"
