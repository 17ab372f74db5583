from __future__ import annotations

import asyncio
import contextvars
import errno
import math
import pickle
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import cloudpickle
import httpx
import pytest
from pydantic import BaseModel

from agentfly.agents import invocation
from agentfly.agents.tool import FromTask, Tool, ToolResult, tool
from agentfly.contexts.context import Context
from agentfly.errors import (
    AcquireTimeout,
    InvalidArguments,
    PrerequisiteError,
    ResourceDied,
    ToolCrashed,
    ToolDefinitionError,
    ToolError,
    ToolTimeout,
    ToolUnavailable,
    UnknownTool,
    UsageError,
)
from agentfly.trajectory import Failure

if TYPE_CHECKING:
    from decimal import Decimal

speaker: contextvars.ContextVar[str] = contextvars.ContextVar("speaker", default="nobody")


@tool
async def check(item: str, context: Context) -> str:
    """Look how much of an item is left.

    Counts what is on the shelf only.

    Args:
        item: name of the item,
            in the singular.

    Returns:
        How much is left.
    """
    return f"{item}: low ({context.rollout_id})"


@tool(name="add-up", timeout_s=5, max_output_tokens=100)
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Parameters
    ----------
    a : int
        the first
    b
        the second
    """
    return a + b


# --- definition ----------------------------------------------------------------------------------------------------


def test_a_tool_is_described_by_its_docstring_and_type_hints() -> None:
    assert check.name == "check"
    assert check.description == "Look how much of an item is left.\n\nCounts what is on the shelf only."
    assert check.parameters["properties"] == {
        "item": {"type": "string", "description": "name of the item, in the singular."}
    }
    assert check.parameters["required"] == ["item"]
    assert add.name == "add-up"
    assert add.parameters["properties"]["b"] == {"type": "integer", "description": "the second", "default": 1}


def test_a_rest_docstring_is_understood() -> None:
    @tool
    def greet(who: str) -> str:
        """Greet somebody.

        :param who: whom to greet
        """
        return who

    assert greet.description == "Greet somebody."
    assert greet.parameters["properties"]["who"]["description"] == "whom to greet"


def test_type_hints_may_name_types_that_are_local_to_the_definition() -> None:
    @dataclass
    class Point:
        x: int

    @tool
    def go(to: Point, then: list[Point] | None = None) -> None:
        """Go there."""

    assert go.schema.validate({"to": {"x": "1"}, "then": [{"x": 2}]}) == {"to": Point(1), "then": [Point(2)]}


async def test_a_tool_is_still_the_function(context: Context) -> None:
    assert add(2, b=3) == 5
    assert await check("eggs", context) == "eggs: low (rollout-0)"
    assert check.__name__ == "check"
    assert (add.__doc__ or "").startswith("Add two numbers.")


def look() -> str:
    """Look."""
    return "there"


def no_docstring(item: str) -> str:
    return item


def only_sections(item: str) -> str:
    """
    Args:
        item: the item
    """
    return item


def no_hint(item) -> str:  # type: ignore[no-untyped-def]
    """Look."""
    return str(item)


def many(*items: str) -> str:
    """Look."""
    return str(items)


def any_names(**items: str) -> str:
    """Look."""
    return str(items)


def positional(item: str, /) -> str:
    """Look."""
    return item


def other_context(context: str) -> str:
    """Look."""
    return context


def unresolvable(price: Decimal) -> str:
    """Look."""
    return str(price)


def no_json(lock: threading.Thread) -> str:
    """Look."""
    return str(lock)


def yields() -> Iterator[str]:
    """Look."""
    yield "a"


@pytest.mark.parametrize(
    ("function", "cure"),
    [
        (no_docstring, "has no docstring.*Write one"),
        (only_sections, "has no docstring.*Write one"),
        (no_hint, "'item'.*no type hint.*Write for instance 'item: str'"),
        (many, r"'\*items: .*Write them out"),
        (any_names, r"'\*\*items: .*Write them out"),
        (positional, "'item'.*Remove the '/'"),
        (other_context, "'context'.*another name"),
        (unresolvable, "'Decimal'.*Import"),
        (no_json, "lock.*Use types that JSON"),
        (yields, "yields.*return it"),
        (check, "a tool already"),
        (dict, "nothing that the model could call"),
        (3, "not a function"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_cure(function: Any, cure: str) -> None:
    with pytest.raises(ToolDefinitionError, match=cure):
        tool(function)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"name": "look up"}, "letters, digits"),
        ({"timeout_s": 0}, "above 0"),
        ({"max_output_tokens": 0}, "at least 1"),
        ({"retries": -1}, "at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(ToolDefinitionError, match=cure):
        tool(**settings)(look)


# --- calls ---------------------------------------------------------------------------------------------------------


async def test_the_model_gives_its_arguments_and_the_rollout_gives_the_rest(context: Context) -> None:
    @tool
    def compare(guess: int, answer: Annotated[int, FromTask()], ctx: Context, hint: Annotated[str, FromTask()] = "-"):  # type: ignore[no-untyped-def]
        """Compare a guess with the answer."""
        return [guess, answer, hint, ctx.task.id]

    assert list(compare.parameters["properties"]) == ["guess"]
    assert (await compare.call({"guess": "3"}, context)).observation == '[3, "4", "-", "sum"]'
    with pytest.raises(InvalidArguments, match="'answer' is not among them"):
        await compare.call({"guess": 3, "answer": 4}, context)


async def test_a_field_that_the_task_lacks_is_the_users_fault_and_names_the_fields(context: Context) -> None:
    @tool
    def look(colour: Annotated[str, FromTask()]) -> str:
        """Look."""
        return colour

    with pytest.raises(ToolDefinitionError, match=r"no field 'colour', only \['answer', 'level'\]"):
        await look.call({}, context)


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
        ([Opaque()], "[<"),
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
    assert result.observation == observation or observation == "[<"


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
        return ToolResult("", **fields)

    return await step.call({}, context)


async def test_state_and_info_come_out_as_json_gives_them_back(context: Context) -> None:
    result = await result_with(context, done=1, state=Basket(eggs=2), info={"seen": ("a", Size.LARGE), 3: math.nan})
    assert result.done is True
    assert (result.state, result.info) == ({"eggs": 2}, {"seen": ["a", "large"], "3": "NaN"})


@pytest.mark.parametrize("field", ["state", "info"])
@pytest.mark.parametrize("value", [object(), b"\xff", "half \ud800 pair", {"lock": threading.Lock()}])
async def test_a_state_that_json_cannot_hold_is_refused_with_the_cure(field: str, value: Any, context: Context) -> None:
    with pytest.raises(ToolDefinitionError, match=rf"'step' returned ToolResult\({field}=….*\. Return numbers, texts"):
        await result_with(context, **{field: value if field == "state" else {"it": value}})


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


async def test_an_exception_of_the_tools_code_is_told_to_the_model_with_its_cause(context: Context) -> None:
    @tool
    def divide(by: int) -> float:
        """Divide one."""
        return 1 / by

    with pytest.raises(ToolCrashed, match=r"^ZeroDivisionError: division by zero$") as crashed:
        await divide.call({"by": 0}, context)
    assert isinstance(crashed.value.__cause__, ZeroDivisionError)


def wrapped() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError as error:
        raise ValueError("no answer") from error


def while_handling() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError:
        raise ValueError("no answer")  # noqa: B904


def replaced() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError:
        raise ValueError("no answer") from None


def raises(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


async def failure_of(fail: Callable[[], None], context: Context) -> Exception:
    @tool
    def look() -> None:
        """Look."""
        fail()

    with pytest.raises((ToolCrashed, ToolUnavailable)) as failed:
        await look.call({}, context)
    return failed.value


@pytest.mark.parametrize(
    "fail",
    [
        raises(ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
        raises(MemoryError()),
        raises(OSError(errno.ENOSPC, "disk full")),
        raises(OSError(errno.EMFILE, "too many files")),
        raises(OSError(errno.ENETUNREACH, "no way there")),
        raises(socket.gaierror(socket.EAI_NONAME, "no such host")),
        raises(httpx.ConnectError("refused")),
        raises(httpx.ReadTimeout("slow")),
        raises(ExceptionGroup("two", [ValueError("x"), ConnectionRefusedError("y")])),
        raises(ExceptionGroup("one", [AcquireTimeout("pool full")])),
        wrapped,
        while_handling,
    ],
)
async def test_an_outage_is_infrastructure_and_says_what_to_do_if_the_model_can_cause_it(
    fail: Callable[[], None], context: Context
) -> None:
    failure = await failure_of(fail, context)
    assert isinstance(failure, ToolUnavailable)
    assert not isinstance(failure, ToolError)  # the model is not told of it
    assert not Failure.of(failure).by_policy
    assert str(failure).startswith(f"The tool 'look' failed with {type(failure.__cause__).__name__}: ")
    assert "catch the exception in the tool and raise agentfly.ToolError" in str(failure)


async def test_an_outage_behind_an_exception_is_named(context: Context) -> None:
    failure = await failure_of(wrapped, context)
    assert "ValueError: no answer (because of ConnectionResetError: peer)" in str(failure)


@pytest.mark.parametrize(
    "fail",
    [
        raises(FileNotFoundError(errno.ENOENT, "no such file")),
        raises(PermissionError(errno.EACCES, "not yours")),
        raises(IsADirectoryError(errno.EISDIR, "a directory")),
        raises(OSError("something")),
        raises(httpx.InvalidURL("nowhere")),
        raises(ExceptionGroup("two", [ValueError("x"), UnknownTool("y")])),
        replaced,
    ],
)
async def test_what_the_model_may_have_caused_is_told_to_it(fail: Callable[[], None], context: Context) -> None:
    assert isinstance(await failure_of(fail, context), ToolCrashed)


async def test_a_tool_may_say_that_the_model_caused_an_outage(context: Context) -> None:
    @tool
    def fetch(host: str) -> None:
        """Fetch."""
        try:
            raise ConnectionRefusedError(host)
        except ConnectionError as error:
            raise ToolError(f"{host} does not answer") from error

    with pytest.raises(ToolError, match=r"^example does not answer$"):
        await fetch.call({"host": "example"}, context)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("raised", [SystemExit(1), StopIteration("x"), asyncio.CancelledError(), TimeoutError("slow")])
async def test_nothing_that_a_tool_raises_can_end_more_than_its_call(
    raised: BaseException, sync: bool, context: Context
) -> None:
    def fail() -> None:
        """Fail."""
        raise raised

    async def fail_too() -> None:
        """Fail."""
        raise raised

    with pytest.raises(ToolCrashed):
        await tool(fail if sync else fail_too).call({}, context)


async def test_a_long_message_of_an_exception_is_cut(context: Context) -> None:
    @tool
    def fail() -> None:
        """Fail."""
        raise ValueError("x" * 100_000)

    with pytest.raises(ToolCrashed) as crashed:
        await fail.call({}, context)
    assert len(str(crashed.value)) < 1_000


@pytest.mark.parametrize("error", [ToolError("no such item"), AcquireTimeout("pool full"), PrerequisiteError("bwrap")])
async def test_a_typed_failure_comes_out_as_it_was_raised(error: Exception, context: Context) -> None:
    @tool
    async def fail() -> None:
        """Fail."""
        raise error

    with pytest.raises(type(error)) as raised:
        await fail.call({}, context)
    assert raised.value is error


async def test_a_call_that_takes_too_long_is_a_timeout_of_the_tool(context: Context) -> None:
    ended = threading.Event()

    @tool(timeout_s=0.02)
    def hang() -> None:
        """Hang."""
        ended.wait()

    @tool(timeout_s=0.02)
    async def wait() -> None:
        """Wait."""
        await asyncio.sleep(3600)

    for slow in (hang, wait):
        with pytest.raises(ToolTimeout, match=r"stopped after 0\.02 s"):
            await slow.call({}, context)
    ended.set()


async def test_time_spent_waiting_for_resources_is_not_the_tools(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = True
    clock = time.monotonic()
    monkeypatch.setattr(
        Context, "waited_seconds", property(lambda _: time.monotonic() - clock if waiting else waited), raising=True
    )
    waited = 0.0

    @tool(timeout_s=0.05)
    async def queue() -> str:
        """Wait for a resource for longer than the tool may take, and then work for a moment."""
        nonlocal waiting, waited
        await asyncio.sleep(0.2)
        waited = time.monotonic() - clock
        waiting = False
        return "done"

    assert (await queue.call({}, context)).observation == "done"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invocation, "FIRST_PAUSE_S", 0.001)


class Flaky:
    """Fails as often as it is told, and counts."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def look(self) -> str:
        """Look."""
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "there"


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [ConnectionResetError("peer"), httpx.ReadTimeout("slow"), ResourceDied("gone")])
async def test_a_call_that_infrastructure_made_fail_is_made_again_as_often_as_the_tool_says(
    error: Exception, context: Context
) -> None:
    flaky = Flaky(error, times=2)
    assert (await tool(retries=2)(flaky.look).call({}, context)).observation == "there"
    assert flaky.calls == 3
    for retries in (0, 1):
        flaky = Flaky(error, times=2)
        with pytest.raises((ToolUnavailable, ResourceDied)):
            await tool(retries=retries)(flaky.look).call({}, context)
        assert flaky.calls == 1 + retries


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "error", [ToolError("no such item"), ValueError("x"), UsageError("wrong"), PrerequisiteError("bwrap")]
)
async def test_what_the_model_caused_and_what_must_be_mended_is_never_tried_again(
    error: Exception, context: Context
) -> None:
    flaky = Flaky(error, times=1)
    with pytest.raises((ToolError, UsageError, PrerequisiteError)):
        await tool(retries=5)(flaky.look).call({}, context)
    assert flaky.calls == 1


async def test_all_tries_together_have_the_tools_time(context: Context) -> None:
    flaky = Flaky(ConnectionResetError("peer"), times=1000)
    with pytest.raises(ToolTimeout):
        await tool(retries=1000, timeout_s=0.1)(flaky.look).call({}, context)


async def test_cancelling_the_caller_cancels_the_call(context: Context) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    @tool(timeout_s=60)
    async def wait() -> None:
        """Wait."""
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(wait.call({}, context))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_sync_tools_run_beside_one_another_and_never_hold_up_the_loop(context: Context) -> None:
    meeting = threading.Barrier(64, timeout=30)
    threads = set()

    @tool
    def meet() -> None:
        """Wait until all 64 callers are here: it can only end if all run at the same time."""
        threads.add(threading.current_thread())
        meeting.wait()

    await asyncio.gather(*(meet.call({}, context) for _ in range(64)))
    assert threading.main_thread() not in threads


async def test_a_sync_tool_sees_the_callers_context_variables(context: Context) -> None:
    @tool
    def who() -> str:
        """Say who speaks."""
        return speaker.get()

    token = speaker.set("Ada")
    assert (await who.call({}, context)).observation == "Ada"
    speaker.reset(token)


async def test_an_object_bound_to_its_thread_works_within_a_call(context: Context) -> None:
    @tool
    def query() -> int:
        """Count in a database that refuses other threads."""
        with sqlite3.connect(":memory:") as connection:
            row: tuple[int] = connection.execute("select 1 + 1").fetchone()
        return row[0]

    assert (await query.call({}, context)).observation == "2"


async def test_a_bound_method_becomes_a_tool(context: Context) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self, amount: int) -> int:
            """Add to the count."""
            self.count += amount
            return self.count

    counter = Counter()
    add = tool(counter.add)
    await add.call({"amount": 2}, context)
    assert counter.count == 2


# --- pickling ------------------------------------------------------------------------------------------------------


async def test_a_tool_of_a_module_pickles_by_name() -> None:
    assert pickle.loads(cloudpickle.dumps(check)) is check


def local_tool() -> Tool:
    class Point(BaseModel):
        x: int

    step = 2

    @tool(timeout_s=3)
    def move(by: Point, context: Context) -> int:
        """Move."""
        return by.x + step

    return move


async def test_a_local_tool_pickles_by_value(context: Context) -> None:
    move = local_tool()
    copy: Tool = pickle.loads(cloudpickle.dumps(move))
    assert copy is not move
    assert copy.parameters == move.parameters
    assert copy.timeout_s == 3
    assert (await copy.call({"by": {"x": 1}}, context)).observation == "3"
