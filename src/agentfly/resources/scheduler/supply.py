"""Supply: which instances start and stop, within the budget and the limit on concurrent starts."""

from __future__ import annotations

from agentfly.resources.scheduler.backoff import Cause, Loss
from agentfly.resources.scheduler.books import Books
from agentfly.resources.scheduler.budget import Account, Budget, Cost, total_of
from agentfly.resources.scheduler.decisions import Check, Pause, Reset, Start, Stop
from agentfly.resources.scheduler.line import StartLine
from agentfly.resources.scheduler.pool import BUSY, Instance, InstanceState, Pool, Waiter

PATIENCE_S = 5.0
"""Seconds that a request waits for the budget before a busy pool gives up an instance for it."""


class Supply:
    """Brings instances through their lives for all pools."""

    def __init__(self, books: Books, budget: Budget, places: int, weighed: bool, name: str) -> None:
        """Begin with none; the arguments are those of `Scheduler`."""
        self.account = Account(budget)
        self.starting = 0
        self.closed = False
        self._books = books
        self._places = places
        self._taken = 0  # places, by those that are starting
        self._weighed = weighed
        self._name = name
        self._lines = {costly: StartLine() for costly in (False, True)}  # want of budget holds up no one who needs none
        self._full: dict[Pool, None] = {}  # those whose starts wait for room on a disk
        self._evictable: dict[str, Instance] = {}  # idle and of use to the budget; the longest idle is the first

    # --- what starts --------------------------------------------------------------------------------------------------

    def demand(self, pool: Pool, now: float) -> None:
        """A pool's waiters or instances have changed: see that what it is missing starts, in its turn."""
        if pool.queue and pool.missing() > 0:
            self._lines[pool.costly].join(pool)
        self.advance(now)
        if pool.attended:
            self._start_ahead(now)

    def start_what_fits(self, now: float) -> None:
        """A place to start or a part of the budget has come free: start what was waiting for it."""
        entangled = self._books.entangled.values()
        for pool in {waiter.pool: None for owner in entangled for waiter in owner.waiters.values()}:
            self.start_missing(pool, now)
        self.advance(now)
        self._start_ahead(now)

    def start_missing(self, pool: Pool, now: float) -> None:
        """Start what those who wait in a pool are missing, as far as it goes."""
        while pool.missing() > 0 and self._start_next(pool, now):
            pass

    def _starts_are_full(self, pool: Pool) -> bool:
        """Whether as many instances are starting as may, next to which another of a pool would be too many."""
        return self._taken > 0 and self._taken + self._places_of(pool) > self._places

    def _places_of(self, pool: Pool) -> int:
        return pool.start_places if self._weighed else 1

    def advance(self, now: float) -> None:
        """Serve the pools in line in their order, as far as it goes."""
        for line in self._lines.values():
            while (pool := line.first()) is not None and self._start_next(pool, now):
                pass

    def _start_next(self, pool: Pool, now: float) -> bool:
        """Start one instance; False if that has to wait."""
        if self._starts_are_full(pool):
            return False
        if not self.account.fits(pool.cost):
            self._make_room(pool.cost, now)
            return False
        self._start(pool, now)
        return True

    def excess(self, pools: list[Pool]) -> str | None:
        """Why one instance of each of some pools can never be alive at once, in words; None if they can."""
        costly = [pool.cost for pool in pools if pool.costly]
        if not costly:
            return None
        return self.account.excess(costly[0] if len(costly) == 1 else total_of(costly))

    def _start_ahead(self, now: float) -> None:
        """Start warm instances and replicas if nobody who waits could use what they would take."""
        if self.closed or self._lines[False].first() is not None:
            return
        short = self._lines[True].first() is not None
        for pool in self._books.attended if not short else [one for one in self._books.attended if not one.costly]:
            while pool.missing_ahead() > 0 and not self._starts_are_full(pool) and self.account.fits(pool.cost):
                self._start(pool, now)

    def _make_room(self, cost: Cost, now: float) -> None:
        """Evict idle instances that are kept for nobody until there will be enough, as far as they help."""
        while any(short := self.account.short(cost)):
            helpful = (idle for idle in self._evictable.values() if idle.spare and _eases(short, idle.pool.cost))
            if (instance := next(helpful, None)) is None:
                return
            self.stop(instance, now)

    def _start(self, pool: Pool, now: float) -> None:
        label = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in pool.spec.label.lower())
        name = f"{label[:24].strip('-')}-{self._name}-{next(self._books.numbers)}"
        instance = Instance(name=name, pool=pool, state=InstanceState.STARTING, since=now, started=now)
        self._books.instances[name] = instance
        pool.enter(instance, InstanceState.STARTING, now)
        self.starting += 1
        self._taken += self._places_of(pool)
        self.account.spend(pool.cost)
        self._books.decisions.append(Start(name, pool.spec))

    # --- what happens to an instance ----------------------------------------------------------------------------------

    def started(self, instance: Instance, now: float) -> None:
        """A start is over, well."""
        self._leave_place(instance)
        instance.pool.backoff.worked()
        self._full.pop(instance.pool, None)
        instance.up, instance.started, instance.checked = True, now, now
        self._set_timer(instance, now)

    def failed(self, instance: Instance, error: BaseException, now: float) -> Loss:
        """A start is over, badly. Says whom that fails."""
        pool, backoff = instance.pool, instance.pool.backoff
        self.stop(instance, now)
        rounds = backoff.rounds
        backoff.failed(instance.started, error, now)
        if backoff.cause is Cause.FULL_DISK:
            self._full[pool] = None
        if backoff.rounds > rounds:
            self._books.timers.set(backoff.until, pool)
            if backoff.holds:
                seconds, full = backoff.until - now, backoff.cause is Cause.FULL_DISK
                self._books.decisions.append(Pause(pool.spec, error, seconds, backoff.rounds, full))
        return backoff.loss(now, may_be_freed=any(one.up for one in self._books.instances.values()))

    def resume(self, pool: Pool, now: float) -> None:
        """Time went by, in which the pause of a pool may have ended."""
        pool.backoff.resume(now)

    def _leave_place(self, instance: Instance) -> None:
        self.starting -= 1
        self._taken -= self._places_of(instance.pool)

    def take(self, instance: Instance, now: float) -> None:
        """An instance gets an owner."""
        instance.uses += 1
        if instance.state is not InstanceState.LEASED:
            self._evictable.pop(instance.name, None)
            instance.pool.enter(instance, InstanceState.LEASED, now)

    def rest(self, instance: Instance, now: float) -> None:
        """An instance has nobody: somebody may take it, in its own pool or in place of it."""
        instance.pool.enter(instance, InstanceState.IDLE, now)
        if instance.pool.costly:
            self._evictable[instance.name] = instance

    def reset(self, instance: Instance, now: float) -> None:
        """Have an instance cleaned."""
        self._evictable.pop(instance.name, None)
        instance.pool.enter(instance, InstanceState.RESETTING, now)
        self._books.decisions.append(Reset(instance.name, instance.pool.spec))

    def stop(self, instance: Instance, now: float) -> None:
        """Have an instance removed, whatever it is doing."""
        if instance.state is InstanceState.STARTING:
            self._leave_place(instance)
        self._evictable.pop(instance.name, None)
        if instance.timer is not None:
            self._books.timers.drop(instance.timer)
        instance.pool.enter(instance, InstanceState.STOPPING, now)
        self.account.expect(instance.pool.cost)
        self._books.decisions.append(Stop(instance.name, instance.pool.spec))

    def stuck(self, instance: Instance, now: float) -> None:
        """An instance was told to go and did not."""
        self.account.give_up(instance.pool.cost)
        instance.pool.enter(instance, InstanceState.STUCK, now)

    def gone(self, instance: Instance, now: float) -> None:
        """An instance is no more."""
        if instance.state is InstanceState.STUCK:
            self.account.expect(instance.pool.cost)
        self.account.give_back(instance.pool.cost)
        instance.pool.leave(instance)
        del self._books.instances[instance.name]
        if instance.up:
            for pool in list(self._full):
                if self._books.pools.get(pool.spec) is not pool:  # forgotten
                    del self._full[pool]
                    continue
                pool.backoff.freed(now)
                self.demand(pool, now)

    def is_spent(self, instance: Instance, now: float) -> bool:
        """Whether an instance that has just lost its last owner should go rather than stay."""
        pool = instance.pool
        if pool.worn_out(instance) or (pool.spec.is_recreated and not instance.shared):
            return True
        hungry = self._lines[True].first()
        if hungry is None or hungry is pool or not _eases(self.account.short(hungry.cost), pool.cost):
            return False
        own, other = pool.lacking(), hungry.lacking()
        assert other is not None  # a pool in the line lacks something
        return own is None or (other.order < own.order and now - other.since >= PATIENCE_S)

    def in_place_of(self, pool: Pool) -> list[Instance]:
        """The instances that take what of the budget a pool's next start will be short of.

        None if there will be enough, once everything on its way out is gone.
        """
        if not any(short := self.account.short(pool.cost)):
            return []
        return [instance for instance in self._books.instances.values() if _eases(short, instance.pool.cost)]

    def before_in_line(self, pool: Pool) -> Waiter | None:
        """Who has to get an instance started before a pool does, if the line is all that the pool waits for."""
        first = self._lines[pool.costly].first()
        return None if first is None or first is pool else first.lacking()

    # --- what time does to it -----------------------------------------------------------------------------------------

    def look_after(self, instance: Instance, now: float) -> None:
        """An instance may have been idle for too long, or is to be checked."""
        spec, pool = instance.pool.spec, instance.pool
        if instance.state in (InstanceState.STOPPING, InstanceState.STUCK):
            return
        if (
            instance.state is InstanceState.IDLE
            and spec.idle_timeout_s is not None
            and now >= instance.since + spec.idle_timeout_s
            and (instance.shared or len(pool.idle) > pool.warm + len(pool.kept))
        ):
            self.stop(instance, now)
            return
        if spec.check_interval_s is not None and now >= instance.checked + spec.check_interval_s:
            instance.checked = now
            if instance.state not in BUSY:
                self._books.decisions.append(Check(instance.name, spec))
        self._set_timer(instance, now)

    def _set_timer(self, instance: Instance, now: float) -> None:
        """Have an instance looked after when something may be due; what it does meanwhile sets no timer."""
        spec, due = instance.pool.spec, []
        if spec.check_interval_s is not None:
            due.append(instance.checked + spec.check_interval_s)
        if spec.idle_timeout_s is not None:
            idle_since = instance.since if instance.state is InstanceState.IDLE else now
            ends = idle_since + spec.idle_timeout_s
            due.append(ends if ends > now else now + spec.idle_timeout_s)
        instance.timer = self._books.timers.set(min(due), instance) if due else None


def _eases(short: tuple[bool, ...], cost: Cost) -> bool:
    return any(lacking and amount > 0 for lacking, amount in zip(short, cost, strict=True))
