"""The command `psworker`."""

from __future__ import annotations

import sys

from pscore import commandline


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


if __name__ == "__main__":
    main()
