"""The options of `psserver`'s commands."""

import typer

from psserver.commands.cli import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_commands_that_find_servers_describe_the_search_and_not_the_start() -> None:
    start = {option.name: option.help for option in COMMANDS["start"].params}
    found = [
        (command, option)
        for command in COMMANDS.values()
        for option in command.params
        if command.name != "start" and option.name in ("port", "state_dir")
    ]
    assert {command.name for command, _ in found} >= {"status", "stop", "forget", "logs", "doctor"}
    assert not [command.name for command, option in found if option.help == start[option.name]]
