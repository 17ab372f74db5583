"""Vocabulary: which ids a model must never sample.

The output layer of a model often has more rows than its tokenizer has tokens, because matrices of round sizes are
faster. An id of such padding is no text: nobody would see it in what the model said.
"""

from __future__ import annotations

from agentfly.policies.policy import Tokenizer
from agentfly.policies.vision import barred_ids


def never_sampled(tokenizer: Tokenizer, rows: int) -> tuple[int, ...]:
    """The ids that a model must not sample: those that no token has, and those that only images have.

    Args:
        tokenizer: the model's.
        rows: how many ids the model's output layer has a logit for.
    """
    known = tokenizer.token_ids
    of_images = frozenset(barred_ids(tokenizer.vision))
    return tuple(token_id for token_id in range(rows) if token_id not in known or token_id in of_images)
