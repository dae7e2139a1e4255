"""Contents of tables by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pscore.content import Content
from pscore.contents.flat import Flat
from pscore.errors import ConfigError
from pscore.rows.spec import Rows

CONTENTS: dict[str, type[Content]] = {content.name: content for content in (Flat, Rows)}
FLAT, LONG = Flat(), Flat(long=True)

__all__ = ["CONTENTS", "FLAT", "LONG", "make_content"]


def make_content(name: str, arguments: Mapping[str, Any]) -> Content:
    """Returns the content of that name with these arguments.

    Raises:
        ConfigError: There is no such content, or an argument is wrong.
    """
    if name not in CONTENTS:
        raise ConfigError(f"no content {name!r} of a table; there are {', '.join(CONTENTS)}")
    return CONTENTS[name].of(arguments)
