"""Every failure type of AgentFly, named after the boundary it crossed.

Two facts are fixed for each type, because everything downstream depends on them:

* ``boundary``: where the failure happened (the user's own code, the machine, a resource, the policy, a tool, ...);
* ``by_policy``: whether the policy could have caused it by what it sampled. Such a failure is scored as the task
  says. A failure that the policy could not have caused is infrastructure: it is kept out of reward, baseline and
  loss, and counted.

Messages say what was asked, what was found and what to do about it, because they are all a user gets to see.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

_VOWEL = re.compile(r"[aeio]|u(?!ni|s)", re.IGNORECASE)
"""How names begin that are spoken with a vowel first."""

_SLIP = 0.85
"""Names that share this much of their letters differ by a slip of the fingers."""

_MOST = 0.75
"""Names that share less of their letters share them by chance."""

_LEAST_BEGINNING = 3
"""Fewer letters are the beginning of names by chance."""


class Boundary(StrEnum):
    """Where a failure happened."""

    USAGE = "usage"  # what the user wrote: an agent, a tool, a reward, a configuration
    MACHINE = "machine"  # what the machine lacks: a program, a kernel feature, disk, network, a model
    RESOURCE = "resource"  # a resource that could not be had, broke, or died
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
    """What an exception says, as text that can be tokenized and saved, whatever its ``__str__`` does."""
    try:
        said = str(error)
    except Exception as failure:
        said = f"(its message cannot be read: {type(failure).__name__})"
    return said.encode("utf-8", errors="replace").decode()


def describe_error(error: BaseException) -> str:
    """An exception for people: its type and what it says, whatever its ``__str__`` does."""
    return f"{type(error).__name__}: {error_message(error)}"


def type_of(value: object) -> str:
    """The type of a value with its article, for messages: ``an Agent``, ``a list``, and ``None`` for None."""
    name = type(value).__name__
    if value is None:
        return "None"
    spelled = name[:2].isupper()  # such as MCPServer, which begins with the sound of its first letter's name
    with_vowel = name[0] in "AEFHILMNORSX" if spelled else _VOWEL.match(name) is not None
    return f"{'an' if with_vowel else 'a'} {name}"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The name that was likely meant by one that nobody knows; None if none is near.

    A plural or another way of writing comes first, then a slip of the fingers, then a name that begins alike, and
    last a name that shares most of its letters.
    """
    names, wanted = list(known), _plain(name)
    if same := [one for one in names if _plain(one) == wanted]:
        return same[0]
    if slips := difflib.get_close_matches(name, names, n=1, cutoff=_SLIP):
        return slips[0]
    alike = [one for one in names if _begin_alike(wanted, _plain(one))]
    near = difflib.get_close_matches(name, alike or names, n=1, cutoff=0.0 if alike else _MOST)
    return near[0] if near else None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that nobody knows: the nearest that there is, or else all of them."""
    names = list(known)
    near = nearest_name(name, names)
    return f"Did you mean {near!r}?" if near else f"There are: {', '.join(names) or 'none'}."


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").removesuffix("s")


def _begin_alike(one: str, other: str) -> bool:
    return min(len(one), len(other)) >= _LEAST_BEGINNING and (one.startswith(other) or other.startswith(one))


def reject_unknown_arguments(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments by names that there are not, with the nearest that there is.

    Args:
        what: the function or class that they were given to.
        given: the names.
        known: the names that there are.

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
    """An attribute or method that something handed out by AgentFly does not have; `hasattr` says so too."""


class ChatFormatError(UsageError):
    """A model whose chat format cannot be used as asked, for instance because it has no chat template."""


# --- what the machine lacks ----------------------------------------------------------------------------------------


class PrerequisiteError(AgentFlyError):
    """Something that must be present on the machine is not: a program, a kernel feature, a package, a model."""

    boundary = Boundary.MACHINE


# --- resources -----------------------------------------------------------------------------------------------------


class ResourceError(AgentFlyError):
    """A resource that could not be had or used. Always infrastructure."""

    boundary = Boundary.RESOURCE


class ResourceStartError(ResourceError):
    """An instance did not start."""


class ResourceResetError(ResourceError):
    """An instance could not be brought back to a clean state; it is replaced."""


class ResourceDied(ResourceError):
    """A live instance went away while it was leased."""


class ResourceUnreachable(ResourceError):
    """Nothing answers at the address where a resource is, such as a container engine that is not running.

    A kind's ``reap`` raises it for an orphan that may be there still. It is told once and tried again for a week.
    """


class LeaseExpired(ResourceError):
    """A resource was used by an owner whose lease of it had ended."""


class AcquireTimeout(ResourceError):
    """A request waited longer than its limit. The message lists the holders with their ages, and the queue."""


class DeadlockBroken(ResourceError):
    """The wait of the youngest holder in a cycle of waits was failed, so that the others can go on."""


class EngineClosed(ResourceError):
    """The resource engine was closed while a request was waiting, or before it was made."""


# --- models over HTTP ----------------------------------------------------------------------------------------------


class ModelAPIError(ResourceError):
    """A call of a model over HTTP that failed. The subclasses say what may be done about it.

    Attributes:
        status: the HTTP status of the answer; None when there was no answer.
        retry_after_s: seconds after which the far side wants to be asked again; None when it does not say.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class APIUnavailable(ModelAPIError):
    """No answer, one that broke off or took too long, or a failure of the far side (5xx): the next try may do."""


class APIRateLimited(APIUnavailable):
    """The far side asks for fewer calls at a time or fewer a minute (429, 503, 529)."""


class APIMalformed(ModelAPIError):
    """An answer that is not what was asked for: not JSON, too long, or without what it must have."""


class APIRefused(ModelAPIError):
    """The far side will never answer this call as it is: the key, the model or the request is wrong."""


# --- the policy ----------------------------------------------------------------------------------------------------


class PolicyError(AgentFlyError):
    """A generation that failed for a reason outside the model's choice of tokens."""

    boundary = Boundary.POLICY


class PromptTooLong(PolicyError):
    """The prompt leaves no room for one sampled token in the policy's context."""

    by_policy = True


class ConversationRefused(ChatFormatError):
    """The chat format cannot write what the model has said, though it can write the conversation without it.

    So the conversation ends here. The model has caused that, and the rollout is scored as the task says.
    """

    boundary = Boundary.POLICY
    by_policy = True


class PolicyUnavailable(PolicyError):
    """No server could be had that samples: they died, or did not answer in time."""


class WeightUpdateError(PolicyError):
    """New weights that were not put into every server of a policy. It samples nothing until an update succeeds."""


class WeightMismatch(WeightUpdateError):
    """Servers that do not serve the weights they were given, by the log-probs of a probe on both sides."""


# --- tools and rewards ---------------------------------------------------------------------------------------------


class ToolError(AgentFlyError):
    """What a tool raises to tell the model that its call did not work. The message becomes the observation."""

    boundary = Boundary.TOOL
    by_policy = True


class UnknownTool(ToolError):
    """The model called a tool that its agent does not have."""


class InvalidArguments(ToolError):
    """The arguments of a call do not fit the tool's schema."""


class ToolTimeout(ToolError):
    """A tool call took longer than the tool allows."""


class ToolCrashed(ToolError):
    """A tool's code failed with an exception of another kind, which is the cause."""


class SandboxEnded(ToolError):
    """What runs in a sandbox has brought the sandbox to its end.

    Nothing but what runs inside can do this, so it is the policy's doing and no failure of infrastructure.
    """


class SandboxFlooded(SandboxEnded):
    """Processes in a sandbox flooded the channels of its shell, and the sandbox was ended for that."""


class SandboxOutOfMemory(SandboxEnded):
    """A sandbox was over its own memory limit, and the kernel had nothing left to kill but its first process."""


class SubagentUnfinished(ToolError):
    """A subagent ended, for a limit on what it may do, before it had an answer."""


class ToolUnavailable(AgentFlyError):
    """A tool's code failed because of the machine or the network, which the policy is not to blame for."""

    boundary = Boundary.TOOL


class RewardError(AgentFlyError):
    """A reward that could not be computed. The trajectory is then unscored, never scored zero."""

    boundary = Boundary.REWARD


# --- token bookkeeping ---------------------------------------------------------------------------------------------


class TokenInvariantError(AgentFlyError):
    """A token invariant does not hold. The rollout is refused, so that it can never be trained on."""

    boundary = Boundary.TOKENS
