"""Count the project's files that a call passes through, by profiler: how far a reader has to jump to follow it.

    python scripts/count_files.py [--names]

Three paths are counted, each with the shipped tiny model or a scripted policy and real sandboxes where there are some:

* a warm tool call: from the end of a generation to the start of the next, with a sandbox that the rollout holds;
* a cold acquire: the first sandbox of a spec, from the request to the lease;
* a training step: rollouts of a batch and one update of the tiny model, without a held-out evaluation.

A file counts if one of its functions runs, on any thread of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import agentfly as af
from agentfly.core.events import Event, EventStream, StepFinished

PACKAGE = f"{Path(af.__file__).resolve().parent}{os.sep}"


class FileCounter:
    """Notes the files of the package in which a function is called, while `counting`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._on = False

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename[len(PACKAGE) :])

    def start(self) -> None:
        """Begin to count."""
        self.files.clear()
        self._on = True

    def stop(self) -> None:
        """Count no more."""
        self._on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, calls of all threads are looked at."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


SANDBOX = af.ContainerSpec(capacity=1)


@af.tool
async def shell(command: str, context: af.Context) -> str:
    """Run a command.

    Args:
        command: a bash command line.
    """
    sandbox = await context.acquire(SANDBOX)
    result = await sandbox.run(command)
    return result.stdout


@af.reward
def always() -> float:
    """Score every rollout alike."""
    return 1.0


async def warm_tool_call(counter: FileCounter) -> set[str]:
    """The files of the second call of a tool, between two generations."""
    agent = af.Agent(model="scripted", tools=[shell], max_turns=4)
    call = agent.format.write("shell", {"command": "true"})
    counted: set[str] = set()

    def script(prompt: str, turn: int) -> str:
        counter.stop()
        if turn == 2:
            counted.update(counter.files)
        if turn < 2:
            counter.start()
            return call
        return "Done."

    await af.run(agent, ["Work."], policy=af.ScriptedPolicy(script), reward=always)
    return counted


async def cold_acquire(counter: FileCounter) -> set[str]:
    """The files of the first sandbox."""
    async with af.ResourceEngine() as engine:
        counter.start()
        await engine.acquire(SANDBOX, "reader")
        counter.stop()
        found = set(counter.files)
        await engine.release_owner("reader")
    return found


def training_step(counter: FileCounter) -> set[str]:
    """The files of the second step of training the tiny model, from the end of the first."""
    from agentfly.tasks.stockroom import hermes_agent, stockroom_reward, train_tasks

    counted: list[set[str]] = []

    def note(event: Event) -> None:
        if isinstance(event, StepFinished):
            counted.append(set(counter.files))
            counter.start()

    events = EventStream()
    with tempfile.TemporaryDirectory() as directory, events.subscribed(note):
        af.train(
            hermes_agent("tiny"),
            train_tasks()[:8],
            reward=stockroom_reward,
            attempts=2,
            tasks_per_step=2,
            steps=3,
            checkpoint_every_steps=3,
            run_dir=Path(directory) / "run",
            dtype="float32",
            progress=False,
            events=events,
        )
        counter.stop()
    return counted[1]


def main() -> None:
    """Print how many files each path passes through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the files, too")
    names = parser.parse_args().names
    counter = FileCounter()
    with counter.installed():
        found = {
            "warm tool call": asyncio.run(warm_tool_call(counter)),
            "cold acquire": asyncio.run(cold_acquire(counter)),
            "training step": training_step(counter),
        }
    for path, files in found.items():
        print(f"{path}: {len(files)} files")
        for name in sorted(files) if names else ():
            print(f"  {name}")


if __name__ == "__main__":
    main()
