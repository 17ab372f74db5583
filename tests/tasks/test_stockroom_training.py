"""The demo: after training with its configuration, the agent is better at held-out tasks."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from statistics import mean

import pytest

from agentfly.cli.config_file import load_config
from agentfly.cli.experiment import Experiment
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.training.trainer import Trainer, TrainResult


async def train(configuration: str, run_dir: Path, *overrides: str) -> TrainResult:
    with as_file(files("agentfly.tasks.stockroom").joinpath(configuration)) as path:
        config = load_config(path, overrides)
    experiment = Experiment.load(config)
    trainer = Trainer(
        experiment.agent,
        experiment.tasks,
        experiment.reward,
        run_dir=run_dir,
        eval_tasks=experiment.eval_tasks,
        config=config.training,
    )
    return await trainer.run()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
async def test_tiny_learns_to_keep_the_stockroom(tmp_path):
    result = await train("tiny.yaml", tmp_path, "training.seed=1")
    rewards = [result.metrics[step]["reward/mean"] for step in sorted(result.metrics)]
    tenth = len(rewards) // 10
    assert mean(rewards[-tenth:]) >= mean(rewards[:tenth]) + 0.3
    before, after = result.evaluations[0], result.evaluations[result.steps]
    assert 0.05 <= before["success/mean"] <= 0.35
    assert after["success/mean"] >= 2 * before["success/mean"]
    worst = max(metrics["mismatch/logprob_diff_max"] for metrics in result.metrics.values())
    assert worst < 1e-3  # the log-probs that are trained are those under which the tokens were sampled
