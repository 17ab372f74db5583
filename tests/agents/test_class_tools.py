"""Methods and classes as tools: one instance per rollout, on its own thread, closed at the end."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from typing import Annotated, Any, cast

import cloudpickle
import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.agents.user_function import FromTask
from agentfly.contexts import rollout_state
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, ResourceError, ToolDefinitionError, ToolTimeout, ToolUnavailable
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory


class NoEngine:
    """Stands for an engine of which nothing is asked."""

    async def release_owner(self, owner: str) -> None:
        return None


def context_of(rollout: str = "r0", **fields: Any) -> Context:
    return Context(Trajectory(rollout, "g0", Task("do it", fields)), cast("Any", NoEngine()))


def tools_by_name(*given: Any) -> dict[str, Tool]:
    return {one.name: one for one in Agent(model="tiny", tools=given).tools}


async def said(one: Tool, context: Context, **arguments: Any) -> str:
    result = await one.call(arguments, context)
    assert isinstance(result.observation, str)
    return result.observation


# --- methods -------------------------------------------------------------------------------------------------------


class Shop:
    def __init__(self, goods: str) -> None:
        self.goods = goods

    @tool
    def search(self: Shop, word: str) -> str:
        """Search.

        Args:
            word: what to look for.
        """
        return f"{word} in {self.goods}"

    @tool(name="buy_it", timeout_s=5)
    async def buy(self, amount: int, context: Context) -> str:
        """Buy."""
        return f"{amount} of {self.goods} for {context.rollout_id}"

    def not_a_tool(self) -> None:
        """Left alone."""


async def test_a_method_is_a_tool_when_it_is_taken_from_an_instance() -> None:
    shop = Shop("tea")
    assert shop.search.name == "search"
    assert shop.search.parameters["properties"] == {"word": {"type": "string", "description": "what to look for."}}
    assert await said(shop.search, context_of(), word="green") == "green in tea"
    assert await said(shop.buy, context_of(), amount="2") == "2 of tea for r0"
    assert shop.buy.timeout_s == 5
    assert shop.search("black") == "black in tea"  # still the method


async def test_an_instance_stands_for_its_tools() -> None:
    tools = tools_by_name(Shop("tea"))
    assert list(tools) == ["search", "buy_it"]
    assert await said(tools["search"], context_of(), word="green") == "green in tea"


def test_a_method_without_its_instance_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"Shop\(\)\.search; or put @agentfly.tool on the class"):
        Agent(model="tiny", tools=[Shop.search])


async def test_a_tool_of_an_instance_pickles_with_it() -> None:
    copy = pickle.loads(cloudpickle.dumps(Shop("tea").search))
    assert await said(copy, context_of(), word="green") == "green in tea"


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_what_belongs_to_a_class_is_refused_with_the_cure(kind: Any) -> None:
    with pytest.raises(ToolDefinitionError, match=rf"a {kind.__name__}, .*tool\(Shop.search\)"):
        tool(kind(lambda word: word))


# --- classes -------------------------------------------------------------------------------------------------------


@tool(timeout_s=20)
class NoteBook:
    """Keeps its lines in a database that refuses every thread but the one that made it."""

    closed: list[int] = []

    def __init__(self, title: str, context: Context, pages: int = 3) -> None:
        self.rollout_id = context.rollout_id
        self.title, self.pages = title, pages
        self.thread = threading.get_ident()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table lines (line text)")

    def write(self, line: str) -> str:
        """Write a line.

        Args:
            line: the line.
        """
        assert threading.get_ident() == self.thread
        self.database.execute("insert into lines values (?)", (line,))
        return f"{self.title}/{self.pages}: {self._count()}"

    async def owner(self) -> str:
        """Say whose it is."""
        asyncio.get_running_loop()
        return self.rollout_id

    def __call__(self) -> list[str]:
        """Read all lines."""
        return [line for (line,) in self.database.execute("select line from lines")]

    def close(self) -> None:
        self.database.close()  # raises on another thread
        self.closed.append(self.thread)

    def _count(self) -> int:
        (count,) = self.database.execute("select count(*) from lines").fetchone()
        return int(count)


async def test_each_rollout_has_an_instance_of_a_class_which_stays_on_its_thread_and_is_closed_at_the_end() -> None:
    tools = tools_by_name(NoteBook)
    assert list(tools) == ["note_book_write", "note_book_owner", "note_book"]
    assert tools["note_book_write"].parameters["properties"]["line"]["description"] == "the line."
    contexts = [context_of(f"r{number}", title=f"t{number}") for number in range(8)]

    async def play(context: Context) -> list[str]:
        first = [said(tools["note_book_write"], context, line=str(number)) for number in range(3)]
        assert sorted(await asyncio.gather(*first)) == [f"{context.task['title']}/3: {count}" for count in (1, 2, 3)]
        assert await said(tools["note_book_owner"], context) == context.rollout_id
        return [await said(tools["note_book"], context)]

    NoteBook.closed.clear()
    assert await asyncio.gather(*map(play, contexts)) == [['["0", "1", "2"]']] * 8
    for context in contexts:
        await context.close()
    assert len(set(NoteBook.closed)) == 8


async def test_a_class_that_was_made_a_tool_is_still_the_class() -> None:
    assert inspect.isclass(NoteBook)
    book = NoteBook("mine", context_of())
    assert book.write("line") == "mine/3: 1"


async def test_an_instance_of_a_class_is_shared_by_all_rollouts() -> None:
    @tool
    class Counter:
        def __init__(self, count: int = 0) -> None:
            self.count = count

        async def add(self, amount: int) -> int:
            """Add."""
            self.count += amount
            return self.count

    tools = tools_by_name(Counter(10))
    assert await said(tools["counter_add"], context_of("r0"), amount=1) == "11"
    assert await said(tools["counter_add"], context_of("r1"), amount=1) == "12"
    own = tools_by_name(Counter)
    assert await said(own["counter_add"], context_of("r2"), amount=1) == "1"


async def test_a_class_whose_tools_are_all_async_lives_in_the_event_loop() -> None:
    @tool(name="web")
    class Client:
        closed = False

        def __init__(self, site: Annotated[str, FromTask()]) -> None:
            self.site, self.loop = site, asyncio.get_running_loop()

        async def look(self) -> str:
            """Look."""
            assert self.loop is asyncio.get_running_loop()
            return self.site

        async def aclose(self) -> None:
            type(self).closed = True

    context = context_of(site="here")
    assert await said(tools_by_name(Client)["web_look"], context) == "here"
    await context.close()
    assert Client.closed


async def test_only_the_methods_that_were_marked_are_tools_where_some_are_and_a_subclass_has_its_own() -> None:
    @tool
    class HTTPBox:
        kind = "plain"

        @tool(timeout_s=7)
        def look(self) -> str:
            """Look."""
            return self.helper()

        @tool(name="peek")
        def spy(self) -> str:
            """Spy."""
            return "seen"

        def helper(self) -> str:
            return self.kind

    class Better(HTTPBox):
        kind = "better"

    tools = tools_by_name(HTTPBox)
    assert list(tools) == ["http_box_look", "peek"]
    assert tools["http_box_look"].timeout_s == 7
    assert await said(tools["http_box_look"], context_of()) == "plain"
    assert await said(tools_by_name(Better)["better_look"], context_of()) == "better"


async def test_a_call_that_was_given_up_holds_up_the_next_one_only_within_its_own_time() -> None:
    hangs = threading.Event()

    @tool
    class Slow:
        @tool(timeout_s=0.05)
        def wait(self) -> None:
            """Wait."""
            hangs.wait(30)

        @tool(timeout_s=30)
        def answer(self) -> str:
            """Answer."""
            return "here"

    tools, context = tools_by_name(Slow), context_of()
    with pytest.raises(ToolTimeout):
        await tools["slow_wait"].call({}, context)
    with pytest.raises(ToolTimeout):
        await tools["slow_wait"].call({}, context)
    hangs.set()
    assert await said(tools["slow_answer"], context) == "here"


async def test_an_instance_that_hangs_is_left_alone_at_the_end(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    hangs = threading.Event()

    @tool
    class Stuck:
        def look(self) -> str:
            """Look."""
            return "here"

        def close(self) -> None:
            hangs.wait(30)

    monkeypatch.setattr(rollout_state, "CLOSE_S", 0.05)
    context = context_of()
    look = tools_by_name(Stuck)["stuck_look"]
    await look.call({}, context)
    await context.close()
    assert "was not closed within 0.05 s" in caplog.text
    hangs.set()
    with pytest.raises(ResourceError, match="at its end"):
        await look.call({}, context)


async def test_a_constructor_that_fails_is_nobodys_reward_and_is_tried_again_by_the_next_call() -> None:
    made: list[int] = []

    @tool
    class Fragile:
        def __init__(self) -> None:
            made.append(1)
            if len(made) == 1:
                raise ConnectionRefusedError("not yet")
            if len(made) == 2:
                raise ValueError("mistake")

        def look(self) -> str:
            """Look."""
            return "here"

    look, context = tools_by_name(Fragile)["fragile_look"], context_of()
    with pytest.raises(ToolUnavailable, match="ConnectionRefusedError: not yet"):
        await look.call({}, context)
    with pytest.raises(ToolDefinitionError, match=r"ValueError: mistake.*mend the constructor"):
        await look.call({}, context)
    assert await said(look, context) == "here"


def fragile(*, sync: bool, made: BaseException | None = None, closed: BaseException | None = None) -> Tool:
    """The tool of a class whose constructor or ``close`` raises something."""

    class Fragile:
        def __init__(self) -> None:
            if made is not None:
                raise made

        def close(self) -> None:
            if closed is not None:
                raise closed

    class Sync(Fragile):
        def look(self) -> str:
            """Look."""
            return "seen"

    class Async(Fragile):
        async def look(self) -> str:
            """Look."""
            return "seen"

    (made_tool,) = Agent(model="tiny", tools=[tool(Sync if sync else Async)]).tools  # type: ignore[list-item]
    return made_tool


@pytest.mark.parametrize("sync", [True, False])
async def test_a_constructor_that_would_end_the_process_fails_its_call_only(sync: bool) -> None:
    with pytest.raises(ToolDefinitionError, match=r"SystemExit: 2.*mend the constructor"):
        await fragile(sync=sync, made=SystemExit(2)).call({}, context_of())


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("raised", [SystemExit(2), asyncio.CancelledError(), ValueError("broken")])
async def test_whatever_closing_an_instance_raises_is_told_in_the_log(
    raised: BaseException, sync: bool, caplog: Any
) -> None:
    context = context_of()
    assert (await fragile(sync=sync, closed=raised).call({}, context)).observation == "seen"
    await context.close()
    assert "Closing" in caplog.text
    assert type(raised).__name__ in caplog.text


async def test_a_constructor_that_asks_for_what_the_task_lacks_names_the_fields_there_are() -> None:
    with pytest.raises(ToolDefinitionError, match=r"NoteBook\(title=…\).*no field 'title', only \['colour'\]"):
        await tools_by_name(NoteBook)["note_book"].call({}, context_of(colour="red"))


def test_a_public_method_without_a_docstring_is_refused_by_its_tools_name() -> None:
    with pytest.raises(ToolDefinitionError, match="'box_look' has no docstring"):

        @tool
        class Box:
            def look(self) -> str:
                return ""


async def test_sync_instances_never_hold_up_the_event_loop() -> None:
    @tool
    class Sleeper:
        def __init__(self) -> None:
            time.sleep(0.05)

        def nap(self) -> None:
            """Nap."""
            time.sleep(0.05)

        def close(self) -> None:
            time.sleep(0.05)

    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    nap = tools_by_name(Sleeper)["sleeper_nap"]

    async def play(number: int) -> None:
        context = context_of(f"r{number}")
        for _ in range(3):
            await nap.call({}, context)
        await context.close()

    beating = asyncio.create_task(heart())
    await asyncio.gather(*map(play, range(64)))
    beating.cancel()
    assert beats >= 5  # 64 times 5 naps one after another would take 16 s; all at once leave room for about 25 beats


async def test_the_tools_of_a_class_travel_to_another_process() -> None:
    tools = pickle.loads(cloudpickle.dumps(Agent(model="tiny", tools=[NoteBook]).tools))  # type: ignore[list-item]
    assert await said(tools[0], context_of(title="t"), line="x") == "t/3: 1"


def local_class() -> type:
    @tool
    class Echo:
        def __init__(self, word: str) -> None:
            self.word = word

        def say(self, times: int) -> str:
            """Say it."""
            return self.word * times

    return Echo


async def test_a_class_that_cannot_be_imported_travels_by_value() -> None:
    program = """
import asyncio, pickle, sys
from agentfly.agents.agent import Agent
from agentfly.contexts.context import Context
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory

async def main():
    echo, tools = pickle.load(sys.stdin.buffer)
    for say in (*tools, *Agent(model="tiny", tools=[echo]).tools):
        context = Context(Trajectory("r0", "g0", Task("x", {"word": "na"})), None)
        print(say.name, (await say.call({"times": "2"}, context)).observation, echo("ta").say(2))

asyncio.run(main())
"""
    echo = local_class()
    sent = cloudpickle.dumps((echo, Agent(model="tiny", tools=[echo]).tools))  # type: ignore[list-item]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], input=sent, capture_output=True, check=False
    )
    assert done.stdout.decode().splitlines() == ["echo_say nana tata"] * 2, done.stderr.decode()
