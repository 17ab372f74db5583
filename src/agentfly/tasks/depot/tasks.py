"""The errands of the depot: bring an item from one room to another.

No prompt describes the plan of the rooms. An agent observes it while walking, and learns it.
"""

from __future__ import annotations

import itertools

from agentfly.core.task import Task
from agentfly.tasks.depot.environment import ROOMS

ITEMS = ("tea", "rice", "milk", "soap")
"""What is to be brought, one of them in an errand."""

HELD_OUT_EVERY = 8
"""One errand of this many, counted over items, places, goals and starts, is held out."""


def train_tasks() -> list[Task]:
    """The 168 errands that are trained on; every item, place, goal and start is among them."""
    return [task for number, task in _errands() if number % HELD_OUT_EVERY]


def eval_tasks() -> list[Task]:
    """The 24 errands that are never trained on: what they are made of is known, but not all of it together."""
    return [task for number, task in _errands() if not number % HELD_OUT_EVERY]


def request(item: str, place: str, goal: str, start: str) -> str:
    """Return the text of an errand."""
    return f"The {item} is in the {place}. Bring it to the {goal}. You are in the {start}."


def _errands() -> list[tuple[int, Task]]:
    """Return each errand with a number that does not follow from any single part of it."""
    errands = []
    for item, place, goal, start in itertools.product(ITEMS, ROOMS, ROOMS, ROOMS):
        if place == goal:
            continue
        number = ITEMS.index(item) + 2 * ROOMS.index(place) + 3 * ROOMS.index(goal) + 5 * ROOMS.index(start)
        fields = {"item": item, "place": place, "goal": goal, "start": start}
        errands.append((number, Task(prompt=request(item, place, goal, start), fields=fields)))
    return errands
