"""Random histories of the engine, with resources that fail, hang or die and callers that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.errors import ResourceError
from agentfly.resources.engine import instances
from agentfly.resources.engine.engine import Budget, ResourceEngine
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler.pool import InstanceState
from agentfly.testing.fake_resource import FakeBackend, FakeSpec, no_faults
from tests.support.scale import scaled
from tests.support.virtual_time import run_in_virtual_time

BUDGET = Budget(cpus=6)
LIMITS = {"start_timeout_s": 4.0, "reset_timeout_s": 2.0, "release_timeout_s": 1.0}


class History:
    """One engine, a few pools and owners, and everything that can go wrong, drawn from a seed."""

    def __init__(self, seed, engine):
        self.random = random.Random(seed)
        self.engine = engine
        self.world = FakeBackend(self.misbehave)
        shared: dict[str, Any] = {"world": self.world, **LIMITS}
        self.specs = [
            FakeSpec(name="single", capacity=1, **shared),
            FakeSpec(name="pair", capacity=2, cpus=1, max_uses=2, idle_timeout_s=15, **shared),
            FakeSpec(name="fresh", capacity=3, cpus=2, reuse="recreate", **shared),
            FakeSpec(name="warm", capacity=3, cpus=1, warm=1, check_interval_s=5, **shared),
            FakeSpec(name="shared", capacity=3, replicas=2, max_concurrency=2, check_interval_s=5, **shared),
            FakeSpec(name="spread", capacity=3, replicas=2, cpus=1, idle_timeout_s=15, **shared),
        ]
        self.by_name = {spec.name: spec for spec in self.specs}
        single, pair, fresh, warm, *_ = self.specs
        self.sets = [(single, pair), (pair, single), (warm, fresh), (fresh, pair, warm)]
        self.requests = {}  # task -> owner
        self.failures = []  # of the test's own tasks
        self.leases = {}  # (owner, spec, scope, lease id) -> Lease

    async def misbehave(self, operation, instance):
        """Mostly well, and now and then in each of the ways there are."""
        match self.random.randrange(20):
            case 0:
                raise OSError(f"{operation} of {instance} failed")
            case 1:
                await asyncio.Event().wait()
            case 2:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                await asyncio.Event().wait()  # ignores its cancellation
            case 3 | 4 | 5:
                await asyncio.sleep(self.random.uniform(0, 5))
            case 6 | 7:
                await asyncio.sleep(0)
            case 8 if operation != "release":
                self.world.kill(instance)
            case 9 | 10 if operation in ("start", "status"):
                for task in list(self.requests):  # after one of them is granted, before it gets to know
                    asyncio.get_running_loop().call_soon(task.cancel)

    async def step(self):
        """Do something at random, and let some time pass."""
        acts = (
            [self.ask] * 5
            + [self.ask_for_several] * 2
            + [self.cancel] * 2
            + [self.release] * 4
            + [self.end_owner, self.kill, self.check]
        )
        await self.random.choice(acts)()
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.choice([0, 0, 0.1, 1, 5]))

    async def ask(self):
        spec = self.random.choice(self.specs)
        shared = spec.replicas > 1 and self.random.random() < 0.8
        self.begin((spec,), Scope.GLOBAL if shared else self.random.choice([Scope.ROLLOUT, Scope.CALL]))

    async def ask_for_several(self):
        self.begin(self.random.choice(self.sets), Scope.ROLLOUT)

    def begin(self, specs, scope, owner=None):
        owner = owner or f"owner{self.random.randrange(5)}"
        limits = {"timeout": self.random.choice([None, None, 0.0, 3.0, 30.0]), "priority": self.random.randrange(2)}
        task = asyncio.create_task(self.acquire(specs, owner, scope, limits))
        self.requests[task] = owner
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.requests.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())

    async def acquire(self, specs, owner, scope, limits):
        try:
            if len(specs) > 1:
                leases = await self.engine.acquire_all(specs, owner, **limits)
            else:
                leases = [await self.engine.acquire(*specs, owner, scope=scope, **limits)]
        except ResourceError:
            return
        assert [lease.spec for lease in leases] == list(specs)
        for lease in leases:
            key = (owner, lease.spec, scope, lease.id)
            if key not in self.leases and scope is not Scope.GLOBAL:
                assert lease.resource.contents == [], "somebody sees what another left behind"
            lease.resource.contents.append(owner)
            self.leases[key] = lease

    async def cancel(self):
        if self.requests:
            task = self.random.choice(list(self.requests))
            for _ in range(self.random.choice([1, 2])):
                task.cancel()
                await asyncio.sleep(0)

    async def release(self):
        if self.leases:
            key = self.random.choice(list(self.leases))
            await self.engine.release(self.leases.pop(key))

    async def end_owner(self):
        owner = f"owner{self.random.randrange(5)}"
        self.leases = {key: lease for key, lease in self.leases.items() if key[0] != owner}
        await self.engine.release_owner(owner)

    async def kill(self):
        if self.world.alive:
            self.world.kill(self.random.choice(sorted(self.world.alive)))

    async def check(self):
        if self.leases:
            task = asyncio.create_task(self.engine.check(self.random.choice(list(self.leases.values()))))
            task.add_done_callback(self.ended)

    def check_invariants(self):
        assert not self.failures
        pools = {pool.spec.name: pool for pool in self.engine._scheduler.pools}
        alive = Counter()  # type: ignore[var-annotated]
        for name in self.world.alive:
            kind = name.partition("-")[0]
            alive[kind] += 1
            assert name in pools[kind].instances, "freed before it was gone"
        assert all(number <= self.by_name[kind].capacity for kind, number in alive.items())
        assert sum(self.by_name[kind].cpus * number for kind, number in alive.items()) <= BUDGET.cpus
        self.check_leases()
        for pool in pools.values():
            assert pool.next_grant() is None, "somebody waits for what is free"
        answers, waiters = self.engine._pending, self.engine._scheduler._state.waiters
        assert {number for number, answer in answers.items() if not answer.is_settled} <= waiters.keys()
        assert waiters.keys() <= answers.keys(), "something is waited for by nobody"

    def check_leases(self):
        self.leases = {key: lease for key, lease in self.leases.items() if lease.id in self.engine._leases}
        held, holders = set(), defaultdict(list)
        for (owner, spec, scope, _), lease in self.leases.items():
            if scope is not Scope.CALL:
                assert (owner, spec, scope) not in held, "an owner has two instances of a spec in a scope"
                held.add((owner, spec, scope))
            holders[lease.instance].append((scope, spec))
        for several in holders.values():
            if len(several) > 1:
                (_, spec), *_ = several
                assert all(scope is Scope.GLOBAL for scope, _ in several), "an instance has two owners"
                assert spec.max_concurrency is None or len(several) <= spec.max_concurrency

    async def wind_up(self):
        """Everything behaves from now on and everybody gives back: all requests end, and all slots are free."""
        self.world.hook = no_faults
        for _ in range(1000):
            waiting = set(self.requests.values())
            for key in list(self.leases):
                if key[0] not in waiting or key[2] is Scope.CALL:  # a call ends though its rollout waits elsewhere
                    await self.engine.release(self.leases.pop(key))
            if not self.requests and not self.leases:
                break
            await asyncio.sleep(1)
        assert not self.requests, "somebody waits for ever"
        for _ in range(700):  # the longest pause before a stuck instance is tried again
            states = {one.state for pool in self.engine._scheduler.pools for one in pool.instances.values()}
            if states <= {InstanceState.IDLE}:
                break
            await asyncio.sleep(1)
        assert states <= {InstanceState.IDLE}, "a slot did not come back"
        for spec in self.specs:
            leases = [await self.engine.acquire(spec, f"last{n}", timeout=60) for n in range(spec.capacity)]
            for lease in leases:
                await self.engine.release(lease)


async def live_through(seed, steps, directory):
    engine = ResourceEngine(ledger=directory, budget=BUDGET, max_concurrent_starts=3)
    async with engine:
        history = History(seed, engine)
        for _ in range(steps):
            await history.step()
            history.check_invariants()
        if history.random.random() < 0.5:
            await history.wind_up()
        for spec in history.specs[: history.random.randrange(6)]:
            history.begin((spec,), Scope.CALL, "cut off")
        await asyncio.sleep(0)
        history.world.hook = no_faults
        closing = asyncio.create_task(engine.close())
        for _ in range(history.random.randrange(3)):
            await asyncio.sleep(0)
            closing.cancel()
        await asyncio.wait({closing})
    await asyncio.sleep(0)
    assert not history.world.alive
    assert not history.requests
    assert not history.failures
    assert not list(directory.iterdir())


class Inline:
    """Stands for threads and for the disk, neither of which these histories are about."""

    def start(self, function, /, *args, **kwargs):
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


@pytest.fixture
def run_history(monkeypatch):
    """Live through the history of a seed. The ledger is written, but not brought to the disk."""
    monkeypatch.setattr(instances, "THREAD_POOL", Inline())
    logging.disable(logging.CRITICAL)

    def run(seed, steps):
        with tempfile.TemporaryDirectory() as directory:
            run_in_virtual_time(live_through(seed, steps, Path(directory)))

    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_nothing_is_lost_shared_or_left_over_in_random_histories(run_history):
    for seed in range(100):
        run_history(seed, 50)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", range(1000, 3000, 250))
def test_nothing_is_lost_shared_or_left_over_in_many_long_random_histories(run_history, start):
    for seed in range(start, start + scaled(25, 250)):
        run_history(seed, 200)
