"""The output of `psserver rules` and `psserver config show`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from pscore.json_text import to_json
from pscore.rules import RULES
from pscore.rules.base import Rule
from psserver.process.settings import Settings


def rules(*, as_json: bool) -> str:
    """Returns every mode with its arguments, source and first sentence."""
    listed = [_rule(name, rule) for name, rule in sorted(RULES.items())]
    if as_json:
        return to_json(listed, indent=1) + "\n"
    lines: list[str] = []
    for rule in listed:
        arguments = ", ".join(f"{a['name']}={a['default']!r}" for a in rule["arguments"])
        lines += [
            f"{rule['name']}({arguments})" if arguments else rule["name"],
            f"    {rule['summary']}",
            f"    {rule['source']}",
        ]
    return "\n".join(lines) + "\n"


def settings(resolved: Settings, *, as_json: bool) -> str:
    """Returns every setting with its value and origin."""
    rows = resolved.rows()
    if as_json:
        values = {name: {"value": value, "origin": origin} for name, value, origin in rows}
        return to_json(values, indent=1) + "\n"
    width = max(len(f"{name} = {value}") for name, value, _ in rows)
    return "".join(f"{f'{name} = {value}':<{width}}  ({origin})\n" for name, value, origin in rows)


def _rule(name: str, rule: type[Rule]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": (inspect.getdoc(rule) or "").partition("\n")[0],
        "source": rule.source,
        "arguments": [
            {"name": item.name, "type": type(item.default).__name__, "default": item.default}
            for item in fields(rule)
        ],
    }
