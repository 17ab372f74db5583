"""run_study: make a study's runs, some at a time, each a training run with a directory of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.core.errors import AgentFlyError, ConfigError
from agentfly.core.files import replace_text
from agentfly.core.run_directory import RunDirectory, numbered
from benchmarks.studies.study import Arm, Study

Report = Callable[[str], None]

_STOP_SECONDS = 30.0
_TOLD_OF_A_FAILURE = 2000


class RunFailed(AgentFlyError):
    """A run of a study ended with an error."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        arm: how it trains.
        seed: its seed, from 1.
        directory: its files.
    """

    arm: Arm
    seed: int
    directory: RunDirectory

    @property
    def label(self) -> str:
        """What it is called."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, by its last step or by ``early_stop``, and has its last checkpoint still."""
        if not self._finished_file.is_file():
            return False
        return (self.directory.checkpoints / self._finished_file.read_text(encoding="utf-8").strip()).is_dir()

    def note_finished(self) -> None:
        """Note that it has come to its end, and at which checkpoint."""
        _, last = numbered(self.directory.checkpoints.glob("step-*"), "step-")[-1]
        replace_text(self._finished_file, f"{last.name}\n")

    @property
    def _finished_file(self) -> Path:
        return self.directory.path / "finished.txt"


def study_runs(study: Study, out: Path, seeds: int) -> list[StudyRun]:
    """The runs of a study, those of one seed side by side."""
    return [
        StudyRun(arm, seed, RunDirectory(out / "runs" / f"{arm.name}-{seed}"))
        for seed in range(1, seeds + 1)
        for arm in study.arms
    ]


async def run_study(
    study: Study, out: Path, *, seeds: int = 3, workers: int = 2, words: Sequence[str] = (), report: Report
) -> list[StudyRun]:
    """Make the runs of a study that are not made yet. What was stopped goes on from its last checkpoint.

    Each run is a process of its own with one thread, ``agentfly train`` with the arm's words.

    Args:
        study: the study.
        out: directory of its files; the runs lie in ``runs`` in it.
        seeds: number of runs of each arm, with the seeds 1, 2, …
        workers: number of runs at a time; as many as there are processor cores is right.
        words: further overrides for all runs.
        report: is told what begins and ends, in lines.

    Raises:
        ConfigError: ``out`` holds runs of another study, or of other words.
        RunFailed: a run ended with an error; the others go on to their end first.
    """
    _claim(study, out, words)
    runs = study_runs(study, out, seeds)
    waiting = [run for run in runs if not run.finished]
    if len(waiting) < len(runs):
        report(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
    places = asyncio.Semaphore(workers)
    failures: list[str] = []

    async def make(run: StudyRun) -> None:
        async with places:
            report(f"{run.label}: begins")
            failure = await _train(run, study, words)
            report(f"{run.label}: {'failed' if failure else 'finished'}")
            failures.extend([f"{run.label}: {failure}"] if failure else [])

    async with asyncio.TaskGroup() as group:
        for run in waiting:
            group.create_task(make(run))
    if failures:
        raise RunFailed("\n".join(failures))
    return runs


def _claim(study: Study, out: Path, words: Sequence[str]) -> None:
    """Note in ``out`` what its runs are of, or see that it is the same.

    Raises:
        ConfigError: it is not.
    """
    arms = {arm.name: [arm.program, *arm.words] for arm in study.arms}
    claim = {"study": study.name, "config": study.config, "words": [*study.words, *words], "arms": arms}
    file = out / "study.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != claim:
        raise ConfigError(
            f"{out} holds runs of another study, or with other settings ({file} says which). Choose another directory "
            "(--out), or remove it."
        )
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(claim, indent=2) + "\n", encoding="utf-8")


async def _train(run: StudyRun, study: Study, words: Sequence[str]) -> str | None:
    """Make one run; the end of what it said if it failed."""
    path = run.directory.path
    if run.directory.config_file.is_file():
        asked = ["--resume", str(path)]
    else:
        shutil.rmtree(path, ignore_errors=True)  # of a run that was stopped before it had begun
        own = [f"training.seed={run.seed}", "training.threads=1", f"run_dir={path.resolve()}"]
        asked = [str(study.config_file), *study.words, *run.arm.words, *words, *own]
    log = path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", run.arm.program, "train", *asked, stdout=said, stderr=said, env=_environment()
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process)
            raise
    if code == 0:
        run.note_finished()
        return None
    return log.read_text(encoding="utf-8", errors="replace")[-_TOLD_OF_A_FAILURE:].strip()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a run in good order, or after a while in whatever order."""
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """One thread a run: several that share cores would wait for one another."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
