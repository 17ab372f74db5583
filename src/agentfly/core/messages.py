"""Chat messages, images and tool calls as plain values, shared by every layer."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, Self, TypedDict, cast

from agentfly.core.errors import PrerequisiteError, UsageError, type_of
from agentfly.core.installation import install_command

_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
    b"II*\x00": "image/tiff",
    b"MM\x00*": "image/tiff",
}
"""First bytes of image files. WebP shares its first bytes with other formats and is checked separately."""

MAX_PIXELS = 2**25
"""Maximum number of pixels of an image: about 33 million, or 100 MB decoded, however small the file is."""

_PILLOW_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
"""Pillow's pixel modes that a PNG can hold."""

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Pattern of a valid tool name."""


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded picture.

    Attributes:
        data: the bytes of the file, for instance of a PNG.
        media_type: what they are, for instance ``image/png``.
    """

    data: bytes = field(repr=False)
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise UsageError(
                f"Image({self.data!r:.60}): it takes the bytes of a file. Read one by agentfly.Image.of('picture.png')."
            )
        if not isinstance(self.media_type, str):
            raise UsageError(f"Image(media_type={self.media_type!r:.60}): it must be a text, such as 'image/png'.")

    @property
    def url(self) -> str:
        """The image as a data URL, which is its form in JSON."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    @property
    def label(self) -> str:
        """The text that represents the image for people, for instance ``[image: image/png, 12 kB]``."""
        size = len(self.data)
        return f"[image: {self.media_type}, {f'{size} bytes' if size < 1000 else f'{size / 1000:.0f} kB'}]"

    @classmethod
    def of(cls, value: Any, *, folder: Path | None = None) -> Self:
        """Return an image from any supported form.

        Args:
            value: an `Image`, a PIL image, a NumPy array of bytes (height by width by 3 or 4 colours), a data URL, or
                the path of a file.
            folder: directory that a relative path starts from; by default the current directory.

        Raises:
            UsageError: the value has another form, the file is missing, or it is not a picture.
            PrerequisiteError: the value is a NumPy array, and Pillow is not installed.
        """
        if isinstance(value, Image):
            return cls(value.data, value.media_type)
        if is_raw_image(value):
            return cls(_png(value), "image/png")
        if isinstance(value, str) and value.startswith("data:"):
            return cls.from_url(value)
        if isinstance(value, str) and "://" in value[:16]:
            raise UsageError(
                f"An image is given by the address {value[:80]!r}, and images are fetched from nowhere, so that a task "
                "stays what it is. Download it, and give the file's path, or its bytes: agentfly.Image(data, "
                "'image/png')."
            )
        if not isinstance(value, (str, Path)):
            raise UsageError(
                f"{type(value).__name__} is no image. Give agentfly.Image(data, 'image/png'), the path of a file, a "
                "data URL, or an image of PIL."
            )
        path = (folder or Path()) / value
        if not path.is_file():
            raise UsageError(f"There is no image at {path}. Give the path of a file, or a data URL.")
        data = path.read_bytes()
        found = _media_type(data)
        if found is None:
            raise UsageError(f"{path} is no picture of a known kind: give a PNG, JPEG, GIF, WebP, BMP or TIFF.")
        return cls(data, found)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The inverse of `url`.

        Raises:
            UsageError: it is no data URL of an image in base64.
        """
        head, comma, body = str(url).partition(",")
        media_type, _, coding = head.removeprefix("data:").rpartition(";")
        if not (head.startswith("data:image/") and comma and coding == "base64"):
            raise UsageError(
                f"An image is wanted as a data URL (data:image/png;base64,…), found {url!r:.60}. Read the file and "
                "give its bytes: agentfly.Image(data, 'image/png')."
            )
        try:
            return cls(base64.b64decode(body, validate=True), media_type)
        except binascii.Error as error:
            raise UsageError(f"The data URL of an image is damaged: {error}.") from error

    def check(self) -> None:
        """Check that the bytes are a picture: their beginning and, if Pillow is installed, their structure.

        Raises:
            UsageError: they are none, or of another kind than the media type says, or have more pixels than
                `MAX_PIXELS`.
        """
        found = _media_type(self.data)
        if found is None and self.media_type in {*_BEGINNINGS.values(), "image/webp"}:
            raise UsageError(
                f"{self.label} holds no picture: its bytes begin with {self.data[:8]!r}. Give the bytes of the file as "
                "they are, neither decoded nor as text."
            )
        if found is not None and found != self.media_type:
            raise UsageError(f"{self.label} is {found} by its bytes. Say agentfly.Image(data, {found!r}).")
        if importlib.util.find_spec("PIL") is not None:
            with self.opened() as picture, self._readable():
                picture.verify()

    def check_size(self) -> None:
        """Check that an image has at most `MAX_PIXELS`, if Pillow is installed and can read it.

        Raises:
            UsageError: it has more.
        """
        if importlib.util.find_spec("PIL") is None:
            return
        try:
            self.opened().close()
        except _Unreadable:
            return

    def opened(self) -> Any:
        """Return the picture as opened by Pillow, before decoding.

        Raises:
            UsageError: it cannot be read, or has more pixels than `MAX_PIXELS`.
        """
        from PIL import Image as Pillow

        try:
            with self._readable():
                picture = Pillow.open(io.BytesIO(self.data))
        except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:  # says the number
            raise UsageError(f"{self.label} has too many pixels: {error}. {_SMALLER}") from error
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise UsageError(f"{self.label} has {width} x {height} pixels, more than {MAX_PIXELS:,}. {_SMALLER}")
        return picture

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SyntaxError, ValueError) as error:
            raise _Unreadable(
                f"{self.label} cannot be read as a picture: {error}. Is the file cut off? Save it anew as a PNG."
            ) from error


_SMALLER = "Make it smaller: a model sees no more of a large one."


class _Unreadable(UsageError):
    """An image that Pillow cannot read."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and the placeholder tokens that stand for it: ``start`` to ``stop`` (exclusive) of the ids around it."""

    image: Image
    start: int
    stop: int

    def shifted(self, by: int) -> PlacedImage:
        """The same image where its ids stand ``by`` tokens later."""
        return PlacedImage(self.image, self.start + by, self.stop + by)


def is_raw_image(value: Any) -> bool:
    """Whether a value is a picture that is not encoded: an image of PIL, or a NumPy array of bytes with colours."""
    pillow, numpy = map(
        sys.modules.get, ("PIL.Image", "numpy")
    )  # not imported here: code with such a value has imported it
    if pillow is not None and isinstance(value, pillow.Image):
        return True
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return bool(value.dtype == "uint8" and value.ndim == 3 and value.shape[2] in (3, 4))


def _png(pixels: Any) -> bytes:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise PrerequisiteError(
            f"A NumPy array becomes an image by the package Pillow ({error}): {install_command('images')}"
        ) from error
    picture = pixels if isinstance(pixels, Pillow.Image) else Pillow.fromarray(pixels)
    if picture.mode not in _PILLOW_MODES:
        picture = picture.convert("RGB")
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def _media_type(data: bytes) -> str | None:
    """Return the media type of a file by its first bytes; None if it is unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for beginning, kind in _BEGINNINGS.items() if data.startswith(beginning)), None)


Role = Literal["system", "user", "assistant", "tool"]


class TextPart(TypedDict):
    """A stretch of text in a message that holds images too."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a message."""

    type: Literal["image"]
    image: Image


Part = TextPart | ImagePart
Content = str | Sequence[Part]


class Message(TypedDict):
    """One message of a chat, in the shape that chat templates read.

    ``tool_calls`` have the shape of OpenAI's API, except that ``function.arguments`` is a mapping and no text.
    """

    role: Role
    content: Content
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for, as it was parsed.

    ``arguments`` is None, and ``error`` says why, when the text was recognisably a call but could not be parsed;
    such a call is never executed: its error becomes the observation.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None = field(default_factory=dict)
    error: str | None = None


def text_of(content: Content) -> str:
    """The text of a message's content, its images left out."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def images_of(content: Content) -> list[Image]:
    """The images of a message's content, in order."""
    if isinstance(content, str):
        return []
    return [part["image"] for part in content if part["type"] == "image"]


def parts_of(content: Content) -> Sequence[Part]:
    """A message's content in parts, a text as the only one."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def image_parts(images: Iterable[Image]) -> list[Part]:
    """Images as content."""
    return [{"type": "image", "image": image} for image in images]


def concat_content(*contents: Content) -> Content:
    """Contents one after another: a text if all of them are, and otherwise a list of parts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    return [part for content in contents for part in parts_of(content)]


def move_tool_images_to_user_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages in which tools answer in text only: the images of their results follow in a message of the user."""
    shown: list[Part] = []
    for message in messages:
        if message["role"] != "tool":
            if shown:
                yield {"role": "user", "content": shown}
                shown = []
            yield message
            continue
        shown += image_parts(images_of(message["content"]))
        yield {**message, "content": text_of(message["content"])}
    if shown:
        yield {"role": "user", "content": shown}


def text_with_image_labels(content: Content) -> str:
    """Return a message's content as text for people, with a label for each image."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else part["image"].label for part in content)


def parse_content(value: Any, *, folder: Path | None = None) -> Content:
    """Return a message's content from a user's value: a text, or a list of texts, images and OpenAI's parts.

    Parts are ``{"type": "text", "text": …}``, ``{"type": "image", "image": …}`` with any value that `Image.of` accepts,
    and ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}``. A list of texts only becomes one
    text.

    Args:
        value: the content; None is the empty text.
        folder: directory that relative paths of images start from; by default the current directory.

    Raises:
        UsageError: a part is of another kind, or an image cannot be loaded.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"The content is {type_of(value)}, where a text or a list of parts is wanted.")
    parts = [_part(part, folder) for part in value]
    return parts if any(part["type"] == "image" for part in parts) else text_of(parts)


def _part(part: Any, folder: Path | None) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and "image" in part:
        return {"type": "image", "image": Image.of(part["image"], folder=folder)}
    if kind in ("image_url", "input_image"):
        named = part.get("image_url")
        return {"type": "image", "image": Image.of(named.get("url") if isinstance(named, Mapping) else named)}
    raise UsageError(
        f"A part of the content is {str(part)[:200]!r}. Write {{'type': 'text', 'text': …}} or "
        "{'type': 'image', 'image': …} with an agentfly.Image, a path, or a data URL."
    )


def message_to_json(message: Message) -> dict[str, Any]:
    """A message as JSON can hold it: its images as data URLs."""
    content = message["content"]
    if isinstance(content, str):
        return {**message}
    parts = [{**part, "image": part["image"].url} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}


def message_from_json(value: Mapping[str, Any]) -> Message:
    """The inverse of `message_to_json`."""
    if isinstance(value["content"], str):
        return cast(Message, dict(value))
    parts = [
        {**part, "image": Image.from_url(part["image"])} if part["type"] == "image" else part
        for part in value["content"]
    ]
    return cast(Message, {**value, "content": parts})
