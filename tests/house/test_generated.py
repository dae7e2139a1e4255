"""Rule 9: The committed stubs are what the generator writes."""

import subprocess
import sys

import pytest

from tests.house.source import ROOT


def test_the_stubs_are_current() -> None:
    if not list((ROOT / "proto").rglob("*.proto")):
        pytest.skip("no .proto file yet")
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    command = [sys.executable, "scripts/gen_proto.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
