"""What is particular to the embedded engine: slots, queue, failures, chunked prefill, other architectures."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("contract")

from contract import TOLERANCE, make_request, play, prompt, until_generated, worst  # noqa: E402
from embedded_harness import EmbeddedHarness  # noqa: E402
from engine_checkpoints import (  # noqa: E402
    MAX_TOTAL,
    Reference,
    dense_config,
    llama_config,
    load_tensors,
    make_checkpoint,
    moe_config,
    perturb,
    save_tensors,
)

from megasao.config.rollout import EmbeddedEngineConfig  # noqa: E402
from megasao.rollout.engines import embedded  # noqa: E402
from megasao.rollout.engines.base import Engine, EngineError  # noqa: E402
from megasao.rollout.engines.embedded import EmbeddedEngine  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[EmbeddedHarness]:
    """Three slots only."""
    harness = EmbeddedHarness(checkpoint, slots=3)
    yield harness
    harness.close()


def test_a_session_prefills_only_what_is_new(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list[float]:
        await narrow.load(engine)
        first = await engine.generate(make_request(prompt(1), session="a", max_new_tokens=5))
        ids = [*prompt(1), *first.output_ids, 1, 2, 3]
        before = engine.stats()["prefill_tokens"]
        second = await engine.generate(make_request(ids, session="a", max_new_tokens=5))
        await engine.end_session("a")
        third = await engine.generate(make_request(ids, session="a", max_new_tokens=5))
        await engine.end_session("a")
        assert engine.stats()["prefill_tokens"] - before == 4 + len(ids)
        return [result.metrics["cached_tokens"] for result in (first, second, third)]

    # The last sampled token was never an input before.
    assert narrow.run(body) == [0, 12 + 5 - 1, 0]


def test_more_sessions_than_slots_lose_only_time(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list:
        await narrow.load(engine)
        before = engine.stats()["evictions"]
        episodes = await asyncio.gather(*(play(engine, "x" * (i + 1), 3) for i in range(10)))
        assert engine.stats()["evictions"] > before
        return [turn for episode in episodes for turn in episode]

    assert worst(Reference(narrow.path), narrow.run(body), 1.0) < TOLERANCE


def test_least_recently_used_idle_session_is_evicted(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> dict[str, float]:
        await narrow.load(engine)
        for session in ("a", "b", "c", "a", "d"):
            await engine.generate(make_request(prompt(1), session=session, max_new_tokens=1))
        again = {}
        for session in ("a", "c", "d", "b"):
            result = await engine.generate(make_request(prompt(1), session=session, max_new_tokens=1))
            again[session] = result.metrics["cached_tokens"]
        for session in "abcd":
            await engine.end_session(session)
        return again

    assert narrow.run(body) == {"a": 11, "c": 11, "d": 11, "b": 0}


def test_long_prompts_are_prefilled_in_pieces(narrow: EmbeddedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STEP_TOKENS", 16)

    async def body(engine: Engine) -> list:
        await narrow.load(engine)
        inputs = [prompt(1, 100), prompt(2, 3), prompt(3, 57), prompt(4, 1)]
        before = engine.stats()["decode_steps"]
        results = await asyncio.gather(*(engine.generate(make_request(ids, max_new_tokens=4)) for ids in inputs))
        assert engine.stats()["decode_steps"] - before > 160 / 16
        return list(zip(inputs, results, strict=True))

    assert worst(Reference(narrow.path), narrow.run(body), 1.0) < TOLERANCE


def test_request_over_the_queue_bound_is_an_engine_error(narrow: EmbeddedHarness) -> None:
    async def body(_: Engine) -> None:
        async with narrow.fresh(max_queue=4) as engine:
            requests = [make_request(prompt(i), max_new_tokens=3) for i in range(12)]
            results = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
            refused = [result for result in results if isinstance(result, EngineError)]
            assert len(refused) == 8 and "queue is full" in str(refused[0])

    narrow.run(body)


def test_one_session_cannot_run_two_requests(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(make_request(prompt(1), session="twice")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="twice"):
            await engine.generate(make_request(prompt(1), session="twice"))
        await running

    narrow.run(body)


def test_failed_step_ends_every_request_and_is_told_to_later_calls(narrow: EmbeddedHarness) -> None:
    async def body(_: Engine) -> None:
        async with narrow.fresh() as engine:
            running = [
                asyncio.create_task(engine.generate(make_request(prompt(i), max_new_tokens=200))) for i in range(5)
            ]
            await until_generated(engine, 3)
            assert engine._model is not None
            engine._model.model.lm_head = None  # the next step cannot work
            results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 120)
            assert all(isinstance(result, EngineError) and "NoneType" in str(result) for result in results)
            assert isinstance(results[0].__cause__, TypeError)
            tensors = load_tensors(narrow.path)
            calls = (
                engine.generate(make_request(prompt(1))),
                engine.prepare_weights(1, tensors),
                engine.commit_weights(1),
            )
            for call in calls:
                with pytest.raises(EngineError, match="failed at weight version 0"):
                    await call

    narrow.run(body)


def test_weights_that_are_not_finite_fail_requests_and_the_next_ones_heal(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list:
        broken = load_tensors(narrow.path)
        broken["model.layers.0.self_attn.v_proj.weight"][0, 0] = float("nan")
        version = await narrow.load(engine, broken)
        with pytest.raises(EngineError, match=f"not finite at weight version {version}"):
            await engine.generate(make_request(prompt(1), session="sick"))
        await narrow.load(engine)
        inputs = [prompt(i, 4) for i in range(6)]
        results = await asyncio.gather(*(engine.generate(make_request(ids)) for ids in inputs))
        return list(zip(inputs, results, strict=True))

    assert worst(Reference(narrow.path), narrow.run(body), 1.0) < TOLERANCE


def test_newer_staged_weights_replace_older_ones(narrow: EmbeddedHarness, tmp_path: Path) -> None:
    changed = perturb(load_tensors(narrow.path), 4)

    async def body(engine: Engine) -> list:
        first, second = narrow.new_version(), narrow.new_version()
        await engine.prepare_weights(first, perturb(changed, 5))
        await engine.prepare_weights(second, changed)
        with pytest.raises(EngineError, match=f"weights {first} were not prepared"):
            await engine.commit_weights(first)
        await engine.commit_weights(second)
        return [(prompt(1), await engine.generate(make_request(prompt(1))))]

    played = narrow.run(body)
    assert worst(Reference(save_tensors(narrow.path, tmp_path / "changed", changed)), played, 1.0) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_float_type_are_converted(
    narrow: EmbeddedHarness, dtype: torch.dtype, tmp_path: Path
) -> None:
    rounded = {name: tensor.to(dtype) for name, tensor in load_tensors(narrow.path).items()}

    async def body(engine: Engine) -> list:
        await narrow.load(engine, rounded)
        return [(prompt(1), await engine.generate(make_request(prompt(1))))]

    widened = {name: tensor.float() for name, tensor in rounded.items()}
    reference = Reference(save_tensors(narrow.path, tmp_path / "widened", widened))
    assert worst(reference, narrow.run(body), 1.0) < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        moe_config(tie_word_embeddings=True, attention_bias=True),
        moe_config(norm_topk_prob=False, mlp_only_layers=[0]),
        dense_config(),
        llama_config(num_key_value_heads=4),
    ],
    ids=["tied", "first-layer-dense", "qwen3", "llama"],
)
def test_other_models_of_transformers_run_too(config: object, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "base", config)
    changed = perturb(load_tensors(path), 1)
    harness = EmbeddedHarness(path)

    async def body(engine: Engine) -> tuple[list, list]:
        before = await play(engine, "before", 2)
        await harness.load(engine, changed)
        return before, await play(engine, "after", 2)

    before, after = harness.run(body)
    harness.close()
    assert worst(Reference(path), before, 1.0) < TOLERANCE
    assert worst(Reference(save_tensors(path, tmp_path / "changed", changed)), after, 1.0) < TOLERANCE


def test_model_whose_attention_is_not_plain_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "sliding", dense_config(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    )
    engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=2), max_total_tokens=MAX_TOTAL, seed=0)
    with pytest.raises(ValueError, match="does not support Qwen3ForCausalLM"):
        asyncio.run(engine.start())


def test_incomplete_checkpoints_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_tensors(checkpoint)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    damaged = save_tensors(checkpoint, tmp_path / "damaged", tensors)
    for path, reason in ((damaged, "experts.3.up_proj"), (tmp_path, "no config.json")):
        engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=2), max_total_tokens=MAX_TOTAL, seed=0)
        with pytest.raises(ValueError, match=reason):
            asyncio.run(engine.start())


def test_a_damaged_file_and_a_cache_without_memory_are_told(checkpoint: Path, tmp_path: Path) -> None:
    damaged = save_tensors(checkpoint, tmp_path / "damaged", load_tensors(checkpoint))
    (damaged / "model.safetensors").write_bytes(bytes(100))
    for path, tokens, reason in (
        (damaged, MAX_TOTAL, r"model\.safetensors is damaged or cut off"),
        (
            checkpoint,
            10**12,
            r"rollout\.embedded\.slots: what attention keeps of 2 requests .* does not fit into memory",
        ),
    ):
        engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=2), max_total_tokens=tokens, seed=0)
        with pytest.raises(ValueError, match=reason):
            asyncio.run(engine.start())


def test_call_before_start_is_an_engine_error(checkpoint: Path) -> None:
    engine = EmbeddedEngine(checkpoint, EmbeddedEngineConfig(), max_total_tokens=MAX_TOTAL, seed=0)
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(engine.generate(make_request(prompt(1))))


def test_unseeded_requests_depend_on_the_engine_seed_and_their_id(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> tuple[list[int], list[int], list[int]]:
        await narrow.load(engine)
        request, other = (make_request(prompt(1), max_new_tokens=20) for _ in range(2))
        return tuple([(await engine.generate(each)).output_ids for each in (request, request, other)])

    first, same, other = narrow.run(body)
    assert first == same != other


def test_two_engines_of_one_process_start_together(checkpoint: Path) -> None:
    async def body() -> list[list[int]]:
        engines = [
            EmbeddedEngine(checkpoint, EmbeddedEngineConfig(slots=2), max_total_tokens=MAX_TOTAL, seed=0)
            for _ in range(2)
        ]
        await asyncio.gather(*(engine.start() for engine in engines))
        results = await asyncio.gather(*(engine.generate(make_request(prompt(1), seed=3)) for engine in engines))
        await asyncio.gather(*(engine.close() for engine in engines))
        return [result.output_ids for result in results]

    first, second = asyncio.run(body())
    assert first == second
