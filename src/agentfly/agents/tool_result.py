"""ToolResult: what a tool call came to, and how whatever a tool returns becomes one."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from pydantic import BaseModel

from agentfly.core.errors import ToolDefinitionError, ToolError, UsageError, error_message
from agentfly.core.json_values import has_own_str, score_of, to_json_line, to_json_value
from agentfly.core.messages import Image, is_raw_image
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call came to. A tool that returns anything else has it turned into one.

    Attributes:
        observation: the text that the model is given. A tool may write here whatever it could return.
        reward: what the call was worth, if the tool says so.
        done: whether the task is finished.
        state: the state that the environment is in after the call, if the tool says so; anything that JSON can hold,
            and NumPy's numbers and arrays. What is no finite number becomes null.
        image: an image that the model is shown with the text, or several in a list: of `agentfly.Image`, of PIL, or a
            NumPy array of bytes, height by width by 3 or 4 colours. What comes out of a call is a tuple of
            `agentfly.Image`.
        info: anything else, for those who read trajectories; the model does not see it. What JSON cannot hold is
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
            ToolDefinitionError: something among them is no image.
        """
        given = self.image if isinstance(self.image, (list, tuple)) else () if self.image is None else (self.image,)
        return tuple(map(_as_image, given))


def to_tool_result(tool: str, value: Any, told: set[str] | None = None) -> ToolResult:
    """What a tool returned, as a result whose observation is a text and whose images are a tuple of `Image`.

    Args:
        tool: name of the tool, for messages.
        value: what it returned: any value that JSON can hold, an object with words of its own, an image, a list that
            mixes texts and images, or a `ToolResult` with such an observation.
        told: what the tool's author was told before, and is not told again.

    Raises:
        ToolError: an image has more pixels than `agentfly.core.messages.MAX_PIXELS`.
        ToolDefinitionError: it holds a coroutine that was never awaited, or something that has no words, such as a
            generator; or JSON cannot hold the state.
    """
    if isinstance(value, str):
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
        info=_info(tool, result.info, told if told is not None else set()),
    )


def _parts(value: Any) -> Iterable[Any]:
    """A value, and what it holds, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _says_nothing(value: Any) -> bool:
    """Whether an object reads as its address alone: what gives values once, and what has no words at all."""
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
    """A value as a text and images. In a list, each image that text follows is named where it stood."""
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
    """Whether an object reads as text in its own words. A pydantic model's are for programmers only."""
    if isinstance(value, (BaseModel, Enum)):
        return False
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) == ()  # NumPy's, which reads as Python's do
    return not is_scalar and has_own_str(value)


def _state(tool: str, value: Any) -> Any:
    """A state as JSON gives it back. States are compared, and one that is only described would be another each time.

    Raises:
        ToolDefinitionError: JSON cannot hold it.
    """
    try:
        return to_json_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolDefinitionError(
            f"The tool {tool!r} returned ToolResult(state=…) with something that JSON cannot hold: "
            f"{error_message(error)}. Return numbers, texts, lists, dicts, arrays, dataclasses or pydantic models."
        ) from error


def _info(tool: str, value: Mapping[str, Any], told: set[str]) -> Any:
    """Further information as JSON gives it back, with text where JSON has no form; of that the author is told once."""
    if not value:
        return {}
    try:
        return to_json_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        said = f"info: {error_message(error)}"
        if said not in told:
            told.add(said)
            logger.warning(
                "The tool %r returned ToolResult(info=…) with something that JSON cannot hold: %s. It is recorded as "
                "text; this is not reported again.",
                tool,
                error_message(error),
            )
        return json.loads(to_json_line(value))
