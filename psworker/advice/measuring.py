"""`psworker advise -- train.py`: runs the user's script for a minute beside a shard of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from pscore.errors import ConfigError
from pscore.net.credentials import EVERY, read_credentials
from psworker.advice.running import STEPS_MIN, ObservedJob, await_job, require_dense
from psworker.job.own_shards import start_shards

SECONDS = 60.0
JOB = "advise"
GRACE_S = 10.0


def measure_script(command: Sequence[str], seconds: float = SECONDS) -> ObservedJob:
    """Runs a script with one worker and one shard, and returns what the shard has seen.

    Args:
        seconds: Seconds after which it is ended.

    Raises:
        ConfigError: There is no such script, it has failed, has made too few steps, or trains row
            tables.
        ServerUnavailableError: The shard did not start.
    """
    if not (command[0].startswith("-") or os.path.exists(command[0])):
        raise ConfigError(
            f"there is no script {command[0]!r}: name it alone, `psworker advise ... -- train.py`"
        )
    own = start_shards()
    environment = os.environ | {
        "PACELINE_SERVERS": ",".join(own.addresses),
        "PACELINE_TOKEN_FILE": own.token_file,
        "PACELINE_JOB": JOB,
        "PACELINE_RANK": "0",
        "PACELINE_NUM_WORKERS": "1",
    }
    try:
        program = subprocess.Popen([sys.executable, *command], env=environment)
        try:
            credentials = read_credentials(environment, job=EVERY)
            until_s = time.monotonic() + seconds

            def is_over() -> bool:
                return program.poll() is not None or time.monotonic() > until_s

            found = await_job(own.addresses, credentials, JOB, is_over)
            is_ready = found is not None and found.is_ready
            if not is_ready:  # Its worker may have left: then it is about to end, and says why.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(max(0.0, until_s - time.monotonic()))
            code = program.poll()
        finally:
            program.terminate()
            try:
                program.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                program.kill()
    finally:
        own.end()
    if found is None or not is_ready:
        raise ConfigError(f"{command[0]} {_lack(found, code, seconds)}")
    require_dense(found, command[0])
    return found


def _lack(found: ObservedJob | None, code: int | None, seconds: float) -> str:
    """Returns why a script has nothing to measure, by its exit code; None: it was ended."""
    if code:
        return f"failed with exit code {code}: run it alone first"
    when = f"in {seconds:g} s" if code is None else "before it ended"
    if found is None:
        return f"made no psworker.DistributedOptimizer and no step with it {when} (docs/start.md)"
    return f"made fewer than {1 + STEPS_MIN} steps with DistributedOptimizer {when}"
