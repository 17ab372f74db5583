"""Gateway: the chat APIs that programs speak, in front of a policy, with the tokens of every rollout recorded."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from agentfly.core.errors import ConfigError, PrerequisiteError, UsageError
from agentfly.core.installation import install_command
from agentfly.core.json_values import score_of
from agentfly.core.numbers import is_whole, require_whole
from agentfly.core.task import Task, to_tasks
from agentfly.core.trajectory import Failure, Trajectory
from agentfly.formats.chat.chat_format import History
from agentfly.formats.toolcalls.registry import tool_call_format as named_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from agentfly.gateway.auth import host_name, is_key, new_key
from agentfly.gateway.call_tree import ProgramAPI
from agentfly.gateway.chat_completions.api import ChatCompletionsAPI
from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.model_request import RolloutSampling
from agentfly.gateway.request_codec import RequestCodec
from agentfly.gateway.rollout_registry import RolloutEndpoint
from agentfly.gateway.session import ProgramSession, ThreadOffloader
from agentfly.policies.policy import Policy

if TYPE_CHECKING:
    from agentfly.gateway.http_server import GatewayHTTPServer

logger = logging.getLogger(__name__)

_ROLLOUT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@:-]{0,199}")
_ATTEMPT = re.compile(r"(.+)\.(\d{1,9})")
_MAX_FINISHED_IDS = 100_000  # rollouts that are over
MAX_PORT = 65535


class Gateway:
    """Serves a policy under OpenAI's chat API, so that an agent program of any kind can be rolled out unchanged.

    ::

        async with Gateway(policy) as gateway:
            endpoint = gateway.open("task-7.0")  # the program's base URL, and a key for this rollout only
            …  # run the program with `endpoint.environment`
            trajectory = gateway.finish("task-7.0", task=task, reward=1.0)

    Calls may run in parallel, also within a rollout. `agentfly.gateway.session.ProgramSession` describes how they
    become token sequences. A program can only make model calls in its own rollout: see `agentfly.gateway.auth`.

    Args:
        policy: samples; it belongs to the caller, who enters and leaves it.
        host: the address to listen at. The default is this machine alone; others see it at ``0.0.0.0``. The gateway
            speaks plain HTTP, so whatever reads the network in between reads the keys.
        port: the port; 0 for any that is free.
        key: what a harness that is no part of this process must send, to open, read and finish rollouts. By default
            one that nobody can guess; it is `key` then.
        model: the name under which the model is listed. Programs may ask for any.
        tool_call_format: how the model writes tool calls; None for its own way, as far as its chat template speaks of
            one, and otherwise JSON in tags.
        history: ``"keep"`` what was sampled as it is, or begin a new sequence (``"rewrite"``) wherever the model's chat
            template would write the past differently, such as without its thoughts.
        sampling: how the model samples in rollouts that say nothing else. By default it is at temperature 1, and
            programs have no say in it.
        max_tokens: the most tokens of an answer, also where a program asks for more; None for what the context holds.
        limits: what programs may take; see `agentfly.gateway.limits.GatewayLimits`.
        public_host: the host in the URLs that programs are given, if they reach the gateway by another than ``host``.
        allowed_hosts: further names of hosts by which requests may call the gateway. Addresses and ``localhost`` are
            always allowed.
        on_finish: is told every trajectory when its rollout is finished. If it raises, that is logged, and the
            trajectory is returned all the same. What is finished over HTTP is told on a thread, one at a time.

    Attributes:
        key: the harness's key.

    Raises:
        ConfigError: a setting cannot be.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        model: str = "agentfly",
        tool_call_format: str | ToolCallFormat | None = None,
        history: History = "keep",
        sampling: RolloutSampling | None = None,
        max_tokens: int | None = None,
        limits: GatewayLimits | None = None,
        public_host: str | None = None,
        allowed_hosts: Collection[str] = (),
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"Gateway(policy={policy!r}): what a gateway records are token ids, so it needs a policy that takes "
                "and returns them: an embedded one, vLLM or a scripted one."
            )
        if max_tokens is not None:
            require_whole("Gateway", max_tokens=max_tokens)
        if not is_whole(port, 0) or port > MAX_PORT:
            raise ConfigError(f"Gateway(port={port!r:.100}): it must be a whole number from 0 to {MAX_PORT}.")
        for name, value, wanted in (
            ("host", host, str),
            ("model", model, str),
            ("public_host", public_host or "", str),
            ("sampling", sampling or RolloutSampling(), RolloutSampling),
            ("limits", limits or GatewayLimits(), GatewayLimits),
        ):
            if not isinstance(value, wanted):
                raise ConfigError(f"Gateway({name}={value!r:.100}): it must be of the type {wanted.__name__}.")
        if history not in get_args(History):
            raise ConfigError(f"Gateway(history={history!r:.100}): it must be 'keep' or 'rewrite'.")
        if on_finish is not None and not callable(on_finish):
            raise ConfigError(f"Gateway(on_finish={on_finish!r:.100}): it must be a function that takes a trajectory.")
        if key is not None and not (isinstance(key, str) and is_key(key)):
            raise ConfigError(
                "Gateway(key=…): a key is sent in a header, so it must be visible ASCII characters without blanks."
            )
        if isinstance(allowed_hosts, str):
            raise ConfigError(f"Gateway(allowed_hosts={allowed_hosts!r}): give a list of names.")
        self.policy = policy
        self.host, self.port = host, port
        self.key = key if key is not None else new_key()
        self.model = model
        self.limits = limits or GatewayLimits()
        self.allowed_hosts = {host_name(name) for name in (host, public_host, *allowed_hosts) if name}
        self.on_finish = on_finish
        self._public_host = public_host
        self._calls = None if tool_call_format is None else named_format(tool_call_format)
        self._history: History = history
        self._sampling = sampling or RolloutSampling()
        self._max_tokens = max_tokens
        self._sessions: dict[str, ProgramSession] = {}
        self._keys: dict[str, str] = {}
        self._over: OrderedDict[str, str] = OrderedDict()  # the ids of rollouts that are over, with their keys
        self._codec: RequestCodec | None = None
        self._heavy = ThreadOffloader()
        self._server: GatewayHTTPServer | None = None

    @property
    def url(self) -> str:
        """Where the gateway is reached.

        Raises:
            UsageError: it is not open.
        """
        if self._server is None:
            raise UsageError(_NOT_OPEN)
        host = self._public_host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def open(self, rollout_id: str, *, sampling: RolloutSampling | None = None) -> RolloutEndpoint:
        """Begin a rollout, and say what its program is to be told.

        Args:
            rollout_id: a name of your choice that no other rollout has. One that ends with ``.`` and a number names an
                attempt: what stands before it is the group.
            sampling: how the model samples in it; as the gateway says if not given.

        Raises:
            UsageError: the gateway is not open, there is or was such a rollout, the name cannot stand in a URL, or too
                many are open.
        """
        url = self.url
        if not _ROLLOUT.fullmatch(rollout_id):
            raise UsageError(_NO_ID.format(rollout_id))
        if rollout_id in self._sessions or rollout_id in self._over:
            state = "open" if rollout_id in self._sessions else "over"
            raise UsageError(f"The rollout {rollout_id!r} is {state} already. Choose another name.")
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
        """What is on the record of a rollout that is not finished yet.

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
        tell: bool = True,
    ) -> Trajectory:
        """End a rollout, and take its record. What still runs in it is aborted; later calls of it are refused.

        Args:
            rollout_id: the rollout.
            task: what the program was to do; its first words to the model if not given.
            reward: the score; None leaves the trajectory unscored, so that it is in no loss and no baseline. It does
                not count where the rollout has failed for a reason that the policy is not to blame for, nor where no
                call of the program was answered: then the model had no part in it.
            group_id: shared by all attempts at one task, whose rewards make the baseline. Not given, it is what stands
                before the ``.`` and a number at the end of the id, which is the attempt, or else the id.
            attempt: number of the attempt in its group.
            metrics: further numbers.
            error: why the rollout failed, where the policy is not to blame: the program could not run, say. A failed
                generation that no other call came after counts as such by itself.
            tell: whether ``on_finish`` is told of it now; otherwise `tell` is for the caller to call.

        Raises:
            UsageError: no such rollout is open, or a number is none that can be.
        """
        score = None if reward is None else score_of(reward)
        if score is None and reward is not None:
            raise UsageError(
                f"finish(reward={reward!r:.100}): it must be a finite number up to 1e30, or None for no score."
            )
        numbers = {str(name): score_of(number) for name, number in dict(metrics or {}).items()}
        for name, number in numbers.items():
            if number is None:
                raise UsageError(f"finish(metrics=…): {name!r:.100} is no finite number up to 1e30. Leave it out.")
        if attempt is not None and (type(attempt) is not int or attempt < 0):
            raise UsageError(f"finish(attempt={attempt!r:.100}): it must be a whole number of at least 0.")
        if error is not None and not isinstance(error, BaseException | Failure):
            raise UsageError(f"finish(error={error!r:.100}): give the exception that kept the program from its work.")
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
        if tell:
            self.notify_finished(trajectory)
        return trajectory

    def notify_finished(self, trajectory: Trajectory) -> None:
        """Tell ``on_finish`` of a finished trajectory. What it raises is logged."""
        if self.on_finish is None:
            return
        try:
            self.on_finish(trajectory)
        except Exception:
            logger.exception("What was to be told of the end of rollout %s failed.", trajectory.rollout_id)

    def discard(self, rollout_id: str) -> None:
        """End a rollout of which nothing is wanted.

        Raises:
            UsageError: no such rollout is open.
        """
        self.session(rollout_id).close()
        self._forget(rollout_id)

    def session(self, rollout_id: str) -> ProgramSession:
        """The calls of a rollout that is open.

        Raises:
            UsageError: there is no such rollout, or it is over.
        """
        if rollout_id not in self._sessions:
            told = "is finished already" if rollout_id in self._over else "is not open"
            raise UsageError(f"The rollout {rollout_id!r} {told}.")
        return self._sessions[rollout_id]

    def key_of(self, rollout_id: str) -> str | None:
        """The key of a rollout's program, also where the rollout is over; None where there is no such rollout."""
        return self._keys.get(rollout_id) or self._over.get(rollout_id)

    def is_over(self, rollout_id: str) -> bool:
        """Whether a rollout is over."""
        return rollout_id in self._over

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            PrerequisiteError: aiohttp is not installed, or the address cannot be listened at.
            ChatFormatError: the model's conversations cannot be continued turn by turn.
        """
        try:
            from agentfly.gateway.http_server import GatewayHTTPServer
        except ModuleNotFoundError as error:
            raise PrerequisiteError(
                f"The gateway needs {error.name}, which is not installed: {install_command('gateway')}"
            ) from error
        self._codec = RequestCodec.of(self.policy.tokenizer, self._calls, history=self._history)
        self._heavy = ThreadOffloader()
        apis: list[ProgramAPI] = [
            ChatCompletionsAPI(
                self.policy.tokenizer,
                context_length=self.policy.context_length,
                limits=self.limits,
                max_tokens=self._max_tokens,
            )
        ]
        server = GatewayHTTPServer(self, apis)
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
        self._keys.clear()
        if server is not None:
            await server.stop()
        self._codec = None

    def _forget(self, rollout_id: str) -> None:
        del self._sessions[rollout_id]
        self._over[rollout_id] = self._keys.pop(rollout_id)
        if len(self._over) > _MAX_FINISHED_IDS:
            self._over.popitem(last=False)


_NOT_OPEN = "The gateway is not open. Use it as `async with Gateway(policy) as gateway: …`."

_NO_ID = (
    "{0!r:.300} is no id of a rollout: it stands in a URL, so write letters, digits and any of . _ ~ @ : - (200 "
    "characters at most, the first of them a letter or a digit)."
)
