"""Optimizer: AdamW over weights in any number format.

The learning rate of a step: a pure function of its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.nn import Parameter


class Optimizer:
    """Updates weights in place by AdamW.

    Weights in a 16-bit format are updated through a copy in 32 bits, which also gathers the gradients: updates that
    are smaller than the format's steps add up instead of getting lost. Gradients are gathered while they are computed,
    weight by weight, so that no two copies of all of them exist at a time. Weight decay takes matrices alone: it would
    pull the scales of norms away from 1.

    Args:
        weights: what to update.
        betas: decay of the means of gradients and of their squares: beta 1 and beta 2.
        epsilon: added to the root of the mean of squares.
        weight_decay: decoupled weight decay, per update and unit of learning rate.
        max_grad_norm: the gradient's Euclidean norm is scaled down to this.

    Attributes:
        updates: how many times the weights have been changed by this object.
        skipped: how many updates were left out, because the gradient was not finite.
    """

    def __init__(
        self,
        weights: Iterable[Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._weights = list(weights)
        self._masters = [
            weight if weight.dtype == torch.float32 else Parameter(weight.detach().float()) for weight in self._weights
        ]
        groups = [
            {"params": [master for master in self._masters if master.ndim >= 2], "weight_decay": weight_decay},
            {"params": [master for master in self._masters if master.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=epsilon, fused=True
        )
        self._max_grad_norm = max_grad_norm
        self.updates = 0
        self.skipped = 0

    @contextmanager
    def accumulating_gradients(self) -> Iterator[None]:
        """Gather the gradients of all backward passes in the block, for `update`; forget them at its end."""
        copied = [(master, weight) for master, weight in self._pairs() if master is not weight]
        hooks = [
            weight.register_post_accumulate_grad_hook(_accumulate_into(master))  # type: ignore[no-untyped-call]
            for master, weight in copied
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._zero_grad()

    def step(self, rate: float) -> float:
        """Step along the gathered gradient, and forget it. One that is not finite leaves everything as it was.

        Args:
            rate: the learning rate.

        Returns:
            The gradient's norm before it was scaled down.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            with torch.no_grad():
                for master, weight in self._pairs():
                    if master is not weight:
                        weight.copy_(master)
            self.updates += 1
        else:
            self.skipped += 1
        self._zero_grad()
        return norm

    def state(self) -> dict[str, Any]:
        """What is needed beside the weights to go on exactly from here."""
        copies = [None if master is weight else master.detach() for master, weight in self._pairs()]
        return {"adamw": self._adamw.state_dict(), "masters": copies}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. The weights must have been loaded before."""
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (master, weight), saved in zip(self._pairs(), state["masters"], strict=True):
                if master is not weight:
                    master.copy_(weight if saved is None else saved)

    def _zero_grad(self) -> None:
        for master, weight in self._pairs():
            master.grad = weight.grad = None

    def _pairs(self) -> list[tuple[Parameter, Parameter]]:
        return list(zip(self._masters, self._weights, strict=True))


def _accumulate_into(master: Parameter) -> Any:
    """What is called with a weight when its gradient is there: adds it to the master's, and lets go of it."""

    def gather(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    return gather


Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: Schedule, final_share: float = 0.0) -> float:
    """Share of the full learning rate in a step: it rises over the warm-up, then follows the schedule.

    In the warm-up of W steps, step s has ``(s + 1) / W``. After it, what is left of the way to ``steps`` takes it down
    to ``final_share``, in a line or along half a cosine, where it would be in the step after the last.

    Args:
        step: number of the step, from 0.
        steps: number of steps of the run.
        warmup: number of steps over which the rate rises.
        schedule: how it falls after them.
        final_share: where it falls to.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(steps - warmup, 1))
    match schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(schedule)
    return final_share + (1.0 - final_share) * left
