"""The flags of `psserver start`: one for each setting, read from the classes that check them."""

from __future__ import annotations

import inspect
import types
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from psserver.process.settings import SECTIONS, flag_of

NUMBERS: dict[Any, str] = {int: "<int>", float: "<float>"}


def make_flags() -> list[Any]:
    """Returns an option of a command for each setting; None where it is not given."""

    def holder(**given: object) -> None:
        """Receives the flags as arguments, which typer reads."""

    names = {
        flag_of(section, name).replace("-", "_"): field
        for section, kind in SECTIONS.items()
        for name, field in kind.model_fields.items()
    }
    kinds = {name: _annotation(name, field) for name, field in names.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    holder.__annotations__ = kinds
    holder.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, default=None, annotation=kinds[name]) for name in kinds]
    )
    app = typer.Typer(add_completion=False)
    app.command()(holder)
    return list(typer.main.get_command(app).params)


def _annotation(name: str, field: FieldInfo) -> Any:
    """Returns the type of a flag, with the text of its setting and the default."""
    kind = next((one for one in get_args(field.annotation) if one is not type(None)), None)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if not choices and not isinstance(field.annotation, types.UnionType):
        kind = field.annotation
    metavar = NUMBERS.get(kind) or "|".join(choices) or None
    if metavar is not None:
        kind = str  # The setting's own check names its range.
    text = " ".join((field.description or "").split())
    default = "" if field.default in (None, "", False) else f" [{_shown(name, field.default)}]"
    return Annotated[
        kind | None,  # type: ignore[operator]
        typer.Option(
            *([f"--{name}"] if field.default is False else []),
            help=f"{text}{default}",
            metavar=metavar,
        ),
    ]


def _shown(name: str, default: object) -> str:
    if default is True:
        return f"--{name}"
    return f"{default:g}" if isinstance(default, float) else str(default)
