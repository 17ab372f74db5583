"""Tools: their definition, their calls, and pickling."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import cloudpickle
import pytest
from pydantic import BaseModel

from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.agents.user_function import FromTask
from agentfly.contexts.context import Context
from agentfly.core.errors import InvalidArguments, ToolDefinitionError

if TYPE_CHECKING:
    from decimal import Decimal


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
    assert check.__name__ == "check"  # type: ignore[attr-defined]
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


def no_hint(item) -> str:
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


async def test_the_model_gives_its_arguments_and_the_rollout_gives_the_rest(context: Context) -> None:
    @tool
    def compare(guess: int, answer: Annotated[int, FromTask()], ctx: Context, hint: Annotated[str, FromTask()] = "-"):
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


class Basket(BaseModel):
    eggs: list[int] = []


@tool
def collect(found: list[int] = [], basket: Basket = Basket(), named: dict[str, list[int]] = {"a": []}) -> int:  # noqa: B006, B008
    """Collect.

    Args:
        found: what was found.
        basket: where it goes.
        named: what is named.
    """
    for kept in (found, basket.eggs, named["a"]):
        kept.append(1)
    return len(found) + len(basket.eggs) + len(named["a"])


async def test_a_default_that_a_call_writes_into_is_as_it_was_for_the_next(context: Context) -> None:
    assert [(await collect.call({}, context)).observation for _ in range(3)] == ["3", "3", "3"]
    assert (await collect.call({"found": [1, 2]}, context)).observation == "5"
