"""Requests and responses of the REST API for the settings that can be changed during training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from quartet.contract.control import Setting
from quartet.gateway.schemas import Model, RequestBody

_PART_WEIGHT = r"^reward\.parts\.[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.weight$"


def _extra_keys_are_part_weights(schema: dict[str, Any]) -> None:
    """State the pattern of extra keys in a JSON schema, which pydantic leaves out."""
    schema["patternProperties"] = {_PART_WEIGHT: schema.pop("additionalProperties")}
    schema["additionalProperties"] = False


class SettingChange(Model):
    """A change of a setting."""

    setting: str
    before: float
    after: float
    step: int
    """First step with the new value."""
    user: str
    """Access of the token and network address of the client."""
    at: float
    """Time in seconds since 1970."""
    together: int = 1
    """Number of changes of the same command."""


class Settings(Model):
    """The settings that can be changed during training, and past changes."""

    settings: list[Setting]
    """Empty unless the run is active."""
    changes: list[SettingChange]
    """The newest 200 changes, oldest first."""


class ChangeSettingsRequest(RequestBody):
    """New values of settings. If one value is refused, none is changed.

    Other keys are weights of parts of an ensemble: reward.parts.NAME.weight. Set both weights in one request to switch the
    source.
    """

    model_config = ConfigDict(
        extra="allow",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=_extra_keys_are_part_weights,
    )
    __pydantic_extra__: dict[Annotated[str, Field(pattern=_PART_WEIGHT)], float]
    kl_coefficient: float | None = None
    entropy_coefficient: float | None = None
    actor_learning_rate: Annotated[float | None, Field(alias="actor.learning_rate")] = None
    critic_learning_rate: Annotated[float | None, Field(alias="critic.learning_rate")] = None
