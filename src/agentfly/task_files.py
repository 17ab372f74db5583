"""The rows of a file of tasks: JSON lines, JSON, CSV or parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentfly.errors import ConfigError, PrerequisiteError, type_of
from agentfly.installation import install_command
from agentfly.json_reader import RepeatedName, without_repeats

_CSV = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_PARQUET_MAGIC = b"PAR1"


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place there, such as ``line 3``.

    The ending of the name says what the file is: ``.csv`` and ``.tsv`` have a header line, ``.parquet`` is read by
    pyarrow, ``.json`` is one list of objects. Every other file is JSON lines.

    Raises:
        ConfigError: there is no such file, or it is not what its ending says, or a row is not an object or has one name
            twice.
        PrerequisiteError: pyarrow is needed and not installed.
    """
    if not path.is_file():
        raise ConfigError(
            f"There is no file of tasks at {path}. Give the path of a file with one task a row, or tasks as a "
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
    """How to make a list of objects of what a file holds in its place."""
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
