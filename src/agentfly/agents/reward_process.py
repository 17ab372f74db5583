"""RewardProcess: where a reward runs that must end on time whatever it does, because its process can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.agents.invocation import FunctionFailed, Overrun
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.errors import ResourceDied
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.variables import Variables


@dataclass(frozen=True, kw_only=True)
class RewardProcessSpec(EnvironmentSpec):
    """Processes in which the scores of one reward are computed, one at a time in each."""

    @property
    def label(self) -> str:
        """``reward`` and the reward's name."""
        return f"reward:{self._name}"

    def overrun(self, method: str) -> str:
        """What is said of a score that took too long, in the words of who wrote ``timeout_s``."""
        return f"the reward {self._name!r} gave no score within {self.call_timeout_s:g} s"

    @property
    def _name(self) -> str:
        return str(getattr(self.factory, "__name__", self.factory))


@dataclass(frozen=True)
class Scorer:
    """Lives in such a process. It makes itself, so that the process has imported the reward before it is forked.

    Args:
        func: the reward.
    """

    func: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return str(getattr(self.func, "name", self.func))

    def __call__(self) -> Scorer:
        return self

    def reset(self) -> None:
        """Take back an alarm that a score has set, which is not meant for the next."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def score(self, arguments: Mapping[str, Any]) -> Any:
        """What the reward's function returns."""
        return self.func(**arguments)


def reward_process(
    reward: Callable[..., Any], *, timeout_s: float, workers: int | None, memory: int | str, env: Variables
) -> RewardProcessSpec:
    """The spec of a reward's processes. Each serves one score after the other.

    Raises:
        UsageError: the reward cannot travel to another process. The message names the part of it that cannot.
        ConfigError: a value cannot be.
    """
    return RewardProcessSpec(
        factory=Scorer(reward),
        runs="process",
        reuse="reset",
        env=env,
        result_types=(RewardResult,),
        call_timeout_s=timeout_s,
        capacity=workers if workers is not None else len(os.sched_getaffinity(0)),
        memory=memory,
    )


async def score_in_process(spec: RewardProcessSpec, arguments: Mapping[str, Any], context: Context) -> Any:
    """Compute a score in one of a reward's processes, once one is free.

    Raises:
        Overrun: it took too long. Its process has been killed, and is replaced when the next score needs it.
        FunctionFailed: the reward raised, ended its process, or was given or returned what cannot travel.
        AgentFlyError: no process could be had.
    """
    async with context.lease(spec) as scorer:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await scorer.call("score", arguments)
        except ResourceDied as error:
            if loop.time() - started >= spec.call_timeout_s:
                raise Overrun from None
            raise FunctionFailed(error) from None
        except Exception as error:
            raise FunctionFailed(error) from None
