"""Rule 8: Tests use public names; the few private ones that they read become fewer."""

import ast
from collections import Counter

from tests.house.source import modules, name, parse

# Private attributes of our objects that tests read; tests/inside.py reads those of the optimizer.
PRIVATE_MAX = 52
INSIDE = "tests/inside.py"
# Names of the standard library and of torch.
FOREIGN = {
    *("_amp_foreach_non_finite_check_and_unscale_", "_execute_child", "_exit", "_getframe"),
    *("_is_owned", "_is_view", "_neg_view", "_replace", "_run_exitfuncs", "_shutdown"),
    *("_sleep", "_version"),
}


def private(tree: ast.AST) -> Counter[str]:
    """Returns the private attributes that a module reads of objects other than its own."""
    return Counter(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if not node.attr.startswith("__") and node.attr not in FOREIGN
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    )


def test_tests_read_few_private_names() -> None:
    found = {name(path): private(parse(path)) for path in modules("tests")}
    number = sum(sum(counts.values()) for path, counts in found.items() if path != INSIDE)
    assert number <= PRIVATE_MAX, {path: dict(counts) for path, counts in found.items() if counts}


def test_the_optimizer_is_looked_into_in_one_place() -> None:
    users = {name(path) for path in modules("tests") if "_table" in private(parse(path))}
    assert users == {INSIDE}


def test_private_attributes_are_found() -> None:
    text = "self._a; other._b; other.c._b; x.__dict__; os._exit(1); super()._d()"
    assert private(ast.parse(text)) == {"_b": 2}
