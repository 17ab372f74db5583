"""Every failure type of AgentFly, named after the boundary it crossed.

Two facts are fixed for each type, because everything downstream depends on them:

* ``boundary``: where the failure happened (the user's own code, the machine, a resource, the policy, a tool, ...);
* ``by_policy``: whether the policy could have caused it by what it sampled. Such a failure is scored as the task
  says. A failure that the policy could not have caused is infrastructure: it is kept out of reward, baseline and
  loss, and counted.

Messages say what was requested, what was found and what to do, because users see nothing else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

_VOWEL = re.compile(r"[aeio]|u(?!ni|s)", re.IGNORECASE)
"""Beginnings of names that are pronounced with a vowel first."""

_TYPO_SIMILARITY = 0.85
"""Minimum similarity at which two names count as differing by a typing error."""

_MIN_SIMILARITY = 0.75
"""Similarity below which two names are unrelated."""

_MIN_PREFIX = 3
"""Length below which a common prefix means nothing."""


class Boundary(StrEnum):
    """The boundary at which a failure happened."""

    USAGE = "usage"  # what the user wrote: an agent, a tool, a reward, a configuration
    MACHINE = "machine"  # what the machine lacks: a program, a kernel feature, disk, network, a model
    RESOURCE = "resource"  # a resource that could not be acquired, broke, or died
    POLICY = "policy"  # the sampler: a generation that failed
    TOOL = "tool"  # a tool call
    REWARD = "reward"  # a score that could not be computed
    TOKENS = "tokens"  # a broken invariant of the token bookkeeping: a bug, never data


class AgentFlyError(Exception):
    """Base of every failure that AgentFly raises on purpose.

    The command line prints the message of one without a traceback, so the message must be enough to act on.
    """

    boundary: ClassVar[Boundary] = Boundary.USAGE
    by_policy: ClassVar[bool] = False


def error_message(error: BaseException) -> str:
    """Return the message of an exception as text that can be tokenized and saved, even if its ``__str__`` fails."""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message cannot be read: {type(failure).__name__})"
    return message.encode("utf-8", errors="replace").decode()


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception, even if its ``__str__`` fails."""
    return f"{type(error).__name__}: {error_message(error)}"


def type_of(value: object) -> str:
    """Return the type of a value with its article, for messages: ``an Agent``, ``a list``, and ``None`` for None."""
    name = type(value).__name__
    if value is None:
        return "None"
    spelled = name[:2].isupper()  # such as MCPServer, with a first letter that is pronounced by its name
    with_vowel = name[0] in "AEFHILMNORSX" if spelled else _VOWEL.match(name) is not None
    return f"{'an' if with_vowel else 'a'} {name}"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown name likely stands for; None if none is close.

    In order of preference: another spelling or plural, a typing error, a name with a common prefix, a similar name.
    """
    names, wanted = list(known), _plain(name)
    if same := [one for one in names if _plain(one) == wanted]:
        return same[0]
    if typos := difflib.get_close_matches(name, names, n=1, cutoff=_TYPO_SIMILARITY):
        return typos[0]
    alike = [one for one in names if _begin_alike(wanted, _plain(one))]
    near = difflib.get_close_matches(name, alike or names, n=1, cutoff=0.0 if alike else _MIN_SIMILARITY)
    return near[0] if near else None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message about an unknown name: the closest known name, or the list of all of them."""
    names = list(known)
    near = nearest_name(name, names)
    return f"Did you mean {near!r}?" if near else f"There are: {', '.join(names) or 'none'}."


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").removesuffix("s")


def _begin_alike(one: str, other: str) -> bool:
    return min(len(one), len(other)) >= _MIN_PREFIX and (one.startswith(other) or other.startswith(one))


def reject_unknown_arguments(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Reject arguments with unknown names, and suggest the closest known name.

    Args:
        what: the function or class that was called.
        given: the given names.
        known: the valid names.

    Raises:
        UsageError: a name is unknown.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(f"{what} has no argument {name!r}. {suggest_name(name, names)}")


# --- what the user wrote -------------------------------------------------------------------------------------------


class UsageError(AgentFlyError):
    """The user's own code or settings ask for something that cannot be done as written."""


class ConfigError(UsageError):
    """A configuration that is unknown, of the wrong type, or contradicts itself."""


class ToolDefinitionError(UsageError):
    """A function that cannot become a tool, for instance because it has no docstring."""


class RewardDefinitionError(UsageError):
    """A function that cannot become a reward, or returned something that is not a score."""


class UnknownAttribute(UsageError, AttributeError):
    """An attribute or method that an object of AgentFly does not have. `hasattr` works too."""


class ChatFormatError(UsageError):
    """A model whose chat format cannot be used as asked, for instance because it has no chat template."""


# --- what the machine lacks ----------------------------------------------------------------------------------------


class PrerequisiteError(AgentFlyError):
    """Something that must be present on the machine is not: a program, a kernel feature, a package, a model."""

    boundary = Boundary.MACHINE


# --- resources -----------------------------------------------------------------------------------------------------


class ResourceError(AgentFlyError):
    """A resource that is unavailable or unusable. Always infrastructure."""

    boundary = Boundary.RESOURCE


class ResourceStartError(ResourceError):
    """An instance did not start."""


class ResourceResetError(ResourceError):
    """An instance could not be reset to a clean state. It is replaced."""


class ResourceDied(ResourceError):
    """A live instance went away while it was leased."""


class ResourceUnreachable(ResourceError):
    """Nothing answers at a resource's address, for instance because a container engine is not running.

    A kind's ``reap`` raises it for an orphan that may still exist. It is reported once and retried for a week.
    """


class LeaseExpired(ResourceError):
    """An owner used a resource after its lease had ended."""


class AcquireTimeout(ResourceError):
    """A request waited longer than its limit. The message lists the holders with their ages, and the queue."""


class DeadlockBroken(ResourceError):
    """The engine ended the wait of the youngest holder in a cycle of waits, so that the others can continue."""


class EngineClosed(ResourceError):
    """The resource engine was closed while a request was waiting, or before it was made."""


# --- models over HTTP ----------------------------------------------------------------------------------------------


class ModelAPIError(ResourceError):
    """A failed call of a model over HTTP. The subclasses say whether a retry may help.

    Attributes:
        status: the HTTP status of the response; None if there was no response.
        retry_after_s: seconds after which the server asks for a retry; None if it does not say.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class APIUnavailable(ModelAPIError):
    """No response, a response that broke off or took too long, or a server error (5xx). A retry may succeed."""


class APIRateLimited(APIUnavailable):
    """The server limits concurrent calls or calls per minute (429, 503, 529)."""


class APIMalformed(ModelAPIError):
    """An invalid response: not JSON, too long, or without a required field."""


class APIRefused(ModelAPIError):
    """The server will never accept this call: the key, the model or the request is wrong."""


# --- the policy ----------------------------------------------------------------------------------------------------


class PolicyError(AgentFlyError):
    """A generation that failed for a reason outside the model's choice of tokens."""

    boundary = Boundary.POLICY


class PromptTooLong(PolicyError):
    """The prompt leaves no room for one sampled token in the policy's context."""

    by_policy = True


class ConversationRefused(ChatFormatError):
    """The chat format cannot render the model's turn, although it can render the conversation without it.

    The conversation ends here. The model caused this, so the rollout is scored as the task says.
    """

    boundary = Boundary.POLICY
    by_policy = True


class PolicyUnavailable(PolicyError):
    """No inference server is available: all died or did not respond in time."""


class WeightUpdateError(PolicyError):
    """New weights did not reach every server of a policy. The policy samples nothing until an update succeeds."""


class WeightMismatch(WeightUpdateError):
    """Servers do not serve the weights that they were given, according to log-probs of a probe on both sides."""


# --- tools and rewards ---------------------------------------------------------------------------------------------


class ToolError(AgentFlyError):
    """Raised by a tool to tell the model that its call failed. The message becomes the observation."""

    boundary = Boundary.TOOL
    by_policy = True


class UnknownTool(ToolError):
    """The model called a tool that its agent does not have."""


class InvalidArguments(ToolError):
    """The arguments of a call do not fit the tool's schema."""


class ToolTimeout(ToolError):
    """A tool call took longer than the tool allows."""


class ToolCrashed(ToolError):
    """A tool's code raised an exception of another type, which is the cause."""


class SandboxEnded(ToolError):
    """Processes inside a sandbox ended the sandbox.

    Only processes inside can do this, so the policy caused it, and it is not an infrastructure failure.
    """


class SandboxFlooded(SandboxEnded):
    """The sandbox was ended because its processes flooded the channels of its shell."""


class SandboxOutOfMemory(SandboxEnded):
    """The kernel killed the sandbox's first process, because the sandbox exceeded its own memory limit."""


class SubagentUnfinished(ToolError):
    """A subagent reached one of its limits before it had an answer."""


class ToolUnavailable(AgentFlyError):
    """A tool's code failed because of the machine or the network, and not because of the policy."""

    boundary = Boundary.TOOL


class RewardError(AgentFlyError):
    """A reward that could not be computed. The trajectory is then unscored, never scored zero."""

    boundary = Boundary.REWARD


# --- token bookkeeping ---------------------------------------------------------------------------------------------


class TokenInvariantError(AgentFlyError):
    """A token invariant does not hold. The rollout is rejected, so that it is never trained on."""

    boundary = Boundary.TOKENS
