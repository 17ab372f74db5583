"""VLLMPolicy: it samples exactly or fails; with fake servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentfly.core.errors import (
    Boundary,
    ConfigError,
    PolicyError,
    PolicyUnavailable,
    PrerequisiteError,
    PromptTooLong,
    WeightMismatch,
    WeightUpdateError,
)
from agentfly.core.messages import Image, PlacedImage
from agentfly.policies.policy import Policy, SamplingParams
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.policies.vllm.weight_sync import WeightTransferDirectory
from agentfly.resources.model_server.spec import ModelServerSpec
from tests.support.fake_vllm_server import CONTEXT, FakeVLLMServer, save_adapter, save_bias

PLAIN = SamplingParams(max_tokens=4)


@contextlib.asynccontextmanager
async def served(*servers: FakeVLLMServer, **settings: Any) -> AsyncIterator[VLLMPolicy]:
    """A policy over stand-ins."""
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        given = {"model": "tiny", "server_wait_timeout_s": 20, "probe_ids": [1, 2, 3], **settings}
        yield await stack.enter_async_context(VLLMPolicy(urls=[server.url for server in servers], **given))


def bias_reference(bias: float) -> Any:
    """What the trainer's side says of weights of this bias."""
    return lambda ids: [-bias] * (len(ids) - 1)


def children_of(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# --- sampling ------------------------------------------------------------------------------------------------------


async def test_ids_go_in_and_come_out_with_log_probs_and_version() -> None:
    async with served(server := FakeVLLMServer()) as policy:
        assert isinstance(policy, Policy)
        generation = await policy.generate([5, 6], SamplingParams(max_tokens=8, stop_ids=(9,)), rollout_id="r")
        assert list(generation.ids) == [7, 8, 9]
        assert generation.finish_reason == "stop"
        assert generation.logprobs == generation.raw_logprobs == (-1.0, -1.0, -1.0)
        assert generation.version == 0
        assert policy.context_length == CONTEXT
        sent = server.generated[-1]
        assert sent["token_ids"] == [5, 6]
        assert sent["sampling_params"]["ignore_eos"] is True


async def test_raw_log_probs_are_told_where_they_are_known_or_asked_for() -> None:
    warm = SamplingParams(max_tokens=2, temperature=0.5, top_k=1)
    async with served(FakeVLLMServer()) as policy:
        assert (await policy.generate([5], warm, rollout_id="r")).raw_logprobs is None
    async with served(FakeVLLMServer(), raw_logprobs=True) as policy:
        generation = await policy.generate([5], warm, rollout_id="r")
        assert generation.logprobs == (0.0, 0.0)
        assert generation.raw_logprobs == (-1.0, -1.0)


async def test_a_prompt_that_fills_the_context_ends_the_rollout_without_a_request() -> None:
    async with served(server := FakeVLLMServer()) as policy:
        before = len(server.requests)
        with pytest.raises(PromptTooLong, match="103 tokens") as caught:
            await policy.generate([5] * 103, PLAIN, rollout_id="r")
        assert caught.value.by_policy
        assert len(server.requests) == before
        generation = await policy.generate([1] * (CONTEXT - 2), PLAIN, rollout_id="r")
        assert len(generation.ids) == 2
        assert generation.finish_reason == "length"


async def test_a_sample_whose_ids_got_lost_on_the_way_is_infrastructure_and_never_trained_on() -> None:
    async with served(server := FakeVLLMServer("loses ids")) as policy:
        with pytest.raises(PolicyError, match="counts 9 sampled tokens and sends 4 ids") as caught:
            await policy.generate([5], SamplingParams(max_tokens=9), rollout_id="r")
        assert not caught.value.by_policy
        assert caught.value.boundary is Boundary.POLICY
        assert len(server.generated) == 2, "one to try the server, one for the sample: it is not asked again"


@pytest.mark.parametrize(
    ("how", "cure"), [("no token ids", "--enable-scale-out"), ("raw log-probs", "--logprobs-mode processed_logprobs")]
)
async def test_a_server_that_cannot_be_trained_from_is_refused_before_the_first_rollout(how: str, cure: str) -> None:
    with pytest.raises((PrerequisiteError, ConfigError), match=cure):
        async with served(FakeVLLMServer(how)):
            pass


async def test_a_server_whose_likeliest_tokens_tie_as_in_half_precision_is_used() -> None:
    async with served(FakeVLLMServer("ties")) as policy:
        assert (await policy.generate([5], PLAIN, rollout_id="r")).logprobs == (-1.0,) * PLAIN.max_tokens


async def test_images_travel_with_one_placeholder_each_and_what_the_server_makes_of_them_is_checked() -> None:
    placed = PlacedImage(Image(b"png"), 1, 4)
    async with served(server := FakeVLLMServer()) as policy:
        with pytest.raises(ConfigError, match="sees none"):
            await policy.generate([5, 2, 2, 2, 8], PLAIN, rollout_id="r", images=[placed])
        policy.tokenizer.vision = SimpleNamespace(placeholder="<tool_call>", reserved_ids=(2,))  # tiny sees nothing
        generation = await policy.generate([5, 2, 2, 2, 8], PLAIN, rollout_id="r", images=[placed])
        assert len(generation.ids) == 4
        assert server.generated[-1]["token_ids"] == [5, 2, 8]
        assert server.generated[-1]["content_parts"] == [{"type": "image_url", "url": placed.image.url}]
        with pytest.raises(PolicyError, match="other placeholders"):
            await policy.generate([5, 2, 2, 8], PLAIN, rollout_id="r", images=[PlacedImage(Image(b"png"), 1, 3)])


async def test_ids_of_images_are_barred_on_the_server() -> None:
    async with served(server := FakeVLLMServer()) as policy:
        await policy.generate([5], SamplingParams(max_tokens=2, suppressed_ids=(3,)), rollout_id="r")
        assert server.generated[-1]["sampling_params"]["logit_bias"] == {"3": -100.0}


# --- servers -------------------------------------------------------------------------------------------------------


async def test_cancelled_generations_end_on_the_server_one_by_one() -> None:
    async with served(server := FakeVLLMServer()) as policy:
        server.free.clear()
        tasks = [asyncio.create_task(policy.generate([5], PLAIN, rollout_id=f"r{number}")) for number in range(50)]
        await eventually(lambda: server.running == 50)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: server.running == 0)
        assert server.aborted == 50
        assert all(task.cancelled() for task in tasks)
        assert len(server.generated) == 51, "and nobody asked again"


async def test_rollouts_are_shared_out_and_each_stays_at_its_server() -> None:
    servers = [FakeVLLMServer() for _ in range(3)]
    async with served(*servers) as policy:
        rollouts = [f"r{number}" for number in range(12)]
        for turn in range(3):
            await asyncio.gather(*(policy.generate([turn + 1], PLAIN, rollout_id=rollout) for rollout in rollouts))
        assert sorted(policy.loads.values()) == [4, 4, 4]
        assert [len(server.generated) - 1 for server in servers] == [12, 12, 12]
        for rollout in rollouts:
            policy.release_rollout(rollout)
        assert policy.loads == {}


async def test_when_a_server_dies_its_rollouts_move_and_it_comes_back() -> None:
    servers = [FakeVLLMServer(), FakeVLLMServer()]
    async with served(*servers) as policy:
        await asyncio.gather(*(policy.generate([1], PLAIN, rollout_id=f"r{number}") for number in range(6)))
        for server in servers:
            server.free.clear()
        asking = [asyncio.create_task(policy.generate([1], PLAIN, rollout_id=f"r{number}")) for number in range(6)]
        await eventually(lambda: servers[0].running + servers[1].running == 6)
        await servers[0].__aexit__()
        for server in servers:
            server.free.set()
        generations = await asyncio.gather(*asking)
        assert [list(generation.ids) for generation in generations] == [[2, 3, 4, 5]] * 6
        assert list(policy.loads.values()) == [6]
        servers[0].restart()
        await servers[0].__aenter__()
        await eventually(lambda: all(member.usable for member in policy._require_entered().members))
        await policy.generate([1], PLAIN, rollout_id="new")
        assert sorted(policy.loads.values()) == [1, 6]


@pytest.mark.parametrize("error", [OSError("no route"), KeyError("id"), asyncio.CancelledError()], ids=repr)
async def test_a_server_is_tried_again_whatever_goes_wrong_when_it_is_tried(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(FakeVLLMServer()) as policy:
        fleet = policy._require_entered()
        (member,) = fleet.members
        connect, tries = member.connect, 0

        async def connect_the_third_time() -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise error
            await connect()

        monkeypatch.setattr(member, "connect", connect_the_third_time)
        fleet.mark_unavailable(member, "it does not answer")
        assert len((await policy.generate([1], PLAIN, rollout_id="r")).ids) == PLAIN.max_tokens
        assert tries == 3
        assert not fleet._reviving


async def test_where_no_server_can_be_used_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(FakeVLLMServer(), server_wait_timeout_s=0.05) as policy:
        fleet = policy._require_entered()
        (member,) = fleet.members

        async def connect() -> None:
            raise OSError("no route")

        monkeypatch.setattr(member, "connect", connect)
        fleet.mark_unavailable(member, "it does not answer")
        with pytest.raises(PolicyUnavailable, match=r"for 0\.05 s: The server at \S+ \(OSError: no route\)"):
            await policy.generate([1], PLAIN, rollout_id="r")


def test_weights_that_cannot_be_written_leave_nothing_to_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    exchange = WeightTransferDirectory(tmp_path, tmp_path / "missing")
    for _ in range(2):
        with pytest.raises(PrerequisiteError, match=r"missing: No such file or directory\. Make that a directory"):
            exchange.write_adapter(lambda path: None)
    exchange.close()
    assert not [*(tmp_path / "state").glob("*.ledger")]


async def test_the_death_of_the_only_server_is_infrastructure() -> None:
    async with served(server := FakeVLLMServer(), server_wait_timeout_s=0.2) as policy:
        server.free.clear()
        asking = asyncio.create_task(policy.generate([1], PLAIN, rollout_id="r"))
        await eventually(lambda: server.running == 1)
        await server.__aexit__()
        with pytest.raises(PolicyUnavailable) as caught:
            await asking
        assert not caught.value.by_policy


async def test_a_generation_that_the_server_aborts_is_sampled_anew() -> None:
    async with served(server := FakeVLLMServer("aborts once")) as policy:
        assert list((await policy.generate([1], PLAIN, rollout_id="r")).ids) == [2, 3, 4, 5]
        assert not server.faults, "the first answer was cut short"


# --- weights -------------------------------------------------------------------------------------------------------


async def test_weights_are_updated_on_all_servers_and_proved(tmp_path: Path) -> None:
    servers = [FakeVLLMServer(), FakeVLLMServer()]
    async with served(*servers) as policy:
        made = await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        assert (made.version, made.logprob_gap, made.previous_logprob_gap) == (1, 0.0, 0.5)
        assert [server.bias for server in servers] == [1.5, 1.5]
        for number in range(4):
            generation = await policy.generate([1], PLAIN, rollout_id=f"r{number}")
            assert (generation.version, generation.logprobs) == (1, (-1.5,) * 4)
        assert policy.version == 1
        assert all(server.asked("/reset_prefix_cache") for server in servers)


async def test_tensors_go_through_a_directory_that_is_removed_once_they_are_superseded(tmp_path: Path) -> None:
    async with served(FakeVLLMServer(), weight_transfer_dir=tmp_path) as policy:
        for bias in (2.0, 3.0):
            tensors = iter({"bias": torch.tensor([bias])}.items())
            await policy.update_weights(tensors, reference=bias_reference(bias))
        (home,) = children_of(tmp_path)
        assert [path.name for path in children_of(home)] == ["2"]
        assert home / "2" / "config.json" in children_of(home / "2"), "it is a whole model, for transformers too"
    assert children_of(tmp_path) == []


async def test_a_server_that_keeps_old_weights_is_found_out_and_nothing_is_sampled_until_an_update_succeeds(
    tmp_path: Path,
) -> None:
    servers = [FakeVLLMServer(), FakeVLLMServer("loads nothing")]
    async with served(*servers) as policy:
        with pytest.raises(WeightMismatch, match=r"0\.5 nats a token"):
            await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        assert policy.version == 0
        for number in range(4):
            with pytest.raises(WeightUpdateError, match="last update of the weights failed") as caught:
                await policy.generate([1], PLAIN, rollout_id=f"r{number}")
            assert not caught.value.by_policy
        servers[1].faults.clear()
        await policy.update_weights(save_bias(tmp_path / "2", 1.75), reference=bias_reference(1.75))
        assert (await policy.generate([1], PLAIN, rollout_id="r")).logprobs == (-1.75,) * 4


async def test_an_update_too_small_to_be_told_from_rounding_must_change_something_all_the_same(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer(), max_logprob_gap=0.1) as policy:
        await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        server.faults.add("loads nothing")
        with pytest.raises(WeightMismatch, match="had no effect"):
            await policy.update_weights(save_bias(tmp_path / "2", 1.51), reference=bias_reference(1.51))


async def test_a_server_that_refuses_the_weights_stops_the_whole_fleet_with_its_words(tmp_path: Path) -> None:
    async with served(FakeVLLMServer(), FakeVLLMServer("cannot load")) as policy:
        with pytest.raises(WeightUpdateError, match="shapes do not fit"):
            await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        with pytest.raises(WeightUpdateError, match="shapes do not fit"):
            await policy.generate([1], PLAIN, rollout_id="r")


async def test_a_reference_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    def broken(ids: Sequence[int]) -> Sequence[float]:
        raise RuntimeError("the trainer has no memory left")

    async with served(server := FakeVLLMServer()) as policy:
        with pytest.raises(RuntimeError, match="no memory"):
            await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=broken)
        assert (await policy.generate([1], PLAIN, rollout_id="r")).version == 0
        assert server.bias == 1.0


async def test_generations_in_flight_go_on_and_say_which_token_came_from_which_weights(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer(), in_flight="keep") as policy:
        server.free.clear()
        asking = asyncio.create_task(policy.generate([1], PLAIN, rollout_id="r"))
        await eventually(lambda: server.running == 1)
        await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        server.free.set()
        assert (await asking).version == (0, 0, 1, 1)


async def test_a_generation_that_unproved_weights_had_a_part_in_is_refused(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer("loads nothing"), in_flight="keep") as policy:
        server.free.clear()
        asking = asyncio.create_task(policy.generate([1], PLAIN, rollout_id="r"))
        await eventually(lambda: server.running == 1)
        with pytest.raises(WeightMismatch):
            await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        server.free.set()
        with pytest.raises(WeightUpdateError):
            await asking


async def test_weights_of_an_update_that_failed_are_never_taken_for_those_of_the_next(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer("loads nothing")) as policy:
        with pytest.raises(WeightMismatch):
            await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        failed = server.label
        server.faults.clear()
        await policy.update_weights(save_bias(tmp_path / "2", 1.25), reference=bias_reference(1.25))
        assert (await policy.generate([1], PLAIN, rollout_id="r")).version == policy.version == 1
        server.label = failed
        with pytest.raises(WeightUpdateError, match="failed their check"):
            await policy.generate([1], PLAIN, rollout_id="r")


async def test_a_run_that_is_resumed_calls_its_weights_as_it_did(tmp_path: Path) -> None:
    async with served(FakeVLLMServer()) as policy:
        await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5), version=40)
        assert (await policy.generate([1], PLAIN, rollout_id="r")).version == policy.version == 40
        assert (await policy.update_weights(tmp_path / "1", reference=bias_reference(1.5))).version == 41


async def test_generations_wait_while_an_update_runs(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def slow(ids: Sequence[int]) -> Sequence[float]:
        begun.set()
        return [-1.5] * (len(ids) - 1)

    async with served(server := FakeVLLMServer()) as policy:
        updating = asyncio.create_task(policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=slow))
        await begun.wait()
        await eventually(lambda: server.asked("/pause"))
        generation = await policy.generate([1], PLAIN, rollout_id="r")
        assert (await updating).version == generation.version == 1


async def test_a_cancelled_update_leaves_nothing_to_sample_from(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer()) as policy:
        updating = asyncio.create_task(
            policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        )
        await eventually(lambda: server.asked("/collective_rpc"))
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(WeightUpdateError, match="was interrupted"):
            await policy.generate([1], PLAIN, rollout_id="r")
        assert not server.paused


async def test_a_server_that_started_again_with_its_own_weights_is_given_the_policys_before_it_samples(
    tmp_path: Path,
) -> None:
    async with served(server := FakeVLLMServer()) as policy:
        await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
        server.restart()
        generation = await policy.generate([1], PLAIN, rollout_id="r")
        assert (generation.version, generation.logprobs) == (1, (-1.5,) * 4)
        assert server.bias == 1.5


async def test_a_server_that_a_policy_left_with_other_weights_goes_back_to_its_own(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer()) as policy:
        await policy.update_weights(save_bias(tmp_path / "1", 1.5), reference=bias_reference(1.5))
    assert server.bias == 1.5
    async with served(server) as policy:
        assert (await policy.generate([1], PLAIN, rollout_id="r")).logprobs == (-1.0,) * 4


async def test_an_adapter_is_sampled_from_and_proved(tmp_path: Path) -> None:
    async with served(server := FakeVLLMServer()) as policy:
        with pytest.raises(ConfigError, match="no LoRA adapter"):
            await policy.update_adapter(tmp_path)
        for version, bias in enumerate((0.25, 0.5), start=1):
            path = save_adapter(tmp_path / str(version), bias)
            made = await policy.update_adapter(path, reference=bias_reference(1 + bias))
            assert made.version == version
            assert (await policy.generate([1], PLAIN, rollout_id="r")).logprobs == (-1 - bias,) * 4
        assert server.generated[-1]["model"] == "policy"
        with pytest.raises(WeightMismatch):
            await policy.update_adapter(save_adapter(tmp_path / "3", 0.75), reference=bias_reference(3.0))


async def test_an_adapter_can_be_saved_for_the_servers_and_goes_with_the_weights_it_was_for(tmp_path: Path) -> None:
    written: list[Path] = []

    def save(directory: Path) -> None:
        written.append(directory)
        save_adapter(directory, 0.25)

    async with served(FakeVLLMServer()) as policy:
        await policy.update_adapter(save, reference=bias_reference(1.25))
        await policy.update_adapter(save, reference=bias_reference(1.25))
        assert [path.exists() for path in written] == [False, True], "the one that is served stays"
        await policy.update_weights(save_bias(tmp_path, 3.0), reference=bias_reference(3.0))
        assert (await policy.generate([1], PLAIN, rollout_id="r")).logprobs == (-3.0,) * 4
    assert not written[-1].exists()


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({}, "needs either a ModelServerSpec"),
        ({"spec": ModelServerSpec(model="tiny"), "urls": ["http://a/v1"]}, "needs either a ModelServerSpec"),
        ({"urls": ["http://a/v1"]}, "needs model="),
        ({"urls": "http://a/v1", "model": "tiny"}, "write a list"),
        ({"urls": ["http://a/v1"] * 2, "model": "tiny"}, "twice"),
        ({"spec": ModelServerSpec(model="tiny"), "servers": 0}, "at least 1"),
        ({"spec": ModelServerSpec(model="tiny", data_parallel=2)}, "servers="),
        ({"spec": ModelServerSpec(model="tiny"), "in_flight": "drain"}, "'wait' or 'keep'"),
        ({"spec": ModelServerSpec(model="tiny", adapters=1), "raw_logprobs": True}, "with adapters"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        VLLMPolicy(**settings)
