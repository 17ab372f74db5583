"""Random histories of the engine, over resources that fail, hang, dawdle and die, with callers that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from agentfly.errors import ResourceError
from agentfly.resources.engine import Budget, ResourceEngine
from agentfly.resources.scope import Scope
from agentfly.testing.fake_resource import FakeSpec, FakeWorld, behave_well
from agentfly.testing.virtual_time import run_in_virtual_time

BUDGET = Budget(cpus=6)
LIMITS = {"start_timeout_s": 4.0, "reset_timeout_s": 2.0, "release_timeout_s": 1.0}


class History:
    """One engine, a few pools and owners, and everything that can go wrong, drawn from a seed."""

    def __init__(self, seed, engine):
        self.random = random.Random(seed)
        self.engine = engine
        self.world = FakeWorld(self.misbehave)
        shared = {"world": self.world, **LIMITS}
        self.specs = [
            FakeSpec(name="single", capacity=1, **shared),
            FakeSpec(name="pair", capacity=2, cpus=1, max_uses=2, idle_timeout_s=15, **shared),
            FakeSpec(name="fresh", capacity=3, cpus=2, reuse="recreate", **shared),
            FakeSpec(name="warm", capacity=3, cpus=1, warm=1, check_interval_s=5, **shared),
            FakeSpec(name="shared", capacity=2, max_concurrency=2, check_interval_s=5, **shared),
        ]
        self.requests = {}  # task -> (spec, owner, scope)
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
                await asyncio.Event().wait()  # takes no notice of being cancelled
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
        acts = [self.ask] * 6 + [self.cancel] * 2 + [self.release] * 4 + [self.end_owner, self.kill, self.check]
        await self.random.choice(acts)()
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.choice([0, 0, 0.1, 1, 5]))

    async def ask(self):
        spec, owner = self.random.choice(self.specs), f"owner{self.random.randrange(5)}"
        scope = Scope.GLOBAL if spec.name == "shared" else self.random.choice([Scope.ROLLOUT, Scope.CALL])
        timeout = self.random.choice([None, None, 0.0, 3.0, 30.0])
        self.begin(spec, owner, scope, timeout, self.random.randrange(2))

    def begin(self, spec, owner, scope, timeout=None, priority=0):
        task = asyncio.create_task(self.acquire(spec, owner, scope, timeout, priority))
        self.requests[task] = (spec, owner, scope)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.requests.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())

    async def acquire(self, spec, owner, scope, timeout, priority):
        try:
            lease = await self.engine.acquire(spec, owner, scope=scope, timeout=timeout, priority=priority)
        except ResourceError:
            return
        key = (owner, spec, scope, lease.id)
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

    def forget_what_ended(self):
        """Leases end without their owners' doing when an instance that is not a rollout's own dies."""
        live = {
            (owner, instance.name)
            for pool in self.engine.snapshot().pools
            for instance in pool.instances
            for owner in instance.owners
        }
        self.leases = {
            key: lease
            for key, lease in self.leases.items()
            if key[2] is Scope.ROLLOUT or (lease.owner, lease.instance) in live
        }

    def check_invariants(self):
        assert not self.failures
        self.forget_what_ended()
        pools = {pool.spec: pool for pool in self.engine.snapshot().pools}
        alive = Counter(name.rpartition("-")[0].rpartition("-")[0] for name in self.world.alive)
        for spec in self.specs:
            assert alive[spec.name] <= spec.capacity
            known = {instance.name for instance in pools[repr(spec)].instances} if repr(spec) in pools else set()
            assert {name for name in self.world.alive if name.startswith(spec.name)} <= known, (
                "freed before it was gone"
            )
        assert sum(alive[spec.name] * spec.cpus for spec in self.specs) <= BUDGET.cpus
        by_owner, by_instance = defaultdict(set), defaultdict(set)
        for (owner, spec, scope, number), lease in self.leases.items():
            if scope is not Scope.CALL:
                by_owner[owner, spec, scope].add(number)
            by_instance[lease.instance].add((owner, scope, number))
        assert all(len(numbers) == 1 for numbers in by_owner.values())
        for holders in by_instance.values():
            assert len(holders) <= (2 if all(scope is Scope.GLOBAL for _, scope, _ in holders) else 1)

    async def wind_up(self):
        """Everything behaves from now on and everybody gives back: all requests end, and all slots are free."""
        self.world.behave = behave_well
        for _ in range(1000):
            waiting = {owner for _, owner, _ in self.requests.values()}
            for key in list(self.leases):
                if key[0] not in waiting or key[2] is Scope.CALL:  # a call ends though its rollout waits elsewhere
                    await self.engine.release(self.leases.pop(key))
            if not self.requests and not self.leases:
                break
            await asyncio.sleep(1)
        assert not self.requests, "somebody waits for ever"
        await asyncio.sleep(700)  # the longest pause before a stuck instance is tried again
        instances = [instance for pool in self.engine.snapshot().pools for instance in pool.instances]
        assert {instance.state for instance in instances} <= {"idle"}, "a slot did not come back"
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
            history.begin(spec, "cut off", Scope.CALL)
        await asyncio.sleep(0)
        history.world.behave = behave_well
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


def run_history(seed, steps):
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as directory:
            run_in_virtual_time(live_through(seed, steps, Path(directory)))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_shared_or_left_over_in_a_random_history(seed):
    run_history(seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", range(1000, 1500, 100))
def test_nothing_is_lost_shared_or_left_over_in_many_long_random_histories(start):
    for seed in range(start, start + 50):
        run_history(seed, 200)
