"""Judges that rank responses: the ranking becomes scores, and an invalid one becomes none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.core.errors import APIMalformed
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.model_api.model_api import ModelAPI, ModelAPISpec
from agentfly.testing.fake_openai_server import FakeOpenAIServer, text_reply


@pytest.fixture
async def far_side() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer() as far_side:
        yield far_side


@pytest.fixture
async def judge(far_side: FakeOpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelAPI]:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    async with ResourceEngine() as engine:
        lease = await engine.acquire(ModelAPISpec(base_url=far_side.url, model="m"), "me", scope="global")
        yield lease.resource


@pytest.mark.parametrize(
    "said",
    [
        '{"ranking": [3, 1, 2]}',
        'Number {1} is fine. {"reason": "c is best", "ranking": ["3", "1", "2"]}',
        '<think>{"ranking": [1, 2, 3]}</think>{"ranking": [3, 1, 2]}',
        "```json\n{'reason': 'clear', 'ranking': [3, 1, 2],}\n```",
    ],
)
async def test_an_order_becomes_scores_from_one_to_zero(said: str, judge: ModelAPI, far_side: FakeOpenAIServer) -> None:
    far_side.default_reply = text_reply(said)
    assert await judge.rank(["a", "b", "c"], 42, question="6*7?", criterion="{brevity}") == [0.5, 0.0, 1.0]
    told, asked = far_side.requests[0].body["messages"]
    assert "{brevity}" in told["content"]
    assert json.loads(asked["content"]) == {
        "question": "6*7?",
        "answer": 42,
        "responses": {"1": "a", "2": "b", "3": "c"},
    }


async def test_responses_with_the_same_text_are_ranked_once_and_share_their_places(
    judge: ModelAPI, far_side: FakeOpenAIServer
) -> None:
    far_side.default_reply = text_reply('{"ranking": [2, 1]}')
    assert await judge.rank(["a", "b", "a", "a", "b"]) == [0.25, 0.875, 0.25, 0.25, 0.875]


@pytest.mark.parametrize(("responses", "scores"), [([], []), (["a"], [0.5]), (["a", "a", "a"], [0.5] * 3)])
async def test_where_there_is_nothing_to_rank_nobody_is_asked(
    responses: list[str], scores: list[float], judge: ModelAPI, far_side: FakeOpenAIServer
) -> None:
    assert await judge.rank(responses) == scores
    assert far_side.requests == []


@pytest.mark.parametrize(
    "said",
    [
        "The second is better.",
        '{"ranking": [1]}',
        '{"ranking": [1, 1]}',
        '{"ranking": [1, 2, 3]}',
        '{"ranking": [0, 1]}',
        '{"ranking": [true, 2]}',
        '{"ranking": [1.0, 2.0]}',
        '{"ranking": "1, 2"}',
        '{"ranking": {"1": 1, "2": 2}}',
        '{"ranking": null}',
        '{"score": 1}',
    ],
)
async def test_what_is_no_order_of_all_of_them_is_asked_for_again_and_then_given_up(
    said: str, judge: ModelAPI, far_side: FakeOpenAIServer
) -> None:
    far_side.script += [text_reply(said), text_reply('{"ranking": [1, 2]}')]
    assert await judge.rank(["a", "b"]) == [1.0, 0.0]
    again = far_side.requests[1].body["messages"]
    assert again[2] == {"role": "assistant", "content": said}
    assert "from 1 to 2" in again[3]["content"]

    far_side.default_reply = text_reply(said)
    with pytest.raises(APIMalformed, match="no ranking of 2 responses"):
        await judge.rank(["a", "b"])
    assert len(far_side.requests) == 5
