"""The command `psworker`."""

from __future__ import annotations

from psworker import cli


def main() -> None:
    """Runs one command and ends the process with its exit code."""
    cli.main()


if __name__ == "__main__":
    main()
