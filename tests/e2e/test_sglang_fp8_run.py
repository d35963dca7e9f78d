"""A whole run whose engines sample in blocks of FP8: real trainer, real SGLang servers, either transport."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megasao.config.architecture import read_hf_config
from megasao.families.names import published_names
from megasao.studies.tiny_model import EOS, PAD, SPECIAL, VOCAB_SIZE
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import Trajectory, from_batch
from tests.conversion.support import convert, write_family
from tests.e2e import runs
from tests.engines.fp8_checkpoints import SIZES, dequantised
from tests.engines.sglang_server import PYTHON, needs_sglang
from tests.training.engine_episodes import Episode, compare

pytestmark = [pytest.mark.e2e, needs_sglang]

SGLANG = {"engine": "sglang", "concurrency": 8, "sglang": {"python": str(PYTHON), "silence_timeout_s": 30.0}}
STEPS = 3
FP8_SEEN = 1e-3


def episode(trajectory: Trajectory) -> Episode:
    """Its tokens that the engine sampled, and their log-probs."""
    assert trajectory.rollout_logprobs is not None
    sampled = zip(trajectory.action_mask, trajectory.rollout_logprobs, strict=True)
    logprobs = {place: value for place, (action, value) in enumerate(sampled) if action}
    return Episode(trajectory.tokens, logprobs, trajectory.temperature)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_engines_sample_from_what_was_published_in_fp8(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 1 plays with version 0: the checkpoint, quantised. Its server had no weights before."""
    monkeypatch.setattr(runs, "TIMEOUT_S", 800.0)
    special = {"pad_token_id": SPECIAL.index(PAD), "eos_token_id": SPECIAL.index(EOS), "bos_token_id": None}
    sizes = {**SIZES, "vocab_size": VOCAB_SIZE, "mlp_only_layers": [], "num_experts": 4}
    model = write_family(tmp_path / "model", "qwen3_moe", **sizes, **special)
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        loop={"mode": "sync", "steps": STEPS, "batch_size": 8, "batch_timeout_s": 600.0},
        rollout=SGLANG,
        weights={"dtype": "fp8_block", "transport": transport},
        supervision={"start_timeout_s": 600.0, "hang_timeout_s": 900.0},
        evaluation={"problems": 8, "every": STEPS, "timeout_s": 600.0},
        observability={"mismatch": {"current_abs_mean": FP8_SEEN / 10}},
    )
    run = runs.train(config)

    runs.check_books(run, total_steps=STEPS)
    played = [each for batch, _ in Journal(run.journal).recover() for each in from_batch(batch)]
    first = [episode(each) for each in played if each.newest_version == 0]
    assert len(first) >= 8
    assert convert("quantize", model, tmp_path / "fp8") == 0
    stood_for = dequantised(tmp_path / "fp8", model, tmp_path / "float32")
    in_fp8, as_it_was = (compare(first, path, path, near_tie=1e-4) for path in (stood_for, model))
    with capsys.disabled():
        print(f"\nversion 0: {in_fp8.tokens} tokens within {in_fp8.off:.1e} of FP8, {as_it_was.off:.1e} of the source")
    assert in_fp8.off < 1e-4 and as_it_was.off > 10 * FP8_SEEN

    lines = runs.steps(run)[1:]  # the critic warms up in the first
    differences = [line["actor/current_log_ratio_abs_mean"] for line in lines]
    assert all(FP8_SEEN < difference < 1 for difference in differences), differences
    assert [line["alarms"] for line in lines] == [1] * len(lines), "trainer and engine differ, and it is said"
    if transport == "distributed":
        return  # what nodes had goes with them
    published = {name for file in (run.path / "weights/published").glob("*/*.safetensors") for name in load_file(file)}
    assert published == published_names(read_hf_config(model), "actor", fp8=True)
