"""`megasao simulate` on the shipped config: laws of length, sizes, table, JSON, picture, refusals."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megasao.config import Config
from megasao.config.document import read_document
from megasao.config.errors import ConfigError, UserError
from megasao.config.load import dump_yaml, load_config
from megasao.config.simulate import EpisodeConfig
from megasao.simulation import command
from megasao.simulation.lengths import of_law
from megasao.simulation.outcome import Outcome, warnings
from megasao.simulation.rates import Source, Work, configured
from megasao.simulation.report import describe, write_json
from megasao.simulation.scale import scaled

ROOT = Path(__file__).parents[2]
WORK = Work(actor=40e9, critic=39e9, transfer=1.8)
SHORT = ["simulate.steps=6", "simulate.discard=2"]


def glm(*changes: str) -> Config:
    return load_config(ROOT / "configs" / "glm_5_2_750b.yaml", [*SHORT, *changes])


@pytest.fixture(scope="module")
def small() -> tuple[list[Outcome], list[Source]]:
    return command.outcomes(glm(), [64, 512], WORK)


# lengths


def law(**options: Any) -> EpisodeConfig:
    plain = {"prompt_tokens": {"value": 100, "source": "test"}, "observation_tokens": {"value": 10, "source": "test"}}
    return EpisodeConfig.model_validate(plain | {"mean": {"value": 300, "source": "test"}, "turns": 3} | options)


@pytest.mark.parametrize("options", [{"response": "lognormal", "sigma": 0.5}, {"response": "pareto", "alpha": 3.0}])
def test_a_law_has_its_mean_and_a_tail(options: dict[str, Any]) -> None:
    drawn = [of_law(law(**options), 100_000)(seed).action_tokens for seed in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(300, rel=0.02)
    assert max(drawn) > 3 * 300
    assert statistics.fmean(
        of_law(law(**options, mean={"value": 330, "source": "test"}), 100_000)(seed).action_tokens
        for seed in range(20_000)
    ) != pytest.approx(300, rel=0.05)


def test_turns_share_the_response_and_the_longest_episode_fits() -> None:
    shape = of_law(law(response="constant"), 10_000)(0)
    assert [(turn.prefill, turn.decode) for turn in shape.turns] == [(100, 100), (10, 100), (10, 100)]
    cut = of_law(law(response="constant", mean={"value": 301, "source": "test"}), 320)(0)
    assert cut.tokens == 320 and [turn.decode for turn in cut.turns] == [67, 67, 66]


# sizes


def test_trainer_and_fleet_keep_their_proportion_and_batches_grow() -> None:
    for gpus, engines, batch, room in ((64, 1, 16, 64), (512, 8, 128, 512), (4096, 64, 1024, 4096)):
        config, trainer = scaled(glm(), gpus, "async")
        assert (trainer, config.rollout.workers) == (gpus // 2, engines)
        assert (config.loop.batch_size, config.buffer.max_trajectories) == (batch, room)
        assert config.warmup_steps == 0
    fixed, _ = scaled(glm("simulate.scale_batch=false"), 4096, "async")
    assert (fixed.loop.batch_size, fixed.buffer.max_trajectories, fixed.rollout.workers) == (128, 512, 64)


def test_modes_are_the_products_own() -> None:
    loops = {mode: scaled(glm(), 512, mode)[0].loop for mode in ("sync", "one-step-off", "async")}
    assert {mode: (loop.mode, loop.max_lag) for mode, loop in loops.items()} == {
        "sync": ("sync", 4),
        "one-step-off": ("async", 1),
        "async": ("async", 4),
    }


def test_training_takes_the_operations_of_the_plan_over_the_speed_of_the_gpus() -> None:
    options = glm().simulate
    assert options is not None
    rates = configured(options, WORK, 256)
    assert rates.training.actor.per_token == pytest.approx(6 * 40e9 / (256 * 989e12 * 0.2))
    assert rates.training.critic.per_token == pytest.approx(6 * 39e9 / (256 * 989e12 * 0.2))
    assert rates.training.values.per_token == pytest.approx(2 * 39e9 / (256 * 989e12 * 0.2))
    assert configured(options, WORK, 512).training.actor.per_token == rates.training.actor.per_token / 2
    assert rates.transfer == 1.8


def test_every_rate_is_shown_with_its_source(small: tuple[list[Outcome], list[Source]]) -> None:
    text = describe(*small, notes=[])
    options = glm().simulate
    assert options is not None

    def sources(data: Any) -> list[str]:
        if not isinstance(data, dict):
            return []
        own = [data["source"]] if "source" in data else []
        return own + [source for value in data.values() for source in sources(value)]

    found = sources(options.model_dump())
    assert len(found) == 16 and all(source in text for source in found)
    assert "megasao plan, at plan.link_gb_per_s" in text


# what comes out


def test_modes_differ_as_they_must(small: tuple[list[Outcome], list[Source]]) -> None:
    outcomes, _ = small
    for gpus in (64, 512):
        sync, one_off, asynchronous = (one for one in outcomes if one.gpus == gpus)
        assert sync.trajectories_per_s < one_off.trajectories_per_s < asynchronous.trajectories_per_s
        assert sync.trainer_utilisation < asynchronous.trainer_utilisation <= 1
        assert (sync.staleness_max, sync.dropped) == (0, 0)
        assert one_off.staleness_max <= 1 < asynchronous.staleness_max <= 4


def test_table_and_json(small: tuple[list[Outcome], list[Source]], tmp_path: Path) -> None:
    outcomes, sources = small
    lines = describe(outcomes, sources, ["a note"]).splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("64 ", "512 "))]
    assert [(row[0], row[2], row[-1]) for row in rows[::3]] == [("64", "sync", "1.00"), ("512", "sync", "1.00")]
    assert lines[-1] == "note: a note"
    write_json(tmp_path / "found.json", outcomes, sources, ["a note"])
    data = json.loads((tmp_path / "found.json").read_text())
    assert [Outcome(**one) for one in data["outcomes"]] == outcomes and data["notes"] == ["a note"]


def test_what_a_run_would_not_have_got_through_is_said(small: tuple[list[Outcome], list[Source]]) -> None:
    outcomes, _ = small
    assert [note.split(" GPUs")[0] for note in warnings(outcomes, glm(), 256)] == ["64"]
    assert warnings(outcomes, glm(), 32) == []
    [note] = warnings(outcomes, glm("environment.episode_timeout_s=60"), 32)
    assert "beyond environment.episode_timeout_s = 60" in note


# refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["simulate.episode.sigma=null"], "simulate.episode.sigma: is needed"),
        (["simulate.episode.alpha=2"], "simulate.episode.alpha: is of another law"),
        (["simulate.episode.response=pareto", "simulate.episode.alpha=1"], "simulate.episode.alpha: "),
        (["simulate.discard=6"], "simulate.discard: 6 of simulate.steps = 6 leave no step"),
        (["simulate.engine.kv_tokens.value=1000"], "simulate.engine.kv_tokens: holds less than one episode"),
        (["simulate.episode.prompt_tokens.value=16000"], "leave no room in environment.max_tokens = 16384"),
        (["simulate.training.mfu.value=1.5"], "simulate.training.mfu.value: "),
        (["simulate.training.mfu.source=''"], "simulate.training.mfu.source: "),
        (["simulate.engine.step_ms=3"], "simulate.engine.step_ms: unknown key"),
    ],
)
def test_a_section_that_cannot_work_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        glm(*changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        (["simulate=null"], 512, "the config has no section simulate"),
        (["plan.rollout_gpus=0", "slurm=null"], 512, "plan.rollout_gpus: 0, so there is no fleet"),
        (["critic.placement=separate"], 512, "only a critic on the actor's ranks is modelled"),
        (
            ["environment.compaction.max_segments=2", "trainer.token_budget=32768"],
            512,
            "episodes of several segments are not modelled",
        ),
        ([], 100, "100 GPUs cannot be shared .* use multiples of 64"),
        (["loop.batch_size=8"], 64, "shrinks to 1; use simulate.scale_batch=false"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: list[str], gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.outcomes(glm(*changes), [gpus], WORK)


def test_without_any_time_for_weights_it_asks_for_one() -> None:
    options = glm().simulate
    assert options is not None
    with pytest.raises(ValueError, match=r"simulate.transfer_s: null, and plan.rollout_gpus = 0"):
        configured(options, Work(1.0, 1.0, None), 1)


@pytest.mark.parametrize("text", ["", "8,", "0", "-8", "8;16", "many"])
def test_nodes_are_numbers(text: str) -> None:
    assert command.sizes_of("8,16") == [8, 16]
    with pytest.raises(UserError, match="--nodes: expected whole numbers above 0"):
        command.sizes_of(text)


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--plot: expected a name that ends in \.png"):
        command.simulate(glm(), [64], lengths=None, json=None, plot=tmp_path / "found.svg", say=print)


@pytest.mark.parametrize("option", ["json", "plot"])
def test_a_place_that_is_not_there_is_refused_before_the_work(tmp_path: Path, option: str) -> None:
    files = {"json": None, "plot": None, option: tmp_path / "absent" / "found.png"}
    with pytest.raises(UserError, match=f"--{option}: the directory of .* is not there"):
        command.simulate(glm(), [64], lengths=None, say=print, **files)


def test_it_needs_no_torch() -> None:
    code = "import sys, megasao.simulation.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=400, check=False).returncode == 0


def test_the_command_line(tmp_path: Path) -> None:
    """From config to files, with the plan of a small model of the same kind."""
    overlay = tmp_path / "rates.yaml"
    section = read_document(ROOT / "configs" / "glm_5_2_750b.yaml").data["simulate"]
    section["episode"] |= {name: {"value": 10, "source": "test"} for name in ("prompt_tokens", "observation_tokens")}
    small = ["plan.rollout_gpus=8", "plan.engine_gpus=4", "environment.max_tokens=500", "trainer.token_budget=500"]
    overlay.write_text(dump_yaml({"simulate": section}))
    config = [ROOT / "configs" / "integration" / "glm_5_2_750b.yaml", overlay, *SHORT, *small]
    files = ["--json", tmp_path / "found.json", "--plot", tmp_path / "found.png"]
    arguments = ["simulate", *config, "--nodes", "1,2", *files]
    run = subprocess.run(
        [sys.executable, "-m", "megasao", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "megasao plan, without the embedding" in run.stdout and "one-step-off" in run.stdout
    assert len(json.loads((tmp_path / "found.json").read_text())["outcomes"]) == 6
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
