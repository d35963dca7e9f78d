"""Blocks of FP8 in a real SGLang server: what `quantize` writes is served as the numbers that it stands for.

The server loads a quantised checkpoint by its own code (names, scales, fused and sliced matrices, experts), and then
a version of the weights as the trainer publishes it. Its log-probabilities are compared with the trainer's, whose
checkpoint has the dequantised numbers in float32.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megasao.families.names import SCALE
from megasao.rollout.engines.sglang import SGLangEngine
from tests.conversion.support import convert, write_family
from tests.engines.fp8_checkpoints import SIZES, dequantised
from tests.engines.sglang_server import RunningServer, needs_sglang, sglang_config
from tests.training.engine_episodes import MAX_TOKENS, Episode, compare, play

pytestmark = [pytest.mark.world, needs_sglang]
CONFIG = sglang_config()
BOUND = 1e-4
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "glm4_moe": {"n_routed_experts": 4},
    "glm_moe_dsa": {
        "index_topk": MAX_TOKENS,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "head_dim": 8,
    },
}


def quantised(source: Path, root: Path) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the numbers that it stands for in float32."""
    assert convert("quantize", source, root / "fp8") == 0
    return root / "fp8", dequantised(root / "fp8", source, root / "float32")


@dataclass
class Served:
    """Two FP8 checkpoints' numbers, and episodes that one server played with each."""

    family: str
    source: Path
    first_fp8: Path
    first: Path
    second: Path
    before: list[Episode]
    after: list[Episode]


async def play_both(server: RunningServer, first: Path, second: Path, staging: Path) -> tuple[list[Episode], ...]:
    engine = SGLangEngine(
        server.url,
        first,
        CONFIG,
        staging=staging,
        max_total_tokens=MAX_TOKENS,
        seed=0,
        start_timeout_s=240.0,
        update_timeout_s=60.0,
    )
    await engine.start()
    try:
        before = await play(engine, 16)
        published = {n: t for n, t in load_file(second / "model.safetensors").items() if ".layers.2." not in n}
        await engine.prepare_weights(1, published)
        await engine.commit_weights(1)
        return before, await play(engine, 16)
    finally:
        await engine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root, family = tmp_path_factory.mktemp(request.param), request.param
    sources, fp8, float32 = [], [], []
    for seed in (0, 1):
        (root / str(seed)).mkdir()
        sources.append(write_family(root / str(seed) / "hf", family, seed=seed, **{**SIZES, **FAMILIES[family]}))
        one, other = quantised(sources[-1], root / str(seed))
        fp8.append(one)
        float32.append(other)
    server = RunningServer(fp8[0], root, CONFIG, max_tokens=MAX_TOKENS)
    try:
        before, after = asyncio.run(play_both(server.wait(), *fp8, root / "staging"))
    finally:
        server.kill()
    return Served(family, sources[0], fp8[0], *float32, before, after)


def test_a_server_computes_with_the_numbers_of_the_checkpoint(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compare(served.before, served.first, served.first, near_tie=BOUND)
    after = compare(served.after, served.second, served.second, near_tie=BOUND)
    with capsys.disabled():
        for when, found in (("at the start", before), ("after an update", after)):
            print(f"\nFP8 {served.family} {when}: {found.tokens} tokens within {found.off:.1e}; {found.ties} near-ties")
    assert min(before.tokens, after.tokens) > 300
    assert max(before.off, after.off) < BOUND


def test_other_scales_are_noticed(served: Served, tmp_path: Path) -> None:
    """Scales of one matrix turned round, and of two exchanged."""
    tensors = load_file(served.first_fp8 / "model.safetensors")
    o_proj = f"model.layers.1.self_attn.o_proj.weight{SCALE}"
    turned = {o_proj: tensors[o_proj].T.contiguous()}
    experts = [f"model.layers.1.mlp.experts.{number}.gate_proj.weight{SCALE}" for number in (0, 1)]
    exchanged = {one: tensors[other] for one, other in zip(experts, experts[::-1], strict=True)}
    for name, change in (("turned", turned), ("exchanged", exchanged)):
        wrong = dequantised(served.first_fp8, served.source, tmp_path / name, change)
        assert compare(served.before, served.first, wrong).off > 10 * BOUND, name
