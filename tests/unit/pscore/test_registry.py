"""Plug-ins of other packages: found by their entry points, refused with their reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from pscore.registry import Registry
from pscore.rules import RULES
from pscore.rules.base import Rule

MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from pscore.rules.asgd import ASGD

@dataclass(frozen=True)
class {title}(ASGD):
    name: ClassVar[str] = "{name}"
"""
Bring = Callable[..., None]


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bring:
    """Installs a package of one module with one rule."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, name: str, text: str = MODULE, version: str = "1.0") -> None:
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(
            f"[paceline.rules]\n{name} = brought_{name}:{name.title()}\n"
        )
        module = tmp_path / f"brought_{name}.py"
        module.write_text(text.format(name=name, title=name.title()))

    return install


def rules() -> Registry[Rule]:
    """Returns a registry that has not looked for packages yet."""
    return Registry("mode", "paceline.rules", Rule, RULES.own.values())


def test_a_rule_of_another_package_has_its_release(bring: Bring) -> None:
    bring("first", "early", version="2.1")
    registry = rules()
    assert registry.require("early").__module__ == "brought_early"
    assert registry.release("early").startswith("first 2.1, sha256 ")
    assert list(registry) == [*RULES.own, "early"]
    registry.agree("early", registry.release("early"))
    with pytest.raises(ConfigError, match=r"'early' is that of first 2.1, .* that of first 2.0 on"):
        registry.agree("early", "first 2.0")
    with pytest.raises(ConfigError, match=r"'early' is that of first 2.1, .* Paceline itself on"):
        registry.agree("early", "")


def test_no_package_is_imported_for_a_rule_of_our_own(bring: Bring) -> None:
    bring("second", "unused", "1 / 0")
    registry = rules()
    assert registry["ssgd"].name == "ssgd"
    assert registry.release("ssgd") == ""
    assert "installed" not in vars(registry)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("broken", "1 / 0", "importing brought_broken:Broken raised ZeroDivisionError"),
        ("absent", "", "importing brought_absent:Absent raised AttributeError: "),
        ("plain", "class Plain: name = 'plain'", "is not a subclass of pscore.rules.base.Rule"),
        ("other", MODULE.replace("{name}", "another"), "Rule whose name is 'other'"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_the_reason(
    bring: Bring, name: str, text: str, reason: str
) -> None:
    bring("bad", name, text)
    registry = rules()
    assert name not in registry
    with pytest.raises(ConfigError, match=f"mode '{name}' of bad 1.0: .*{reason}"):
        registry.require(name)


def test_a_name_of_our_own_stays_ours(bring: Bring) -> None:
    bring("shadow", "ssgd")
    registry = rules()
    assert registry["ssgd"] is RULES.own["ssgd"]
    assert registry.installed["ssgd"].problem == "the name is that of one of Paceline's own"


def test_a_name_of_two_packages_is_refused(bring: Bring) -> None:
    bring("one", "double")
    bring("two", "double")
    with pytest.raises(ConfigError, match=r"mode 'double' of (one|two) 1.0 and (one|two) 1.0: "):
        rules().require("double")
