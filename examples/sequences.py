"""A recommender of the next item of a session, in the manner of GRU4Rec: one table of item vectors.

    psworker run --workers 2 --shards 2 -- examples/sequences.py

An item is a 64-bit hash; its vector is the input of a GRU, and is compared with the GRU's output to
score the item as the next one. The rows lie on the shards, the GRU is dense. Sessions are computed:
after 70 of 100 items comes one of their three followers, else any item, so the best hit rate among
a hundred candidates is known.
"""

import argparse

import numpy as np
import torch
from clicks import mix64
from torch import nn

import psworker

ITEMS, FOLLOWERS, LENGTH, FOLLOWS = 5_000, 3, 20, 0.7
CANDIDATES, HITS = 100, 10


def popular(shape, rng):
    """Returns items by Zipf's law: small numbers are frequent."""
    return (ITEMS ** rng.random(shape)).astype(np.int64) - 1


def sessions(count, rng):
    """Returns items in the order in which they were looked at, `(count, LENGTH + 1)`."""
    seen = popular((count, LENGTH + 1), rng)
    follows = rng.random(seen.shape) < FOLLOWS
    chosen = rng.integers(FOLLOWERS, size=seen.shape)
    for at in range(1, LENGTH + 1):
        before = mix64((seen[:, at - 1] * FOLLOWERS + chosen[:, at]).astype(np.uint64))
        seen[:, at] = np.where(follows[:, at], before % np.uint64(ITEMS), seen[:, at])
    return seen


def ids_of(items):
    """Returns the ids of items: any 64 bits."""
    return torch.from_numpy(mix64(items.astype(np.uint64)).view(np.int64))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64, help="sessions of one worker")
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--mode", default="ssgd")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch must be 1 or more")
    torch.manual_seed(0)
    items = psworker.Embedding(None, args.dim, name="items", init="normal(0.1)")
    model = nn.ModuleDict({"table": items, "gru": nn.GRU(args.dim, args.dim, batch_first=True)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adam(psworker.dense_parameters(model), lr=2e-3),
        model.named_parameters(),
        rows=torch.optim.Adagrad([items.weight], lr=0.1),
        mode=args.mode,
    )

    def scores(seen, others):
        """Returns scores of the next items, and of some others for each position."""
        count = seen[:, :-1].size
        both = np.concatenate([seen[:, :-1].ravel(), seen[:, 1:].ravel(), others.ravel()])
        vectors = items(ids_of(both))  # One lookup.
        given, following = vectors[: 2 * count].view(2, *seen[:, 1:].shape, -1)
        hidden = model["gru"](given)[0]
        rest = vectors[2 * count :].view(*others.shape, -1)
        right = (hidden * following).sum(-1, keepdim=True)
        return torch.cat([right, hidden @ rest.mT], dim=-1)

    rng = np.random.default_rng(1 + psworker.rank())
    for step in range(args.steps):
        optimizer.zero_grad()
        found = scores(sessions(args.batch, rng), popular((args.batch, CANDIDATES - 1), rng))
        wanted = torch.zeros(found.shape[:2], dtype=torch.int64)
        loss = nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        if psworker.rank() == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    psworker.barrier()
    if psworker.rank() == 0:
        rng = np.random.default_rng(0)
        with torch.no_grad():
            found = scores(sessions(200, rng), rng.integers(ITEMS, size=(200, CANDIDATES - 1)))
        place = (found[..., 1:] >= found[..., :1]).sum(-1)
        print(f"among the first {HITS} of {CANDIDATES}: {(place < HITS).float().mean():.3f}")


if __name__ == "__main__":
    main()
