"""ContainerSpec: comparable values, and refusals with the reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agentfly.core.errors import ConfigError, PrerequisiteError, UsageError
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.spec import create_resource


def test_specs_are_values_and_make_containers() -> None:
    spec = ContainerSpec(env=(("A", "b"),), mounts=(("/usr", "/mnt/usr"),), setup=("true",))
    assert spec == ContainerSpec(env=(("A", "b"),), mounts=(("/usr", "/mnt/usr"),), setup=("true",))
    assert len({spec, ContainerSpec(), ContainerSpec(network=True)}) == 3
    assert isinstance(create_resource(ContainerSpec(), "some-box"), Container)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "./rootfs"}, "a path must be absolute"),
        ({"image": "~/rootfs"}, "a path must be absolute"),
        ({"image": "images/foo.tar"}, "a path must be absolute"),
        ({"image": "a b"}, "a name such as"),
        ({"image": "/"}, "other than that of the host"),
        ({"pids": 2}, "at least 8"),
        ({"memory": "1MiB"}, r"at least 16MiB\."),
        ({"memory": 512}, "write '512MiB' if you mean that"),
        ({"memory": "64MiB", "disk": "64MiB"}, "not below its memory"),
        ({"disk": "much"}, "not a size"),
        ({"workdir": "relative"}, "cannot be a directory inside"),
        ({"workdir": "/proc"}, "cannot be a directory inside"),
        ({"workdir": "/bin"}, "such as /workspace"),
        ({"workdir": "/lib64/below"}, "such as /workspace"),
        ({"workdir": "/usr"}, "such as /workspace"),
        ({"workdir": "/run/agentfly/below"}, "such as /workspace"),
        ({"workdir": "/work\0space"}, "such as /workspace"),
        ({"mounts": (("/data", "/usr/bin"),)}, "such as /workspace"),
        ({"mounts": (("data", "/data"),)}, "not absolute"),
        ({"mounts": (("/data", "/data", "ro"),)}, r"path on the host, path inside\); what is mounted"),
        ({"mounts": ("/data",)}, "path on the host, path inside"),
        ({"setup": ("true", "a\0b")}, "without NUL"),
        ({"setup": "make"}, r"for a single one, setup=\('make',\)"),
        ({"ports": 80}, r"for a single one, ports=\(80,\)"),
        ({"mounts": {"/data": "/data"}}, "write a tuple"),
        ({"env": "A=b"}, r"is a str: write a mapping, for instance \{'THREADS': '1'\}"),
        ({"pids": "77"}, "without quotes"),
        ({"ports": (True,)}, "is not a port"),
        ({"image": 12}, "write a text"),
        ({"network": "no"}, "True or False"),
        ({"network": "none"}, "without it there is no network"),
        ({"network": 1}, "without it there is no network"),
        ({"network": None}, "without it there is no network"),
        ({"ports": 8000}, r"\(8000,\)"),
        ({"setup": "pip install x"}, r"\('pip install x',\)"),
        ({"memory": 256}, "that is 256 bytes.*write '256MiB'"),
        ({"memory": True}, r"memory=True\): write a text such as"),
        ({"memory": None}, r"memory=None\): write a text such as"),
        ({"memory": 1.5}, "whole number of bytes"),
        ({"memory": "lots"}, r"memory='lots'\): that is not a size in bytes. Write a number and a unit"),
        ({"disk": 64}, "that is 64 bytes.*write '64MiB'"),
        ({"gpus": 1}, "no graphics processor is passed on"),
        ({"workdir": None}, "write a text"),
        ({"runtime": True}, "write a text"),
        ({"user": 0}, "'agent' or 'root'"),
        ({"isolation": False}, "'full' or 'weak'"),
        ({"cpus": "2"}, "without quotes"),
        ({"env": (("A=", "b"),)}, "name of an environment variable"),
        ({"env": (("A", 1),)}, r"\{'THREADS': '1'\}\. Numbers must be"),
        ({"env": (("A", "b", "c"),)}, "not a pair"),
        ({"env": (("A", "b\0c"),)}, "the value of A contains a NUL"),
        ({"user": "somebody"}, "'agent' or 'root'"),
        ({"backend": "chroot"}, "write 'auto', 'bubblewrap', 'docker', 'podman', 'enroot' or 'landlock'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_with_the_reason(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContainerSpec(**fields)  # type: ignore[arg-type]


def test_more_than_the_machine_has_is_refused_by_every_backend() -> None:
    able = Capabilities(
        backend="some",
        available=True,
        images=("host",),
        cpus=True,
        disk=True,
        network_off=True,
        cores=4,
        total_memory=2**33,
    )
    able.check(ContainerSpec(cpus=4, memory="8GiB"))
    with pytest.raises(PrerequisiteError, match=r"cpus=100\): the machine of some has 4 processor cores"):
        able.check(ContainerSpec(cpus=100))
    with pytest.raises(PrerequisiteError, match=r"memory='999GiB'\): the machine of some has 8.0 GiB"):
        able.check(ContainerSpec(memory="999GiB"))


async def test_no_container_begins_with_a_limit_that_its_machine_cannot_hold() -> None:
    for beyond in ({"cpus": 10_000}, {"memory": "999TiB"}):
        box = Container(ContainerSpec(**beyond), "too-large")
        try:
            with pytest.raises(PrerequisiteError):
                await box.start()
        finally:
            await box.release()


def test_a_container_needs_a_name_that_can_be_a_directory() -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        Container(ContainerSpec(), "../escape")


@pytest.mark.parametrize("env", [{"TOKEN": b"secret"}, (("TOKEN", "secret", 1),), (("TOKEN", "secret\0"),)])
def test_no_refusal_tells_the_value_of_a_variable(env: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        ContainerSpec(env=env)  # type: ignore[arg-type]
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("make", [ContainerSpec, partial(ModelServerSpec, model="m")])
def test_variables_given_as_a_mapping_or_as_pairs_in_any_order_are_the_same(make: Callable[..., Any]) -> None:
    spec = make(env={"B": "2", "A": "1"})
    assert spec == make(env=(("A", "1"), ("B", "2"))) == make(env=[["B", "2"], ["A", "1"]])
    assert dict(spec.env) == {"A": "1", "B": "2"}
    hash(spec)


def test_lists_are_kept_as_tuples() -> None:
    spec = ContainerSpec(setup=["make"], ports=[80], mounts=[["/data", "/mnt/data"]])  # type: ignore[arg-type]
    assert spec == ContainerSpec(setup=("make",), ports=(80,), mounts=(("/data", "/mnt/data"),))
    hash(spec)
    served = ModelServerSpec(model="m", arguments=["--enforce-eager"])  # type: ignore[arg-type]
    assert served == ModelServerSpec(model="m", arguments=("--enforce-eager",))


def test_the_values_of_variables_are_not_in_the_repr() -> None:
    shown = repr(ContainerSpec(env=(("TOKEN", "secret"),), pids=77))
    assert "secret" not in shown
    assert "TOKEN" in shown
    assert "pids=77" in shown


@pytest.mark.parametrize("spec", [ContainerSpec, EnvironmentSpec])
def test_a_field_that_is_none_is_refused_with_the_nearest_name(spec: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"has no field 'capcity'\. Did you mean 'capacity'"):
        spec(capcity=2)
    with pytest.raises(ConfigError, match=r"has no field 'xyzzy'\. There are: capacity"):
        spec(xyzzy=2)
    with pytest.raises(ConfigError, match="by its name; it has capacity"):
        spec(2)


def test_specs_are_copied_pickled_and_replaced_as_any_value() -> None:
    spec = ContainerSpec(pids=77, ports=(80,))
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert replace(spec, pids=78).pids == 78
    with pytest.raises(ConfigError, match="Did you mean 'pids'"):
        replace(spec, pid=78)  # type: ignore[call-arg]
