"""A list of the modes, for a person at a prompt."""

from __future__ import annotations

from dataclasses import fields

from pscore.rules import RULES


def modes() -> dict[str, dict[str, object]]:
    """Returns every mode's arguments with their defaults, by name."""
    return {
        name: {item.name: item.default for item in fields(rule)} for name, rule in RULES.items()
    }
