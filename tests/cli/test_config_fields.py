"""The list of configuration fields: complete, equal to the guide, and used for suggestions."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml

from agentfly.cli.config_fields import field_groups, find_field, nearest_field
from agentfly.cli.config_file import RunConfig
from agentfly.training.config.train_config import TrainConfig

ROOT = Path(__file__).parents[2]
FIELDS = {field.key: field for group in field_groups(RunConfig) for field in group.fields}


def test_every_training_setting_is_listed_however_deep_it_lies():
    assert {f"training.{name}" for name in TrainConfig.model_fields} <= set(FIELDS)
    assert {"training.kl.coefficient", "training.lora.rank", "policy.base_url", "policy.servers"} <= set(FIELDS)


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("agent", "str", "required"),
        ("model", "str or null", "null"),
        ("training", "group", "see below"),
        ("training.lora", "group or null", "null"),
        ("training.steps", "int > 0", "100"),
        ("training.strategy", "chain | step", "chain"),
        ("training.temperature", "float > 0 or null", "null"),
        ("training.max_failure_rate", "float >= 0, <= 1", "0.5"),
    ],
)
def test_a_field_is_listed_with_its_type_and_default(key, kind, default):
    assert (FIELDS[key].kind, FIELDS[key].default) == (kind, default)


def test_every_field_describes_its_purpose():
    assert [key for key, field in FIELDS.items() if not field.meaning] == []


def test_the_tables_of_the_guide_match_the_fields():
    guide = (ROOT / "docs" / "guides" / "configuration.md").read_text(encoding="utf-8")
    written = runpy.run_path(str(ROOT / "scripts" / "configuration_guide.py"))["written"]
    assert guide == written(guide), "the guide is not up to date: python scripts/configuration_guide.py"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model", "model"),
        ("steps", "training.steps"),
        ("kl.coefficient", "training.kl.coefficient"),
        ("kl_coefficient", None),
        ("lr", "training.learning_rate"),
        ("training.max_steps", "training.steps"),
        ("warmup_ratio", "sft.warmup_ratio"),
    ],
)
def test_a_field_is_known_by_the_end_of_its_key(name, meant):
    assert find_field(name, RunConfig) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainig.steps", "training.steps"),
        ("training.kl.coeficient", "training.kl.coefficient"),
        ("lora.rnak", "training.lora.rank"),
        ("max_concurent_rollouts", "training.max_concurrent_rollouts"),
        ("rewards", "reward"),
        ("reward_fn", "reward"),
        ("task", "tasks"),
        ("tasks_per_step", "training.tasks_per_step"),
        ("eval_attempts", "training.eval_attempts"),
        ("num_generation", "training.attempts"),
        ("sft.lr", "sft.learning_rate"),
        ("sftt.learning_rate", "sft.learning_rate"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_field_is_the_one_that_was_likely_meant(name, meant):
    assert nearest_field(name, RunConfig) == meant


def test_all_fields_a_group_or_one_field_are_shown(agentfly):
    code, out = agentfly("config", "--json")
    assert code == 0
    assert [field["key"] for field in json.loads(out)] == [
        f.key for group in field_groups(RunConfig) for f in group.fields
    ]
    _, out = agentfly("config", "kl", "--json")
    assert {field["key"].rpartition(".")[0] for field in json.loads(out)} == {"training.kl"}
    _, out = agentfly("config", "learning_rate")
    assert "training.learning_rate" in out
    assert "training.critic.learning_rate" in out
    assert "Learning rate of AdamW" in out


def test_an_unknown_field_is_reported_with_the_nearest_name(agentfly):
    _, out = agentfly("config", "lr")
    assert "training.learning_rate" in out
    code, out = agentfly("config", "leraning_rate")
    assert code == 2
    assert "Did you mean 'training.learning_rate'?" in out


def test_a_configuration_is_shown_with_every_field_in_force(agentfly, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("agent: a.py:agent\ntasks: t.jsonl\ntraining: {steps: 5}\n")
    _, out = agentfly("config", str(path), "training.kl.coefficient=0.01")
    output = yaml.safe_load(out)
    assert output["training"]["steps"] == 5
    assert output["training"]["kl"]["coefficient"] == 0.01
    assert output["training"]["attempts"] == 8
