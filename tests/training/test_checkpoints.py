"""Checkpoints are complete or absent, and restore what was saved."""

from __future__ import annotations

import copy
import errno
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.training.checkpoints import (
    Checkpoints,
    TrainerState,
    load_weights,
    read_learner_state,
    read_trainer_state,
    require_valid,
    restore_learner,
    write_trainer_state,
)
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.trainer import About, require_same
from tests.support.scale import scaled

PLACE = TrainerState(
    step=3,
    cursor=24,
    version=3,
    model="tiny",
    tasks="abc",
    agent={"max_turns": 4},
    reward="brief",
    config={"steps": 9, "learning_rate": 1e-5},
)


ABOUT = About(model="m", examples="", config={})


def write_text(path: Path) -> None:
    (path / "file").write_text("whole")


def test_a_checkpoint_that_could_not_be_written_is_not_there_and_the_last_one_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    first = checkpoints.save(1, write_text)

    def fail(path: Path) -> None:
        write_text(path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fail)
    assert checkpoints.current == first
    assert checkpoints.save(2, write_text) == checkpoints.current


def test_a_checkpoint_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    seen = []
    checkpoints.save(1, lambda path: seen.append(checkpoints.latest_valid()))
    assert seen == [None]


def test_checkpoints_half_written_or_half_removed_by_a_killed_process_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.save(1, write_text)
    for name in (".unfinished-000002", ".unfinished-removed-step-000000"):
        shutil.copytree(saved, tmp_path / name)
    assert checkpoints.latest_valid() == saved
    checkpoints.remove_partial()
    assert list(tmp_path.iterdir()) == [saved]


def test_the_newest_checkpoints_are_kept_by_their_steps_and_not_by_their_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 999_999, 1_000_000):
        checkpoints.save(step, write_text)
    assert [step for step, _ in checkpoints.saved()] == [999_999, 1_000_000]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("damaged", [(30,), (20, 30), (10, 30)])
@pytest.mark.parametrize("best", [0, 10])
def test_a_resumed_run_keeps_its_new_checkpoints_and_removes_later_damaged_ones(
    tmp_path: Path, keep: int, damaged: tuple[int, ...], best: int
) -> None:
    Checkpoints(tmp_path, keep=9).save(10, write_text)
    for step in (20, 30):
        Checkpoints(tmp_path, keep=9).save(step, write_text, best=best)
    for step in damaged:
        (tmp_path / f"step-{step:06d}" / "file").write_text("other")
    checkpoints = Checkpoints(tmp_path, keep=keep)
    started_run = checkpoints.latest_valid()
    assert started_run is not None
    step = int(started_run.name.removeprefix("step-")) + 1
    saved = checkpoints.save(step, write_text, best=best)
    assert checkpoints.current == checkpoints.latest_valid() == saved
    assert max(kept for kept, _ in checkpoints.saved()) == step
    assert (checkpoints.best() is not None) == (best > 0)


def test_a_best_step_without_a_checkpoint_leaves_no_other_as_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, write_text, best=1)
    checkpoints.mark_best(2)
    assert checkpoints.best() is None


def test_only_names_of_steps_are_checkpoints(tmp_path: Path) -> None:
    for name in ("step-²", "step-٣", "step-", "step-x", "step--1", "step-000004"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path, keep=1).saved() == [(4, tmp_path / "step-000004")]


def test_a_directory_without_checkpoints_has_none_to_resume(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing", keep=1).latest_valid() is None


def test_place_and_learner_come_back_as_they_were_saved(tmp_path: Path) -> None:
    write_trainer_state(tmp_path, PLACE, {"steps": 3, "masters": [None, torch.tensor([1.5])]})
    assert read_trainer_state(tmp_path) == PLACE
    learner = read_learner_state(tmp_path)
    assert learner["steps"] == 3
    assert learner["masters"][1].tolist() == [1.5]


def test_a_directory_with_only_a_model_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the state of a run"):
        read_trainer_state(tmp_path)


def small_model(hidden: int = 16) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=hidden,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def test_weights_come_back_in_place_and_any_program_can_load_the_directory(tmp_path: Path) -> None:
    model, other = small_model(), small_model()
    model.save_pretrained(tmp_path)
    write_trainer_state(tmp_path, PLACE, {})
    pointers = [weight.data_ptr() for weight in other.parameters()]
    load_weights(other, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)
        assert torch.equal(loaded.state_dict()[name], weight)
    assert [weight.data_ptr() for weight in other.parameters()] == pointers


def test_weights_of_a_different_shape_are_refused(tmp_path: Path) -> None:
    small_model(hidden=32).save_pretrained(tmp_path)
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="another model"):
        load_weights(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


def test_a_full_disk_is_reported_with_the_remedy_and_leaves_no_partial_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, write_text)

    def fill(path: Path) -> None:
        (path / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PrerequisiteError, match="keep_checkpoints"):
        checkpoints.save(2, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


FILES = ("config.json", "model.safetensors", "trainer/state.json", "trainer/learner.pt", "SHA256SUMS")


def saved_checkpoints(directory: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=5)

    def write(path: Path) -> None:
        small_model().save_pretrained(path)
        write_trainer_state(path, PLACE, {"masters": [torch.ones(100)]})

    for step in steps:
        checkpoints.save(step, write)
    return checkpoints


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "another byte": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
}


def damage(file: Path, how: str) -> None:
    content = DAMAGES[how](file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_reported_and_the_last_valid_one_is_used(tmp_path, caplog, name, how) -> None:
    checkpoints = saved_checkpoints(tmp_path, 1, 2)
    assert checkpoints.latest_valid() == tmp_path / "step-000002"
    damage(tmp_path / "step-000002" / name, how)
    assert checkpoints.latest_valid() == tmp_path / "step-000001"
    assert "step-000002 is damaged and passed over" in caplog.text
    with pytest.raises(ConfigError, match="step-000002 is damaged"):
        require_valid(tmp_path / "step-000002")
    damage(tmp_path / "step-000001" / name, how)
    with pytest.raises(ConfigError, match=r"No checkpoint in .* step-000002: .*; step-000001: "):
        checkpoints.latest_valid()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_part_is_refused_by_whatever_reads_it(tmp_path, how) -> None:
    path = saved_checkpoints(tmp_path, 1).current
    read = {
        "trainer/state.json": read_trainer_state,
        "trainer/learner.pt": read_learner_state,
        "model.safetensors": lambda path: load_weights(small_model(), path),
        "config.json": lambda path: load_weights(small_model(), path),
    }
    for name, reader in read.items():
        sound = (path / name).read_bytes()
        damage(path / name, how)
        try:
            reader(path)
        except ConfigError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert how == "another byte", name  # which only the sum of the file can tell
        (path / name).write_bytes(sound)


@settings(max_examples=scaled(25, 5_000))
@given(content=st.binary(max_size=400), name=st.sampled_from(["state.json", "sft.json", "learner.pt"]))
@example(content=b"[]", name="state.json")
@example(content=b'{"format": 5, "evaluations": 5}', name="state.json")
@example(content=b"[" * 100_000, name="state.json")
@example(content=b'{"format": 4}', name="state.json")
@example(content=b'{"format": 4}', name="sft.json")
@example(content=b'{"format": 4, "model": "m", "examples": "", "config": {}, "more": 1}', name="sft.json")
@example(content=b'{"model": "m", "examples": "", "config": {}}', name="sft.json")
@example(content=b"\x80\x04.", name="learner.pt")
def test_any_bytes_in_place_of_a_trainers_file_are_refused(tmp_path_factory, content, name) -> None:
    folder = tmp_path_factory.getbasetemp() / "any" / "trainer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    readers = {
        "state.json": read_trainer_state,
        "sft.json": partial(require_same, now=ABOUT, config=SFTConfig()),
        "learner.pt": read_learner_state,
    }
    with pytest.raises(ConfigError, match=rf"{name} (is damaged|was written by another version)"):
        readers[name](folder.parent)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "holds a list"),
        ({"optimizer": [torch.tensor([1.0, float("nan")])]}, "not finite"),
        ({}, "does not fit this run: KeyError"),
        ({"steps": 1, "optimizer": "x"}, "does not fit this run"),
    ],
)
def test_a_learners_state_that_cannot_be_used_is_refused_with_the_cure(tmp_path, state, message) -> None:
    class Learner:
        def load_state(self, state):
            assert state["steps"] == 1
            state["optimizer"].items()

    (tmp_path / "trainer").mkdir()
    torch.save(state, tmp_path / "trainer" / "learner.pt")
    with pytest.raises(ConfigError, match=rf"{message}.*Resume another checkpoint"):
        restore_learner(Learner(), tmp_path)


def test_a_disk_that_is_full_for_torch_is_reported_as_full(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))

    def write(path: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    with pytest.raises(PrerequisiteError, match=r"no space is left.*--resume"):
        Checkpoints(tmp_path, keep=1).save(1, write)


@pytest.mark.parametrize("change", [{"step": "7"}, {"cursor": 1.5}, {"version": None}])
def test_a_state_with_a_number_of_another_type_is_refused(tmp_path, change) -> None:
    write_trainer_state(tmp_path, PLACE, {"steps": 3})
    file = tmp_path / "trainer" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"damaged: TypeError: {next(iter(change))} is .*whole number"):
        read_trainer_state(tmp_path)
