"""How the numerical core runs."""

from typing import Literal

from pydantic import Field

from megasao.config.base import Section


class OpsConfig(Section):
    """Implementation of advantage estimation and policy loss, and their optional checks."""

    backend: Literal["auto", "reference", "fused"] = Field(
        "auto",
        description="fused: the compiled operators, an error if they are missing; reference: plain torch; "
        "auto: fused where they are there.",
    )
    check: bool = Field(
        False, description="Refuse rewards or values that are NaN at action tokens, at the price of a pass over them."
    )
