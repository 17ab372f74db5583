"""Tools and rewards can be pickled; the error for one that cannot names the path to the cause."""

from __future__ import annotations

import pickle
import socket
import threading

import cloudpickle
import pytest

from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import UsageError
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


class Client:
    def __init__(self):
        self.session = {"guard": threading.Lock()}

    def ask(self, question: str) -> str:
        """Ask."""
        return question


def owning_a_lock():
    lock = threading.Lock()

    @tool(name="ask")
    def ask(question: str) -> str:
        """Ask."""
        with lock:
            return question

    return ask


def owning_a_socket():
    client = socket.socket()

    @reward(name="judged")
    def judged(response: str) -> float:
        return float(client.fileno())

    return judged


def needing(spec):
    @tool(resources=[spec])
    def work() -> str:
        """Work."""
        return "done"

    return work


@pytest.mark.parametrize(
    ("make", "path", "kind"),
    [
        (owning_a_lock, "ask, variable 'lock'", "_thread.lock"),
        (owning_a_socket, "judged, variable 'client'", "socket.socket"),
        (lambda: tool(Client().ask), "ask.__self__.session['guard']", "_thread.lock"),
        (lambda: needing(FakeSpec(name=threading.Lock())), "work.resources[0].name", "_thread.lock"),  # type: ignore[arg-type]
    ],
)
def test_what_keeps_a_tool_or_reward_from_travelling_is_named_with_its_path(make, path, kind):
    with pytest.raises(UsageError) as caught:
        cloudpickle.dumps(make())
    assert f"{path} is a {kind}, which cannot be pickled" in str(caught.value)


def test_a_tool_that_refers_to_itself_travels():
    @tool
    def count(down_to: int) -> int:
        """Count down."""
        return 0 if down_to == 0 else count(down_to - 1)

    copy = pickle.loads(cloudpickle.dumps(count))
    assert copy(3) == 0


def test_what_a_tool_needs_travels_along_and_is_equal():
    world = FakeBackend()
    copy = pickle.loads(cloudpickle.dumps((needing(FakeSpec(world=world, capacity=3, replicas=2)), world)))
    travelled, world = copy
    assert travelled.resources == (FakeSpec(world=world, capacity=3, replicas=2),)
