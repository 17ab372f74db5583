"""Drift: whether ids that grew turn by turn are those of the whole conversation. For tests and debugging."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import ChatFormat, Definitions

_AROUND = 8


def drift_from_whole(
    chat: ChatFormat,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    conversation: Sequence[Message],
    tools: Definitions = (),
) -> str | None:
    """Where ids differ from those of the whole conversation, in words; None where they do not.

    What a model samples is seldom what its text encodes to, so this is to be expected of real rollouts, and says by how
    much; it is for conversations whose turns were encoded from text. The whole conversation is rendered, so it costs
    more than a turn does.

    Args:
        chat: the format in which the ids were rendered.
        tokenizer: the policy's.
        ids: everything sent and sampled, up to and with the header of the assistant's next turn.
        conversation: what was said, as messages.
        tools: as of the prompt.
    """
    whole = list(chat.prompt(conversation, tools).ids)
    sent = list(ids)
    if whole == sent:
        return None
    at = first_difference(whole, sent)
    around = slice(max(0, at - _AROUND), at + _AROUND)
    return (
        f"The ids differ from token {at} on ({len(sent)} sent, {len(whole)} in the whole). Sent: "
        f"{tokenizer.decode(sent[around])!r} {sent[around]}; in the whole: {tokenizer.decode(whole[around])!r} "
        f"{whole[around]}."
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Where two sequences begin to differ; the length of the shorter where the longer begins with it."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
