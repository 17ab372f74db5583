"""The slot table: earlier turns are kept, prefixes are reused, and running slots are never taken."""

from __future__ import annotations

from array import array

from agentfly.policies.embedded.kv_slots import SlotTable


def ids(*parts: int) -> array[int]:
    return array("i", parts)


def run(table: SlotTable, rollout_id: str, prompt: array[int]) -> int:
    """Place a prompt, compute all of it, and let it rest; returns how many tokens were there already."""
    placement = table.assign(rollout_id, prompt)
    assert placement is not None
    found = placement.resident.computed
    placement.resident.computed = len(prompt)
    table.release(placement.resident)
    return found


def test_the_next_turn_of_a_rollout_finds_its_earlier_tokens_in_place() -> None:
    table = SlotTable(4)
    run(table, "a", ids(*range(30)))
    placement = table.assign("a", ids(*range(40)))
    assert placement is not None
    assert (placement.resident.slot, placement.resident.computed, placement.copy_from) == (0, 30, None)


def test_another_rollout_copies_the_prefix() -> None:
    table = SlotTable(4)
    run(table, "a", ids(*range(30)))
    placement = table.assign("b", ids(*range(20), 99, 98))
    assert placement is not None
    assert (placement.resident.slot, placement.resident.computed, placement.copy_from) == (1, 20, 0)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    table = SlotTable(4)
    run(table, "a", ids(*range(30)))
    assert run(table, "b", ids(*range(30))) == 29


def test_a_prompt_waits_for_a_running_one_that_computes_its_prefix() -> None:
    table = SlotTable(4)
    first = table.assign("a", ids(*range(30)))
    assert first is not None
    assert table.assign("b", ids(*range(30), 99)) is None
    first.resident.computed = 30
    second = table.assign("b", ids(*range(30), 99))
    assert second is not None
    assert (second.resident.computed, second.copy_from) == (30, first.resident.slot)


def test_the_idle_slot_used_longest_ago_is_taken_first() -> None:
    table = SlotTable(2)
    run(table, "a", ids(1, *range(20)))
    run(table, "b", ids(2, *range(20)))
    run(table, "a", ids(1, *range(21)))
    assert run(table, "c", ids(3, *range(20))) == 0
    assert {kept.rollout_id for kept in table.residents.values()} == {"a", "c"}


def test_no_running_slot_is_ever_taken() -> None:
    table = SlotTable(2)
    assert table.assign("a", ids(1, 2)) is not None
    assert table.assign("b", ids(2, 3)) is not None
    assert table.assign("c", ids(3, 4)) is None


def test_two_calls_of_one_rollout_at_once_get_two_slots() -> None:
    table = SlotTable(2)
    first, second = table.assign("a", ids(1, 2)), table.assign("a", ids(5, 6))
    assert first is not None
    assert second is not None
    assert first.resident.slot != second.resident.slot


def test_the_slot_of_a_forgotten_rollout_is_taken_before_any_other() -> None:
    table = SlotTable(3)
    run(table, "a", ids(1, *range(20)))
    run(table, "b", ids(2, *range(20)))
    table.forget("b")
    run(table, "c", ids(3, *range(20)))
    assert {slot: kept.rollout_id for slot, kept in table.residents.items()} == {0: "a", 1: "c"}


def test_a_prefix_can_be_copied_from_a_forgotten_rollout() -> None:
    table = SlotTable(3)
    run(table, "a", ids(*range(30)))
    table.forget("a")
    placement = table.assign("b", ids(*range(20), 99))
    assert placement is not None
    assert (placement.resident.slot, placement.resident.computed, placement.copy_from) == (1, 20, 0)


def test_after_an_update_of_the_weights_nothing_is_found() -> None:
    table = SlotTable(4)
    run(table, "a", ids(*range(30)))
    table.clear()
    assert run(table, "a", ids(*range(30))) == 0


def test_a_cancelled_prefill_keeps_only_what_was_computed() -> None:
    table = SlotTable(4)
    placement = table.assign("a", ids(*range(30)))
    assert placement is not None
    placement.resident.computed = 12
    table.release(placement.resident)
    assert run(table, "a", ids(*range(30))) == 12
