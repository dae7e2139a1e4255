"""vLLM answers with published weights after an update; runs where vLLM is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, Worker, new_job

vllm = pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
PROMPT, LENGTH = [1, 5, 9, 2], 12
WAIT_S = 60.0


def make_llama(seed: int) -> Any:
    """Returns a small Llama in bfloat16 whose most likely tokens are far from the others."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # Heads of 64: vLLM on a CPU has none of 16.
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def answer_of(model: Any) -> list[int]:
    """Returns the tokens that transformers adds to the prompt, in float32."""
    found = model.float().generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in found[0, len(PROMPT) :]]


def publishes_models(station: Station) -> None:
    """Publishes a model by its seed, each time that the test says one."""
    psworker.init()
    model = make_llama(station.hear())
    publisher = psworker.Publisher(model.named_parameters())
    station.tell()
    while (seed := station.hear()) is not None:
        model.load_state_dict(make_llama(seed).state_dict())
        publisher.publish(seed)
        station.tell()


def test_an_update_changes_the_answers_to_those_of_the_published_model(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    job, folder = new_job(), tmp_path / "model"
    make_llama(0).save_pretrained(folder)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_SERVERS": ",".join(shards.addresses)}
    worker = Worker(publishes_models, 0, (), launched | {"PACELINE_JOB": job})
    worker.tell(1)
    worker.hear()
    llm = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="float32",  # In bfloat16 it and transformers differ after some tokens.
        gpu_memory_utilization=0.2,  # Of the memory of this machine, on a CPU.
        weight_transfer_config=vllm.config.WeightTransferConfig(backend="paceline"),
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    sampling.detokenize = False

    def answer() -> list[int]:
        (found,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
        return list(found.outputs[0].token_ids)

    def update(**info: Any) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": info})
        llm.finish_weight_update(weight_version=str(info))

    assert answer() == answer_of(make_llama(0))
    llm.init_weight_transfer_engine(
        {"init_info": {"servers": ",".join(shards.addresses), "job": job}}
    )
    update()
    assert answer() == answer_of(make_llama(1))
    with psworker.Subscriber(shards.addresses, job=job, dtype="bf16") as subscriber:
        weights = subscriber.wait(timeout_s=WAIT_S)
        for seed in (2, 3):
            worker.tell(seed)
            worker.hear()
            weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
            update(number=weights.version.number, lineage=weights.version.lineage)
            assert answer() == answer_of(make_llama(seed))
            engine = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
            assert engine.loaded.version == weights.version
            np.testing.assert_array_equal(engine.loaded.bits, weights.bits)
    llm.shutdown_weight_transfer_engine()
    worker.tell(None)
    worker.result()
    worker.close()
