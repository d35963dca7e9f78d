"""Options of SGLang servers as rollout engines."""

from typing import Any, Literal

from pydantic import Field

from megasao.config.base import Section

SET_BY_US = (
    "model_path",
    "host",
    "port",
    "skip_tokenizer_init",
    "incremental_streaming_output",
    "stream_interval",
    "weight_version",
    "api_key",
    "admin_api_key",
    "nnodes",
    "node_rank",
    "dist_init_addr",
)
"""Server arguments that follow from the rest of the config."""

CONTEXT_SLACK = 16
"""SGLang keeps a few positions of its context length for itself; without them it would cut long requests short."""


class SGLangConfig(Section):
    """SGLang servers, started and watched by the launcher, driven over HTTP with token ids."""

    python: str = Field(
        ".venv-sglang/bin/python", description="The Python that has SGLang (`make setup-sglang` makes this one)."
    )
    servers: int = Field(1, ge=1, description="Servers of each rollout worker, beside one for evaluation.")
    first_port: int | None = Field(
        None, ge=1024, le=65000, description="Servers listen on this port and those after it; null takes free ones."
    )
    pause: Literal["retract", "in_place", "none"] = Field(
        "retract",
        description="New weights while requests run: retract recomputes their KV cache under the new weights, in_place "
        "keeps it, none lets them finish first.",
    )
    stream_interval: int = Field(
        8, ge=1, description="Tokens between two messages of a request: what a dead server's episode loses at most."
    )
    silence_timeout_s: float = Field(
        60.0, gt=0, description="A server that sends nothing for a running request this long is taken for hung."
    )
    retries: int = Field(
        4, ge=0, description="Times that a request goes on with another server (or a restarted one) before it fails."
    )
    server_args: dict[str, Any] = Field(
        default_factory=dict, description="Any argument of SGLang's ServerArgs, by its name, checked before the start."
    )

    def gpus_of_server(self) -> int:
        """GPUs of one server, on all its nodes (on a CPU processes): tensor times pipeline parallelism, for each copy.

        With attention in data parallel the copies share the ranks.
        """
        copies = 1 if self.server_args.get("enable_dp_attention") else self.number("dp_size")
        return self.number("tp_size") * self.number("pp_size") * copies

    def number(self, name: str) -> int:
        """A server argument that counts something, 1 where it is not given; SGLang itself says if it is no number."""
        value = self.server_args.get(name)
        return value if isinstance(value, int) and value > 0 else 1
