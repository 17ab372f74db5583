"""Sampling of answers: the rollout's parameters replace the program's, unless the program's are honoured."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

import agentfly as af
from agentfly.policies.policy import SamplingParams
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.rows import exclusion_cause, rows_from_trajectories
from agentfly.viewing.trajectory_text import trajectory_text

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]

CHANGING = {
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 42,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "typical_p": 0.9,
    "min_tokens": 5,
    "ignore_eos": True,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
}
NEUTRAL: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "seed": None,
}


class Noting(ScriptedPolicy):
    """Remembers how it was to sample."""

    def __init__(self) -> None:
        super().__init__(["It is 3."] * 20)
        self.asked: list[SamplingParams] = []

    async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Any:
        self.asked.append(sampling)
        return await super().generate(prompt_ids, sampling, **more)


async def ask(client: Any, stream: bool = False, **parameters: Any) -> Any:
    """The header that tells what was replaced."""
    answer = await client.chat.completions.with_raw_response.create(
        model="m", messages=ASK, stream=stream, extra_body=parameters
    )
    return answer.headers.get("agentfly-replaced-parameters")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_would_change_the_distribution_is_replaced_and_told(serving_any: Any, stream: bool) -> None:
    async with Noting() as policy, serving_any(policy) as (gateway, client):
        for parameter, value in CHANGING.items():
            assert await ask(client(parameter), stream, **{parameter: value}) == parameter
            trajectory = gateway.finish(parameter, reward=1.0)
            assert exclusion_cause(trajectory) is None
            (note,) = trajectory.notes
            assert note.startswith(f"The program asked for {parameter}={value!r}")
            assert note in trajectory_text(trajectory).plain
    assert len(policy.asked) == len(CHANGING)
    assert {(one.temperature, one.top_p, one.top_k, one.seed) for one in policy.asked} == {(1.0, 1.0, 0, None)}


async def test_what_changes_nothing_is_not_told_of(serving_any: Any) -> None:
    async with Noting() as policy, serving_any(policy) as (gateway, client):
        assert await ask(client(), **NEUTRAL, max_tokens=9, stop=["never"], user="me") is None
        trajectory = gateway.finish("r.0", reward=1.0)
    assert policy.asked[0].max_tokens == 9
    assert trajectory.notes == []


async def test_a_rollouts_own_sampling_takes_the_place_of_the_gateways(serving_any: Any) -> None:
    greedy = af.RolloutSampling(temperature=0)
    async with Noting() as policy, serving_any(policy, sampling=af.RolloutSampling(temperature=0.7)) as (gateway, _):
        for rollout_id, sampling in (("trained", None), ("greedy", greedy)):
            end = gateway.open(rollout_id, sampling=sampling)
            async with AsyncOpenAI(base_url=end.base_url, api_key=end.api_key, max_retries=0) as client:
                await ask(client, temperature=0.2)
        trained, other = (gateway.finish(name, reward=1.0) for name in ("trained", "greedy"))
    assert [one.temperature for one in policy.asked] == [0.7, 0.0]
    assert exclusion_cause(trained) is None
    assert exclusion_cause(other) == "untrainable", "the most likely token has no log-prob to learn from"


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"temperature": 0}, "temperature=0.0"),
        ({"temperature": 0.5}, "temperature=0.5"),
        ({"temperature": 1e-30}, "temperature=1e-30"),
        ({"top_p": 0.5}, "top_p=0.5"),
        ({"top_k": 7}, "top_k=7"),
        ({"seed": 42}, "seed=42"),
        ({"temperature": 1, "top_p": 1, "top_k": -1}, ""),
        ({}, ""),
    ],
)
async def test_a_rollout_that_follows_its_program_is_kept_out_of_training_where_that_changes_the_distribution(
    serving_any: Any, parameters: dict[str, Any], why: str
) -> None:
    async with (
        Noting() as policy,
        serving_any(policy, sampling=af.RolloutSampling(honor_request=True)) as (
            gateway,
            client,
        ),
    ):
        assert await ask(client()) is None
        assert await ask(client(), **parameters) is None
        trajectory = gateway.finish("r.0", reward=1.0)
    used = policy.asked[1]
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, **parameters}
    expected["temperature"] = 0 if expected["temperature"] < 1e-4 else expected["temperature"]
    assert (used.temperature, used.top_p, used.seed) == (expected["temperature"], expected["top_p"], expected["seed"])
    assert used.top_k == max(0, expected["top_k"])
    assert trajectory.untrainable_reason == (f"sampled with {why}" if why else "")
    assert trajectory.reward == 1.0, "it counts in evaluations"
    batch = rows_from_trajectories([trajectory])
    assert (len(batch.rows) == 0, batch.excluded) == (bool(why), {"untrainable": 1} if why else {})


async def test_where_a_program_is_followed_what_cannot_be_done_is_refused(serving_any: Any) -> None:
    following = af.RolloutSampling(honor_request=True)
    async with Noting() as policy, serving_any(policy, sampling=following) as (gateway, client):
        for parameter in CHANGING.keys() - {"temperature", "top_p", "top_k", "seed"}:
            with pytest.raises(BadRequestError) as caught:
                await ask(client(parameter), **{parameter: CHANGING[parameter]})  # type: ignore[arg-type]
            assert caught.value.param == parameter
            trajectory = gateway.finish(parameter, reward=1.0)
            assert trajectory.failure is not None
            assert parameter in trajectory.failure.message, "the program had no answer, and this is why"
    assert policy.asked == []
