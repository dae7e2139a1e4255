"""A click log that is computed, not read: sample n is a function of n, so any worker makes it.

Users and items are drawn from Zipf's law, as 64-bit ids. Each id has factors, made of its hash; a
click's logit is b0 + a (alpha_u + beta_i) + b <p_u, q_i> / sqrt(k). So the best AUC that any model
can reach is known: that of the true probabilities (`bayes_auc`).

    python examples/clicks.py       prints the rate of clicks, and the best AUC
"""

import numpy as np

FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
USERS, ITEMS = (1_000_000, 1.05), (100_000, 1.2)  # Number of ids, and exponent of Zipf's law.
K, B0, A, B = 8, -2.5, 0.8, 1.2
PART = 1 << 20  # Samples that are computed at once.


def mix64(values):
    """Returns 64-bit hashes (the finaliser of SplitMix64) of an array of uint64."""
    values = (values ^ (values >> np.uint64(30))) * FIRST
    values = (values ^ (values >> np.uint64(27))) * SECOND
    return values ^ (values >> np.uint64(31))


def uniform(keys, field):
    """Returns numbers in 0..1 that depend on a key, uint64, and on the number of a field."""
    with np.errstate(over="ignore"):
        hashed = mix64(mix64(keys + np.uint64(field + 1) * GOLDEN))
    return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(keys, field):
    """Returns normal numbers, by Box and Muller."""
    radius = np.sqrt(-2.0 * np.log(uniform(keys, 2 * field)))
    return radius * np.cos(2.0 * np.pi * uniform(keys, 2 * field + 1))


def zipf(drawn, number, exponent):
    """Returns ranks 1..number, of which rank r is drawn about r ** -exponent times as often."""
    power = 1.0 - exponent
    ranks = (((number + 1.0) ** power - 1.0) * drawn + 1.0) ** (1.0 / power)
    return np.minimum(number, np.floor(ranks)).astype(np.uint64)


class Clicks:
    """A log of clicks with one seed."""

    def __init__(self, seed=0, users=USERS, items=ITEMS):
        self.seed, self.users, self.items = seed, users, items

    def ranks(self, numbers):
        """Returns the ranks of user and item of samples, uint64."""
        keys = mix64(np.asarray(numbers, np.uint64) ^ mix64(np.array([self.seed], np.uint64)))
        return zipf(uniform(keys, 0), *self.users), zipf(uniform(keys, 1), *self.items)

    def ids(self, numbers):
        """Returns the ids of user and item of samples, int64: hashes of their ranks."""
        return tuple(mix64(ranks).view(np.int64) for ranks in self.ranks(numbers))

    def times_seen(self, numbers, count):
        """Returns how often the rarer one of user and item of each sample is in the first count."""
        parts = [np.arange(begin, min(begin + PART, count)) for begin in range(0, count, PART)]
        found = []
        for field, (number, _) in enumerate((self.users, self.items)):
            times = sum(np.bincount(self.ranks(p)[field], minlength=number + 1) for p in parts)
            found.append(times[self.ranks(numbers)[field]])
        return np.minimum(*found)

    def probabilities(self, numbers):
        """Returns the true probability of a click for each sample."""
        users, items = (ids.view(np.uint64) for ids in self.ids(numbers))
        product = sum(normal(users, 10 + f) * normal(items, 40 + f) for f in range(K))
        bias = normal(users, 1) + normal(items, 2)
        return 1.0 / (1.0 + np.exp(-(B0 + A * bias + B * product / np.sqrt(K))))

    def labels(self, numbers):
        """Returns whether each sample was clicked, float32."""
        keys = mix64(
            np.asarray(numbers, np.uint64) ^ mix64(np.array([~self.seed], np.int64).view(np.uint64))
        )
        return (uniform(keys, 2) < self.probabilities(numbers)).astype(np.float32)


def auc(labels, scores):
    """Returns the share of pairs of a click and no click whose scores have the right order."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    _, first, counts = np.unique(np.asarray(scores)[order], return_index=True, return_counts=True)
    ranks[order] = np.repeat(first + (counts + 1) / 2, counts)  # Equal scores share their rank.
    clicks = labels.sum()
    return (ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks))


def bayes_auc(probabilities):
    """Returns the expected AUC of the true probabilities, without the noise of drawn labels."""
    p = np.sort(probabilities)
    below = np.concatenate([[0.0], np.cumsum(1.0 - p)[:-1]])
    return (p * below).sum() / (p.sum() * (1.0 - p).sum() - (p * (1.0 - p)).sum())


if __name__ == "__main__":
    log, numbers = Clicks(), np.arange(1_000_000)
    chances = log.probabilities(numbers)
    print(f"clicks {chances.mean():.3f}, best AUC {bayes_auc(chances):.4f}")
    print(f"AUC of the drawn labels {auc(log.labels(numbers), chances):.4f}")
