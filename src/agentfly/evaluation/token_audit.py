"""Token audit: which tokens would change if rollouts were stored as text and tokenized again for training.

Many systems store a rollout as messages, and tokenize the text again when they train. A text can be split into tokens
in many ways, and a model does not always sample the tokenizer's choice. Then the trained tokens are not the sampled
ones. The audit tokenizes stored trajectories again, counts the differences, and checks the recorded ids.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentfly.core.tokens import Origin, TokenSequence
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.formats.chat.control_tokens import ControlTokens
from agentfly.formats.chat.prefix_stability import first_difference
from agentfly.policies.policy import Tokenizer

MAX_EXAMPLES = 5
MAX_AUDITED = 32
"""Maximum number of trajectories that `drift_metrics` audits. A thousand tokens take about 10 ms."""

_TEXT_MISMATCH = "its ids do not spell its text"


@dataclass(frozen=True, slots=True)
class DriftExample:
    """A difference between sampled and re-tokenized ids.

    Attributes:
        rollout_id: the rollout.
        turn: index of the turn, from 0.
        sampled: the sampled tokens, each as text.
        encoded: the tokens of the same text by the tokenizer.
    """

    rollout_id: str
    turn: int
    sampled: tuple[str, ...]
    encoded: tuple[str, ...]


@dataclass
class TokenAudit:
    """The result of an audit.

    Attributes:
        trajectories: number of trajectories with sampled tokens.
        drifted_trajectories: number of them with a turn whose text is encoded to other ids than were sampled.
        sampled_tokens: number of sampled tokens.
        drifted_tokens: number of sampled tokens that re-tokenized text would replace.
        turns: number of turns with sampled tokens.
        mismatched_turns: number of turns whose ids do not decode to their text, which is a fault.
        faults: one message for each fault of the recorded ids.
        examples: some of the differences.
    """

    trajectories: int = 0
    drifted_trajectories: int = 0
    sampled_tokens: int = 0
    drifted_tokens: int = 0
    turns: int = 0
    mismatched_turns: int = 0
    faults: list[str] = field(default_factory=list)
    examples: list[DriftExample] = field(default_factory=list)

    @property
    def drifted_trajectory_share(self) -> float:
        """Share of the trajectories that drifted."""
        return self.drifted_trajectories / self.trajectories if self.trajectories else 0.0

    @property
    def is_wrong_tokenizer(self) -> bool:
        """Whether most turns' ids do not decode to their text, as with the tokenizer of another model."""
        return 2 * self.mismatched_turns > self.turns

    @property
    def drifted_token_share(self) -> float:
        """Share of the sampled tokens that drifted."""
        return self.drifted_tokens / self.sampled_tokens if self.sampled_tokens else 0.0


def audit_tokens(trajectories: Iterable[Trajectory], tokenizer: Tokenizer) -> TokenAudit:
    """Compare the ids of trajectories with the ids that ``tokenizer``, their model's, makes of the same text.

    Turns of subagents with another model are left out, because they have another tokenizer. So are trajectories without
    token ids.
    """
    audit = TokenAudit()
    control = ControlTokens(tokenizer)
    for trajectory in trajectories:
        turns = [turn for turn in trajectory.turns if turn.stop > turn.start and not turn.other_model]
        if not turns:
            continue
        audit.trajectories += 1
        audit.turns += len(turns)
        faults = _faults(trajectory, turns, tokenizer)
        audit.mismatched_turns += sum(fault.endswith(_TEXT_MISMATCH) for fault in faults)
        audit.faults += faults
        drifted = [_drift_of(trajectory, turn, tokenizer, control, audit) for turn in turns]
        audit.sampled_tokens += sum(turn.stop - turn.start for turn in turns)
        audit.drifted_tokens += sum(drifted)
        audit.drifted_trajectories += any(drifted)
    return audit


def drift_metrics(trajectories: Sequence[Trajectory], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the audit of a batch as metrics, from at most `MAX_AUDITED` evenly spread trajectories; empty without ids.

    ``tokens/drifted_fraction`` is the share of sampled tokens that re-tokenized text would not have.
    ``tokens/drifted_trajectories_fraction`` is the share of trajectories with such a token. ``tokens/faults`` counts
    ids that were recorded wrongly; it must be 0.
    """
    step = -(-len(trajectories) // MAX_AUDITED) or 1
    audit = audit_tokens(trajectories[::step], tokenizer)
    if not audit.sampled_tokens:
        return {}
    return {
        "tokens/drifted_fraction": audit.drifted_token_share,
        "tokens/drifted_trajectories_fraction": audit.drifted_trajectory_share,
        "tokens/faults": float(len(audit.faults)),
    }


def _drift_of(
    trajectory: Trajectory, turn: Turn, tokenizer: Tokenizer, control: ControlTokens, audit: TokenAudit
) -> int:
    """Return how many tokens of a turn differ from its encoded text, and add an example to the audit."""
    sampled = list(_sequence_of(trajectory, turn).ids[turn.start : turn.stop])
    encoded = control.encode(tokenizer.decode(sampled))
    if encoded == sampled:
        return 0
    first = first_difference(sampled, encoded)
    matcher = difflib.SequenceMatcher(None, sampled[first:], encoded[first:], autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    if changes and len(audit.examples) < MAX_EXAMPLES:
        _, start, stop, start_again, stop_again = changes[0]
        audit.examples.append(
            DriftExample(
                trajectory.rollout_id,
                turn.index,
                tuple(tokenizer.decode([token]) for token in sampled[first + start : first + stop]),
                tuple(tokenizer.decode([token]) for token in encoded[first + start_again : first + stop_again]),
            )
        )
    # An insertion counts, too: the tokens after it would be trained at positions where they were not sampled.
    return sum(max(stop - start, 1) for _, start, stop, _, _ in changes)


def _faults(trajectory: Trajectory, turns: Sequence[Turn], tokenizer: Tokenizer) -> list[str]:
    """Return the faults of the recorded ids."""
    faults = []
    for turn in turns:
        name = f"{trajectory.rollout_id}, turn {turn.index}"
        sequence = _sequence_of(trajectory, turn)
        if turn.stop > len(sequence) or any(
            origin != Origin.SAMPLED for origin in sequence.origins[turn.start : turn.stop]
        ):
            faults.append(f"{name}: its tokens are not all marked as sampled")
            continue
        ids = sequence.ids[turn.start : turn.stop]
        if turn.text not in (tokenizer.decode(ids), tokenizer.decode(ids[:-1])):
            faults.append(f"{name}: {_TEXT_MISMATCH}")
    for index in {turn.sequence for turn in turns}:
        counted = sum(turn.stop - turn.start for turn in turns if turn.sequence == index)
        if counted != trajectory.sequences[index].sampled_count:
            faults.append(
                f"{trajectory.rollout_id}, sequence {index}: tokens are marked as sampled that no turn sampled"
            )
    return faults


def _sequence_of(trajectory: Trajectory, turn: Turn) -> TokenSequence:
    return trajectory.sequences[turn.sequence]
