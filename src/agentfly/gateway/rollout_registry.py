"""Rollout registry: the rollouts of a gateway, with their keys, sessions and ends. It knows nothing of HTTP."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfly.core.errors import UsageError
from agentfly.core.json_values import score_of
from agentfly.core.task import Task, to_tasks
from agentfly.core.trajectory import Failure, Trajectory
from agentfly.gateway.auth import new_key
from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.model_request import RolloutSampling
from agentfly.gateway.request_codec import RequestCodec
from agentfly.gateway.session import ProgramSession, ThreadOffloader
from agentfly.policies.policy import Policy

logger = logging.getLogger(__name__)

_ROLLOUT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@:-]{0,199}")
_ATTEMPT = re.compile(r"(.+)\.(\d{1,9})")
_MAX_FINISHED_IDS = 100_000  # finished rollouts whose ids are remembered


@dataclass(frozen=True)
class RolloutEndpoint:
    """The address and key with which a program calls the model in its rollout.

    Attributes:
        rollout_id: the rollout's id.
        base_url: the base URL that replaces OpenAI's.
        api_key: a key that allows model calls in this rollout, and nothing else.
    """

    rollout_id: str
    base_url: str
    api_key: str = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables from which client libraries read the URL and the key."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
        }

    def to_json(self) -> dict[str, str]:
        """Return the endpoint as JSON."""
        return {"rollout_id": self.rollout_id, "base_url": self.base_url, "api_key": self.api_key}


class RolloutRegistry:
    """The rollouts of a gateway: open ones with their sessions, finished ones with their keys.

    Args:
        policy: samples the answers.
        limits: limits of the programs.
        sampling: default sampling of a rollout.
        on_finish: called with the trajectory of each finished rollout.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        limits: GatewayLimits,
        sampling: RolloutSampling,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.on_finish = on_finish
        self._sampling = sampling
        self._url: str | None = None
        self._codec: RequestCodec | None = None
        self._heavy = ThreadOffloader()
        self._sessions: dict[str, ProgramSession] = {}
        self._keys: dict[str, str] = {}
        self._over: OrderedDict[str, str] = OrderedDict()  # ids of finished rollouts, with their keys

    @property
    def url(self) -> str:
        """The address of the gateway.

        Raises:
            UsageError: it is not open.
        """
        if self._url is None:
            raise UsageError(_NOT_OPEN)
        return self._url

    def open(self, rollout_id: str, *, sampling: RolloutSampling | None = None) -> RolloutEndpoint:
        """Begin a rollout. Return the endpoint for its program.

        Args:
            rollout_id: a unique id of your choice. If it ends with ``.`` and a number, the number is the attempt and
                the part before it is the group.
            sampling: how the model samples in the rollout; the gateway's default if not given.

        Raises:
            UsageError: the gateway is not open, the id is or was in use, it cannot be part of a URL, or too many
                rollouts are open.
        """
        url = self.url
        if not _ROLLOUT.fullmatch(rollout_id):
            raise UsageError(_NO_ID.format(rollout_id))
        if rollout_id in self._sessions or rollout_id in self._over:
            state = "open" if rollout_id in self._sessions else "over"
            raise UsageError(f"The rollout {rollout_id!r} is {state} already. Choose another id.")
        if len(self._sessions) >= self.limits.max_open_rollouts:
            raise UsageError(f"{len(self._sessions)} rollouts are open (max_open_rollouts). Finish some.")
        assert self._codec is not None
        self._sessions[rollout_id] = ProgramSession(
            rollout_id,
            self.policy,
            self._codec,
            sampling=sampling or self._sampling,
            limits=self.limits,
            heavy=self._heavy,
        )
        self._keys[rollout_id] = new_key()
        return RolloutEndpoint(rollout_id, f"{url}/rollouts/{rollout_id}/v1", self._keys[rollout_id])

    def trajectory(self, rollout_id: str) -> Trajectory:
        """Return the trajectory of an open rollout, as far as it is recorded.

        Raises:
            UsageError: no such rollout is open.
        """
        return self.session(rollout_id).trajectory

    def finish(
        self,
        rollout_id: str,
        *,
        task: Task | Mapping[str, Any] | str | None = None,
        reward: float | None = None,
        group_id: str | None = None,
        attempt: int | None = None,
        metrics: Mapping[str, float] | None = None,
        error: BaseException | Failure | None = None,
        notify: bool = True,
    ) -> Trajectory:
        """End a rollout and return its trajectory. Running calls are aborted, and later ones are refused.

        Args:
            rollout_id: the rollout's id.
            task: the task of the program; its first message to the model if not given.
            reward: the score. None leaves the trajectory unscored: it is in no loss and no baseline. The reward is
                dropped if the rollout failed for a reason outside the policy, or if no call was answered.
            group_id: id shared by all attempts at one task, whose rewards form the baseline. By default it is taken
                from the rollout's id; see `open`.
            attempt: number of the attempt in its group; by default taken from the rollout's id.
            metrics: further numbers by name.
            error: why the rollout failed, if the policy did not cause it: for instance, the program could not run. If
                the last generation failed, this is noted without it.
            notify: whether to call ``on_finish`` now. If not, the caller must call `notify_finished`.

        Raises:
            UsageError: no such rollout is open, or a number is out of its range.
        """
        score = None if reward is None else score_of(reward)
        if score is None and reward is not None:
            raise UsageError(
                f"finish(reward={reward!r:.100}): it must be a finite number up to 1e30, or None for no score."
            )
        numbers = {str(name): score_of(number) for name, number in dict(metrics or {}).items()}
        for name, number in numbers.items():
            if number is None:
                raise UsageError(f"finish(metrics=…): {name!r:.100} is not a finite number up to 1e30. Leave it out.")
        if attempt is not None and (type(attempt) is not int or attempt < 0):
            raise UsageError(f"finish(attempt={attempt!r:.100}): it must be a whole number of at least 0.")
        if error is not None and not isinstance(error, BaseException | Failure):
            raise UsageError(f"finish(error={error!r:.100}): pass the exception that ended the program.")
        parts = _ATTEMPT.fullmatch(rollout_id)
        described = None if task is None else to_tasks([task])[0]
        trajectory = self.session(rollout_id).finish(
            task=described,
            reward=score,
            group_id=group_id or (parts[1] if parts else rollout_id),
            attempt=attempt if attempt is not None else int(parts[2]) if parts else 0,
            metrics={name: number for name, number in numbers.items() if number is not None},
            failure=error if isinstance(error, Failure | None) else Failure.of(error),
        )
        self._forget(rollout_id)
        if notify:
            self.notify_finished(trajectory)
        return trajectory

    def notify_finished(self, trajectory: Trajectory) -> None:
        """Call ``on_finish`` with a finished trajectory. An error that it raises is logged."""
        if self.on_finish is None:
            return
        try:
            self.on_finish(trajectory)
        except Exception:
            logger.exception("on_finish failed for the rollout %s.", trajectory.rollout_id)

    def discard(self, rollout_id: str) -> None:
        """End a rollout without a trajectory.

        Raises:
            UsageError: no such rollout is open.
        """
        self.session(rollout_id).close()
        self._forget(rollout_id)

    def session(self, rollout_id: str) -> ProgramSession:
        """Return the session of an open rollout.

        Raises:
            UsageError: there is no such rollout, or it is finished.
        """
        if rollout_id not in self._sessions:
            state = "is finished already" if rollout_id in self._over else "is not open"
            raise UsageError(f"The rollout {rollout_id!r} {state}.")
        return self._sessions[rollout_id]

    def key_of(self, rollout_id: str) -> str | None:
        """Return the key of a rollout's program, even if the rollout is finished; None if there is no such rollout."""
        return self._keys.get(rollout_id) or self._over.get(rollout_id)

    def is_over(self, rollout_id: str) -> bool:
        """Return whether a rollout is finished."""
        return rollout_id in self._over

    def _close_sessions(self) -> None:
        """End all open rollouts without a trajectory."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._keys.clear()

    def _forget(self, rollout_id: str) -> None:
        del self._sessions[rollout_id]
        self._over[rollout_id] = self._keys.pop(rollout_id)
        if len(self._over) > _MAX_FINISHED_IDS:
            self._over.popitem(last=False)


_NOT_OPEN = "The gateway is not open. Use it as `async with Gateway(policy) as gateway: …`."

_NO_ID = (
    "{0!r:.300} is not a valid id of a rollout. It is part of a URL: use letters, digits and any of . _ ~ @ : - (200 "
    "characters at most, the first of them a letter or a digit)."
)
