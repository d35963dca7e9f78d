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
    "enable_return_routed_experts",
    "weight_version",
    "api_key",
    "admin_api_key",
    "disaggregation_mode",
    "disaggregation_bootstrap_port",
    "nnodes",
    "node_rank",
    "dist_init_addr",
)
"""Server arguments that follow from the rest of the config."""

CONTEXT_SLACK = 16
"""SGLang keeps a few positions of its context length for itself; without them it would cut long requests short."""


SIZES = ("tp_size", "pp_size", "dp_size")
"""Server arguments that say how many GPUs a server has."""


class SGLangConfig(Section):
    """SGLang servers, started and watched by the launcher, driven over HTTP with token ids."""

    python: str = Field(
        ".venv-sglang/bin/python", description="The Python that has SGLang (`make setup-sglang` makes this one)."
    )
    servers: int = Field(1, ge=1, description="Servers of each rollout worker, beside one for evaluation.")
    first_port: int | None = Field(
        None, ge=1024, le=65000, description="Servers listen on this port and those after it; null takes free ones."
    )
    router: str | None = Field(
        None,
        description="Address of an SGLang router in front of the training servers, which then chooses the server of a "
        "request; its routing key is the episode's name. Null: megasao chooses.",
    )
    prefill_servers: int = Field(
        0,
        ge=0,
        description="Prefill-decode disaggregation behind the router: so many of the training servers, the first ones, "
        "compute prompts, and the others decode; 0: every one does both.",
    )
    pause: Literal["retract", "in_place", "none"] = Field(
        "retract",
        description="New weights while requests run: retract recomputes their KV cache under the new weights, in_place "
        "keeps it, none lets them finish first.",
    )
    stream_interval: int = Field(
        16, ge=1, description="Tokens between two messages of a request: what a dead server's episode loses at most."
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

    def phase_of(self, server: int | None, servers: int = 1) -> dict[str, Any]:
        """Arguments that only training server ``server`` of all the ``servers`` of the run has: the part it takes where
        prompts and decoding are apart. None: the server for evaluation, which does both."""
        if not self.prefill_servers or server is None:
            return {}
        if server >= self.prefill_servers:
            return {"disaggregation_mode": "decode"}
        assert self.first_port is not None
        bootstrap = self.first_port + servers + server
        return {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": bootstrap}

    def gpus_of_server(self) -> int:
        """GPUs of one server, on all its nodes (on a CPU processes): tensor times pipeline parallelism, for each copy.

        With attention in data parallel the copies share the ranks.
        """
        copies = 1 if self.server_args.get("enable_dp_attention") else self.number("dp_size")
        return self.number("tp_size") * self.number("pp_size") * copies

    def wrong_sizes(self) -> list[str]:
        """Those of ``SIZES`` that are given and are no whole number above 0."""
        given = {name: self.server_args[name] for name in SIZES if name in self.server_args}
        return [name for name, value in given.items() if type(value) is not int or value < 1]

    def number(self, name: str) -> int:
        """One of ``SIZES``, 1 where it is not given, or is none (which is refused at load)."""
        value = self.server_args.get(name, 1)
        return 1 if name in self.wrong_sizes() else int(value)
