"""Plug-ins by name: Paceline's own, and those that other installed packages bring.

Another package brings a rule, compressor or optimizer as an entry point: its name is that of the
plug-in, its group is `paceline.rules`, `paceline.compressors` or `paceline.optimizers`, and its
value is the class. No code travels: worker and shard each run what is installed where they run, and
compare `release` when a table is declared. examples/plugin is such a package.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from types import ModuleType
from typing import Any, Generic, TypeVar

from pscore.errors import ConfigError

T = TypeVar("T")
DIGEST_LENGTH = 12  # Hexadecimal digits of SHA-256 that name a module's text.


@dataclass(frozen=True, slots=True)
class Installed(Generic[T]):
    """A plug-in that another package brings, or the reason why it cannot be used."""

    package: str  # Name and version: `paceline-example 0.1`.
    plugin: type[T] | None = None
    digest: str = ""  # Hash of the text of its module.
    problem: str = ""


class Registry(Mapping[str, type[T]]):
    """The plug-ins of one kind, by name; a mapping that begins with Paceline's own.

    Installed packages are looked at once, when a name is asked for that is not Paceline's own, or
    all names are; then all their plug-ins of this kind are imported, whichever name was asked for.
    """

    def __init__(self, kind: str, group: str, base: Any, own: Iterable[type[T]]) -> None:
        """Registers Paceline's own plug-ins.

        Args:
            kind: Name of the kind in messages.
            base: The class that each of them derives from.
            own: Their classes; each has a `name`.
        """
        self.kind = kind  # Name of the kind in messages: "mode", "compression".
        self.group = group  # The group of its entry points.
        self._base = base
        # Paceline's own, by name.
        self.own: Mapping[str, type[T]] = {str(_name_of(plugin)): plugin for plugin in own}

    @cached_property
    def installed(self) -> Mapping[str, Installed[T]]:
        """The plug-ins that other packages bring, by name, with those that cannot be used."""
        found: dict[str, Installed[T]] = {}
        for entry in metadata.entry_points(group=self.group):
            brought = self._bring(entry)
            if entry.name in found:
                packages = f"{found[entry.name].package} and {brought.package}"
                brought = Installed(packages, problem="both packages have one of this name")
            found[entry.name] = brought
        return found

    def __getitem__(self, name: str) -> type[T]:
        """Returns the plug-in `name`; raises a `KeyError` if there is none that can be used."""
        if name in self.own:
            return self.own[name]
        plugin = self.installed[name].plugin
        if plugin is None:
            raise KeyError(name)
        return plugin

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name, brought in self.installed.items() if brought.plugin)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def require(self, name: str) -> type[T]:
        """Returns the plug-in `name`.

        Raises:
            ConfigError: There is none; the names that there are are listed. Or the package that
                brings it cannot be used; the reason is named.
        """
        if name in self:
            return self[name]
        broken = self.installed.get(name)
        if broken is not None:
            raise ConfigError(f"{self.kind} {name!r} of {broken.package}: {broken.problem}")
        raise ConfigError(f"no {self.kind} {name!r}; there are {', '.join(sorted(self))}")

    def release(self, name: str) -> str:
        """Returns package, version and hash of the module of a plug-in; empty for our own."""
        if name in self.own:
            return ""
        brought = self.installed.get(name)
        return "" if brought is None else f"{brought.package}, {brought.digest or 'unusable'}"

    def agree(self, name: str, release: str) -> None:
        """Checks that the plug-in here is the one that a worker has.

        Args:
            name: The plug-in, as the worker declares it.
            release: The result of `release` on the worker.

        Raises:
            ConfigError: It is not installed here, or another version of it is.
        """
        if release == (here := self.release(name)):
            return
        theirs, ours = release or "Paceline itself", here or "Paceline itself"
        if name in self:
            raise ConfigError(
                f"{self.kind} {name!r} is that of {ours} on the shard and that of {theirs} on the "
                "worker; install the same version on both, and restart the shards"
            )
        raise ConfigError(
            f"the shard has no {self.kind} {name!r}, which the worker has from {theirs}; install "
            "that package where the shards run, and restart them"
        )

    def _bring(self, entry: metadata.EntryPoint) -> Installed[T]:
        """Imports what an entry point names."""
        dist = entry.dist
        package = "an unknown package" if dist is None else f"{dist.name} {dist.version}"
        if entry.name in self.own:
            return Installed(package, problem="the name is that of one of Paceline's own")
        try:
            plugin = entry.load()
        except Exception as problem:  # noqa: BLE001  # Code of others, which may raise anything.
            reason = f"importing {entry.value} raised {type(problem).__name__}: {problem}"
            return Installed(package, problem=reason)
        is_right = isinstance(plugin, type) and issubclass(plugin, self._base)
        if not is_right or _name_of(plugin) != entry.name:
            base = f"{self._base.__module__}.{self._base.__qualname__}"
            reason = f"{entry.value} is not a subclass of {base} whose name is {entry.name!r}"
            return Installed(package, problem=reason)
        return Installed(package, plugin, _digest(plugin))


def classes_of(module: ModuleType, base: type) -> list[Any]:
    """Returns the plug-ins in a module: its classes that derive from `base` and have a name."""
    found = [item for item in vars(module).values() if isinstance(item, type)]
    return [item for item in found if issubclass(item, base) and "name" in vars(item)]


def _name_of(plugin: Any) -> object:
    return getattr(plugin, "name", None)


def _digest(plugin: type) -> str:
    """Returns a hash of the text of a class's module; empty if the module has no file."""
    file = getattr(sys.modules[plugin.__module__], "__file__", None)
    if file is None:
        return ""
    with open(file, "rb") as module:
        return f"sha256 {hashlib.sha256(module.read()).hexdigest()[:DIGEST_LENGTH]}"
