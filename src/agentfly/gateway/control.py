"""What a harness asks of the gateway over HTTP: to open a rollout, and to finish it."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.gateway.refusal import Refusal
from agentfly.gateway.sampling import RolloutSampling


class ControlRequest(BaseModel):
    """The body of a request of the harness. A number is a number of JSON, and neither a text nor ``true``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """A request from the body that was sent.

        Raises:
            Refusal: it is none.
        """
        try:
            return cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise Refusal.of_invalid(error) from None


class SamplingFields(BaseModel):
    """What `RolloutSampling` has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    follow_program: bool = False


class OpenRequest(ControlRequest):
    """A rollout that is to begin."""

    rollout_id: str
    sampling: SamplingFields | None = None

    def rollout_sampling(self) -> RolloutSampling | None:
        """How the model samples in it, if the request says so.

        Raises:
            ConfigError: a parameter cannot be.
        """
        return None if self.sampling is None else RolloutSampling(**self.sampling.model_dump())


class FinishRequest(ControlRequest):
    """What a harness says of a rollout when it is over."""

    reward: float | None = None
    task: str | dict[str, Any] | None = None
    group_id: str | None = None
    attempt: Annotated[int, Field(ge=0)] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None
