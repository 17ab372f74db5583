"""Long random histories of the scheduler, with its invariants checked after each step by books of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfly.resources.budget import Budget
from agentfly.resources.decisions import Check, End, Fail, Grant, Reset, Start, Stop
from agentfly.resources.pool import Request
from agentfly.resources.scheduler import SWEEP_S, Scheduler
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec
from agentfly.resources.supply import PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class ThingSpec(ResourceSpec):
    name: str = "thing"


BUDGET = Budget(cpus=4, memory_bytes=100)
WHOLE = (4000, 100, 0)
STARTS = 3
SPECS = [
    ThingSpec(name="single", capacity=1),
    ThingSpec(name="pair", capacity=2, cpus=1, max_uses=2, idle_timeout_s=20),
    ThingSpec(name="fresh", capacity=2, cpus=1.5, reuse="recreate", check_interval_s=7),
    ThingSpec(name="warm", capacity=3, cpus=1, memory=20, warm=1, check_interval_s=None),
    ThingSpec(name="shared", capacity=2, memory=30, max_concurrency=2, max_uses=5, idle_timeout_s=None),
    ThingSpec(name="large", capacity=1, cpus=4, memory=100),
]
LAME = ThingSpec(name="lame", capacity=2)  # one instance of it is stuck from the beginning to the end
SPECS.append(LAME)
OWNERS = ["a", "b", "c", "d", "e"]
pick = st.integers(min_value=0, max_value=10**6)


class Life:
    """What the test knows of an instance."""

    def __init__(self, spec):
        self.spec = spec
        self.state = "starting"
        self.clean = True
        self.holdings = {}


class SchedulerHistory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(budget=BUDGET, max_concurrent_starts=STARTS)
        self.now = 0.0
        self.ids = count(1)
        self.lives = {}
        self.waiting = {}  # request id -> Request
        self.places = {}  # request id -> its place in line, shared by requests of one owner for the same thing
        self.held = {}  # holding id -> Holding
        self.stuck = self.have_one_stuck(LAME)

    def have_one_stuck(self, spec):
        self.ask(spec, "gone", Scope.ROLLOUT, 0, ("one",), None)
        (name,) = self.names("starting")
        self.end_start(0, True)
        self.die(0)
        self.end_owner("gone")
        self.take(self.scheduler.stuck(name, self.now))
        self.lives[name].state = "stuck"
        return name

    # --- events -------------------------------------------------------------------------------------------------------

    @rule(
        spec=st.sampled_from(SPECS),
        owner=st.sampled_from(OWNERS),
        scope=st.sampled_from([Scope.ROLLOUT, Scope.ROLLOUT, Scope.CALL, Scope.GLOBAL]),
        priority=st.sampled_from([0, 0, 0, 1]),
        callers=st.sampled_from([("one",), ("two",), ("one", "one inside"), ("two inside", "two")]),
        timeout=st.sampled_from([None, None, 3.0, 30.0]),
    )
    def ask(self, spec, owner, scope, priority, callers, timeout):
        request = Request(
            id=next(self.ids),
            spec=spec,
            owner=owner,
            scope=scope,
            priority=priority,
            callers=tuple((owner, name) for name in callers),
            deadline=None if timeout is None else self.now + timeout,
        )
        together = [
            self.places[other.id]
            for other in self.waiting.values()
            if (other.owner, other.spec, other.scope) == (owner, spec, scope) and scope is not Scope.CALL
        ]
        self.places[request.id] = together[0] if together else (-priority, request.id)
        self.waiting[request.id] = request
        self.take(self.scheduler.requested(request, self.now))

    @precondition(lambda self: self.waiting)
    @rule(which=pick)
    def cancel(self, which):
        request = self.choose(self.waiting, which)
        del self.waiting[request]
        self.take(self.scheduler.cancelled(request, self.now))

    @precondition(lambda self: self.held)
    @rule(which=pick)
    def release(self, which):
        self.take(self.scheduler.released(self.choose(self.held, which), self.now))

    @precondition(lambda self: self.held)
    @rule(which=pick)
    def decline(self, which):
        self.take(self.scheduler.declined(self.choose(self.held, which), self.now))

    @rule(owner=st.sampled_from(OWNERS))
    def end_owner(self, owner):
        self.take(self.scheduler.owner_released(owner, self.now))
        assert all(request.owner != owner for request in self.waiting.values())
        assert all(holding.owner != owner for holding in self.held.values())

    @precondition(lambda self: self.names("starting"))
    @rule(which=pick, well=st.booleans())
    def end_start(self, which, well):
        name = self.choose(self.names("starting"), which)
        if well:
            self.lives[name].state = "live"
            self.take(self.scheduler.started(name, self.now))
        else:
            self.take(self.scheduler.start_failed(name, OSError("no"), self.now))

    @precondition(lambda self: self.names("resetting"))
    @rule(which=pick, well=st.booleans())
    def end_reset(self, which, well):
        name = self.choose(self.names("resetting"), which)
        if well:
            self.lives[name].state, self.lives[name].clean = "live", True
            self.take(self.scheduler.reset_done(name, self.now))
        else:
            self.take(self.scheduler.reset_failed(name, self.now))

    @precondition(lambda self: self.names("stopping"))
    @rule(which=pick, well=st.sampled_from([True, True, True, False]))
    def end_stop(self, which, well):
        name = self.choose(self.names("stopping"), which)
        if well:
            del self.lives[name]
            self.take(self.scheduler.stopped(name, self.now))
        else:
            self.take(self.scheduler.stuck(name, self.now))

    @precondition(lambda self: self.names("live"))
    @rule(which=pick)
    def die(self, which):
        name = self.choose(self.names("live"), which)
        self.take(self.scheduler.died(name, OSError("killed"), self.now))
        assert self.lives[name].state == "stopping"

    @rule(seconds=st.sampled_from([0.1, 1.0, PATIENCE_S, 25.0]))
    def wait(self, seconds):
        self.now += seconds
        self.take(self.scheduler.tick(self.now))

    # --- decisions ----------------------------------------------------------------------------------------------------

    def take(self, decisions):
        for decision in decisions:
            match decision:
                case Start(instance=name, spec=spec):
                    assert name not in self.lives
                    self.lives[name] = Life(spec)
                case Grant(request=number, holding=holding):
                    self.take_grant(number, holding)
                case Fail(request=number):
                    del self.waiting[number]  # exactly one answer
                case End(holding=holding):
                    del self.held[holding.id]
                    self.lives.get(holding.instance.name, Life(None)).holdings.pop(holding.id, None)
                case Reset(instance=name):
                    life = self.lives[name]
                    assert life.state == "live"
                    assert not life.holdings
                    life.state = "resetting"
                case Stop(instance=name):
                    assert self.lives[name].state != "stopping"
                    self.lives[name].state = "stopping"
                    self.lives[name].holdings.clear()
                case Check(instance=name):
                    assert self.lives[name].state == "live"

    def take_grant(self, number, holding):
        request = self.waiting.pop(number)
        life = self.lives[holding.instance.name]
        assert life.spec == request.spec
        assert life.state == "live"
        if holding.id in self.held:
            assert (holding.owner, holding.scope) == (request.owner, request.scope)
            return
        shared = request.scope is Scope.GLOBAL
        if shared:
            assert all(other.scope is Scope.GLOBAL for other in life.holdings.values())
        else:
            assert not life.holdings
            assert life.clean, "an owner got what another left behind"
        for other in self.waiting.values():
            if other.spec == request.spec and self.places[other.id] != self.places[number]:
                assert self.places[other.id] > self.places[number], "somebody was overtaken"
        life.holdings[holding.id] = holding
        life.clean = False
        self.held[holding.id] = holding

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def never_more_alive_than_capacity_and_budget_allow(self):
        alive = defaultdict(int)
        for life in self.lives.values():
            alive[life.spec] += 1
        assert all(number <= spec.capacity for spec, number in alive.items())
        assert math.fsum(life.spec.cpus for life in self.lives.values()) <= BUDGET.cpus
        assert sum(life.spec.memory_bytes for life in self.lives.values()) <= BUDGET.memory_bytes
        assert len(self.names("starting")) <= STARTS

    @invariant()
    def an_owner_has_one_instance_of_a_spec_in_a_scope(self):
        seen = set()
        for holding in self.held.values():
            if holding.scope is not Scope.CALL:
                key = (holding.owner, holding.instance.pool.spec, holding.scope)
                assert key not in seen
                seen.add(key)

    @invariant()
    def an_instance_has_one_owner_unless_it_is_shared(self):
        for life in self.lives.values():
            scopes = {holding.scope for holding in life.holdings.values()}
            if Scope.GLOBAL in scopes:
                assert scopes == {Scope.GLOBAL}
                assert len(life.holdings) <= (life.spec.max_concurrency or math.inf)
            else:
                assert len(life.holdings) <= 1

    @invariant()
    def the_books_agree_with_what_was_decided(self):
        known = {name: instance for pool in self.scheduler.pools for name, instance in pool.instances.items()}
        assert set(known) == set(self.lives)
        assert {id(i) for i in known.values() if i.holdings} == {
            id(h.instance) for life in self.lives.values() for h in life.holdings.values()
        }
        assert sum(len(waiter.requests) for pool in self.scheduler.pools for waiter in pool.queue) == len(self.waiting)
        assert self.scheduler.starting == len(self.names("starting"))
        owners = {r.owner for r in self.waiting.values()} | {h.owner for h in self.held.values()}
        assert set(self.scheduler.owners) == owners

    @invariant()
    def nobody_waits_for_what_is_free(self):
        for pool in self.scheduler.pools:
            first = pool.queue.first()
            assert first is None or pool.seat(first.scope) is None

    @invariant()
    def what_waits_next_would_be_started_if_it_could(self):
        if len(self.names("starting")) == STARTS:
            return
        firsts = [(pool.queue.first().order, pool) for pool in self.scheduler.pools if pool.missing() > 0]
        for costly in (False, True):
            line = sorted((order, pool.spec.name, pool) for order, pool in firsts if pool.costly is costly)
            if line:
                _, _, pool = line[0]
                assert not self.scheduler.account.fits(pool.cost)
                assert not any(
                    any(
                        short and cost
                        for short, cost in zip(self.scheduler.account.short(pool.cost), o.cost, strict=True)
                    )
                    for o in self.scheduler.pools
                    if o.idle
                ), "an idle instance is in the way of one who waits"

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self):
        """Whoever does not wait gives back and everything under way ends: then everybody gets an answer."""
        for _ in range(2000):
            if not self.waiting and not self.held:
                break
            self.finish_what_is_under_way()
            for number, holding in list(self.held.items()):
                waits = [caller for r in self.waiting.values() if r.owner == holding.owner for caller in r.callers]
                if not waits or (holding.scope is Scope.CALL and holding.caller not in waits):
                    self.take(self.scheduler.released(number, self.now))
            self.now += SWEEP_S
            self.take(self.scheduler.tick(self.now))
        assert not self.waiting, "somebody waits for ever"
        self.take(self.scheduler.closed(self.now))
        self.finish_what_is_under_way()
        del self.lives[self.stuck]
        self.take(self.scheduler.stopped(self.stuck, self.now))
        assert not self.lives
        assert not self.held
        assert self.scheduler.account.fits(WHOLE), "a part of the budget did not come back"
        assert not any(self.scheduler.account.short(WHOLE))

    def finish_what_is_under_way(self):
        for state, finish in (("starting", self.end_start), ("resetting", self.end_reset), ("stopping", self.end_stop)):
            while self.names(state):
                finish(0, True)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def names(self, state):
        return [name for name, life in self.lives.items() if life.state == state]

    def choose(self, among, which):
        among = list(among)
        return among[which % len(among)]


def histories(number, steps):
    """Settings for so many histories. They are not shrunk: that takes long, and the steps of any one can be read."""
    return settings(
        max_examples=number,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


class TestShortHistories(SchedulerHistory.TestCase):
    settings = histories(50, 50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLongHistories(SchedulerHistory.TestCase):
    settings = histories(300, 200)
