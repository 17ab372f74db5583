"""Gateway: an OpenAI-compatible endpoint in front of a policy, which records the tokens of every rollout."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentfly.agents.agent import History
from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.agents.toolcalls.registry import tool_call_format as named_format
from agentfly.errors import ConfigError, PrerequisiteError, UsageError
from agentfly.gateway.conversation import read_conversation
from agentfly.gateway.dialect import Dialect, Wanted
from agentfly.gateway.session import Session
from agentfly.gateway.wire import ChatRequest, Refusal
from agentfly.installation import install_command
from agentfly.policies.policy import Policy, SamplingParams
from agentfly.task import Task, as_tasks
from agentfly.trajectory import Failure, Trajectory

if TYPE_CHECKING:
    from agentfly.gateway.http import Server

logger = logging.getLogger(__name__)

_ROLLOUT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@:-]{0,199}")
_ATTEMPT = re.compile(r"(.+)\.(\d{1,9})")
_REMEMBERED = 100_000  # ids of finished rollouts


class Gateway:
    """Serves a policy under OpenAI's chat API, so that an agent program of any kind can be rolled out unchanged.

    ::

        async with Gateway(policy) as gateway:
            url = gateway.url("task-7.0")  # the program's base URL; the rollout is in it
            …  # have the program do its work
            trajectory = gateway.finish("task-7.0", task=task, reward=1.0)

    A rollout begins with its first call. Calls may run at a time, also within a rollout. See
    `agentfly.gateway.session.Session` for how they become token sequences.

    Args:
        policy: samples; it belongs to the caller, who enters and leaves it.
        host: the address to listen at. The default is this machine alone; others see it at ``0.0.0.0``.
        port: the port; 0 for any that is free.
        token: what programs must send as their API key; None for anything.
        model: the name under which the model is listed. Programs may ask for any.
        tool_call_format: how the model writes tool calls; None for its own way, as far as its chat template speaks of
            one, and otherwise JSON in tags.
        history: ``"keep"`` what was sampled as it is, or begin a new sequence (``"rewrite"``) wherever the model's chat
            template would write the past differently, such as without its thoughts.
        temperature: replaces the temperature that programs ask for. Programs often ask for 0, and learning needs 1.
        max_tokens: the most tokens of an answer, also where a program asks for more; None for what the context holds.
        max_body_bytes: requests longer than this are refused.
        max_rollouts: rollouts that may be open at a time.
        on_finish: is told every trajectory when its rollout is finished. If it raises, that is logged, and the
            trajectory is returned all the same.

    Raises:
        ConfigError: a setting cannot be.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        model: str = "agentfly",
        tool_call_format: str | ToolCallFormat | None = None,
        history: History = "keep",
        temperature: float | None = None,
        max_tokens: int | None = None,
        max_body_bytes: int = 32 * 2**20,
        max_rollouts: int = 10_000,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"Gateway(policy={policy!r}): what a gateway records are token ids, so it needs a policy that takes "
                "and returns them: an embedded one, vLLM or a scripted one."
            )
        if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigError(f"Gateway(temperature={temperature!r}): it must be a finite number of at least 0.")
        for name, value in (("max_tokens", max_tokens), ("max_rollouts", max_rollouts)):
            if value is not None and value < 1:
                raise ConfigError(f"Gateway({name}={value!r}): it must be at least 1.")
        self.policy = policy
        self.host, self.port = host, port
        self.token = token
        self.model = model
        self.max_body_bytes = max_body_bytes
        self._calls = None if tool_call_format is None else named_format(tool_call_format)
        self._history: History = history
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_rollouts = max_rollouts
        self._on_finish = on_finish
        self._sessions: dict[str, Session] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._dialect: Dialect | None = None
        self._server: Server | None = None

    def url(self, rollout_id: str) -> str:
        """The base URL that a program is to use as OpenAI's, for this rollout.

        Raises:
            UsageError: the gateway is not open, or the id cannot stand in a URL.
        """
        if self._server is None:
            raise UsageError("The gateway is not open. Use it as `async with Gateway(policy) as gateway: …`.")
        if not _ROLLOUT.fullmatch(rollout_id):
            raise UsageError(_NO_ID.format(rollout_id))
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}/rollouts/{rollout_id}/v1"

    def trajectory(self, rollout_id: str) -> Trajectory:
        """What is on the record of a rollout that is not finished yet.

        Raises:
            UsageError: no call of such a rollout has come.
        """
        return self.open_session(rollout_id).trajectory

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
    ) -> Trajectory:
        """End a rollout, and take its record. What still runs in it is aborted; later calls of it are refused.

        Args:
            rollout_id: the rollout.
            task: what the program was to do; its first words to the model if not given.
            reward: the score; None leaves the trajectory unscored, so that it is in no loss and no baseline.
            group_id: shared by all attempts at one task, whose rewards make the baseline. Not given, it is what stands
                before the ``.`` and a number at the end of the id, which is the attempt, or else the id.
            attempt: number of the attempt in its group.
            metrics: further numbers.
            error: why the rollout failed, where the policy is not to blame: the program could not run, say. A failed
                generation that no other call came after counts as such by itself.

        Raises:
            UsageError: the rollout is finished already, or the reward is no finite number.
            TokenInvariantError: the record is not what it should be.
        """
        if reward is not None and not math.isfinite(reward):
            raise UsageError(f"finish(reward={reward!r}): it must be a finite number, or None for no score.")
        if rollout_id in self._finished:
            raise UsageError(f"The rollout {rollout_id!r} is finished already.")
        parts = _ATTEMPT.fullmatch(rollout_id)
        session = self.session(rollout_id)
        trajectory = session.finish(
            task=None if task is None else as_tasks([task])[0],
            reward=None if reward is None else float(reward),
            group_id=group_id or (parts[1] if parts else rollout_id),
            attempt=attempt if attempt is not None else int(parts[2]) if parts else 0,
            metrics=metrics or {},
            failure=error if isinstance(error, Failure | None) else Failure.of(error),
        )
        self._forget(rollout_id)
        if self._on_finish is not None:
            try:
                self._on_finish(trajectory)
            except Exception:
                logger.exception("What was to be told of the end of rollout %s failed.", rollout_id)
        return trajectory

    def discard(self, rollout_id: str) -> None:
        """End a rollout of which nothing is wanted.

        Raises:
            UsageError: no call of such a rollout has come.
        """
        self.open_session(rollout_id).close()
        self._forget(rollout_id)

    def session(self, rollout_id: str) -> Session:
        """The calls of a rollout, which begins now if it has not begun yet.

        Raises:
            Refusal: the rollout is finished, or too many are open.
            UsageError: the gateway is not open, or the id cannot stand in a URL.
        """
        if self._dialect is None:
            raise UsageError("The gateway is not open. Use it as `async with Gateway(policy) as gateway: …`.")
        if not _ROLLOUT.fullmatch(rollout_id):
            raise UsageError(_NO_ID.format(rollout_id))
        if rollout_id in self._finished:
            raise Refusal(f"The rollout {rollout_id!r} is finished.", status=409, code="finished")
        if rollout_id not in self._sessions:
            if len(self._sessions) >= self._max_rollouts:
                raise Refusal(f"{self._max_rollouts} rollouts are open (max_rollouts); finish some.", status=429)
            self._sessions[rollout_id] = Session(rollout_id, self.policy, self._dialect)
        return self._sessions[rollout_id]

    def open_session(self, rollout_id: str) -> Session:
        """The calls of a rollout that has begun and is not finished.

        Raises:
            UsageError: there is no such rollout.
        """
        if rollout_id not in self._sessions:
            raise UsageError(f"No rollout {rollout_id!r} is open.")
        return self._sessions[rollout_id]

    def wanted(self, asked: ChatRequest) -> Wanted:
        """What a request asks for, as far as it is up to the program.

        Raises:
            Refusal: its messages or tools cannot be read.
        """
        assert self._dialect is not None
        limits = [limit for limit in (asked.limit, self._max_tokens) if limit is not None]
        temperature = self._temperature if self._temperature is not None else asked.temperature
        return Wanted(
            conversation=read_conversation(asked.messages),
            tools=_definitions(asked.tools or ()),
            sampling=SamplingParams(
                temperature=1.0 if temperature is None else temperature,
                top_p=asked.top_p or 1.0,
                top_k=max(0, asked.top_k or 0),
                max_tokens=min(limits, default=sys.maxsize),
                stop_ids=self._dialect.chat.stop_ids,
                seed=asked.seed,
            ),
            stops=asked.stops,
            may_call=asked.may_call,
            most_calls=1 if asked.parallel_tool_calls is False else None,
        )

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            PrerequisiteError: aiohttp is not installed, or the address cannot be listened at.
            ChatFormatError: the model's conversations cannot be continued turn by turn.
        """
        try:
            from agentfly.gateway.http import Server
        except ModuleNotFoundError as error:
            raise PrerequisiteError(
                f"The gateway needs {error.name}, which is not installed: {install_command('gateway')}"
            ) from error
        self._dialect = Dialect.of(self.policy.tokenizer, self._calls, history=self._history)
        server = Server(self)
        try:
            self.port = await server.start()
        except OSError as error:
            await server.stop()
            raise PrerequisiteError(
                f"Cannot listen at {self.host}:{self.port}: {error.strerror or error}. Choose another port; 0 is any."
            ) from error
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        if server is not None:
            await server.stop()
        self._dialect = None

    def _forget(self, rollout_id: str) -> None:
        del self._sessions[rollout_id]
        self._finished[rollout_id] = None
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)


def _definitions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools without what says nothing, so that they are the same however a library writes them."""
    definitions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise Refusal(
                f"tools[{index}] is no function. Give {{'type': 'function', 'function': {{…}}}}.", param="tools"
            )
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), Mapping | None):
            raise Refusal(f"tools[{index}] needs a name, and parameters that are a JSON schema.", param="tools")
        told = {name: value for name, value in function.items() if value is not None and name != "strict"}
        definitions.append({"type": "function", "function": {"description": "", **told}})
    return definitions


_NO_ID = (
    "{0!r} is no id of a rollout: it stands in a URL, so write letters, digits and any of . _ ~ @ : - (200 characters "
    "at most, the first of them a letter or a digit)."
)
