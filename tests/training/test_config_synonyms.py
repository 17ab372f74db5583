"""Settings under the names of other frameworks."""

from __future__ import annotations

import logging

import pytest

import agentfly as af
from agentfly.cli.config_file import config_text, load_config, validate_config
from agentfly.core.errors import ConfigError
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.sft import sft
from agentfly.training.train import _merge_settings


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"lr": 3e-4}, "learning_rate", 3e-4),
        ({"num_generations": 4}, "attempts", 4),
        ({"group_size": 4}, "attempts", 4),
        ({"max_steps": 7}, "steps", 7),
        ({"beta": 0.1}, "kl.coefficient", 0.1),
        ({"kl_coef": 0.1, "kl": {"where": "reward"}}, "kl.coefficient", 0.1),
        ({"lora_rank": 4}, "lora.rank", 4),
    ],
)
def test_a_synonym_is_accepted_and_the_canonical_name_is_reported(caplog, given, name, value):
    with caplog.at_level(logging.WARNING, "agentfly"):
        config = TrainConfig(**given)
    assert value_of(config, name) == value
    assert f"is called {name} here" in caplog.text
    settings = validate_config({"agent": "a:b", "tasks": "t.jsonl", "training": given}, "c.yaml").training
    assert settings == config


def test_a_setting_given_under_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"There is no training setting 'lr'\. It is called 'learning_rate' here"):
        TrainConfig(lr=1e-3, learning_rate=1e-4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'beta'\. It is called 'kl.coefficient' here"):
        TrainConfig(beta=0.1, kl={"coefficient": 0.2})  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("batch_size", "tasks_per_step"),
        ("max_completion_length", "max_tokens_per_turn"),
        ("num_train_epochs", "set steps"),
        ("gradient_accumulation_steps", "micro_batch_tokens"),
    ],
)
def test_a_setting_without_counterpart_is_refused_with_the_setting_to_use(given, cure):
    with pytest.raises(ConfigError, match=rf"There is no training setting '{given}'.*{cure}"):
        TrainConfig(**{given: 4})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"There is no key '{given}'.*{cure}"):
        validate_config({"agent": "a:b", "tasks": "t.jsonl", given: 4}, "c.yaml")


def test_a_synonym_at_the_wrong_level_is_reported_with_the_correct_key():
    with pytest.raises(ConfigError, match=r"There is no key 'lr'. Did you mean 'training\.learning_rate'\?"):
        validate_config({"agent": "a:b", "tasks": "t.jsonl", "lr": 1e-3}, "c.yaml")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"lr": 3e-4}, "learning_rate", 3e-4),
        ({"num_train_epochs": 4}, "epochs", 4),
        ({"train_batch_size": 4}, "rows_per_update", 4),
        ({"lora_rank": 4}, "lora.rank", 4),
    ],
)
def test_a_setting_of_a_warm_start_is_read_under_its_other_name_too(caplog, given, name, value):
    with caplog.at_level(logging.WARNING, "agentfly"):
        assert value_of(SFTConfig(**given), name) == value
    assert f"is called sft.{name} here" in caplog.text


def test_a_warm_start_with_a_number_of_steps_is_referred_to_epochs():
    with pytest.raises(ConfigError, match=r"'sft\.max_steps'.*set epochs"):
        SFTConfig(max_steps=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("written", ["learning_rate", "lr"])
@pytest.mark.parametrize("word", ["learning_rate", "lr"])
def test_an_override_replaces_the_value_of_the_file_under_any_synonym(tmp_path, written, word):
    path = tmp_path / "config.yaml"
    path.write_text(f"agent: a:b\ntraining: {{{written}: 1.0e-3}}\nsft: {{{written}: 1.0e-3}}\n")
    config = load_config(path, [f"training.{word}=2e-4", f"sft.{word}=3e-4"])
    assert (config.training.learning_rate, config.sft.learning_rate) == (2e-4, 3e-4)
    assert f"learning_rate: {config.training.learning_rate}" in config_text(config)


@pytest.mark.parametrize(
    ("written", "word", "name", "value"),
    [
        ("kl: {coefficient: 0.2, where: reward}", "beta=0.1", "kl.coefficient", 0.1),
        ("beta: 0.2", "kl.coefficient=0.1", "kl.coefficient", 0.1),
        ("kl_coef: 0.2", "beta=0.1", "kl.coefficient", 0.1),
        ("group_size: 4", "num_generations=2", "attempts", 2),
        ("lora_rank: 4", "lora=null", "lora", None),
        ("{lora_rank: 4, lora_alpha: 9}", "lora.rank=8", "lora.alpha", 9),
        ("steps: 7", "total_training_steps=9", "steps", 9),
    ],
)
def test_an_override_replaces_a_setting_of_a_group_under_any_name(tmp_path, written, word, name, value):
    path = tmp_path / "config.yaml"
    path.write_text(f"agent: a:b\ntraining: {written if written[0] == '{' else '{' + written + '}'}\n")
    assert value_of(load_config(path, [f"training.{word}"]).training, name) == value


def test_of_two_overrides_of_one_setting_the_last_counts(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("agent: a:b\n")
    assert load_config(path, ["training.lr=1e-3", "training.learning_rate=2e-3"]).training.learning_rate == 2e-3
    assert load_config(path, ["training.learning_rate=2e-3", "training.lr=1e-3"]).training.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("of", "given", "meant"),
    [
        (TrainConfig, {"num_generation": 4}, "attempts"),
        (TrainConfig, {"critic": {"lr": 1e-3}}, "critic.learning_rate"),
        (TrainConfig, {"kl": {"coef": 0.1}}, "kl.coefficient"),
        (TrainConfig, {"kl": {"beta": 0.1}}, "kl.coefficient"),
        (TrainConfig, {"lora": {"r": 8}}, "lora.rank"),
        (SFTConfig, {"warmup_ratios": 0.1}, "sft.warmup_ratio"),
        (SFTConfig, {"lora": {"r": 8}}, "lora.rank"),
    ],
)
def test_a_misspelled_synonym_is_reported_with_the_canonical_name(of, given, meant):
    with pytest.raises(ConfigError, match=rf"Did you mean '{meant}'\?"):
        of(**given)


def test_a_misspelled_argument_of_the_call_is_reported_as_such():
    agent = af.Agent(model="tiny")
    with pytest.raises(ConfigError, match=r"train\(\) has no argument 'rewards'. Did you mean 'reward'\?"):
        af.train(agent, ["hello"], rewards=None)
    with pytest.raises(ConfigError, match=r"sft\(\) has no argument 'run_directory'. Did you mean 'run_dir'\?"):
        sft(agent, [], run_directory="runs/x")
    with pytest.raises(ConfigError, match=r"'reward' is a key beside 'training'.* Write reward, not training.rewards"):
        validate_config({"agent": "a:b", "training": {"rewards": "a:c"}}, "c.yaml")


def test_settings_of_a_call_replace_those_of_its_configuration_under_any_name():
    config = TrainConfig(learning_rate=1e-3, kl={"coefficient": 0.2, "where": "reward"})  # type: ignore[arg-type]
    settings = _merge_settings(config, {"lr": 2e-3, "beta": 0.1})
    assert settings.learning_rate == 2e-3
    assert (settings.kl.coefficient, settings.kl.where) == (0.1, "reward")


@pytest.mark.parametrize("of", [TrainConfig, SFTConfig])
def test_a_synonym_is_no_setting_itself_and_names_one_that_there_is(of):
    for name, meant in of.SYNONYMS.items():
        assert name not in of.model_fields
        assert name not in of.SETTING_HINTS
        require_setting(of, meant)


def require_setting(model, name):
    for part in name.split("."):
        assert part in model.model_fields
        annotation = model.model_fields[part].annotation
        model = next((one for one in (annotation, *getattr(annotation, "__args__", ())) if hasattr(one, "GROUP")), None)
