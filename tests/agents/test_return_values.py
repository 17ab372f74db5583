"""Return values of tools: each becomes an observation, or is refused with the cure."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import ToolCrashed, ToolDefinitionError

if TYPE_CHECKING:
    pass


class Opaque:
    def __str__(self) -> str:
        return "opaque"


@dataclass
class Shelf:
    eggs: int


@dataclass
class Outcome:
    code: int

    def __str__(self) -> str:
        return f"exit code {self.code}"


class Basket(BaseModel):
    eggs: int


class Size(Enum):
    LARGE = "large"


@pytest.mark.parametrize(
    ("returned", "observation"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (7, "7"),
        (True, "true"),
        ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
        (Shelf(3), '{"eggs": 3}'),
        (Opaque(), "opaque"),
        (Outcome(1), "exit code 1"),
        (Basket(eggs=2), '{"eggs": 2}'),
        (Size.LARGE, '"large"'),
        ([Opaque()], '["opaque"]'),
        ([Outcome(1)], '[{"code": 1}]'),
        ([threading], "[<module 'threading'"),
        (math.nan, "null"),
        ({"x": [math.inf, -0.5]}, '{"x": [null, -0.5]}'),
        (b"a\xff", "a\ufffd"),
        ("half \ud800 pair", "half ? pair"),
    ],
)
async def test_whatever_a_tool_returns_becomes_a_text(returned: Any, observation: str, context: Context) -> None:
    @tool
    def look() -> Any:
        """Look."""
        return returned

    result = await look.call({}, context)
    assert result.observation.startswith(observation)
    assert result.observation == observation or observation.startswith("[<")


async def low(item: str) -> str:
    await asyncio.sleep(0)
    return f"{item}: low"


@tool
async def forgets_to_await(item: str) -> str:
    """Look how much of an item is left."""
    return low(item)  # type: ignore[return-value]


@tool
def has_it_awaited(item: str) -> str:
    """Look how much of an item is left."""
    return low(item)  # type: ignore[return-value]


@pytest.mark.parametrize("look", [forgets_to_await, has_it_awaited])
async def test_an_awaitable_that_a_tool_returns_is_awaited(look: Tool, context: Context) -> None:
    assert (await look.call({"item": "sugar"}, context)).observation == "sugar: low"


@pytest.mark.parametrize(
    "returned",
    [
        (number for number in range(3)),
        map(str, [1]),
        iter([1]),
        [iter([1])],
        {"found": zip([1], [2], strict=True)},
        object(),
        ToolResult(object()),
    ],
)
async def test_what_reads_as_its_place_in_memory_is_refused_with_the_cure(returned: Any, context: Context) -> None:
    @tool
    def look() -> Any:
        """Look."""
        return returned

    with pytest.raises(ToolDefinitionError, match=r"'look' returned .*Return what it holds"):
        await look.call({}, context)


class Wordless:
    """Something that cannot be asked what it reads as."""

    def __str__(self) -> str:
        raise ValueError("closed file")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (Wordless(), "ValueError: closed file"),
        (ToolResult(Wordless(), reward=1.0), "ValueError: closed file"),
        (10**5000, "ValueError: Exceeds the limit"),  # what a model asks of a calculator
        ([10**5000], "ValueError: Exceeds the limit"),
        (nested(100_000), "RecursionError: "),
    ],
    ids=["wordless", "wordless-result", "digits", "digits-in-a-list", "nested"],
)
async def test_what_cannot_be_read_as_text_is_a_crash_of_the_tool_that_the_model_is_told(
    returned: Any, told: str, context: Context
) -> None:
    @tool
    def look() -> Any:
        """Look."""
        return returned

    with pytest.raises(ToolCrashed, match=f"^{told}"):
        await look.call({}, context)


async def test_rewards_of_calls_may_be_numbers_of_numpy(context: Context) -> None:
    numpy = pytest.importorskip("numpy", reason="comes with the extra 'train'")
    for number in (numpy.float32(0.5), numpy.float64(0.5), 0.5):
        assert type((await result_with(context, reward=number)).reward) is float


async def test_a_tool_result_says_more_than_a_text(context: Context) -> None:
    @tool
    async def step() -> ToolResult:
        """Step."""
        return ToolResult("won", reward=1.0, done=True, state={"at": 3}, info={"moves": 9})

    assert await step.call({}, context) == ToolResult("won", 1.0, True, {"at": 3}, (), {"moves": 9})


async def result_with(context: Context, **fields: Any) -> ToolResult:
    @tool
    def step() -> ToolResult:
        """Step."""
        return ToolResult(**fields)

    return await step.call({}, context)


async def test_state_and_info_come_out_as_json_gives_them_back(context: Context) -> None:
    result = await result_with(context, done=1, state=Basket(eggs=2), info={"seen": ("a", Size.LARGE), 3: math.nan})
    assert result.done is True
    assert (result.state, result.info) == ({"eggs": 2}, {"seen": ["a", "large"], "3": None})


@pytest.mark.parametrize("value", [object(), {"lock": threading.Lock()}, nested(5_000)], ids=["object", "lock", "deep"])
async def test_a_state_that_json_cannot_hold_is_refused_with_the_cure(value: Any, context: Context) -> None:
    with pytest.raises(ToolDefinitionError, match=r"'step' returned ToolResult\(state=….*\. Return numbers, texts"):
        await result_with(context, state=value)


async def test_an_info_that_json_cannot_hold_is_recorded_as_text_and_the_author_is_told_once(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    @tool
    def step() -> ToolResult:
        """Step."""
        return ToolResult("", info={"lock": threading.Lock(), "moves": 9})

    for _ in range(2):
        info = (await step.call({}, context)).info
        assert info["moves"] == 9
        assert "_thread.lock" in info["lock"]
    [told] = [record.getMessage() for record in caplog.records]
    assert "'step' returned ToolResult(info=…)" in told
    assert "_thread.lock has no form in JSON" in told


async def test_what_numpy_has_is_told_and_recorded_as_pythons_own(context: Context) -> None:
    np = pytest.importorskip("numpy", reason="comes with the extra 'train'")
    values = {"ok": np.bool_(True), "n": np.int64(3), "x": np.float32("nan"), "a": np.array([[1.0, np.nan]])}
    plain = {"ok": True, "n": 3, "x": None, "a": [[1.0, None]]}
    result = await result_with(context, observation=values, reward=np.bool_(True), state=np.arange(3), info=values)
    assert result.observation == '{"ok": true, "n": 3, "x": null, "a": [[1.0, null]]}'
    assert (result.state, result.info, result.reward) == ([0, 1, 2], plain, 1.0)
    for scalar, told in ((np.bool_(True), "true"), (np.int64(3), "3"), (np.float64("nan"), "null")):
        assert (await result_with(context, observation=scalar)).observation == told


async def test_an_info_that_is_no_dict_is_refused(context: Context) -> None:
    with pytest.raises(ToolDefinitionError, match=r"info='here'\): it must be a dict"):
        await result_with(context, info="here")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_of_a_call_that_is_no_number_is_refused(reward: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="finite number"):
        ToolResult("", reward=reward)


async def test_a_long_observation_keeps_its_head_and_tail_and_says_so(context: Context) -> None:
    @tool(max_output_tokens=3)
    def dump() -> str:
        """Dump."""
        return "abcdef" + "x" * 1000 + "uvwxyz"

    observation = (await dump.call({}, context)).observation
    assert observation == "abcdef\n[... 1000 characters left out ...]\nuvwxyz"
