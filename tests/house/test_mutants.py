"""Rule 6: `scripts/mutants.py` still finds the terms that it deletes, and leaves out no rule."""

import importlib.util
import sys
from types import ModuleType

from tests.house.source import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # Its dataclass asks for it.
    spec.loader.exec_module(module)
    return module


def test_every_term_is_there_once() -> None:
    for mutant in load().MUTANTS:
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert text.count(mutant.term) == 1, f"{mutant.path}: {mutant.what}"


def test_every_file_of_paper_tests_has_a_term() -> None:
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests/paper").glob("test_*.py")}
    ruled = {mutant.rule for mutant in load().MUTANTS}
    assert not names - ruled, f"MUTANTS in scripts/mutants.py has no term of {names - ruled}"
    assert not ruled - names, f"tests/paper has no test_NAME.py for {ruled - names}"
