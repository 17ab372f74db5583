"""Audit of tokens: what would have drifted if text, not ids, had passed between sampling and training.

Most systems keep a rollout as messages, and make ids of the text again when they train. A text has many spellings in
tokens, and a model does not always sample the one that the tokenizer would choose: the tokens that are trained are then
not those that were sampled. The audit does the same to stored trajectories, counts what changes, and checks that the
ids that were kept are the ones that were sampled.
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
"""Number of trajectories that `drift_metrics` looks at, which takes some 10 ms for each thousand tokens."""

_TEXT_MISMATCH = "its ids do not spell its text"


@dataclass(frozen=True, slots=True)
class DriftExample:
    """A place where making ids of the text again gives others.

    Attributes:
        rollout_id: the rollout.
        turn: number of the turn, from 0.
        sampled: the tokens that were sampled there, each as text.
        encoded: what the tokenizer makes of the same text.
    """

    rollout_id: str
    turn: int
    sampled: tuple[str, ...]
    encoded: tuple[str, ...]


@dataclass
class TokenAudit:
    """What an audit of trajectories found.

    Attributes:
        trajectories: how many hold sampled tokens.
        drifted_trajectories: in how many of them a turn's text is encoded otherwise than it was sampled.
        sampled_tokens: the sampled tokens of all of them.
        drifted_tokens: how many of them would not have been trained, because others stand in their place.
        turns: the turns in which they were sampled.
        mismatched_turns: how many of these have a text that their ids do not spell, which is a fault.
        faults: what is wrong with the ids that were kept, one line each; none if they are what was sampled.
        examples: some places that drift.
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
        """Share of the trajectories that would have drifted."""
        return self.drifted_trajectories / self.trajectories if self.trajectories else 0.0

    @property
    def is_wrong_tokenizer(self) -> bool:
        """Whether most turns' ids do not spell their text, as where the tokenizer is not the one of the model."""
        return 2 * self.mismatched_turns > self.turns

    @property
    def drifted_token_share(self) -> float:
        """Share of the sampled tokens that would have drifted."""
        return self.drifted_tokens / self.sampled_tokens if self.sampled_tokens else 0.0


def audit_tokens(trajectories: Iterable[Trajectory], tokenizer: Tokenizer) -> TokenAudit:
    """Compare the ids of trajectories with what ``tokenizer``, their model's, makes of their text.

    Turns of subagents with a policy of their own are left out: their tokens are another tokenizer's. So are
    trajectories without token ids, as of a model whose server shows none.
    """
    audit = TokenAudit()
    control = ControlTokens(tokenizer)
    for trajectory in trajectories:
        turns = [turn for turn in trajectory.turns if turn.stop > turn.start and not turn.policy]
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
    """The audit of a batch as metrics, from at most `MAX_AUDITED` of its trajectories, spread evenly; none without ids.

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
    """How many tokens of a turn are not among what its text is encoded to; notes an example."""
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
    # What is only put in between counts too: the sampled tokens are then trained in a place that they never stood in.
    return sum(max(stop - start, 1) for _, start, stop, _, _ in changes)


def _faults(trajectory: Trajectory, turns: Sequence[Turn], tokenizer: Tokenizer) -> list[str]:
    """What is wrong with the ids that were kept."""
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
