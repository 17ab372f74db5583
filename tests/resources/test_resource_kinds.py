"""The registry of resource kinds: which resource a spec describes, and which specs are possible."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import pytest

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.numbers import parse_byte_size
from agentfly.resources.kind import ResourceKind, import_object
from agentfly.resources.model_api.model_api import ModelAPISpec
from agentfly.resources.spec import ResourceSpec, create_resource, kind_of
from agentfly.testing.fake_resource import FakeBackend, FakeResource, FakeSpec


@dataclass(frozen=True, kw_only=True)
class LazySpec(ResourceSpec):
    kind = ResourceKind("lazy", "agentfly.testing.fake_resource:FakeResource")
    world: FakeBackend


def test_a_resource_may_be_named_and_is_imported_when_it_is_needed():
    assert isinstance(create_resource(LazySpec(world=FakeBackend()), "one"), FakeResource)


def test_a_subclass_of_a_spec_is_of_the_same_kind():
    class OwnSpec(FakeSpec):
        pass

    assert kind_of(OwnSpec()).name == "fake"


def test_a_subclass_with_a_kind_of_its_own_leaves_the_kind_of_its_parent_unchanged():
    class Other(FakeResource):
        pass

    class OtherSpec(FakeSpec):
        kind = ResourceKind("other", Other)

    assert isinstance(create_resource(OtherSpec(), "one"), Other)
    assert type(create_resource(FakeSpec(), "one")) is FakeResource
    assert kind_of(FakeSpec()).name == "fake"
    with pytest.raises(ConfigError, match="OtherSpec has no field 'kind'"):
        OtherSpec(kind=FakeSpec.kind)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [FakeResource, "agentfly.testing.fake_resource:FakeResource"])
def test_a_kind_that_is_no_resource_kind_is_refused(kind):
    spec_type = type("NewSpec", (ResourceSpec,), {"kind": kind})
    with pytest.raises(UsageError, match="NewSpec names no resource"):
        create_resource(spec_type(), "one")


def test_a_spec_names_the_fields_that_it_cannot_do_without_and_travels_with_them():
    with pytest.raises(ConfigError, match=r"LazySpec needs world\. Write LazySpec\(world=…\)"):
        LazySpec(capacity=2)  # type: ignore[call-arg]
    spec = ModelAPISpec(base_url="http://localhost:1/v1", model="judge")
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


def test_a_spec_without_a_kind_is_refused_with_the_cure():
    class NewSpec(ResourceSpec):
        pass

    with pytest.raises(UsageError, match=r"kind = ResourceKind\('my kind', 'my_module:MyResource'\)"):
        create_resource(NewSpec(), "one")


@pytest.mark.parametrize("address", ["no_such_module_at_all:name", "json:no_such_name", "json"])
def test_what_cannot_be_imported_says_so(address):
    with pytest.raises(UsageError, match="could not be imported"):
        import_object(address)


def reap_of_a_program(traces):
    """As if it stood in the file that is run."""


reap_of_a_program.__module__ = "__main__"


@pytest.mark.parametrize(
    "reap",
    [
        lambda traces: None,
        partial(print, "gone"),
        reap_of_a_program,
        "__main__:reap",
        FakeResource(FakeSpec(), "one").release,
    ],
)
def test_a_reap_that_a_later_process_could_not_import_is_refused(reap):
    with pytest.raises(ConfigError, match="top level of a module"):
        ResourceKind("lazy", FakeResource, reap=reap)


def test_a_reap_is_known_by_its_address():
    kind = ResourceKind("lazy", FakeResource, reap=parse_byte_size)  # type: ignore[arg-type]
    assert kind.reap_address == "agentfly.core.numbers:parse_byte_size"


@pytest.mark.parametrize(
    "fields",
    [
        {"capacity": 0},
        {"capacity": "8"},
        {"capacity": 2.5},
        {"capacity": True},
        {"warm": 9},
        {"warm": "1"},
        {"cpus": "2"},
        {"cpus": float("nan")},
        {"gpus": float("inf")},
        {"start_timeout_s": "60"},
        {"start_timeout_s": None},
        {"max_uses": 1.5},
        {"cpus": -1},
        {"gpus": -0.5},
        {"memory": -1},
        {"memory": "lots"},
        {"memory": "infGiB"},
        {"max_concurrency": 0},
        {"max_uses": 0},
        {"start_timeout_s": 0},
        {"idle_timeout_s": -1},
        {"check_interval_s": float("nan")},
        {"reuse": "recycle"},
    ],
)
def test_a_spec_that_contradicts_itself_is_refused_when_it_is_written(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=rf"FakeSpec\({name}=|is not a size in bytes"):
        FakeSpec(**fields)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("512MiB", 2**29),
        ("2 GB", 2 * 10**9),
        ("0.5gib", 2**29),
        ("1Gi", 2**30),
        ("64ki", 2**16),
    ],
)
def test_sizes_are_read_in_the_usual_units(text, size):
    assert parse_byte_size(text) == size


@pytest.mark.parametrize("memory", ["512m", "512M", "512 m"])
def test_a_unit_that_programs_read_differently_is_refused_with_both_readings(memory: str) -> None:
    with pytest.raises(ConfigError, match=r"FakeSpec\(memory=.*Write '512MiB' or '512MB'\.$"):
        FakeSpec(memory=memory)
