"""What a run asks of a cluster: rendered plans of the big configs, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasao.config.errors import ConfigError, UserError
from megasao.config.load import load_config
from megasao.config.sglang import SGLangConfig
from megasao.rollout.engines.sglang_arguments import check_server_args
from megasao.slurm.allocation import Allocation, Share, gpus_per_node, refuse_what_does_not_fit
from megasao.slurm.check import endpoints_of, meeting_ports
from megasao.slurm.command import describe
from megasao.slurm.plan import CRITIC, TRAINER, JobPlan, component_of, node_of_worker, plan_job
from megasao.slurm.report import PORTS, NodeReport
from megasao.slurm.site import read_site, refuse_missing_plugin
from megasao.slurm.stages import host_of
from tests.engines.sglang_server import needs_sglang, sglang_config

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
QWEN = ROOT / "configs" / "qwen3_30b_a3b.yaml"
GLM = ROOT / "configs" / "glm_5_2_750b.yaml"
GLM_4_7 = ROOT / "configs" / "glm_4_7_355b.yaml"
EMBEDDED = ["rollout.engine=embedded", "rollout.sglang.server_args={}"]
PYTHON = {"MEGASAO_PYTHON": sys.executable, "MEGASAO_INTERFACE": "eth0"}


@pytest.mark.parametrize("name", ["glm_5_2_750b", "qwen3_30b_a3b"])
def test_the_rendered_plan_is_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To renew a file: megasao slurm configs/NAME.yaml > tests/slurm/golden/NAME.txt, and read the difference."""
    monkeypatch.chdir(ROOT)
    text = describe(load_config(f"configs/{name}.yaml"), "plan", {})
    assert text + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    other = describe(load_config(f"configs/{name}.yaml", ["slurm.cpus_per_rank=3"]), "plan", {})
    assert other != text, "the plan does not show what a process gets"


CONTAINERS = {
    "pyxis": {
        "MEGASAO_STEP_PYTHON": "/opt/megasao/bin/python",
        "MEGASAO_SRUN_ARGS": "--container-image=/shared/megasao.sqsh --container-mounts=/shared:/shared",
    },
    "apptainer": {
        "MEGASAO_STEP_PYTHON": "/opt/megasao/bin/python",
        "MEGASAO_STEP_COMMAND": "apptainer exec --nv --bind /shared '/shared/the image.sif'",
    },
}


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_the_steps_of_containers_are_as_before(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the files PYTHON and DIRECTORY stand for those of this test, which renews them with RENEW=1."""
    monkeypatch.chdir(ROOT)
    site = {**PYTHON, **CONTAINERS[runtime], "PATH": "/usr/bin", "MEGASAO_PARTITION": "gpu"}
    text = describe(load_config("configs/qwen3_30b_a3b.yaml"), "plan", site)
    outside = [line for line in text.splitlines() if sys.executable in line]
    assert outside == [], "a step would run on the Python outside of the container"
    golden = GOLDEN / f"qwen3_30b_a3b-{runtime}.txt"
    if os.environ.get("RENEW"):
        golden.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == golden.read_text(encoding="utf-8")


def test_a_missing_plugin_is_told_by_name() -> None:
    site = read_site({**PYTHON, **CONTAINERS["pyxis"]})
    builtin = "      --container=path        Path to OCI container bundle\n"
    pyxis = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n      --container-mounts=SRC:DST[:FLAGS]\n"
    refuse_missing_plugin(site, lambda: builtin + pyxis)
    refuse_missing_plugin(read_site({**PYTHON, **CONTAINERS["apptainer"]}), lambda: builtin)
    with pytest.raises(UserError, match=r"does not know --container-image, --container-mounts: the plugin pyxis"):
        refuse_missing_plugin(site, lambda: builtin)
    with pytest.raises(UserError, match=r"does not know --container-mounts: "):
        refuse_missing_plugin(site, lambda: builtin + pyxis.splitlines()[0])


def test_the_script_asks_for_the_nodes_of_its_default_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = (ROOT / "slurm" / "glm_scale.sh").read_text(encoding="utf-8")
    given = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "\n".join(given) == describe(load_config("configs/glm_5_2_750b.yaml"), "header", {})
    assert "set -- configs/glm_5_2_750b.yaml" in script


def test_every_process_has_its_place() -> None:
    changes = ["rollout.workers=6", "slurm.rollout_nodes=3", "plan.rollout_gpus=24"]
    plan = plan_job(load_config(QWEN, [*EMBEDDED, *changes]))
    controller, trainer, rollout = plan.components
    assert (controller.tasks, trainer.tasks, rollout.tasks) == (1, 16, 6)
    assert (trainer.gpus_per_task, rollout.gpus_per_task) == (1, 4)
    assert [node_of_worker(plan, index) for index in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_separate_critic_has_nodes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(QWEN, ["critic.placement=separate", "critic.parallel={ranks: 24, expert: 8}"])
    plan = plan_job(config)
    assert [each.name for each in plan.components] == ["controller", "trainer", "rollout", "critic"]
    critic = plan.components[CRITIC]
    assert (critic.nodes, critic.tasks, critic.gpus_per_task) == (3, 24, 1)
    assert [component_of(plan, stage) for stage in ("trainer", "sft", "critic", "value")] == [
        TRAINER,
        TRAINER,
        CRITIC,
        CRITIC,
    ]
    assert component_of(plan_job(load_config(QWEN)), "value") == TRAINER
    steps = [line for line in describe(config, "plan", {}).splitlines() if line.startswith("srun ")]
    [ranks] = [line for line in steps if "--job-name=critic " in line]
    assert "--het-group=3 " in ranks and "--ntasks=24 " in ranks and " critic --run " in ranks
    assert "--het-group=1 " in next(line for line in steps if "--job-name=trainer " in line)


def report(component: int, index: int, address: str, first_port: int) -> NodeReport:
    ports = list(range(first_port, first_port + PORTS))
    return NodeReport(f"n{component}{index}", component, "nonce", index, address, ports)


def test_where_a_separate_critic_is() -> None:
    """Its sockets and its ranks' meeting are on its own first node, also those of value pretraining."""
    reports = [report(0, 0, "10.0.0.1", 100), report(1, 0, "10.0.0.2", 200), report(2, 0, "10.0.0.3", 300)]
    assert endpoints_of(reports).critic == "" and "critic" not in meeting_ports(reports)
    reports += [report(3, 0, "fd00::4", 400), report(3, 1, "fd00::5", 500)]
    found = endpoints_of(reports)
    assert (found.critic, found.weights) == ("tcp://[fd00::4]:401", "tcp://10.0.0.2:201")
    assert (host_of(found.critic), host_of(found.weights), host_of("")) == ("fd00::4", "10.0.0.2", "")
    assert meeting_ports(reports) == {"trainer": 202, "sft": 203, "critic": 402, "value": 403}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (["slurm.ranks_per_node=3"], "slurm.ranks_per_node"),
        (["slurm.ranks_per_node=16"], "slurm.ranks_per_node"),
        (
            [
                *("parallel.ranks=8", "parallel.pipeline=1", "slurm.ranks_per_node=16"),
                *("critic.placement=separate", "critic.parallel={ranks: 16}"),
            ],
            "slurm.ranks_per_node",
        ),
        ([*EMBEDDED, "rollout.workers=3", "slurm.rollout_nodes=2", "plan.rollout_gpus=16"], "slurm.rollout_nodes"),
        ([*EMBEDDED, "rollout.workers=9"], "slurm.rollout_nodes"),
        ([*EMBEDDED, "slurm.nodes_per_server=2"], "slurm.nodes_per_server"),
        ([*EMBEDDED, "weights.transport=embedded"], "weights.transport"),
        (["rollout.sglang.servers=4"], "slurm.rollout_nodes"),
        (["rollout.sglang.servers=2", "slurm.rollout_nodes=2", "plan.rollout_gpus=16"], "slurm.rollout_nodes"),
        (["rollout.sglang.server_args.tp_size=4", "plan.engine_gpus=4"], "slurm.rollout_nodes"),
        (["rollout.sglang.server_args.tp_size=16", "plan.rollout_gpus=0"], "slurm.nodes_per_server"),
        (["plan.engine_gpus=4"], "plan.engine_gpus"),
        (["rollout.sglang.first_port=9000"], "rollout.sglang.first_port"),
        (["rollout.sglang.server_args.tp_size=many"], "rollout.sglang.server_args.tp_size"),
        (["rollout.sglang.server_args.dp_size=0"], "rollout.sglang.server_args.dp_size"),
        (["rollout.sglang.server_args.pp_size=1.5"], "rollout.sglang.server_args.pp_size"),
        (["rollout.sglang.server_args.nnodes=2"], "rollout.sglang.server_args.nnodes"),
        (["rollout.sglang.server_args.api_key=mine"], "rollout.sglang.server_args.api_key"),
        (["plan.rollout_gpus=16"], "slurm.rollout_nodes"),
        (["slurm.time_limit_minutes=15"], "slurm.leave_before_limit_s"),
        (["slurm.memory=much"], "slurm.memory"),
        (["critic.placement=separate", "critic.parallel.ranks=12"], "slurm.ranks_per_node"),
    ],
)
def test_nodes_that_cannot_work_are_refused_at_load(changes: list[str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QWEN, changes)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["slurm.nodes_per_server=2", "slurm.rollout_nodes=16", "plan.rollout_gpus=128"], "2 nodes have 16 GPUs"),
        (["slurm.nodes_per_server=5", "slurm.rollout_nodes=40", "plan.rollout_gpus=320"], "no whole number on each"),
        (["rollout.sglang.servers=6"], "of 4 nodes each need 28 nodes, got 32"),
    ],
)
def test_servers_of_several_nodes_have_them_whole(changes: list[str], reason: str) -> None:
    load_config(GLM)
    with pytest.raises(ConfigError) as caught:
        load_config(GLM, changes)
    assert any(reason in problem.reason for problem in caught.value.problems), caught.value.problems


def test_every_server_has_its_place() -> None:
    spread = ["rollout.workers=3", "rollout.sglang.servers=3", "slurm.rollout_nodes=3", "plan.rollout_gpus=24"]
    plan = plan_job(load_config(QWEN, spread))
    assert plan.fleet is not None and plan.components[2].tasks == 3
    assert [(plan.fleet.place(index).nodes, plan.fleet.place(index).slot) for index in range(12)] == [
        ((node,), slot) for node in range(3) for slot in range(4)
    ]
    assert [node_of_worker(plan, index) for index in range(3)] == [0, 1, 2]
    assert plan.components[2].cpus_per_task == 4 * 8 + 8, "of a node: four servers and a worker"
    crowded = plan_job(load_config(QWEN, ["rollout.workers=2", "rollout.sglang.servers=1"]))
    assert [node_of_worker(crowded, index) for index in range(2)] == [0, 0]
    assert crowded.components[2].cpus_per_task == 4 * 8 + 2 * 8

    large = plan_job(load_config(GLM, ["rollout.workers=2", "rollout.sglang.servers=3"]))
    assert large.fleet is not None and (large.fleet.gpus_on_node, large.fleet.ports_on_node) == (8, 2)
    used = [node for index in range(8) for node in large.fleet.place(index).nodes]
    assert used == list(range(32)), "every node has one part of one server"
    assert [node_of_worker(large, index) for index in range(2)] == [0, 16]


@pytest.mark.parametrize(
    ("server_args", "gpus"),
    [
        ({}, 1),
        ({"tp_size": 8, "ep_size": 8}, 8),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"tp_size": 4, "dp_size": 2}, 8),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 8, "mem_fraction_static": "much"}, 8),
    ],
)
def test_gpus_of_a_server(server_args: dict[str, object], gpus: int) -> None:
    assert SGLangConfig(server_args=server_args).gpus_of_server() == gpus


@needs_sglang
def test_the_servers_of_the_big_configs_are_what_sglang_takes() -> None:
    arguments = [load_config(path).rollout.sglang.server_args for path in (QWEN, GLM, GLM_4_7)]
    assert {*arguments[0], *arguments[2]} <= set(arguments[1]), "one question is enough"
    answer = check_server_args(sglang_config(server_args=arguments[1]))
    assert (answer["unknown"], answer["error"], answer["version"]) == ([], None, "0.5.23")


def test_a_config_without_nodes_is_told_how() -> None:
    with pytest.raises(UserError, match=r"slurm\.rollout_nodes=1"):
        describe(load_config(ROOT / "configs" / "laptop.yaml"), "plan", {})
    with pytest.raises(UserError, match="MEGASAO_PYTHON"):
        describe(load_config(GLM), "plan", {"MEGASAO_STEP_COMMAND": "apptainer exec a.sif"})


def share(component: int, plan: JobPlan, **changes: object) -> Share:
    part = plan.components[component]
    nodes = tuple(f"n{component}{index}" for index in range(part.nodes))
    values = {"job": "7", "nodes": nodes, "cpus": part.tasks * part.cpus_per_task, "gpus_per_node": part.gpus_per_node}
    return Share(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("component", "changes", "lack"),
    [
        (1, {"nodes": ("a",)}, "trainer: 1 nodes, the config needs 2"),
        (1, {"gpus_per_node": 4}, "trainer: 4 GPUs a node, the config needs 8"),
        (2, {"cpus": 3}, "rollout: 3 CPUs, the config needs 40"),
        (0, {"nodes": ("a", "b")}, "controller: 2 nodes, the config has use for 1"),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused(component: int, changes: dict[str, object], lack: str) -> None:
    plan = plan_job(load_config(QWEN))
    good = [share(index, plan) for index in range(3)]
    refuse_what_does_not_fit(plan, Allocation("7", tuple(good), 0), remedy="ask for more")
    good[component] = share(component, plan, **changes)
    with pytest.raises(UserError, match="ask for more") as caught:
        refuse_what_does_not_fit(plan, Allocation("7", tuple(good), 0), remedy="ask for more")
    assert lack in str(caught.value)
    with pytest.raises(UserError, match="1 components instead of 3"):
        refuse_what_does_not_fit(plan, Allocation("7", tuple(good[:1]), 0), remedy="ask for more")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gres:gpu:2", 2),
        ("gres:gpu:h100:8", 8),
        ("gres/gpu=4", 4),
        ("gres:gpu:2,gres:shard:4", 2),
        ("", 0),
        ("cpu:8", 0),
    ],
)
def test_gpus_in_what_slurm_says(text: str, count: int) -> None:
    assert gpus_per_node(text) == count


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MEGASAO_INTERFCE": "x"}, "did you mean MEGASAO_INTERFACE"),
        ({"MEGASAO_PYTHON": "/nowhere/python"}, "is no program"),
        ({"MEGASAO_INTERFACE": ""}, "MEGASAO_INTERFACE is empty"),
        ({"MEGASAO_ADDRESS_FAMILY": "ipx"}, "expected ipv4 or ipv6"),
        ({"MEGASAO_SRUN_ARGS": "'x"}, "cannot be split"),
        ({"MEGASAO_STEP_COMMAND": "env 'x"}, "cannot be split"),
        ({"MEGASAO_EXPORT": "A-B"}, "no name of a variable"),
    ],
)
def test_a_wrong_site_is_refused(changes: dict[str, str], reason: str) -> None:
    assert read_site(PYTHON).step_python == sys.executable
    with pytest.raises(UserError, match=r"site\.env") as caught:
        read_site({**PYTHON, **changes})
    assert reason in str(caught.value)


def test_the_site_shows_in_the_arguments() -> None:
    site = {
        **PYTHON,
        "MEGASAO_PARTITION": "gpu",
        "MEGASAO_CONTROLLER_PARTITION": "cpu",
        "MEGASAO_ACCOUNT": "us",
        "MEGASAO_SBATCH_ARGS": "--qos=high --comment='two words'",
        "MEGASAO_SRUN_ARGS": "--container-image=image.sqsh",
        "MEGASAO_EXPORT": "NCCL_IB_HCA",
        "NCCL_IB_HCA": "mlx5",
    }
    config = load_config(QWEN)
    arguments = describe(config, "arguments", site).splitlines()
    assert [word for word in arguments if word.startswith("--partition")] == [
        "--partition=cpu",
        "--partition=gpu",
        "--partition=gpu",
    ]
    assert arguments.count("--account=us") == arguments.count("--comment=two words") == 3
    steps = [line for line in describe(config, "plan", site).splitlines() if line.startswith("srun ")]
    assert steps and all("--container-image=image.sqsh" in line and "NCCL_IB_HCA" in line for line in steps)


def test_the_plan_needs_no_torch() -> None:
    code = "import sys\nfrom megasao.slurm import command, job, node\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=400)
