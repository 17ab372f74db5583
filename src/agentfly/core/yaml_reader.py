"""YAML as plain values, safe for untrusted text: texts, numbers, booleans, null, lists, and mappings with text keys.

All limits are checked before anything is built. Repeated anchors and deep nesting therefore cost no more than reading
the text. Every error names the place in the text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.error import Mark
from yaml.reader import ReaderError

from agentfly.core.errors import ConfigError

MAX_BYTES = 2**18
"""The longest text that is read."""

MAX_DEPTH = 32
"""Maximum nesting depth of lists and mappings, including the content of aliases."""

MAX_VALUES = 10_000
"""Maximum number of values, including those of aliases. Each `_TEXT` characters of a long text count as one."""

MAX_DIGITS = 100
"""The most characters of a number."""

_TEXT = 64
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"


class _Refused(yaml.MarkedYAMLError):
    """A text that could be read and is not."""


class _Size(NamedTuple):
    """The number of values that an anchor expands to."""

    values: int
    depth: int


def read_yaml(text: bytes | str, source: str) -> Any:
    """The one value that a YAML text holds; None if it holds none.

    Numbers are as YAML 1.2 has them (``1e-4`` is one). Words such as ``yes`` and ``off`` are truth values as in YAML
    1.1. Dates are texts.

    Args:
        text: the text, as UTF-8 or UTF-16 if it is bytes.
        source: its name in messages.

    Raises:
        ConfigError: it is not YAML, exceeds a bound, has a key twice or one that is no text, or holds something that is
            no plain value. The message says where.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source} cannot be read: it is longer than {MAX_BYTES} bytes. Write less into it.")
    if isinstance(text, bytes):
        text = _decoded(text, source)
    try:
        _within_bounds(text)
        return yaml.load(text, Loader=_Loader)
    except _Refused as error:
        raise ConfigError(f"{source}{_at(error.problem_mark)} cannot be read: {error.problem}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{source}{_at(mark)} is not YAML: {error.problem or error.context}.") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}, line {line} is not YAML: it holds a character that no YAML may hold.") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # PyYAML's own, of escapes that are none
        raise ConfigError(f"{source} is not YAML: {error}.") from error


def _decoded(text: bytes, source: str) -> str:
    coding = "utf-16" if text.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return text.decode(coding)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source}, line {line} cannot be read: it is not UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from error


def _at(mark: Mark | None) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _within_bounds(text: str) -> None:
    """Go over a text without building anything of it.

    Raises:
        _Refused: it exceeds a bound, an anchor holds itself, or a text holds a character that none may have.
        YAMLError: it is not YAML.
    """
    anchors: dict[str, _Size] = {}
    open_ones: list[tuple[str | None, _Size]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((event.anchor, _Size(1, 1)))
            size, name = _Size(0, 1), None
        elif isinstance(event, yaml.CollectionEndEvent):
            name, size = open_ones.pop()
        elif isinstance(event, yaml.ScalarEvent):
            name, size = event.anchor, _Size(1 + len(event.value) // _TEXT, 0)
            if _NO_TEXT.search(event.value):
                raise _refused("a text holds a character that none may have, such as \\0", event.start_mark)
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_ones):
                raise _refused(f"*{event.anchor} stands within what it stands for", event.start_mark)
            name, size = None, anchors.get(str(event.anchor), _Size(1, 0))
        else:
            continue
        if name is not None:
            anchors[name] = size
        if isinstance(event, yaml.CollectionStartEvent):
            depth = len(open_ones)
        else:
            depth = len(open_ones) + size.depth
            if open_ones:
                anchor, whole = open_ones[-1]
                size = _Size(whole.values + size.values, max(whole.depth, size.depth + 1))
                open_ones[-1] = anchor, size
        if depth > MAX_DEPTH:
            raise _refused(f"lists and mappings lie more than {MAX_DEPTH} deep within one another", event.start_mark)
        if size.values > MAX_VALUES:
            raise _refused(f"it holds more than {MAX_VALUES} values, what aliases repeat included", event.start_mark)


def _refused(why: str, mark: Any) -> _Refused:
    return _Refused(problem=why, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """Builds plain values only, without YAML's surprising types."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors = {
        **{
            f"{_TAG}{name}": SafeConstructor.yaml_constructors[f"{_TAG}{name}"]
            for name in ("null", "bool", "int", "float", "str", "seq", "map")
        },
        None: SafeConstructor.construct_undefined,
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a value. An invalid value is an error with its position."""
        number = node.tag in (f"{_TAG}int", f"{_TAG}float")
        if number and isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_DIGITS:
            raise _refused(f"a number has more than {MAX_DIGITS} characters; put a text in quotes", node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.removeprefix(_TAG)
            raise ConstructorError(None, None, f"found a value that is no {kind} ({error})", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping of texts, each of them there once."""
        known: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == f"{_TAG}merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
                written = f": write '{key.value}', in quotes" if isinstance(key, yaml.ScalarNode) else ""
                raise _refused(f"a key has to be a text{written}", key.start_mark)
            if key.value in known:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            known.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        "bool",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        list("yYnNtTfFoO"),
    ),
    ("int", r"[-+]?(?:0|0b[01][01_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|0o[0-7][0-7_]*|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
