"""``agentfly tokens audit``: the audit of a run, as a table and as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

import agentfly as af
from agentfly.cli import main as cli
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories, save_trajectories
from agentfly.policies.load import load_policy


@pytest.fixture
def agentfly(monkeypatch, capsys):
    """Run a command; answers its exit code, standard output and standard error."""

    def command(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        message = capsys.readouterr()
        return code, message.out, message.err

    return command


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A run of the shipped model, sampled so hot that its text is not what its tokenizer would make of it again."""
    run = RunDirectory(tmp_path / "run").ensure()
    agent = af.Agent(model="tiny", max_tokens_per_turn=48, temperature=4.0)
    policy = load_policy("tiny", dtype="float32", threads=1)

    async def go():
        async with policy:
            return await af.run(agent, ["What to do about eggs?"] * 8, policy=policy, reward=af.reward(lambda: 1.0))

    save_trajectories(asyncio.run(go()).trajectories, run.trajectories_file(1))
    return run


@pytest.mark.slow
def test_a_real_run_drifts_when_it_is_retokenized_and_its_own_ids_do_not(run, agentfly):
    code, out, err = agentfly("tokens", "audit", str(run.path), "--model", "tiny", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["trajectories"] == 8
    assert found["faults"] == []
    assert 0 < found["drifted_tokens"] < found["sampled_tokens"]
    code, out, _ = agentfly("tokens", "audit", str(run.trajectories_file(1)), "--model", "tiny")
    assert code == 0
    assert f"{found['drifted_tokens']:,}" in out
    assert "re-tokenized" in out


@pytest.mark.slow
def test_changed_ids_in_a_record_fail_the_audit(run, agentfly):
    path = run.trajectories_file(1)
    damaged = list(load_trajectories(path))
    ids = damaged[0].sequences[0].ids
    ids[damaged[0].turns[0].start] = next(one for one in range(20, 99) if one != ids[damaged[0].turns[0].start])
    save_trajectories(damaged, path)
    code, _, err = agentfly("tokens", "audit", str(run.path), "--model", "tiny")
    assert code == 1
    assert "do not spell its text" in err


def test_the_model_of_a_python_run_is_found_and_ids_of_another_tokenizer_are_not_faults(tmp_path, agentfly):
    """The model is read from the file beside the rollouts. Scripted turns have ids of another tokenizer."""
    agent = af.Agent(model="tiny")
    asyncio.run(af.run(agent, ["go", "on"], policy=af.ScriptedPolicy(["hello there"]), run_dir=tmp_path / "run"))
    code, out, err = agentfly("tokens", "audit", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert "2 of 2 turns do not decode to their text, so the tokenizer of tiny did not make them" in err
    assert "--model" in err
    assert "ScriptedPolicy" in err


def test_a_run_that_does_not_say_its_model_is_asked_for_it(tmp_path, agentfly):
    run = RunDirectory(tmp_path / "run").ensure()
    result = asyncio.run(af.run(af.Agent(model="scripted"), ["go"], policy=af.ScriptedPolicy(["hi"])))
    save_trajectories(result.trajectories, run.trajectories_file(1))
    code, _, err = agentfly("tokens", "audit", str(run.path))
    assert code == 2
    assert "--model" in err


@pytest.mark.slow
def test_a_run_that_was_trained_from_python_knows_its_model(tmp_path, agentfly):
    @af.reward
    def brief(response: str) -> float:
        return 1.0 / (1 + len(set(response)))

    agent = af.Agent(model="tiny", max_turns=1, max_tokens_per_turn=4)
    settings: dict[str, Any] = {"steps": 1, "tasks_per_step": 1, "attempts": 2, "progress": False}
    af.train(agent, ["a"], brief, run_dir=tmp_path / "run", **settings)
    code, out, err = agentfly("tokens", "audit", str(tmp_path / "run"), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["sampled_tokens"] > 0
