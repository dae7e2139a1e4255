"""Rule 9: every numbered rule of CONTRIBUTING.md is held by a test, and the tests cite no other."""

import ast
import re

from tests.house.source import ROOT, modules, parse

CITED = re.compile(r"^Rules? ([\d and]+):")
LISTED = re.compile(r"^(\d+)\. \*\*", re.MULTILINE)


def test_the_rules_that_tests_cite_are_those_of_the_list() -> None:
    heads = [ast.get_docstring(parse(path)) or "" for path in modules("tests")]
    cited = {
        int(number)
        for head in heads
        if (matched := CITED.match(head))
        for number in matched[1].split(" and ")
    }
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Rules")[2]
    listed = set(map(int, LISTED.findall(text.partition("\n## ")[0])))
    assert not cited - listed, f"the list of CONTRIBUTING.md has no rule {cited - listed}"
    assert not listed - cited, f"no test begins with 'Rule N:' for rules {listed - cited}"
