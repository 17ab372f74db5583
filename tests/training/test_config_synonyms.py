"""Settings are found under the names that other frameworks have for them."""

from __future__ import annotations

import logging

import pytest

from agentfly.cli.config_file import validated
from agentfly.errors import ConfigError
from agentfly.training.config.synonyms import EXPLAINED, SYNONYMS
from agentfly.training.config.train_config import TrainConfig


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
def test_a_setting_is_read_under_its_other_name_and_the_name_here_is_told(caplog, given, name, value):
    with caplog.at_level(logging.WARNING, "agentfly"):
        config = TrainConfig(**given)
    assert value_of(config, name) == value
    assert f"is called {name} here" in caplog.text
    settings = validated({"agent": "a:b", "tasks": "t.jsonl", "training": given}, "c.yaml").training
    assert settings == config


def test_a_setting_given_under_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"There is no training setting 'lr'\. It is called 'learning_rate' here"):
        TrainConfig(lr=1e-3, learning_rate=1e-4)
    with pytest.raises(ConfigError, match=r"'beta'\. It is called 'kl.coefficient' here"):
        TrainConfig(beta=0.1, kl={"coefficient": 0.2})


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("batch_size", "tasks_per_step"),
        ("max_completion_length", "max_tokens_per_turn"),
        ("num_train_epochs", "set steps"),
        ("gradient_accumulation_steps", "micro_batch_tokens"),
    ],
)
def test_a_setting_without_a_counterpart_of_the_same_meaning_is_refused_with_what_to_set(given, cure):
    with pytest.raises(ConfigError, match=rf"There is no training setting '{given}'.*{cure}"):
        TrainConfig(**{given: 4})
    with pytest.raises(ConfigError, match=rf"There is no key '{given}'.*{cure}"):
        validated({"agent": "a:b", "tasks": "t.jsonl", given: 4}, "c.yaml")


def test_a_synonym_beside_the_training_settings_is_told_its_place():
    with pytest.raises(ConfigError, match=r"There is no key 'lr'. Did you mean 'training\.learning_rate'\?"):
        validated({"agent": "a:b", "tasks": "t.jsonl", "lr": 1e-3}, "c.yaml")


@pytest.mark.parametrize("name", sorted(SYNONYMS))
def test_a_synonym_is_no_setting_itself_and_names_one_that_there_is(name):
    assert name not in TrainConfig.model_fields
    assert name not in EXPLAINED
    model = TrainConfig
    for part in SYNONYMS[name].split("."):
        assert part in model.model_fields
        annotation = model.model_fields[part].annotation
        model = next((one for one in (annotation, *getattr(annotation, "__args__", ())) if hasattr(one, "GROUP")), None)
