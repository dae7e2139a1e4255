"""Rule 1: a file imports from its own folder and from those below it in its package."""

import graphlib

import pytest

from tests.house.source import PACKAGES, ROOT, file_imports, modules, name, path_of

# From the top. Plug-ins and shared nouns of a package that lie in no folder are one floor, `.`.
FLOORS = {
    "psserver": (
        *(
            "__main__",
            "commands",
            "dashboard",
            "process",
            "mending",
            "copies",
            "service",
            "remote",
            "publish",
            "archives",
            "engine",
            "standby",
            "durability",
        ),
        *("stores", "rows", "slices", "access", "decisions", "logs", "."),
    ),
    "psworker": (
        *(
            "__main__",
            "commands",
            "advice",
            "integrations",
            ".",
            "pipeline",
            "subscription",
            "training",
            "rows",
            "job",
            "peers",
            "connection",
        ),
        *("transports", "compression", "replica", "gossip", "model", "group"),
    ),
    "pscore": (
        *(
            "subscription",
            "timing",
            "table_spec",
            "estimate",
            "publish",
            "contents",
            "rows",
            "content",
        ),
        *("rules", "graphs", "cuda", "overlaps", "local", "optimizers"),
        *("compressors", "observe", "net", "memory", "."),
    ),
}


def module_of(dotted: str) -> str:
    """Returns the module (not the name in it) that an import of `dotted` loads."""
    parts = dotted.split(".")
    while parts:
        path = ROOT.joinpath(*parts)
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts)
        parts.pop()
    return dotted


def floor_of(dotted: str) -> str:
    """Returns the floor of a module of ours."""
    package, *rest = dotted.split(".")
    if rest and rest[0] in FLOORS[package]:
        return rest[0]
    return "."


def upward(package: str) -> dict[str, set[str]]:
    floors = FLOORS[package]
    found: dict[str, set[str]] = {}
    for path in modules(package):
        own = floor_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for dotted in file_imports(path):
            if dotted.split(".")[0] != package or dotted.startswith("pscore.pb"):
                continue
            module = module_of(dotted)
            if module != package and floors.index(floor_of(module)) < floors.index(own):
                found.setdefault(name(path), set()).add(module)
    return found


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_a_file_imports_only_from_its_floor_and_below(package: str) -> None:
    assert not upward(package)


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_every_folder_is_a_floor(package: str) -> None:
    folders = {path.parent.relative_to(ROOT / package).parts for path in modules(package)}
    assert {parts[0] for parts in folders if parts} <= {*FLOORS[package]}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Returns files that import each other in a circle; empty if there are none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as problem:
        return list(problem.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for a type checker alone count too: a reader follows them as well."""
    imports = {
        name(path): {
            name(path_of(dotted))
            for dotted in file_imports(path)
            if dotted.split(".")[0] in PACKAGES and not dotted.startswith("pscore.pb")
        }
        - {name(path)}
        for path in modules(*PACKAGES)
    }
    assert not circle(imports)
    first = next(iter(imports["psserver/engine/job.py"]))
    assert circle(imports | {first: {"psserver/engine/job.py"}})


def test_a_module_is_found_behind_a_name() -> None:
    assert module_of("psserver.slices.store.SliceStore") == "psserver.slices.store"
    assert module_of("pscore.rules.RULES") == "pscore.rules"
    assert floor_of("psserver.exits") == "."
