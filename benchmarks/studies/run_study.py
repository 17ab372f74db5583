"""run_study: make the training runs of a study, several at a time, each in its own directory."""

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
        arm: its training method.
        seed: its seed, from 1.
        directory: its files.
    """

    arm: Arm
    seed: int
    directory: RunDirectory

    @property
    def label(self) -> str:
        """Name of the run for messages."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run has ended, by its last step or ``early_stop``, and its last checkpoint still exists."""
        if not self._finished_file.is_file():
            return False
        return (self.directory.checkpoints / self._finished_file.read_text(encoding="utf-8").strip()).is_dir()

    def note_finished(self) -> None:
        """Record that the run has ended, and its last checkpoint."""
        _, last = numbered(self.directory.checkpoints.glob("step-*"), "step-")[-1]
        replace_text(self._finished_file, f"{last.name}\n")

    @property
    def _finished_file(self) -> Path:
        return self.directory.path / "finished.txt"


def study_runs(study: Study, out: Path, seeds: int) -> list[StudyRun]:
    """Return the runs of a study, ordered by seed."""
    return [
        StudyRun(arm, seed, RunDirectory(out / "runs" / f"{arm.name}-{seed}"))
        for seed in range(1, seeds + 1)
        for arm in study.arms
    ]


async def run_study(
    study: Study, out: Path, *, seeds: int = 3, workers: int = 2, words: Sequence[str] = (), report: Report
) -> list[StudyRun]:
    """Make the missing runs of a study. Interrupted runs resume from their last checkpoint.

    Each run is its own process with one thread: ``agentfly train`` with the overrides of the arm.

    Args:
        study: the study.
        out: directory of the files; its folder ``runs`` contains the runs.
        seeds: number of runs of each arm, with the seeds 1, 2, …
        workers: number of concurrent runs; the number of CPU cores is a good value.
        words: further overrides for all runs.
        report: called with a line when a run starts or ends.

    Raises:
        ConfigError: ``out`` contains runs of another study, or with other overrides.
        RunFailed: a run ended with an error. It is raised when all other runs have ended.
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
            report(f"{run.label}: started")
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
    """Record the study in ``out``, or check that ``out`` belongs to it.

    Raises:
        ConfigError: ``out`` belongs to another study.
    """
    arms = {arm.name: [arm.program, *arm.words] for arm in study.arms}
    claim = {"study": study.name, "config": study.config, "words": [*study.words, *words], "arms": arms}
    file = out / "study.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != claim:
        raise ConfigError(
            f"{out} contains runs of another study, or with other settings (see {file}). Choose another directory "
            "(--out), or remove it."
        )
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(claim, indent=2) + "\n", encoding="utf-8")


async def _train(run: StudyRun, study: Study, words: Sequence[str]) -> str | None:
    """Make one run. Return the end of its output if it failed."""
    path = run.directory.path
    if run.directory.config_file.is_file():
        asked = ["--resume", str(path)]
    else:
        shutil.rmtree(path, ignore_errors=True)  # of a run that was stopped before it had begun
        own = [f"training.seed={run.seed}", "training.threads=1", f"run_dir={path.resolve()}"]
        asked = [str(study.config_file), *study.words, *run.arm.words, *words, *own]
    log = path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as log_file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", run.arm.program, "train", *asked, stdout=log_file, stderr=log_file, env=_environment()
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
    """End a run cleanly, or kill it after a time limit."""
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """Return an environment with one thread per run, so that concurrent runs do not compete for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
