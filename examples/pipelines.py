"""Two pipelines of two stages, run by torch; each stage is a job of two workers on the shards.

    psserver start --detach                               prints PACELINE_SERVERS: export it
    torchrun --nproc-per-node 4 examples/pipelines.py --mode "diloco(steps=5)"

Ranks 0 and 1 are stages 0 and 1 of the first pipeline, 2 and 3 those of the second:
docs/pipelines.md.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import psworker

STAGES, MICROBATCHES = 2, 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="ssgd")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--samples", type=int, default=32, help="samples of a minibatch")
    parser.add_argument("--out", help="folder for the weights of each stage")
    args = parser.parse_args()
    if args.samples < 1:
        parser.error("--samples must be 1 or more")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as its first lines show")
    if args.out:
        os.makedirs(args.out, exist_ok=True)

    dist.init_process_group("gloo")
    number, stage = divmod(dist.get_rank(), STAGES)  # which pipeline, and which stage of it
    pipelines = dist.get_world_size() // STAGES
    ranks = range(dist.get_world_size())
    groups = [dist.new_group(ranks[i * STAGES : (i + 1) * STAGES]) for i in range(pipelines)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    part = model[:1] if stage == 0 else model[1:]

    psworker.init(  # the workers of a stage's job are its replicas, one in each pipeline
        job=f"{os.environ.get('PACELINE_JOB', 'pipelines')}.s{stage}",
        rank=number,
        num_workers=pipelines,
        local_group=None,
    )
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9),
        named_parameters=part.named_parameters(),
        mode=args.mode,
    )
    schedule = Schedule1F1B(
        PipelineStage(part, stage, STAGES, torch.device("cpu"), group=groups[number]),
        MICROBATCHES,
        loss_fn=F.cross_entropy,
    )

    generator = torch.Generator().manual_seed(number)  # each pipeline its own data
    truth = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
    for step in range(args.steps):
        inputs = torch.randn(args.samples, 20, generator=generator)
        optimizer.zero_grad()
        losses = []
        if stage == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=(inputs @ truth).argmax(dim=1), losses=losses)
        optimizer.step()
        if losses and number == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.4f}", flush=True)
    if args.out and number == 0:
        with optimizer.global_weights():
            torch.save(part.state_dict(), f"{args.out}/stage{stage}.pt")
    psworker.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
