"""However a run ends, nothing of it is left: interrupted once or often, terminated, or killed at any moment.

With real sandboxes, in processes of their own.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.process import ledger
from agentfly.resources.process.cgroups import writable_cgroup_parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing)),
]

TASK = """
    import agentfly as af

    BOX = af.ContainerSpec(memory="64MiB", pids=32, capacity=4)


    @af.reward
    async def in_a_box(context: af.Context) -> float:
        box = await context.acquire(BOX)
        print(box.instance, flush=True)
        await box.run("trap '' TERM; sleep 600 & sleep 600", timeout=600)
        return 0.0


    agent = af.Agent(model="tiny", max_turns=1, max_tokens_per_turn=2)
    tasks = ["Go."] * 4
"""
PROGRAM = """
    import asyncio
    import agentfly as af
    from boxed import agent, in_a_box, tasks

    asyncio.run(af.run(agent, tasks, reward=in_a_box, policy=af.ScriptedPolicy(["Done."])))
"""
CHURN = """
    import asyncio, itertools, random, sys
    from pathlib import Path
    from agentfly.resources.containers.spec import ContainerSpec
    from agentfly.resources.engine.engine import ResourceEngine

    async def rollout(engine, draw, owner):
        spec = ContainerSpec(memory="64MiB", pids=32, capacity=3, reuse=draw.choice(["reset", "recreate"]),
                             idle=draw.choice(["run", "freeze"]))
        lease = await engine.acquire(spec, owner)
        print(lease.instance, flush=True)
        await lease.resource.run(f"trap '' TERM; sleep {draw.uniform(0, 0.2)}")
        await engine.release(lease)

    async def main():
        draw = random.Random(int(sys.argv[2]))
        async with ResourceEngine(ledger=Path(sys.argv[1])) as engine:
            print("up", flush=True)
            numbers = itertools.count()
            async def worker():
                for number in numbers:
                    await rollout(engine, draw, f"r{number}")
            await asyncio.gather(*(worker() for _ in range(5)))

    asyncio.run(main())
"""


class Run:
    """A process that uses sandboxes. Its state directory is its own unless given."""

    def __init__(self, tmp_path: Path, *command: str, state: Path | None = None) -> None:
        self.state = state or tmp_path / "state"
        (tmp_path / "boxed.py").write_text(textwrap.dedent(TASK))
        environment = os.environ | {"AGENTFLY_STATE_DIR": str(self.state), "PYTHONPATH": _python_path(tmp_path)}
        self.errors = tmp_path / f"errors-{os.urandom(3).hex()}"
        self.process = subprocess.Popen(
            # a background job ignores SIGINT, and what it starts would too
            ["env", "--default-signal=INT", sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        self.instances: list[str] = []

    def wait_for_boxes(self, number: int) -> None:
        assert self.process.stdout is not None
        while len(self.instances) < number:
            line = self.process.stdout.readline().strip()
            assert line, self.errors.read_text()
            self.instances.append(line)

    def wait(self) -> int:
        assert self.process.stdout is not None
        rest, _ = self.process.communicate(timeout=60)
        self.instances += [line for line in rest.split() if line.startswith("container-")]
        return self.process.returncode

    def left(self) -> list[str]:
        """What there still is of its sandboxes."""
        home = writable_cgroup_parent()
        found: list[str] = []
        for instance in set(self.instances):
            groups = [parent / f"agentfly-{instance}" for parent in home.parents.values()] if home else []
            found += [str(path) for path in (runtime_directory() / instance, *groups) if path.exists()]
            found += [f"process {pid}" for pid in processes_of(instance)]
        return found


def _python_path(tmp_path: Path) -> str:
    return os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])


def processes_of(instance: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                about = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
            except OSError:
                continue
            if instance.encode() in about:
                found.append(int(entry.name))
    return found


def commands(tmp_path: Path) -> dict[str, list[str]]:
    config = tmp_path / "run.yaml"
    run = str(tmp_path / "run")
    config.write_text(
        json.dumps({"agent": "boxed:agent", "tasks": "boxed:tasks", "reward": "boxed:in_a_box", "run_dir": run})
    )
    main = ["-c", "from agentfly.cli.main import main; main()"]
    return {
        "library": ["-c", textwrap.dedent(PROGRAM)],
        "rollout": [*main, "rollout", str(config)],
        "train": [*main, "train", str(config)],
    }


INTERRUPTED, TERMINATED = 130, 143


@pytest.mark.parametrize(
    ("what", "signals", "code"),
    [
        ("library", [signal.SIGINT], INTERRUPTED),
        ("library", [signal.SIGINT] * 2, INTERRUPTED),  # asyncio.run, which is the user's here, gives up at the third
        ("library", [signal.SIGTERM] * 3, TERMINATED),
        ("rollout", [signal.SIGTERM, signal.SIGTERM, signal.SIGINT], TERMINATED),
        ("train", [signal.SIGINT] * 5, INTERRUPTED),
    ],
)
def test_a_run_that_is_interrupted_or_terminated_once_or_often_leaves_nothing(tmp_path, what, signals, code):
    run = Run(tmp_path, *commands(tmp_path)[what])
    run.wait_for_boxes(4)
    for number in signals:
        run.process.send_signal(number)
        time.sleep(0.03)
    left = run.wait()
    told = run.errors.read_text()
    assert run.left() == []
    assert list(run.state.iterdir()) == []
    # a signal that comes when Python has all but left ends it by itself
    assert left in (code, *(-number for number in signals)), told
    if what != "library":
        assert "Traceback" not in told
        assert "Exception ignored" not in told


def test_killed_at_any_moment_a_run_leaves_nothing_that_is_not_reaped_and_another_is_left_alone(tmp_path):
    draw = random.Random(4)
    state = tmp_path / "state"
    churn = textwrap.dedent(CHURN)
    living = Run(tmp_path, "-c", textwrap.dedent(PROGRAM), state=state)
    reap = [sys.executable, "-c", "from agentfly.cli.main import main; main()", "resources", "reap", "--state-dir"]
    try:
        living.wait_for_boxes(4)
        for round_ in range(10):
            run = Run(tmp_path, "-c", churn, str(state), str(round_), state=state)
            assert run.process.stdout is not None
            assert run.process.stdout.readline() == "up\n", run.errors.read_text()
            select.select([run.process.stdout], [], [])
            time.sleep(draw.uniform(0, 0.7))
            run.process.kill()
            run.wait()
            if round_ % 2:
                subprocess.run([*reap, str(state)], check=True, stdout=subprocess.DEVNULL)
            else:  # the next engine does it
                subprocess.run([sys.executable, "-c", ENTERS, str(state)], check=True)
            assert run.left() == []
            (path,) = state.glob("*.ledger")
            assert len(ledger.read_ledger(path)[1]) == 4
            for instance in living.instances:
                assert processes_of(instance), "a live run was touched"
        living.process.send_signal(signal.SIGTERM)
        assert living.wait() == 143
        assert living.left() == []
        assert [path for path in state.iterdir() if "draft" not in path.suffix] == []  # those go after an hour
    finally:
        living.process.kill()


ENTERS = """
import asyncio, sys
from pathlib import Path
from agentfly.resources.engine.engine import ResourceEngine

async def main():
    async with ResourceEngine(ledger=Path(sys.argv[1])):
        pass

asyncio.run(main())
"""
