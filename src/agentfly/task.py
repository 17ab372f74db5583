"""Task: one row of a data set."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agentfly.errors import ConfigError
from agentfly.messages import Message


@dataclass(frozen=True)
class Task:
    """One row of a data set: a prompt and any other fields.

    Args:
        prompt: what the agent is asked: a text, which becomes one user message, or a list of messages.
        fields: everything else of the row. A reward gets a field by naming a parameter after it.
        id: a name that is stable between runs; made from the content when it is not given.
    """

    prompt: str | Sequence[Message]
    fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            try:
                content = json.dumps([self.prompt, dict(self.fields)], sort_keys=True, default=repr)
            except TypeError:  # keys that JSON does not know
                content = repr((self.prompt, self.fields))
            object.__setattr__(self, "id", hashlib.sha256(content.encode()).hexdigest()[:12])

    def __getitem__(self, name: str) -> Any:
        """A field.

        Raises:
            KeyError: the task has none of that name; the message names those it has.
        """
        if name not in self.fields:
            raise KeyError(f"the task {self.id} has no field {name!r}, only {sorted(map(str, self.fields))}")
        return self.fields[name]

    @property
    def messages(self) -> list[Message]:
        """The prompt as a list of messages; a message without text has the empty text."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [cast(Message, {**message, "content": message.get("content") or ""}) for message in self.prompt]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Task:
        """Make a task from a mapping that has ``prompt`` (or ``question``), perhaps ``id``, and any other fields."""
        fields = dict(row)
        for name in ("prompt", "question"):
            if name in fields:
                prompt = fields.pop(name)
                break
        else:
            near = difflib.get_close_matches("prompt", [str(name) for name in fields], n=1)
            cure = f"Did you mean {near[0]!r}?" if near else "Rename the field that holds what the agent is asked."
            raise ConfigError(
                "A task needs a field 'prompt' (a text or a list of messages); this row has only "
                f"{sorted(map(str, fields))}. {cure}"
            )
        return cls(prompt=prompt, id=str(fields.pop("id", "")), fields=fields)

    def to_row(self) -> dict[str, Any]:
        """The inverse of `from_row`."""
        return {"id": self.id, "prompt": self.prompt, **self.fields}


def as_tasks(tasks: Iterable[Task | Mapping[str, Any] | str] | str | Path) -> list[Task]:
    """Tasks from whatever a user has: tasks, mappings, prompts, or the path of a JSON-lines file.

    Raises:
        ConfigError: a row has no prompt, or the file cannot be read as JSON lines.
    """
    if isinstance(tasks, (str, Path)):
        return _read_task_file(Path(tasks))
    made = [_as_task(task) for task in tasks]
    if not made:
        raise ConfigError("There is no task to run: the collection of tasks is empty.")
    for task in made:
        _require_messages(task)
        _require_json(task)
    return made


def _as_task(task: Task | Mapping[str, Any] | str) -> Task:
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return Task(prompt=task)
    if not isinstance(task, Mapping):
        raise ConfigError(
            f"{task!r} is no task. Give a Task, a mapping with a 'prompt', or the prompt itself as a text."
        )
    return Task.from_row(task)


def _require_messages(task: Task) -> None:
    """Refuse a prompt that is neither a text nor messages with text."""
    if isinstance(task.prompt, str):
        return
    for message in task.prompt if isinstance(task.prompt, Sequence) else [task.prompt]:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(
                f"The prompt of task {task.id!r} holds {message!r}, which is no message. A prompt is a text, or a list "
                "of messages such as {'role': 'user', 'content': 'hello'}."
            )
        if not isinstance(message.get("content"), str | None):
            raise ConfigError(
                f"The content of a message of task {task.id!r} is a {type(message['content']).__name__}, where a text "
                "is wanted. Write the parts of the content as one text."
            )


def _require_json(task: Task) -> None:
    """Refuse a task whose record could not be saved with its trajectories."""
    for name, value in [*task.fields.items(), ("prompt", task.prompt)]:
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode("utf-8")
            if not isinstance(name, str):
                raise TypeError("its name is not a text")
        except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
            raise ConfigError(
                f"The field {name!r} of task {task.id!r} cannot be saved as JSON: {error}. Tasks are saved with their "
                "trajectories: give texts, finite numbers, lists and mappings, for instance a date as a text."
            ) from None


def _read_task_file(path: Path) -> list[Task]:
    if not path.is_file():
        raise ConfigError(f"There is no file of tasks at {path}. Give the path of a JSON-lines file, one task a line.")
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not a JSON object: {error}.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is not a JSON object but a {type(row).__name__}.")
            try:
                tasks += as_tasks([row])
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    if not tasks:
        raise ConfigError(f"{path} holds no task. Write one JSON object a line, each with a 'prompt'.")
    return tasks
