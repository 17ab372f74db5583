"""Model servers with a real vLLM, on the processor, against transformers on the same weights.

vLLM has an environment of its own. It is looked for where ``$AGENTFLY_VLLM_PYTHON`` says, and in ``.venv-vllm``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentfly.core.errors import APIRefused, PrerequisiteError, ResourceDied, ResourceStartError
from agentfly.resources.model_server.server import ModelServer
from agentfly.resources.model_server.spec import PYTHON_VARIABLE, ModelServerSpec
from agentfly.resources.model_server.token_server import WeightVersionSpan
from agentfly.resources.model_server.vllm_command import probe_vllm
from agentfly.resources.process.supervised import processes_of_directory
from agentfly.resources.resource import Status

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get(PYTHON_VARIABLE) or str(ROOT / ".venv-vllm")
TINY = str(ROOT / "src/agentfly/policies/models/tiny")
PROMPT = [17, 250, 33, 4, 99, 130, 7, 301]
CLOSE = 0.02

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


def vllm_spec(**fields: Any) -> ModelServerSpec:
    """A server that starts as fast as one can: not compiled, in two processes and not three."""
    return ModelServerSpec(
        **{
            "model": TINY,
            "python": PYTHON,
            "device": "cpu",
            "dtype": "float32",
            "kv_cache": "64MiB",
            "arguments": ("--enforce-eager", "--distributed-executor-backend", "uni"),
            "env": (("OMP_NUM_THREADS", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")),
            "start_timeout_s": 300,
            "release_timeout_s": 20,
            **fields,
        }
    )


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A state directory of the module's own; it gives what was in shared memory before there was any server."""
    try:
        probe_vllm(PYTHON)
    except PrerequisiteError as missing:
        pytest.skip(f"There is no vLLM. Make .venv-vllm with: make vllm. ({missing})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield shared_memory_files()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(state: set[str]) -> AsyncIterator[ModelServer]:
    server = ModelServer(vllm_spec(adapters=2, adapter_rank=4), "vllm-on-cpu")
    try:
        await server.start()
        yield server
    finally:
        await server.release()


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> tuple[str, Any]:
    """A LoRA adapter in the format of peft, and the reference with it merged in."""
    directory, generator = tmp_path_factory.mktemp("adapter"), torch.Generator().manual_seed(3)
    merged = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    weights = {}
    for number, layer in enumerate(merged.model.layers):
        for name in ("q_proj", "v_proj"):
            into, out = torch.randn(4, 128, generator=generator), torch.randn(128, 4, generator=generator)
            prefix = f"base_model.model.model.layers.{number}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"], weights[f"{prefix}.lora_B.weight"] = into * 0.1, out * 0.1
            getattr(layer.self_attn, name).weight.data += 2.0 * 0.01 * out @ into
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": TINY}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory), merged


def logprobs_of(model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a continuation by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def engine_of(server: ModelServer) -> psutil.Process:
    below = psutil.Process(server.traces["pid"]).children(recursive=True)
    return next(process for process in below if "EngineCore" in " ".join(process.cmdline()))


def shared_memory_files() -> set[str]:
    """What Python's multiprocessing has in shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "sem.mp-"))}


async def test_it_answers_chats_and_prompts_of_text(server: ModelServer) -> None:
    chat = await server.chat([{"role": "user", "content": "How are the eggs?"}], max_tokens=8, temperature=0)
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 8
    assert chat.finish_reason in ("stop", "length")
    completion = await server.complete("What to do about eggs?", max_tokens=4)
    assert completion.model == "tiny"
    assert await server.status() is Status.HEALTHY


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_ids_come_back_with_the_log_probs_they_were_sampled_under(
    server: ModelServer, reference: Any, temperature: float
) -> None:
    samples = await asyncio.gather(
        *(server.sample(PROMPT, max_tokens=24, temperature=temperature, seed=seed) for seed in range(4))
    )
    assert len({sample.ids for sample in samples}) > 1
    for sample in samples:
        assert len(sample.ids) == 24
        assert sample.finish_reason == "length"
        expected = logprobs_of(reference, PROMPT, sample.ids, temperature)
        assert sample.logprobs == pytest.approx(expected, abs=CLOSE)


async def test_the_most_likely_ids_are_those_of_transformers(server: ModelServer, reference: Any) -> None:
    sample = await server.sample(PROMPT, max_tokens=12, temperature=0)
    ids = torch.tensor([PROMPT])
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert list(sample.ids) == ids[0, len(PROMPT) :].tolist()


async def test_only_stop_ids_end_a_sample_and_the_one_that_did_is_in_it(server: ModelServer) -> None:
    plain = await server.sample(PROMPT, max_tokens=64, seed=5)
    stop = plain.ids[9]
    stopped = await server.sample(PROMPT, max_tokens=64, seed=5, stop_ids=[stop])
    first = plain.ids.index(stop)
    assert stopped.ids == plain.ids[: first + 1]
    assert stopped.finish_reason == "stop"


async def test_a_prompt_that_is_too_long_is_refused(server: ModelServer) -> None:
    with pytest.raises(APIRefused, match="1024"):
        await server.sample([5] * 2000, max_tokens=1)


async def test_every_path_needs_the_key(server: ModelServer) -> None:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root) as stranger:
        for path in ("/v1/models", "/health", "/metrics", "/server_info", "/openapi.json"):
            assert (await stranger.get(path)).status_code == 401
        for path in ("/v1/completions", "/collective_rpc", "/abort_requests", "/invocations"):
            assert (await stranger.post(path, json={})).status_code == 401


async def test_a_cancelled_sample_is_given_up_by_the_server_too(server: ModelServer) -> None:
    root, headers = server.base_url.removesuffix("/v1"), {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=root, headers=headers) as client:

        async def running() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

        tasks = [asyncio.create_task(server.sample(PROMPT, max_tokens=1000, seed=seed)) for seed in range(8)]
        async with asyncio.timeout(60):
            while await running() < 8:
                assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(60):
            while await running() > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert all(task.cancelled() for task in tasks)


async def test_an_adapter_is_sampled_from_until_a_reset(
    server: ModelServer, reference: Any, adapter: tuple[str, Any]
) -> None:
    path, merged = adapter
    await server.load_adapter("mine", path)
    sample = await server.sample(PROMPT, max_tokens=24, seed=1, adapter="mine")
    with_it, without = logprobs_of(merged, PROMPT, sample.ids), logprobs_of(reference, PROMPT, sample.ids)
    assert sample.logprobs == pytest.approx(with_it, abs=CLOSE)
    assert sample.logprobs != pytest.approx(without, abs=CLOSE)
    await server.reset()
    with pytest.raises(APIRefused, match="mine"):
        await server.sample(PROMPT, max_tokens=1, adapter="mine")
    assert await server.status() is Status.HEALTHY


async def test_when_the_engine_is_killed_the_server_is_there_again_with_its_weights_and_adapters(
    server: ModelServer, reference: Any, adapter: tuple[str, Any], tmp_path: Path
) -> None:
    path, merged = adapter
    reference.save_pretrained(tmp_path)
    await server.load_adapter("mine", path)
    await server.load_weights(tmp_path)
    await server.set_weight_version("mine")
    address = server.base_url
    asking = asyncio.create_task(server.sample(PROMPT, max_tokens=300, adapter="mine"))
    await asyncio.sleep(0.1)
    assert not asking.done()
    engine_of(server).send_signal(signal.SIGKILL)
    sample = await asking
    assert len(sample.ids) == 300
    assert sample.weight_versions == (WeightVersionSpan("mine", 0, 300),)
    assert sample.logprobs[:24] == pytest.approx(logprobs_of(merged, PROMPT, sample.ids[:24]), abs=CLOSE)
    assert server.base_url == address
    assert await server.status() is Status.HEALTHY


async def test_a_model_that_is_not_there_is_told_by_the_end_of_the_log(tmp_path: Path) -> None:
    broken = ModelServer(vllm_spec(model=str(tmp_path / "no-model")), "no-model")
    with pytest.raises(ResourceStartError, match=r"exited with status 1(.|\n)*no-model"):
        await broken.start()
    await broken.release()


async def test_a_start_that_is_cancelled_beside_another_server_leaves_nothing(server: ModelServer) -> None:
    before = shared_memory_files()
    other = ModelServer(vllm_spec(), "cancelled")
    starting = asyncio.create_task(other.start())
    directory = Path(other.traces["directory"])
    async with asyncio.timeout(120):
        while not any(  # noqa: ASYNC110
            "EngineCore" in " ".join(psutil.Process(pid).cmdline()) for pid in processes_of_directory(directory)
        ):
            await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await other.release()
    assert not processes_of_directory(directory)
    assert shared_memory_files() <= before
    assert await server.status() is Status.HEALTHY


async def test_two_servers_at_once_and_nothing_of_them_once_they_are_released(
    server: ModelServer, state: set[str]
) -> None:
    other = ModelServer(vllm_spec(), "other")
    await other.start()
    assert other.base_url != server.base_url
    samples = await asyncio.gather(*(one.sample(PROMPT, max_tokens=8, temperature=0) for one in (server, other)))
    assert samples[0].ids == samples[1].ids
    for one in (server, other):
        pids = processes_of_directory(Path(one.traces["directory"]))
        assert len(pids) >= 3
        await one.release()
        assert not any(map(psutil.pid_exists, pids))
        assert await one.status() is Status.BROKEN
        with pytest.raises(ResourceDied, match="released"):
            await one.complete("anybody?")
    assert shared_memory_files() <= state
