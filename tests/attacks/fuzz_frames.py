"""A coverage-guided fuzzer of a shard's decoders: `make fuzz`. Needs the extra `fuzz`.

    python -m tests.attacks.fuzz_frames -runs=1000000

Takes libFuzzer's flags. A quarter of the frames is sent as mutated, which the checksum refuses; the
others get lengths and a checksum that are right, so that what is behind the decoder is reached.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris
import structlog

from pscore.net import connection, endpoint, sockets, wire
from psserver.decisions.slice_clock import SliceClock
from psserver.engine import requests
from psserver.service import data_socket
from tests.attacks.target import Target, resealed, seeds
from tests.unit.psserver.front import Front

# The code that guides it. Not whole packages: traced functions cannot be compiled by Numba.
GUIDES = (
    wire,
    sockets,
    sockets.Incoming,
    connection.Connection,
    endpoint,
    data_socket.DataHandler,
    requests,
    requests.Requests,
    SliceClock,
)


def mutate(data: bytes, nbytes_max: int, seed: int) -> bytes:
    """Runs one input of libFuzzer."""
    rng = random.Random(seed)
    changed: bytes = atheris.Mutate(data, nbytes_max)
    return changed if rng.random() < 0.25 else resealed(changed, rng)[:nbytes_max]


def trace(owner: Any) -> None:
    """Instruments for libFuzzer the branches of every plain function of a module or class."""
    for name, function in list(vars(owner).items()):
        if inspect.isfunction(function):
            setattr(owner, name, atheris.instrument_func(function))


async def run(arguments: list[str]) -> None:
    """Runs until libFuzzer ends the process."""
    target = Target(Front())
    await target.prepare()
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds()):
            Path(folder, str(number)).write_bytes(seed)
            target.send(seed)
        count = 0

        def one(data: bytes) -> None:
            nonlocal count
            count += 1
            target.send(data)
            if count % 10_000 == 0:
                target.still_serves()

        atheris.Setup([*arguments, "-max_len=512", folder], one, custom_mutator=mutate)
        atheris.Fuzz()


def main() -> None:
    """Runs the fuzzer."""
    silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=silent)
    for owner in GUIDES:
        trace(owner)
    asyncio.run(run(sys.argv))


if __name__ == "__main__":
    main()
