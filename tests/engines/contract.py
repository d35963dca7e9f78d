"""What every rollout engine must do. An engine's own test file gives a fixture ``harness`` and imports all of this:

pytest.register_assert_rewrite("contract")
from contract import *
"""

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import VOCAB, Reference, load_tensors, logprobs_over_updates, perturb, save_tensors, version_of

from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult, SamplingParams

TOLERANCE = 1e-5
LONG_TOLERANCE = 5e-5
"""Rounding of single tokens after a hundred others, under whatever weights they had."""
LONG = 200


class EngineHarness(ABC):
    """A running engine at the weights of ``path``, used by many tests one after the other."""

    path: Path
    kv_after_update: str = "keep"

    def __init__(self) -> None:
        self._versions = itertools.count(100)

    @abstractmethod
    def run(self, body: Callable[[Engine], Awaitable[Any]]) -> Any:
        """Run ``body(engine)`` to its end in the engine's event loop, bounded in time."""

    @abstractmethod
    def fresh(self) -> AbstractAsyncContextManager[Engine]:
        """An engine that the test may break; already started."""

    async def load(self, engine: Engine, tensors: dict[str, torch.Tensor] | None = None) -> int:
        """Make ``tensors`` (those of the checkpoint, if none) current under a new version number."""
        version = next(self._versions)
        await engine.prepare_weights(version, load_tensors(self.path) if tensors is None else tensors)
        await engine.commit_weights(version)
        return version

    def new_version(self) -> int:
        return next(self._versions)


_names = itertools.count()


def make_request(ids: Sequence[int], *, session: str | None = None, **sampling: Any) -> GenerateRequest:
    name = f"request-{next(_names)}"
    defaults = {"temperature": 1.0, "max_new_tokens": 8}
    return GenerateRequest(name, session or name, list(ids), SamplingParams(**{**defaults, **sampling}))


def prompt(seed: int, length: int = 12) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


async def play(engine: Engine, name: str, turns: int, **sampling: Any) -> list[tuple[list[int], GenerateResult]]:
    """An episode: after each turn an observation of random length follows. Pairs of (input ids, result)."""
    generator, ids, played = random.Random(name), prompt(len(name)), []
    for turn in range(turns):
        result = await engine.generate(make_request(ids, session=name, seed=turn + 1000 * len(name), **sampling))
        played.append((ids, result))
        ids = [*ids, *result.output_ids, *prompt(generator.randrange(10**6), generator.randrange(1, 7))]
    await engine.end_session(name)
    return played


def worst(reference: Reference, played: Sequence[tuple[list[int], GenerateResult]], temperature: float) -> float:
    """Largest difference between recorded log-probs and the reference's."""
    errors = [
        (reference.logprobs(ids, result.output_ids, temperature) - torch.tensor(result.logprobs)).abs().max()
        for ids, result in played
    ]
    return float(torch.stack(errors).max())


async def until_generated(engine: Engine, more: int, running: Sequence[asyncio.Task[Any]] = ()) -> None:
    """Wait, bounded, until the engine has generated ``more`` tokens, or all of ``running`` have ended before."""
    goal = engine.stats()["generated_tokens"] + more
    async with asyncio.timeout(240):
        while engine.stats()["generated_tokens"] < goal and not (running and all(task.done() for task in running)):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(harness: EngineHarness, temperature: float) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], GenerateResult]]:
        await harness.load(engine)
        episodes = [play(engine, "e" * (i + 1), 3, temperature=temperature, max_new_tokens=4 + i) for i in range(8)]
        return [turn for episode in await asyncio.gather(*episodes) for turn in episode]

    played = harness.run(body)
    assert worst(Reference(harness.path), played, temperature) < TOLERANCE
    # The check itself: another temperature must not pass.
    assert worst(Reference(harness.path), played, temperature * 1.01) > 10 * TOLERANCE


def test_one_perturbed_layer_makes_the_logprob_check_fail(harness: EngineHarness, tmp_path: Path) -> None:
    layer = "layers.1.self_attn.o_proj"
    changed = perturb(load_tensors(harness.path), seed=3, only=layer)

    async def body(engine: Engine) -> list[tuple[list[int], GenerateResult]]:
        await harness.load(engine)
        return await play(engine, "episode", 2)

    played = harness.run(body)
    assert worst(Reference(harness.path), played, 1.0) < TOLERANCE
    assert worst(Reference(save_tensors(harness.path, tmp_path / "changed", changed)), played, 1.0) > 100 * TOLERANCE


def test_greedy_is_the_argmax_with_logprobs_at_temperature_one(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> GenerateResult:
        await harness.load(engine)
        return await engine.generate(make_request(prompt(5), temperature=0.0, max_new_tokens=20))

    result, reference = harness.run(body), Reference(harness.path)
    logits = reference.logits([*prompt(5), *result.output_ids])[len(prompt(5)) - 1 : -1]
    assert result.output_ids == logits.argmax(-1).tolist()
    assert worst(reference, [(prompt(5), result)], 1.0) < TOLERANCE


def test_sampling_follows_the_distribution(harness: EngineHarness) -> None:
    count, temperature = 2000, 1.0

    async def body(engine: Engine) -> list[GenerateResult]:
        await harness.load(engine)
        requests = [make_request(prompt(1), seed=i, max_new_tokens=1, temperature=temperature) for i in range(count)]
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        for request in requests:
            await engine.end_session(request.session_id)
        return results

    seen = torch.zeros(VOCAB)
    for result in harness.run(body):
        seen[result.output_ids[0]] += 1
    logits = Reference(harness.path).logits(prompt(1))[-1]
    assert _chi_square_fits(seen, torch.softmax(logits / temperature, -1))
    assert not _chi_square_fits(seen, torch.softmax(logits / 0.8, -1))


def _chi_square_fits(seen: torch.Tensor, law: torch.Tensor) -> bool:
    """Within five standard deviations; rare tokens (expected below 5) are put together."""
    expected = law * seen.sum()
    common = expected >= 5
    pairs = torch.stack([seen, expected])
    pairs = torch.cat([pairs[:, common], pairs[:, ~common].sum(1, keepdim=True)], dim=1)
    pairs = pairs[:, pairs[1] > 0]
    freedom = pairs.shape[1] - 1
    statistic = float(((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum())
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_same_seed_gives_same_tokens_in_any_company(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> tuple[GenerateResult, list[GenerateResult]]:
        await harness.load(engine)
        alone = await engine.generate(make_request(prompt(7), seed=11, max_new_tokens=30))
        crowd = [make_request(prompt(i, 5 + i), seed=i, max_new_tokens=10 + i) for i in range(12)]
        company = await asyncio.gather(
            *(engine.generate(request) for request in crowd),
            engine.generate(make_request(prompt(7), seed=12, max_new_tokens=30)),
            engine.generate(make_request(prompt(7), seed=11, max_new_tokens=30)),
        )
        return alone, company

    alone, (*_, other_seed, same_seed) = harness.run(body)
    assert same_seed.output_ids == alone.output_ids
    assert other_seed.output_ids != alone.output_ids


def test_stop_token_ends_a_turn_and_is_its_last_token(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> tuple[GenerateResult, GenerateResult]:
        await harness.load(engine)
        free = await engine.generate(make_request(prompt(2), seed=1, max_new_tokens=40))
        stop = free.output_ids[10]
        request = make_request(prompt(2), seed=1, max_new_tokens=40, stop_token_ids=(stop,))
        return free, await engine.generate(request)

    free, stopped = harness.run(body)
    assert (free.finish_reason, len(free.output_ids)) == ("length", 40)
    first = free.output_ids.index(free.output_ids[10])
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert len(stopped.logprobs or []) == first + 1


def test_logprobs_are_left_out_when_not_asked_for(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> GenerateResult:
        return await engine.generate(make_request(prompt(2), return_logprobs=False))

    assert harness.run(body).logprobs is None


def test_abort_returns_the_tokens_so_far(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], GenerateResult]]:
        await harness.load(engine)
        await engine.abort("nobody")
        request = make_request(prompt(3), max_new_tokens=LONG)
        running = asyncio.create_task(engine.generate(request))
        await until_generated(engine, 5)
        await engine.abort(request.request_id)
        result = await asyncio.wait_for(running, 120)
        after = await engine.generate(make_request(prompt(4), max_new_tokens=5))
        return [(prompt(3), result), (prompt(4), after)]

    played = harness.run(body)
    assert [result.finish_reason for _, result in played] == ["abort", "length"]
    assert 5 <= len(played[0][1].output_ids) < LONG
    assert worst(Reference(harness.path), played, 1.0) < TOLERANCE


def test_cancelled_caller_leaves_nothing_behind(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> GenerateResult:
        await harness.load(engine)
        running = asyncio.create_task(engine.generate(make_request(prompt(3), session="gone", max_new_tokens=LONG)))
        await until_generated(engine, 3)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return await engine.generate(make_request(prompt(4), session="gone", max_new_tokens=5))

    assert worst(Reference(harness.path), [(prompt(4), harness.run(body))], 1.0) < TOLERANCE


def test_forty_requests_join_and_leave(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], GenerateResult]]:
        await harness.load(engine)

        async def late(index: int) -> list[tuple[list[int], GenerateResult]]:
            await asyncio.sleep(0.003 * (index % 7))
            return await play(engine, "s" * (index + 1), 1 + index % 3, max_new_tokens=1 + index % 11)

        return [turn for episode in await asyncio.gather(*map(late, range(40))) for turn in episode]

    played = harness.run(body)
    assert len(played) == sum(1 + index % 3 for index in range(40))
    assert worst(Reference(harness.path), played, 1.0) < TOLERANCE


def test_token_ids_are_the_truth_not_the_cache(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], GenerateResult]]:
        await harness.load(engine)
        played = []
        ids = prompt(1, 20)
        # Shorter, diverging and equal inputs in one session; then the same after the session has ended.
        for inputs in (ids, ids[:10], [*ids[:5], *prompt(2, 10)], [*ids[:5], *prompt(2, 10)], ids):
            played.append((inputs, await engine.generate(make_request(inputs, session="one"))))
        await engine.end_session("one")
        await engine.end_session("unknown")
        played.append((ids, await engine.generate(make_request(ids, session="one"))))
        return played

    assert worst(Reference(harness.path), harness.run(body), 1.0) < TOLERANCE


def test_weights_swapped_in_flight_have_true_spans(harness: EngineHarness, tmp_path: Path) -> None:
    base = load_tensors(harness.path)
    changed = [perturb(base, seed) for seed in (1, 2)]

    async def body(engine: Engine) -> tuple[list[int], list[tuple[list[int], GenerateResult]]]:
        versions = [await harness.load(engine), harness.new_version(), harness.new_version()]
        prompts = [prompt(i, 6 + i) for i in range(3)]
        await engine.prepare_weights(versions[1], changed[0])
        running = [asyncio.create_task(engine.generate(make_request(ids, max_new_tokens=120))) for ids in prompts]
        await until_generated(engine, 30, running)
        assert engine.weight_version == versions[0]
        await engine.commit_weights(versions[1])
        assert engine.weight_version == versions[1]
        await engine.prepare_weights(versions[2], changed[1])
        await until_generated(engine, 30, running)
        await engine.commit_weights(versions[2])
        return versions, list(zip(prompts, await asyncio.gather(*running), strict=True))

    for _ in range(20):  # on a busy machine a request may end before both updates have come
        versions, played = harness.run(body)
        if all(len(result.weight_versions) == 3 for _, result in played):
            break
    paths = [harness.path, *(save_tensors(harness.path, tmp_path / str(i), changed[i]) for i in range(2))]
    references = {version: Reference(path) for version, path in zip(versions, paths, strict=True)}
    for ids, result in played:
        starts, seen = zip(*result.weight_versions, strict=True)
        assert list(seen) == versions
        assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(result.output_ids)
        kept = logprobs_over_updates(references, ids, result.output_ids, result.weight_versions)
        recomputed = _logprobs_recomputed(references, ids, result)
        right, wrong = (kept, recomputed) if harness.kv_after_update == "keep" else (recomputed, kept)
        recorded = torch.tensor(result.logprobs)
        assert float((right - recorded).abs().max()) < LONG_TOLERANCE
        assert float((wrong - recorded).abs().max()) > 10 * LONG_TOLERANCE
        # Spans that are off by one token must not pass.
        shifted = [(start + 1 if start else 0, version) for start, version in result.weight_versions]
        moved = logprobs_over_updates(references, ids, result.output_ids, shifted)
        assert float((moved - recorded).abs().max()) > 10 * LONG_TOLERANCE


def _logprobs_recomputed(references: dict[int, Reference], ids: list[int], result: GenerateResult) -> torch.Tensor:
    whole = {version: model.logprobs(ids, result.output_ids, 1.0) for version, model in references.items()}
    picked = [whole[version_of(result.weight_versions, i)][i] for i in range(len(result.output_ids))]
    return torch.stack(picked)


def test_new_weights_reach_the_next_turn_of_a_session(harness: EngineHarness, tmp_path: Path) -> None:
    changed = perturb(load_tensors(harness.path), seed=9)

    async def body(engine: Engine) -> tuple[tuple[int, int], list[int], GenerateResult, list[int], GenerateResult]:
        old = await harness.load(engine)
        first = await engine.generate(make_request(prompt(1), session="episode"))
        new = await harness.load(engine, changed)
        ids = [*prompt(1), *first.output_ids, *prompt(2, 4)]
        second = await engine.generate(make_request(ids, session="episode"))
        return (old, new), prompt(1), first, ids, second

    (old, new), first_ids, first, ids, second = harness.run(body)
    assert (first.weight_versions, second.weight_versions) == ([(0, old)], [(0, new)])
    references = {old: Reference(harness.path), new: Reference(save_tensors(harness.path, tmp_path / "new", changed))}
    if harness.kv_after_update == "recompute":
        assert worst(references[new], [(ids, second)], 1.0) < TOLERANCE
        return
    # Kept: the prompt and all but the last token of the first turn were computed by the old weights.
    given = ids[len(first_ids) :]
    spans = [(0, old), (len(first.output_ids), new)]
    expected = logprobs_over_updates(references, first_ids, [*given, *second.output_ids], spans)[len(given) :]
    assert float((expected - torch.tensor(second.logprobs)).abs().max()) < TOLERANCE


def test_discarded_weights_never_become_current(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> GenerateResult:
        version = await harness.load(engine)
        other = harness.new_version()
        await engine.prepare_weights(other, perturb(load_tensors(harness.path), 1))
        await engine.discard_weights(other)
        await engine.discard_weights(999_999)
        with pytest.raises(EngineError, match=str(other)):
            await engine.commit_weights(other)
        assert engine.weight_version == version
        return await engine.generate(make_request(prompt(1)))

    assert worst(Reference(harness.path), [(prompt(1), harness.run(body))], 1.0) < TOLERANCE


def test_commit_without_prepare_is_refused(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> None:
        version = await harness.load(engine)
        with pytest.raises(EngineError, match="424242"):
            await engine.commit_weights(424242)
        assert engine.weight_version == version

    harness.run(body)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_wrong_tensors_are_refused_by_name(harness: EngineHarness, damage: str) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = load_tensors(harness.path)
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["model.layers.7.self_attn.o_proj.weight"] = tensors[name]
    else:
        tensors[name] = tensors[name][:-1]
    expected = "model.layers.7.self_attn.o_proj.weight" if damage == "extra" else name

    async def body(engine: Engine) -> GenerateResult:
        version = await harness.load(engine)
        with pytest.raises(ValueError, match=expected.replace(".", r"\.")):
            await engine.prepare_weights(harness.new_version(), tensors)
        assert engine.weight_version == version
        return await engine.generate(make_request(prompt(1)))

    assert worst(Reference(harness.path), [(prompt(1), harness.run(body))], 1.0) < TOLERANCE


@pytest.mark.parametrize(
    ("ids", "sampling", "reason"),
    [
        ([], {}, "no input ids"),
        ([VOCAB], {}, "ids outside"),
        ([-1, 3], {}, "ids outside"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"max_new_tokens": 100_000}, "max_total_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
    ],
)
def test_impossible_requests_are_refused(
    harness: EngineHarness, ids: list[int], sampling: dict[str, Any], reason: str
) -> None:
    async def body(engine: Engine) -> None:
        with pytest.raises(ValueError, match=reason):
            await engine.generate(make_request(ids, **sampling))
        assert (await engine.generate(make_request(prompt(1)))).finish_reason == "length"

    harness.run(body)


def test_stats_only_grow(harness: EngineHarness) -> None:
    async def body(engine: Engine) -> tuple[dict[str, float], dict[str, float]]:
        before = dict(engine.stats())
        await engine.generate(make_request(prompt(1), max_new_tokens=6))
        return before, engine.stats()

    before, after = harness.run(body)
    assert all(after[name] >= before[name] for name in before)
    assert after["generated_tokens"] == before["generated_tokens"] + 6
    assert after["prefill_tokens"] >= before["prefill_tokens"] + 12


def test_closing_ends_running_requests_with_an_error(harness: EngineHarness) -> None:
    async def body(_: Engine) -> None:
        async with harness.fresh() as engine:
            running = [
                asyncio.create_task(engine.generate(make_request(prompt(i), max_new_tokens=LONG))) for i in range(3)
            ]
            await until_generated(engine, 5)
            await engine.close()
            results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
            assert all(isinstance(result, EngineError) for result in results)
            with pytest.raises(EngineError):
                await engine.generate(make_request(prompt(1)))
            await engine.close()

    harness.run(body)
