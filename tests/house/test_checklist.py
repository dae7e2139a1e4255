"""Rule 6: the needs of a new plug-in, each with the file and the list that lacks it."""

import pytest

from pscore.compressors import COMPRESSORS
from pscore.optimizers import OPTIMIZERS
from pscore.rules import RULES
from tests.house.source import ROOT
from tests.house.test_mutants import load

# Rules whose paper test has another name than theirs, or serves several.
PAPER_TESTS = {
    "local": "local_sgd",
    "allreduce": "decentralised",
    "dpsgd": "decentralised",
    "adpsgd": "decentralised",
    "sgp": "decentralised",
}


def require(path: str, *texts: str) -> None:
    """Fails with the file that is missing, or with the text that it lacks."""
    assert (ROOT / path).exists(), f"write {path}"
    content = (ROOT / path).read_text(encoding="utf-8")
    for text in texts:
        assert text in content, f"{path} does not mention {text!r}"


@pytest.mark.parametrize("name", RULES.own)
def test_a_rule_has_all_that_it_needs(name: str) -> None:
    paper = PAPER_TESTS.get(name, name)
    require(f"tests/paper/test_{paper}.py")
    mutants = {mutant.rule for mutant in load().MUTANTS}
    assert paper in mutants, f"MUTANTS in scripts/mutants.py has no term of {paper!r}"
    require(f"docs/rules/{name}.md", f"../pictures/rule-{name}.svg")
    require(f"docs/pictures/rule-{name}.svg")
    require("docs/rules/README.md", f"`{name}`", f"[{name}]({name}.md)")
    assert RULES.own[name].source, f"{RULES.own[name].__module__}: `source` is empty"


@pytest.mark.parametrize("name", COMPRESSORS.own)
def test_a_compressor_has_all_that_it_needs(name: str) -> None:
    require("tests/golden/compressors/vectors.json", f'"{name}')
    require("docs/compressors.md", f"| `{name}")
    require("docs/format.md", f"| `{name}")


@pytest.mark.parametrize("name", OPTIMIZERS.own)
def test_an_optimizer_is_tested_by_its_name(name: str) -> None:
    folders = ("tests/unit/pscore/optimizers", "tests/paper")
    paths = [path for folder in folders for path in (ROOT / folder).glob("test_*.py")]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    title = OPTIMIZERS.own[name].__name__
    assert any(title in text or f'"{name}"' in text for text in texts), (
        f"no file of {folders} names {title}"
    )
