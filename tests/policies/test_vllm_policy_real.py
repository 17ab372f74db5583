"""A policy over a real vLLM, on the processor: its tokens and weights against transformers on the same weights.

vLLM has an environment of its own. It is looked for where ``$AGENTFLY_VLLM_PYTHON`` says, and in ``.venv-vllm``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import agentfly as af
from agentfly.core.errors import PrerequisiteError, WeightMismatch, WeightUpdateError
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.policies.vllm.weight_sync import logprobs_of_model
from agentfly.resources.model_server.server import ModelServer
from agentfly.resources.model_server.spec import PYTHON_VARIABLE, ModelServerSpec
from agentfly.resources.model_server.vllm_command import probe_vllm

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get(PYTHON_VARIABLE) or str(ROOT / ".venv-vllm")
TINY = str(ROOT / "src/agentfly/policies/models/tiny")
PROMPT = [17, 250, 33, 4, 99, 130, 7, 301]
CLOSE = 0.001

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    try:
        probe_vllm(PYTHON)
    except PrerequisiteError as missing:
        pytest.skip(f"There is no vLLM. Make .venv-vllm with: make vllm. ({missing})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(state: None) -> AsyncIterator[VLLMPolicy]:
    """A policy whose one server an engine starts, as fast as it can: not compiled, in two processes and not three."""
    spec = ModelServerSpec(
        model="tiny",
        python=PYTHON,
        device="cpu",
        dtype="float32",
        kv_cache="64MiB",
        adapters=1,
        adapter_rank=4,
        arguments=("--enforce-eager", "--distributed-executor-backend", "uni"),
        env=(("OMP_NUM_THREADS", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")),
        start_timeout_s=240,
    )
    async with VLLMPolicy(spec, in_flight="keep") as policy:
        yield policy


@pytest.fixture
def own() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture
def other(own: PreTrainedModel) -> PreTrainedModel:
    """Other weights for the same model, whose embedding is its output layer too."""
    assert own.config.tie_word_embeddings
    changed = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for weights in changed.parameters():
        weights.data += 0.02 * torch.randn(weights.shape, generator=generator)
    return changed


def server_of(policy: VLLMPolicy) -> ModelServer:
    (member,) = policy._require_entered().members
    assert isinstance(member.server, ModelServer)
    return member.server


def expected(
    model: Any, generation: Generation, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 10**6
) -> list[float]:
    """Log-probs by transformers, under the distribution that was sampled from."""
    ids = [*PROMPT, *generation.ids]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].float() / temperature
    ordered, order = logits.softmax(-1).sort(descending=True)
    cut = (ordered.cumsum(-1) - ordered >= top_p) | (torch.arange(ordered.shape[-1]) >= top_k)
    logits = logits.scatter(1, order, ordered.log().masked_fill(cut, -torch.inf))
    return logits.log_softmax(-1).gather(1, torch.tensor(list(generation.ids))[:, None])[:, 0].tolist()


async def running(server: ModelServer) -> float:
    root, headers = server.base_url.removesuffix("/v1"), {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=root, headers=headers) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))]
    return sum(float(line.split()[-1]) for line in counted)


@pytest.fixture
def address(policy: VLLMPolicy, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Where another policy finds the same server."""
    monkeypatch.setenv("SERVER_KEY", server_of(policy).api_key)
    return {"urls": [server_of(policy).base_url], "model": TINY, "api_key_env": "SERVER_KEY"}


async def test_log_probs_are_those_of_the_sampling_distribution_with_the_raw_ones_beside(
    address: dict[str, Any], own: PreTrainedModel
) -> None:
    async with VLLMPolicy(**address, raw_logprobs=True) as policy:
        for how in ({}, {"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.7}, {"top_k": 3}, {"temperature": 0}):
            generation = await policy.generate(PROMPT, SamplingParams(max_tokens=32, seed=3, **how), rollout_id="r")
            assert generation.finish_reason == "length"
            assert generation.version == 0
            under: dict[str, Any] = {**how, "temperature": how.get("temperature") or 1.0}
            assert generation.logprobs == pytest.approx(expected(own, generation, **under), abs=CLOSE)
            assert generation.raw_logprobs == pytest.approx(expected(own, generation), abs=CLOSE)


async def test_an_update_waits_for_running_generations_and_another_policy_at_the_server_finds_it_out(
    policy: VLLMPolicy, address: dict[str, Any], own: PreTrainedModel, other: PreTrainedModel, tmp_path: Path
) -> None:
    other.save_pretrained(tmp_path)
    async with VLLMPolicy(**address) as another:
        draining = asyncio.create_task(another.generate(PROMPT, SamplingParams(max_tokens=300), rollout_id="r"))
        await asyncio.sleep(0.05)
        await another.update_weights(tmp_path, reference=logprobs_of_model(other))
        drained = await draining
        assert drained.version == 0
        assert len(drained.ids) == 300
        assert drained.logprobs == pytest.approx(expected(own, drained), abs=CLOSE)
        theirs = await another.generate(PROMPT, SamplingParams(max_tokens=16), rollout_id="r")
        assert theirs.logprobs == pytest.approx(expected(other, theirs), abs=CLOSE)
        ours = await policy.generate(PROMPT, SamplingParams(max_tokens=16), rollout_id="r")
        assert ours.version == 0
        assert ours.logprobs == pytest.approx(expected(own, ours), abs=CLOSE)


async def test_rollouts_with_tools_are_exact_to_the_token(policy: VLLMPolicy, own: PreTrainedModel) -> None:
    """The log-probs of every sampled token of a whole conversation, by transformers on the sequence as it stands."""

    @af.tool
    def stock(item: str) -> str:
        """How much there is of something.

        Args:
            item: what.
        """
        return f"{item}: half"

    agent = af.Agent(model="tiny", tools=[stock], max_turns=4, max_tokens_per_turn=40)
    loads = policy.loads
    result = await af.run(agent, [f"What to do about {item}?" for item in ("eggs", "tea")], attempts=2, policy=policy)
    sequences = [sequence for trajectory in result.trajectories for sequence in trajectory.sequences]
    assert len(sequences) == 4
    assert policy.loads == loads, "the rollouts that ended are forgotten"
    for sequence in sequences:
        ids, mask = list(sequence.ids), list(sequence.loss_mask)
        with torch.inference_mode():
            scores = own(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        for place in [place for place, sampled in enumerate(mask) if sampled]:
            assert sequence.logprobs[place] == pytest.approx(scores[place - 1, ids[place]].item(), abs=CLOSE)


async def test_cancelled_generations_leave_the_server_with_nothing_to_do(policy: VLLMPolicy) -> None:
    sampling = SamplingParams(max_tokens=1000)
    tasks = [asyncio.create_task(policy.generate(PROMPT, sampling, rollout_id=f"r{n}")) for n in range(50)]
    async with asyncio.timeout(60):
        while await running(server_of(policy)) < 50:
            assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(60):
        while await running(server_of(policy)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert all(task.cancelled() for task in await asyncio.sleep(0, tasks))


async def test_weights_put_in_place_under_a_running_generation_are_those_that_sample_from_then_on(
    policy: VLLMPolicy, own: PreTrainedModel, other: PreTrainedModel
) -> None:
    generations: list[Generation] = []
    ended = asyncio.Event()

    async def keep_sampling(rollout_id: str) -> None:
        while not ended.is_set():
            generations.append(await policy.generate(PROMPT, SamplingParams(max_tokens=300), rollout_id=rollout_id))

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(keep_sampling(f"r{number}"))
        made = await policy.update_weights(other.state_dict().items())
        ended.set()
    assert made.logprob_gap < CLOSE
    assert made.previous_logprob_gap > 0.1
    under_way = [generation for generation in generations if isinstance(generation.version, tuple)]
    assert under_way
    for generation in under_way:
        assert sorted(set(generation.version)) == [0, 1]  # type: ignore[arg-type]
        turned = generation.version.index(1)  # type: ignore[union-attr]
        assert generation.logprobs[:turned] == pytest.approx(expected(own, generation)[:turned], abs=CLOSE)
        assert generation.logprobs[turned:] == pytest.approx(expected(other, generation)[turned:], abs=CLOSE)
    after = await policy.generate(PROMPT, SamplingParams(max_tokens=32, temperature=0.5), rollout_id="r0")
    assert after.version == 1
    assert after.logprobs == pytest.approx(expected(other, after, temperature=0.5), abs=CLOSE)


async def test_an_adapter_is_reloaded_in_place_and_proved(
    policy: VLLMPolicy, other: PreTrainedModel, tmp_path: Path
) -> None:
    adapted: Any = get_peft_model(other, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    distances = []
    for step in range(2):
        for name, weights in adapted.named_parameters():
            if "lora_B" in name:
                weights.data += 0.2 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(step))
        adapted.save_pretrained(tmp_path / str(step))
        made = await policy.update_adapter(tmp_path / str(step))
        distances.append(made.previous_logprob_gap)
        generation = await policy.generate(PROMPT, SamplingParams(max_tokens=32), rollout_id="r")
        assert generation.version == policy.version == 2 + step
        assert generation.logprobs == pytest.approx(expected(adapted, generation), abs=CLOSE)
    assert min(distances) > 10 * CLOSE, "each adapter is another model"


async def test_vllms_own_reload_of_a_tied_model_is_found_out(
    policy: VLLMPolicy, address: dict[str, Any], other: PreTrainedModel, tmp_path: Path
) -> None:
    """On the processor it keeps the old output layer and says that all is well."""
    for weights in other.parameters():
        weights.data += 0.02 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    other.save_pretrained(tmp_path)
    with pytest.raises(PrerequisiteError, match="Restart the server"):
        async with VLLMPolicy(**address, load_method="reload_weights"):
            pass
    await server_of(policy).set_weight_version("default")  # as if it had just been started
    async with VLLMPolicy(**address, load_method="reload_weights") as careless:
        with pytest.raises(WeightMismatch, match="reload_weights"):
            await careless.update_weights(tmp_path, reference=logprobs_of_model(other))
        with pytest.raises(WeightUpdateError):
            await careless.generate(PROMPT, SamplingParams(max_tokens=1), rollout_id="r")
    async with VLLMPolicy(**address) as careful:
        made = await careful.update_weights(tmp_path, reference=logprobs_of_model(other))
        assert made.logprob_gap < CLOSE
