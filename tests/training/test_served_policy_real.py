"""Training with a real vLLM on the CPU: the model is trained here, and its servers sample with its weights.

vLLM has its own environment: ``$AGENTFLY_VLLM_PYTHON``, or ``.venv-vllm``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import agentfly as af
from agentfly.core.errors import PrerequisiteError
from agentfly.core.events import Event, EventStream, WeightsSynced
from agentfly.core.trajectory import load_trajectories
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.resources.model_server.spec import PYTHON_VARIABLE, ModelServerSpec
from agentfly.resources.model_server.vllm_command import probe_vllm
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.trainer import Trainer

PYTHON = os.environ.get(PYTHON_VARIABLE) or str(Path(__file__).parents[2] / ".venv-vllm")
TASKS = [f"Say something about {number}." for number in range(6)]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMPolicy]:
    """One server, which an engine starts as fast as it can: not compiled, in two processes and not three."""
    try:
        probe_vllm(PYTHON)
    except PrerequisiteError as missing:
        pytest.skip(f"There is no vLLM. Make .venv-vllm with: make vllm. ({missing})")
    spec = ModelServerSpec(
        model="tiny",
        python=PYTHON,
        device="cpu",
        dtype="float32",
        kv_cache="64MiB",
        adapters=1,
        adapter_rank=8,
        arguments=("--enforce-eager", "--distributed-executor-backend", "uni"),
        env=(("OMP_NUM_THREADS", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")),
        start_timeout_s=240,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        async with VLLMPolicy(spec) as policy:
            yield policy


@af.reward
def later(context: af.Context) -> float:
    """Later attempts get higher rewards, so that every batch has a learning signal."""
    return context.attempt / 2


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}], ids=["all weights", "adapters"])
async def test_rollouts_after_an_update_use_the_updated_weights(
    servers: VLLMPolicy, tmp_path: Path, settings: dict[str, object]
) -> None:
    handed: list[WeightsSynced] = []

    def note(event: Event) -> None:
        if isinstance(event, WeightsSynced):
            handed.append(event)

    events = EventStream()
    first = servers.version
    config = TrainConfig(
        steps=3,
        tasks_per_step=2,
        attempts=3,
        learning_rate=1e-2,
        dtype="float32",
        threads=1,
        device="cpu",
        **settings,  # type: ignore[arg-type]
    )
    trainer = Trainer(
        af.Agent(model="tiny", max_turns=1, max_tokens_per_turn=8),
        TASKS,
        later,
        run_dir=tmp_path,
        config=config,
        policy=servers,
        events=events,
    )
    with events.subscribed(note):
        result = await trainer.run()

    assert (servers._fleet.weights.adapter is not None) == ("lora" in settings)
    assert servers.in_use  # it was given in use, and is given back so
    assert [event.version for event in handed] == [first, first + 1, first + 2, first + 3]
    assert max(event.logprob_gap for event in handed) < 0.002
    for step in (1, 2, 3):
        # so large a learning rate that log-probs of the weights before would be far off
        assert result.metrics[step]["mismatch/logprob_diff_max"] < 1e-3
    sampled = list(load_trajectories(tmp_path / "trajectories" / "train-000003.jsonl"))
    versions = {version for one in sampled for sequence in one.sequences for version in sequence.versions}
    assert versions == {-1, first + 2}
