"""Settings that nothing reads are noted where that is so, and only there."""

from pathlib import Path

import pytest

from megasao.config.load import dump_config, load_config
from megasao.config.unread import _RULES, unread_settings

CONFIGS = Path(__file__).parents[2] / "configs"
LAPTOP = CONFIGS / "laptop.yaml"
SGLANG, SEPARATE = "rollout.engine=sglang", "critic.placement=separate"
GROUPS = str(CONFIGS / "algorithms" / "grpo.yaml")
NAIVE = str(CONFIGS / "algorithms" / "naive.yaml")
SLURM = ["slurm.rollout_nodes=1", "transport.curve=true"]
RECORDED = ["rollout.logprobs=always", "rollout.weight_versions=always"]

CASES = [
    ("critic.timeout_s=60", [], [SEPARATE]),
    ("critic.head_bias=0.25", ["critic.path=/value", "critic.head_bias=0"], []),
    ("rollout.sglang.python=/python", [], [SGLANG]),
    ("rollout.sglang.servers=2", [], [SGLANG]),
    ("rollout.sglang.first_port=30000", [], [SGLANG]),
    ("rollout.sglang.pause=none", [], [SGLANG]),
    ("rollout.sglang.stream_interval=4", [], [SGLANG]),
    ("rollout.sglang.silence_timeout_s=9", [], [SGLANG]),
    ("rollout.sglang.retries=1", [], [SGLANG]),
    ("slurm.cpus_per_server=2", SLURM, [*SLURM, SGLANG]),
    ("rollout.embedded.slots=8", [SGLANG], []),
    ("rollout.embedded.kv_after_update=recompute", [SGLANG], []),
    ("weights.shard_bytes=1048576", [], ["weights.transport=disk"]),
    ("weights.shard_bytes=1048576", ["weights.transport=distributed"], ["weights.transport=distributed", SGLANG]),
    ("loop.partial_groups=shrink", [], [GROUPS]),
    ("algorithm.advantages.alpha=2", ["algorithm.advantages.policy_lambda=0.9"], []),
    ("algorithm.kl.estimator=k1", [], ["algorithm.kl.coefficient=0.1"]),
    ("algorithm.allow_uncorrected=true", [], ["algorithm.objective.name=ppo_clip"]),
    ("ops.logprob_chunk=64", ["ops.backend=reference"], []),
    ("observability.mismatch.kl=0.1", [NAIVE], [NAIVE, *RECORDED]),
    ("observability.mismatch.ess=0.5", [NAIVE], [NAIVE, *RECORDED]),
    ("observability.mismatch.current_abs_mean=0.2", [NAIVE], [NAIVE, *RECORDED]),
    ("observability.mismatch.current_abs_max=2", [NAIVE, RECORDED[0]], [NAIVE, *RECORDED]),
]


@pytest.mark.parametrize(("setting", "unread", "read"), CASES, ids=[case[0] for case in CASES])
def test_a_setting_is_noted_where_nothing_reads_it(setting: str, unread: list[str], read: list[str]) -> None:
    path = setting.partition("=")[0]
    config = load_config(LAPTOP, [*unread, setting])
    assert path in {note.path for note in unread_settings(config)}
    assert path not in {note.path for note in unread_settings(load_config(LAPTOP, [*read, setting]))}
    assert path not in {note.path for note in unread_settings(load_config(LAPTOP, unread))}, "not at its default"


def test_every_rule_is_tried() -> None:
    assert {path for rule in _RULES for path in rule.paths} == {case[0].partition("=")[0] for case in CASES}


def test_a_config_that_was_written_out_has_the_same_notes(tmp_path: Path) -> None:
    config = load_config(LAPTOP, ["critic.timeout_s=60"])
    (tmp_path / "whole.yaml").write_text(dump_config(config))
    found = unread_settings(config)
    assert [note.path for note in found] == ["critic.timeout_s"] and "colocated" in found[0].reason
    assert unread_settings(load_config(tmp_path / "whole.yaml")) == found


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_config_that_is_shipped_sets_what_nothing_reads(path: Path) -> None:
    assert unread_settings(load_config(path)) == []
