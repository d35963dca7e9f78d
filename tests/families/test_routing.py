"""The bytes of routed experts: their width, their order, and what is refused."""

import numpy as np
import pytest

from megasao.families.routing import Routing

TINY = Routing(layers=3, top_k=2, experts=8)


@pytest.mark.parametrize(("experts", "width"), [(8, 1), (256, 1), (257, 2), (65_536, 2)])
def test_an_id_takes_one_byte_up_to_256_experts(experts: int, width: int) -> None:
    routing = Routing(layers=3, top_k=2, experts=experts)
    ids = np.random.default_rng(0).integers(experts, size=(5, 3, 2))
    ids[0, 0, 0] = experts - 1
    data = ids.astype(routing.dtype).tobytes()
    assert len(data) == 5 * routing.token_bytes == 5 * 3 * 2 * width
    assert (routing.decode(data, 5) == ids).all()


@pytest.mark.parametrize(
    ("data", "tokens", "reason"),
    [
        (bytes(24), 5, r"expected 30 bytes \(5 tokens x 3 layers x 2 choices of 1 bytes\), got 24"),
        (b"", 1, "expected 6 bytes"),
        (bytes([0, 1, 2, 3, 4, 8]), 1, "expected ids below 8, got 8"),
    ],
)
def test_bytes_that_are_not_this_models_are_refused(data: bytes, tokens: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TINY.decode(data, tokens)


def test_the_shape_is_read_off_the_config() -> None:
    glm = {"num_hidden_layers": 78, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8}
    assert Routing.of(glm) == Routing(layers=75, top_k=8, experts=256)
    assert Routing.of(glm).token_bytes == 600
    assert Routing.of({"num_hidden_layers": 2}) is None
