"""The command `psserver`."""

from __future__ import annotations

import sys

from psserver.exits import Exit


def main() -> None:
    """Runs one command and ends the process with its exit code."""
    if not __debug__:
        sys.stderr.write(
            "psserver: it relies on assertions, which python -O and PYTHONOPTIMIZE remove; "
            "start it without these\n"
        )
        sys.exit(Exit.USAGE)
    if sys.argv[1:2] == ["shard"] and len(sys.argv) == 3:  # noqa: PLR2004
        # Started by a supervisor, which waits: nothing of the command line is loaded.
        from psserver.process import daemon

        daemon.main(sys.argv[2])
    elif sys.argv[1:2] == ["schedule"] and len(sys.argv) == 3:  # noqa: PLR2004
        from psserver.process import checkpoint_schedule

        checkpoint_schedule.main(sys.argv[2])
    else:
        from pscore import commandline

        commandline.open_standard_streams()
        try:
            with commandline.importing("psserver"):
                from psserver.commands import cli
            cli.main()
        except KeyboardInterrupt:
            commandline.tell_interrupted("psserver")
            sys.exit(commandline.INTERRUPTED)


if __name__ == "__main__":
    main()
