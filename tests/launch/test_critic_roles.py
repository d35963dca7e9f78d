"""The processes of a separate critic: its own world, and one unit with the trainer's."""

from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.launch.local import LocalRun
from megasao.launch.prepare import new_endpoints
from megasao.launch.process import Role
from megasao.launch.roles import megasao_command, worlds_of

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"
APART = ["critic.placement=separate", "parallel.ranks=2", "critic.parallel.ranks=3"]


def roles(config: Config, directory: Path, stage: str) -> list[Role]:
    run = RunDirectory(directory)
    nothing: Any = None
    local = LocalRun(run, config, megasao_command(run), nothing, nothing, nothing)
    unit = local.world(stage)
    assert unit.name == stage
    return unit.make_roles()


def test_both_worlds_are_one_unit_and_meet_apart(tmp_path: Path) -> None:
    config = load_config(LAPTOP, APART)
    found = roles(config, tmp_path, "trainer")
    assert [role.name for role in found] == ["trainer-0", "trainer-1", "critic-0", "critic-1", "critic-2"]
    assert [role.env["WORLD_SIZE"] for role in found] == ["2", "2", "3", "3", "3"]
    assert [role.env["RANK"] for role in found] == ["0", "1", "0", "1", "2"]
    assert (
        len({role.env["MASTER_PORT"] for role in found[:2]})
        == len({role.env["MASTER_PORT"] for role in found[2:]})
        == 1
    )
    assert found[0].env["MASTER_PORT"] != found[2].env["MASTER_PORT"]
    assert found[2].command[-3:] == ["critic", "--run", str(tmp_path)] and "trainer" in found[0].command
    assert new_endpoints(config).critic.startswith("tcp://127.0.0.1:")


def test_value_pretraining_runs_in_the_critics_layout(tmp_path: Path) -> None:
    config = load_config(LAPTOP, APART)
    assert [role.name for role in roles(config, tmp_path, "value")] == ["value-0", "value-1", "value-2"]
    assert [role.name for role in roles(config, tmp_path, "sft")] == ["sft-0", "sft-1"]


def test_a_colocated_critic_is_no_role(tmp_path: Path) -> None:
    config = load_config(LAPTOP, ["parallel.ranks=2"])
    assert [role.name for role in roles(config, tmp_path, "trainer")] == ["trainer-0", "trainer-1"]
    assert worlds_of(config) == ["trainer"] and new_endpoints(config).critic == ""
