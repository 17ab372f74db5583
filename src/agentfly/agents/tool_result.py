"""ToolResult: what a tool call came to, and how whatever a tool returns becomes one."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Real
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.errors import ToolDefinitionError
from agentfly.images import Image, is_pixels


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call came to. A tool that returns anything else has it turned into one.

    Attributes:
        observation: the text that the model is given. A tool may write here whatever it could return.
        reward: what the call was worth, if the tool says so.
        done: whether the task is finished.
        state: the state that the environment is in after the call, if the tool says so; anything that JSON can hold.
        image: an image that the model is shown with the text, or several in a list: of `agentfly.Image`, of PIL, or a
            NumPy array of bytes, height by width by 3 or 4 colours. What comes out of a call is a tuple of
            `agentfly.Image`.
        info: anything else that JSON can hold, for those who read trajectories; the model does not see it.
    """

    observation: Any = ""
    reward: float | None = None
    done: bool = False
    state: Any = None
    image: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and not (isinstance(self.reward, Real) and math.isfinite(self.reward)):
            raise ToolDefinitionError(
                f"ToolResult(reward={self.reward!r}): the reward of a tool call must be a finite number, or None."
            )
        if not isinstance(self.info, Mapping):
            raise ToolDefinitionError(f"ToolResult(info={excerpt(repr(self.info), ECHO_CHARS)}): it must be a dict.")

    @property
    def images(self) -> tuple[Image, ...]:
        """The images, in order.

        Raises:
            ToolDefinitionError: something among them is no image.
        """
        given = self.image if isinstance(self.image, (list, tuple)) else () if self.image is None else (self.image,)
        return tuple(map(_as_image, given))


def as_result(tool: str, value: Any) -> ToolResult:
    """What a tool returned, as a result whose observation is a text and whose images are a tuple of `Image`.

    Args:
        tool: name of the tool, for messages.
        value: what it returned: any value that JSON can hold, an object with words of its own, an image, a list that
            mixes texts and images, or a `ToolResult` with such an observation.

    Raises:
        ToolDefinitionError: it holds a coroutine that was never awaited, or JSON cannot hold the state or the info.
    """
    if isinstance(value, str):
        return ToolResult(_as_text(value), image=())
    result = value if isinstance(value, ToolResult) else ToolResult(value)
    if any(map(inspect.iscoroutine, _parts(result.observation))):
        raise ToolDefinitionError(
            f"The tool {tool!r} returned a coroutine in its result, {excerpt(repr(value), ECHO_CHARS)}: an "
            "`await` is missing before the call that made it. In a sync tool write context.wait(…)."
        )
    text, shown = _text_and_images(result.observation)
    return replace(
        result,
        observation=text,
        reward=None if result.reward is None else float(result.reward),
        done=bool(result.done),
        state=_as_json(tool, "state", result.state),
        image=(*shown, *result.images),
        info=_as_json(tool, "info", dict(result.info)),
    )


def _parts(value: Any) -> Iterable[Any]:
    """A value, and what it holds, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


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
    return isinstance(value, Image) or is_pixels(value)


def _as_image(value: Any) -> Image:
    if not _is_image(value):
        raise ToolDefinitionError(
            f"ToolResult(image=…) holds {excerpt(repr(value), ECHO_CHARS // 4)}, which is no image. Give an image of "
            "PIL, a NumPy array of bytes (height by width by 3), or agentfly.Image(data, 'image/png')."
        )
    return Image.of(value)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if not isinstance(value, str):
        try:
            value = str(value) if _has_words(value) else json.dumps(to_jsonable_python(value), ensure_ascii=False)
        except (PydanticSerializationError, ValueError, RecursionError):
            value = str(value)
    text: str = value
    if text.isascii():
        return text
    return text.encode("utf-8", errors="replace").decode()  # a lone surrogate could not be tokenized or saved


def _has_words(value: Any) -> bool:
    """Whether an object's class says how it reads as text. A pydantic model's does so for programmers only."""
    own = any("__str__" in vars(kind) for kind in type(value).__mro__[:-1])
    return own and not isinstance(value, (BaseModel, Enum))


def _as_json(tool: str, field: str, value: Any) -> Any:
    """``value`` as JSON gives it back, so that a saved trajectory is read as it was."""
    if value is None or value == {}:
        return value
    try:
        return json.loads(to_json(value, inf_nan_mode="strings"))
    except (ValueError, RecursionError) as error:
        raise ToolDefinitionError(
            f"The tool {tool!r} returned ToolResult({field}=…) with something that JSON cannot hold: {error}. "
            "Return numbers, texts, lists, dicts, dataclasses or pydantic models; of an array, array.tolist()."
        ) from error
