"""Chunked log-probabilities against the plain computation, alone and with the vocabulary split over gloo ranks."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from megasao.config.ops import OpsConfig
from megasao.ops import logprobs as module
from megasao.ops.backend import configure
from megasao.ops.logprobs import CHUNK_BYTES, chunked_logprobs, default_chunk, token_logprobs
from megasao.ops.reference import logprobs_reference

T, H, V = 23, 6, 40


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(T, H, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(V, H, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(),
        "targets": torch.randint(V, (T,), generator=generator),
        "temperature": 0.5 + torch.rand(T, generator=generator),
    }


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """The [T, V] computation."""
    scale = torch.as_tensor(temperature).to(hidden.dtype).expand(len(targets))
    law = torch.log_softmax(hidden @ weight.T / scale[:, None], dim=-1)
    return law.gather(1, targets[:, None]).squeeze(1), -(law.exp() * law).sum(-1)


def weighted(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    """A loss in which every token and both outputs count differently."""
    steps = torch.arange(1, T + 1, dtype=logprobs.dtype)
    loss = (logprobs * steps).sum()
    return loss if entropies is None else loss + (entropies * steps.flip(0)).sum()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, T, 1000])
def test_equals_the_plain_computation(chunk: int, entropy: bool) -> None:
    case = inputs()
    expected, expected_entropies = plain(**case)
    loss = weighted(expected, expected_entropies if entropy else None)
    wanted = torch.autograd.grad(loss, (case["hidden"], case["weight"]))
    logprobs, entropies = chunked_logprobs(**case, chunk=chunk, entropy=entropy)
    got = torch.autograd.grad(weighted(logprobs, entropies), (case["hidden"], case["weight"]))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(got, wanted)
    assert (entropies is not None) == entropy
    if entropies is not None:
        torch.testing.assert_close(entropies, expected_entropies)
    cold, _ = plain(**(case | {"temperature": 1.0}))
    assert not torch.allclose(cold, expected, atol=1e-2), "without temperature the comparison fails"


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_filling_rows_of_the_weight_do_not_exist(backend: str) -> None:
    case, real = inputs(), V - 3
    case |= {"targets": case["targets"] % real}
    expected, expected_entropies = plain(**(case | {"weight": case["weight"][:real]}))
    wanted = torch.autograd.grad(weighted(expected, expected_entropies), (case["hidden"], case["weight"]))
    configure(OpsConfig(backend=backend, logprob_chunk=7))  # type: ignore[arg-type]
    try:
        logprobs, entropies = token_logprobs(**case, entropy=True, vocabulary=real)
    finally:
        configure(OpsConfig())
    got = torch.autograd.grad(weighted(logprobs, entropies), (case["hidden"], case["weight"]))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(chunked_logprobs(**case)[0], expected, atol=1e-2), "they would count otherwise"
    with pytest.raises(ValueError, match="vocabulary"):
        chunked_logprobs(**case, vocabulary=V + 1)


def test_gradcheck_in_float64() -> None:
    case = inputs()
    fixed = {"targets": case["targets"], "temperature": case["temperature"]}

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropies = chunked_logprobs(hidden, weight, **fixed, chunk=7, entropy=True)
        assert entropies is not None
        return torch.cat([logprobs, entropies])

    assert torch.autograd.gradcheck(both, (case["hidden"], case["weight"]))


def test_bfloat16_weight_gradients_are_summed_in_float32() -> None:
    exact, rounded = inputs(), inputs(torch.bfloat16)
    exact |= {name: rounded[name].detach().double().requires_grad_() for name in ("hidden", "weight")}
    (wanted,) = torch.autograd.grad(chunked_logprobs(**exact)[0].sum(), exact["weight"])
    (got,) = torch.autograd.grad(chunked_logprobs(**rounded, chunk=1)[0].sum(), rounded["weight"])
    assert got.dtype == torch.bfloat16
    scale = wanted.abs().max()
    assert float((got.double() - wanted).abs().max() / scale) < 1.5e-2
    logprobs, _ = chunked_logprobs(**rounded)
    assert logprobs.dtype == torch.float32


def test_bfloat16_logits_are_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDENED_ROWS", 7)
    rounded = inputs(torch.bfloat16)
    exact = rounded | {name: rounded[name].detach().double() for name in ("hidden", "weight")}
    (wanted, wanted_entropy), (got, got_entropy) = plain(**exact), chunked_logprobs(**rounded, chunk=5, entropy=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, wanted.float(), **tolerance)
    torch.testing.assert_close(got_entropy, wanted_entropy.float(), **tolerance)
    logits = (rounded["hidden"] @ rounded["weight"].T).float() / rounded["temperature"].float()[:, None]
    narrow = torch.log_softmax(logits, dim=-1).gather(1, rounded["targets"][:, None]).squeeze(1)
    assert not torch.allclose(narrow, wanted.float(), **tolerance), "bfloat16 logits must fail this bound"


def test_the_backend_chooses_between_chunks_and_the_plain_computation() -> None:
    case = inputs()
    outcomes = {}
    try:
        for name, config in {
            "plain": OpsConfig(backend="reference"),
            "chunked": OpsConfig(logprob_chunk=4),
            "default": OpsConfig(),
        }.items():
            configure(config)
            with Largest() as made:
                logprobs, entropies = token_logprobs(**case, entropy=True)
                gradients = torch.autograd.grad(weighted(logprobs, entropies), (case["hidden"], case["weight"]))
            outcomes[name] = made.elements, (logprobs, entropies, *gradients)
    finally:
        configure(OpsConfig())
    assert outcomes["plain"][0] == outcomes["default"][0] == T * V > outcomes["chunked"][0] == V * H
    for got in ("chunked", "default"):
        torch.testing.assert_close(outcomes[got][1], outcomes["plain"][1])


def test_the_default_chunk_is_bounded_by_bytes() -> None:
    assert default_chunk(154_880, torch.float32) * 154_880 * 4 <= CHUNK_BYTES
    assert default_chunk(154_880, torch.float32) == 433 == 2 * default_chunk(154_880, torch.float64) + 1
    assert default_chunk(10**12, torch.float32) == 1 and default_chunk(0, torch.float32) > 1


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_larger_than_a_chunk_or_the_weight_is_made() -> None:
    tokens, vocabulary = 64, 50
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    with Largest() as chunked:
        chunked_logprobs(hidden, weight, targets, chunk=8, entropy=True)[0].sum().backward()
    assert chunked.elements <= max(8 * vocabulary, hidden.numel(), weight.numel())
    with Largest() as whole:
        plain(hidden, weight, targets, 1.0)[0].sum().backward()
    assert whole.elements >= tokens * vocabulary


def _rank(rank: int, ranks: int, store: str, results: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    case = inputs()
    part = case["weight"].detach().chunk(ranks)[rank].clone().requires_grad_()
    case |= {"weight": part}
    group = distributed.group.WORLD
    scale = case["temperature"].double().reciprocal()
    fixed = {name: case[name] for name in ("hidden", "weight", "targets")} | {"entropy": True, "group": group}
    saved = []
    for logprobs, entropies in (
        chunked_logprobs(**fixed, temperature=case["temperature"], chunk=7),
        logprobs_reference(**fixed, scale=scale, vocabulary=V),
    ):
        gradients = torch.autograd.grad(weighted(logprobs, entropies), (case["hidden"], part))
        saved.append([logprobs.detach(), entropies.detach(), *gradients])
    torch.save(saved, f"{results}/{rank}")
    distributed.destroy_process_group()


@pytest.mark.world
def test_a_split_vocabulary_equals_one_rank(tmp_path: Path) -> None:
    ranks = 2
    torch.multiprocessing.spawn(_rank, (ranks, str(tmp_path / "store"), str(tmp_path)), nprocs=ranks)
    case = inputs()
    logprobs, entropies = chunked_logprobs(**case, entropy=True)
    for_hidden, for_weight = torch.autograd.grad(weighted(logprobs, entropies), (case["hidden"], case["weight"]))
    for rank in range(ranks):
        expected = [logprobs, entropies, for_hidden, for_weight.chunk(ranks)[rank]]
        for results in torch.load(tmp_path / str(rank)):  # in chunks, and plain
            for got, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(got, wanted.detach())
    halves, _ = chunked_logprobs(**(case | {"weight": case["weight"][: V // 2], "targets": case["targets"] % 20}))
    assert not torch.allclose(halves, logprobs, atol=1e-2), "half the vocabulary is another law"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(T)}, r"hidden: expected floats of shape \[T, H\]"),
        ({"weight": torch.zeros(V, H + 1).double()}, r"weight: expected torch.float64 of shape \[V, 6\]"),
        ({"weight": torch.zeros(V, H)}, "weight: expected torch.float64"),
        ({"targets": torch.zeros(T)}, r"targets: expected int64 of shape \[23\]"),
        ({"targets": torch.full((T,), V)}, r"targets: expected ids in \[0, 40\)"),
        ({"temperature": 0.0}, "temperature: expected finite numbers > 0"),
        ({"temperature": torch.ones(3)}, r"temperature: expected a number or shape \[23\], got \[3\]"),
        ({"chunk": 0}, "chunk: expected a number >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**(inputs() | change))
