"""`policy: vllm` in a configuration serves the agent's model with vLLM; against a stand-in for the server."""

from __future__ import annotations

import pytest

import agentfly as af
from agentfly.agents.reward import tool_rewards
from agentfly.cli.config_file import RunConfig, VLLMConfig
from agentfly.cli.experiment import Experiment
from agentfly.errors import ConfigError
from agentfly.events import EventStream
from agentfly.testing.vllm_stand_in import StandInVLLM


def experiment(**settings) -> Experiment:
    config = RunConfig(agent="a.py:agent", tasks="t.jsonl", policy=VLLMConfig(**settings))
    return Experiment(config, af.Agent(model="tiny"), [], None, tool_rewards)


async def test_rollouts_are_sampled_by_the_servers_that_it_names():
    async with StandInVLLM() as server:
        configured = experiment(urls=(server.url,))
        async with configured.runner_settings(EventStream()) as settings:
            assert isinstance(settings["policy"], af.VLLMPolicy)
            result = await af.run(configured.agent, ["hello"], **settings)
        assert configured.model_name == "tiny"
        assert len(server.generated) == 2, "one to try the server, and one turn"
        assert result.trajectories[0].failure is None


async def test_a_slip_in_the_servers_fields_is_told_before_anything_starts():
    with pytest.raises(ConfigError, match="ModelServerSpec has no field 'zzz'"):
        async with experiment(server={"zzz": 1}).runner_settings(EventStream()):
            pass
