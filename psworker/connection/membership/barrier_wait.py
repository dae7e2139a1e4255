"""Waits at a barrier of a job, on the first shard."""

from __future__ import annotations

import logging
import time

from pscore.pb.ps.v1 import control_pb2 as pb
from psworker.connection.shard_link import Link

log = logging.getLogger("paceline")
WAIT_MS = 5_000  # After this long the shard answers with the workers that are missing.


def wait_at_barrier(link: Link, request: pb.BarrierRequest) -> pb.BarrierReply:
    """Waits until every worker has arrived; returns the shard's answer.

    Args:
        link: The link to the first shard.
        request: The worker, the barrier's name and round, and this worker's value.

    Raises:
        PacelineError: This worker is no longer part of the job, or the shard does not answer.
    """
    request.wait_ms = WAIT_MS
    started_s = time.monotonic()
    while True:
        reply: pb.BarrierReply = link.call(link.control.Barrier, request)
        if reply.done:
            return reply
        waited_s = time.monotonic() - started_s
        log.warning(
            "worker %d has waited %.0f s for %s", request.worker, waited_s, reply.waiting_for
        )
