"""Long random histories of the scheduler, with its invariants checked after each step by an independent model."""

from __future__ import annotations

import errno
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentfly.core.errors import AcquireTimeout, DeadlockBroken, PrerequisiteError, ResourceStartError
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler import backoff
from agentfly.resources.scheduler.budget import Budget
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
from agentfly.resources.scheduler.pool import AcquireRequest
from agentfly.resources.scheduler.provisioner import EVICTION_WAIT_S
from agentfly.resources.scheduler.scheduler import DEADLOCK_CHECK_INTERVAL_S, Scheduler
from agentfly.resources.spec import ResourceSpec
from tests.support.scale import scaled


@dataclass(frozen=True, kw_only=True)
class ThingSpec(ResourceSpec):
    name: str = "thing"

    def __hash__(self):  # the names differ
        return hash(self.name)

    @property
    def label(self):
        return self.name


BUDGET = Budget(cpus=4, memory_bytes=100)
WHOLE = (4000, 100, 0)
STARTS = 3
SINGLE, PAIR, FRESH, WARM = PRIVATE = [
    ThingSpec(name="single", capacity=1),
    ThingSpec(name="pair", capacity=2, cpus=1, max_uses=2, idle_timeout_s=20),
    ThingSpec(name="fresh", capacity=2, cpus=1.5, reuse="recreate", check_interval_s=7),
    ThingSpec(name="warm", capacity=3, cpus=1, memory=20, warm=1, check_interval_s=None),
]
SHARED = ThingSpec(name="shared", capacity=3, replicas=2, memory=30, max_concurrency=2, max_uses=5, idle_timeout_s=None)
SPREAD = ThingSpec(name="spread", capacity=3, replicas=2, idle_timeout_s=20)
LARGE = ThingSpec(name="large", capacity=1, cpus=4, memory=100)
LAME = ThingSpec(name="lame", capacity=2)  # one instance of it is stuck from the beginning to the end
SPECS = [*PRIVATE, SHARED, SHARED, SPREAD, SPREAD, LARGE, LAME]
SETS = [(SINGLE, LAME), (PAIR, WARM), (WARM, PAIR), (SINGLE, PAIR, FRESH), (SHARED, WARM), (LARGE, SINGLE)]
FULL = OSError(errno.ENOSPC, "No space left on device")
LASTING = PrerequisiteError("there is no such image")
OWNERS = ["a", "b", "c", "d", "e"]
CALLERS = [("one",), ("two",), ("one", "one inside"), ("two inside", "two")]


class Watched(Scheduler):
    """Notes when somebody lets others have what was kept for it, which only a deadlock makes it do."""

    stepped_aside = False

    def _yield_reservations(self, *args):
        self.stepped_aside = True
        return super()._yield_reservations(*args)


@dataclass(eq=False)
class Life:
    """What the test knows of an instance."""

    spec: ThingSpec
    began: float
    state: str = "starting"
    clean: bool = True
    shared: bool = False
    uses: int = 0
    dead: bool = False  # which is found out when it is handed out
    holdings: dict = field(default_factory=dict)

    @property
    def full(self):
        return len(self.holdings) >= (self.spec.max_concurrency or math.inf) or self.uses >= (
            self.spec.max_uses or math.inf
        )


class Wait:
    """What the test knows of a request: what is yet to come, and its place in line, which equal ones share."""

    def __init__(self, request, place):
        self.request, self.place, self.wanted = request, place, set(request.specs)
        self.exclusive = request.scope is not Scope.GLOBAL
        self.torn = False  # a part of what it was granted was dead
        self.holdings = []


class SchedulerHistory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.scheduler = Watched(budget=BUDGET, max_concurrent_starts=STARTS)
        self.now = 0.0
        self.ids = count(1)
        self.lives, self.alive = {}, Counter()  # type: ignore[var-annotated]
        self.waiting = {}  # request id -> Wait
        self.held = {}  # holding id -> Holding
        self.mine = {}  # owner, spec, scope -> holding id
        self.failing = {}  # spec -> when the first of the starts began that have failed since the last success
        self.pauses = {}  # spec -> until when no start is to be tried for those who wait
        self.answered = defaultdict(set)  # holding id -> what the requests that got it wanted
        self.ask(LAME, owner="gone")
        (self.stuck,) = self.lives
        self.report(self.scheduler.started, self.stuck, "live")
        self.take(self.scheduler.died(self.stuck, OSError("killed"), self.now))
        self.take(self.scheduler.owner_released("gone", self.now))
        self.take(self.scheduler.stuck(self.stuck, self.now))
        self.lives[self.stuck].state = "stuck"

    # --- events -------------------------------------------------------------------------------------------------------

    EVENTS = (*["ask"] * 4, *["ask_for_several"] * 2, "cancel", "release", "release", "decline", "end_owner")
    EVENTS += (*["end_start"] * 3, *["end_reset"] * 2, *["end_stop"] * 2, "die", "die_unnoticed", *["wait"] * 2)

    @rule(event=st.sampled_from(EVENTS), dice=st.integers(0, 2**32 - 1))
    def step(self, event, dice):
        self.happen(event, Random(dice))

    def happen(self, event, dice):
        """Something happens, if it can; ``dice`` say to whom."""
        getattr(self, f"draw_{event}")(dice)

    def draw_ask(self, dice):
        spec = dice.choice(SPECS)
        shared = dice.random() < (0.85 if spec.replicas > 1 else 0.1)
        scope = Scope.GLOBAL if shared else dice.choice([Scope.ROLLOUT, Scope.ROLLOUT, Scope.CALL])
        self.ask(spec, **self.anybody(dice), scope=scope)

    def draw_ask_for_several(self, dice):
        self.ask(*dice.choice(SETS), **self.anybody(dice), scope=Scope.ROLLOUT)

    def anybody(self, dice):
        owner, timeout = dice.choice(OWNERS), dice.choice([None, None, 3.0, 30.0])
        callers = tuple((owner, name) for name in dice.choice(CALLERS))
        deadline = None if timeout is None else self.now + timeout
        return {"owner": owner, "priority": int(dice.random() < 0.25), "callers": callers, "deadline": deadline}

    def ask(self, *specs, owner, scope=Scope.ROLLOUT, **fields):
        request = AcquireRequest(id=next(self.ids), specs=specs, owner=owner, scope=scope, **fields)
        wait = Wait(request, (-request.priority, request.id))
        missing = {spec for spec in specs if (owner, spec, scope) not in self.mine}
        for other in self.waiting.values() if scope is not Scope.CALL else ():
            if (other.request.owner, other.request.scope, other.wanted) == (owner, scope, missing):
                wait.place = other.place
                break
        self.waiting[request.id] = wait
        self.take(self.scheduler.requested(request, self.now))

    def draw_cancel(self, dice):
        if self.waiting:
            request = self.waiting.pop(dice.choice(list(self.waiting)))
            self.take(self.scheduler.cancelled(request.request.id, self.now))
            for holding in request.holdings:  # nobody is there to take what was given already
                self.take(self.scheduler.declined(holding, self.now))

    def draw_release(self, dice):
        if self.held:
            granted = self.take(self.scheduler.released(dice.choice(list(self.held)), self.now))
            assert all(wait.request.scope is Scope.GLOBAL for wait in granted), "given out before it was clean"

    def draw_decline(self, dice):
        if self.held:
            self.take(self.scheduler.declined(dice.choice(list(self.held)), self.now))

    def draw_end_owner(self, dice):
        owner = dice.choice(OWNERS)
        self.take(self.scheduler.owner_released(owner, self.now))
        assert all(wait.request.owner != owner for wait in self.waiting.values())
        assert all(holding.owner != owner for holding in self.held.values())

    def draw_end_start(self, dice):
        if names := self.names("starting"):
            if dice.random() < 0.7:
                self.end_start(dice.choice(names), True)
            else:
                self.fail_start(dice.choice(names), dice.choice([OSError("no"), FULL, LASTING]))

    def end_start(self, name, well):
        if well:
            self.failing.pop(self.lives[name].spec, None)
            self.pauses.pop(self.lives[name].spec, None)
            self.report(self.scheduler.started, name, "live")
        else:
            self.fail_start(name, OSError("no"))

    def fail_start(self, name, error):
        life = self.lives[name]
        self.failing[life.spec] = min(self.failing.get(life.spec, self.now), life.began)
        self.take(self.scheduler.start_failed(name, error, self.now))

    def draw_end_reset(self, dice):
        if names := self.names("resetting"):
            self.end_reset(dice.choice(names), dice.random() < 0.7)

    def end_reset(self, name, well):
        if well:
            self.lives[name].clean = True
            self.report(self.scheduler.reset_done, name, "live")
        else:
            self.take(self.scheduler.reset_failed(name, self.now))

    def report(self, event, name, state):
        """An instance is ready, which serves one owner, or several of those who share it."""
        self.lives[name].state = state
        granted = [wait for wait in self.take(event(name, self.now)) if wait.exclusive]
        owners = {wait.request.owner for wait in granted}
        assert self.bounced or len(owners) <= 1 + self.spared, "more than one was woken by one instance"

    def draw_end_stop(self, dice):
        if names := self.names("stopping"):
            self.end_stop(dice.choice(names), dice.random() < 0.75)

    def end_stop(self, name, well):
        if well:
            self.alive[self.lives.pop(name).spec] -= 1
            self.pauses.clear()  # if a disk was full, there may be room now
            self.take(self.scheduler.stopped(name, self.now))
        else:
            self.take(self.scheduler.stuck(name, self.now))

    def draw_die(self, dice):
        if names := self.names("live"):
            name = dice.choice(names)
            self.take(self.scheduler.died(name, OSError("killed"), self.now))
            assert self.lives[name].state == "stopping"

    def draw_die_unnoticed(self, dice):
        if names := self.names("live"):
            self.lives[dice.choice(names)].dead = True

    def draw_wait(self, dice):
        self.wait(dice.choice([0.1, DEADLOCK_CHECK_INTERVAL_S, EVICTION_WAIT_S, 25.0]))

    def wait(self, seconds):
        self.now += seconds
        self.take(self.scheduler.tick(self.now))
        if (due := self.scheduler.next_tick()) is not None and due <= self.now:
            self.take(self.scheduler.tick(self.now))  # for those who were given what was dead when their time came
        deadlines = [wait.request.deadline for wait in self.waiting.values()]
        assert all(deadline is None or deadline > self.now for deadline in deadlines), "somebody waited for too long"

    # --- decisions ----------------------------------------------------------------------------------------------------

    def take(self, decisions):
        """Carry out what was decided, and see that it was fair. Returns whose waits were ended by new holdings."""
        granted, self.spared, self.bounced = [], 0, False  # type: ignore[var-annotated]
        decisions = deque(decisions)
        while decisions:
            match decisions.popleft():
                case StartInstance(instance=name, spec=spec):
                    assert name not in self.lives
                    assert self.now >= self.pauses.get(spec, 0), "a start was tried in a pause"
                    self.lives[name] = Life(spec, self.now)  # type: ignore[arg-type]
                    self.alive[spec] += 1
                case GrantRequest(request=number, holding=holding) if holding.died_undelivered or self.is_found_dead(
                    holding
                ):
                    self.waiting[number].torn = True
                    if holding.died_undelivered:
                        continue
                    decisions.extend(self.scheduler.died(holding.instance.name, OSError("killed"), self.now))
                case EndHold(holding=holding) if holding.died_undelivered:
                    continue
                case GrantRequest(request=number, holding=holding):
                    self.take_grant(self.waiting[number], holding, granted)
                case RejectRequest(request=number, error=error):
                    self.take_failure(self.waiting.pop(number), error)  # exactly one answer
                case EndHold(holding=holding):
                    del self.held[holding.id]
                    self.mine.pop((holding.owner, holding.instance.pool.spec, holding.scope), None)
                    if (life := self.lives.get(holding.instance.name)) is not None:
                        life.holdings.pop(holding.id, None)
                case ResetInstance(instance=name):
                    life = self.lives[name]
                    assert life.state == "live"
                    assert not life.holdings
                    life.state, life.shared = "resetting", False
                case StopInstance(instance=name):
                    life = self.lives[name]
                    assert life.state not in ("stopping", "stuck")
                    life.state, life.shared = "stopping", False
                    life.holdings.clear()
                case BackOffStarts(spec=spec, seconds=seconds):
                    assert 0 < seconds <= backoff.MAX_BACKOFF_S
                    self.pauses[spec] = self.now + seconds
                case CheckInstance(instance=name):
                    assert self.lives[name].state == "live"
        self.scheduler.stepped_aside = False
        self.see_that_sets_were_granted_whole()
        return granted

    def is_found_dead(self, holding):
        """Whether an instance is seen to be dead at its first hand-out to somebody, who then waits on."""
        if holding.id in self.held or not self.lives[holding.instance.name].dead:
            return False
        self.bounced = True
        return True

    def take_grant(self, wait, holding, granted):
        request, life = wait.request, self.lives[holding.instance.name]
        assert life.spec in wait.wanted
        assert life.state == "live"
        assert (holding.owner, holding.scope) == (request.owner, request.scope)
        if holding.id not in self.held:
            self.take_holding(request, holding, life)
            granted.append(wait)
            if not (self.scheduler.stepped_aside or self.bounced):
                self.see_that_nobody_was_overtaken(wait, life.spec)
        elif all(wait.place != other.place for other in granted):
            self.spared += 1  # and with it what was kept for this
        self.answered[holding.id].add((request.id, frozenset(wait.wanted)))
        wait.holdings.append(holding.id)
        wait.wanted.remove(life.spec)
        if not wait.wanted:
            del self.waiting[request.id]

    def take_holding(self, request, holding, life):
        if request.scope is not Scope.CALL:
            key = (request.owner, life.spec, request.scope)
            assert key not in self.mine, "an owner has two instances of a spec in a scope"
            self.mine[key] = holding.id
        if request.scope is Scope.GLOBAL:
            assert life.shared or (life.clean and not life.holdings)
            assert not life.full
            life.shared = True
            replicas = [one for one in self.lives.values() if one.spec is life.spec and one.shared]
            assert len(replicas) <= life.spec.replicas
            assert all(one.full or len(life.holdings) <= len(one.holdings) for one in replicas), "a load was not shared"
        else:
            assert not life.holdings
            assert not life.shared
            assert life.clean, "an owner got what another left behind"
        self.scheduler.delivered(holding)
        life.holdings[holding.id] = self.held[holding.id] = holding
        life.clean = False
        life.uses += 1
        assert life.uses <= (life.spec.max_uses or math.inf)

    def take_failure(self, wait, error):
        if isinstance(error, ResourceStartError) and error.__cause__ is not LASTING:
            spec = next(spec for spec in wait.request.specs if f"{spec.name}-" in str(error))
            assert self.now - self.failing[spec] >= backoff.MIN_FAILING_S, "a refusal that may pass cost a request"
        if isinstance(error, AcquireTimeout):
            assert self.now >= wait.request.deadline
            for spec in wait.wanted:
                if spec.label in str(error) and self.alive[spec] == spec.capacity:
                    holders = [
                        h.owner for h in self.held.values() if h.instance.pool.spec == spec and not h.death_error
                    ]
                    assert all(f"{owner} has had {spec.name}" in str(error) for owner in holders)
        if isinstance(error, DeadlockBroken):
            holds = any(holding.owner == wait.request.owner for holding in self.held.values())
            assert holds or self.bounced, "no holder"

    def see_that_nobody_was_overtaken(self, wait, spec):
        """Whoever came before in a pool waits for a seat where all are taken, or for more than is kept for it here."""
        passed = {w.place: w for w in self.waiting.values() if spec in w.wanted and w.place < wait.place}
        if not passed:
            return
        replicas = [life for life in self.lives.values() if life.spec == spec and life.shared]
        if wait.exclusive and len(replicas) == spec.replicas and all(life.full for life in replicas):
            passed = {place: w for place, w in passed.items() if w.exclusive}
        assert all(w.exclusive and len(w.wanted) > 1 for w in passed.values()), "somebody was overtaken"
        assert len(self.ready(spec)) >= len(passed), "what was kept for somebody went to a later one"

    def see_that_sets_were_granted_whole(self):
        for wait in self.waiting.values():
            for number in wait.holdings if not wait.torn else ():
                if (number in self.held) and all(
                    len(wanted) > 1 and wait.wanted < wanted for _, wanted in self.answered[number]
                ):
                    first, _ = min(self.answered[number])
                    assert first < wait.request.id, "a part of a set was granted"

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self):
        self.never_more_alive_than_capacity_and_budget_allow()
        self.the_books_agree_with_what_was_decided()
        self.nobody_waits_for_what_is_free()
        self.what_waits_next_would_be_started_if_it_could()

    def never_more_alive_than_capacity_and_budget_allow(self):
        assert all(number <= spec.capacity for spec, number in self.alive.items())
        assert sum(spec.cpus * number for spec, number in self.alive.items()) <= BUDGET.cpus
        assert sum(spec.memory_bytes * number for spec, number in self.alive.items()) <= BUDGET.memory_bytes
        assert len(self.names("starting")) <= STARTS

    def the_books_agree_with_what_was_decided(self):
        pools = self.scheduler.pools
        known = {name: instance for pool in pools for name, instance in pool.instances.items()}
        assert known.keys() == self.lives.keys(), "freed before it was gone"
        assert all(known[name].holdings.keys() == life.holdings.keys() for name, life in self.lives.items())
        lanes = [lane for pool in pools for lane in (pool.queue.exclusive, pool.queue.shared) if lane]
        assert {one for lane in lanes for waiter in lane for one in waiter.requests} == self.waiting.keys()
        assert self.scheduler.starting == len(self.names("starting"))
        owners = {w.request.owner for w in self.waiting.values()} | {h.owner for h in self.held.values()}
        assert self.scheduler.owners.keys() == owners

    def nobody_waits_for_what_is_free(self):
        for pool in self.scheduler.pools:
            if pool.queue.shared:
                assert pool.next_grant() is None
            elif pool.queue and (ready := len(self.ready(pool.spec))):
                line = {w.place: w for w in self.waiting.values() if pool.spec in w.wanted}
                assert all(len(line[place].wanted) > 1 for place in sorted(line)[:ready])

    def what_waits_next_would_be_started_if_it_could(self):
        if len(self.names("starting")) == STARTS:
            return
        firsts = [(pool.first_unserved(), pool) for pool in self.scheduler.pools if pool.starts_wanted() > 0]
        for costly in (False, True):
            line = [(first.order, pool) for first, pool in firsts if pool.uses_budget is costly]
            if line:
                foremost = min(order for order, _ in line)
                assert any(self.cannot_start(pool) for order, pool in line if order == foremost)

    def cannot_start(self, pool):
        """Whether the budget is short of what an instance takes, and nobody's idle one would help."""
        account = self.scheduler.budget_usage
        short = account.shortage(pool.cost)
        idle = [other for other in self.scheduler.pools if len(other.idle) > len(other.reservations)]
        return not account.fits(pool.cost) and not any(
            lacks and cost for other in idle for lacks, cost in zip(short, other.cost, strict=True)
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self):
        """Whoever does not wait gives back and everything under way ends: then everybody gets an answer."""
        for _ in range(200):
            if not self.waiting and not self.held:
                break
            self.finish_what_is_under_way()
            for number, holding in list(self.held.items()):
                waits = [w.request for w in self.waiting.values() if w.request.owner == holding.owner]
                callers = [caller for request in waits for caller in request.callers]
                if not waits or (holding.scope is Scope.CALL and holding.caller not in callers):
                    self.take(self.scheduler.released(number, self.now))
            self.wait(DEADLOCK_CHECK_INTERVAL_S)
        assert not self.waiting, "somebody waits for ever"
        self.take(self.scheduler.closed(self.now))
        self.finish_what_is_under_way()
        self.end_stop(self.stuck, True)
        assert not self.lives
        assert not self.held
        assert self.scheduler.budget_usage.fits(WHOLE), "a part of the budget did not come back"
        assert not any(self.scheduler.budget_usage.shortage(WHOLE))

    def finish_what_is_under_way(self):
        for state, finish in (("starting", self.end_start), ("resetting", self.end_reset), ("stopping", self.end_stop)):
            while names := self.names(state):
                finish(names[0], True)

    def names(self, state):
        return [name for name, life in self.lives.items() if life.state == state]

    def ready(self, spec):
        """The instances of a spec that could be given to anybody."""
        return [
            life
            for life in self.lives.values()
            if life.spec is spec and life.state == "live" and life.clean and not life.holdings
        ]


# A failing history is not shrunk: that takes long, and the steps of any one can be read.
UNSHRUNK: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


class TestShortHistories(SchedulerHistory.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=50, stateful_step_count=50, **UNSHRUNK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=scaled(200, 2_000), **UNSHRUNK)
@given(seed=st.integers(0, 2**64 - 1))
def test_every_invariant_holds_after_each_step_of_long_random_histories(seed):
    dice, history = Random(seed), SchedulerHistory()
    for _ in range(200):
        history.happen(dice.choice(history.EVENTS), dice)
        history.all_is_well()
    history.teardown()
