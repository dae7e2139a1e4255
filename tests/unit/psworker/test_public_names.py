"""The names that a training script finds on `DistributedOptimizer`."""

import ast
from pathlib import Path

from psworker.training import optimizer

# Beside those of `torch.optim.Optimizer`.
OURS = {
    "clock",
    "close",
    "global_weights",
    "missed",
    "rule",
    "samples",
    "samples_seen",
    "set_mode",
    "skip_step",
    "steps",
    "traffic",
}
OF_TORCH = {"add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"}


def names_of(tree: ast.ClassDef) -> set[str]:
    """Returns the names of methods, and of attributes that some method sets."""
    names = {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_optimizer_shows_only_what_a_user_may_call() -> None:
    tree = ast.parse(Path(optimizer.__file__).read_text())
    (found,) = [
        item
        for item in tree.body
        if isinstance(item, ast.ClassDef) and item.name == "DistributedOptimizer"
    ]
    assert {name for name in names_of(found) if not name.startswith("_")} == OURS | OF_TORCH
