"""Losses: pure functions over tensors with one value per token, and their aggregation.

`LOSSES` maps the names for the setting ``loss`` to policy losses. Importing it does not load torch.
"""

from __future__ import annotations

from agentfly.core.registry import Registry
from agentfly.training.losses.policy_losses import PolicyLoss, cispo, gspo, policy_gradient, ppo_clip

__all__ = ["LOSSES", "PolicyLoss"]

LOSSES: Registry[PolicyLoss] = Registry("loss", PolicyLoss)
"""The policy losses by name. Register your own: ``LOSSES.register("mine", PolicyLoss(mine, uses=("clip_high",)))``."""

LOSSES.register("ppo_clip", PolicyLoss(ppo_clip, uses=("clip_low", "clip_high", "clip_dual")))
LOSSES.register("gspo", PolicyLoss(gspo, uses=("clip_low", "clip_high", "clip_dual")))
LOSSES.register("cispo", PolicyLoss(cispo, uses=("clip_low", "clip_high")))
LOSSES.register("policy_gradient", PolicyLoss(policy_gradient))
