"""Checkpoints: Hugging Face directories with the trainer's state, written atomically and verified by checksums."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentfly.core.errors import ConfigError, PrerequisiteError, describe_error, type_of
from agentfly.core.numbers import is_whole
from agentfly.core.run_directory import numbered
from agentfly.policies.embedded.loading import has_adapters, load_adapters, quiet_transformers, save_adapters
from agentfly.training.evaluator import EvaluationHistory

FORMAT = 5
"""Version of the trainer's files in a checkpoint."""

CHECKSUM_FILE = "SHA256SUMS"
"""The file with the SHA-256 of every other file of a checkpoint, in the format of ``sha256sum --check``."""

FULL_DISK_BYTES = 2**20
"""Free bytes below which a failed write counts as that of a full disk."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """The progress of a run, and the settings that identify it.

    Attributes:
        step: number of finished steps.
        cursor: number of tasks taken from the order of tasks.
        version: version of the policy's weights.
        model: name of the model that training began with.
        tasks: fingerprint of the tasks.
        agent: properties of the agent that affect its rollouts, by name (see
            `agentfly.rollouts.rollout_record.agent_fingerprint`).
        reward: name of the reward.
        config: the run's settings, with the effective temperature.
        curriculum: description of the curriculum; None without one.
        order: state of the task order, besides the cursor.
        evaluations: the evaluation history.
    """

    step: int
    cursor: int
    version: int
    model: str
    tasks: str
    agent: dict[str, Any]
    reward: str
    config: dict[str, Any]
    curriculum: str | None = None
    order: dict[str, Any] = field(default_factory=dict)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)


class Checkpoints:
    """The checkpoints of one run, ``step-000010`` and so on.

    A checkpoint is written to a temporary name, synced to disk and then renamed. A visible checkpoint is therefore
    complete, even after a crash or power loss.

    Args:
        directory: directory of the checkpoints.
        keep: number to keep. Older ones are removed when a new one is complete.

    Attributes:
        current: the checkpoint that `latest_valid` found or `save` wrote last. Damaged checkpoints may have a higher
            step.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self.current: Path | None = None

    def saved(self) -> list[tuple[int, Path]]:
        """Return the steps and paths of all checkpoints, lowest step first, including damaged ones."""
        return numbered(self._directory.glob("step-*"), "step-")

    def latest_valid(self) -> Path | None:
        """Return the newest undamaged checkpoint; None if there is no checkpoint at all.

        Damaged checkpoints are skipped with a warning.

        Raises:
            ConfigError: all checkpoints are damaged.
        """
        damages = []
        for _, path in reversed(self.saved()):
            damage = find_damage(path)
            if not damage:
                self.current = path
                return path
            logger.warning("The checkpoint %s is damaged and passed over: %s.", path, damage)
            damages.append(f"{path.name}: {damage}")
        if damages:
            raise ConfigError(
                f"No checkpoint in {self._directory} is as it was written: {'; '.join(damages)}. Bring the files back, "
                "or start a new run in another directory."
            )
        return None

    def best(self) -> Path | None:
        """Return the target of the link ``best``, the checkpoint of the best step."""
        link = self._directory / "best"
        return link.resolve() if link.is_symlink() and link.exists() else None

    def mark_best(self, step: int | None) -> None:
        """Point the link ``best`` at the checkpoint of a step. `save` does not remove that checkpoint.

        None, or a step without a checkpoint, removes the link.
        """
        name = None if step is None else f"step-{step:06d}"
        if name is None or not (self._directory / name).is_dir():
            (self._directory / "best").unlink(missing_ok=True)
            return
        made = self._directory / ".unfinished-best"
        made.symlink_to(name)
        made.replace(self._directory / "best")

    def save(self, step: int, write: Callable[[Path], None], *, best: int = 0) -> Path:
        """Write the checkpoint of a step.

        Existing checkpoints of this and later steps are removed: the run was resumed from an earlier one.

        Args:
            step: the step.
            write: writes the files into the directory that it is called with.
            best: the best step so far, whose checkpoint is kept; 0 for none.

        Raises:
            PrerequisiteError: the disk is full.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        final = self._directory / f"step-{step:06d}"
        unfinished = self._directory / f".unfinished-{step:06d}"
        try:
            unfinished.mkdir()
            write(unfinished)
            _write_checksums(unfinished)
            fsync_tree(unfinished)
        except Exception as error:
            full = _is_disk_full(error, self._directory)
            shutil.rmtree(unfinished, ignore_errors=True)
            if not full:
                raise
            raise PrerequisiteError(
                f"The checkpoint of step {step} could not be written to {self._directory}: no space is left on the "
                "disk. The last complete checkpoint is kept. Free some space, or lower keep_checkpoints, and continue "
                "with --resume (in Python: resume=True)."
            ) from error
        for number, path in self.saved():
            if number >= step:
                self._remove(path)
        unfinished.rename(final)
        fsync_tree(self._directory, deep=False)
        self.current = final
        if best:
            self.mark_best(best)
        kept = self.best()
        for _, old in self.saved()[: -self._keep]:
            if kept is None or old.name != kept.name:
                self._remove(old)
        return final

    def remove_partial(self) -> None:
        """Remove the partial files of a process that died while it saved or removed a checkpoint."""
        for path in self._directory.glob(".unfinished-*"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that a partly removed one never looks complete."""
        unfinished = path.with_name(f".unfinished-removed-{path.name}")
        path.rename(unfinished)
        shutil.rmtree(unfinished)


def _is_disk_full(error: Exception, directory: Path) -> bool:
    """Return whether writing failed because the disk is full. safetensors and torch have their own errors for it."""
    if "No space left on device" in str(error):
        return True
    by_torch = isinstance(error, RuntimeError) and ("inline_container" in str(error) or "iostream" in str(error))
    return by_torch and shutil.disk_usage(directory).free < FULL_DISK_BYTES


def find_damage(path: Path) -> str:
    """Return what is wrong with the files of a checkpoint, or an empty string if all match their checksums."""
    sums = path / CHECKSUM_FILE
    try:
        expected = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
        if any(len(parts) != 2 for parts in expected):
            raise ValueError("a line has no checksum and file name")
    except FileNotFoundError:
        return f"{CHECKSUM_FILE} is missing"
    except (OSError, ValueError) as error:
        return f"{CHECKSUM_FILE} cannot be read ({error})"
    if not expected:
        return f"{CHECKSUM_FILE} names no file"
    for digest, name in expected:
        try:
            if _sha256(path / name) != digest:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return ""


def require_valid(path: Path) -> Path:
    """Return ``path`` if the checkpoint's files match their checksums.

    Raises:
        ConfigError: they do not.
    """
    if damage := find_damage(path):
        raise ConfigError(f"The checkpoint {path} is damaged: {damage}. Take another one, or bring its files back.")
    return path


def _write_checksums(path: Path) -> None:
    files = sorted(one for one in path.rglob("*") if one.is_file())
    lines = [f"{_sha256(one)}  {one.relative_to(path).as_posix()}\n" for one in files]
    (path / CHECKSUM_FILE).write_text("".join(lines), encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_trainer_state(path: Path, state: TrainerState, learner: dict[str, Any]) -> None:
    """Write the state that a resumed run needs besides the model.

    Args:
        path: the checkpoint.
        state: the run's progress.
        learner: state of the learner, tensors and plain values.
    """
    write_state_files(path, "state.json", asdict(state), learner)


def write_state_files(path: Path, name: str, about: Mapping[str, Any], learner: Mapping[str, Any]) -> None:
    """Write a JSON file and the learner's state below ``trainer/`` of a checkpoint.

    Args:
        path: the checkpoint.
        name: name of the JSON file.
        about: content of the JSON file.
        learner: state of the learner, tensors and plain values; see `read_learner_state`.
    """
    folder = path / "trainer"
    folder.mkdir()
    (folder / name).write_text(json.dumps({"format": FORMAT, **about}, indent=1), encoding="utf-8")
    torch.save(learner, folder / "learner.pt")


def read_trainer_state(path: Path) -> TrainerState:
    """Return the trainer state of the checkpoint at ``path``.

    Raises:
        ConfigError: the directory is not a checkpoint of this version of AgentFly.
    """
    return read_state(path, "state.json", trainer_state_from)


def read_state(path: Path, name: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read a JSON file that `write_state_files` wrote.

    Args:
        path: the checkpoint.
        name: the JSON file below ``trainer/``.
        parse: makes the result from the file's plain values.

    Raises:
        ConfigError: the file is missing, damaged or of another version of AgentFly.
    """
    file = path / "trainer" / name
    if not file.is_file():
        raise ConfigError(
            f"{path} holds a model but not the state of a run: {file} is missing. Resume another checkpoint."
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.pop("format") == FORMAT:
            return parse(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {describe_error(error)}. Resume another checkpoint.") from None
    raise ConfigError(f"{file} was written by another version of AgentFly, and cannot be resumed by this one.")


def trainer_state_from(value: dict[str, Any]) -> TrainerState:
    """Return the trainer state for plain values from `dataclasses.asdict`."""
    state = TrainerState(**{**value, "evaluations": EvaluationHistory(**value["evaluations"])})
    for name in ("step", "cursor", "version"):
        if not is_whole(getattr(state, name)):
            raise TypeError(f"{name} is {getattr(state, name)!r:.100}, and must be a whole number")
    return state


def read_learner_state(path: Path) -> dict[str, Any]:
    """Return the learner's state of the checkpoint at ``path``.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    file = path / "trainer" / "learner.pt"
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch's unpickler raise any type
        raise ConfigError(f"{file} is damaged: {describe_error(error)}. Resume another checkpoint.") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{file} is damaged: it holds {type_of(state)}. Resume another checkpoint.")
    if not _is_finite(state):
        raise ConfigError(f"{file} is damaged: it holds numbers that are not finite. Resume another checkpoint.")
    return state


class _Learner(Protocol):
    def load_state(self, state: Mapping[str, Any]) -> None: ...


def restore_learner(learner: _Learner, path: Path) -> None:
    """Load the learner's state of the checkpoint at ``path``.

    Raises:
        ConfigError: the file is missing or damaged, or belongs to a learner with other settings.
    """
    state = read_learner_state(path)
    try:
        learner.load_state(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{path / 'trainer' / 'learner.pt'} does not fit this run: {describe_error(error)}. "
            "Resume another checkpoint."
        ) from error


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in tensors of a learner's state are finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


def write_model(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model, tokenizer and chat template as a Hugging Face directory.

    For a model with adapters, only the adapters and their configuration are written. `load_policy` loads the base
    weights from their original location.
    """
    with quiet_transformers():
        if has_adapters(model):
            save_adapters(model, path)
        else:
            model.save_pretrained(path)
        tokenizer.save_pretrained(path)


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Load the weights of a checkpoint into a model in place: only its adapters if it has any, else all weights.

    Raises:
        ConfigError: the weights are damaged, or belong to a model of another shape.
    """
    if has_adapters(model):
        load_adapters(model, path)
        return
    if not (path / "config.json").is_file():  # without it transformers makes the class's default model, of any size
        raise ConfigError(f"The checkpoint {path} is damaged: config.json is missing.")
    try:
        with quiet_transformers():
            saved = type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True)
        model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"The weights of the checkpoint {path} cannot be read: {describe_error(error)}.") from None
    except RuntimeError as error:
        raise ConfigError(f"The checkpoint {path} is of another model than this run's: {error}") from error


def fsync_tree(path: Path, *, deep: bool = True) -> None:
    """Sync a directory to disk and, if ``deep``, all its contents."""
    for entry in path.iterdir() if deep else ():
        if entry.is_dir():
            fsync_tree(entry)
        else:
            _sync(entry)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
