"""How the numerical core runs."""

from typing import Literal

from pydantic import Field

from megasao.config.base import Section


class OpsConfig(Section):
    """Implementation of advantage estimation, policy loss and log-probabilities, and their optional checks."""

    backend: Literal["auto", "reference", "fused"] = Field(
        "auto",
        description="fused: the compiled operators, an error if they are missing; reference: plain torch, with the "
        "logits of all tokens at once; auto: fused where they are there.",
    )
    logprob_chunk: int | None = Field(
        None,
        ge=1,
        description="Tokens whose logits exist at one time; null: as many as take 256 MiB on a rank. Of no effect with "
        "backend reference.",
    )
    check: bool = Field(
        False, description="Refuse rewards or values that are NaN at action tokens, at the price of a pass over them."
    )
