"""A click model in the manner of DLRM: tables of any number of ids, and a dense part.

    psworker run --workers 2 --shards 2 -- examples/dlrm.py
    psworker run --workers 2 --shards 2 -- examples/dlrm.py --rows-mode asgd

The rows of users and items lie on the shards; a step moves only those of its batch. Ids are 64-bit
hashes: nothing counts or renames them beforehand, and a row exists from its first gradient on.
The log is computed (clicks.py), so the best possible AUC is known.
"""

import argparse

import numpy as np
import torch
from clicks import Clicks, auc, bayes_auc
from torch import nn

import psworker

USERS, ITEMS = (100_000, 1.05), (10_000, 1.2)  # Number of ids, and exponent of Zipf's law.
TESTED, OFTEN = 100_000, 50  # Samples of the test; times that ids of some of them were seen.


class ClickModel(nn.Module):
    """Scores of users and items: biases, the product of their vectors, and a network on it."""

    def __init__(self, users, items, dim):
        super().__init__()
        self.users, self.items = users, items
        self.top = nn.Sequential(nn.Linear(2 * dim - 1, 32), nn.ReLU(), nn.Linear(32, 1))
        self.base = nn.Parameter(torch.tensor(-2.0))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        products = u[:, 1:] * i[:, 1:]
        hidden = self.top(torch.cat([products, u[:, :1], i[:, 1:]], dim=1)).squeeze(1)
        return self.base + u[:, 0] + i[:, 0] + products.sum(1) + hidden


def batches(log, start, steps, size, rank, num_workers):
    """Yields user, item and click of this worker's samples."""
    for step in range(steps):
        numbers = start + (step * num_workers + rank) * size + np.arange(size)
        user, item = (torch.from_numpy(ids) for ids in log.ids(numbers))
        yield user, item, torch.from_numpy(log.labels(numbers))


def evaluate(model, log, start):
    """Returns AUC and best possible of new samples, and of those whose ids were seen often."""
    numbers = start + np.arange(TESTED)
    with torch.no_grad():  # Looks: they create no row.
        scores = model(*(torch.from_numpy(ids) for ids in log.ids(numbers))).numpy()
    labels, chances = log.labels(numbers), log.probabilities(numbers)
    often = log.times_seen(numbers, start) >= OFTEN
    parts = {"all": slice(None), f"ids seen {OFTEN} times": often}
    return {of: (auc(labels[at], scores[at]), bayes_auc(chances[at])) for of, at in parts.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="ssgd")
    parser.add_argument("--rows-mode", default=None, help="of the row tables, if another")
    parser.add_argument("--seed", type=int, default=0, help="of the log, and of the dense part")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=2048, help="samples of a step, of all workers")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    if min(args.samples, args.batch) < 1:
        parser.error("--samples and --batch must be 1 or more")
    torch.manual_seed(args.seed)
    log = Clicks(args.seed, USERS, ITEMS)
    users = psworker.Embedding(None, args.dim, name="users", init="normal(0.1)")
    items = psworker.Embedding(None, args.dim, name="items", init="normal(0.1)")
    model = ClickModel(users, items, args.dim)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adagrad(psworker.dense_parameters(model), lr=0.02),
        model.named_parameters(),
        rows=torch.optim.Adagrad([users.weight, items.weight], lr=args.lr),
        mode=args.mode,
        rows_mode=args.rows_mode,
    )
    rank, num_workers = psworker.rank(), psworker.size()
    steps, size = args.samples // args.batch, args.batch // num_workers
    loader = batches(log, 0, steps, size, rank, num_workers)
    loader = psworker.prefetch(loader, model, ids=lambda batch: {users: batch[0], items: batch[1]})
    for step, (user, item, click) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), click)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)
    psworker.barrier()
    if rank == 0:
        for of, (found, best) in evaluate(model, log, args.samples).items():
            print(f"{of}: AUC {found:.5f}, best possible {best:.5f}")


if __name__ == "__main__":
    main()
