"""A GPT of 10 million parameters, sharded over the processes of each host (FSDP2).

    torchrun --nproc-per-node 2 examples/sharded.py             one host, with a shard of its own

FSDP2 shards the model over the processes of a host, which are one worker; Paceline averages the
gradients of the hosts. On several hosts start shards, set PACELINE_SERVERS on every host, and start
torchrun once on each, with PACELINE_NUM_GROUPS and PACELINE_GROUP (docs/hosts.md).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import psworker

LENGTH, VOCABULARY = 32, 256


class GPT(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        how = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 16, 4 * width, **how) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mode", default="ssgd")  # or ssd(steps=5), diloco(steps=20)
    args = parser.parse_args()
    if min(args.width, args.depth) < 1:
        parser.error("--width and --depth must be 1 or more")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as its first lines show")
    dist.init_process_group()  # NCCL on GPUs, Gloo elsewhere
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))  # the processes of this host
    torch.manual_seed(0)
    model = GPT(args.width, args.depth).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = psworker.DistributedOptimizer(  # the processes of the mesh are one worker
        torch.optim.AdamW(model.parameters(), lr=3e-4),
        named_parameters=model.named_parameters(),
        model=model,  # its whole weights are freed when they change
        mode=args.mode,
    )
    generator = torch.Generator().manual_seed(psworker.rank())  # each process its own data
    for step in range(args.steps):
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        text = ((start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        optimizer.zero_grad()
        logits = model(text[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if psworker.rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    psworker.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
