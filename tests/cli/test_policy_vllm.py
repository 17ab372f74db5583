"""``policy: vllm`` in a configuration serves the agent's model with vLLM; with a fake server."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentfly as af
from agentfly.cli.config_file import RunConfig, VLLMConfig
from agentfly.cli.experiment import Experiment
from agentfly.core.errors import ConfigError
from agentfly.core.events import EventStream
from tests.support.fake_vllm_server import FakeVLLMServer


def experiment(directory: Path, **settings) -> Experiment:
    (directory / "vllm_agent.py").write_text("import agentfly as af\nagent = af.Agent(model='tiny')\n")
    (directory / "tasks.jsonl").write_text('{"prompt": "hello"}\n')
    policy = VLLMConfig(**settings)
    return Experiment.load(
        RunConfig(agent="vllm_agent.py:agent", tasks="tasks.jsonl", policy=policy, directory=str(directory))
    )


async def test_rollouts_are_sampled_by_the_servers_that_it_names(tmp_path):
    async with FakeVLLMServer() as server:
        configured = experiment(tmp_path, urls=(server.url,))
        async with configured.runner_settings(EventStream()) as settings:
            assert isinstance(settings["policy"], af.VLLMPolicy)
            result = await af.run(configured.agent, configured.tasks, **settings)
        assert configured.model_name == "tiny"
        assert len(server.generated) == 2, "one to try the server, and one turn"
        assert result.trajectories[0].failure is None


async def test_a_mistake_in_the_server_fields_is_reported_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="ModelServerSpec has no field 'zzz'"):
        async with experiment(tmp_path, server={"zzz": 1}).runner_settings(EventStream()):
            pass
