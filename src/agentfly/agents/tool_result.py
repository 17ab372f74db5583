"""ToolResult: the result of a tool call, and the conversion of a tool's return value to it."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from pydantic import BaseModel

from agentfly.core.errors import ToolDefinitionError, ToolError, UsageError, error_message
from agentfly.core.json_values import has_own_str, score_of, to_json_line, to_json_value
from agentfly.core.messages import Image, is_raw_image
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.resources.engine.lease import NOT_AWAITED

logger = logging.getLogger(__name__)

_COROUTINE_TEXT = re.compile(rf"<coroutine object (\S+){re.escape(NOT_AWAITED)} at 0x[0-9a-f]+>")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call. Any other return value of a tool is converted to one.

    Attributes:
        observation: the text for the model. A tool may give any value here that it could return.
        reward: the reward of the call, if there is one.
        done: whether the task is finished.
        state: the environment's state after the call, if known: a JSON value, or NumPy numbers and arrays. Numbers that
            are not finite become null.
        image: an image for the model, or a list of images: `agentfly.Image`, PIL images, or NumPy arrays of bytes with
            shape (height, width, 3 or 4). After a call it is a tuple of `agentfly.Image`.
        info: further data for readers of trajectories; the model does not see it. Values that JSON cannot hold are
            recorded as text.
    """

    observation: Any = ""
    reward: float | None = None
    done: bool = False
    state: Any = None
    image: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and score_of(self.reward) is None:
            raise ToolDefinitionError(
                f"ToolResult(reward={self.reward!r}): the reward of a tool call must be a finite number up to 1e30, or "
                "None."
            )
        if not isinstance(self.info, Mapping):
            raise ToolDefinitionError(
                f"ToolResult(info={truncate_middle(repr(self.info), MAX_ECHO_CHARS)}): it must be a dict."
            )

    @property
    def images(self) -> tuple[Image, ...]:
        """The images, in order.

        Raises:
            ToolDefinitionError: a value among them is not an image.
        """
        given = self.image if isinstance(self.image, (list, tuple)) else () if self.image is None else (self.image,)
        return tuple(map(_as_image, given))


def to_tool_result(tool: str, value: Any, reported: set[str] | None = None) -> ToolResult:
    """Convert a tool's return value to a result with a text as observation and a tuple of `Image`.

    Args:
        tool: name of the tool, for messages.
        value: the return value: a JSON value, an object with a ``__str__``, an image, a list of texts and images, or a
            `ToolResult` with such an observation.
        reported: warnings that were logged before and are not repeated.

    Raises:
        ToolError: an image has more pixels than `agentfly.core.messages.MAX_PIXELS`.
        ToolDefinitionError: the value has a coroutine that was not awaited, or an object without a text form, such as a
            generator; or the state is not a JSON value.
    """
    if isinstance(value, str):
        _require_awaited(tool, value)
        return ToolResult(_as_text(value), image=())
    result = value if isinstance(value, ToolResult) else ToolResult(value)
    if any(map(inspect.iscoroutine, _parts(result.observation))):
        raise ToolDefinitionError(
            f"The tool {tool!r} returned a coroutine in its result, {truncate_middle(repr(value), MAX_ECHO_CHARS)}: an "
            "`await` is missing before the call that made it. In a sync tool write context.wait(…)."
        )
    for part in {type(part): part for part in (result.observation, *_parts(result.observation))}.values():
        if _says_nothing(part):
            raise ToolDefinitionError(
                f"The tool {tool!r} returned a {type(part).__name__}, of which the model could read nothing but where "
                "it lies in memory. Return what it holds, for instance list(…), or a text."
            )
    text, shown = _text_and_images(result.observation)
    _require_awaited(tool, text)
    shown += result.images
    for image in shown:
        try:
            image.check_size()
        except UsageError as error:  # of what the tool found, and of nothing that its author wrote
            raise ToolError(f"The tool's result cannot be shown: {error}") from error
    return replace(
        result,
        observation=text,
        reward=None if result.reward is None else score_of(result.reward),
        done=bool(result.done),
        state=_state(tool, result.state),
        image=shown,
        info=_info(tool, result.info, reported if reported is not None else set()),
    )


def _require_awaited(tool: str, text: str) -> None:
    """Refuse the text of a coroutine of a resource, as in ``str(box.run(…))`` without ``await``."""
    if NOT_AWAITED in text and (found := _COROUTINE_TEXT.search(text)):
        raise ToolDefinitionError(
            f"The tool {tool!r} returned the text of a coroutine instead of its result, {found[0]}: an `await` is "
            f"missing before the call of {found[1]}. In a sync tool write context.wait(…)."
        )


def _parts(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the value itself."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _says_nothing(value: Any) -> bool:
    """Return whether an object's text is only its address, as for iterators and objects without a repr."""
    if has_own_str(value):
        return False
    if isinstance(value, Iterator | AsyncIterator):
        return True
    return not any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]) and not _has_form(value)


def _has_form(value: Any) -> bool:
    try:
        to_json_value(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _text_and_images(value: Any) -> tuple[str, tuple[Image, ...]]:
    """Split a value into text and images. In a list, a label replaces each image that text follows."""
    if _is_image(value):
        return "", (_as_image(value),)
    if not (isinstance(value, (list, tuple)) and any(map(_is_image, value))):
        return _as_text(value), ()
    texts: list[str] = []
    images: list[Image] = []
    last_text = max((place for place, part in enumerate(value) if not _is_image(part)), default=-1)
    for place, part in enumerate(value):
        if not _is_image(part):
            texts.append(_as_text(part))
            continue
        images.append(_as_image(part))
        if place < last_text:
            texts.append(f"[image {len(images)}]")
    return "\n".join(texts), tuple(images)


def _is_image(value: Any) -> bool:
    return isinstance(value, Image) or is_raw_image(value)


def _as_image(value: Any) -> Image:
    if not _is_image(value):
        raise ToolDefinitionError(
            f"ToolResult(image=…) holds {truncate_middle(repr(value), MAX_ECHO_CHARS // 4)}, which is no image. Give "
            "an image of PIL, a NumPy array of bytes (height by width by 3), or agentfly.Image(data, 'image/png')."
        )
    return Image.of(value)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if not isinstance(value, str):
        try:
            value = str(value) if _reads_as_text(value) else json.dumps(to_json_value(value), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    text: str = value
    if text.isascii():
        return text
    return text.encode("utf-8", errors="replace").decode()  # a lone surrogate could not be tokenized or saved


def _reads_as_text(value: Any) -> bool:
    """Whether an object has its own text form. That of pydantic models and enums is for programmers only."""
    if isinstance(value, (BaseModel, Enum)):
        return False
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) == ()  # NumPy's, which reads as Python's do
    return not is_scalar and has_own_str(value)


def _state(tool: str, value: Any) -> Any:
    """Convert a state to JSON values. States are compared, so a textual description would not do.

    Raises:
        ToolDefinitionError: it is not a JSON value.
    """
    try:
        return to_json_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolDefinitionError(
            f"The tool {tool!r} returned ToolResult(state=…) with something that JSON cannot hold: "
            f"{error_message(error)}. Return numbers, texts, lists, dicts, arrays, dataclasses or pydantic models."
        ) from error


def _info(tool: str, value: Mapping[str, Any], reported: set[str]) -> Any:
    """Convert ``info`` to JSON values, with text for other objects. That is logged once."""
    if not value:
        return {}
    try:
        return to_json_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"info: {error_message(error)}"
        if message not in reported:
            reported.add(message)
            logger.warning(
                "The tool %r returned ToolResult(info=…) with something that JSON cannot hold: %s. It is recorded as "
                "text; this is not reported again.",
                tool,
                error_message(error),
            )
        return json.loads(to_json_line(value))
