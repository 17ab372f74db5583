"""Arguments of run, evaluate, Runner and Agent: unknown names, and policies that are not open."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

import agentfly as af
from agentfly.core.errors import UsageError

AGENT = af.Agent(model="scripted")


@pytest.mark.parametrize("call", [af.run, af.evaluate])
@pytest.mark.parametrize(
    ("name", "near"), [("atempts", "attempts"), ("max_concurent_rollouts", "max_concurrent_rollouts")]
)
async def test_a_misspelled_argument_of_a_run_names_the_nearest(call, name, near):
    with pytest.raises(UsageError, match=rf"{call.__name__} has no argument '{name}'\. Did you mean '{near}'\?"):
        await call(AGENT, ["hello"], policy=af.ScriptedPolicy(["hi"]), **{name: 2})


def test_a_misspelled_field_of_an_agent_names_the_nearest():
    with pytest.raises(UsageError, match=r"Agent has no argument 'max_turn'\. Did you mean 'max_turns'\?"):
        af.Agent(model="tiny", max_turn=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"Agent needs a model\. Write Agent\(model='tiny'"):
        af.Agent(max_turns=3)  # type: ignore[call-arg]


def test_an_agent_is_copied_replaced_and_pickled():
    for one in (copy.deepcopy(AGENT), pickle.loads(pickle.dumps(AGENT)), replace(AGENT, max_turns=10)):
        assert one == AGENT


class Opened(af.ScriptedPolicy):
    """A policy that must be entered, as those of models are, and that counts how often it was."""

    in_use = False
    entered = left = 0

    async def generate(self, *values, **named):
        assert self.in_use
        return await super().generate(*values, **named)

    async def __aenter__(self):
        assert not self.in_use
        self.in_use = True
        self.entered += 1
        return await super().__aenter__()

    async def __aexit__(self, *raised):
        self.in_use = False
        self.left += 1
        await super().__aexit__(*raised)


async def test_a_policy_that_is_not_in_use_is_entered_and_left():
    policy = Opened(["hi"])
    for times in (1, 2):
        result = await af.run(AGENT, ["hello"], policy=policy, subagent_policies={"other": policy})
        assert [trajectory.finish_reason for trajectory in result.trajectories] == ["answered"]
        assert (policy.entered, policy.left) == (times, times)


async def test_a_policy_that_is_in_use_stays_so():
    async with Opened(["hi"]) as policy:
        await af.run(AGENT, ["hello"], policy=policy)
        assert (policy.entered, policy.left) == (1, 0)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("openai/gpt-5-mini", r"a policy is an object, not a name.*OpenAIPolicy"),
        (af.ScriptedPolicy, r"ScriptedPolicy is a class"),
        (af.OpenAIPolicy, r"OpenAIPolicy is a class"),
        (object(), r"policy is an object, not a policy"),
    ],
)
async def test_what_is_no_policy_is_refused_before_anything_runs(policy, told):
    with pytest.raises(UsageError, match=told):
        await af.run(AGENT, ["hello"], policy=policy)
    with pytest.raises(UsageError, match=told):
        await af.run(AGENT, ["hello"], policy=af.ScriptedPolicy(["hi"]), subagent_policies={"other": policy})
