"""The MNIST loop for a job whose workers join and leave, and which can be resumed from a file.

    psserver start --shards 2 --detach      # prints the value for PACELINE_SERVERS
    psworker run --elastic 1:8 --workers 2 --job night -- examples/elastic.py --mode local
    psworker run --elastic 1:8 --workers 1 --job night -- examples/elastic.py --mode local

The last command may be run at any time, and on any machine. Loop, learning rate and data depend on
`optimizer.steps`, which a worker gets from the shards when it joins, or from the file.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from mnist import Net, fashion_mnist, pick_device

import psworker


def main():
    parser = argparse.ArgumentParser(description="Fashion-MNIST with workers that join and leave")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--mode", default="ssgd", help="one of `psworker modes`")
    parser.add_argument("--file", type=Path, help="state to resume from; saved at the end")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error("--batch-size must be 1 or more")
    if args.file and (args.file.is_dir() or not args.file.absolute().parent.is_dir()):
        parser.error(f"--file {args.file} is a folder, or its folder does not exist")

    torch.manual_seed(1)
    device = pick_device()
    images, labels = (part.to(device) for part in fashion_mnist("train").tensors)
    model = Net().to(device)
    state = None
    if args.file is not None and args.file.exists():
        state = torch.load(args.file, weights_only=True)
        model.load_state_dict(state["model"])
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        model.named_parameters(),
        mode=args.mode,
        samples=args.batch_size,
    )
    if state is not None and optimizer.steps == 0:  # Else the job has continued since.
        optimizer.load_state_dict(state["optimizer"])

    while optimizer.steps < args.steps:
        seed = psworker.rank() + psworker.size() * optimizer.steps
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randint(len(images), (args.batch_size,), generator=generator).to(device)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 ** (optimizer.steps // 200)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images[batch]), labels[batch])
        loss.backward()
        if optimizer.steps % 20 == 0:
            print(f"step {optimizer.steps}: loss {loss.item():.4f}", flush=True)
        optimizer.step()

    if args.file is not None and psworker.rank() == 0:
        with optimizer.global_weights():
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(kept, args.file)
    print(f"{optimizer.steps} steps, {optimizer.samples_seen:.0f} samples", flush=True)


if __name__ == "__main__":
    main()
