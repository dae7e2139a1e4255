"""Short scenarios with all their messages; the transcripts are recorded under transcripts/."""

from dataclasses import replace
from pathlib import Path

from pscore.rules import SSD, SSGD, SSP
from pssim.case import ONE_SLICE, Case
from pssim.faulty import simulate
from pssim.network import Cut, MessageFaults

TRANSCRIPTS = Path(__file__).parent / "transcripts"
NEVER = (None, None)

PLAIN = Case(
    seed=0,
    rule=SSGD(),
    num_shards=1,
    steps=(3, 3),
    compute_s=(0.1, 0.1),
    dies_s=NEVER,
    back_s=NEVER,
    samples=(1.0, 1.0),
    faults=MessageFaults(delay_s_max=0.01),
    shapes=ONE_SLICE,
)

SCENARIOS: dict[str, tuple[str, Case]] = {
    "ssgd_duplicate_and_reorder": (
        "Two workers, one shard, synchronous. Worker 0's first push takes longer than worker 1's,\n"
        "and arrives twice: gradients are added in the order of the ranks, and each once.",
        replace(
            PLAIN,
            seed=1,
            steps=(2, 2),
            faults=MessageFaults(
                delay_s_max=0.01,
                doubled=("worker 0: push of step 0, slice 0, shard 0",),
                slowed=("worker 0: push of step 0, slice 0, shard 0",),
            ),
        ),
    ),
    "ssd_slow_worker": (
        "ssd with k=2 after one step of warm-up; worker 1 is ten times slower. Worker 0 is up to\n"
        "two steps ahead: its pushes are acknowledged and collected by step. Then the pull that\n"
        "it sent has to land before it pushes again.",
        replace(
            PLAIN,
            seed=2,
            rule=SSD(steps=2, warmup=1, local="sgd"),
            steps=(5, 5),
            compute_s=(0.05, 0.5),
        ),
    ),
    "ssgd_worker_leaves": (
        "Worker 1 has less data and leaves after one step; worker 0 continues alone.",
        replace(PLAIN, seed=3, steps=(3, 1)),
    ),
    "ssgd_worker_dies": (
        "Worker 1 is killed in its second step. Worker 0 waits until worker 1's lease is over;\n"
        "then the step closes with worker 0's gradient alone.",
        replace(PLAIN, seed=4, dies_s=(None, 0.15)),
    ),
    "ssp_worker_is_cut_off": (
        "ssp with bound 1. Worker 1 is cut off for longer than its lease. Worker 0 waits, then\n"
        "continues alone. When worker 1 is heard again it learns that it was lost, and returns.",
        replace(
            PLAIN,
            seed=5,
            rule=SSP(bound=1),
            steps=(5, 5),
            cuts=(Cut(worker=1, shard=None, from_s=0.3, until_s=4.5),),
        ),
    ),
}


def transcript(name: str) -> str:
    """Returns the messages of a scenario, below a description of it."""
    about, case = SCENARIOS[name]
    lines = [line for line in simulate(case, trace=True).trace if "heartbeat" not in line]
    return f"{about}\n\n{case}\n\n" + "\n".join(lines) + "\n"
