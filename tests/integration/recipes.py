"""The scripts of docs/recipes.md, with Paceline as they stand there, and without it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
MARK, PLAIN = "  # Paceline", "# Plain: "
ENDLESS = "Ctrl-C, and an exception in one worker"
HEAVY = ("import lightning", "import transformers", "import accelerate", "torch.compile")
State = dict[str, np.ndarray]


def recipes(*, heavy: bool = False) -> dict[str, str]:
    """Returns the page's scripts by title; each begins with the first block.

    Args:
        heavy: Those that need other libraries or a compiler, instead of the others.
    """
    page = PAGE.read_text(encoding="utf-8")
    start, *sections = re.split(r"^## ", page, flags=re.M)
    (common,) = blocks(start)
    found = {}
    for section in sections:
        code = blocks(section)
        if (
            code
            and section.splitlines()[0] != ENDLESS
            and heavy == any(name in code[0] for name in HEAVY)
        ):
            found[section.splitlines()[0]] = "\n\n".join([common, *code])
    return found


def endless() -> str:
    """Returns the script that ends by Ctrl-C."""
    start, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    (code,) = [blocks(section) for section in sections if section.startswith(ENDLESS)]
    return "\n\n".join([*blocks(start), *code])


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def plain(code: str) -> str:
    """Returns a script without Paceline.

    A marked line is left out; one that begins a block leaves the block; `# Plain:` takes its place.
    """
    lines: list[str] = []
    for line in code.splitlines():
        body, mark, _ = line.partition(MARK)
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith(PLAIN):
            if lines and lines[-1].endswith("if True:"):
                indent = lines.pop().removesuffix("if True:")
            lines.append(indent + line.lstrip().removeprefix(PLAIN))
        elif not mark:
            lines.append(line)
        elif body.endswith(":"):
            lines.append(f"{indent}if True:")
    return "\n".join(lines)


def execute(code: str, title: str) -> dict[str, Any]:
    """Runs a script and returns its variables."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), names)
    return names


def trained(names: dict[str, Any]) -> State:
    """Returns the weights and buffers of a script's models, and its accuracy if there is one."""
    found = {
        f"{name}.{key}": tensor.detach().numpy().copy()
        for name, value in names.items()
        if isinstance(value, torch.nn.Module)
        for key, tensor in value.state_dict().items()
    }
    if "accuracy" in names:
        found["accuracy"] = np.array(names["accuracy"])
    return found
