"""The Agent (model, system prompt, tools, tool-call format, memory and limits), and agents as tools of other agents."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_args

from agentfly.agents.memory import FullHistory, Memory, SummaryFolding
from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import expand_tools, tool
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    ConfigError,
    ToolDefinitionError,
    UnknownTool,
    UsageError,
    describe_error,
    reject_unknown_arguments,
)
from agentfly.core.messages import Message, ToolCall, concat_content, image_parts
from agentfly.core.numbers import is_duration, is_finite_number, is_whole, require_number, require_whole
from agentfly.core.task import Task
from agentfly.core.truncation import Truncate, truncate_by_characters
from agentfly.formats.chat.chat_format import History
from agentfly.formats.toolcalls.registry import tool_call_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat, message_of_turn, with_opening_marker
from agentfly.resources.spec import ResourceSpec

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot encode."""


@dataclass(frozen=True, eq=False, repr=False)
class Subagent(Tool):
    """A tool that another agent answers. Made by `Agent.as_tool`.

    The function builds the agent's prompt from the call's arguments. The rollout layer then runs the agent in the same
    rollout, and its final answer is the observation. ``max_output_tokens`` limits the answer; the prompt is never
    truncated. ``timeout_s`` and ``retries`` apply to the function; ``max_wall_seconds`` limits the agent.

    Attributes:
        agent: the agent.
    """

    agent: Agent = field(kw_only=True)

    def __repr__(self) -> str:
        return f"<subagent {self.name}>"

    def resources_for(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """The resources that the prompt function and the agent's tools declare for a task."""
        return tuple(dict.fromkeys((*super().resources_for(task), *self.agent.resources_for(task))))

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The task fields that the prompt function and the agent's tools require."""
        return tuple(
            dict.fromkeys((*super().task_fields, *(one for tool in self.agent.tools for one in tool.task_fields)))
        )

    async def prompt(
        self, arguments: Mapping[str, Any], context: Context, *, truncate: Truncate = truncate_by_characters
    ) -> Message:
        """Return the agent's full prompt for a call, as a user message. It may contain images.

        Args:
            arguments: the arguments that the calling model gave.
            context: the rollout's context for this call.
            truncate: truncates the message of an error that the function raises.

        Raises:
            ToolDefinitionError: the function returned a `ToolResult` with fields that a prompt cannot have.
            Exception: as in `Tool.call`.
        """
        made = await self._call(arguments, context, truncate)
        unused = [name for name in ("reward", "done", "state", "info") if getattr(made, name) not in (None, False, {})]
        if unused:
            raise ToolDefinitionError(
                f"The function that makes the prompt of the subagent {self.name!r} returned ToolResult("
                f"{'=…, '.join(unused)}=…), but a prompt is text and images alone. Return those, and have the "
                "subagent's tools say the rest."
            )
        images = image_parts(made.images)
        return {"role": "user", "content": concat_content(made.observation, images) if images else made.observation}


def subagent(agent: Agent, prompt: Callable[..., Any] | str, *, name: str | None = None) -> Subagent:
    """Make a tool that an agent answers.

    Args:
        agent: the agent.
        prompt: a function that builds the agent's prompt from the call's arguments, documented like a tool; or a
            description of the agent for the caller. With a description, calls have one argument, ``request``, which
            is the prompt.
        name: the name by which the model calls it.

    Raises:
        ToolDefinitionError: the function cannot become a tool, or the name is not valid.
    """
    if isinstance(prompt, str):

        async def ask(request: str) -> str:
            return request

        ask.__doc__ = f"{prompt}\n\nArgs:\n    request: what it is to do, with all that it needs to know."
        prompt = ask
    made = prompt if isinstance(prompt, Tool) else tool(name=name)(prompt)
    given = {one.name: getattr(made, one.name) for one in fields(Tool) if one.init}
    return Subagent(**given, agent=agent)


CHAT_FORMAT = re.compile(r"auto|template|renderers(:[\w.-]+)?")
"""The values that `Agent.chat_format` accepts."""

UNLIMITED = ("max_sequence_tokens", "max_sampled_tokens", "max_tool_calls")
"""The limits of an agent that may be None, for no limit."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model with a system prompt, tools, a tool-call format and limits.

    The constructor validates all fields. `dataclasses.replace` makes a changed copy and validates it again.

    Args:
        model: the name of a model that AgentFly ships, a Hugging Face id, or a local directory.
        tools: the tools that the model can call: results of `@tool`, functions, methods of an instance, classes, and
            other agents (see `as_tool`). Each rollout gets its own instance of a class.
        system_prompt: text at the start of the system message; the description of the tools follows it.
        tool_call_format: how the model writes calls: ``"hermes"`` (JSON in tags), ``"action"`` (plain lines, for small
            models), ``"model"`` (the format that the model was trained on), another name (see
            docs/guides/tool-calls.md), or a `ToolCallFormat`.
        tool_prompt: description of the tools for the model; None for the format's own text, ``""`` for none.
        memory: the part of the conversation that the model sees at each turn: everything (`FullHistory`), the last
            turns (`Window`), a summary of older turns (`SummaryFolding`), or any object with the `Memory` protocol.
        history: what to do where the chat template later renders past turns differently, for instance without their
            reasoning. ``"keep"`` continues after the sampled tokens. ``"rewrite"`` follows the template and begins a
            new token sequence.
        chat_format: how conversations become token ids. ``"auto"`` uses the ``renderers`` package where it is installed
            and supports the model, and the model's chat template otherwise. ``"template"`` and ``"renderers"`` force
            one of them; ``"renderers:NAME"`` selects one of the package's formats.
        max_turns: maximum number of turns in a rollout, without turns that write memory.
        max_tokens_per_turn: maximum number of tokens sampled in one turn.
        max_sequence_tokens: maximum length of one token sequence: prompt, sampled tokens and observations. Under the
            strategy ``chain`` that is the whole conversation, until memory folds it. Under ``step`` it is one turn with
            its prompt. None for the policy's context length, which is a limit in any case.
        max_sampled_tokens: maximum number of tokens sampled in a rollout, over all turns of the agent. Subagents have
            their own limits and do not count. None for no limit.
        max_tool_calls: maximum number of tool calls in a rollout; None for no limit.
        max_wall_seconds: maximum duration of a rollout in seconds, waiting for resources included; None for no limit.
        max_consecutive_invalid_calls: a rollout ends after this many consecutive calls that could not be executed.
        temperature: divides the logits when sampling; 0 takes the most likely token.
        top_p: share of probability mass to sample from; 1 samples from all of it.
        top_k: number of most likely tokens to sample from; 0 samples from all of them.

    Raises:
        ConfigError: a field has an invalid value, or two fields contradict each other.
    """

    model: str | Path
    tools: Sequence[Tool] = ()
    system_prompt: str | None = None
    tool_call_format: str | ToolCallFormat = "hermes"
    tool_prompt: str | None = None
    memory: Memory = field(default_factory=FullHistory)
    history: History = "keep"
    chat_format: str = "auto"
    max_turns: int = 10
    max_tokens_per_turn: int = 512
    max_sequence_tokens: int | None = None
    max_sampled_tokens: int | None = None
    max_tool_calls: int | None = None
    max_wall_seconds: float | None = None
    max_consecutive_invalid_calls: int = 3
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __new__(cls, *values: object, **named: object) -> Self:
        """Reject unknown arguments with a hint, which the error of a dataclass would lack."""
        known = [one.name for one in fields(cls)]
        reject_unknown_arguments(cls.__name__, named, known)
        if values:
            raise UsageError(
                f"{cls.__name__}({values[0]!r:.100}): write each field by its name, as in "
                f"{cls.__name__}(model='tiny', tools=[…])."
            )
        if "model" not in named:
            raise UsageError(f"{cls.__name__} needs a model. Write {cls.__name__}(model='tiny', …).")
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        """The arguments for `__new__` when an agent is copied or unpickled."""
        return (), {"model": self.model}

    def __post_init__(self) -> None:
        if not isinstance(self.tools, Iterable) or isinstance(self.tools, (str, type)):
            name = self.tools.name if isinstance(self.tools, Tool) else getattr(self.tools, "__name__", self.tools)
            raise ConfigError(f"Agent(tools={name}): it must be a list. Write tools=[{name}].")
        object.__setattr__(
            self, "tools", tuple(tool for given in self.tools for tool in expand_tools(given) or [given])
        )
        self._check_texts()
        self._check_tools()
        self._check_limits()
        self._check_memory()
        self._check_sampling()

    @cached_property
    def format(self) -> ToolCallFormat:
        """The resolved tool-call format."""
        return tool_call_format(self.tool_call_format)

    @cached_property
    def _tools_by_name(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self.tools}

    def tool(self, name: str) -> Tool:
        """Return the tool with this name.

        Raises:
            UnknownTool: the agent has no such tool; the message lists its tools.
        """
        try:
            return self._tools_by_name[name]
        except KeyError:
            names = ", ".join(self._tools_by_name)
            known = f"The tools are: {names}." if names else "There are no tools."
            raise UnknownTool(f"There is no tool {str(name)[:100]!r}. {known}") from None

    def as_tool(self, prompt: Callable[..., Any] | str, *, name: str | None = None) -> Subagent:
        """Return this agent as a tool of another agent.

        Each call starts a new conversation in the same rollout. It uses the agent's own prompt, tools, memory and
        limits, and the rollout's context, task and resources. Its turns are in the same trajectory, in separate token
        sequences. Its answer is the observation. If a limit ends the conversation, the observation says which.

        The agent reads its prompt in full. An answer longer than the tool's ``max_output_tokens`` is truncated for the
        caller like any observation; the record keeps all of it.

        Args:
            prompt: a description of the agent for the caller: ``agent.as_tool("Finds facts.", name="research")``.
                Calls then have one argument, ``request``, which is the prompt. Or a function, with a docstring and
                type hints like a tool, that builds the prompt from other arguments. ``@tool`` on it may set
                ``max_output_tokens``.
            name: the name by which the model calls it; by default the function's name.

        Raises:
            ConfigError: there is no name.
            ToolDefinitionError: the function cannot become a tool, or the name is not valid.
        """
        if isinstance(prompt, str) and name is None:
            raise ConfigError(f"as_tool({prompt[:40]!r}): a name is needed, for the model to call: as_tool(…, name=…).")
        return subagent(self, prompt, name=name)

    @property
    def subagents(self) -> Iterator[Agent]:
        """The agents among the tools, recursively."""
        for one in self.tools:
            if isinstance(one, Subagent):
                yield one.agent
                yield from one.agent.subagents

    def with_model(self, model: str | Path) -> Agent:
        """Return a copy with another model. Subagents that had the same model get the new one too."""
        return self._with_models(lambda one: model if one == self.model else one)

    def _with_models(self, other: Callable[[str | Path], str | Path]) -> Agent:
        tools = [
            replace(tool, agent=tool.agent._with_models(other)) if isinstance(tool, Subagent) else tool
            for tool in self.tools
        ]
        return replace(self, model=other(self.model), tools=tools)

    def resources_for(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """Return the resources that the tools declare for a task, without duplicates.

        Raises:
            ToolDefinitionError: a tool's ``resources`` function failed for this task.
        """
        return tuple(dict.fromkeys(spec for tool in self.tools for spec in tool.resources_for(task)))

    def system_message(self) -> str:
        """Return the system message: the system prompt and the description of the tools."""
        described = self.tool_prompt
        if described is None:
            in_message = self.tools and not self.format.uses_chat_template
            described = self.format.instructions(self.tools) if in_message else ""
        return "\n\n".join(part for part in (self.system_prompt, described) if part)

    @cached_property
    def tools_for_template(self) -> tuple[dict[str, Any], ...]:
        """Definitions for the model's chat template; empty if the system message describes the tools."""
        return tuple(tool.definition for tool in self.tools) if self.format.uses_chat_template else ()

    def assistant_message(self, text: str, calls: Sequence[ToolCall], *, opened: str = "") -> Message:
        """Return the conversation message for a turn of the model.

        Args:
            text: the text of the turn.
            calls: the calls in it.
            opened: the marker with which the prompt opened reasoning; empty if it did not.
        """
        return message_of_turn(opened, self.format, text, calls)

    def parse_calls(self, text: str, *, first_call: int = 0, opened: str = "") -> tuple[ToolCall, ...]:
        """Parse the tool calls in the text of a turn. Without tools there are none.

        Args:
            text: the text of the turn.
            first_call: number of the first call.
            opened: the marker with which the prompt opened reasoning; empty if it did not.

        Raises:
            UsageError: a user's tool-call format raised or returned something other than calls.
        """
        if not self.tools:
            return ()
        label = f"The tool-call format {self.format.name!r} ({type(self.format).__name__})"
        try:
            found = self.format.parse(with_opening_marker(opened, text), self.tools, first_call=first_call)
        except Exception as error:
            raise UsageError(
                f"{label} could not read a turn: its parse raised {describe_error(error)}. It must not raise for any "
                "text: a malformed call is a ToolCall with an error."
            ) from error
        if not isinstance(found, (tuple, list)) or not all(isinstance(call, ToolCall) for call in found):
            raise UsageError(
                f"{label} could not read a turn: its parse returned {found!r:.100}. It must return a tuple of "
                "ToolCall, an empty one where there is no call."
            )
        return tuple(found)

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return the message that shows a call's observation to the model."""
        return self.format.result_message(call, observation)

    def _check_texts(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(
                f"Agent(model={self.model!r:.100}): it must be the name of a model, such as 'tiny', a Hugging Face id, "
                "or a directory. A policy is given to the run: af.run(agent, tasks, policy=…)."
            )
        for name in ("system_prompt", "tool_prompt"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"Agent({name}={text!r:.100}): it must be a text, or None.")
            if text is not None and _SURROGATE.search(text):
                raise ConfigError(f"Agent({name}=…): it has half a surrogate pair, which no file can hold. Remove it.")

    def _check_tools(self) -> None:
        for one in self.tools:
            if isinstance(one, Agent):
                raise ConfigError(
                    "Agent(tools=…) holds an agent. Give it as a tool: other.as_tool('what it does', name=…)."
                )
            if not isinstance(one, Tool):
                name = getattr(one, "__name__", repr(one))
                raise ConfigError(f"Agent(tools=…) holds {name!r}, which is no tool. Put @agentfly.tool above it.")
        names = [one.name for one in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"Agent(tools=…) holds two tools named {name!r}. Rename one: @agentfly.tool(name=…).")
        if self.tool_prompt and not self.tools:
            raise ConfigError("Agent(tool_prompt=…) describes tools, but there are none. Give tools, or leave it out.")
        call_format = tool_call_format(self.tool_call_format)
        if self.tools:
            call_format.instructions(self.tools)  # raises if the format does not support these tools
        if self.history not in get_args(History):
            known = " or ".join(map(repr, get_args(History)))
            raise ConfigError(f"Agent(history={self.history!r}): it must be {known}.")
        if not isinstance(self.chat_format, str) or not CHAT_FORMAT.fullmatch(self.chat_format):
            raise ConfigError(
                f"Agent(chat_format={self.chat_format!r}): it must be 'auto', 'template', 'renderers' or "
                "'renderers:NAME'."
            )

    def _check_limits(self) -> None:
        for name in (
            "max_turns",
            "max_tokens_per_turn",
            "max_sequence_tokens",
            "max_sampled_tokens",
            "max_tool_calls",
            "max_consecutive_invalid_calls",
        ):
            limit = getattr(self, name)
            if limit is not None or name not in UNLIMITED:
                require_whole("Agent", **{name: limit})
        if self.max_wall_seconds is not None and not is_duration(self.max_wall_seconds):
            raise ConfigError(
                f"Agent(max_wall_seconds={self.max_wall_seconds!r}): it must be a finite number above 0, or None."
            )
        for name, whole in (("max_sequence_tokens", "sequence that holds it"), ("max_sampled_tokens", "rollout")):
            limit = getattr(self, name)
            if limit is not None and self.max_tokens_per_turn > limit:
                raise ConfigError(
                    f"Agent(max_tokens_per_turn={self.max_tokens_per_turn}, {name}={limit}): one turn may hold more "
                    f"tokens than the whole {whole}. Lower the first or raise the second."
                )

    def _check_memory(self) -> None:
        memory = self.memory
        if isinstance(memory, type) or not isinstance(memory, Memory) or not inspect.iscoroutinefunction(memory.recall):
            raise ConfigError(
                f"Agent(memory={memory!r:.100}): it must be an object with `async def recall(self, past)`, for "
                "instance Window(turns=4)."
            )
        limit = self.max_sequence_tokens
        if isinstance(memory, SummaryFolding) and memory.after_tokens is not None and limit is not None:
            summary = 0 if memory.summarise else memory.max_summary_tokens
            if memory.after_tokens + summary >= limit:
                raise ConfigError(
                    f"Agent(max_sequence_tokens={limit}) with SummaryFolding(after_tokens={memory.after_tokens}"
                    f"{f', max_summary_tokens={summary}' if summary else ''}): the limit would be reached before "
                    "anything is folded. Lower after_tokens."
                )

    def _check_sampling(self) -> None:
        require_number("Agent", least=0, temperature=self.temperature)
        if not (is_finite_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"Agent(top_p={self.top_p!r}): it must be a number above 0 and at most 1.")
        if not is_whole(self.top_k, 0):
            raise ConfigError(
                f"Agent(top_k={self.top_k!r}): it must be a whole number of at least 0; 0 samples from all tokens."
            )
