"""Losses: pure functions over tensors with one value per token, and their aggregation.

`LOSSES` maps the names for the setting ``loss`` to policy losses. Importing it does not load torch.
"""

from __future__ import annotations

from agentfly.core.registry import Registry
from agentfly.training.losses.policy_losses import PolicyLoss, cispo, gspo, policy_gradient, ppo_clip

__all__ = ["LOSSES", "PolicyLoss"]

LOSSES: Registry[PolicyLoss] = Registry(
    "loss",
    {
        "ppo_clip": PolicyLoss(ppo_clip, uses=("clip_low", "clip_high", "clip_dual")),
        "gspo": PolicyLoss(gspo, uses=("clip_low", "clip_high", "clip_dual")),
        "cispo": PolicyLoss(cispo, uses=("clip_low", "clip_high")),
        "policy_gradient": PolicyLoss(policy_gradient),
    },
    PolicyLoss,
)
"""The policy losses by name. Add your own: ``LOSSES.register("mine", PolicyLoss(mine, uses=("clip_high",)))``."""
