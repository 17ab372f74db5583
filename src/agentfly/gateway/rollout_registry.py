"""RolloutEndpoint: what a program is to be told, so that its calls of a model come to its rollout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RolloutEndpoint:
    """Where a program finds the model, and the key that it shows there.

    Attributes:
        rollout_id: the rollout.
        base_url: takes the place of OpenAI's.
        api_key: good for calls of the model in this rollout, and for nothing else.
    """

    rollout_id: str
    base_url: str
    api_key: str = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which client libraries are told both."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
        }

    def to_json(self) -> dict[str, str]:
        """The endpoint as JSON."""
        return {"rollout_id": self.rollout_id, "base_url": self.base_url, "api_key": self.api_key}
