"""Which experts each token went to, as bytes: what an engine records and the actor repeats (routing replay, "R3").

Of T tokens, M layers with experts (dense layers are left out) and K choices each: row-major [T, M, K], one byte an id
where there are at most 256 experts, else two, little-endian. The last token of a trajectory was sampled and never went
through the model: its entries repeat those of the token before it, and nothing that is trained on depends on them.

Invariants (tests assert them):
- decoding gives the ids that were stored; bytes of another model, or of another number of tokens, are refused.
"""

from dataclasses import dataclass

import numpy as np

from megasao.families.facts import HfConfig, expert_count, is_moe_layer


@dataclass(frozen=True)
class Routing:
    """Shape of a model's routing: ``layers`` M with experts, ``top_k`` K choices of ``experts`` in each."""

    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, hf_config: HfConfig) -> "Routing | None":
        """That of a config.json; None for a dense model."""
        experts = expert_count(hf_config)
        if experts == 0:
            return None
        layers = sum(is_moe_layer(hf_config, layer) for layer in range(hf_config["num_hidden_layers"]))
        return cls(layers, int(hf_config["num_experts_per_tok"]), experts)

    @property
    def dtype(self) -> np.dtype:
        """How an id is stored."""
        return np.dtype(np.uint8) if self.experts <= 256 else np.dtype("<u2")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.dtype.itemsize

    def decode(self, data: bytes, tokens: int) -> np.ndarray:
        """int64 [T, M, K].

        Raises:
            ValueError: another number of bytes than ``tokens`` tokens of this model have, or an id it does not have.
        """
        expected = tokens * self.token_bytes
        if len(data) != expected:
            raise ValueError(
                f"routed_experts: expected {expected} bytes ({tokens} tokens x {self.layers} layers x {self.top_k} "
                f"choices of {self.dtype.itemsize} bytes), got {len(data)}"
            )
        ids = np.frombuffer(data, self.dtype).reshape(tokens, self.layers, self.top_k).astype(np.int64)
        if ids.size and ids.max() >= self.experts:
            raise ValueError(f"routed_experts: expected ids below {self.experts}, got {ids.max()}")
        return ids

    def unknown(self, tokens: int) -> np.ndarray:
        """int64 [T, M, K] for tokens whose outputs nobody reads: the first K experts of every layer."""
        return np.broadcast_to(np.arange(self.top_k), (tokens, self.layers, self.top_k))
