from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.cli.config_file import EndpointConfig, RunConfig, VLLMConfig, load_config, save_config
from agentfly.core.errors import ConfigError
from agentfly.training.advantages import ALGORITHMS
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.losses import LOSSES

MINIMAL = "agent: my_agent.py:agent\ntasks: tasks.jsonl\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_file_and_its_overrides_give_the_same_fields_as_python(tmp_path):
    path = written(tmp_path, MINIMAL + "training:\n  steps: 5\n  learning_rate: 1e-4\n")
    config = load_config(path, ["training.steps=7", "model=tiny", "training.algorithm=reinforce"])
    assert config == RunConfig(
        agent="my_agent.py:agent",
        tasks="tasks.jsonl",
        model="tiny",
        directory=str(tmp_path),
        training=TrainConfig(steps=7, learning_rate=1e-4, algorithm="reinforce"),
    )


def test_the_resolved_configuration_saved_with_a_run_loads_as_the_same_from_anywhere(tmp_path):
    config = load_config(written(tmp_path, MINIMAL), ["training.eval_every_steps=5"])
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "learning_rate: " in saved  # every field, not only those that were set


def test_an_environment_variable_can_stand_in_for_a_value(tmp_path, monkeypatch):
    monkeypatch.setenv("WHICH_MODEL", "tiny")
    assert load_config(written(tmp_path, MINIMAL + "model: ${oc.env:WHICH_MODEL}\n")).model == "tiny"


@pytest.mark.parametrize(
    ("text", "overrides", "output"),
    [
        (MINIMAL + "modle: tiny\n", [], "There is no key 'modle'. Did you mean 'model'?"),
        (MINIMAL + "zzz: 1\n", [], "The keys are agent, model, policy, memory, tasks"),
        (MINIMAL, ["training.max_concurent_rollouts=8"], "Did you mean 'max_concurrent_rollouts'?"),
        (MINIMAL, ["trainig.steps=8"], "Did you mean 'training'?"),
        (MINIMAL, ["steps=3"], "There is no key 'steps'. Did you mean 'training.steps'?"),
        (MINIMAL, ["kl.coefficient=0.1"], "There is no key 'kl'. Did you mean 'training.kl'?"),
        (
            MINIMAL,
            ["training.kl.coeficient=0.1"],
            "There is no training setting 'kl.coeficient'. Did you mean 'kl.coef",
        ),
        (MINIMAL, ["training.lora.ranks=4"], "There is no training setting 'lora.ranks'. Did you mean 'lora.rank'?"),
        (MINIMAL, ["training.kl=3"], "training: kl=3: this is a group of settings. Set one or more"),
        (MINIMAL, ["training.early_stop=true"], "There are: target, patience"),
        (MINIMAL, ["training.curriculum=x:Y"], "Write curriculum, not training.curriculum."),
        (MINIMAL + "training: {steps: soon}\n", [], "training: steps='soon': input should be a valid integer"),
        (MINIMAL + "training: 3\n", [], "training: 3 is not a mapping from names of settings to values"),
        (MINIMAL + "training:\n", [], "training: None is not a mapping from names of settings to values"),
        (MINIMAL + "training: {steps: yes}\n", [], "training: steps=True: input should not be a truth value"),
        (MINIMAL + "sft: {lora: {rnk: 4}}\n", [], "sft: There is no training setting 'lora.rnk'"),
        ("agent: [1]\ntasks: t\n", [], "agent=[1]: input should be a valid string"),
        ("tasks: tasks.jsonl\n", [], "The key 'agent' is required and missing."),
        ("agent: a\ntasks: [unclosed\n", [], "line 3, column 1 is not YAML"),
        ("agent: a\nagent: b\n", [], "line 2, column 1 is not YAML: found duplicate key agent"),
        ("- a\n- b\n", [], "does not hold a mapping"),
        (MINIMAL + "model: ${oc.env:NOT_SET_ANYWHERE}\n", [], "NOT_SET_ANYWHERE"),
        (MINIMAL, ["steps"], "'steps' is not an override. Write key=value"),
        (MINIMAL, ["training.=3"], "is not an override"),
        (MINIMAL, ["training.steps=[1"], "'training.steps=[1' is not an override"),
    ],
)
def test_an_invalid_configuration_is_reported_with_position_and_remedy(tmp_path, text, overrides, output):
    with pytest.raises(ConfigError) as refusal:
        load_config(written(tmp_path, text), overrides)
    assert output in str(refusal.value)


def test_all_mistakes_in_a_file_are_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        load_config(written(tmp_path, "agnet: x\nmodle: y\n"))
    message = str(refusal.value)
    assert "'agnet'" in message
    assert "'modle'" in message
    assert "'agent' is required" in message


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("policy: vllm\n", VLLMConfig()),
        (
            "policy:\n  kind: vllm\n  servers: 2\n  server: {dtype: float32}\n",
            VLLMConfig(servers=2, server={"dtype": "float32"}),
        ),
        ("policy:\n  base_url: http://localhost:1/v1\n", EndpointConfig(base_url="http://localhost:1/v1")),
    ],
)
def test_a_policy_is_an_endpoint_or_vllm(tmp_path, text, policy):
    assert load_config(written(tmp_path, MINIMAL + text)).policy == policy


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("policy:\n  kind: vllm\n  severs: 2\n", "no key 'policy.severs'"),
        ("policy:\n  model: m\n", "key 'policy.base_url' is required"),
        ("policy:\n  base_ur: http://localhost:1/v1\n", "'policy.base_url' is required.* There is no 'base_ur'"),
        ("policy: vlm\n", "policy='vlm': there is no such policy. Write 'vllm'"),
    ],
)
def test_a_mistake_in_the_policy_is_reported_by_its_key(tmp_path, text, output):
    with pytest.raises(ConfigError, match=output):
        load_config(written(tmp_path, MINIMAL + text))


def test_a_fault_in_an_override_is_not_blamed_on_the_file(tmp_path):
    good, bad = written(tmp_path, MINIMAL), "policy=vlm"
    with pytest.raises(ConfigError, match=r"^policy=vlm cannot be followed"):
        load_config(good, [bad])
    with pytest.raises(ConfigError, match=r"^\S+config.yaml cannot be followed"):
        load_config(written(tmp_path, MINIMAL + "modle: tiny\n"), ["model=tiny"])


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "none.yaml")


def test_every_field_has_a_description():
    assert [name for name, field in RunConfig.model_fields.items() if not field.description] == []


OWN = """
from agentfly.training.advantages import ALGORITHMS, Algorithm
from agentfly.training.losses import LOSSES

MINE = Algorithm(ALGORITHMS["reinforce"].estimate)
my_loss = LOSSES["ppo_clip"]
number = 3
"""


def test_the_same_reference_names_the_code_of_each_configurations_own_directory(tmp_path):
    before = [*ALGORITHMS], [*LOSSES]
    configs = []
    for name, estimate in (("a", "reinforce"), ("b", "opo")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_ones.py").write_text(OWN.replace("reinforce", estimate))
        text = "training:\n  adv_estimator: own_ones.py:MINE\n  loss: own_ones.py:my_loss\n"
        configs.append(load_config(written(tmp_path / name, MINIMAL + text)).training)
    for config, estimate in zip(configs, ("reinforce", "opo"), strict=True):
        for same in (config, config.replaced({"steps": 3})):
            assert same.algorithm == "own_ones.py:MINE"
            assert same.chosen_algorithm.estimate is ALGORITHMS[estimate].estimate
            assert same.chosen_loss is LOSSES["ppo_clip"]
    assert ([*ALGORITHMS], [*LOSSES]) == before


def test_user_algorithms_and_losses_are_named_by_reference(tmp_path):
    (tmp_path / "own_ones.py").write_text(OWN)
    path = written(tmp_path, MINIMAL + "training:\n  algorithm: own_ones.py:MINE\n  loss: own_ones.py:my_loss\n")
    for _ in range(2):
        config = load_config(path)
        assert (config.training.algorithm, config.training.loss) == ("own_ones.py:MINE", "own_ones.py:my_loss")
    with pytest.raises(ConfigError, match=r"own_ones\.py:number' is an int, and has to be of the class Algorithm"):
        load_config(path, ["training.algorithm=own_ones.py:number"])
    with pytest.raises(ConfigError, match="Did you mean 'MINE'"):
        load_config(path, ["training.algorithm=own_ones.py:MIEN"])
