"""The frame of a program with commands: the options that `psserver` and `psworker` share."""

import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from pscore import commandline
from pscore.json_text import to_json

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def make_app(about: str, epilog: str, debug: str) -> typer.Typer:
    """Returns a program without commands.

    Args:
        epilog: Text below the help of the program: its exit codes.
        debug: Help of `--debug`.
    """
    app = typer.Typer(
        help=about,
        epilog=epilog,
        context_settings=commandline.CONTEXT,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    version = typer.Option(
        "--version",
        callback=commandline.show_version,
        is_eager=True,
        help="Print the version and exit.",
    )
    debugging = typer.Option("--debug", callback=commandline.set_debug, help=debug)

    @app.callback()
    def _options(
        *, version: Annotated[bool, version] = False, debug: Annotated[bool, debugging] = False
    ) -> None:
        """Options of every command."""

    return app


def write(result: T, show: Callable[[T], Any], *, as_json: bool) -> None:
    """Prints a result, as JSON or by a function for people."""
    if as_json:
        sys.stdout.write(to_json(result, indent=1) + "\n")
    else:
        show(result)
