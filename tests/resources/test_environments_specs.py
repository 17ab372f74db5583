"""Specs of environments: comparable values, refusals, and pickling."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle
import pytest

from agentfly.core.errors import ConfigError, UsageError
from agentfly.resources.environments.spec import EnvironmentSpec


class Counter:
    """A simulator."""


class Tangled:
    """A simulator that keeps its state in its module."""

    thread_safe = False


def test_specs_are_values_and_travel() -> None:
    spec = EnvironmentSpec(factory="games:Chess", kwargs={"level": 3, "board": "small"}, runs="process")
    same = EnvironmentSpec(factory="games:Chess", kwargs=(("board", "small"), ("level", 3)), runs="process")
    assert spec == same
    assert hash(spec) == hash(same)
    assert cloudpickle.loads(cloudpickle.dumps(spec)) == spec
    assert spec != EnvironmentSpec(factory="games:Chess", kwargs={"level": 4, "board": "small"}, runs="process")
    assert spec.label == "environment:Chess"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"factory": "games.Chess"}, "as 'module:name'"),
        ({"factory": object()}, "Give the factory of the environment"),
        ({"factory": Counter, "args": ([1, 2],)}, r"args\[0\] is a list"),
        ({"factory": Counter, "kwargs": {"options": {"a": 1}}}, r"kwargs\['options'\] is a dict"),
        ({"factory": Counter, "runs": "threads"}, "'loop', 'thread' or 'process'"),
        ({"factory": Counter, "runs": "process", "starts": "forkserver"}, "'fork' or 'spawn'"),
        ({"factory": Counter, "runs": "thread", "starts": "spawn"}, "only a process can be spawned"),
        ({"factory": Counter, "idle": "freeze"}, "only a process can be frozen"),
        ({"factory": Tangled, "runs": "thread"}, r"Tangled is declared as not thread-safe.*runs='process'"),
        ({"factory": Tangled, "capacity": 1}, "two instances may not live in one process"),
        ({"factory": Counter, "call_timeout_s": 0}, "a number of seconds above 0"),
        ({"factory": Counter, "call_timeout_s": "60"}, "a number of seconds above 0"),
        ({"factory": Counter, "args": 5}, r"for a single one, args=\(5,\)"),
        ({"factory": Counter, "args": "red"}, r"for a single one, args=\('red',\)"),
        ({"factory": Counter, "args": {"start": 1}}, "write a tuple"),
        ({"factory": Counter, "kwargs": 5}, "as a mapping"),
        ({"factory": Counter, "kwargs": {"start": 1, 2: 3}}, "as a mapping"),
        ({"factory": Counter, "kwargs": {1: 2}}, "as a mapping"),
        ({"factory": Counter, "kwargs": (("start", 1, 2),)}, "as a mapping"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_with_the_cure(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvironmentSpec(**fields)


class Client:
    """Something alive: it owns a lock."""

    def __init__(self) -> None:
        self.session = {"lock": threading.Lock()}


class Hooked:
    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self) -> Counter:
        return Counter()


def test_what_cannot_travel_to_a_process_is_named_by_its_path() -> None:
    with pytest.raises(UsageError, match=r"factory\.client\.session\['lock'\] is a _thread.lock"):
        EnvironmentSpec(factory=Hooked(Client()), runs="process")
    client = Client()
    with pytest.raises(UsageError, match=r"factory, variable 'client'\.session\['lock'\] is a _thread.lock"):
        EnvironmentSpec(factory=lambda: Hooked(client), runs="process")
    with pytest.raises(UsageError, match=r"kwargs\['client'\]\.session\['lock'\]"):
        EnvironmentSpec(factory=Hooked, kwargs={"client": client}, runs="process")
    assert EnvironmentSpec(factory=Hooked, kwargs={"client": client}).runs == "loop"
