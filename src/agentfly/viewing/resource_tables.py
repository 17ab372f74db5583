"""The pools, instances and queues of live runs, as tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentfly.resources.engine.live_runs import LiveRun
from agentfly.resources.engine.status import InstanceSnapshot, PoolSnapshot, QueuedRequestSnapshot
from agentfly.viewing.formatting import format_duration, pluralize

SHOWN = 20
"""The most waiting requests per pool, or owners per instance, that are shown by name."""


def resource_tables(runs: Sequence[LiveRun]) -> RenderableType:
    """Return each run with its pools, instances and queues, then the orphans of dead processes."""
    live = [run for run in runs if not run.dead]
    dead = [run for run in runs if run.dead]
    parts: list[RenderableType] = [_run(run) for run in live] or [Text("nothing is running")]
    left = [entry for run in dead for entry in run.started]
    unreachable = [entry for entry in left if entry.failed_days]
    if reapable := len(left) - len(unreachable):
        owners = f"process {dead[0].pid}, which is dead" if len(dead) == 1 else f"{len(dead)} processes, which are dead"
        what = f"{pluralize(reapable, 'instance')} left by {owners}: agentfly resources reap removes "
        parts.append(Text(what + ("it" if reapable == 1 else "them"), style="yellow"))
    if unreachable:
        addresses = list(dict.fromkeys(_address(entry.traces) for entry in unreachable))
        what = f"{pluralize(len(unreachable), 'instance')} left behind where nothing answers: start what is missing at "
        parts.append(Text(f"{what}{_few(addresses, 3)}, then run agentfly resources reap", style="yellow"))
    return Group(*parts)


def _address(traces: Mapping[str, Any]) -> str:
    """Return the address in traces, or in the traces of one backend; without an address, all traces as text."""
    for one in (traces, *traces.values()):
        if isinstance(one, Mapping) and one.get("address"):
            return str(one["address"])
    return str(dict(traces))


def _run(run: LiveRun) -> RenderableType:
    age = "" if run.age_seconds is None else f", {format_duration(run.age_seconds)} old"
    head = Text.assemble(
        (f"process {run.pid}{age}", "bold"), f"  {run.command[:200]}", overflow="ellipsis", no_wrap=True
    )
    parts: list[RenderableType] = [head]
    if run.snapshot is None:
        parts.append(Text(run.no_answer_reason, style="yellow"))
        parts.append(_started(run))
    else:
        parts.append(_pools(run.snapshot.pools))
        for number, pool in enumerate(run.snapshot.pools, 1):
            if pool.failing is not None:
                parts.append(Text(f"{number} {pool.label}: starts fail, with {pool.failing[:500]}", style="yellow"))
        parts += [Padding(table, (1, 0, 0, 0), expand=False) for table in _details(run.snapshot.pools) if table.rows]
    return Padding(Group(*parts), (0, 0, 1, 0), expand=False)


def _details(pools: Sequence[PoolSnapshot]) -> list[Table]:
    return [_instances(pools), _queues(pools)]


def _pools(pools: Sequence[PoolSnapshot]) -> RenderableType:
    table = _table("pool", "states", right=("alive", "waiting", "held", "busy"))
    for number, pool in enumerate(pools, 1):
        states = Counter(_state(instance) for instance in pool.instances)
        held = sum(instance.held_seconds for instance in pool.instances)
        busy = sum(instance.busy_seconds for instance in pool.instances)
        table.add_row(
            f"{number} {pool.label}",
            ", ".join(f"{count} {state}" for state, count in states.items()),
            f"{len(pool.instances)}/{pool.capacity}",
            str(len(pool.queue)),
            *_use(held, busy),
        )
    return table


def _instances(pools: Sequence[PoolSnapshot]) -> Table:
    table = _table("pool", "instance", "state", "whose", right=("for", "age", "uses", "held", "busy"))
    for number, pool in enumerate(pools, 1):
        for instance in pool.instances:
            table.add_row(
                str(number),
                instance.name,
                _state(instance),
                _few(instance.owners),
                format_duration(instance.state_seconds),
                format_duration(instance.age_seconds),
                str(instance.uses),
                *_use(instance.held_seconds, instance.busy_seconds),
            )
    return table


def _queues(pools: Sequence[PoolSnapshot]) -> Table:
    table = _table("pool", "waiting", "scope", right=("priority", "for"))
    for number, pool in enumerate(pools, 1):
        for wait in pool.queue[:SHOWN]:
            table.add_row(str(number), *_wait(wait))
        if len(pool.queue) > SHOWN:
            table.add_row(str(number), f"and {len(pool.queue) - SHOWN} more", "", "", "")
    return table


def _started(run: LiveRun) -> RenderableType:
    table = _table("instance", "kind", right=("age",))
    for entry in run.started:
        table.add_row(entry.instance, entry.kind, format_duration(time.time() - entry.started))
    return table


def _wait(wait: QueuedRequestSnapshot) -> tuple[str, ...]:
    return wait.owner, wait.scope, str(wait.priority), format_duration(wait.waited_seconds)


def _state(instance: InstanceSnapshot) -> str:
    return f"{instance.state}, frozen" if instance.frozen else instance.state


def _use(held: float, busy: float) -> tuple[str, str]:
    return format_duration(held), f"{busy / held:.0%}" if held else ""


def _few(names: Sequence[str], shown: int = SHOWN) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
