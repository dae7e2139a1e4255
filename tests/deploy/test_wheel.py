"""The wheel in an environment without the repository: the demo trains, shards start, a page opens.

The environment is new and has only the wheel. Its dependencies are those of this environment, found
by a path, so that torch is not downloaded again; they are compared with those that the wheel names.
Nothing runs in the repository's folder, and no editable installation is on the path.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pscore.net.wire import PROTOCOL
from pscore.version import VERSION

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


@dataclass
class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    bin: Path
    folder: Path

    def run(self, *words: str, returns: int = 0, **variables: str) -> str:
        """Runs a program; returns its output, and that for errors if it returns another code."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTHON"))}
        done = subprocess.run(
            [self.bin / words[0], *words[1:]],
            cwd=self.folder,
            env={**kept, "XDG_RUNTIME_DIR": str(self.folder), **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == returns, done.stderr
        return done.stderr if returns else done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), ROOT)


def build(folder: Path, source: Path) -> Path:
    """Returns the wheel of a folder with the source."""
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *words, "--wheel-dir", folder, source], check=True)
    (made,) = folder.glob("*.whl")
    return made


THERE = [path for path in sys.path if path.endswith("site-packages")]


def install(wheel: Path, folder: Path, there: list[str]) -> Installed:
    """Returns a new environment with the wheel, and with the dependencies in some folders."""
    venv.create(folder / "env", with_pip=True)
    made = Installed(folder / "env" / "bin", folder / "work")
    made.folder.mkdir()
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # Lines of a .pth file only add to the path: the .pth of an editable installation is not read.
    (packages / "dependencies.pth").write_text("\n".join(there) + "\n")
    made.run("python", "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("installed"), THERE)


def test_shards_start_answer_and_stop_where_torch_is_not_installed(
    wheel: Path, tmp_path: Path
) -> None:
    """As in the image of shards: every dependency is there but torch."""
    linked = tmp_path / "without_torch"
    linked.mkdir()
    for path in (entry for folder in THERE for entry in Path(folder).iterdir()):
        if not path.name.startswith(("torch", "functorch")) and not (linked / path.name).exists():
            (linked / path.name).symlink_to(path)
    bare = install(wheel, tmp_path, [str(linked)])
    look = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numba') is None)"
    assert bare.run("python", "-c", look).split() == ["None", "False"]
    ready = bare.run("psserver", "start", "--port", "0", "--metrics-port", "0", "--detach")
    servers = re.findall(r"PACELINE_SERVERS=(\S+)", ready)[0]
    try:
        assert servers in bare.run("psserver", "status", "--servers", servers)
        bare.run("psserver", "doctor", "--servers", servers)
        bare.run("psserver", "health", "--servers", servers)
        assert "ssgd" in bare.run("psserver", "rules")
        bare.run("psserver", "certs", "certs")
    finally:
        bare.run("psserver", "stop", "--servers", servers)


def test_nothing_comes_from_the_repository_and_no_requirement_is_missing(
    installed: Installed,
) -> None:
    program = "import pscore, pssim, psserver, psworker as w; print(*map(str, [pscore.__path__[0], "
    program += "pssim.__path__[0], psserver.__path__[0], w.__path__[0]]))"
    for place in installed.run("python", "-c", program).split():
        assert place.startswith(str(installed.bin.parent))
    names = "import importlib.metadata as m; print(*(m.requires('paceline') or []), sep='\\n')"
    required = [line for line in installed.run("python", "-c", names).splitlines() if line]
    checks = (
        "import sys, importlib.metadata as m; from packaging.requirements import Requirement as R; "
        "wanted = [r for r in map(R, sys.argv[1:]) if r.marker is None or r.marker.evaluate("
        "{'extra': ''})]; print(*(r for r in wanted if m.version(r.name) not in r.specifier))"
    )
    assert len(required) > 10
    assert installed.run("python", "-c", checks, *required).split() == []


def test_the_demo_trains_on_the_images_in_the_wheel(installed: Installed) -> None:
    words = ("--epochs", "1", "--images", "256", "--modes", "ssgd", "--shards", "1", "--json")
    line = installed.run("psworker", "demo", *words).splitlines()[-1]
    assert json.loads(line)
    assert "images" in os.listdir(next(installed.bin.parent.glob("lib/*/*/psworker/commands/demo")))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_shards_and_the_dashboard_start(installed: Installed) -> None:
    ready = installed.run("psserver", "start", "--port", "0", "--metrics-port", "0", "--detach")
    servers = re.findall(r"PACELINE_SERVERS=(\S+)", ready)[0]
    try:
        page = subprocess.Popen(
            [
                *(installed.bin / "psserver", "dashboard", "--servers", servers),
                *("--listen", "127.0.0.1:0"),
            ],
            cwd=installed.folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        with page:
            try:
                assert page.stdout is not None
                url = re.findall(r"http://\S+/", page.stdout.readline())[0]
                for path, word in (("", "<main>"), ("page.js", "poll"), ("page.css", "body")):
                    assert word in fetch(url + path)
                assert json.loads(fetch(url + "api/view"))["status"]["shards"]
            finally:
                page.terminate()
        assert servers in installed.run("psserver", "top", "--once", "--servers", servers)
    finally:
        installed.run("psserver", "stop", "--servers", servers)


def sources(folder: Path, commit: str = "HEAD") -> Path:
    """Returns a folder with the files of a commit."""
    folder.mkdir()
    words = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    packed = subprocess.run(words, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


TRAIN = """
import importlib.metadata, torch, psworker
model = torch.nn.Linear(4, 1)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print("trained with", importlib.metadata.version("paceline"))
"""


@contextmanager
def shards(environment: Installed) -> Iterator[str]:
    words = ("start", "--port", "0", "--metrics-port", "0", "--detach")
    servers = re.findall(r"PACELINE_SERVERS=(\S+)", environment.run("psserver", *words))[0]
    try:
        yield servers
    finally:
        environment.run("psserver", "stop", "--servers", servers)


def test_workers_and_shards_of_other_versions_meet(installed: Installed, tmp_path: Path) -> None:
    """docs/versions.md: the protocol decides, and not the version of the package."""
    source = sources(tmp_path / "source")
    replace(source / "pyproject.toml", f'version = "{VERSION}"', 'version = "0.0.9"')
    alike = install(build(tmp_path / "alike", source), tmp_path / "alike", THERE)
    replace(source / "pscore" / "net" / "wire.py", f"PROTOCOL = {PROTOCOL}", "PROTOCOL = 99")
    unlike = install(build(tmp_path / "unlike", source), tmp_path / "unlike", THERE)
    train = ("python", "-c", TRAIN)
    with shards(installed) as servers:
        said = alike.run(*train, PACELINE_SERVERS=servers, PACELINE_JOB="a")
        assert "trained with 0.0.9" in said
        said = unlike.run(*train, returns=1, PACELINE_SERVERS=servers, PACELINE_JOB="b")
        sentence = (
            f"speaks protocol {PROTOCOL} (paceline {VERSION}), this worker speaks 99: install"
        )
        assert sentence in said
    with shards(alike) as servers:
        installed.run(*train, PACELINE_SERVERS=servers, PACELINE_JOB="c")


WIRE = "pscore/net/wire.py"


def git(*words: str) -> str:
    """Returns the first line of a command of git, empty if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def earlier_commits() -> list[str]:
    """Returns the last release, and the last commit that spoke another protocol, where they are."""
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    change = git("log", "--format=%H", f"-G^PROTOCOL = {PROTOCOL}( |$)", "--reverse", "--", WIRE)
    before = git("rev-parse", "--verify", "--quiet", f"{change}^") if change else ""
    return [commit for commit in (tag, before) if commit]


@pytest.mark.skipif(not earlier_commits(), reason="the history is shallow, and has no release")
@pytest.mark.parametrize("commit", earlier_commits(), ids=lambda commit: commit[:12])
def test_an_earlier_version_works_with_this_one_or_is_refused_with_a_sentence(
    installed: Installed, tmp_path: Path, commit: str
) -> None:
    """Its wheel's workers with this version's shard, and this one's workers with its shard."""
    source = sources(tmp_path / "source", commit)
    (there,) = map(int, re.findall(r"^PROTOCOL = (\d+)", (source / WIRE).read_text(), re.M))
    earlier = install(build(tmp_path / "wheel", source), tmp_path / "there", THERE)
    (version,) = re.findall(r'^version = "(.*)"', (source / "pyproject.toml").read_text(), re.M)
    code = 0 if there == PROTOCOL else 1
    train = ("python", "-c", TRAIN)
    with shards(installed) as servers:
        said = earlier.run(*train, returns=code, PACELINE_SERVERS=servers)
        sentence = f"speaks protocol {PROTOCOL} (paceline {VERSION}), this worker speaks {there}"
        assert (sentence if code else "trained with") in said
    with shards(earlier) as servers:
        said = installed.run(*train, returns=code, PACELINE_SERVERS=servers)
        sentence = f"speaks protocol {there} (paceline {version}), this worker speaks {PROTOCOL}"
        assert (sentence if code else "trained with") in said
