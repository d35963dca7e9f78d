"""What every rollout engine must do that says which experts its tokens went to; used as ``contract`` is."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from contract import EngineHarness, make_request, prompt, until_generated
from engine_checkpoints import Reference, load_tensors, perturb

from megasao.rollout.engines.base import Engine, GenerateResult
from megasao.rollout.episode import Transcript


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
        known = transcript.routed
        request = make_request(
            transcript.tokens, session=name, return_routed_experts=True, routed_experts_from=known, seed=turn
        )
        transcript.act(await engine.generate(request))
    ids = np.frombuffer(transcript.routing(), np.uint8).reshape(len(transcript.tokens), 2, 2)
    return transcript.tokens, ids


def check_ids(path: Path, tokens: list[int], ids: np.ndarray) -> None:
    """Those of the model's own routers, each with its token."""
    expected = chosen_by_transformers(path, tokens)
    assert (np.sort(ids[:-1]) == expected[:-1]).all()
    assert (ids[-1] == ids[-2]).all(), "the last token never went through the model"
    assert (np.sort(ids[1:]) != expected[:-1]).any(), "ids one token late would be noticed"


def test_ids_of_episodes_are_those_of_the_models_routers(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], np.ndarray]]:
        await harness.load(engine)
        return await asyncio.gather(*(episode(engine, "e" * (number + 1)) for number in range(6)))

    for tokens, ids in harness.run(body):
        check_ids(harness.path, tokens, ids)


def test_ids_are_recorded_only_where_they_are_asked_for(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> list[GenerateResult]:
        await harness.load(engine)
        asked = make_request(prompt(1), return_routed_experts=True)
        return await asyncio.gather(engine.generate(asked), engine.generate(make_request(prompt(2))))

    with_ids, without = harness.run(body)
    assert with_ids.routed_experts.shape == (12 + 8 - 1, 2, 2) and with_ids.routed_experts.dtype == np.uint8
    assert without.routed_experts is None


def test_tokens_keep_the_ids_that_they_were_sampled_with(harness: EngineHarness) -> None:
    """Also where new weights compute them again."""

    async def body(engine: Engine) -> GenerateResult:
        await harness.load(engine)
        request = make_request(prompt(3), max_new_tokens=100, return_routed_experts=True, seed=5)
        running = asyncio.ensure_future(engine.generate(request))
        await until_generated(engine, 20)
        await harness.load(engine, perturb(load_tensors(harness.path), 1, only="gate.weight"))
        return await running

    result = harness.run(body)
    assert len(result.weight_versions) == 2, "the weights changed in the middle"
    assert (result.finish_reason, len(result.output_ids)) == ("length", 100)
    assert result.logprobs is not None and len(result.logprobs) == 100
    first_new = 12 + result.weight_versions[1][0] - 1
    tokens = [*prompt(3), *result.output_ids]
    old = chosen_by_transformers(harness.path, tokens)
    ids = np.sort(result.routed_experts)
    assert ids.shape[0] == len(tokens) - 1
    assert (ids[:first_new] == old[:first_new]).all()
    assert (ids[first_new:] != old[first_new:-1]).any(), "new weights choose other experts somewhere"


def test_an_aborted_request_has_the_ids_of_its_tokens(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> GenerateResult:
        await harness.load(engine)
        request = make_request(prompt(4), max_new_tokens=200, return_routed_experts=True, seed=5)
        running = asyncio.ensure_future(engine.generate(request))
        await until_generated(engine, 20)
        await engine.abort(request.request_id)
        return await running

    result = harness.run(body)
    assert result.finish_reason == "abort" and len(result.output_ids) >= 20
    tokens = [*prompt(4), *result.output_ids]
    assert (np.sort(result.routed_experts) == chosen_by_transformers(harness.path, tokens)[:-1]).all()
