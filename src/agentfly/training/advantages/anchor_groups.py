"""Anchor groups: which turns of a group were taken in the same state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentfly.policies.extras import require_packages
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

    Two texts are as similar as their longest common subsequence of characters is long: twice its length over both
    lengths. It is found by rapidfuzz, in time for states of thousands of characters.
    Source: GiGPO, https://arxiv.org/abs/2505.10978, similarity-based grouping.

    Raises:
        PrerequisiteError: rapidfuzz is not installed.
    """
    require_packages("Comparing states by their likeness", "rapidfuzz")
    from rapidfuzz.distance import Indel

    parts: list[tuple[str, list[int]]] = []
    for number, text in enumerate(texts):
        for first, members in parts:
            if Indel.normalized_similarity(first, text, score_cutoff=similarity) >= similarity:
                members.append(number)
                break
        else:
            parts.append((text, [number]))
    return [members for _, members in parts]
