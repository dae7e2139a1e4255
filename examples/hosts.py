"""Several processes per host: gradients are averaged on the host, and sent once over its link.

    torchrun --nproc-per-node 2 examples/hosts.py               one host, with a shard of its own

On several hosts, start shards, set PACELINE_SERVERS to their addresses on every host, and add
torchrun's --nnodes and --rdzv-endpoint (docs/hosts.md).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import psworker


def main():
    dist.init_process_group()  # NCCL on GPUs, Gloo elsewhere
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = psworker.DistributedOptimizer(  # the processes of this host are one worker
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        named_parameters=model.named_parameters(),
        overlap=True,
    )
    generator = torch.Generator().manual_seed(psworker.rank())  # each process its own data
    truth = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
    for step in range(50):
        inputs = torch.randn(32, 20, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), (inputs @ truth).argmax(dim=1))
        loss.backward()
        optimizer.step()
        if psworker.rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    psworker.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
