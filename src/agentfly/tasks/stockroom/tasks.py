"""The tasks of the stockroom: its items, the stock levels, and the order that each level requires.

No prompt states the ordering rule, `ORDERS`. An agent learns it from rewards.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from agentfly.core.messages import Message
from agentfly.core.task import Task

ITEMS = ("tea", "rice", "milk", "soap", "salt", "corn", "sugar", "honey")
"""What the shop keeps, a shelf each."""

ORDERS = {"empty": 3, "low": 2, "half": 1, "full": 0}
"""How full a shelf can be, and how many crates the shop then wants ordered."""

REQUESTS = (
    "How is the {item}?",
    "What about the {item}?",
    "The {other} can wait. How is the {item}?",
    "Leave the {other}. What about the {item}?",
)
"""How the shop asks. Some requests name a second item, which is not the one to see to."""

HELD_OUT_REQUEST = "The {other} can wait. What about the {item}?"
"""A request that is never trained on."""

EXAMPLES: tuple[Message, ...] = (
    {"role": "user", "content": "How is the flour?"},
    {"role": "assistant", "content": "check[flour]"},
    {"role": "user", "content": "Observation: empty"},
    {"role": "assistant", "content": "order[3]"},
    {"role": "user", "content": "How is the oil?"},
    {"role": "assistant", "content": "check[oil]"},
    {"role": "user", "content": "Observation: full"},
    {"role": "assistant", "content": "order[0]"},
)
"""Two played tasks about other items, for a pretrained model: they show it how calls are written."""

THOUGHTFUL_EXAMPLES: tuple[Message, ...] = tuple(
    {**message, "content": f"{thought}{message['content']}"}
    for message, thought in zip(
        EXAMPLES,
        (
            "",
            "The flour is what they ask about, so I had better look at its shelf before I order.\n",
            "",
            "Not a single bag is left on the shelf, and so we need as many crates as we can get.\n",
            "",
            "They want to know how much oil there is, which I cannot tell without a look.\n",
            "",
            "There is plenty of oil for the whole week, so nothing has to be brought today.\n",
        ),
        strict=True,
    )
)
"""The same with a thought before each call, so that most of what a model says is free text."""


def train_tasks() -> list[Task]:
    """96 tasks: every item, at each of the three levels it is trained at, in every trained wording."""
    return [
        _task(item, level, request)
        for request in REQUESTS
        for item, level in itertools.product(ITEMS, ORDERS)
        if not _held_out(item, level)
    ]


def eval_tasks() -> list[Task]:
    """24 tasks about items at the one level that each is never trained at, two wordings known and one unknown."""
    return [
        _task(item, level, request)
        for request in (REQUESTS[0], REQUESTS[3], HELD_OUT_REQUEST)
        for item, level in itertools.product(ITEMS, ORDERS)
        if _held_out(item, level)
    ]


def train_tasks_with_examples() -> list[Task]:
    """`train_tasks`, each after `EXAMPLES`."""
    return [_after(EXAMPLES, task) for task in train_tasks()]


def eval_tasks_with_examples() -> list[Task]:
    """`eval_tasks`, each after `EXAMPLES`."""
    return [_after(EXAMPLES, task) for task in eval_tasks()]


def thoughtful_train_tasks() -> list[Task]:
    """`train_tasks`, each after `THOUGHTFUL_EXAMPLES`."""
    return [_after(THOUGHTFUL_EXAMPLES, task) for task in train_tasks()]


def _held_out(item: str, level: str) -> bool:
    """One level of each item, and each level of two items."""
    return ITEMS.index(item) % len(ORDERS) == list(ORDERS).index(level)


def _task(item: str, level: str, request: str) -> Task:
    """Return a task. Its fields hold the data that only the sandbox and the reward may know."""
    name = f"{item}-{level}-{request}"
    chance = random.Random(name)  # the same in every process
    other = chance.choice([one for one in ITEMS if one != item])
    stock = {one: chance.choice(list(ORDERS)) for one in ITEMS} | {item: level}
    return Task(prompt=request.format(item=item, other=other), fields={"item": item, "stock": stock})


def _after(examples: Sequence[Message], task: Task) -> Task:
    return Task(prompt=[*examples, *task.messages], fields=task.fields)
