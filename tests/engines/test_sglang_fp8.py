"""Blocks of FP8 in a real SGLang server: what `quantize` writes is served as the numbers that it stands for.

The server loads a quantised checkpoint by its own code (names, scales, fused and sliced matrices, experts), and then
a version of the weights as the trainer publishes it. Its log-probabilities are compared with the trainer's, whose
checkpoint has the dequantised numbers in float32.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megasao.config.architecture import read_hf_config
from megasao.config.sglang import SGLangConfig
from megasao.families.names import SCALE
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.sglang import RequestLost, SGLangEngine
from megasao.rollout.engines.sglang_arguments import make_served_directory, server_arguments
from megasao.rollout.engines.sglang_fp8 import fp8_problem
from megasao.rollout.engines.sglang_weights import read_layout
from tests.conversion.support import convert, write_family
from tests.engines.fp8_checkpoints import SIZES, dequantised
from tests.engines.sglang_server import RunningServer, needs_sglang, sglang_config
from tests.megatron.tiny_families import SETTINGS
from tests.training.engine_episodes import MAX_TOKENS, Episode, compare, play

pytestmark = [pytest.mark.world, needs_sglang]
BOUND = 2e-5
ROUNDING = 0.1


@dataclass(frozen=True)
class Case:
    """A family, and the servers' tensor parallelism."""

    family: str
    changes: dict[str, Any]
    tensor: int = 1

    @property
    def config(self) -> SGLangConfig:
        return sglang_config(server_args={"tp_size": self.tensor} if self.tensor > 1 else {})

    @property
    def sizes(self) -> dict[str, Any]:
        return {**SIZES, **self.changes}


LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 8}
CASES = [
    Case("glm4_moe", {"n_routed_experts": 4}),
    pytest.param(
        Case("qwen3_moe", {"mlp_only_layers": [], "head_dim": 128, "moe_intermediate_size": 256}, tensor=2),
        marks=pytest.mark.full,
    ),
    pytest.param(
        Case("glm_moe_dsa", {**LATENT, "index_topk": MAX_TOKENS, "first_k_dense_replace": 1, "n_routed_experts": 4}),
        marks=pytest.mark.full,
    ),
]


def quantised(source: Path, root: Path) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the numbers that it stands for in float32."""
    assert convert("quantize", source, root / "fp8") == 0
    return root / "fp8", dequantised(root / "fp8", source, root / "float32")


@dataclass
class Served:
    """Two FP8 checkpoints' numbers, and episodes that one server played with each."""

    case: Case
    source: Path
    first_fp8: Path
    first: Path
    second: Path
    before: list[Episode]
    after: list[Episode]


async def play_both(
    server: RunningServer, config: SGLangConfig, first: Path, second: Path, staging: Path
) -> tuple[list[Episode], ...]:
    def connect(*, fp8: bool) -> SGLangEngine:
        return SGLangEngine(
            server.url,
            first,
            config,
            staging=staging,
            max_total_tokens=MAX_TOKENS,
            seed=0,
            start_timeout_s=240.0,
            update_timeout_s=60.0,
            fp8=fp8,
        )

    # As in a run, where servers start without weights.
    waiting = connect(fp8=True)
    await waiting.start()
    with pytest.raises(RequestLost, match="it has no weights yet"):
        await waiting.generate(GenerateRequest("r", "s", (1, 2), SamplingParams(1.0, max_new_tokens=1)))
    await waiting.close()
    engine = connect(fp8=False)
    await engine.start()
    try:
        before = await play(engine, 16)
        published = {n: t for n, t in load_file(second / "model.safetensors").items() if ".layers.2." not in n}
        await engine.prepare_weights(1, published)
        await engine.commit_weights(1)
        return before, await play(engine, 16)
    finally:
        await engine.close()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.family)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    case: Case = request.param
    root = tmp_path_factory.mktemp(case.family)
    sources, fp8, float32 = [], [], []
    for seed in (0, 1):
        directory = root / str(seed)
        sources.append(write_family(directory / "hf", case.family, seed=seed, **case.sizes))
        one, other = quantised(sources[-1], directory)
        fp8.append(one)
        float32.append(other)
    assert fp8_problem(case.config, read_hf_config(sources[0])) is None
    server = RunningServer(fp8[0], root, case.config, max_tokens=MAX_TOKENS)
    try:
        before, after = asyncio.run(play_both(server.wait(), case.config, *fp8, root / "staging"))
    finally:
        server.kill()
    return Served(case, sources[0], fp8[0], *float32, before, after)


def test_a_server_computes_with_the_numbers_of_the_checkpoint(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compare(served.before, served.first, served.first, near_tie=BOUND)
    after = compare(served.after, served.second, served.second, near_tie=BOUND)
    with capsys.disabled():
        for when, found in (("at the start", before), ("after an update", after)):
            what = f"{found.tokens} tokens within {found.off:.1e}; {found.ties} near-ties"
            print(f"\nFP8 {served.case.family} {when}: {what}")
    assert min(before.tokens, after.tokens) > 300
    assert max(before.off, after.off) < BOUND


def test_what_dequantize_makes_differs_by_its_rounding(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes bfloat16, which keeps eight bits of a product of FP8 and its scale."""
    assert convert("quantize", served.first_fp8, tmp_path / "plain", "--dequantize") == 0
    rounded = compare(served.before, tmp_path / "plain", tmp_path / "plain", near_tie=1e-2)
    with capsys.disabled():
        print(f"\nFP8 {served.case.family} against bfloat16: {rounded.tokens} tokens within {rounded.off:.1e}")
    assert 10 * BOUND < rounded.off < ROUNDING


def test_other_scales_are_noticed(served: Served, tmp_path: Path) -> None:
    """Scales of one matrix turned round, and of two exchanged."""
    tensors = load_file(served.first_fp8 / "model.safetensors")
    o_proj = f"model.layers.1.self_attn.o_proj.weight{SCALE}"
    turned = {o_proj: tensors[o_proj].T.reshape(tensors[o_proj].shape)}
    experts = [f"model.layers.1.mlp.experts.{number}.gate_proj.weight{SCALE}" for number in (0, 1)]
    exchanged = {one: tensors[other] for one, other in zip(experts, experts[::-1], strict=True)}
    for name, change in (("turned", turned), ("exchanged", exchanged)):
        wrong = dequantised(served.first_fp8, served.source, tmp_path / name, change)
        assert compare(served.before, served.first, wrong).off > 10 * BOUND, name


def test_sizes_that_sglang_cannot_cut_into_blocks_are_refused() -> None:
    """As its own loader does: a block has the numbers of one fused part and of one rank."""

    def problem(family: str, changes: dict[str, Any], **server_args: Any) -> str:
        shape = {"model_type": family, **SETTINGS[family], **SIZES, **changes}
        return str(fp8_problem(sglang_config(server_args=server_args), shape))

    assert problem("qwen3_moe", {}) == "None"
    assert "num_key_value_heads * head_dim = 64" in problem("qwen3_moe", {"head_dim": 32})
    assert "moe_intermediate_size = 128 into blocks of 128 over 2 ranks" in problem(
        "qwen3_moe", {"head_dim": 128, "mlp_only_layers": []}, tp_size=2
    )
    assert problem("qwen3_moe", {"head_dim": 128, "mlp_only_layers": []}, tp_size=2, ep_size=2) == "None"
    assert "intermediate_size = 384" in problem("qwen3_moe", {"head_dim": 128}, tp_size=2, ep_size=2)
    assert "shared experts" in problem("glm4_moe", {"head_dim": 128, "intermediate_size": 512}, tp_size=2, ep_size=2)
    assert "q_lora_rank = 32" in problem("glm_moe_dsa", {})
    assert problem("glm_moe_dsa", LATENT) == "None"
    assert "rows of q_b_proj = 288" in problem("glm_moe_dsa", LATENT, tp_size=2, ep_size=2)


def test_a_server_of_published_versions_starts_empty_and_announces_fp8(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "glm4_moe", **SIZES)
    config = sglang_config()
    make_served_directory(config, source, tmp_path / "served", fp8=True)
    assert convert("quantize", source, tmp_path / "fp8") == 0
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("served", "fp8"))
    assert ours == theirs | {"eos_token_id": None}
    place = {"served": tmp_path, "host": "127.0.0.1", "port": 1, "max_tokens": 9}
    assert server_arguments(config, **place, empty=True)["load_format"] == "dummy"
    assert "load_format" not in server_arguments(config, **place)
    layout, quantised_names = read_layout(source, fp8=True), load_file(tmp_path / "fp8" / "model.safetensors")
    assert layout == read_layout(tmp_path / "fp8")
    assert layout == {n: (tuple(t.shape), t.dtype) for n, t in quantised_names.items() if ".layers.2." not in n}
