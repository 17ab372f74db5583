"""Training of adapters: which weights change, what the policy samples with, and the checkpoint's content."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.policies.embedded.loading import merged_weights
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.policies.load import load_policy
from agentfly.policies.policy import SamplingParams
from agentfly.training.checkpoints import load_weights, write_model
from agentfly.training.learning.trainable_model import adapters_disabled
from agentfly.training.rows import Row
from tests.training.small_learning import constant, learn, learner_of, own_logprobs, rows_of, small_model, weights

LORA = {"rank": 4, "alpha": 8}
VALUES = [1.0, -1.0, 0.5, -0.5]


def adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" in name}


def base(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" not in name}


def logprobs_of(model: torch.nn.Module, rows: list[Row]) -> list[float]:
    return [
        value for row in rows for value in own_logprobs(model, row.ids, row.loss_mask, 1.0) if not math.isnan(value)
    ]


def test_new_adapters_change_no_output_and_training_changes_only_them() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, lora=LORA, weight_decay=0.1)
    before, own = base(model), adapters(model)
    assert logprobs_of(model, rows) == pytest.approx([value for row in rows for value in row.target_logprobs])
    learn(learner, rows, constant(rows, VALUES))
    assert all(torch.equal(weight, before[name]) for name, weight in base(model).items())
    assert any(not torch.equal(weight, own[name]) for name, weight in adapters(model).items())
    assert logprobs_of(model, rows) != pytest.approx([value for row in rows for value in row.target_logprobs])


def test_training_only_adapters_raises_good_tokens_and_lowers_bad_ones() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, lora=LORA, learning_rate=0.01)
    for _ in range(2):
        learn(learner, rows[:2], constant(rows[:2], [1.0, -1.0]))
    now = [sum(logprobs_of(model, [row])) for row in rows[:2]]
    assert now[0] > sum(rows[0].target_logprobs)
    assert now[1] < sum(rows[1].target_logprobs)


def test_the_policy_before_training_is_the_model_with_its_adapters_disabled() -> None:
    model = small_model()
    rows = rows_of(model)
    learner = learner_of(model, lora=LORA, kl={"coefficient": 0.1}, learning_rate=0.01)
    first = learn(learner, rows, constant(rows, VALUES))
    assert first["policy/reference_kl"] == 0.0
    assert learn(learner, rows, constant(rows, VALUES))["policy/reference_kl"] > 1e-5
    with adapters_disabled(model):
        assert logprobs_of(model, rows) == pytest.approx([value for row in rows for value in row.target_logprobs])
    assert logprobs_of(model, rows) != pytest.approx([value for row in rows for value in row.target_logprobs])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_the_policy_samples_with_the_very_adapters_that_are_trained(temperature: float) -> None:
    async with load_policy("tiny", dtype="float32") as policy:
        learner = learner_of(policy.model, temperature, lora=LORA, learning_rate=0.02)
        rows = []
        for step in range(3):
            prompt = [5, 6, 7 + step]
            sampled = await policy.generate(
                prompt, SamplingParams(temperature=temperature, max_tokens=12), rollout_id=f"r{step}"
            )
            count = len(sampled.ids)
            rows = [
                Row(
                    ids=[*prompt, *sampled.ids],
                    loss_mask=[0] * 3 + [1] * count,
                    logprobs=[math.nan] * 3 + list(sampled.logprobs),
                    versions=[-1] * 3 + [0] * count,
                    group_id="g",
                    rollout_id="r",
                    reward=1.0,
                    truncated=False,
                )
            ]
            async with policy.exclusive_access():
                metrics = learn(learner, rows, constant(rows, [1.0]))
                policy.weights_updated()
            assert metrics["mismatch/logprob_diff_max"] < 1e-4
            assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert any(weight.abs().max() > 0 for name, weight in adapters(policy.model).items() if "lora_B" in name)


def test_dropout_of_adapters_drops_while_learning_only_and_repeats_with_the_step() -> None:
    models = [small_model() for _ in range(3)]
    rows = rows_of(models[0])
    for model, dropout in zip(models, (0.0, 0.5, 0.5), strict=True):
        learner = learner_of(model, lora=LORA | {"dropout": dropout}, learning_rate=0.01)
        for _ in range(2):
            learn(learner, rows, constant(rows, VALUES))
    assert not torch.equal(weights(models[1]), weights(models[0]))
    assert torch.equal(weights(models[1]), weights(models[2]))
    assert logprobs_of(models[1], rows) == logprobs_of(models[1], rows)


def test_modules_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        learner_of(small_model(), lora=LORA | {"target_modules": ["query"]})


@pytest.mark.parametrize("settings", [{"lora": LORA}, {}])
def test_a_model_with_adapters_of_an_earlier_run_is_refused(settings: dict[str, object]) -> None:
    model = small_model()
    learner_of(model, lora=LORA)
    with pytest.raises(ConfigError, match="adapters of an earlier run"):
        learner_of(model, **settings)  # type: ignore[arg-type]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_adapters_loads_as_a_model_and_can_be_trained_further(tmp_path: Path) -> None:
    policy = load_policy("tiny", dtype="float32")
    rows = rows_of(policy.model)
    learner = learner_of(policy.model, lora=LORA, learning_rate=0.01)
    learn(learner, rows, constant(rows, VALUES))
    write_model(tmp_path / "one", policy.model, policy.tokenizer.hf)
    assert not list((tmp_path / "one").glob("*.safetensors"))
    loaded = load_policy(tmp_path / "one", dtype="float32")
    assert not adapters(loaded.model)
    trained = logprobs_of(policy.model, rows)
    assert logprobs_of(loaded.model, rows) == pytest.approx(trained, abs=1e-4)
    assert logprobs_of(load_policy("tiny", dtype="float32").model, rows) != pytest.approx(trained, abs=1e-4)

    rows = rows_of(loaded.model)
    before = logprobs_of(loaded.model, rows)
    learn(learner_of(loaded.model, lora=LORA, learning_rate=0.01), rows, constant(rows, VALUES))
    write_model(tmp_path / "two", loaded.model, loaded.tokenizer.hf)
    again = load_policy(tmp_path / "two", dtype="float32")
    assert logprobs_of(again.model, rows) == pytest.approx(logprobs_of(loaded.model, rows), abs=1e-4)
    assert logprobs_of(again.model, rows) != pytest.approx(before, abs=1e-4)


def test_a_checkpoint_of_adapters_stops_at_the_ids_at_which_its_model_does(tmp_path: Path) -> None:
    policy = load_policy("tiny", dtype="float32")
    policy.model.generation_config.eos_token_id = [0, 408]
    learner_of(policy.model, lora=LORA)
    write_model(tmp_path / "one", policy.model, policy.tokenizer.hf)
    assert load_policy(tmp_path / "one", dtype="float32").tokenizer.eos_ids == (0, 408)


def test_adapters_without_their_base_model_report_its_path(tmp_path: Path) -> None:
    policy = load_policy("tiny")
    policy.model.save_pretrained(tmp_path / "base")
    policy.tokenizer.hf.save_pretrained(tmp_path / "base")
    moved = load_policy(tmp_path / "base")
    learner_of(moved.model, lora=LORA)
    write_model(tmp_path / "one", moved.model, moved.tokenizer.hf)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(PrerequisiteError, match="base_model_name_or_path"):
        load_policy(tmp_path / "one")


def test_a_run_with_adapters_resumes_exactly_from_its_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora": LORA | {"dropout": 0.1}, "kl": {"coefficient": 0.05}, "mini_batches": 2}
    policy, other = load_policy("tiny", dtype="float32"), load_policy("tiny", dtype="float32")
    rows = rows_of(policy.model)
    learner = learner_of(policy.model, **settings)
    learn(learner, rows, constant(rows, VALUES))
    write_model(tmp_path, policy.model, policy.tokenizer.hf)
    state = copy.deepcopy(learner.state())
    resumed = learner_of(other.model, **settings)
    load_weights(other.model, tmp_path)
    resumed.load_state(state)
    for _ in range(2):
        assert learn(resumed, rows, constant(rows, VALUES)) == learn(learner, rows, constant(rows, VALUES))
    assert torch.equal(weights(other.model), weights(policy.model))


def test_adapters_of_a_different_rank_or_missing_adapters_are_refused(tmp_path: Path) -> None:
    policy = load_policy("tiny")
    write_model(tmp_path / "whole", policy.model, policy.tokenizer.hf)
    learner_of(policy.model, lora=LORA)
    write_model(tmp_path / "adapters", policy.model, policy.tokenizer.hf)
    other = load_policy("tiny")
    learner_of(other.model, lora=LORA | {"rank": 3})
    with pytest.raises(ConfigError, match="of another model, rank or modules"):
        load_weights(other.model, tmp_path / "adapters")
    with pytest.raises(ConfigError, match="holds no adapters"):
        load_weights(other.model, tmp_path / "whole")


def test_servers_are_given_the_weights_with_the_adapters_in_them() -> None:
    model, plain = small_model(), small_model()
    rows = rows_of(model)
    learn(learner_of(model, lora=LORA, learning_rate=0.05), rows, constant(rows, VALUES))
    merged = dict(merged_weights(model))
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    targets = [row.targets for row in rows]
    with torch.no_grad():
        given, own = (score_tokens(each, [row.ids for row in rows], targets).logprobs for each in (plain, model))
    torch.testing.assert_close(given, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("q_proj", "lm_head")])
def test_a_weight_that_input_and_output_share_gets_no_adapter_that_merging_would_put_into_both(
    modules: tuple[str, ...],
) -> None:
    with pytest.raises(ConfigError, match=rf"adapter on \S*{modules[-1]}, whose weight .* share"):
        learner_of(small_model(), lora={**LORA, "target_modules": modules})


def test_an_output_layer_of_its_own_may_have_an_adapter() -> None:
    model = small_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    learner_of(model, lora={**LORA, "target_modules": ("lm_head",)})
    assert {name.split(".")[0] for name in adapters(model)} == {"lm_head"}
