"""Rule 11: Every dependency has a lowest version, which `make test-lowest` installs."""

import tomllib

import pytest

from scripts.lowest import PYPROJECT, lowest


def test_every_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for python in ("3.11", "3.12", "3.13"):
        assert lowest([*project["dependencies"], *(e for extra in extras for e in extra)], python)


def test_the_highest_lower_bound_that_applies_counts() -> None:
    wanted = ["a_b>=1.9,<3", "a-b>=1.10; python_version >= '3.13'", "c>=2; sys_platform == 'no'"]
    assert lowest(wanted, "3.12") == {"a-b": "1.9"}
    assert lowest(wanted, "3.13") == {"a-b": "1.10"}


def test_a_dependency_without_a_lower_bound_is_named() -> None:
    with pytest.raises(ValueError, match="'numpy<3' has no lower bound"):
        lowest(["numpy<3"], "3.12")
