"""Specs are equal only if their values and types are, so nobody gets an instance of another spec."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Hashable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfly.core.errors import UsageError
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.resource import Resource
from agentfly.resources.spec import ResourceSpec
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


class Taken:
    """A simulator that says what it was made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.taken = [*args, *kwargs.values()]

    def what(self) -> str:
        return repr(self.taken)


@dataclasses.dataclass(frozen=True)
class Level:
    number: object


@dataclasses.dataclass(frozen=True)
class Labelled:
    """It takes care of its own hash, which its fields have none of."""

    words: list[str]

    def __hash__(self) -> int:
        return hash(tuple(self.words))


def spec_of(*args: Any, **kwargs: Any) -> EnvironmentSpec:
    return EnvironmentSpec(factory=Taken, args=args, kwargs=kwargs)


NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
ALIKE: list[list[Hashable]] = [
    [1, True, 1.0, 1 + 0j, np.int64(1), Decimal(1)],
    [0.0, -0.0, 0, False],
    [Decimal("1.0"), Decimal("1.00")],
    [NOON, NOON.astimezone(timezone(timedelta(hours=1)))],
]
"""Values that Python takes for the same."""


@pytest.mark.parametrize("values", ALIKE, ids=str)
@pytest.mark.parametrize(
    "placed",
    [
        spec_of,
        lambda value: spec_of(level=value),
        lambda value: spec_of((1, (value,))),
        lambda value: spec_of(frozenset([value])),
        lambda value: spec_of(Level(value)),
    ],
    ids=["args", "kwargs", "in tuples", "in a set", "in a dataclass"],
)
def test_arguments_that_differ_in_type_alone_make_different_specs(values: list[Hashable], placed: Any) -> None:
    specs = [placed(value) for value in values]
    assert len(set(specs)) == len(values)
    assert specs == [placed(value) for value in values]


def test_a_spec_is_equal_to_itself_whatever_is_in_it_and_to_its_copies() -> None:
    for spec in (spec_of(math.nan), spec_of(Level(1)), spec_of(Labelled(["a"])), spec_of(Path("a"), b"b", None)):
        hash(spec)
        assert spec in {dataclasses.replace(spec), "another"}
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert copy.deepcopy(spec) == spec
    assert spec_of(math.nan) == spec_of(float("nan"))
    assert spec_of(1) != (1,)


def test_what_is_not_compared_tells_no_specs_apart_and_an_own_equality_stands() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Noted(ResourceSpec[Resource]):
        note: str = dataclasses.field(default="", compare=False)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class AllOne(ResourceSpec[Resource]):
        name: str = ""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, AllOne)

        def __hash__(self) -> int:
            return 1

    assert Noted(note="a") == Noted(note="b")
    assert AllOne(name="a") == AllOne(name="b")
    assert Noted() != AllOne()


async def test_each_owner_gets_a_simulator_made_with_what_it_asked_for(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        for owner, value in enumerate((1, True, 1.0)):
            lease = await engine.acquire(spec_of(value), f"owner {owner}")
            assert await lease.resource.what() == f"[{value!r}]"
            await engine.release(lease)


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -1, "5", True, 10**400], ids=repr)
async def test_a_wait_is_bounded_by_a_number_of_seconds_or_by_nothing(timeout: Any, tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        spec = FakeSpec(world=FakeBackend())
        for asking in (engine.acquire(spec, "a", timeout=timeout), engine.acquire_all([spec], "a", timeout=timeout)):
            with pytest.raises(UsageError, match=r"seconds to wait.* or None"):
                await asking
        assert engine.snapshot().pools == ()
        await engine.acquire(spec, "a", timeout=np.float32(5))  # type: ignore[arg-type]
