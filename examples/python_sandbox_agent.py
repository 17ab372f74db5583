"""An agent that runs Python and shell commands in its own sandbox.

    python examples/python_sandbox_agent.py

Each rollout gets a sandbox at its first tool call, keeps it for all turns, and releases it at its end. The engine does
this; the example needs no code for it. It needs no model: the policy is scripted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import agentfly as af

SANDBOX = af.ContainerSpec(memory="512MiB", capacity=4)  # private files, no network, limits on what it may use


async def lay_out(box: Any, context: af.Context) -> None:
    """Called once a rollout, before its first command: puts the task's files into the sandbox."""
    for name, text in context.task.fields.get("files", {}).items():
        await box.write_file(name, text.encode())


@af.tool
async def shell(command: str, context: af.Context) -> str:
    """Run a command in the sandbox.

    Args:
        command: a bash command line.
    """
    box = await context.acquire(SANDBOX, prepare=lay_out)
    return str(await box.run(command, timeout=20))


@af.tool
async def python(code: str, context: af.Context) -> str:
    """Run a Python program in the sandbox and see what it prints.

    Args:
        code: the program.
    """
    box = await context.acquire(SANDBOX, prepare=lay_out)
    await box.write_file("program.py", code.encode())
    return str(await box.run("python3 program.py", timeout=20))


@af.reward
async def correct(response: str, answer: str, context: af.Context, wanted_file: str = "") -> float:
    """1 if the answer is in the response or, for tasks that want a file, in that file."""
    if not wanted_file:
        return float(re.search(rf"\b{re.escape(answer)}\b", response) is not None)
    box = await context.acquire(SANDBOX, prepare=lay_out)  # still as the agent left it
    result = await box.run(f"cat {wanted_file}")
    return float(result.stdout.strip() == answer)


AGENT = af.Agent(
    model="tiny",
    tools=[shell, python],
    system_prompt="Solve the task with your tools. Answer in one sentence.",
    max_turns=6,
)

TASKS: list[str | af.Task | Mapping[str, Any]] = [
    {"prompt": "What is the sum of the squares of 1 to 100?", "answer": "338350"},
    {"prompt": "What is the 30th Fibonacci number?", "answer": "832040"},
    {
        "prompt": "The file numbers.txt holds one number a line. Write their sum to total.txt.",
        "files": {"numbers.txt": "".join(f"{number}\n" for number in range(1, 51))},
        "wanted_file": "total.txt",
        "answer": "1275",
    },
    {"prompt": "Does this machine reach the network? Answer yes or no.", "answer": "no"},
]

CALLS = {
    "squares": [("python", {"code": "print(sum(n * n for n in range(1, 101)))"})],
    "Fibonacci": [
        ("python", {"code": "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\nprint(fib(30)"}),
        ("python", {"code": "a, b = 0, 1\nfor _ in range(30):\n    a, b = b, a + b\nprint(a)"}),
    ],
    "numbers.txt": [
        ("shell", {"command": "head -3 numbers.txt; wc -l < numbers.txt"}),
        ("shell", {"command": "awk '{sum += $1} END {print sum}' numbers.txt > total.txt; cat total.txt"}),
    ],
    "network": [
        (
            "python",
            {
                "code": "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), 2)\n    print('yes')\n"
                "except OSError as error:\n    print('no,', error)"
            },
        )
    ],
}


def solve(conversation: str, turn: int) -> str:
    """The scripted policy: makes the calls above in turn, then answers with what the last one printed."""
    task = conversation.partition("<|im_start|>user\n")[2]
    calls = next(calls for word, calls in CALLS.items() if word in task)
    if turn < len(calls):
        return AGENT.format.write(*calls[turn])
    *_, observation = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", conversation, re.DOTALL)
    return f"It is {observation}."


async def main() -> None:
    result = await af.run(AGENT, TASKS, reward=correct, policy=af.ScriptedPolicy(solve))
    for trajectory in result.trajectories:
        print(f"\n{trajectory.task.prompt}")
        for turn in trajectory.turns:
            for call in turn.tool_results:
                print(f"  {call.call.name}: {call.observation.replace(chr(10), ' / ')[-60:]}")
        print(f"  -> {trajectory.response} [reward {trajectory.reward}, {trajectory.finish_reason}]")
    print(f"\nmean reward {result.metrics['reward/mean']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
