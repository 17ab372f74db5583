"""Task: one row of a data set, and the files that hold tasks: JSON lines, JSON, CSV or parquet."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from agentfly.core.errors import ConfigError, PrerequisiteError, UsageError, nearest_name, type_of
from agentfly.core.installation import install_command
from agentfly.core.json_values import brief, own_copy
from agentfly.core.lenient_json import RepeatedName, require_storable, without_repeats
from agentfly.core.messages import Image, Message, images_of, message_to_json, parse_content

_CSV = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_PARQUET_MAGIC = b"PAR1"


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows of a file, each with its location, such as ``line 3``.

    The suffix determines the file type: ``.csv`` and ``.tsv`` have a header line, ``.parquet`` is read with pyarrow,
    ``.json`` is one list of objects. Any other file is JSON lines.

    Raises:
        ConfigError: the file does not exist or does not match its suffix, or a row is not an object or has a name
            twice.
        PrerequisiteError: pyarrow is needed and not installed.
    """
    if not path.is_file():
        found = (
            f"{str(path)!r} is a directory, not a file of tasks" if path.is_dir() else f"There is no file {str(path)!r}"
        )
        raise ConfigError(
            f"{found}. Give the path of a file with one task a row, or tasks as a "
            "list, such as [{'prompt': 'What is 6 times 7?', 'answer': '42'}] or ['What is 6 times 7?']."
        )
    ending = path.suffix.lower()
    if ending == ".parquet":
        return _parquet_rows(path)
    text = _text_of(path)
    if ending in _CSV:
        return _csv_rows(path, text, _CSV[ending])
    if ending == ".json":
        return _json_rows(path, text)
    return _json_line_rows(path, text)


def _text_of(path: Path) -> str:
    content = path.read_bytes()
    if content.startswith(_PARQUET_MAGIC):
        raise ConfigError(f"{path} is a parquet file. Let its name end in .parquet.")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:4]:
        raise ConfigError(f"{path} is UTF-16 or UTF-32 text. Save it as UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}. Save the file "
            "as UTF-8."
        ) from None


def _json_line_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=without_repeats)
        except RepeatedName as error:
            raise _twice(f"{path}, line {number}", error.name) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} is not a JSON object: {error}. The file is read as JSON lines, one object a "
                "line; for other kinds let its name end in .json, .csv, .tsv or .parquet."
            ) from None
        yield f"line {number}", _object(row, f"{path}, line {number}")


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(text, object_pairs_hook=without_repeats)
    except RepeatedName as error:
        raise _twice(str(path), error.name) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. If it has one object a line, call it .jsonl.") from None
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path} holds {type_of(rows)} at its top, and has to hold a list of objects. {_as_list(rows)}"
        )
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", _object(row, f"{path}, row {number}")


def _as_list(value: Any) -> str:
    """Return advice for turning a file's content into a list of objects."""
    lists = [name for name, held in value.items() if isinstance(held, list)] if isinstance(value, dict) else []
    if len(lists) == 1:
        return f"Leave the list under {lists[0]!r} alone in the file."
    if isinstance(value, dict):
        return "If it is one task, put [ before it and ] behind it; if there is one object a line, call it .jsonl."
    return "Write [{…}, {…}], an object a task."


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(max(len(text), 131_072))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = list(reader.fieldnames or [])
    except csv.Error as error:
        raise ConfigError(f"{path}, line 1 is not CSV: {error}.") from None
    other = next((name for sign, name in _SEPARATORS.items() if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        raise ConfigError(
            f"{path}: the header line names a single field, {header[0]!r}. Its cells seem to be separated by {other}, "
            f"where a file called {path.suffix} has {_SEPARATORS[delimiter]}. Save it with these, or call it by the "
            "ending that fits: .csv for commas, .tsv for tabs."
        )
    if not header and text.strip():
        raise ConfigError(f"{path} begins with a blank line. Its first line has to name the columns.")
    _require_one_of_each(header, f"The header line of {path}")
    while True:
        place = f"line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{path}, {place} is not CSV: {error}.") from None
        if row is None:
            return
        if None in row or None in row.values():
            raise ConfigError(
                f"{path}, {place} has another number of cells than the header line has, which names "
                f"{', '.join(header)}. Put cells with a {delimiter!r} in them in quotes."
            )
        yield place, dict(row)


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise PrerequisiteError(
            f"{path}: parquet files are read by pyarrow, not installed here. Get it with: {install_command('data')}"
        )
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _require_one_of_each(file.schema_arrow.names, str(path))
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a parquet file that can be read: {error}") from None
    except ValueError as error:  # text that is not UTF-8, or a time that Python has no type for
        raise ConfigError(
            f"{path} holds a value behind row {number} that Python cannot hold: {error}. Write that column as text in "
            "UTF-8, or as numbers."
        ) from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object but {type_of(row)}.")
    return row


def _require_one_of_each(columns: Sequence[str], where: str) -> None:
    """Refuse columns of one name: a row holds one value a name, so all but one would be lost.

    Raises:
        ConfigError: there are such columns.
    """
    for name, count in Counter(columns).items():
        if count > 1:
            raise _twice(where, name)


def _twice(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where} has the name {name[:100]!r} more than once, and a task keeps one value a name. Rename or remove the "
        "others."
    )


_PROMPT_NAMES = ("problem", "question", "query", "instruction", "input", "messages", "conversation", "text")
"""Names under which data sets commonly have the prompt."""


@dataclass(frozen=True, repr=False)
class Task:
    """One row of a data set: a prompt and any other fields.

    Args:
        prompt: the request to the agent: a text, which becomes one user message, or a list of messages. The content of
            a message may be a list of texts and images (see `agentfly.core.messages.parse_content`). Images are loaded
            here.
        fields: all other fields of the row. A reward gets a field through a parameter with its name.
        id: a name that is stable between runs; by default a hash of the content. An integer becomes text.

    Raises:
        ConfigError: the id is neither text nor an integer; or a message contains something other than text and images,
            or an image that cannot be loaded.
    """

    prompt: str | Sequence[Message]
    fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise ConfigError(
                f"Task(fields={brief(self.fields)}): it must be a mapping of names to values, as in {{'answer': '42'}}."
            )
        object.__setattr__(self, "prompt", _with_images(self.prompt, None))
        object.__setattr__(self, "id", _id_of(self.id))
        if not self.id:
            try:
                content = json.dumps([self.prompt_to_json(), dict(self.fields)], sort_keys=True, default=repr)
            except TypeError:  # keys that JSON does not support
                content = repr((self.prompt, self.fields))
            object.__setattr__(self, "id", hashlib.sha256(content.encode()).hexdigest()[:12])

    def __repr__(self) -> str:
        """A line, however much the task holds."""
        fields = f", fields={brief(dict(self.fields))}" if self.fields else ""
        return f"Task(id={self.id!r}, prompt={brief(self.prompt)}{fields})"

    def __getitem__(self, name: str) -> Any:
        """A field.

        Raises:
            KeyError: the task has none of that name; the message names those it has.
        """
        if name not in self.fields:
            raise KeyError(f"the task {self.id} has no field {name!r}, only {sorted(map(str, self.fields))}")
        return self.fields[name]

    @property
    def canonical_json(self) -> str:
        """All that the task is, as a text: tasks of the same content are the same."""
        return json.dumps(self.to_row(), sort_keys=True, default=repr)

    @property
    def messages(self) -> list[Message]:
        """The prompt as a list of messages; a message without text has the empty text."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [cast(Message, {**message, "content": message.get("content") or ""}) for message in self.prompt]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Task:
        """Make a task from a mapping that has ``prompt`` (or ``question``), perhaps ``id``, and any other fields."""
        if not isinstance(row, Mapping):
            raise ConfigError(f"{brief(row)} is no row of tasks. Give a mapping with a 'prompt'.")
        fields = dict(row)
        for name in ("prompt", "question"):
            if name in fields:
                prompt = fields.pop(name)
                break
        else:
            raise ConfigError(
                "A task needs a field 'prompt' (a text or a list of messages); this row has only "
                f"{sorted(map(str, fields))}. {_how_to_name_a_prompt(fields)}"
            )
        return cls(prompt=prompt, id=fields.pop("id", ""), fields=fields)

    def copy(self) -> Task:
        """Return a task with the same content and with lists and mappings of its own, so that it can be modified."""
        return replace(self, prompt=own_copy(self.prompt), fields=own_copy(dict(self.fields)))

    def to_row(self) -> dict[str, Any]:
        """The inverse of `from_row`, with images as data URLs."""
        return {"id": self.id, "prompt": self.prompt_to_json(), **self.fields}

    def prompt_to_json(self) -> Any:
        """The prompt as a JSON value, with images as data URLs. A task created from it is equal to this one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            return prompt
        return [message_to_json(message) if _has_parts(message) else message for message in prompt]


def _id_of(given: Any) -> str:
    """Return an id as text; empty if none is given.

    Raises:
        ConfigError: it is neither text nor a whole number.
    """
    if given is None:
        return ""
    if isinstance(given, Integral) and not isinstance(given, bool):
        return str(int(given))
    if not isinstance(given, str):
        raise ConfigError(
            f"A task has the id {given!r:.100}, a {type(given).__name__}. Give a text or a whole number, or leave it "
            "out: it is then made of what the task holds."
        )
    try:
        given.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"A task has the id {given!r:.100}, which holds half of a surrogate pair.") from None
    return given


def _how_to_name_a_prompt(fields: Mapping[str, Any]) -> str:
    """Return advice for a row without a prompt: the field to rename, if one looks like a prompt."""
    names = [str(name) for name in fields]
    near = next((name for name in _PROMPT_NAMES if name in names), None) or nearest_name("prompt", names)
    if near is not None:
        return f"Rename {near!r} to 'prompt'."
    return "Rename the field that holds what the agent is asked to 'prompt'."


Row = Task | Mapping[str, Any] | str
"""A task in any accepted form: a `Task`, a mapping with a ``prompt``, or the prompt."""

Tasks = Iterable[Row] | Mapping[str, Any] | Task | str | Path
"""Tasks in any accepted form: rows, a single row, or the path of a file."""


def to_tasks(tasks: Tasks) -> list[Task]:
    """Convert tasks, mappings, prompts, a single one of these, or the path of a file to a list of tasks.

    A single text is a path. `read_rows` lists the supported file types. Image paths in a file's tasks are relative to
    the directory of the file.

    Raises:
        ConfigError: a row has no prompt, an image is invalid, the file cannot be read, or two different tasks have the
            same id. The same task may occur more than once.
    """
    if isinstance(tasks, (str, Path)):
        return _read_task_file(Path(tasks))
    if isinstance(tasks, (Task, Mapping)):
        tasks = [tasks]
    if not isinstance(tasks, Iterable):
        raise _no_tasks(tasks)
    made = [_as_task(task) for task in tasks]
    if not made:
        raise ConfigError("There is no task to run: the collection of tasks is empty.")
    for task in made:
        _require_messages(task)
        _require_json(task)
    _require_own_ids(made, [f"tasks[{index}]" for index in range(len(made))])
    return made


def shared_tasks(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> str:
    """Return a warning about held-out tasks that are also trained on; empty if there are none.

    Tasks are compared by content, regardless of their ids.
    """
    held_out = [_held(task) for task in eval_tasks]
    wanted = set(held_out)
    trained_on = {held for task in tasks if (held := _held(task)) in wanted}
    shared = sum(held in trained_on for held in held_out)
    if not shared:
        return ""
    count = f"{shared} of {len(held_out)} held-out tasks are" if len(held_out) > 1 else "The held-out task is"
    return (
        f"{count} among the tasks that are trained on, so evaluations do not show how the agent does on new tasks. "
        "Name others in eval_tasks."
    )


def _held(task: Task) -> str:
    """Return the content of a task, without its id."""
    return json.dumps([task.prompt_to_json(), dict(task.fields)], sort_keys=True, default=repr)


def tasks_to_read(tasks: Tasks) -> Iterable[Row]:
    """Return tasks for a reader that takes them one by one.

    Lists and files are read and validated now. Rows of any other iterable are passed on unchanged, for `as_task`.

    Raises:
        ConfigError: as in `to_tasks`.
    """
    if isinstance(tasks, (str, Path, Task, Mapping)):
        return to_tasks(tasks)
    if not isinstance(tasks, Iterable):
        raise _no_tasks(tasks)
    if isinstance(tasks, (list, tuple)) and not all(isinstance(task, Task) for task in tasks):
        return to_tasks(tasks)
    return tasks


def as_task(row: Row) -> Task:
    """Convert a row to a task, and validate it unless it already is a task. A single text is a prompt.

    Raises:
        ConfigError: as in `to_tasks`.
    """
    return row if isinstance(row, Task) else to_tasks([row])[0]


def _no_tasks(found: object) -> ConfigError:
    return ConfigError(
        f"tasks is {type_of(found)}, which holds no tasks. Give a list of tasks, of mappings with a 'prompt' or of "
        "prompts, or the path of a file."
    )


def _as_task(task: Row) -> Task:
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
    """Raise unless a prompt is a text, or messages with text and valid images."""
    if isinstance(task.prompt, str):
        return
    for message in task.prompt if isinstance(task.prompt, Sequence) else [task.prompt]:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(
                f"The prompt of task {task.id!r} holds {message!r}, which is no message. A prompt is a text, or a list "
                "of messages such as {'role': 'user', 'content': 'hello'}."
            )
        if _has_parts(message):
            _require_sound(task, images_of(message["content"]))
        elif not isinstance(message.get("content"), str | None):
            raise ConfigError(
                f"The content of a message of task {task.id!r} is {type_of(message['content'])}, where a text "
                "is wanted, or a list of texts and images."
            )


def _require_sound(task: Task, images: Iterable[Image]) -> None:
    for image in images:
        try:
            image.check()
        except UsageError as error:
            raise ConfigError(f"Task {task.id!r}: {error}") from error


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))


def _with_images(prompt: Any, folder: Path | None) -> Any:
    """Return a prompt with its images loaded. An invalid prompt stays as it is, and is rejected in `to_tasks`."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not any(map(_has_parts, prompt)):
        return prompt
    try:
        return [
            {**message, "content": parse_content(message["content"], folder=folder)} if _has_parts(message) else message
            for message in prompt
        ]
    except UsageError as error:
        raise ConfigError(f"A message of a task's prompt: {error}") from error


def _require_json(task: Task) -> None:
    """Raise unless a task can be saved with its trajectories."""
    for name, value in [*task.fields.items(), ("prompt", task.prompt_to_json())]:
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode("utf-8")
            require_storable(value)
            if not isinstance(name, str):
                raise TypeError("its name is not a text")
        except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError too
            raise ConfigError(
                f"The field {name!r} of task {task.id!r} cannot be saved as JSON: {error}. Tasks are saved with their "
                "trajectories: give texts, finite numbers, lists and mappings, for instance a date as a text."
            ) from None


def _require_own_ids(tasks: Sequence[Task], places: Sequence[str]) -> None:
    """Raise if two different tasks have the same id, which identifies results, groups and rollouts."""
    first: dict[str, int] = {}
    for index, task in enumerate(tasks):
        before = first.setdefault(task.id, index)
        if before != index and tasks[before].canonical_json != task.canonical_json:
            raise ConfigError(
                f"{places[before]} and {places[index]} are not the same task, and both have the id "
                f"{task.id!r}. Give each task an id of its own, or none: it is then made of what the task holds."
            )


def _read_task_file(path: Path) -> list[Task]:
    tasks: list[Task] = []
    places: list[str] = []
    for place, row in read_rows(path):
        try:
            for name in ("prompt", "question"):
                if name in row:
                    row[name] = _with_images(row[name], path.parent)
            tasks += to_tasks([row])
            places.append(place)
        except ConfigError as error:
            raise ConfigError(f"{path}, {place}: {error}") from None
    if not tasks:
        raise ConfigError(f"{path} holds no task. Write one row a task, each with a 'prompt'.")
    try:
        _require_own_ids(tasks, places)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return tasks
