"""Log-probabilities and experts of a real SGLang server are the trainer's own at the same version, for each family that
it serves; and of a trainer whose routers differ a little they are again, once it repeats the server's choice.

The checkpoints have a layer of multi-token prediction where the family has one: the trainer does not publish it. Dense
layers between those with experts, which SGLang does not serve for qwen3_moe, are left out. Sparse attention is compared
where it selects every key: the server has it dense.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megasao.rollout.engines.sglang import SGLangEngine
from tests.engines.sglang_server import RunningServer, needs_sglang, sglang_config
from tests.megatron.tiny import read
from tests.megatron.tiny_families import write_tiny_family
from tests.megatron.world import run_world
from tests.training.engine_episodes import MAX_TOKENS, Episode, chosen_by_trainer, compare, decode_experts, play
from tests.training.router_margin import router_margins
from tests.training.test_router_replay import disturbed

pytestmark = [pytest.mark.world, needs_sglang]
BOUNDS = {"qwen3_moe": 1e-5, "glm4_moe": 1e-5, "glm_moe_dsa": 1e-4}
CONFIG = sglang_config()
STEPS = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "glm4_moe": {},
    "glm_moe_dsa": {"index_topk": MAX_TOKENS},
}


@dataclass
class Played:
    """Checkpoints before and after the trainer's steps, and episodes that one server played with each."""

    bound: float
    before: Path
    after: Path
    first: list[Episode]
    second: list[Episode]


def train(path: Path, directory: Path) -> Path:
    """A few steps of the trainer; what it would publish then, as a checkpoint."""
    directory.mkdir()
    payload = {"path": str(path), "role": "actor", "steps": STEPS, "out": str(directory)}
    run_world(1, "tests.megatron.cases:train", payload)
    published = read(directory, "weights")
    (directory / "config.json").write_bytes((path / "config.json").read_bytes())
    whole = {**load_file(path / "model.safetensors"), **published}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def play_both(server: RunningServer, before: Path, published: Path, directory: Path) -> tuple[list[Episode], ...]:
    engine = SGLangEngine(
        server.url,
        before,
        CONFIG,
        staging=directory,
        max_total_tokens=MAX_TOKENS,
        seed=0,
        start_timeout_s=240.0,
        update_timeout_s=60.0,
    )
    await engine.start()
    try:
        first = await play(engine, 24, experts=True)
        await engine.prepare_weights(STEPS, load_file(published))
        await engine.commit_weights(STEPS)
        return first, await play(engine, 24)
    finally:
        await engine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    root = tmp_path_factory.mktemp(request.param)
    before = write_tiny_family(root / "before", request.param, **FAMILIES[request.param])
    server = RunningServer(before, root, CONFIG, max_tokens=MAX_TOKENS, routed_experts=True)
    try:
        after = train(before, root / "after")
        first, second = asyncio.run(play_both(server.wait(), before, after / "weights.safetensors", root / "staging"))
    finally:
        server.kill()
    return Played(BOUNDS[request.param], before, after, first, second)


def test_server_and_trainer_agree_before_and_after_an_update(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compare(played.first, played.before, played.before, near_tie=played.bound)
    after = compare(played.second, played.after, played.after, near_tie=played.bound)
    with capsys.disabled():
        for when, found in (("at the start", before), ("after an update", after)):
            print(
                f"\nserver against trainer {when}: {found.tokens} tokens within {found.off:.1e}; {found.ties} near-ties"
            )
    assert min(before.tokens, after.tokens) > 800
    assert max(before.off, after.off) < played.bound


def test_another_version_is_noticed(played: Played) -> None:
    assert compare(played.second, played.after, played.before).off > 100 * played.bound


def test_experts_of_the_server_are_those_that_the_trainer_chooses(played: Played) -> None:
    chosen, tokens = chosen_by_trainer(played.before, played.first), 0
    late = 0
    for episode, expected in zip(played.first, chosen, strict=True):
        ids = np.sort(decode_experts(played.before, episode))
        sure = router_margins(played.before, [*episode.tokens, 0])[1:-1].numpy() >= played.bound
        assert (ids[:-1] == np.sort(expected)[:-1])[sure].all()
        assert (ids[-1] == ids[-2]).all(), "the last token never went through the model"
        tokens += int(sure.sum())
        late += int((ids[1:] != np.sort(expected)[:-1]).any((1, 2)).sum())
    assert tokens > 800 and late > 400, "experts of the token before are others"


def test_the_mismatch_of_a_disturbed_router_is_gone(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A near-tie that falls the other way changes a token's log-probability by far more than the disturbance does."""
    same = compare(played.first, played.before, played.before, replay=True, near_tie=0.0)
    other = disturbed(played.before, tmp_path / "other")
    free, replayed = (compare(played.first, other, other, replay=replay, near_tie=0.0).off for replay in (False, True))
    with capsys.disabled():
        print(
            f"\nserver against a trainer with disturbed routers: {free:.1e}, with the server's experts {replayed:.1e}"
        )
    assert same.off < played.bound
    assert replayed < free / 5, (free, replayed)
