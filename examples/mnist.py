"""The usual MNIST loop, on Fashion-MNIST, plus three lines for Paceline.

    python examples/mnist.py                          alone; a shard starts and ends with it
    psworker run --workers 2 -- examples/mnist.py     two workers on this machine
    torchrun --nproc-per-node 2 examples/mnist.py     the same, by torchrun

The loop is that of PyTorch's basic MNIST example (github.com/pytorch/examples), with SGD instead of
Adadelta, and a reader of the images beside this file instead of torchvision. In a mode with
local steps (`--mode ssd`), evaluate inside `with optimizer.global_weights():`.
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import psworker  # Paceline, line 1 of 3

DATA = Path(__file__).parent / "data"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(800, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def pick_device():
    """Returns the GPU of this worker, by its place on this machine, or the CPU if there is none."""
    if not torch.cuda.is_available():
        print("no GPU that torch can use: training on the CPU", flush=True)
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    print(f"training on GPU {index}, {torch.cuda.get_device_name(index)}", flush=True)
    return torch.device("cuda", index)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch} batch {batch_idx} of {len(loader)}: loss {loss.item():.4f}")
        if batch_idx + 1 == args.max_steps:
            break


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data.to(device))
            correct += (output.argmax(dim=1).cpu() == target).sum().item()
    print(f"test: accuracy {correct / len(loader.dataset):.4f}")


def fashion_mnist(part):
    """Returns the first 8,000 images of the test part to train on, or the rest to test on."""
    pixels = gzip.decompress((DATA / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((DATA / "t10k-labels-idx1-ubyte.gz").read_bytes())
    images = torch.from_numpy(np.frombuffer(pixels, np.uint8, offset=16).copy()).view(-1, 1, 28, 28)
    target = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).copy()).long()
    images = (images.float() / 255 - 0.2860) / 0.3530
    wanted = slice(0, 8000) if part == "train" else slice(8000, None)
    return TensorDataset(images[wanted], target[wanted])


def main():
    parser = argparse.ArgumentParser(description="Fashion-MNIST with Paceline")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor on lr after each epoch")
    parser.add_argument("--mode", default="ssgd", help="one of `psworker modes`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=25)
    parser.add_argument("--max-steps", type=int, help="end an epoch after so many batches")
    args = parser.parse_args()
    if min(args.batch_size, args.log_interval) < 1 or args.max_steps == 0:
        parser.error("--batch-size, --log-interval and --max-steps must be 1 or more")

    torch.manual_seed(args.seed)
    device = pick_device()
    train_set, test_set = fashion_mnist("train"), fashion_mnist("test")

    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Paceline, line 2 of 3: the shards make the steps.
    optimizer = psworker.DistributedOptimizer(optimizer, model.named_parameters(), mode=args.mode)
    # Paceline, line 3 of 3: each worker trains on its own share of the images.
    train_set = Subset(train_set, range(psworker.rank(), len(train_set), psworker.size()))
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
