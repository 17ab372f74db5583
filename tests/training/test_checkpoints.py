"""Checkpoints are whole or not there, and bring back what was saved."""

from __future__ import annotations

import copy
import errno
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.training.checkpoints import Checkpoints, Place, load_weights, read_learner, read_place, write_place

PLACE = Place(
    step=3,
    cursor=24,
    version=3,
    model="tiny",
    tasks="abc",
    agent={"max_turns": 4},
    reward="brief",
    config={"steps": 9, "learning_rate": 1e-5},
)


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
    assert checkpoints.latest() == first
    assert checkpoints.save(2, write_text) == checkpoints.latest()


def test_a_checkpoint_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    seen = []
    checkpoints.save(1, lambda path: seen.append(checkpoints.latest()))
    assert seen == [None]


def test_what_a_killed_process_left_half_written_or_half_removed_is_cleared(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.save(1, write_text)
    for name in (".unfinished-000002", ".unfinished-removed-step-000000"):
        shutil.copytree(saved, tmp_path / name)
    assert checkpoints.latest() == saved
    checkpoints.remove_unfinished()
    assert list(tmp_path.iterdir()) == [saved]


def test_the_newest_checkpoints_are_kept_by_their_steps_and_not_by_their_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 999_999, 1_000_000):
        checkpoints.save(step, write_text)
    assert [step for step, _ in checkpoints.saved()] == [999_999, 1_000_000]


def test_a_directory_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing", keep=1).latest() is None


def test_place_and_learner_come_back_as_they_were_saved(tmp_path: Path) -> None:
    write_place(tmp_path, PLACE, {"steps": 3, "masters": [None, torch.tensor([1.5])]})
    assert read_place(tmp_path) == PLACE
    learner = read_learner(tmp_path)
    assert learner["steps"] == 3
    assert learner["masters"][1].tolist() == [1.5]


def test_a_directory_with_a_model_alone_is_no_checkpoint_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the state of a run"):
        read_place(tmp_path)


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
    write_place(tmp_path, PLACE, {})
    pointers = [weight.data_ptr() for weight in other.parameters()]
    load_weights(other, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)
        assert torch.equal(loaded.state_dict()[name], weight)
    assert [weight.data_ptr() for weight in other.parameters()] == pointers


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    small_model(hidden=32).save_pretrained(tmp_path)
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="another model"):
        load_weights(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


def test_a_full_disk_says_what_to_do_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, write_text)

    def fill(path: Path) -> None:
        (path / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PrerequisiteError, match="keep_checkpoints"):
        checkpoints.save(2, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
