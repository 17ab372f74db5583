"""Optimizer: AdamW with float32 master weights, and the learning-rate schedule."""

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

    Weights in a 16-bit format have float32 master copies, so that updates smaller than the format's precision add up.
    Gradients are accumulated in float32 one weight at a time, so only one full set exists. Weight decay applies to
    matrices only; norm scales and biases are excluded.

    Args:
        weights: the weights to update.
        betas: decay rates of the means of gradients and of squared gradients: beta 1 and beta 2.
        epsilon: added to the root of the mean of squares.
        weight_decay: decoupled weight decay, per update and unit of learning rate.
        max_grad_norm: maximum Euclidean norm of the gradient, which is scaled down to it.

    Attributes:
        updates: number of updates of the weights by this object.
        skipped: number of updates skipped because the gradient was not finite.
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
        """Accumulate the gradients of all backward passes in the block for `step`; drop them at its end."""
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
        """Make an update from the accumulated gradient and reset it. A gradient that is not finite changes nothing.

        Args:
            rate: the learning rate.

        Returns:
            The norm of the gradient before clipping.
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
        """Return the state that an exact resume needs besides the weights."""
        copies = [None if master is weight else master.detach() for master, weight in self._pairs()]
        return {"adamw": self._adamw.state_dict(), "masters": copies}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. The weights must have been loaded before."""
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
    """Return a hook that adds a weight's gradient to the master's gradient and frees it."""

    def gather(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    return gather


Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: Schedule, final_share: float = 0.0) -> float:
    """Return the factor on the learning rate in a step.

    In a warm-up of W steps, step s has the factor ``(s + 1) / W``. Then the factor stays 1, or falls linearly or along
    half a cosine to ``final_share``, which it would reach in the step after the last.

    Args:
        step: number of the step, from 0.
        steps: number of steps of the run.
        warmup: number of warm-up steps.
        schedule: shape of the schedule after the warm-up.
        final_share: the final factor.
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
