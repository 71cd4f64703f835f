"""Base class of config sections, and the value types that several sections share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_SETTING = 1e30
"""Upper limit of numbers, in configs and requests. Single precision, in which losses are computed, overflows at 3e38."""
Positive = Annotated[float, Field(gt=0, le=MAX_SETTING, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=MAX_SETTING, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MAX_SETTING, le=MAX_SETTING, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
MAX_INTEGER = 1_000_000_000
"""Upper limit of integers. Messages and tensors have 32 bits for them and for the sum of two."""
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
WholeNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
MAX_PAUSE = 30.0
"""Maximum pause before another attempt, in seconds, without the random part."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
MAX_PARAMETER_NAME = 64
"""Maximum characters of the name of a parameter of a policy loss or estimator, or of a variable of a chat template."""
ParameterName = Annotated[str, Field(min_length=1, max_length=MAX_PARAMETER_NAME)]


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""package.module:callable."""


def _function_name(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError("expected package.module:callable, such as my_rewards:score")
    return value


FunctionName = Annotated[str, AfterValidator(_function_name)]


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or localhost. IPv6 addresses may have brackets."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Section(BaseModel):
    """A section of the config tree. It is immutable and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _separate_booleans_from_numbers(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        # pydantic converts true to 1 and 1 to true. Such a value is usually meant for another key.
        validated = validate(value)
        if isinstance(value, bool) and type(validated) in (int, float):
            raise ValueError("expected a number")
        if isinstance(validated, bool) and type(value) in (int, float):
            raise ValueError("expected true or false")
        return validated


def pause_after(failures: int, first: float, maximum: float = MAX_PAUSE) -> float:
    """Return the pause in seconds after this many failures in a row: ``first``, doubled with each further one."""
    return min(maximum, first * 2.0 ** min(failures - 1, 100))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by key, such as actor.optimizer.eps."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
