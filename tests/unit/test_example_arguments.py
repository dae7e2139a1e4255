"""Examples with arguments that cannot be: each is one sentence, before anything starts."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

WRONG = [
    ("mnist", "--batch-size 0", "must be 1 or more"),
    ("mnist", "--max-steps 0", "must be 1 or more"),
    ("elastic", "--batch-size 0", "must be 1 or more"),
    ("elastic", "--file /nonexistent/state.pt", "its folder does not exist"),
    ("elastic", "--file /", "is a folder"),
    ("dlrm", "--samples 0", "must be 1 or more"),
    ("sequences", "--batch -1", "must be 1 or more"),
    ("word2vec", "--batch 0", "must be 1 or more"),
    ("word2vec", "--text /nonexistent", "is no file"),
    ("sharded", "--width 0", "must be 1 or more"),
    ("sharded", "", "start it with torchrun"),
    ("pipelines", "--samples 0", "must be 1 or more"),
    ("pipelines", "", "start it with torchrun"),
]


@pytest.mark.parametrize(("name", "words", "said"), WRONG)
def test_a_wrong_argument_of_an_example_is_named(
    name: str,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delenv("RANK", raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert Path(str(module.__file__)).parent == ROOT / "examples"
