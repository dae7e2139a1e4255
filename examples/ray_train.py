"""Ray Train with Paceline: shards are actors, TorchTrainer starts the workers.

    pip install 'ray[train]'
    python examples/ray_train.py --shards 2 --workers 2        # on a cluster: ray job submit ...

Only `Shards`, `PacelineConfig` and the optimizer are Paceline's. Ray restarts a shard or a group of
workers that dies; the loop uses `optimizer.steps`, so it continues at the job's step.
"""

import argparse
import tempfile

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import psworker
from psworker.integrations.ray import PacelineConfig, Shards


def train_loop(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9), model.named_parameters()
    )
    print(f"rank {psworker.rank()} begins at step {optimizer.steps}", flush=True)
    while optimizer.steps < config["steps"]:
        data = torch.Generator().manual_seed(1000 * optimizer.steps + psworker.rank())
        x = torch.randn(16, 8, generator=data)
        loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with optimizer.global_weights():
        x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
        loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
    print(f"rank {psworker.rank()} ends with loss {loss.item():.8f}", flush=True)
    psworker.shutdown()


def main():
    parser = argparse.ArgumentParser(description="a regression with Ray Train and Paceline")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--port", type=int, default=7070, help="port of shard 0")
    parser.add_argument("--state-dir", help="folder on each node for the shards' journals")
    args = parser.parse_args()

    # On a network that is not yours alone: tls_cert, tls_key, tls_client_ca and token_file instead.
    settings = {"insecure": True, "state_dir": args.state_dir or tempfile.mkdtemp()}
    shards = Shards(args.shards, port=args.port, settings=settings)
    print("shards at " + ",".join(shards.addresses()), flush=True)  # For psserver status --servers.
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": args.steps},
        torch_config=PacelineConfig(shards),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    try:
        trainer.fit()
    finally:
        shards.stop()


if __name__ == "__main__":
    main()
