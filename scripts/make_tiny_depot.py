"""Make `tiny-depot`, the model that runs errands in the depot before it has learned to: see `agentfly.tasks.depot`.

    python scripts/make_tiny_depot.py [DIRECTORY]

Made as `tiny` is (`make_tiny.py`), of made-up walks. Who walks there takes a right step half of the time and any other
for the rest, so that the model knows how to walk about, and seldom arrives. Some walks are told whole, and more as they
are seen by an agent that recalls its last turn alone.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from make_tiny import HOME, Kinds, make

from agentfly.core.messages import Message
from agentfly.formats.toolcalls.action import ActionFormat
from agentfly.tasks.depot.agent import PARAMETERS, right_actions
from agentfly.tasks.depot.environment import WAYS, Depot
from agentfly.tasks.depot.tasks import train_tasks

RIGHT = 0.5
TURNS = 10
PIECES = (
    r"Action: [a-z]+\[|\]|(?:user|assistant)\n|Observation: (?:No door\. )?You are in the |Observation: "
    r"|You are in the | is in the |, and so is the | with the |\. Bring it to the |\. |The "
)
"""What all errands have in common, which is worth a token each: an errand is then some hundred tokens long."""
ERRANDS = train_tasks()


def walk(chance: random.Random) -> list[Message]:
    """An errand, run badly, told from its beginning."""
    return _walk(chance)


def last_turn(chance: random.Random) -> list[Message]:
    """Two turns out of an errand, as seen by who recalls the errand and its last turn."""
    opening, *rest = _walk(chance)
    if len(rest) < 3:
        return [opening, *rest]
    first = 2 * chance.randrange(len(rest) // 2)
    before, seen, now = rest[first : first + 3]
    return [opening, {**before, "remembered": True}, seen, now]  # type: ignore[typeddict-unknown-key]


def _walk(chance: random.Random) -> list[Message]:
    task = chance.choice(ERRANDS)
    depot = Depot()
    depot.reset(task["start"], task["item"], task["place"])
    messages: list[Message] = [{"role": "user", "content": task.messages[0]["content"]}]
    for _ in range(TURNS):
        tool, argument = _action(depot, task["goal"], chance)
        call = ActionFormat().write(tool, {PARAMETERS[tool]: argument})
        messages.append({"role": "assistant", "content": call})
        seen, _ = depot.act(tool, argument)
        if depot.place == task["goal"]:
            return messages
        messages.append({"role": "user", "content": f"Observation: {seen}"})
    return messages[:-1]


def _action(depot: Depot, goal: str, chance: random.Random) -> tuple[str, str]:
    if chance.random() < RIGHT:
        return chance.choice(right_actions(depot.item, depot.place, goal, depot.room))
    return chance.choice([*(("go", way) for way in WAYS), ("put" if depot.place is None else "take", depot.item)])


KINDS: Kinds = {walk: 8, last_turn: 16}

if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else HOME.parent / "tiny-depot", KINDS, PIECES)
