"""The depot: four rooms, an item in one of them, and an agent that walks. It does not depend on agents of AgentFly."""

from __future__ import annotations

from collections import deque
from typing import Any

PLAN = (
    ("loft", "shed"),
    ("hall", "dock"),
)
"""The rooms as they lie, north at the top. Between neighbours there is a door."""

ROOMS = tuple(room for row in PLAN for room in row)

WAYS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""The ways one can go, as rows and columns of the plan."""


class Depot:
    """A depot with one thing in it, which can be carried. Each answer says all that there is to see."""

    def reset(self, start: str = "hall", item: str = "tea", place: str = "loft") -> None:
        """Put the agent into the room ``start`` with empty hands, and the item into the room ``place``."""
        self.room = start
        self.item = item
        self.place: str | None = place

    def act(self, action: str, argument: str) -> tuple[str, dict[str, Any]]:
        """Go, take or put. Return the observation and the new state."""
        acts = {"go": self.go, "take": self.take, "put": self.put}
        return acts[action](argument), self.state()

    def go(self, way: str) -> str:
        """Go into the next room."""
        beyond = neighbours(self.room).get(way)
        if beyond is None:
            return f"No door. {self.look()}"
        self.room = beyond
        return self.look()

    def take(self, item: str) -> str:
        """Take what lies in the room."""
        if (item, self.room) != (self.item, self.place):
            return f"No {item} here. {self.look()}"
        self.place = None
        return self.look()

    def put(self, item: str) -> str:
        """Put down what is in hand."""
        if item != self.item or self.place is not None:
            return f"No {item} in hand. {self.look()}"
        self.place = self.room
        return self.look()

    def look(self) -> str:
        """Describe the agent's room, and the item if it is here or in hand."""
        seen = {None: f" with the {self.item}", self.room: f", and so is the {self.item}"}.get(self.place, "")
        return f"You are in the {self.room}{seen}."

    def state(self) -> dict[str, Any]:
        """All that what happens next depends on: the room, and where the item lies; None if it is in hand."""
        return {"room": self.room, "item": self.item, "place": self.place}


def neighbours(room: str) -> dict[str, str]:
    """The rooms beside one, by the way there."""
    row, column = next((row, names.index(room)) for row, names in enumerate(PLAN) if room in names)
    beside = {way: (row + down, column + right) for way, (down, right) in WAYS.items()}
    return {
        way: PLAN[down][right]
        for way, (down, right) in beside.items()
        if 0 <= down < len(PLAN) and 0 <= right < len(PLAN[0])
    }


def ways_towards(room: str, goal: str) -> list[str]:
    """The ways on which ``goal`` comes nearer by a room; none if it is reached."""
    distances = {goal: 0}
    near = deque([goal])
    while near:
        here = near.popleft()
        for beside in neighbours(here).values():
            if beside not in distances:
                distances[beside] = distances[here] + 1
                near.append(beside)
    return [way for way, beside in neighbours(room).items() if distances[beside] < distances[room]]
