"""An HTTP server with a small language model whose weights change while it answers.

    psserver start --shards 2 --publish night:every=4
    PACELINE_SERVERS=127.0.0.1:7070,127.0.0.1:7071 python examples/serve.py train &
    PACELINE_SERVERS=127.0.0.1:7070,127.0.0.1:7071 python examples/serve.py
    curl 'http://127.0.0.1:8100/?prompt=the+'

The server imports no torch. Each answer is made with one version of the weights, which it names.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import numpy as np

import psworker

JOB, CONTEXT, WIDTH, VOCABULARY = "night", 8, 32, 128
TEXT = "the worker waits for the shard and the shard waits for the worker. " * 30


def complete(arrays, prompt, length=40):
    """Returns a continuation of `prompt`: the most likely character, again and again."""
    text = prompt
    for _ in range(length):
        codes = [min(ord(one), VOCABULARY - 1) for one in text.rjust(CONTEXT)[-CONTEXT:]]
        hidden = np.tanh(arrays["embed.weight"][codes].reshape(-1) @ arrays["hidden.weight"].T)
        text += chr(int(np.argmax(arrays["head.weight"] @ hidden)))
    return text


class Handler(BaseHTTPRequestHandler):
    """Answers with the newest weights at the time of the request."""

    subscriber = None

    def do_GET(self):
        """Answers `/?prompt=...` with JSON."""
        weights = (
            self.subscriber.weights
        )  # One version, also if the next one is committed meanwhile.
        prompt = parse_qs(urlparse(self.path).query).get("prompt", [""])[0]
        answer = {"version": weights.version, "step": weights.step}
        answer["text"] = complete(weights.arrays, prompt)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Logs nothing."""


def serve(port=8100):
    """Serves, and follows the training."""
    Handler.subscriber = subscriber = psworker.Subscriber(job=JOB)
    weights = subscriber.wait()
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}/?prompt=the+", flush=True)
    while True:
        weights = subscriber.wait(newer_than=weights.version)


def train():
    """Trains the same model, on one worker."""
    import torch

    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
    model.hidden = torch.nn.Linear(CONTEXT * WIDTH, 4 * WIDTH, bias=False)
    model.head = torch.nn.Linear(4 * WIDTH, VOCABULARY, bias=False)
    psworker.init(job=JOB, rank=0, num_workers=1)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = psworker.DistributedOptimizer(adam, named_parameters=model.named_parameters())
    codes = torch.tensor([ord(one) for one in TEXT])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    while True:
        batch = windows[torch.randint(len(windows), (64,))]
        hidden = torch.tanh(model.hidden(model.embed(batch[:, :-1]).flatten(1)))
        loss = torch.nn.functional.cross_entropy(model.head(hidden), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else serve(*map(int, sys.argv[1:]))
