"""The base of every config section: strict, frozen, each field documented."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section: unknown keys are errors, ``"3"`` is not 3 (no coercion), and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
