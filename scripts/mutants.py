"""Deletes each rule's own term, one after the other, and checks that its tests notice.

python scripts/mutants.py            # all of them, a few minutes
python scripts/mutants.py ssp cd     # these rules only

Works on a copy; ends with 1 if the tests of a rule pass without its term.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("pscore", "psserver", "psworker", "pssim", "tests")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One term, and the text that replaces it."""

    rule: str
    what: str
    path: str
    term: str
    without: str
    tests: str = ""  # Else those of the rule.


RULES = "pscore/rules/"
LOCAL = "pscore/local/"
OVERLAPS = "pscore/overlaps/"
COMPRESSORS = "pscore/compressors/"
PIPELINE = "psworker/pipeline/run/"
MODES_TEST = "tests/integration/test_pipeline_modes.py"
MUTANTS = (
    Mutant(
        "ssgd",
        "waits for everybody",
        RULES + "ssgd.py",
        '"""Every expected worker."""\n        return num_expected',
        "return 1",
        "tests/paper/test_od.py",
    ),
    Mutant(
        "ssgd",
        "backup workers",
        RULES + "ssgd.py",
        "max(1, num_workers - self.backup)",
        "max(1, num_workers)",
    ),
    Mutant(
        "asgd",
        "one update for each gradient",
        RULES + "base.py",
        "        return 1\n\n    def steps_open",
        "        return num_expected\n\n    def steps_open",
    ),
    Mutant(
        "staleness", "1/tau", RULES + "staleness.py", "return 1.0 / max(1, staleness)", "return 1.0"
    ),
    Mutant(
        "staleness", "n-softsync", RULES + "staleness.py", "max(1, num_workers // self.splits)", "1"
    ),
    Mutant(
        "dcasgd",
        "compensation, constant",
        RULES + "dcasgd.py",
        "g + control * g * g * (weights[i] - backup[i])",
        "g",
    ),
    Mutant(
        "dcasgd",
        "compensation, adaptive",
        RULES + "dcasgd.py",
        "g + control / spread * g * g * (weights[i] - backup[i])",
        "g",
    ),
    Mutant(
        "dcasgd", "mean square", RULES + "dcasgd.py", "keep * square[i] + take * g * g", "g * g"
    ),
    Mutant(
        "ssp",
        "bound",
        RULES + "ssp.py",
        "self.bound == NO_BOUND or clocks.clock_min() >= clock - self.bound",
        "True",
    ),
    Mutant(
        "od",
        "delay",
        RULES + "od.py",
        "return Plan(local=True, block=False)",
        "return Plan(local=True)",
    ),
    Mutant("od", "local update", RULES + "od.py", "Plan(local=True, block", "Plan(block"),
    Mutant(
        "od",
        "delay compensation",
        LOCAL + "dc.py",
        "control * (g[i] * g[i]) * (before - o[i])",
        "np.float32(0.0)",
    ),
    Mutant(
        "od",
        "adaptive delay compensation",
        LOCAL + "dc.py",
        "control / np.sqrt(mean) * square * (before - o[i])",
        "np.float32(0.0)",
    ),
    Mutant(
        "ssd", "pulls at each k-th step only", RULES + "ssd.py", "pull=turn < turns", "pull=True"
    ),
    Mutant("ssd", "pulls in turns", RULES + "ssd.py", "turn=turn, ", "turn=0, "),
    Mutant("ssd", "state over two steps", RULES + "ssd.py", "2 if brings_state else 1", "1"),
    Mutant("ssd", "k steps ahead", RULES + "ssd.py", "return self.steps\n", "return 1\n"),
    Mutant("glu", "global gradient", LOCAL + "glu.py", " + beta * sync + decay", " + decay"),
    Mutant("glu", "own gradient", LOCAL + "glu.py", "alpha * g[i] + ", ""),
    Mutant("glu", "weights before each step", LOCAL + "glu.py", "        p[i] = now\n", ""),
    Mutant("glu", "divisor", LOCAL + "glu.py", "self.steps * rates", "1.0 * rates"),
    Mutant("secant", "global gradient", LOCAL + "secant.py", " + beta * s[i]", ""),
    Mutant("secant", "own gradient", LOCAL + "secant.py", "alpha * g[i] + ", ""),
    Mutant("secant", "rates of the updates", LOCAL + "secant.py", "part.past[-num_updates:]", "[]"),
    Mutant(
        "mirror", "takes the shards' state", LOCAL + "mirror.py", "kept.copy_(pulled)", "continue"
    ),
    Mutant(
        "cd", "k-step correction", RULES + "cd.py", "compress=not is_correction", "compress=True"
    ),
    Mutant(
        "cd",
        "flush",
        RULES + "cd.py",
        'flush=is_correction and self.correction == "flush"',
        "flush=False",
    ),
    Mutant("local_sgd", "rounds of H steps", RULES + "local.py", "place < self.steps - 1", "False"),
    Mutant(
        "local_sgd",
        "backup workers",
        RULES + "ssgd.py",
        "max(1, num_workers - self.backup)",
        "max(1, num_workers)",
    ),
    Mutant(
        "quorum",
        "the quorum",
        RULES + "quorum.py",
        "min(num_expected, self.quorum)",
        "num_expected",
    ),
    Mutant(
        "quorum",
        "late moves count",
        RULES + "quorum.py",
        "return self.window if self.quorum else None",
        "return None",
    ),
    Mutant(
        "quorum",
        "weights of late moves",
        "psserver/decisions/open_steps.py",
        "open_step.add(push, token, push.samples)",
        "open_step.add(push, token, 1.0)",
    ),
    Mutant(
        "quorum",
        "a late worker of fragments does not wait",
        "psserver/decisions/window.py",
        "schedule.number == 1",
        "True",
        "tests/unit/psserver/decisions/test_quorum.py",
    ),
    Mutant(
        "quorum",
        "the margin of the window",
        "psserver/decisions/window.py",
        "MARGIN * self._spread_s",
        "self._spread_s",
        "tests/unit/psserver/decisions/test_quorum.py",
    ),
    Mutant(
        "quorum",
        "moves are waited for in the window",
        "psserver/decisions/window.py",
        "return self.left_s(step) == 0.0",
        "return True",
        "tests/unit/psserver/decisions/test_quorum.py",
    ),
    Mutant(
        "slowmo",
        "slow momentum",
        RULES + "slowmo.py",
        "self.slow_momentum if is_warm else 0.0",
        "0.0",
    ),
    Mutant(
        "slowmo",
        "slow learning rate",
        RULES + "slowmo.py",
        "self.slow_lr if is_warm else 1.0",
        "1.0",
    ),
    Mutant("diloco", "outer momentum", RULES + "diloco.py", "self.outer_momentum,\n", "0.0,\n"),
    Mutant("diloco", "outer rate", RULES + "diloco.py", '"lr": self.outer_lr', '"lr": 1.0'),
    Mutant(
        "diloco",
        "Nesterov",
        RULES + "diloco.py",
        "self.nesterov and self.outer_momentum > 0",
        "False",
    ),
    Mutant(
        "speed",
        "rounds by speed",
        "pscore/fragments.py",
        "int(share * self.steps + 0.5)",
        "self.steps",
    ),
    Mutant(
        "speed",
        "weights by the samples of a round",
        "pscore/fragments.py",
        "mean_samples * num_steps / self.steps if self.least else mean_samples",
        "mean_samples",
    ),
    Mutant(
        "delayed_nesterov",
        "the momentum waits for the N-th arrival",
        "pscore/optimizers/delayed_nesterov.py",
        "is_last = momentum > 0 and (step.counts[index] + 1) % int(every) == 0",
        "is_last = momentum > 0",
    ),
    Mutant(
        "delayed_nesterov",
        "the momentum's mean of the moves",
        "pscore/optimizers/delayed_nesterov.py",
        "total[i] * part",
        "total[i]",
    ),
    Mutant(
        "delayed_nesterov",
        "the momentum in parts",
        "pscore/optimizers/delayed_nesterov.py",
        "1.0 - activation * every + activation if is_last else activation",
        "1.0 if is_last else 0.0",
    ),
    Mutant(
        "decentralised",
        "half of the way",
        "psworker/gossip/pairs.py",
        "(values + own) * np.float32(0.5)",
        "values",
    ),
    Mutant(
        "decentralised",
        "half of the answer",
        "psworker/gossip/pairs.py",
        "+= (values - snapshot) * np.float32(0.5)",
        "+= values - snapshot",
    ),
    Mutant(
        "decentralised",
        "an offer counts once",
        "psworker/gossip/pairs.py",
        "if known is not None and known[0] == number:",
        "if False:",
    ),
    Mutant(
        "decentralised",
        "the model before the step is mixed",
        "psworker/gossip/mixing.py",
        "values - self._before",
        "values - self.model.weights",
    ),
    Mutant(
        "decentralised",
        "sums go around the ring",
        "psworker/gossip/ring.py",
        "came += own[part]",
        "came += 0",
    ),
    Mutant(
        "decentralised",
        "what was mixed during backward stays",
        "psworker/gossip/pairs.py",
        "+= moved[part] - self._read[part]",
        "= moved[part]",
    ),
    Mutant(
        "decentralised",
        "an answer counts once",
        "psworker/gossip/pairs.py",
        "snapshot, version = self._open.pop(part)",
        "snapshot, version = self._open[part]",
    ),
    Mutant(
        "decentralised",
        "an atomic exchange is over before the step",
        "psworker/gossip/atomic.py",
        "            yield from self._settle(lambda: not self._open)\n",
        "",
    ),
    Mutant(
        "decentralised",
        "active workers alone begin atomic exchanges",
        "psworker/gossip/atomic.py",
        "        if self.rank not in self._active:\n            return []\n",
        "",
    ),
    Mutant(
        "decentralised",
        "models go to those who take them",
        "psworker/gossip/mixing.py",
        "[edge.taker for edge in edges if edge.giver == self.rank]",
        "[edge.giver for edge in edges if edge.taker == self.rank]",
    ),
    Mutant(
        "decentralised",
        "a late share is added one step later",
        "psworker/gossip/push_sum.py",
        "self._take_until(self.number + 1 - late, kept)",
        "self._take_until(self.number + 1, kept)",
    ),
    *(
        Mutant("decentralised", what, path, term, without, "tests/sim/test_peer_seeds.py")
        for what, path, term, without in (
            (
                "the least number of workers",
                "psworker/gossip/pairs.py",
                "needs_least=True",
                "needs_least=False",
            ),
            (
                "a part with too few workers stops",
                "psworker/peers/patience.py",
                "num_reached + 1 < min_workers",
                "min_workers < 0",
            ),
            (
                "a wait without an end fails",
                "psworker/peers/patience.py",
                "return min(waited_s, silent_s) >=",
                "return 0.0 * min(waited_s, silent_s) >=",
            ),
        )
    ),
    Mutant(
        "overlaps",
        "the worker's own step",
        OVERLAPS + "mirror.py",
        "guess, momentum",
        "guess * 0, momentum",
    ),
    Mutant(
        "overlaps", "translation", OVERLAPS + "mirror.py", "pulled - part.origin", "pulled - pulled"
    ),
    Mutant(
        "overlaps", "origin that lands", OVERLAPS + "mirror.py", "part.origin.copy_(pulled)", "None"
    ),
    Mutant("overlaps", "control", OVERLAPS + "mirror.py", "alpha=self.control", "alpha=0.0"),
    Mutant("overlaps", "mixing", OVERLAPS + "blend.py", "alpha=1.0 - self.mix", "alpha=0.0"),
    Mutant(
        "overlaps",
        "the others' moves",
        OVERLAPS + "eager.py",
        "guess.add_(part.state[OTHERS])",
        "pass",
    ),
    Mutant(
        "overlaps",
        "weights one round old",
        OVERLAPS + "late.py",
        "part.weights.copy_(newest)",
        "pass",
    ),
    Mutant(
        "overlaps",
        "momentum that is followed",
        "pscore/optimizers/sgd.py",
        "velocity.copy_(made if lr else old)",
        "pass",
    ),
    Mutant(
        "fragments",
        "rounds that end in turn",
        "pscore/fragments.py",
        "step + self.steps - self.offset(fragment)",
        "step",
        "tests/paper/test_fragments.py",
    ),
    Mutant(
        "fragments",
        "a count for each",
        "psworker/replica/clocks.py",
        "+ (fragment in fragments) for",
        "+ 1 for",
        "tests/paper/test_fragments.py",
    ),
    Mutant(
        "fragments",
        "rounds that are open",
        "psworker/replica/rounds.py",
        "range(len(self._open)) if fragments is None else fragments",
        "range(len(self._open))",
        "tests/paper/test_fragments.py",
    ),
    Mutant(
        "fragments",
        "rounds left out by a late worker",
        "psworker/replica/clocks.py",
        "[count + missed for count in self.counts]",
        "[count + 0 for count in self.counts]",
        "tests/paper/test_fragments.py",
    ),
    Mutant("overlaps", "delay", RULES + "local.py", "place + 1 == landing", "place == 0"),
    Mutant(
        "sparseloco",
        "the residual decays",
        COMPRESSORS + "sparseloco.py",
        "u = decay * residual[i] + grad[i]",
        "u = residual[i] + grad[i]",
        "tests/paper/test_sparseloco.py",
    ),
    Mutant(
        "sparseloco",
        "error feedback",
        COMPRESSORS + "sparseloco.py",
        "part[found[j]] = u - (-level if u < 0.0 else level)",
        "part[found[j]] = np.float32(0.0)",
        "tests/paper/test_sparseloco.py",
    ),
    Mutant(
        "sparseloco",
        "two levels",
        COMPRESSORS + "sparseloco.py",
        "is_high = abs(u) >= mean",
        "is_high = True",
        "tests/paper/test_sparseloco.py",
    ),
    Mutant(
        "pulseloco",
        "the weights of the round's begin",
        "psworker/connection/exchange/payloads.py",
        "origin = self.origin_of(index)",
        "origin = None",
        "tests/paper/test_pulseloco.py",
    ),
    Mutant(
        "pulseloco",
        "error feedback",
        COMPRESSORS + "pulseloco.py",
        "residual[i] = u\n",
        "residual[i] = np.float32(0.0)\n",
        "tests/paper/test_pulseloco.py",
    ),
    *(
        Mutant("pipeline", what, PIPELINE + path, term, without)
        for what, path, term, without in (
            ("weights kept for the backward", "schedule.py", "in_place = False", "in_place = True"),
            (
                "forwards ahead",
                "schedule.py",
                "minibatch // self.place.num_replicas - self.place.depth())",
                "minibatch // self.place.num_replicas - self.place.depth() - 1)",
            ),
            (
                "the replica of a minibatch",
                "schedule.py",
                "+ minibatch % self.replicas[stage]",
                "+ (minibatch + 1) % self.replicas[stage]",
            ),
            (
                "vertical sync counted in minibatches",
                "schedule.py",
                "return first * replicas[0] // self.place.num_replicas",
                "return first",
            ),
            ("2BW's delay", "schedule.py", "// self._own - 1)", "// self._own - 2)"),
            ("the mean of an update", "stage.py", "parameter.grad /= held", "pass"),
            (
                "slots until no minibatch needs them",
                "ring.py",
                "number < oldest",
                "number <= oldest",
            ),
            (
                "a version in use is not overwritten",
                "ring.py",
                "if self._moves and is_used:",
                "if False:",
            ),
        )
    ),
    *(
        Mutant("pipeline", what, PIPELINE + path, term, without, MODES_TEST)
        for what, path, term, without in (
            (
                "updates of one minibatch in a mode without steps",
                "schedule.py",
                "replicas if self._rule.by_step else",
                "replicas if True else",
            ),
            (
                "the same weights on all replicas at the end",
                "driver.py",
                "self._work.step_aside()",
                "pass",
            ),
        )
    ),
    Mutant(
        "pipeline",
        "learning rate by stage",
        PIPELINE + "pipeline.py",
        'group["lr"] *= self._versions(self.place).rate',
        "pass",
        "tests/integration/test_pipeline_driver.py",
    ),
    *(
        Mutant("pipeline", what, path, term, without, "tests/sim/test_continued.py")
        for what, path, term, without in (
            (
                "a minibatch counted once",
                "psserver/decisions/progress.py",
                "if self.is_repeated(push) else push",
                "if False else push",
            ),
            (
                "one first minibatch for all that meet",
                PIPELINE + "members.py",
                "self.first = self.agree(self.counted)",
                "self.first = self.counted()",
            ),
            (
                "who saves when they meet",
                PIPELINE + "members.py",
                "is_new and positions[rank] == self.first + 1",
                "is_new and positions[rank] < 0",
            ),
            (
                "a checkpoint that others have brought to its end",
                PIPELINE + "continuing.py",
                "save, self._save_of_others = self._save_of_others, None",
                "save = None",
            ),
            (
                "no step before all know of the checkpoint",
                PIPELINE + "continuing.py",
                "            members.agree(lambda: 0, writer)\n",
                "            pass\n",
            ),
            (
                "a worker that has ended waits for a checkpoint of others",
                PIPELINE + "members.py",
                "saves = any(positions.values())",
                "saves = False",
            ),
            (
                "a worker that knows of the checkpoint goes on",
                PIPELINE + "continuing.py",
                "with contextlib.suppress(MembersChangedError):  # The next",
                "with contextlib.suppress():  # The next",
            ),
            (
                "the stage that is behind",
                PIPELINE + "members.py",
                "min(min(row, default=0) for row in counts)",
                "max(min(row, default=0) for row in counts)",
            ),
            (
                "the slice that is behind",
                PIPELINE + "members.py",
                "min(min(row, default=0) for row in counts)",
                "min(max(row, default=0) for row in counts)",
            ),
            (
                "steps that do not wait for who meets",
                PIPELINE + "continuing.py",
                "self._steps.step_aside()\n                self.place",
                "self.place",
            ),
            (
                "the last round without those that are done",
                PIPELINE + "continuing.py",
                "self._steps.step_aside()  # The last round",
                "pass  # The last round",
            ),
            (
                "messages of this epoch only",
                PIPELINE + "members.py",
                "kind, number, values, self._gathering.epoch)",
                "kind, number, values, 0)",
            ),
        )
    ),
    Mutant(
        "pipeline",
        "fewer updates of a stage with more replicas",
        PIPELINE + "schedule.py",
        "return self._taken(self.place.num_replicas) / self._taken(self.place.replicas[0])",
        "return 1.0",
    ),
    Mutant(
        "pipeline_flush",
        "mean over all replicas",
        PIPELINE + "flush.py",
        "min(self._place.num_replicas, self._seen) / self._seen",
        "1 / self._seen",
    ),
    Mutant(
        "pipeline_flush", "the rest at the end", PIPELINE + "flush.py", "if self._held:", "if 0:"
    ),
)


def is_noticed(mutant: Mutant, copy: Path) -> bool:
    """Returns whether the tests fail with one term gone from a copy of the repository."""
    path = copy / mutant.path
    whole = path.read_text(encoding="utf-8")
    assert whole.count(mutant.term) == 1, f"{mutant.path}: {whole.count(mutant.term)} x the term"
    path.write_text(whole.replace(mutant.term, mutant.without), encoding="utf-8")
    tests = mutant.tests or f"tests/paper/test_{mutant.rule}.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        path.write_text(whole, encoding="utf-8")
    return done.returncode == 1


def main() -> int:
    """Tries the mutants; returns the exit status."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.rule in sys.argv[1:]]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(folder, name), ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for mutant in chosen:
            noticed = is_noticed(mutant, Path(folder))
            survivors += not noticed
            said = "noticed" if noticed else "NOT NOTICED"
            print(f"{mutant.rule:10} without {mutant.what:34} {said}", flush=True)
    print(f"{len(chosen)} terms, {survivors} not noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
