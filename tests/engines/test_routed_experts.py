"""The embedded engine says which experts every token went to (routing replay)."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("contract")

from contract import make_request, prompt, until_generated  # noqa: E402
from embedded_harness import EmbeddedHarness  # noqa: E402
from engine_checkpoints import Reference, dense_config, load_tensors, make_checkpoint, moe_config, perturb  # noqa: E402

from megasao.rollout.engines.base import Engine, GenerateResult  # noqa: E402
from megasao.rollout.episode import Transcript  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[EmbeddedHarness]:
    """Three slots only, so that sessions lose theirs between turns."""
    harness = EmbeddedHarness(checkpoint, slots=3)
    yield harness
    harness.close()


def chosen_by_transformers(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """[T, M, K] of one sequence alone, sorted: which experts, not in which order."""
    layers: list[torch.Tensor] = []
    reference = Reference(path)
    for layer in reference.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: layers.append(output[2]))
    reference.logits(tokens)
    return torch.stack(layers, 1).sort(-1).values.numpy()


async def episode(engine: Engine, name: str) -> tuple[list[int], np.ndarray]:
    """Three turns as an episode plays them: tokens, and their experts [T, M, K]."""
    transcript = Transcript()
    for turn in range(3):
        transcript.observe(prompt(7 * len(name) + turn, 2 + turn))
        request = make_request(transcript.tokens, session=name, return_routed_experts=True, seed=turn)
        transcript.act(await engine.generate(request))
    ids = np.frombuffer(transcript.routing(), np.uint8).reshape(len(transcript.tokens), 2, 2)
    return transcript.tokens, ids


def test_ids_are_those_of_the_models_routers_whatever_was_cached(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], np.ndarray]]:
        await narrow.load(engine)
        before = engine.stats()["evictions"]
        others = [engine.generate(make_request(prompt(90 + i), session=f"other {i}")) for i in range(4)]
        played, *_ = await asyncio.gather(
            asyncio.gather(*(episode(engine, "e" * (number + 1)) for number in range(6))), *others
        )
        assert engine.stats()["evictions"] > before, "some turn had to compute its whole prefix again"
        return played

    for tokens, ids in narrow.run(body):
        expected = chosen_by_transformers(narrow.path, tokens)
        assert (np.sort(ids[:-1]) == expected[:-1]).all()
        assert (ids[-1] == ids[-2]).all(), "the last token never went through the model"
        assert (np.sort(ids[1:]) != expected[:-1]).any(), "ids one token late would be noticed"


def test_ids_are_recorded_only_where_they_are_asked_for(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list[GenerateResult]:
        await narrow.load(engine)
        asked = make_request(prompt(1), return_routed_experts=True)
        return await asyncio.gather(engine.generate(asked), engine.generate(make_request(prompt(2))))

    with_ids, without = narrow.run(body)
    assert with_ids.routed_experts.shape == (12 + 8 - 1, 2, 2) and with_ids.routed_experts.dtype == np.uint8
    assert without.routed_experts is None


def test_a_recomputed_prefix_keeps_the_ids_that_its_tokens_were_sampled_with(checkpoint: Path) -> None:
    harness = EmbeddedHarness(checkpoint, slots=3, kv_after_update="recompute")

    async def body(engine: Engine) -> GenerateResult:
        await harness.load(engine)
        request = make_request(prompt(3), max_new_tokens=100, return_routed_experts=True, seed=5)
        running = asyncio.ensure_future(engine.generate(request))
        await until_generated(engine, 20)
        await harness.load(engine, perturb(load_tensors(harness.path), 1, only="gate.weight"))
        return await running

    try:
        result = harness.run(body)
    finally:
        harness.close()
    assert len(result.weight_versions) == 2, "the weights changed in the middle"
    first_new = 12 + result.weight_versions[1][0] - 1
    tokens = [*prompt(3), *result.output_ids]
    old = chosen_by_transformers(checkpoint, tokens)
    ids = np.sort(result.routed_experts)
    assert ids.shape[0] == len(tokens) - 1
    assert (ids[:first_new] == old[:first_new]).all()
    assert (ids[first_new:] != old[first_new:-1]).any(), "new weights choose other experts somewhere"


def test_a_dense_model_has_no_ids_to_give(tmp_path: Path) -> None:
    harness = EmbeddedHarness(make_checkpoint(tmp_path, dense_config()))

    async def body(engine: Engine) -> None:
        await harness.load(engine)
        with pytest.raises(ValueError, match="asks for routed experts of a model that has none"):
            await engine.generate(make_request(prompt(1), return_routed_experts=True))
        assert (await engine.generate(make_request(prompt(1)))).routed_experts is None

    try:
        harness.run(body)
    finally:
        harness.close()
