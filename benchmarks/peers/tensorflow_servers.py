"""TensorFlow's parameter servers, between-graph replication: synchronous and asynchronous.

Runs in TensorFlow's environment. `tf.distribute.Server` processes hold variables and momentum;
`SyncReplicasOptimizer` collects a gradient of each worker, and without it each is applied as it
comes. `ParameterServerStrategy` builds on the same servers, and is asynchronous only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import measured

LR, MOMENTUM = 0.1, 0.9


def serve(cluster: Mapping[str, Sequence[str]], index: int) -> None:
    """Runs a server until it is killed."""
    import tensorflow as tf

    tf.distribute.Server(dict(cluster), job_name="ps", task_index=index).join()


def work(
    cluster: Mapping[str, Sequence[str]],
    index: int,
    parts: Sequence[Sequence[Sequence[int]]],
    is_sync: bool,
    rounds: int,
) -> None:
    """Runs a worker; `parts` are the shapes of each server's tensors."""
    import tensorflow as tf

    v1: Any = tf.compat.v1
    v1.disable_eager_execution()
    num = len(cluster["worker"])
    threads = v1.ConfigProto(intra_op_parallelism_threads=1)
    here = f"/job:worker/task:{index}"
    server = tf.distribute.Server(
        dict(cluster), job_name="worker", task_index=index, config=threads
    )
    with tf.device("/job:ps/task:0"):
        step = v1.train.get_or_create_global_step()
    pairs, copies = [], []
    local = [v1.GraphKeys.LOCAL_VARIABLES]
    for task, shapes in enumerate(parts):
        for number, shape in enumerate(shapes):
            with tf.device(f"/job:ps/task:{task}"):
                weights = v1.get_variable(f"w{task}_{number}", initializer=tf.zeros(shape))
            with tf.device(here):
                name = f"{task}_{number}_{index}"
                grad = v1.get_variable(f"g{name}", initializer=tf.ones(shape), collections=local)
                copy = v1.get_variable(f"c{name}", initializer=tf.zeros(shape), collections=local)
                copies.append(copy.assign(weights).op)
            pairs.append((grad.read_value(), weights))
    optimizer = v1.train.MomentumOptimizer(LR, MOMENTUM)
    hooks = []
    if is_sync:
        optimizer = v1.train.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=num, total_num_replicas=num
        )
        hooks.append(optimizer.make_session_run_hook(index == 0, num_tokens=0))
    train = optimizer.apply_gradients(pairs, global_step=step)
    pull = tf.group(*copies)
    with v1.train.MonitoredTrainingSession(
        server.target,
        is_chief=index == 0,
        hooks=hooks,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
    ) as session:

        def one_round() -> None:
            session.run(train)
            session.run(pull)

        measured.report(measured.timed(one_round, rounds))


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"serve": serve, "work": work})
