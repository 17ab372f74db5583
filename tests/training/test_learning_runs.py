"""Runs that train all weights, adapters, or a critic: their files, and bit-exact resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.contexts.context import Context
from agentfly.core.run_directory import RunDirectory
from agentfly.policies.load import load_policy
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.trainer import Trainer, TrainResult

# One generation at a time: in a batch, whose make-up depends on when each joins, the last bits of logits vary.
EXACT: dict[str, Any] = {"dtype": "float32", "max_concurrent_generations": 1, "threads": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "all weights": {"algorithm": "grpo", "mini_batches": 2, "weight_decay": 0.1, "correction": {}, "warmup_steps": 2},
    "adapters": {
        "algorithm": "grpo",
        "lora": {"rank": 2, "dropout": 0.2},
        "kl": {"coefficient": 0.1, "estimator": "full", "target_nats": 0.01},
    },
    "a critic": {
        "algorithm": "gae",
        "critic": {"learning_rate": 1e-3, "warmup_steps": 1},
        "kl": {"coefficient": 0.1, "where": "reward"},
        "gradient_checkpointing": True,
    },
}


@reward
def later(context: Context) -> float:
    """Later attempts get higher rewards."""
    return context.attempt / 2


async def trained(path: Path, *, resume: bool = False, **settings: Any) -> TrainResult:
    config = TrainConfig(
        **{
            "tasks_per_step": 2,
            "attempts": 2,
            "learning_rate": 3e-3,
            "checkpoint_every_steps": 1,
            **EXACT,
            **settings,
        }
    )
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=6)
    tasks = [f"Say something about {number}." for number in range(6)]
    return await Trainer(agent, tasks, later, run_dir=path, config=config, resume=resume).run()


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_policy(checkpoint, dtype="float32").model.state_dict()


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("policy/", "critic/", "mismatch/"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
async def test_a_run_resumed_from_its_checkpoint_continues_identically(tmp_path: Path, kind: str) -> None:
    whole = await trained(tmp_path / "whole", steps=4, **SETTINGS[kind])
    await trained(tmp_path / "broken", steps=2, **SETTINGS[kind])
    broken = await trained(tmp_path / "broken", steps=4, resume=True, **SETTINGS[kind])
    assert sum(metrics["policy/updates"] for metrics in whole.metrics.values()) >= 3
    for step in (3, 4):
        assert untimed(broken.metrics[step]) == untimed(whole.metrics[step])
    ended, expected = weights_in(broken.checkpoint), weights_in(whole.checkpoint)
    assert all(torch.equal(ended[name], weight) for name, weight in expected.items())
    untrained = load_policy("tiny", dtype="float32").model.state_dict()
    assert any(not torch.equal(untrained[name], weight) for name, weight in expected.items())


async def test_a_checkpoint_of_adapters_can_be_rolled_out_by_its_directory(tmp_path: Path) -> None:
    result = await trained(tmp_path, steps=1, **SETTINGS["adapters"])
    assert not list(result.checkpoint.glob("*.safetensors"))
    agent = Agent(model=str(result.checkpoint), max_turns=1, max_tokens_per_turn=4)
    config = TrainConfig(steps=1, tasks_per_step=1, attempts=2, **EXACT)
    again = await Trainer(agent, ["Say something."], later, run_dir=tmp_path / "on", config=config).run()
    assert again.metrics[1]["rows"] == 2
    assert again.metrics[1]["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.slow
async def test_a_run_with_a_damaged_last_checkpoint_resumes_from_the_previous_one(tmp_path: Path) -> None:
    settings = SETTINGS["adapters"] | {"checkpoint_every_steps": 1}
    whole = await trained(tmp_path / "whole", steps=3, **settings)
    await trained(tmp_path / "broken", steps=2, **settings)
    place = tmp_path / "broken" / "checkpoints" / "step-000002" / "trainer" / "state.json"
    place.write_text("")
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('5\n{"kind": "train"}\n')
    broken = await trained(tmp_path / "broken", steps=3, resume=True, **settings)
    assert list(broken.metrics) == [2, 3]
    assert untimed(broken.metrics[3]) == untimed(whole.metrics[3])
    assert RunDirectory(tmp_path / "broken").metrics() == []
