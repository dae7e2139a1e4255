"""`psserver publish --to DIR`: reads the published weights of a job, and writes each version."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence

from pscore.errors import ConfigError
from pscore.subscription.reader import Reader
from pscore.subscription.weights import Map
from psserver.exits import CommandError, Exit
from psserver.publish.folder import VersionsFolder

WAIT_S = 5.0  # Before the command says that no version has come.
PAUSE_S = 5.0  # After a version that could not be written.


def publish_versions(
    folder: VersionsFolder,
    servers: Sequence[str],
    *,
    job: str,
    table: str,
    dtype: str,
    names: str | None,
    token_file: str | None,
    is_once: bool,
) -> None:
    """Writes versions that are newer than those of the folder, until it is interrupted.

    While no version comes, the command says why, once. If a version cannot be written, because the
    disk is full, the command says so, and tries the newest one again.

    Args:
        servers: Addresses of all shards, in order.
        dtype: Type of the tensors: `bf16`, `float16` or `float32`.
        names: `MODULE:FUNCTION`, called with each name and array; None: all stay as they are.
        token_file: File with a token that reads the job; None: that of the environment.

    Raises:
        CommandError: The one version has not come in time, or could not be written.
        ConfigError: An argument is wrong.
        PacelineError: A shard refuses this reader.
    """
    mapping = None if names is None else _function(names)
    with Reader(
        servers, job=job, table=table, dtype=dtype, token_file=token_file, map=mapping
    ) as reader:
        newest, said = folder.newest(), ""
        while True:
            try:
                weights = reader.wait(newer_than=newest, timeout_s=WAIT_S)
            except TimeoutError as problem:
                if is_once:
                    raise CommandError(Exit.NO_ANSWER, str(problem)) from problem
                if str(problem) != said:
                    said = str(problem)
                    sys.stderr.write(f"psserver: {said}; waiting\n")
                continue
            try:
                path = folder.write(weights)
            except OSError as problem:
                message = f"step {weights.step} of job {job!r} was not written: {problem}"
                if is_once:
                    raise CommandError(Exit.STATE_DIR, message) from problem
                if message != said:
                    said = message
                    sys.stderr.write(f"psserver: {said}; the newest version is tried again\n")
                time.sleep(PAUSE_S)
                continue
            newest = weights.version
            sys.stdout.write(f"{path} step {weights.step}\n")
            sys.stdout.flush()
            if is_once:
                return


def _function(name: str) -> Map:
    """Returns the function `module:function`, of the folder of the command or of Python."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Map = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(f"--map {name}: {problem}; give MODULE:FUNCTION") from problem
    return found
