"""The base of every config section: strict, frozen, each field documented."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section. Unknown keys are errors; values are never coerced between kinds (``"3"`` is not 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)
