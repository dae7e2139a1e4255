"""Pages and chart name the numbers that decide which versions work together."""

import re

import pytest
import yaml

from pscore.net import wire
from pscore.version import VERSION
from psserver.durability import journal_dir
from psserver.remote import checkpoint_files
from tests.house.source import ROOT

NUMBERS = {
    "protocol": wire.PROTOCOL,
    "journal format": journal_dir.FORMAT,
    "checkpoint format": checkpoint_files.FORMAT,
}


@pytest.mark.parametrize(("name", "number"), NUMBERS.items())
def test_the_page_and_the_newest_release_name_the_numbers_of_the_code(
    name: str, number: int
) -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"| {name} | {number} |" in page
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert f"{name} {number}" in newest.lower()


def test_the_chart_is_of_the_version_and_numbers_of_the_code() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "chart" / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == VERSION
    assert chart["annotations"] == {
        "paceline.dev/protocol": str(wire.PROTOCOL),
        "paceline.dev/journal": str(journal_dir.FORMAT),
    }


def test_the_changelog_has_the_changes_since_the_last_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in headings[1:])
