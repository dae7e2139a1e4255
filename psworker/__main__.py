"""The command `psworker`."""

from __future__ import annotations

import sys

from pscore import commandline
from psworker.exits import Exit

NO_TORCH = (
    "torch is not installed here: install it (pip install torch), or start an image for workers "
    "(target worker or cuda of deploy/Dockerfile) where this one is for shards"
)


def main() -> None:
    """Runs one command and ends the process with its exit code."""
    commandline.open_standard_streams()
    try:
        with commandline.importing("psworker"):
            from psworker.commands import cli

        cli.main()
    except KeyboardInterrupt:
        commandline.tell_interrupted("psworker")
        sys.exit(commandline.INTERRUPTED)
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        commandline.tell_error("psworker", ImportError(NO_TORCH))
        sys.exit(Exit.USAGE)


if __name__ == "__main__":
    main()
