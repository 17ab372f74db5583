"""ChatFormat: renders a conversation as a sequence of token ids that only grows, with placeholder tokens for images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Image, Message, PlacedImage, ToolCall, images_of
from agentfly.policies.policy import Tokenizer

ToolDefinitions = Sequence[Mapping[str, Any]]
"""Tools as chat templates want them described: see `agentfly.agents.tool_decorator.Tool.definition`."""

History = Literal["keep", "rewrite"]
"""What becomes of the past of a conversation where the chat template would write it differently."""


@dataclass(frozen=True, slots=True)
class RenderedTokens:
    """A rendered part of a conversation, none of whose ids is sampled.

    Attributes:
        ids: token ids.
        images: the images in it, with their positions within ``ids``.
    """

    ids: Sequence[int]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A generation as the format parses it.

    Attributes:
        text: the sampled tokens as text, without the control token at the end.
        content: the visible text, without reasoning.
        reasoning: the reasoning; None if there is none.
        calls: the tool calls, if the format parses calls itself; None if the agent's tool-call format parses ``text``.
        opened: the marker with which the prompt opened the reasoning, so that ``text`` begins inside it; else empty.
    """

    text: str
    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] | None = None
    opened: str = ""


class ChatFormat(Protocol):
    """Renders the first prompt and the messages after each generation, and parses the generations."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant's turn."""
        ...

    def render_prompt(self, messages: Sequence[Message], tools: ToolDefinitions = ()) -> RenderedTokens:
        """Render a whole conversation, ending with the header of the assistant's turn.

        Args:
            messages: the conversation.
            tools: the tools that the format describes; empty if the conversation describes them.
        """
        ...

    def render_continuation(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int],
        conversation: Sequence[Message],
        tools: ToolDefinitions = (),
    ) -> RenderedTokens | None:
        """Render the text after a generation: a missing end of turn, ``messages``, and the header of the next turn.

        Args:
            messages: the answers to the generation: tool results or user messages.
            after: all ids that were sent and sampled so far; the last one may be a stop id.
            conversation: the whole conversation, with the last generation and ``messages`` at its end.
            tools: the same as for the prompt.

        Returns:
            The tokens that follow ``after``. None if the format would now render the past differently and must follow
            its template. The conversation then continues in a new sequence that begins with `render_prompt`.
        """
        ...

    def parse_reply(self, ids: Sequence[int]) -> ParsedReply:
        """Parse a generation."""
        ...


def expand_image_placeholders(ids: Sequence[int], messages: Sequence[Message], tokenizer: Tokenizer) -> RenderedTokens:
    """Replace each placeholder that the template wrote for an image by the image's ids. Return the ids with the images.

    Only the template's own placeholders count. Text that spells a placeholder is ordinary text.

    Raises:
        ChatFormatError: there are images and the model takes none, or the template did not write one placeholder for
            each of them.
    """
    images = [image for message in messages for image in images_of(message["content"])]
    vision = tokenizer.vision
    if vision is None or not images:
        require_no_images(messages, "a model that sees no images")
        return RenderedTokens(ids)
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


def require_no_images(messages: Sequence[Message], recipient: str) -> None:
    """Check that the messages are text only.

    Raises:
        ChatFormatError: a message contains an image, which would be left out silently.
    """
    for message in messages:
        if images := images_of(message["content"]):
            raise ChatFormatError(
                f"A message of the role {message['role']!r} holds {images[0].label}, and it would go to {recipient}. "
                "Leave images out of the task and of tool results, or use a model that takes images with its own "
                "template."
            )


def _put_in(
    ids: Sequence[int], placeholder: int | None, images: Sequence[tuple[Image, Sequence[int]]]
) -> RenderedTokens:
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
    return RenderedTokens(whole, tuple(placed))
