"""Image: a picture in a conversation, and where its placeholder tokens stand."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Self

from agentfly.errors import UsageError


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded picture.

    Attributes:
        data: the bytes of the file, for instance of a PNG.
        media_type: what they are, for instance ``image/png``.
    """

    data: bytes = field(repr=False)
    media_type: str = "image/png"

    @property
    def url(self) -> str:
        """The image as a data URL, which is its form in JSON."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The inverse of `url`.

        Raises:
            UsageError: it is no data URL of an image in base64.
        """
        head, comma, body = url.partition(",")
        media_type, _, coding = head.removeprefix("data:").rpartition(";")
        if not (head.startswith("data:image/") and comma and coding == "base64"):
            raise UsageError(
                f"An image is wanted as a data URL (data:image/png;base64,…), found {url[:60]!r}. Read the file and "
                "give its bytes: agentfly.Image(data, 'image/png')."
            )
        try:
            return cls(base64.b64decode(body, validate=True), media_type)
        except binascii.Error as error:
            raise UsageError(f"The data URL of an image is damaged: {error}.") from error


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and the placeholder tokens that stand for it: ``start`` to ``stop`` (exclusive) of the ids around it."""

    image: Image
    start: int
    stop: int

    def moved(self, by: int) -> PlacedImage:
        """The same image where its ids stand ``by`` tokens later."""
        return PlacedImage(self.image, self.start + by, self.stop + by)
