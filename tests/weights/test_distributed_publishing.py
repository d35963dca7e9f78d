"""Weights from two trainer ranks' memory into a running embedded engine, over sockets and then mapped."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from share_cases import VERSIONS
from weight_world import FAST, free_address

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.weights.receiver import WeightReceiver
from tests.conversion.support import write_family
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

PARALLEL = {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2}


def test_an_engine_follows_two_ranks_over_a_restart_of_the_trainer(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "glm_moe_dsa", "float32")

    async def life(address: str, version: int, out: Path, transport: str) -> None:
        out.mkdir()
        payload = {"path": str(source), "parallel": PARALLEL, "address": address, "version": version, "out": str(out)}
        payload["transport"] = transport
        first, second = await asyncio.to_thread(run_world, 2, "tests.weights.share_cases:one_life", payload)
        assert first[0] == [["rollout-0"]] * VERSIONS and second[0] == []
        last = version + VERSIONS - 1
        assert first[2] == second[2] == ([last - 1, last] if transport == "distributed" else []), "small ones twice"
        short = "could not make a version:"
        reasons = [f"rank 0 {short} rank 1 sees too little memory", f"rank 1 {short} 2 shares"]
        assert [first[1], second[1]] == (reasons if transport == "embedded" else ["", ""])

    def difference(engine: EmbeddedEngine, file: Path) -> float:
        expected = engine._model.layout.assemble(load_file(file))
        return max(float((live - expected[name]).abs().max()) for name, live in engine._model.layout.live.items())

    async def main() -> None:
        address = free_address()
        config = EmbeddedEngineConfig(slots=2)
        engine = EmbeddedEngine(source, config, max_total_tokens=64, seed=0)
        await engine.start()
        receiver = WeightReceiver(address, engine, identity=b"rollout-0", config=FAST)
        receiving = asyncio.create_task(receiver.run())
        sampling = SamplingParams(1.0, max_new_tokens=40, seed=1)
        generating = asyncio.create_task(engine.generate(GenerateRequest("r", "s", (1, 2, 3), sampling)))
        try:
            await life(address, 4, tmp_path / "first", "distributed")
            assert engine.weight_version == receiver.version == 3 + VERSIONS
            assert difference(engine, tmp_path / "first" / f"{3 + VERSIONS}.safetensors") == 0
            before = tmp_path / "first" / f"{2 + VERSIONS}.safetensors"
            assert difference(engine, before) > 0.009, "the comparison sees the update"
            # An older checkpoint, published before anything else.
            await life(address, 2, tmp_path / "second", "embedded")
            assert engine.weight_version == 1 + VERSIONS
            assert difference(engine, tmp_path / "second" / f"{1 + VERSIONS}.safetensors") == 0
            assert len((await generating).output_ids) == 40
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, generating, return_exceptions=True)
            await engine.close()

    torch.set_num_threads(1)
    asyncio.run(main())
