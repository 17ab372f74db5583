"""Placeholders: what stands for images in rendered conversations, as many tokens as the model's image encoder fills."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.errors import ChatFormatError
from agentfly.images import Image, PlacedImage
from agentfly.messages import Message, images_of
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import Rendered


def with_images(ids: Sequence[int], messages: Sequence[Message], tokenizer: Tokenizer) -> Rendered:
    """Rendered ids with the images of the messages that were rendered, each in place of its placeholder.

    The placeholders are the template's own: text that spells one is text, and does not count.

    Raises:
        ChatFormatError: there are images and the model sees none, or the template has not written one placeholder for
            each of them.
    """
    images = [image for message in messages for image in images_of(message["content"])]
    vision = tokenizer.vision
    if vision is None or not images:
        require_no_images(messages, "a model that sees no images")
        return Rendered(ids)
    placeholder = tokenizer.control_tokens.get(vision.placeholder)
    written = list(ids).count(placeholder) if placeholder is not None else 0
    if written != len(images):
        roles = ", ".join(message["role"] for message in messages if images_of(message["content"]))
        raise ChatFormatError(
            f"The model's chat template writes {written} placeholders {vision.placeholder!r} for {len(images)} images "
            f"in messages of the roles {roles}, so the model would not see what it is shown. Leave the images out, or "
            "use a model whose template takes images there."
        )
    return _put_in(ids, placeholder, [(image, vision.ids(image)) for image in images])


def require_no_images(messages: Sequence[Message], whom: str) -> None:
    """Raise unless the messages are text only.

    Raises:
        ChatFormatError: one of them holds an image, which would be left out without a word.
    """
    for message in messages:
        if images := images_of(message["content"]):
            raise ChatFormatError(
                f"A message of the role {message['role']!r} holds {images[0].label}, and it would go to {whom}. Leave "
                "images out of the task and of what tools return, or use a model with eyes and its own template."
            )


def _put_in(ids: Sequence[int], placeholder: int | None, images: Sequence[tuple[Image, Sequence[int]]]) -> Rendered:
    whole: list[int] = []
    placed: list[PlacedImage] = []
    left = iter(images)
    for one in ids:
        if one != placeholder:
            whole.append(one)
            continue
        image, own = next(left)
        placed.append(PlacedImage(image, len(whole), len(whole) + len(own)))
        whole += own
    return Rendered(whole, tuple(placed))
