"""Error texts about names and types: the likely name, and the right article."""

from __future__ import annotations

import pytest

from agentfly.core.errors import nearest_name, suggest_name, type_of


class Agent:
    pass


class MCPServer:
    pass


class User:
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Agent(), "an Agent"),
        (MCPServer(), "an MCPServer"),
        (User(), "a User"),
        (3, "an int"),
        ("", "a str"),
        (object(), "an object"),
        (None, "None"),
    ],
)
def test_a_type_is_told_with_its_article(value, told):
    assert type_of(value) == told


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("rewards", ["threads", "reward"], "reward"),
        ("task", ["ask", "tasks"], "tasks"),
        ("Max-Turns", ["max_tokens", "max_turns"], "max_turns"),
        ("reward_fn", ["forward_on", "reward"], "reward"),
        ("temp", ["test", "temperature"], "temperature"),
        ("stpes", ["step_size", "steps"], "steps"),
        ("lr", ["lora", "loss"], None),
        ("rewards", ["threads"], None),
    ],
)
def test_a_plural_a_slip_or_a_beginning_says_more_than_letters_that_are_shared(name, known, meant):
    assert nearest_name(name, known) == meant


def test_where_no_name_is_near_all_are_told():
    assert suggest_name("xyzzy", ["one", "two"]) == "There are: one, two."
