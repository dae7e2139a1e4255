"""The training that the tests of Ray and torchrun compare with."""

import torch

WORKERS = 2


def train_plain(steps: int, hidden: int = 32, lr: float = 0.002) -> float:
    """Returns the loss of one process with the mean gradient of all workers."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
            (((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean() / WORKERS).backward()
        optimizer.step()
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean())
