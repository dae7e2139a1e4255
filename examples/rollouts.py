"""Reinforcement learning with weights that are some versions old: CartPole by PPO.

    psserver start
    PACELINE_SERVERS=127.0.0.1:7070 python examples/rollouts.py --staleness 2

Two learners train; four rollout processes, which import no torch, read the published weights and
play with those of `--staleness` versions ago. Each batch is stamped with the version that played
it, at the moment of its first step. The loss is PPO's around the learner's own policy, times the
probability of an action now over that at its stamp, at most 2 (decoupled PPO, arXiv:2505.24298);
`--uncorrected` leaves this factor out, as if the newest version had played.
"""

import argparse
import multiprocessing
import os
import time
from collections import deque

import numpy as np

import psworker

NUM_LEARNERS, NUM_ROLLOUTS, STEPS, EPOCHS, PARTS = 2, 4, 128, 4, 4
WIDTH, DISCOUNT, TRACE, CLIP, WEIGHT_MAX = 32, 0.99, 0.95, 0.2, 2.0
LONGEST = 500  # Steps of an episode.


def reset(rng):
    """Returns a state of the cart at its place with the pole upright, nearly."""
    return rng.uniform(-0.05, 0.05, 4)


def push(state, action):
    """Returns the state 20 ms later, and whether the pole has fallen (Barto et al., 1983)."""
    _, speed, angle, turn = state
    cosine, sine = np.cos(angle), np.sin(angle)
    force = ((10.0 if action else -10.0) + 0.05 * turn * turn * sine) / 1.1
    twist = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
    pull = force - 0.05 * twist * cosine / 1.1
    state = state + 0.02 * np.array([speed, pull, turn, twist])
    return state, abs(state[0]) > 2.4 or abs(state[2]) > 0.2095


def play(arrays, state, age, rng):
    """Returns `STEPS` steps, the state and age of the open episode, and lengths of ended ones."""
    batch = {name: [] for name in ("state", "action", "log_p", "next", "fell", "ended")}
    lengths = []
    for _ in range(STEPS):
        hidden = np.tanh(arrays["policy.0.weight"] @ state + arrays["policy.0.bias"])
        score = arrays["policy.2.weight"] @ hidden + arrays["policy.2.bias"]
        log_p = score - np.logaddexp(*score)
        action = int(rng.random() < np.exp(log_p[1]))
        after, fell = push(state, action)
        age += 1
        ended = fell or age == LONGEST
        values = (state, action, log_p[action], after, fell, ended)
        for row, value in zip(batch.values(), values, strict=True):
            row.append(value)
        state = after
        if ended:
            lengths.append(age)
            state, age = reset(rng), 0
    return {name: np.array(row, np.float32) for name, row in batch.items()}, state, age, lengths


def roll_out(index, batches, lengths, args):
    """Plays with the weights of some versions ago, one batch for each version."""
    rng = np.random.default_rng([args.seed, index])
    state, age = reset(rng), 0
    kept = deque(maxlen=args.staleness + 1)
    with psworker.Subscriber(job=args.job) as subscriber:
        for _ in range(args.updates):
            kept.append(subscriber.wait(newer_than=kept[-1].version if kept else None))
            stamp = kept[0].version.number
            batch, state, age, ended = play(kept[0].arrays, state, age, rng)
            batches.put((index, stamp, batch))
            lengths.put(ended)


def learn(rank, batches, args):
    """Trains on the batches of its rollouts."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    def layers(outputs):
        return torch.nn.Sequential(
            torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, outputs)
        )

    model = torch.nn.ModuleDict({"policy": layers(2), "value": layers(1)})
    torch.nn.init.normal_(model["policy"][2].weight, std=0.01)
    psworker.init(job=args.job, rank=rank, num_workers=NUM_LEARNERS)
    adam = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = psworker.DistributedOptimizer(
        adam, named_parameters=model.named_parameters(), publish_every=EPOCHS * PARTS
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / args.updates)
    for update in range(args.updates):
        found = sorted(
            (batches.get() for _ in range(NUM_ROLLOUTS // NUM_LEARNERS)), key=lambda one: one[0]
        )
        assert all(stamp == max(0, update - args.staleness) for _, stamp, _ in found)
        batch = {
            name: torch.from_numpy(np.stack([one[name] for *_, one in found]))
            for name in found[0][2]
        }
        action = batch["action"].long()[..., None]

        def log_p(part=slice(None), batch=batch, action=action):
            scores = torch.log_softmax(model["policy"](batch["state"][:, part]), -1)
            return scores.gather(-1, action[:, part])[..., 0]

        with torch.no_grad():
            value, after = (model["value"](batch[name])[..., 0] for name in ("state", "next"))
            gain, gains = torch.zeros(len(found)), torch.zeros_like(value)
            surprise = 1 - DISCOUNT + DISCOUNT * after * (1 - batch["fell"]) - value
            for step in reversed(range(STEPS)):
                gain = surprise[:, step] + DISCOUNT * TRACE * (1 - batch["ended"][:, step]) * gain
                gains[:, step] = gain
            target = value + gains
            gains = (gains - gains.mean()) / (gains.std() + 1e-8)
            before = log_p()
            if args.corrected:
                gains *= (before - batch["log_p"]).exp().clamp(max=WEIGHT_MAX)
        for part in [part for _ in range(EPOCHS) for part in torch.randperm(STEPS).chunk(PARTS)]:
            ratio = (log_p(part) - before[:, part]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.min(ratio * gains[:, part], clipped * gains[:, part]).mean()
            miss = model["value"](batch["state"][:, part])[..., 0] - target[:, part]
            optimizer.zero_grad()
            (0.5 * miss.square().mean() - gain).backward()
            optimizer.step()
        rate.step()
    psworker.shutdown()


def run(args):
    """Trains; yields the mean length of the 20 episodes that ended last, after each update."""
    fork = multiprocessing.get_context("forkserver")  # Which has imported this program once.
    batches, lengths = [fork.Queue() for _ in range(NUM_LEARNERS)], fork.Queue()
    processes = [
        fork.Process(target=learn, args=(rank, batches[rank], args), daemon=True)
        for rank in range(NUM_LEARNERS)
    ] + [
        fork.Process(
            target=roll_out, args=(i, batches[i % NUM_LEARNERS], lengths, args), daemon=True
        )
        for i in range(NUM_ROLLOUTS)
    ]
    for process in processes:
        process.start()
    ended = deque(maxlen=20)
    for _ in range(args.updates):
        for _ in range(NUM_ROLLOUTS):
            while lengths.empty() and not any(process.exitcode for process in processes):
                time.sleep(0.01)
            if any(process.exitcode for process in processes):
                raise SystemExit("a process has failed")
            ended.extend(lengths.get())
        yield sum(ended) / max(1, len(ended))
    for process in processes:
        process.join()


def parse(words=None):
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description="CartPole with stale rollouts.")
    parser.add_argument("--staleness", type=int, default=0, help="versions")
    parser.add_argument("--uncorrected", dest="corrected", action="store_false")
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", default=f"cartpole-{os.getpid()}")
    args = parser.parse_args(words)
    if args.updates < 1 or args.staleness < 0:
        parser.error("--updates must be 1 or more, --staleness 0 or more")
    return args


if __name__ == "__main__":
    for number, length in enumerate(run(parse()), 1):
        if number % 5 == 0:
            print(f"update {number}: an episode lasts {length:.0f} steps", flush=True)
