"""Losses: pure functions over tensors, one value a token, and how they become one number.

`LOSSES` holds the policy losses by name, and the configuration's ``loss`` chooses one. It needs no torch.
"""

from __future__ import annotations

from agentfly.training.losses.policy_losses import PolicyLoss, cispo, gspo, policy_gradient, ppo_clip
from agentfly.training.registry import Registry

LOSSES: Registry[PolicyLoss] = Registry("loss")
"""The policy losses by name. Register your own: ``LOSSES.register("mine", mine)``."""

LOSSES.register("ppo_clip", ppo_clip)
LOSSES.register("gspo", gspo)
LOSSES.register("cispo", cispo)
LOSSES.register("policy_gradient", policy_gradient)
