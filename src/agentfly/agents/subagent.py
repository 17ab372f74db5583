"""Subagent: an agent given to another one as a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from agentfly.agents.excerpt import Cut, cut_by_characters
from agentfly.agents.function_tool import Tool
from agentfly.agents.tool import tool
from agentfly.contexts.context import Context
from agentfly.errors import ToolDefinitionError
from agentfly.messages import Message, image_parts, joined
from agentfly.resources.spec import ResourceSpec
from agentfly.task import Task

if TYPE_CHECKING:
    from agentfly.agents.agent import Agent


@dataclass(frozen=True, eq=False, repr=False)
class Subagent(Tool):
    """A tool whose calls are answered by an agent. Made by `Agent.as_tool`.

    The function makes the agent's prompt of the call's arguments. The rollout layer then has the agent converse in the
    same rollout, and what it answers in the end is the observation. ``max_output_tokens`` bounds that; the prompt is
    never cut. ``timeout_s`` and ``retries`` are for the function; the agent has ``max_wall_seconds``.

    Attributes:
        agent: the agent.
    """

    agent: Agent = field(kw_only=True)

    def __repr__(self) -> str:
        return f"<subagent {self.name}>"

    def needs(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """What the prompt's function and the agent's tools have declared that they need for a task."""
        return tuple(dict.fromkeys((*super().needs(task), *self.agent.needs(task))))

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The fields that the prompt's function and the agent's tools need each task to have."""
        return tuple(
            dict.fromkeys((*super().task_fields, *(one for tool in self.agent.tools for one in tool.task_fields)))
        )

    async def prompt(self, arguments: Mapping[str, Any], context: Context, *, cut: Cut = cut_by_characters) -> Message:
        """What the agent is asked in a call, in full, as the message of a user. It may show images.

        Args:
            arguments: what the calling model gave.
            context: the rollout's context for this call.
            cut: cuts what the function raises, which the calling model is told.

        Raises:
            ToolDefinitionError: the function returned a `ToolResult` that says what no prompt can.
            Exception: further ones as of `Tool.call`.
        """
        made = await self._call(arguments, context, cut)
        lost = [name for name in ("reward", "done", "state", "info") if getattr(made, name) not in (None, False, {})]
        if lost:
            raise ToolDefinitionError(
                f"The function that makes the prompt of the subagent {self.name!r} returned ToolResult("
                f"{'=…, '.join(lost)}=…), but a prompt is text and images alone. Return those, and have the subagent's "
                "tools say the rest."
            )
        images = image_parts(made.images)
        return {"role": "user", "content": joined(made.observation, images) if images else made.observation}


def subagent(agent: Agent, prompt: Callable[..., Any] | str, *, name: str | None = None) -> Subagent:
    """A tool that an agent answers.

    Args:
        agent: the agent.
        prompt: a function that makes the agent's prompt of the call's arguments, described as a tool's is; or what
            the caller is told that the agent does. The calls then have one argument, ``request``, which is the prompt.
        name: what the calling model calls it.

    Raises:
        ToolDefinitionError: the function cannot become a tool, or the name cannot be called.
    """
    if isinstance(prompt, str):

        async def ask(request: str) -> str:
            return request

        ask.__doc__ = f"{prompt}\n\nArgs:\n    request: what it is to do, with all that it needs to know."
        prompt = ask
    made = prompt if isinstance(prompt, Tool) else tool(name=name)(prompt)
    given = {one.name: getattr(made, one.name) for one in fields(Tool) if one.init}
    return Subagent(**given, agent=agent)
