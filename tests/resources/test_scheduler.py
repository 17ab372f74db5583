"""The scheduler, driven step by step: its decisions and their order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest

from agentfly.core.errors import (
    AcquireTimeout,
    ConfigError,
    DeadlockBroken,
    EngineClosed,
    ResourceDied,
    ResourceError,
    ResourceStartError,
)
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler.budget import Budget
from agentfly.resources.scheduler.deadlock import WaitGraph
from agentfly.resources.scheduler.decisions import (
    BackOffStarts,
    CheckInstance,
    EndHold,
    GrantRequest,
    RejectRequest,
    ResetInstance,
    StartInstance,
    StopInstance,
)
from agentfly.resources.scheduler.pool import AcquireRequest, InstanceState
from agentfly.resources.scheduler.provisioner import EVICTION_WAIT_S
from agentfly.resources.scheduler.scheduler import DEADLOCK_CHECK_INTERVAL_S, Scheduler
from agentfly.resources.spec import ResourceSpec


@dataclass(frozen=True, kw_only=True)
class ThingSpec(ResourceSpec):
    name: str = "thing"
    check_interval_s: float | None = None
    idle_timeout_s: float | None = None

    @property
    def label(self):
        return self.name


class Desk:
    """Drives a scheduler and keeps what it decided."""

    def __init__(self, **settings):
        self.scheduler = Scheduler(**settings)
        self.now = 0.0
        self.ids = count(1)
        self.waiting, self.granted, self.failed = {}, {}, {}
        self.starting, self.resetting, self.stopping, self.checks, self.pauses = [], [], [], [], []

    def take(self, decisions):
        for decision in decisions:
            match decision:
                case GrantRequest(request=request, holding=holding):
                    self.waiting.pop(request)
                    self.granted[request] = holding
                    self.scheduler.delivered(holding)
                case RejectRequest(request=request, error=error):
                    self.waiting.pop(request)
                    self.failed[request] = error
                case StartInstance(instance=name):
                    self.starting.append(name)
                case ResetInstance(instance=name):
                    self.resetting.append(name)
                case StopInstance(instance=name):
                    for names in (self.starting, self.resetting):
                        if name in names:
                            names.remove(name)
                    self.stopping.append(name)
                case CheckInstance(instance=name):
                    self.checks.append(name)
                case BackOffStarts():
                    self.pauses.append(decision)
                case EndHold():
                    pass

    def entangle(self, one, other):
        """Have a and b each hold what the other asks for."""
        self.has(one, "a")
        self.has(other, "b")
        self.ask(other, "a")
        self.ask(one, "b")

    def ask(self, spec, owner="a", **fields):
        request = AcquireRequest(id=next(self.ids), specs=(spec,), owner=owner, **fields)
        self.waiting[request.id] = request
        self.take(self.scheduler.requested(request, self.now))
        return request.id

    def has(self, spec, owner="a", **fields):
        """Ask, let everything that starts come up, and expect to get it."""
        request = self.ask(spec, owner, **fields)
        self.start_all()
        return self.granted[request]

    def start_all(self):
        while self.starting:
            self.take(self.scheduler.started(self.starting.pop(0), self.now))

    def reset_all(self):
        while self.resetting:
            self.take(self.scheduler.reset_done(self.resetting.pop(0), self.now))

    def stop_all(self):
        while self.stopping:
            self.take(self.scheduler.stopped(self.stopping.pop(0), self.now))

    def settle(self):
        while self.starting or self.resetting or self.stopping:
            self.start_all()
            self.reset_all()
            self.stop_all()

    def release(self, holding):
        self.take(self.scheduler.released(holding.id, self.now))

    def wait(self, seconds):
        self.now += seconds
        self.take(self.scheduler.tick(self.now))


def test_the_same_owner_gets_the_same_instance_also_while_the_first_request_still_waits():
    desk = Desk()
    spec = ThingSpec()
    first, second = desk.ask(spec), desk.ask(spec)
    assert len(desk.starting) == 1
    desk.start_all()
    third = desk.ask(spec)
    assert desk.granted[first] is desk.granted[second] is desk.granted[third]


def test_cancelling_one_of_two_joined_requests_leaves_the_other_its_place():
    desk = Desk()
    first, second = desk.ask(ThingSpec()), desk.ask(ThingSpec())
    desk.take(desk.scheduler.cancelled(first, desk.now))
    desk.start_all()
    assert second in desk.granted
    assert first not in desk.granted


def test_a_grant_that_nobody_takes_gives_the_instance_back_unless_another_request_of_the_owner_took_it():
    desk = Desk()
    first, _ = desk.ask(ThingSpec()), desk.ask(ThingSpec())
    desk.start_all()
    holding = desk.granted[first]
    desk.take(desk.scheduler.declined(holding.id, desk.now))
    assert not desk.resetting
    desk.take(desk.scheduler.declined(holding.id, desk.now))
    assert desk.resetting == [holding.instance.name]


def test_specs_that_differ_in_any_field_share_no_instance():
    desk = Desk()
    one = desk.has(ThingSpec(start_timeout_s=60))
    other = desk.has(ThingSpec(start_timeout_s=61))
    assert one.instance is not other.instance


def test_call_scope_gives_each_request_an_instance_of_its_own():
    desk = Desk()
    spec = ThingSpec(capacity=2)
    one, other = desk.has(spec, scope=Scope.CALL), desk.has(spec, scope=Scope.CALL)
    assert one.instance is not other.instance


def test_a_pool_serves_first_come_first_served_within_a_priority():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    holding = desk.has(spec, "holder")
    plain = [desk.ask(spec, f"plain{n}") for n in range(3)]
    urgent = [desk.ask(spec, f"urgent{n}", priority=1) for n in range(2)]
    for expected in urgent + plain:
        desk.release(holding)
        desk.settle()
        assert expected in desk.granted
        holding = desk.granted[expected]
    assert not desk.waiting


def test_an_instance_is_reset_before_its_next_owner_gets_it():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    holding = desk.has(spec, "a")
    waiting = desk.ask(spec, "b")
    desk.release(holding)
    assert waiting in desk.waiting
    desk.reset_all()
    assert desk.granted[waiting].instance is holding.instance


@pytest.mark.parametrize("fields", [{"reuse": "recreate"}, {"max_uses": 1}])
def test_an_instance_that_is_used_up_is_replaced_and_its_place_is_free_only_once_it_is_gone(fields):
    desk = Desk()
    spec = ThingSpec(capacity=1, **fields)
    holding = desk.has(spec, "a")
    waiting = desk.ask(spec, "b")
    desk.release(holding)
    assert desk.stopping == [holding.instance.name]
    assert not desk.starting
    desk.settle()
    assert desk.granted[waiting].instance is not holding.instance


def test_a_failed_reset_replaces_the_instance():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    holding = desk.has(spec, "a")
    waiting = desk.ask(spec, "b")
    desk.release(holding)
    desk.take(desk.scheduler.reset_failed(desk.resetting.pop(), desk.now))
    assert desk.stopping == [holding.instance.name]
    desk.settle()
    assert waiting in desk.granted


def test_a_start_that_is_bound_to_fail_again_fails_its_request_at_once_with_its_cause_and_the_next_gets_its_own():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    first, second = desk.ask(spec, "a"), desk.ask(spec, "b")
    cause = ValueError("no such image")
    desk.take(desk.scheduler.start_failed(desk.starting.pop(), cause, desk.now))
    assert isinstance(desk.failed[first], ResourceStartError)
    assert desk.failed[first].__cause__ is cause
    assert "no such image" in str(desk.failed[first])
    assert second in desk.waiting
    desk.settle()
    assert second in desk.granted


def test_what_a_kind_says_of_its_failed_start_is_not_said_twice():
    desk = Desk()
    request = desk.ask(ThingSpec(), "a")
    while not desk.failed:
        error = ResourceStartError("The thing x did not start: no answer.")
        desk.take(desk.scheduler.start_failed(desk.starting.pop(), error, desk.now))
        desk.stop_all()
        desk.wait(desk.pauses[-1].seconds)
    assert str(desk.failed[request]).startswith("The thing x did not start: no answer. It was tried 5 times")


def test_a_failed_start_harms_nobody_if_another_instance_is_coming_for_them():
    desk = Desk()
    spec = ThingSpec(capacity=2)
    holding = desk.has(spec, "a")
    waiting = desk.ask(spec, "b")
    desk.release(holding)
    desk.take(desk.scheduler.start_failed(desk.starting.pop(), OSError(), desk.now))
    assert not desk.failed
    desk.reset_all()
    assert waiting in desk.granted


def test_a_failed_start_of_a_shared_instance_fails_all_whom_it_would_have_served():
    desk = Desk()
    spec = ThingSpec(capacity=1, max_concurrency=2)
    requests = [desk.ask(spec, owner, scope=Scope.GLOBAL) for owner in "abc"]
    desk.take(desk.scheduler.start_failed(desk.starting.pop(), ValueError("x"), desk.now))
    assert set(desk.failed) == set(requests[:2])
    desk.settle()
    assert requests[2] in desk.granted


def test_no_more_start_at_once_than_may():
    desk = Desk(max_concurrent_starts=2)
    spec = ThingSpec(capacity=9)
    for n in range(5):
        desk.ask(spec, f"o{n}")
    assert len(desk.starting) == 2
    desk.take(desk.scheduler.started(desk.starting.pop(0), desk.now))
    assert len(desk.starting) == 2


@dataclass(frozen=True, kw_only=True)
class HeavySpec(ThingSpec):
    start_weight = 4


def test_what_keeps_a_processor_busy_takes_more_places_to_start():
    desk = Desk(max_concurrent_starts=12, weighed=True)
    for n in range(9):
        desk.ask(HeavySpec(name="heavy", capacity=9), f"heavy {n}")
    assert len(desk.starting) == 3
    desk.take(desk.scheduler.start_failed(desk.starting.pop(0), ValueError(), desk.now))
    assert len(desk.starting) == 3
    desk.settle()
    assert len(desk.granted) == 8


def test_each_start_counts_for_one_where_their_number_is_given():
    desk = Desk(max_concurrent_starts=5)
    for n in range(9):
        desk.ask(HeavySpec(name="heavy", capacity=9), f"heavy {n}")
    assert len(desk.starting) == 5


def test_a_start_that_takes_more_places_than_there_are_starts_alone():
    desk = Desk(max_concurrent_starts=2, weighed=True)
    light, heavy = ThingSpec(name="light", capacity=9), HeavySpec(name="heavy", capacity=9)
    desk.ask(light, "a")
    desk.ask(heavy, "b")
    assert len(desk.starting) == 1
    desk.take(desk.scheduler.started(desk.starting.pop(), desk.now))
    assert [name.partition("-")[0] for name in desk.starting] == ["heavy"]
    desk.ask(light, "c")
    assert len(desk.starting) == 1
    desk.settle()
    assert len(desk.granted) == 3


def test_a_global_instance_is_shared_up_to_its_concurrency_and_another_is_started_beyond_that():
    desk = Desk()
    spec = ThingSpec(capacity=3, replicas=2, max_concurrency=2)
    holdings = [desk.has(spec, owner, scope=Scope.GLOBAL) for owner in "abcd"]
    assert [h.instance.name for h in holdings[:2]] == [holdings[0].instance.name] * 2
    assert len({h.instance.name for h in holdings}) == 2
    waiting = desk.ask(spec, "e", scope=Scope.GLOBAL)
    assert waiting in desk.waiting
    desk.release(holdings[0])
    assert desk.granted[waiting].instance is holdings[0].instance
    assert not desk.resetting


def test_an_unused_global_instance_is_reset_before_somebody_gets_it_alone():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    desk.release(desk.has(spec, "a", scope=Scope.GLOBAL))
    waiting = desk.ask(spec, "b")
    assert waiting in desk.waiting
    desk.reset_all()
    assert waiting in desk.granted


def test_who_waits_for_an_instance_alone_is_not_starved_by_those_who_share_it():
    desk = Desk()
    spec = ThingSpec(capacity=1, max_concurrency=9)
    sharing = desk.has(spec, "a", scope=Scope.GLOBAL)
    alone, later = desk.ask(spec, "b"), desk.ask(spec, "c", scope=Scope.GLOBAL)
    assert later in desk.waiting
    desk.release(sharing)
    desk.reset_all()
    assert alone in desk.granted
    assert later in desk.waiting


def test_idle_instances_of_other_pools_make_room_in_the_budget_the_longest_idle_first():
    desk = Desk(budget=Budget(cpus=2))
    specs = [ThingSpec(name=name, cpus=1) for name in ("old", "new", "wanted")]
    holdings = []
    for spec in specs[:2]:
        holdings.append(desk.has(spec))
        desk.now += 1
    for holding in holdings:
        desk.release(holding)
        desk.reset_all()
        desk.now += 1
    waiting = desk.ask(specs[2], "b")
    assert desk.stopping == [holdings[0].instance.name]
    assert not desk.starting
    desk.settle()
    assert waiting in desk.granted


def test_an_instance_that_does_not_help_the_budget_is_not_evicted():
    desk = Desk(budget=Budget(cpus=1, memory_bytes=1000))
    holding = desk.has(ThingSpec(name="memory", memory=10))
    desk.release(holding)
    desk.reset_all()
    desk.has(ThingSpec(name="holder", cpus=1), "a")
    desk.ask(ThingSpec(name="wanted", cpus=1), "b")
    assert not desk.stopping


def test_a_large_request_is_not_starved_by_small_ones_that_came_later():
    desk = Desk(budget=Budget(cpus=4))
    small, large = ThingSpec(name="small", cpus=1), ThingSpec(name="large", cpus=4)
    holdings = [desk.has(small, f"s{n}") for n in range(4)]
    waiting = desk.ask(large, "big")
    for n in range(4, 8):
        desk.ask(ThingSpec(name="other", cpus=1), f"s{n}")
    desk.now += EVICTION_WAIT_S
    for holding in holdings:
        desk.release(holding)
        desk.settle()
    assert waiting in desk.granted


def test_a_pool_that_is_never_idle_gives_up_an_instance_to_an_older_request_of_another_pool():
    desk = Desk(budget=Budget(cpus=1))
    busy, other = ThingSpec(name="busy", cpus=1), ThingSpec(name="other", cpus=1)
    holding = desk.has(busy, "b0")
    waiting = desk.ask(other, "o")
    for n in range(1, 50):
        following = desk.ask(busy, f"b{n}")
        desk.now += 1
        desk.release(holding)
        desk.settle()
        if waiting in desk.granted:
            break
        holding = desk.granted[following]
    assert waiting in desk.granted


def test_a_budget_that_is_short_does_not_hold_up_what_takes_nothing_of_it():
    desk = Desk(budget=Budget(cpus=1))
    desk.has(ThingSpec(name="cpu", cpus=1), "a")
    desk.ask(ThingSpec(name="cpu2", cpus=1), "b")
    desk.has(ThingSpec(name="free"), "c")


def test_a_spec_larger_than_the_budget_fails_at_once_and_says_what_is_too_large():
    desk = Desk(budget=Budget(cpus=2, memory_bytes=2**30))
    request = desk.ask(ThingSpec(cpus=4, memory="2GiB"), "a")
    assert isinstance(desk.failed[request], ConfigError)
    assert "cpus 4 of 2" in str(desk.failed[request])
    assert not desk.scheduler.pools


def test_fractions_of_the_budget_add_up_exactly():
    desk = Desk(budget=Budget(cpus=1))
    spec = ThingSpec(cpus=0.1, capacity=20)
    for n in range(10):
        desk.has(spec, f"o{n}")
    desk.ask(spec, "late")
    assert not desk.starting


def test_a_wait_that_takes_too_long_names_the_holders_with_their_ages_and_the_queue():
    desk = Desk()
    spec = ThingSpec(capacity=2)
    desk.has(spec, "first")
    desk.now += 30
    desk.has(spec, "second")
    request = desk.ask(spec, "late", deadline=desk.now + 5)
    desk.ask(spec, "later")
    assert desk.scheduler.next_tick() == desk.now + 5
    desk.wait(5)
    message = str(desk.failed[request])
    assert isinstance(desk.failed[request], AcquireTimeout)
    assert "late waited 5.0 s for thing" in message
    assert f"first has had {desk.granted[1].instance.name} for 35.0 s" in message
    assert "2 waiting: " in message


def test_two_owners_who_wait_for_each_other_lose_only_the_wait_of_the_younger():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", capacity=1)
    desk.has(box, "old")
    desk.now += 1
    young = desk.has(judge, "young")
    waits = desk.ask(judge, "old")
    desk.now += 1
    lost = desk.ask(box, "young")
    assert isinstance(desk.failed[lost], DeadlockBroken)
    assert "old waits for judge" in str(desk.failed[lost])
    assert "young waits for box" in str(desk.failed[lost])
    assert waits in desk.waiting
    desk.release(young)
    desk.settle()
    assert waits in desk.granted


def test_it_is_no_deadlock_while_one_holder_of_several_can_go_on():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=2), ThingSpec(name="judge", capacity=1)
    desk.has(box, "old")
    desk.has(box, "free")
    desk.has(judge, "young")
    desk.ask(judge, "old")
    desk.ask(box, "young")
    desk.wait(DEADLOCK_CHECK_INTERVAL_S)
    assert not desk.failed


def test_a_deadlock_over_seats_of_a_shared_instance_is_broken_too():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=2), ThingSpec(name="judge", capacity=1, max_concurrency=2)
    for owner in ("a", "b"):
        desk.has(box, owner)
    for owner in ("c", "d"):
        desk.has(judge, owner, scope=Scope.GLOBAL)
    for owner in ("a", "b"):
        desk.ask(judge, owner, scope=Scope.GLOBAL)
    for owner in ("c", "d"):
        desk.ask(box, owner)
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


def test_to_see_that_somebody_will_go_on_takes_no_look_at_everybody_who_waits(monkeypatch):
    desk = Desk()
    looks, look = [], WaitGraph.blockers_of
    monkeypatch.setattr(WaitGraph, "blockers_of", lambda self, waiter: looks.append(waiter) or look(self, waiter))  # type: ignore[func-returns-value]
    box, judge = ThingSpec(name="box", capacity=50), ThingSpec(name="judge", capacity=50)
    for n in range(50):
        desk.has(box, f"a{n}")
        desk.has(judge, f"b{n}")
    for n in range(50):
        desk.ask(judge, f"a{n}")
    desk.has(ThingSpec(name="lamp"), "c")
    looks.clear()
    desk.ask(box, "c")
    assert not desk.failed
    assert len(looks) <= 3


def test_a_deadlock_over_the_budget_is_broken_too():
    desk = Desk(budget=Budget(cpus=2))
    one, other = ThingSpec(name="one", cpus=1), ThingSpec(name="other", cpus=1)
    desk.entangle(one, other)
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


def have_one_stuck(desk, spec):
    """An instance of ``spec`` that was told to go and does not."""
    desk.take(desk.scheduler.died(desk.has(spec, "last owner").instance.name, OSError("killed"), desk.now))
    desk.take(desk.scheduler.owner_released("last owner", desk.now))
    desk.take(desk.scheduler.stuck(desk.stopping.pop(), desk.now))


def test_an_instance_that_is_stuck_elsewhere_hides_no_deadlock_over_the_budget():
    desk = Desk(budget=Budget(cpus=2))
    have_one_stuck(desk, ThingSpec(name="elsewhere"))
    one, other = ThingSpec(name="one", cpus=1), ThingSpec(name="other", cpus=1)
    desk.entangle(one, other)
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


def test_an_instance_that_is_stuck_in_a_full_pool_hides_no_deadlock_over_the_others():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=2), ThingSpec(name="judge", capacity=1)
    have_one_stuck(desk, box)
    desk.entangle(box, judge)
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


def test_starts_that_go_on_elsewhere_without_end_hide_no_deadlock_over_full_pools():
    desk = Desk(max_concurrent_starts=1)
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", capacity=1)
    desk.has(box, "a")
    desk.has(judge, "b")
    desk.ask(ThingSpec(name="elsewhere"), "c")
    assert desk.scheduler.starting == 1
    desk.ask(judge, "a")
    desk.ask(box, "b")
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


def test_who_waits_only_for_a_place_to_start_is_in_no_deadlock():
    desk = Desk(max_concurrent_starts=1)
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", capacity=1)
    desk.has(box, "a")
    desk.has(ThingSpec(name="lamp", capacity=1), "b")
    desk.ask(ThingSpec(name="elsewhere"), "c")
    first, second = desk.ask(judge, "a"), desk.ask(box, "b")
    desk.wait(DEADLOCK_CHECK_INTERVAL_S)
    assert not desk.failed
    desk.start_all()
    assert first in desk.granted
    assert second in desk.waiting


@pytest.mark.parametrize("fields", [{"reuse": "reset"}, {"reuse": "recreate"}])
def test_it_is_no_deadlock_while_an_instance_that_would_help_the_budget_is_being_reset_or_goes(fields):
    desk = Desk(budget=Budget(cpus=3))
    one, other = ThingSpec(name="one", cpus=1), ThingSpec(name="other", cpus=1)
    third = desk.has(ThingSpec(name="third", cpus=1, **fields), "c")
    desk.has(one, "a")
    desk.has(other, "b")
    desk.release(third)
    requests = [desk.ask(other, "a"), desk.ask(one, "b")]
    desk.wait(DEADLOCK_CHECK_INTERVAL_S)
    assert not desk.failed
    desk.settle()
    assert any(request in desk.granted for request in requests)


def test_a_request_waits_on_behalf_of_all_its_callers_and_a_holding_ends_with_the_first_of_its_own():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    desk.has(spec, "a", scope=Scope.CALL, callers=("call", "one task"))
    beside = desk.ask(spec, "a", scope=Scope.CALL, callers=("another task", "another call"))
    inside = desk.ask(spec, "a", scope=Scope.CALL, callers=("another task", "call"))
    assert beside in desk.waiting
    assert isinstance(desk.failed[inside], DeadlockBroken)


def test_a_deadlock_that_comes_about_by_a_grant_is_found_in_time():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", capacity=1)
    held = desk.has(box, "first")
    desk.has(judge, "young")
    desk.ask(box, "old", callers=("one call",))
    desk.ask(judge, "old", callers=("another call",))  # holds nothing yet, and waits for both
    desk.ask(box, "young")
    assert not desk.failed
    desk.release(held)
    desk.settle()
    desk.wait(DEADLOCK_CHECK_INTERVAL_S)
    assert [type(error) for error in desk.failed.values()] == [DeadlockBroken]


@pytest.mark.parametrize("held", [Scope.CALL, Scope.ROLLOUT])
def test_asking_for_a_second_instance_of_a_pool_of_one_fails_at_once(held):
    desk = Desk()
    spec = ThingSpec(capacity=1)
    desk.has(spec, "a", scope=held, callers=("call",))
    second = desk.ask(spec, "a", scope=Scope.CALL, callers=("call",))
    assert isinstance(desk.failed[second], DeadlockBroken)
    assert "only it could release" in str(desk.failed[second])


def test_two_calls_of_one_owner_side_by_side_are_no_deadlock():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    first = desk.has(spec, "a", scope=Scope.CALL, callers=("one call",))
    second = desk.ask(spec, "a", scope=Scope.CALL, callers=("another call",))
    desk.wait(DEADLOCK_CHECK_INTERVAL_S)
    assert second in desk.waiting
    desk.release(first)
    desk.settle()
    assert second in desk.granted


def test_a_rollout_whose_instance_died_is_told_so_and_gets_no_other_until_it_has_released():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    holding = desk.has(spec, "a")
    desk.take(desk.scheduler.died(holding.instance.name, ResourceDied("killed"), desk.now))
    desk.settle()
    again = desk.ask(spec, "a")
    assert isinstance(desk.failed[again], ResourceDied)
    desk.has(spec, "b")
    desk.release(holding)
    assert desk.ask(spec, "a") in desk.waiting


def test_owners_of_a_shared_instance_that_died_get_another():
    desk = Desk()
    spec = ThingSpec(capacity=1)
    holding = desk.has(spec, "a", scope=Scope.GLOBAL)
    desk.take(desk.scheduler.died(holding.instance.name, ResourceDied("killed"), desk.now))
    again = desk.ask(spec, "a", scope=Scope.GLOBAL)
    desk.settle()
    assert desk.granted[again].instance is not holding.instance


def test_releasing_an_owner_ends_its_leases_and_its_waits():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", capacity=1)
    desk.has(judge, "other")
    held = desk.has(box, "a")
    waiting = desk.ask(judge, "a")
    desk.take(desk.scheduler.owner_released("a", desk.now))
    assert isinstance(desk.failed[waiting], ResourceError)
    assert desk.resetting == [held.instance.name]
    assert "a" not in desk.scheduler.owners


def test_the_warm_count_is_kept_ready_and_yields_to_those_who_wait():
    desk = Desk(budget=Budget(cpus=3))
    spec = ThingSpec(capacity=4, warm=1, cpus=1)
    desk.has(spec, "a")
    desk.settle()
    (pool,) = desk.scheduler.pools
    assert len(pool.idle) == 1
    desk.has(spec, "b")
    desk.settle()
    assert len(pool.idle) == 1
    other = desk.ask(ThingSpec(name="other", cpus=1), "c")
    assert len(desk.stopping) == 1
    desk.settle()
    assert other in desk.granted
    assert len(pool.idle) == 0


def test_a_start_for_the_warm_count_that_fails_is_not_tried_again_at_once():
    desk = Desk()
    desk.has(ThingSpec(capacity=2, warm=1), "a")
    desk.ask(ThingSpec(capacity=2, warm=1), "b")
    desk.settle()
    desk.take(desk.scheduler.released(desk.granted[1].id, desk.now))
    desk.take(desk.scheduler.reset_failed(desk.resetting.pop(), desk.now))
    desk.take(desk.scheduler.stopped(desk.stopping.pop(), desk.now))
    for pause in (0.25, 0.5, 1):
        desk.take(desk.scheduler.start_failed(desk.starting.pop(), OSError(), desk.now))
        desk.stop_all()
        assert not desk.starting
        desk.wait(pause)
        assert len(desk.starting) == 1
    assert not desk.failed


def test_an_instance_that_stands_idle_too_long_is_stopped_except_for_the_warm_ones_while_somebody_still_asks():
    desk = Desk()
    spec = ThingSpec(capacity=4, warm=1, idle_timeout_s=10)
    holdings = [desk.has(spec, owner) for owner in "abc"]
    desk.settle()
    for holding in holdings[1:]:
        desk.release(holding)
    desk.settle()
    (pool,) = desk.scheduler.pools
    assert len(pool.idle) == 3
    for _ in range(40):
        desk.ask(spec, "a")
        desk.wait(1)
        desk.settle()
    assert len(pool.idle) == 1


def test_a_pool_that_nobody_asks_for_any_more_keeps_nothing_warm_and_does_again_when_somebody_does():
    desk = Desk()
    for task in range(20):
        desk.release(desk.has(ThingSpec(name=f"for task {task}", warm=1, idle_timeout_s=10)))
        desk.settle()
    for _ in range(30):
        desk.wait(1)
        desk.settle()
    assert not desk.scheduler.pools
    assert desk.scheduler.next_tick() is None
    desk.has(ThingSpec(name="for task 0", warm=1, idle_timeout_s=10))
    desk.settle()
    (pool,) = desk.scheduler.pools
    assert len(pool.idle) == 1


def test_a_warm_pool_whose_spec_the_budget_can_never_hold_is_not_kept():
    desk = Desk(budget=Budget(cpus=1))
    desk.ask(ThingSpec(cpus=2, warm=1))
    assert not desk.scheduler.pools


def test_a_pool_is_forgotten_when_its_last_instance_is_gone():
    desk = Desk()
    desk.release(desk.has(ThingSpec(idle_timeout_s=10)))
    desk.settle()
    for _ in range(21):
        desk.wait(1)
    desk.settle()
    assert not desk.scheduler.pools
    assert not desk.scheduler.owners


def test_live_instances_are_checked_now_and_then():
    desk = Desk()
    holding = desk.has(ThingSpec(check_interval_s=10))
    for _ in range(25):
        desk.wait(1)
    assert desk.checks == [holding.instance.name] * 2


def test_an_instance_that_does_not_go_keeps_its_place_until_it_does():
    desk = Desk(budget=Budget(cpus=1))
    spec = ThingSpec(capacity=1, cpus=1, reuse="recreate")
    desk.release(desk.has(spec, "a"))
    stuck = desk.stopping.pop()
    desk.take(desk.scheduler.stuck(stuck, desk.now))
    waiting = desk.ask(spec, "b")
    desk.wait(100)
    assert not desk.starting
    desk.take(desk.scheduler.stopped(stuck, desk.now))
    desk.settle()
    assert waiting in desk.granted


def test_closing_fails_who_waits_ends_what_is_held_and_stops_everything():
    desk = Desk()
    box, judge = ThingSpec(name="box", capacity=1), ThingSpec(name="judge", warm=1)
    desk.has(box, "a")
    waiting = desk.ask(box, "b")
    starting = desk.ask(judge, "c")
    desk.take(desk.scheduler.closed(desk.now))
    assert isinstance(desk.failed[waiting], EngineClosed)
    assert isinstance(desk.failed[starting], EngineClosed)
    desk.settle()
    assert all(not pool.instances for pool in desk.scheduler.pools)
    late = desk.ask(box, "d")
    assert isinstance(desk.failed[late], EngineClosed)
    assert not desk.starting


def test_a_late_report_about_an_instance_that_is_being_stopped_changes_nothing():
    desk = Desk()
    desk.ask(ThingSpec(), "a")
    (name,) = desk.starting
    desk.take(desk.scheduler.closed(desk.now))
    before = {pool.spec: dict(pool.counts) for pool in desk.scheduler.pools}
    for report in (desk.scheduler.started, desk.scheduler.reset_done, desk.scheduler.reset_failed):
        desk.take(report(name, desk.now))
    assert {pool.spec: dict(pool.counts) for pool in desk.scheduler.pools} == before
    assert before[ThingSpec()][InstanceState.STOPPING] == 1
