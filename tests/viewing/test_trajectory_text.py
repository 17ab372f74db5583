from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentfly.core.errors import Boundary, InvalidArguments, ResourceDied, ToolError, UnknownTool
from agentfly.core.messages import Image, ToolCall
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, FinishReason, ToolRecord, Trajectory, Turn
from agentfly.viewing.trajectory_text import trajectory_panel, trajectory_text


def a_trajectory(**changes) -> Trajectory:
    turns = [
        Turn(
            index=0,
            sequence=0,
            start=10,
            stop=22,
            text="check[tea]",
            ended_by_model=True,
            tool_results=(ToolRecord(ToolCall("1", "check", {"item": "tea"}), "tea: low\nnext: order", seconds=0.01),),
            generation_seconds=0.5,
        ),
        Turn(index=1, sequence=0, start=30, stop=35, text="order it", ended_by_model=False, reward=-0.5),
    ]
    values = {
        "rollout_id": "r1",
        "group_id": "g",
        "task": Task("What about tea?"),
        "messages": [
            {"role": "system", "content": "You keep a shop."},
            {"role": "user", "content": "What about eggs?"},
            {"role": "assistant", "content": "an example from the prompt"},
            {"role": "user", "content": "What about tea?"},
            {"role": "assistant", "content": "check[tea]"},
            {"role": "tool", "content": "tea: low\nnext: order"},
            {"role": "assistant", "content": "order it"},
        ],
        "turns": turns,
        "finish_reason": FinishReason.LENGTH,
        "reward": 0.4,
        "seconds": {"total": 1.25},
    }
    return Trajectory(**{**values, **changes})


def test_a_trajectory_reads_from_the_prompt_over_each_turn_to_the_reward():
    assert trajectory_text(a_trajectory()).plain.splitlines() == [
        "system",
        "  You keep a shop.",
        "user",
        "  What about eggs?",
        "assistant",
        "  an example from the prompt",
        "user",
        "  What about tea?",
        "turn 1  12 tokens in 0.50 s",
        "  check[tea]",
        '  → check(item="tea")  0.01 s',
        "    tea: low",
        "    next: order",
        "turn 2  5 tokens in 0.00 s, cut by a limit, reward -0.5",
        "  order it",
        "reward 0.4  length after 2 turns, 1.25 s",
    ]


def test_calls_that_failed_and_failed_rollouts_say_why():
    call = ToolRecord(ToolCall("1", "chek", None, error="not JSON"), "no tool", failure=Failure.of(UnknownTool("x")))
    turn = Turn(index=0, sequence=0, start=0, stop=1, text="", ended_by_model=True, tool_results=(call,))
    text = trajectory_text(
        a_trajectory(
            turns=[turn],
            reward=None,
            finish_reason=FinishReason.FAILED,
            failure=Failure.of(ResourceDied("the sandbox went away")),
            reward_failure=Failure.of(ValueError("bad score"), Boundary.REWARD),
        )
    ).plain
    assert "chek (not executed)" in text
    assert "unscored" in text
    assert "failed: ResourceDied (resource)\n  the sandbox went away" in text
    assert "not scored: ValueError (reward)\n  bad score" in text


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UnknownTool("no move"), "→ move(line=3) (not executed)"),
        (InvalidArguments("no line"), "→ move(line=3) (not executed)"),
        (ToolError("the line is taken"), "→ move(line=3)  "),
    ],
)
def test_refused_calls_are_distinguished_from_failed_calls(error, shown):
    call = ToolRecord(ToolCall("1", "move", {"line": 3}), str(error), failure=Failure.of(error))
    turn = Turn(index=0, sequence=0, start=0, stop=1, text="", ended_by_model=True, tool_results=(call,))
    assert shown in trajectory_text(a_trajectory(turns=[turn])).plain


def test_long_texts_show_both_ends_and_count_the_omitted_lines():
    turn = Turn(index=0, sequence=0, start=0, stop=1, text="\n".join(map(str, range(100))), ended_by_model=True)
    lines = trajectory_text(a_trajectory(turns=[turn], messages=[]), max_lines=4).plain.splitlines()
    start = lines.index("  0")
    assert lines[start : start + 5] == ["  0", "  1", "  … 96 lines …", "  98", "  99"]


def test_model_output_controls_neither_terminal_nor_markup():
    evil = "\x1b[31mred\x1b[0m \x07 \u202e [bold]not markup[/bold] \x9b"
    turn = Turn(index=0, sequence=0, start=0, stop=1, text=evil, ended_by_model=True)
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    console.print(trajectory_panel(a_trajectory(turns=[turn])))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(shown)
    assert "[bold]not markup[/bold]" in shown


def test_turns_of_subagents_stand_below_the_calls_that_they_answer():
    nested = ToolRecord(ToolCall("call_0", "look", {"at": "tea"}), "green", images=(Image(b"12345"),))
    asked = ToolRecord(ToolCall("call_0", "research", {"request": "tea?"}), "It is green.", seconds=1.5)
    turns = [
        Turn(index=0, sequence=0, start=0, stop=9, text="let me ask", ended_by_model=True, tool_results=(asked,)),
        Turn(
            index=1,
            sequence=1,
            start=0,
            stop=4,
            text="looking",
            ended_by_model=True,
            tool_results=(nested,),
            agent="research",
            conversation="call_0",
            other_model="other",
        ),
        Turn(**_fields(index=2, sequence=2, text="It is green.", agent="research", conversation="call_0")),
        Turn(**_fields(index=3, sequence=0, text="Green.")),
    ]
    lines = trajectory_text(a_trajectory(turns=turns, messages=[])).plain.splitlines()
    assert lines[2:-1] == [
        "turn 1  9 tokens in 0.00 s",
        "  let me ask",
        '  → research(request="tea?")  1.50 s',
        "    turn 2 of research  4 tokens in 0.00 s, by other",
        "      looking",
        '      → look(at="tea")  0.00 s',
        "        green",
        "        [image: image/png, 5 bytes]",
        "    turn 3 of research  5 tokens in 0.00 s, begins sequence 3",
        "      It is green.",
        "    It is green.",
        "turn 4  5 tokens in 0.00 s",
        "  Green.",
    ]


def test_reasoning_and_memory_are_distinguished_from_the_answer():
    turns = [
        Turn(**_fields(index=0, sequence=-1, text="Green.", reasoning="Tea leaves are green.")),
        Turn(**_fields(index=1, sequence=-1, text="Tea was looked at.", kind="memory")),
        Turn(**_fields(index=2, sequence=-1, text="<think>so</think>Green.", reasoning="so")),
    ]
    lines = trajectory_text(a_trajectory(turns=turns, messages=[])).plain.splitlines()
    assert lines[2:-1] == [
        "turn 1  unknown tokens in 0.00 s",
        "  Tea leaves are green.",
        "  Green.",
        "turn 2, to be remembered  unknown tokens in 0.00 s",
        "  Tea was looked at.",
        "turn 3  unknown tokens in 0.00 s",
        "  <think>so</think>Green.",
    ]


def test_turns_of_a_subagent_without_an_answer_are_shown():
    turns = [
        Turn(**_fields(index=0, sequence=0, text="let me ask")),
        Turn(**_fields(index=1, sequence=1, text="looking", agent="research", conversation="call_0")),
    ]
    shown = trajectory_text(a_trajectory(turns=turns, messages=[], finish_reason=FinishReason.FAILED)).plain
    assert "  turn 2 of research" in shown


def _fields(**given):
    return {"start": 0, "stop": 5, "ended_by_model": True, **given}


def test_branches_of_a_program_show_their_origin_and_notes_come_last():
    turns = [
        Turn(**_fields(index=0, sequence=0, text="root", parent_turns=())),
        Turn(**_fields(index=1, sequence=0, text="one way", parent_turns=(0,))),
        Turn(**_fields(index=2, sequence=1, text="another way", parent_turns=(0,))),
        Turn(**_fields(index=3, sequence=2, text="summed up", parent_turns=(1, 2))),
    ]
    shown = trajectory_text(
        a_trajectory(turns=turns, untrainable_reason="sampled with top_k=1", notes=["The program asked for top_k=1."])
    ).plain
    assert [line.split(", ", 1)[1] for line in shown.splitlines() if line.startswith("turn ") and ", " in line] == [
        "begins sequence 2, continues turn 1",
        "begins sequence 3",
    ]
    assert "not to be trained on: sampled with top_k=1" in shown
    assert "The program asked for top_k=1." in shown
