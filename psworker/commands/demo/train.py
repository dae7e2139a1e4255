"""A training script as a user writes it; `psworker demo` runs it on every worker.

    psworker run --workers 2 --shards 2 -- -m
        psworker.commands.demo.train --mode "ssd(steps=5, warmup=50)"

It prints one JSON object a line: the loss of each step, and the result at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import psworker
from pscore.rules.base import Rule
from pscore.timing.auto import first_mode
from pscore.timing.plans import without_warmup
from psworker.commands.demo import data

BATCH = 32
LR = 0.05
MOMENTUM = 0.9
WARM_STEPS = 12


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling: 61,706 parameters."""

    def __init__(self) -> None:
        """Draws its weights from torch's generator."""
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, data.NUM_CLASSES),
        )


def main() -> None:
    """Trains one model in one mode, together with the other workers."""
    args = parse_args()
    torch.manual_seed(args.seed)
    train, test = data.load(data.find_folder(args.data), args.images)
    psworker.init()
    warm_up(train, args)
    torch.manual_seed(args.seed)
    model = LeNet()
    optimizer = make_optimizer(model, args.mode, args)
    rank, num_workers = psworker.rank(), psworker.size()

    # Every worker draws the same order and takes its own share of each joint batch.
    order = torch.Generator().manual_seed(args.seed)
    num_steps = len(train.labels) // (BATCH * num_workers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * num_steps)
    psworker.barrier("begin")
    seconds = 0.0
    for epoch in range(args.epochs):
        picked = torch.randperm(len(train.labels), generator=order)
        batches = picked[: num_steps * num_workers * BATCH].view(num_steps, num_workers, BATCH)
        for step, batch in enumerate(batches[:, rank], start=epoch * num_steps):
            started_s = time.monotonic()
            optimizer.zero_grad()
            output = model(train.images[batch])
            loss = functional.cross_entropy(output, train.labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            seconds += time.monotonic() - started_s
            say(step=step, loss=loss.item(), seconds=seconds)

    traffic = optimizer.traffic
    sent = {"pushed_nbytes": traffic.pushed_nbytes, "pulled_nbytes": traffic.pulled_nbytes}
    psworker.barrier()
    with optimizer.global_weights():
        accuracy = evaluate(model, test)
    num_images = args.epochs * num_steps * BATCH
    say(accuracy=accuracy, num_images=num_images, seconds=seconds, **sent)


def warm_up(train: data.Part, args: argparse.Namespace) -> None:
    """Makes a few steps of another model in the same mode, which are not measured.

    Torch and the shards compile and allocate in their first steps. The demo compares modes over
    seconds, and the first mode would pay for all.
    """
    model = LeNet()
    optimizer = make_optimizer(model, without_warmup(first_mode(args.mode)), args)
    for _ in range(WARM_STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(train.images[:BATCH]), train.labels[:BATCH])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.close()


def make_optimizer(
    model: nn.Module, mode: str | Rule, args: argparse.Namespace
) -> psworker.DistributedOptimizer:
    """Returns the optimizer of this mode, with hyper-parameters that suit it.

    In a mode that makes an update of each worker's gradient, N workers make N updates from the
    images of one synchronous step, so each gets 1/N of the learning rate. Updates from weights
    that others have moved on from act like momentum of their own (Mitliagkas et al., "Asynchrony
    begets Momentum", arXiv:1605.09774), so the optimizer's is lowered: from 1 - 1/10 to 1 - N/10.
    """
    lr, momentum = args.lr, args.momentum
    if not first_mode(mode).by_step:
        lr /= psworker.size()
        momentum = max(0.0, 1.0 - psworker.size() * (1.0 - momentum))
    return psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        named_parameters=model.named_parameters(),
        mode=mode,
    )


@torch.no_grad()
def evaluate(model: nn.Module, part: data.Part) -> float:
    """Returns the fraction of `part` that the model classifies correctly."""
    model.eval()
    right = 0
    for images, labels in zip(
        torch.split(part.images, 500), torch.split(part.labels, 500), strict=True
    ):
        right += int((model(images).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(part.labels)


def say(**values: float) -> None:
    """Writes one line, which `psworker demo` reads."""
    sys.stdout.write(json.dumps(values) + "\n")


def parse_args() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="ssgd")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, help="number of images to train on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=LR, help="of one synchronous step")
    parser.add_argument("--momentum", type=float, default=MOMENTUM)
    return parser.parse_args()


if __name__ == "__main__":
    main()
