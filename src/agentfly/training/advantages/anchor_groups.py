"""Anchor groups: which turns of a group were taken in the same state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.rows import RowTurn


def anchor_groups(turns: Sequence[RowTurn], config: AdvantageConfig) -> list[list[int]]:
    """Indices of turns in parts: those that were taken in one state. A turn whose state is not known is alone.

    By ``anchor_match`` a state is compared by its anchor (``exact``) or by its text (``similar``).
    """
    by_anchor: dict[str, list[int]] = {}
    alone = []
    for number, turn in enumerate(turns):
        if turn.anchor:
            by_anchor.setdefault(turn.anchor, []).append(number)
        else:
            alone.append([number])
    equal = list(by_anchor.values())
    if config.anchor_match == "exact":
        return equal + alone
    states = [turns[members[0]].state for members in equal]
    merged = [
        sorted(number for place in places for number in equal[place])
        for places in similar_texts(states, config.anchor_similarity)
    ]
    return merged + alone


def similar_texts(texts: Iterable[str], similarity: float) -> list[list[int]]:
    """Indices of texts in parts: each text is with the first one, of those that begin a part, that it is similar to.

    Source: GiGPO, https://arxiv.org/abs/2505.10978, similarity-based grouping, and verl-agent, which is its code. The
    measure is difflib's ratio over characters, where common characters count in long texts as in short ones.
    """
    parts: list[tuple[str, list[int]]] = []
    for number, text in enumerate(texts):
        matcher = SequenceMatcher(None, b=text, autojunk=False)
        for first, members in parts:
            matcher.set_seq1(first)
            if _reaches(matcher, similarity):
                members.append(number)
                break
        else:
            parts.append((text, [number]))
    return [members for _, members in parts]


def _reaches(matcher: SequenceMatcher[str], similarity: float) -> bool:
    """Whether the ratio is at least this. The upper bounds, which cost less, are asked first."""
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(bound() >= similarity for bound in bounds)
