"""RunConfig: a configuration, read from one YAML file and overridden by ``key=value`` words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from agentfly.cli.config_fields import nearest_field
from agentfly.core.errors import ConfigError, nearest_name
from agentfly.core.files import replace_text
from agentfly.core.json_values import brief
from agentfly.core.references import load_reference
from agentfly.core.run_directory import RunDirectory
from agentfly.core.yaml_reader import MAX_BYTES, MAX_DEPTH, read_yaml
from agentfly.training.config.base import SETTING_HINTS, BaseConfig, names_of_changed
from agentfly.training.config.train_config import OwnCode, TrainConfig
from agentfly.training.sft.config import SFTConfig

LITERAL = "$${"
"""Written for a literal ``${`` in a configuration's texts."""

_VARIABLE_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:,(.*))?", re.DOTALL)


class EndpointConfig(BaseModel):
    """A model behind an OpenAI-compatible endpoint, for evaluations and rollouts instead of a model loaded here.

    Further keys are fields of `agentfly.ModelAPISpec`, such as ``api_key_env`` and ``max_concurrency``.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    base_url: str
    """Base URL of the endpoint, such as ``http://localhost:8000/v1``."""
    model: str | None = None
    """Name of the model at the endpoint. If not given, the only model that it serves."""
    token_ids: bool | None = None
    """Whether to request token ids. If not given, they are requested from servers that identify themselves as vLLM."""
    omit: tuple[str, ...] = ()
    """Parameters that the endpoint refuses, such as ``temperature``."""
    send_reasoning: bool = False
    """Whether the reasoning of earlier turns is sent back."""


class MemoryConfig(BaseModel):
    """The part of the conversation that the agent sees at each turn.

    Further keys are settings of the memory: ``turns`` of `agentfly.Window`, or the fields of `agentfly.SummaryFolding`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    kind: str
    """``full``, ``window`` or ``summary``."""


class VLLMConfig(BaseModel):
    """The agent's model served by vLLM; see `agentfly.policies.vllm.policy.VLLMPolicy`.

    In training, the model learns in this process, and its weights are sent to the servers after each update.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["vllm"] = "vllm"
    """``vllm``. The short form ``policy: vllm`` means one server with default settings."""
    servers: PositiveInt = 1
    """Number of servers to start; rollouts are distributed among them."""
    server: dict[str, Any] = {}
    """Fields of `agentfly.ModelServerSpec` for each server, such as ``dtype`` and ``context_length``."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers. No server is started then."""
    api_key_env: str | None = None
    """Environment variable with the key of these servers."""
    in_flight: Literal["wait", "keep"] = "wait"
    """How an update treats running generations: ``wait`` for their end, or ``keep`` them, with the new weights."""
    weight_transfer_dir: str | None = None
    """Directory through which weights are transferred. Trainer and servers must see it under the same path. If not
    given, the directory for temporary files."""
    raw_logprobs: bool = False
    """Whether to record log-probs at temperature 1 in addition, if tokens are sampled differently."""


class OracleConfig(BaseModel):
    """The oracle instead of a model: its rollouts prove that tasks can be solved, and can warm-start a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["oracle"] = "oracle"
    """``oracle``. The short form ``policy: oracle`` means the same."""


GROUPS: Mapping[str, type[BaseConfig]] = {"training": TrainConfig, "sft": SFTConfig}
"""The groups of settings that accept the names of other frameworks as synonyms."""


def _kind_of(policy: Any) -> str:
    kind = policy.get("kind") if isinstance(policy, dict) else getattr(policy, "kind", None)
    return f"({kind})" if kind in ("vllm", "oracle") else "(endpoint)"


class RunConfig(BaseModel):
    """The configuration of a run.

    References name something in Python code, as ``module:name`` or ``path/file.py:name``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    agent: str
    """Reference to an `Agent`, or to a function that takes a model and returns one."""
    model: str | None = None
    """Name, Hugging Face id or directory of the model. If not given, the agent's model."""
    policy: (
        Annotated[
            Annotated[EndpointConfig, Tag("(endpoint)")]
            | Annotated[VLLMConfig, Tag("(vllm)")]
            | Annotated[OracleConfig, Tag("(oracle)")],
            Discriminator(_kind_of),
        ]
        | None
    ) = None
    """Source of the samples: an endpoint (not in training), or ``vllm``. If not given, the model in this process."""
    memory: MemoryConfig | None = None
    """The part of the conversation that the agent sees at each turn. If not given, the agent's own memory."""
    tasks: str | None = None
    """Reference to the tasks or to a function that returns them, or path of a file: JSON lines, JSON, CSV, parquet."""
    eval_tasks: str | None = None
    """The same for the held-out tasks. Without them there is no evaluation."""
    reward: str | None = None
    """Reference to the reward or group reward. Without one, the rewards of the tools are summed; the sum is 0 if there
    are none."""
    curriculum: str | None = None
    """Reference to a `Curriculum` or to a function that returns one, such as
    ``agentfly.training.curriculum:BySuccessRate``. It chooses and orders the tasks of each epoch. If not given, all
    tasks in random order."""
    oracle: str | None = None
    """Reference to the turns of a perfect agent, which ``agentfly check`` plays: a script, or a function that returns
    one."""
    run_dir: str | None = None
    """Directory of the run's files. If not given, ``runs/<time>`` in the working directory."""
    directory: str = "."
    """Directory in which modules are searched first, and base of relative paths. The default is the directory of the
    configuration file."""
    training: TrainConfig = Field(default_factory=TrainConfig)
    """Settings of training. Evaluations and rollouts use a part of them."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    """Settings of ``agentfly sft``, the warm start on successful trajectories."""

    @field_validator("training", "sft", mode="wrap")
    @classmethod
    def _prefix_group_errors(cls, value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """Name the group of settings in its errors."""
        try:
            return validate(value)
        except ConfigError as error:
            raise ConfigError("\n".join(f"{info.field_name}: {line}" for line in str(error).splitlines())) from None

    @model_validator(mode="before")
    @classmethod
    def _reject_misplaced_keys(cls, values: Any) -> Any:
        """Reject a key below ``training`` that belongs beside it."""
        training = values.get("training") if isinstance(values, dict) else None
        below = [*TrainConfig.model_fields, *TrainConfig.SYNONYMS, *TrainConfig.SETTING_HINTS]
        for key in training if isinstance(training, dict) else ():
            near = None if key in below else nearest_name(str(key), [*cls.model_fields, *below])
            if near is not None and near not in below:
                meant = "" if near == key else f" There is no {key!r}; did you mean {near!r}?"
                raise ConfigError(
                    f"{near!r} is a key beside 'training', not below it.{meant} Write {near}, not training.{key}."
                )
        return values

    @field_validator("policy", mode="before")
    @classmethod
    def _expand_policy_name(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("vllm", "oracle"):
            remedy = "there is no such policy. Write 'vllm', 'oracle', or policy.base_url=http://…/v1"
            raise PydanticCustomError("policy", "{remedy}", {"remedy": remedy})
        return {"kind": value} if isinstance(value, str) else value


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and apply overrides such as ``training.steps=20``.

    Raises:
        ConfigError: the file is missing or is not YAML, a key is unknown, a value has the wrong type, or an override
            is not ``key=value``.
    """
    if not path.is_file():
        raise ConfigError(_no_file(path))
    values = _merged(path, overrides)
    try:
        return validate_config(values, str(path))
    except ConfigError:
        if not overrides or not _is_valid_alone(path):
            raise
    return validate_config(values, " ".join(overrides))  # raises: the overrides are at fault


def validate_config(values: dict[str, Any], source: str) -> RunConfig:
    """Create a configuration from plain values.

    Raises:
        ConfigError: a key is unknown (the message has the nearest name) or a value has the wrong type.
    """
    base = Path(str(values.get("directory", "."))).resolve()
    own = OwnCode(lambda reference, field: load_reference(reference, base=base, field=field))
    try:
        return RunConfig.model_validate(values, context=own)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{source} cannot be followed:", *_error_messages(error)])) from None
    except ConfigError as error:  # of the training or sft settings, whose errors are complete
        complaints = [f"  {complaint}" for complaint in str(error).splitlines()]
        raise ConfigError("\n".join([f"{source} cannot be followed:", *complaints])) from None


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration with the effective value of every field, replacing the old file.

    Raises:
        PrerequisiteError: it cannot be written; the old file stays.
    """
    replace_text(path, config_text(config))


def config_text(config: RunConfig) -> str:
    """Return the resolved configuration as YAML."""
    text: str = yaml.safe_dump(_literal(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    return text


def _literal(value: Any) -> Any:
    """Escape the texts of a value, so that they are read back unchanged."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return value.replace("${", LITERAL) if isinstance(value, str) else value


def is_override(word: str) -> bool:
    """Whether a command's argument is ``key=value``, and not a path with ``=`` in it, such as ``runs/lr=1e-4``."""
    key, separator, _ = word.partition("=")
    if not separator or "/" in key:
        return False
    return key.partition(".")[0] in RunConfig.model_fields or not Path(word).exists()


def _is_valid_alone(path: Path) -> bool:
    """Whether a file is valid without overrides."""
    try:
        validate_config(_merged(path, ()), str(path))
    except ConfigError:
        return False
    return True


def _no_file(path: Path) -> str:
    """Return the error message for a path that is not a configuration file."""
    run = RunDirectory(path)
    if not run.config_file.is_file():
        what = f"{path} is a directory" if path.is_dir() else f"There is no configuration file {path}"
        return f"{what}. Name the YAML file of a configuration."
    if (command := run.begun_by) is None:
        return f"{path} is a directory. Name the configuration in it: {run.config_file}."
    return (
        f"{path} is a run of agentfly {command}. Resume it with agentfly {command} --resume {path}, or start another "
        f"run with its configuration, {run.config_file}, and another run_dir=…."
    )


def _merged(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    changes = [_canonical(_parse_override(override)) for override in overrides]
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a mapping of names to values at its top.")
    for change in changes:
        values = _with_change(_without_other_names(values, change), change)
    return {"directory": str(path.resolve().parent), **_filled(values, path, ())}


def _parse_override(override: str) -> dict[str, Any]:
    """Return the change of one ``key=value`` word as nested mappings."""
    key, separator, value = override.partition("=")
    names = key.split(".")
    if not separator or not all(names) or len(names) > MAX_DEPTH:
        raise ConfigError(f"{override!r} is not an override. Write key=value, for instance training.steps=20.")
    try:
        change = read_yaml(value, override)
    except ConfigError as error:
        raise ConfigError(f"{override!r} is not an override: {error}") from None
    for name in reversed(names):
        change = {name: change}
    return dict(change)


def _with_change(value: Any, change: Any) -> Any:
    """Apply a change to a value: mappings are merged, everything else is replaced."""
    if not isinstance(value, dict) or not isinstance(change, dict):
        return change
    return {**value, **{name: _with_change(value.get(name), own) for name, own in change.items()}}


def _filled(value: Any, path: Path, keys: tuple[str, ...]) -> Any:
    """Replace the environment variables that the texts of a value refer to."""
    if isinstance(value, dict):
        return {key: _filled(one, path, (*keys, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, path, keys) for one in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[0] == LITERAL:
            return "${"
        known = _VARIABLE.fullmatch(match[1] or "")
        if known is None:
            raise ConfigError(
                f"{path}: {'.'.join(keys)}={brief(value)}: {brief(match[0])} is not a reference to a variable. Write "
                f"${{oc.env:NAME}} for an environment variable, or {LITERAL} for ${{ itself."
            )
        found = os.environ.get(known[1], known[2])
        if found is None:
            raise ConfigError(
                f"{path}: {'.'.join(keys)}={brief(value)}: the environment variable {known[1]!r} is not set. Set it, "
                f"or write a default: ${{oc.env:{known[1]},default}}."
            )
        return found

    return _VARIABLE_REFERENCE.sub(variable, value)


def _canonical(change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change under the canonical names of settings."""
    return {
        name: GROUPS[name].canonical(value) if name in GROUPS and isinstance(value, dict) else value
        for name, value in change.items()
    }


def _without_other_names(values: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Remove synonyms of changed settings from a file's values, so that the change takes effect."""
    kept = dict(values)
    for name, settings in GROUPS.items():
        written, changed = values.get(name), change.get(name)
        if isinstance(written, dict) and isinstance(changed, Mapping):
            others = names_of_changed(changed, settings.SYNONYMS)
            kept[name] = {one: value for one, value in written.items() if one not in others}
    return kept


def _error_messages(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("("))
        if problem["type"] == "extra_forbidden":
            near = nearest_field(where, RunConfig)
            hint = f"Did you mean {near!r}?" if near else f"The keys are {', '.join(RunConfig.model_fields)}."
            hint = SETTING_HINTS.get(where.rpartition(".")[2], hint)
            yield f"  There is no key {where!r}. {hint}"
        elif problem["type"] == "missing":
            given = problem["input"] if isinstance(problem["input"], dict) else {}
            known = {*RunConfig.model_fields, *EndpointConfig.model_fields}
            unknown = [key for key in given if key not in known]
            meant = nearest_name(where.rpartition(".")[2], unknown)
            slip = f" There is no {meant!r}: did you mean this key?" if meant else ""
            yield f"  The key {where!r} is required and missing.{slip}"
        else:
            yield f"  {where}={brief(problem['input'])}: {problem['msg'][:1].lower()}{problem['msg'][1:]}."
