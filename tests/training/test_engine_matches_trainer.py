"""Log-probabilities that the engine records are the trainer's own at the same weights.

A router near-tie may send a token to another expert in another implementation, and both are right. Such tokens are
found by their router margin and counted; every other token agrees to 1e-5.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.embedded import EmbeddedEngine
from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.tiny_families import SHORT_LATENT, write_tiny_family
from tests.training.engine_episodes import MAX_TOKENS, Differences, Episode, compare, play

pytestmark = pytest.mark.world
BOUND = 1e-5


def episodes(path: Path, *, experts: bool = False) -> list[Episode]:
    """What an engine with the weights at ``path`` plays."""

    async def body() -> list[Episode]:
        engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=24), max_total_tokens=MAX_TOKENS, seed=0)
        await engine.start()
        try:
            return await play(engine, 24, experts=experts)
        finally:
            await engine.close()

    return asyncio.run(body())


def differences(engine_path: Path, trainer_path: Path) -> Differences:
    """An engine with the weights at ``engine_path`` against a trainer with those at ``trainer_path``."""
    return compare(episodes(engine_path), engine_path, trainer_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "model")


def changed(checkpoint: Path, directory: Path, *, tie: bool = False, swap: bool = False) -> Path:
    """A copy in which the routers of experts 0 and 1 are tied, and the experts themselves exchanged."""
    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in list(tensors):
        if tie and name.endswith("mlp.gate.weight"):
            tensors[name][1] = tensors[name][0]
        if swap and ".experts.0." in name:
            other = name.replace(".experts.0.", ".experts.1.")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_engine_and_trainer_agree(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, on, tokens, ties = differences(checkpoint, checkpoint)
    with capsys.disabled():
        print(f"\nengine against trainer: {tokens} tokens within {off:.1e}; {ties} behind a router near-tie, {on:.1e}")
    assert tokens > 900
    assert off < BOUND


def test_other_weights_are_noticed(checkpoint: Path, tmp_path: Path) -> None:
    off, _, _, _ = differences(checkpoint, changed(checkpoint, tmp_path / "swapped", swap=True))
    assert off > BOUND


def test_a_tie_that_falls_the_other_way_is_found_by_its_margin(checkpoint: Path, tmp_path: Path) -> None:
    """With tied routers, exchanging the two experts changes only what a tie decides: just the tokens behind one."""
    engine = changed(checkpoint, tmp_path / "tied", tie=True)
    trainer = changed(engine, tmp_path / "exchanged", swap=True)
    off, on, tokens, ties = differences(engine, trainer)
    assert on > 100 * BOUND, "the tie makes a difference"
    assert off < BOUND, "and only where the margin says so"
    assert tokens > 20 and ties > 20


# latent attention on selected keys

TIE = 2e-6
"""Smaller than NEAR_TIE: choices of keys are many, and near-ties hide what comes after them."""


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With GLM-5.2's epsilon in the norms of latents."""
    path = tmp_path_factory.mktemp("latent") / "model"
    return write_tiny_family(path, "glm_moe_dsa", mtp=False, rms_norm_eps=1e-5, **SHORT_LATENT)


@pytest.fixture(scope="module")
def played(latent: Path) -> list[Episode]:
    return episodes(latent, experts=True)


def test_they_agree_on_latent_attention(
    latent: Path, played: list[Episode], capsys: pytest.CaptureFixture[str]
) -> None:
    """For episodes ten times as long as the selection of keys."""
    off, on, tokens, ties = compare(played, latent, latent, near_tie=TIE)
    with capsys.disabled():
        print(f"\nengine against trainer: {tokens} tokens within {off:.1e}; {ties} behind a near-tie, {on:.1e}")
    assert tokens > 800
    assert off < BOUND


def test_attention_to_all_keys_is_noticed(latent: Path, played: list[Episode], tmp_path: Path) -> None:
    shutil.copytree(latent, tmp_path / "dense")
    config = json.loads((latent / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"index_topk": MAX_TOKENS}), encoding="utf-8")
    assert compare(played, latent, tmp_path / "dense", near_tie=TIE).off > 1000 * BOUND


def test_experts_of_latent_attention_are_replayed(latent: Path, played: list[Episode], tmp_path: Path) -> None:
    """A router's bias chooses experts and does not weigh them: where the choice is repeated, it does nothing."""
    shutil.copytree(latent, tmp_path / "other")
    tensors = load_file(latent / "model.safetensors")
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    free, replayed = (compare(played, latent, tmp_path / "other", near_tie=TIE, replay=each) for each in (False, True))
    assert free.off > 1000 * BOUND
    assert replayed.off < BOUND
