"""Config files laid over one another, and the presets of the algorithms: each loads, and is what it says."""

from pathlib import Path
from typing import Any

import pytest

from megasao.config import Config
from megasao.config.errors import ConfigError
from megasao.config.load import dump_config, is_overlay, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
LAPTOP = CONFIGS / "laptop.yaml"

PRESETS: dict[str, dict[str, Any]] = {
    "sao": {"objective": "dis", "advantages": "skip_observation_gae", "logprobs": True, "k": 2, "frozen": True},
    "sao_k1": {"objective": "dis", "advantages": "skip_observation_gae", "logprobs": True, "k": 1, "frozen": True},
    "sao_full_critic": {
        "objective": "dis",
        "advantages": "skip_observation_gae",
        "logprobs": True,
        "k": 2,
        "frozen": False,
    },
    "sao_no_skip": {"objective": "dis", "advantages": "gae", "logprobs": True, "k": 2, "frozen": True},
    "sao_running_mean": {"objective": "dis", "advantages": "running_mean", "logprobs": True},
    "vapo": {"objective": "ppo_clip", "advantages": "skip_observation_gae", "logprobs": True, "k": 1, "frozen": False},
    "grpo": {"objective": "ppo_clip", "advantages": "group", "logprobs": True, "group": 8},
    "grpo_dis": {"objective": "dis", "advantages": "group", "logprobs": True, "group": 8},
    "naive": {"objective": "naive", "advantages": "group", "logprobs": False, "group": 8, "denominator": "sequences"},
    "gpg": {"objective": "gpg", "advantages": "group", "logprobs": False, "group": 8},
    "spo": {"objective": "spo", "advantages": "group", "logprobs": False, "group": 8, "denominator": "sequences"},
    "asympo": {"objective": "asympo", "advantages": "group", "logprobs": False, "group": 8, "denominator": "sequences"},
}


def preset(name: str, *more: str) -> Config:
    return load_config(LAPTOP, [str(CONFIGS / "algorithms" / f"{name}.yaml"), *more])


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in (CONFIGS / "algorithms").glob("*.yaml")} == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_it_says(name: str) -> None:
    expected, config = PRESETS[name], preset(name)
    assert config.algorithm.objective.name == expected["objective"]
    assert config.algorithm.advantages.name == expected["advantages"]
    assert config.wants_logprobs == expected["logprobs"]
    assert config.algorithm.denominator == expected.get("denominator", "action_tokens")
    assert config.loop.group_size == expected.get("group", 1)
    if "k" in expected:
        critic = config.value_model
        assert (critic.updates_per_actor_update, critic.freeze_attention) == (expected["k"], expected["frozen"])
        assert critic.optimizer.lr == load_config(LAPTOP).value_model.optimizer.lr, "what a preset leaves out stays"
        assert config.warmup_steps == 10
    else:
        assert config.critic is None and config.warmup_steps == 0
    assert config.loop.steps == load_config(LAPTOP).loop.steps


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_run_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(preset(name)), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == preset(name)


def test_the_laptop_config_is_sao() -> None:
    assert preset("sao") == load_config(LAPTOP)


def test_the_sglang_config_is_the_laptop_run_with_another_engine() -> None:
    ours, theirs = (load_config(CONFIGS / name).model_dump() for name in ("laptop_sglang.yaml", "laptop.yaml"))
    assert ours["rollout"]["engine"] == "sglang"
    ours["run"]["name"] = theirs["run"]["name"]
    for section in ("rollout", "supervision"):
        del ours[section], theirs[section]
    assert ours == theirs


def overlay(directory: Path, text: str) -> str:
    path = directory / "over.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_sections_merge_and_the_last_word_wins(tmp_path: Path) -> None:
    over = overlay(tmp_path, "loop:\n  steps: 50\nalgorithm:\n  objective:\n    eps_low: 0.5\n")
    before = load_config(LAPTOP)
    config = load_config(LAPTOP, ["loop.steps=40", over, "loop.max_lag=2"])
    assert (config.loop.steps, config.loop.max_lag, config.loop.batch_size) == (50, 2, before.loop.batch_size)
    assert (config.algorithm.objective.eps_low, config.algorithm.objective.eps_high) == (0.5, 3.0)
    assert load_config(LAPTOP, [over, "loop.steps=40"]).loop.steps == 40


def test_another_kind_of_objective_takes_nothing_over_from_the_old_one(tmp_path: Path) -> None:
    over = overlay(tmp_path, "algorithm:\n  objective:\n    name: ppo_clip\n  allow_uncorrected: true\n")
    objective = load_config(LAPTOP, [over]).algorithm.objective
    assert (objective.name, objective.eps_low, objective.eps_high) == ("ppo_clip", 0.2, 0.2)


def problems(*changes: str) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config(LAPTOP, list(changes))
    return [(problem.where, problem.path, problem.reason) for problem in caught.value.problems]


def test_errors_name_the_file_and_line_that_they_come_from(tmp_path: Path) -> None:
    text = "# first line\nloop:\n  steps: few\n  bach_size: 8\nalgorithm:\n  objective: {name: spo, eps_low: 1}\n"
    over = overlay(tmp_path, text)
    found = {(where, path) for where, path, _ in problems(over, "trainer.token_budget=lots")}
    assert found == {
        (f"{over}:3", "loop.steps"),
        (f"{over}:4", "loop.bach_size"),
        (f"{over}:6", "algorithm.objective.eps_low"),
        ("override 'trainer.token_budget=lots'", "trainer.token_budget"),
    }


def test_an_impossible_combination_points_at_the_layer_that_made_it(tmp_path: Path) -> None:
    over = overlay(tmp_path, "loop:\n  group_size: 7\n  batch_size: 8\n")
    [(where, path, reason)] = problems(over)
    assert (where, path) == (f"{over}:3", "loop.batch_size") and "no whole number of groups" in reason
    over = overlay(tmp_path, "critic: null\n")
    [(where, path, reason)] = problems(over)
    assert (where, path) == (f"{over}:1", "critic") and "needs a value model" in reason


def test_a_broken_or_absent_overlay_is_named(tmp_path: Path) -> None:
    over = overlay(tmp_path, "loop:\n  steps: 50\n  steps: 60\n")
    assert [(where, path) for where, path, _ in problems(over)] == [(f"{over}:3", "loop.steps")]
    [(where, _, reason)] = problems(str(tmp_path / "absent.yaml"))
    assert where.endswith("absent.yaml") and reason == "no such file"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a.yaml", True),
        ("dir=1/a.yml", True),
        ("model.path=a.yaml", False),
        ("loop.steps=3", False),
        ("loop.steps", False),
    ],
)
def test_what_is_a_file(word: str, expected: bool) -> None:
    assert is_overlay(word) is (expected if word != "dir=1/a.yml" else False), "a path with = needs ./ before it"
    assert is_overlay(f"./{word}") is word.endswith((".yaml", ".yml"))


PRETRAINING = "{trajectories: [x], steps: 9, optimizer: {lr: 1e-3}}"
REFUSED = [
    (["critic=null", "algorithm.advantages={name: group}"], "algorithm.advantages.name", "every advantage is 0"),
    (["algorithm.objective={name: ppo_clip}"], "algorithm.objective.name", "corrects nothing"),
    (["rollout.logprobs=never"], "rollout.logprobs", "needs the log-probs"),
    (["algorithm.objective={name: asympo}"], "algorithm.denominator", "use sequences"),
    (["algorithm.objective={name: gpg}", "algorithm.denominator=accepted_tokens"], "algorithm.denominator", "has none"),
    (["algorithm.advantages={name: running_mean}"], "critic", "has no use for a value model"),
    (
        ["algorithm.advantages={name: running_mean}", "critic=null", f"value_pretraining={PRETRAINING}"],
        "value_pretraining",
        "no value model to pretrain",
    ),
    ([f"value_pretraining={PRETRAINING}", "critic.path=x"], "critic.path", "take one of them out"),
    ([f"value_pretraining={PRETRAINING}", "value_pretraining.steps=0"], "value_pretraining.steps", "greater than 0"),
    (["loop.group_size=5"], "loop.batch_size", "no whole number of groups"),
]


@pytest.mark.parametrize(("changes", "path", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_work_is_refused_at_load(changes: list[str], path: str, reason: str) -> None:
    [(_, found, why)] = problems(*changes)
    assert found == path and reason in why


def test_what_makes_it_right() -> None:
    assert load_config(LAPTOP, ["algorithm.objective={name: ppo_clip}", "loop.mode=sync"])
    assert load_config(LAPTOP, ["algorithm.objective={name: ppo_clip}", "algorithm.allow_uncorrected=true"])
    assert load_config(LAPTOP, ["rollout.logprobs=always"]).wants_logprobs
    assert preset("asympo", "rollout.logprobs=always").wants_logprobs
    assert preset("grpo", "loop.batch_size=16", "loop.partial_groups=shrink").loop.group_size == 8
