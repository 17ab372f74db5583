"""GiGPO: compares whole trajectories, and also turns of a group that were taken in the same state (anchor groups).

Source: Group-in-Group Policy Optimization, https://arxiv.org/abs/2505.10978.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentfly.core.installation import require_packages
from agentfly.training.advantages.algorithm import AdvantageInputs, Advantages, Floats
from agentfly.training.advantages.outcome import DR_GRPO, GRPO, Attempt, attempts_by_group, dr_grpo, grpo
from agentfly.training.advantages.token_returns import turn_index_per_token
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, RowTurn, predecessors_within, successors


def anchor_groups(turns: Sequence[RowTurn], config: AdvantageConfig) -> list[list[int]]:
    """Return the indices of turns, grouped by state. A turn with an unknown state forms its own group.

    ``anchor_match`` compares states by their anchors (``exact``) or by their texts (``similar``).
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
        sorted(number for index in indices for number in equal[index])
        for indices in group_similar_texts(states, config.anchor_similarity)
    ]
    return merged + alone


def group_similar_texts(texts: Iterable[str], similarity: float) -> list[list[int]]:
    """Return the indices of texts, grouped greedily: a text joins the first group whose first text is similar to it.

    The similarity is twice the length of the longest common subsequence of characters over the sum of both lengths.
    rapidfuzz computes it fast enough for states of thousands of characters.
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


@dataclass(frozen=True)
class AgentStep:
    """A turn in which the agent acted.

    Attributes:
        rollout_id: the trajectory.
        turn: the turn.
        discounted_return: its own reward plus the discounted rewards of the steps that follow from it.
    """

    rollout_id: str
    turn: RowTurn
    discounted_return: float


def gigpo(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return the episode advantage of each trajectory plus the step advantage of each turn.

    The episode advantage is that of ``grpo`` (``dr_grpo`` without ``divide_by_std``) and counts trajectories. The step
    advantage is the same function of the steps' returns within an anchor group: the steps of one task's group that were
    taken in the same state, by one or several trajectories. A step alone in its state has the step advantage 0.

    A step's return is its reward plus the rewards of later steps, discounted by ``step_discount`` per step. If several
    branches follow a step, their mean counts. If no turn of a group has a reward, the last step of each branch has the
    trajectory's reward. Steps are the agent's own acting turns; memory turns and turns of subagents have only the
    episode advantage. In a row with several turns (strategy ``chain``), each token has its own turn's step advantage.
    The strategy ``step`` gives the same numbers.
    Source: equations 3 (episode), 5 (returns), 6 (anchor groups), 7 (step) and 8 (both) of the paper.
    """
    within, of_episodes = (grpo, GRPO) if config.divide_by_std else (dr_grpo, DR_GRPO)
    judged: dict[tuple[str, str, int], float] = {}
    for group_id, attempts in attempts_by_group(evidence).items():
        steps = _steps_of_group(evidence.rows, attempts, config.step_discount)
        for alike in anchor_groups([step.turn for step in steps], config):
            values = within(_returns([steps[number] for number in alike])).tolist()
            for number, value in zip(alike, values, strict=True):
                judged[group_id, steps[number].rollout_id, steps[number].turn.index] = value
    episodes = of_episodes(evidence, config).values
    return Advantages(
        [
            episode + config.step_weight * _step_advantages_at_tokens(row, judged)
            for row, episode in zip(evidence.rows, episodes, strict=True)
        ]
    )


def _steps_of_group(rows: Sequence[Row], attempts: Sequence[Attempt], discount: float) -> list[AgentStep]:
    """Return the steps of all trajectories of a group, with their returns."""
    taken = [[turn for number in attempt.rows for turn in rows[number].turns] for attempt in attempts]
    own = [_agent_turns([rows[number] for number in attempt.rows]) for attempt in attempts]
    rewarded = any(turn.reward is not None for turns in own for turn in turns)
    steps = []
    for attempt, turns, acts in zip(attempts, taken, own, strict=True):
        following = successors(
            predecessors_within({turn.index: turn.parent_turns for turn in turns}, {*map(_index, acts)})
        )
        returns_after: dict[int, float] = {}
        for turn in reversed(acts):
            reward = turn.reward or 0.0
            after = [returns_after[follower] for follower in following[turn.index]]
            if after:
                reward += discount * sum(after) / len(after)
            elif not rewarded:
                reward = rows[attempt.rows[0]].reward
            returns_after[turn.index] = reward
            steps.append(AgentStep(attempt.rollout_id, turn, reward))
    return steps


def _agent_turns(rows: Sequence[Row]) -> list[RowTurn]:
    """Return the turns in which the agent itself acted, in order of time."""
    taken = [turn for row in rows if not row.agent for turn in row.turns if turn.kind == "act"]
    return sorted(taken, key=_index)


def _index(turn: RowTurn) -> int:
    return turn.index


def _returns(steps: Sequence[AgentStep]) -> Floats:
    import numpy as np

    return np.array([step.discounted_return for step in steps], dtype=np.float64)


def _step_advantages_at_tokens(row: Row, judged: Mapping[tuple[str, str, int], float]) -> Floats:
    """Return for each sampled token of a row the step advantage of its turn."""
    import numpy as np

    of_turns = [judged.get((row.group_id, row.rollout_id, turn.index), 0.0) for turn in row.turns]
    return np.array(of_turns or [0.0])[turn_index_per_token(row)]
