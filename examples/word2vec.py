"""Vectors of words by skip-gram with negative samples, made of the vectors of their parts.

    psworker run --workers 2 --shards 2 -- examples/word2vec.py --text FILE

As in fastText, the vector of a word is the mean of those of its character n-grams. An n-gram is a
64-bit hash, so there is no vocabulary, no table of buckets, and no limit on the number of rows: a
row exists from its first gradient on. The table of contexts is one of words.
"""

import argparse
import hashlib
import re
from pathlib import Path

import torch
from torch.nn import functional as F

import psworker

TEXT = Path(__file__).parent / "data" / "tiny-shakespeare-part.txt"
WINDOW, NEGATIVES, GRAMS = 4, 5, 24  # GRAMS: most n-grams of a word.
NOTHING = -1  # The padding of bags.


def hash64(text):
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


def grams(word):
    """Returns the hashes of a word and of its parts of 3 to 5 letters, filled up with padding."""
    marked = f"<{word}>"
    parts = [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1)]
    hashes = [hash64(part) for part in [word, *parts][:GRAMS]]
    return hashes + [NOTHING] * (GRAMS - len(hashes))


def pairs(num_words, size, generator):
    """Returns the places of `size` words in a text, and of a word near each."""
    places = torch.randint(WINDOW, num_words - WINDOW, (size,), generator=generator)
    distance = torch.randint(1, WINDOW + 1, (size,), generator=generator)
    return places, places + distance * (2 * torch.randint(2, (size,), generator=generator) - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256, help="pairs of one worker")
    parser.add_argument("--mode", default="ssgd")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch must be 1 or more")
    if not args.text.is_file():
        parser.error(f"--text {args.text} is no file")
    words = re.findall(r"[a-z']+", args.text.read_text(encoding="utf-8").lower())
    known = {word: (grams(word), hash64(word)) for word in set(words)}
    parts = torch.tensor([known[word][0] for word in words])
    names = torch.tensor([known[word][1] for word in words])
    parts_of = psworker.EmbeddingBag(
        None, 64, mode="mean", padding_idx=NOTHING, name="parts", init="uniform(0.01)"
    )
    contexts = psworker.Embedding(None, 64, name="contexts", init="zeros")
    scale = torch.nn.Parameter(torch.ones(()))  # The only dense parameter.
    model = torch.nn.ModuleDict({"parts": parts_of, "contexts": contexts})
    model.register_parameter("scale", scale)
    rows = torch.optim.Adagrad([parts_of.weight, contexts.weight], lr=0.2)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([scale], lr=1e-3), model.named_parameters(), rows=rows, mode=args.mode
    )
    generator = torch.Generator().manual_seed(psworker.rank())
    for step in range(args.steps):
        places, near = pairs(len(words), args.batch, generator)
        far = torch.randint(len(words), (args.batch, NEGATIVES), generator=generator)
        vectors = parts_of(parts[places]).unsqueeze(1)
        others = contexts(torch.cat([names[near].unsqueeze(1), names[far]], dim=1))
        scores = scale * (vectors * others).sum(-1)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        loss.backward()
        optimizer.step()
        if psworker.rank() == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    psworker.barrier()
    if psworker.rank() == 0:
        asked, every = ["king", "night", "unkindest"], sorted(set(words))
        with torch.no_grad():
            found, all_vectors = (
                F.normalize(parts_of(torch.tensor([grams(word) for word in some])))
                for some in (asked, every)
            )
        for word, row in zip(asked, (found @ all_vectors.T).topk(6).indices, strict=True):
            print(f"near {word}:", *(every[i] for i in row.tolist() if every[i] != word))


if __name__ == "__main__":
    main()
