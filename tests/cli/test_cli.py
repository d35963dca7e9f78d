"""The command line as a user sees it: a process, its exit code, its messages."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megasao.cli import Stage, _resuming
from megasao.config.load import dump_config, load_config
from megasao.launch.prepare import prepared_run
from megasao.launch.roles import has_nvidia_device
from tests.checkpoints import write_checkpoint

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"
PRETRAINING = LAPTOP.parent / "stages" / "value_pretraining.yaml"


def megasao(*arguments: str | Path, columns: int = 200) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "megasao", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "COLUMNS": str(columns)},
    )


def model(directory: Path) -> str:
    """A whole checkpoint directory without tensors, as an override."""
    write_checkpoint(directory)
    return f"model.path={directory}"


def test_check_accepts_the_shipped_config() -> None:
    result = megasao("check", LAPTOP)
    assert result.returncode == 0, result.stderr
    assert "is valid" in result.stdout


def test_a_stage_that_was_stopped_goes_on_by_its_own_command() -> None:
    """And not with all of the run, which nobody asked for."""
    commands = [shlex.split(_resuming(stage, Path("a b.yaml"), ["loop.steps=4"])) for stage in Stage]
    assert [command[1] for command in commands] == ["sft", "pretrain-value", "train"]
    for _, name, *rest in commands:
        assert rest == ["a b.yaml", "loop.steps=4", "--resume"]
        assert "--resume" in megasao(name, "--help").stdout


def test_check_notes_what_is_set_and_not_read() -> None:
    result = megasao("check", LAPTOP, "critic.timeout_s=60", "rollout.sglang.servers=2")
    notes = [line for line in result.stdout.splitlines() if "nothing reads it here" in line]
    assert result.returncode == 0 and len(notes) == 2, result.stderr
    assert notes[0].startswith("note: critic.timeout_s is set") and notes[1].startswith("note: rollout.sglang.servers")
    assert "nothing reads" not in megasao("check", LAPTOP).stdout


def test_check_of_a_cluster_config_needs_no_sglang_here() -> None:
    elsewhere = "rollout.sglang.python=/nowhere/python"
    result = megasao("check", LAPTOP.with_name("qwen3_30b_a3b.yaml"), elsewhere)
    assert result.returncode == 0 and "is valid" in result.stdout, result.stderr
    result = megasao("check", LAPTOP.with_name("laptop_sglang.yaml"), elsewhere)
    assert result.returncode == 2 and "/nowhere/python cannot be asked for its SGLang" in result.stderr


def test_check_print_loads_back_equal(tmp_path: Path) -> None:
    result = megasao("check", LAPTOP, "loop.steps=40", "--print")
    assert result.returncode == 0
    assert "# Trajectories per step." in result.stdout
    path = tmp_path / "shown.yaml"
    path.write_text(result.stdout)
    assert load_config(path) == load_config(LAPTOP, ["loop.steps=40"])


def test_a_user_error_is_one_clean_message_in_full_lines(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(LAPTOP.read_text().replace("max_lag:", "max_leg:"))
    result = megasao("check", path, columns=40)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "max_leg" in text)
    assert f"{path}:{line}: loop.max_leg: unknown key; did you mean loop.max_lag?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "absent.yaml"], "no such file"),
        (["check", str(LAPTOP), "environment.name=calculater"], "did you mean 'calculator'?"),
        (["check", str(LAPTOP), "environment.options.no_such=1"], "environment.options.no_such"),
        (["check", str(LAPTOP), "environment.name=tool"], "sft: environment tool: it has no demonstrations"),
        (["check", str(LAPTOP), "observability.wandb_project=x"], "wandb is not installed"),
        (["check", str(LAPTOP), "model.transformer_impl=transformer_engine"], "transformer_engine is not installed"),
        (["check", str(LAPTOP), "buffer.max_bytes=1000"], "buffer.max_bytes: 1000 cannot hold one batch"),
        (["train", str(LAPTOP), "model.path=absent"], "model.path = absent does not exist; give the directory of a"),
        (["train", str(LAPTOP), "critic.path=absent"], "critic.path: absent is no value model"),
        (
            ["pretrain-value", str(LAPTOP), str(PRETRAINING)],
            "value_pretraining.trajectories: missing, and it has no default",
        ),
        (["check", str(LAPTOP), str(PRETRAINING), "value_pretraining.trajectories=[absent]"], "absent does not exist"),
        (["check", str(LAPTOP), str(PRETRAINING), "value_pretraining.trajectories=[]"], "at least 1 item"),
        (["controller", "--run", "absent"], "is not a run directory"),
        (["report", "absent"], "is not a run directory"),
    ],
)
def test_user_errors(arguments: list[str], message: str) -> None:
    package = message.partition(" is not installed")[0]
    if package != message and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    result = megasao(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_model_that_is_not_there_is_all_that_is_said(command: str, tmp_path: Path) -> None:
    result = megasao(command, "configs/laptop.yaml", f"model.path={tmp_path}")
    assert result.returncode == 2
    assert "planning needs the model's config.json" in result.stderr and "Warning" not in result.stderr


def test_preflight_problems_carry_their_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = dump_config(
        load_config(LAPTOP, [model(tmp_path / "model"), "parallel.tensor=2", "parallel.expert_tensor=2"])
    )
    path.write_text(text)
    line = next(i for i, text in enumerate(text.splitlines(), 1) if text.startswith("  sequence:"))
    result = megasao("check", path)
    assert result.returncode == 2
    assert f"{path}:{line}: parallel.sequence: a mixture of experts" in result.stderr


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "{}", "model_type = None is not supported"),
        ("model.safetensors", "", "its header does not fit into its 0 bytes"),
        ("tokenizer.json", '{"version"', "not a tokenizer file"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path, file: str, text: str, message: str
) -> None:
    override = model(tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    result = megasao("train", LAPTOP, f"run.directory={tmp_path}", override)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and str(tmp_path / "model" / file) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "laptop").exists()


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "small", vocab_size=10)
    assert "vocab_size = 10" in megasao("check", LAPTOP, f"model.path={tmp_path / 'small'}").stderr
    write_checkpoint(tmp_path / "other", without_token="7")
    assert "has no token for '7'" in megasao("check", LAPTOP, f"model.path={tmp_path / 'other'}").stderr


def test_prompts_that_leave_no_room_to_answer_are_refused(tmp_path: Path) -> None:
    changes = [model(tmp_path / "model"), "environment.max_turn_tokens=4"]
    result = megasao("check", LAPTOP, *changes, "environment.max_tokens=5")
    assert "environment.max_tokens: the shortest of the first 32 prompts has" in result.stderr, result.stderr
    assert megasao("check", LAPTOP, *changes, "environment.max_tokens=30").returncode == 0


@pytest.mark.skipif(has_nvidia_device(), reason="this machine has a GPU")
def test_what_only_a_gpu_can_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    gpus = ["parallel.dispatcher=flex", "megatron.optimizer={optimizer_cpu_offload: true}"]
    result = megasao("train", LAPTOP, f"run.directory={tmp_path}", model(tmp_path / "model"), *gpus)
    assert result.returncode == 2 and "2 problems" in result.stderr, result.stderr
    assert "parallel.dispatcher: flex needs a GPU" in result.stderr
    assert "megatron.optimizer.optimizer_cpu_offload: True needs a GPU" in result.stderr
    assert not (tmp_path / "laptop").exists()
    without = ["parallel.dispatcher=allgather", "megatron.optimizer={optimizer_cpu_offload: false}"]
    assert megasao("check", LAPTOP, *without).returncode == 0
    assert megasao("check", LAPTOP.with_name("glm_5_2_750b.yaml"), *gpus).returncode == 0, "its nodes have GPUs"


def test_summaries_that_the_tokenizer_cannot_ask_for_are_refused(tmp_path: Path) -> None:
    changes = [model(tmp_path / "model"), "environment.compaction.summary_tokens=50", "trainer.token_budget=8192"]
    assert "environment.compaction: the tokenizer has no token for" in megasao("check", LAPTOP, *changes).stderr
    changes += [
        "environment.compaction.request=<result>",
        "environment.compaction.resume=<result>{summary}{observation}</result>",
    ]
    assert megasao("check", LAPTOP, *changes).returncode == 0
    changes += [
        "environment.max_tokens=20",
        "environment.max_turn_tokens=10",
        "environment.compaction.summary_tokens=10",
    ]
    assert "tokens and more; environment.max_tokens = 20" in megasao("check", LAPTOP, *changes).stderr


def test_an_existing_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "config.yaml").write_text("")
    result = megasao("train", LAPTOP, f"run.directory={tmp_path}", model(tmp_path / "model"))
    assert result.returncode == 2
    assert "--resume" in result.stderr


def test_a_report_of_a_run_without_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(LAPTOP)))
    result = megasao("report", tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert str(tmp_path) in result.stderr


def test_sft_without_a_section_is_refused(tmp_path: Path) -> None:
    result = megasao("sft", LAPTOP, f"run.directory={tmp_path}", model(tmp_path / "model"), "sft=null")
    assert result.returncode == 2
    assert "no section sft" in result.stderr
    assert not (tmp_path / "laptop").exists()


def test_a_worker_index_beyond_the_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(LAPTOP)))
    result = megasao("rollout", "--run", tmp_path, "--index", "1")
    assert result.returncode == 2
    assert "rollout.workers = 1" in result.stderr


def test_an_unexpected_error_keeps_its_traceback(tmp_path: Path) -> None:
    code = (
        "import megasao.cli, megasao.config.load, sys\n"
        "def broken(*a, **k): raise RuntimeError('our own mistake')\n"
        "megasao.config.load.load_with_places = broken\n"
        f"sys.argv = ['megasao', 'check', {str(LAPTOP)!r}]\nmegasao.cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "our own mistake" in result.stderr


def test_check_does_not_import_torch() -> None:
    code = (
        "import sys, megasao.cli\n"
        f"sys.argv = ['megasao', 'check', {str(LAPTOP)!r}]\n"
        "try:\n    megasao.cli.main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'zmq') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_info_names_versions_and_what_would_be_used() -> None:
    result = megasao("info")
    assert result.returncode == 0, result.stderr
    for name in ("torch", "megatron-core", "transformers", "pyarrow", "pyzmq", "cuda", "transformer_impl", "ops"):
        assert name in result.stdout
    assert "plain torch reference" in result.stdout or "fused: CPU" in result.stdout


def test_a_cluster_job_is_shown_in_one_form() -> None:
    result = megasao("slurm", LAPTOP, "slurm.rollout_nodes=1", "--arguments", "--header")
    assert result.returncode == 2 and "give one of them" in result.stderr


def test_a_server_that_is_added_or_removed_has_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(LAPTOP)))
    result = megasao("engine", "--run", tmp_path, "--index", "1", "--add", "0")
    assert result.returncode == 2 and "--index 1 is of the launcher's servers" in result.stderr


@pytest.mark.parametrize("change", [["--add", "0"], ["--remove", "engine-0-1"], []])
def test_servers_of_a_run_that_was_never_launched(tmp_path: Path, change: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(LAPTOP, ["rollout.engine=sglang"])))
    result = megasao("engine", "--run", tmp_path, *change)
    assert result.returncode == 2 and "was never launched" in result.stderr


@pytest.mark.parametrize("role", ["controller", "rollout"])
def test_a_role_of_a_run_without_addresses_says_so_in_a_line(tmp_path: Path, role: str) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(LAPTOP)))
    result = megasao(role, "--run", tmp_path)
    assert result.returncode == 2 and "was never launched" in result.stderr
    for damaged in ("{", '{"controller": 1}'):
        (tmp_path / "endpoints.json").write_text(damaged)
        result = megasao(role, "--run", tmp_path)
        assert result.returncode == 2 and "endpoints.json has no addresses of a run" in result.stderr, damaged
        assert "Traceback" not in result.stderr
    assert "Traceback" not in result.stderr


def test_an_added_server_that_dies_says_so_and_is_no_server_of_the_run(tmp_path: Path) -> None:
    changes = ["rollout.engine=sglang", f"rollout.sglang.python={shutil.which('false')}", "sft=null"]
    config = load_config(LAPTOP, [f"run.directory={tmp_path}", model(tmp_path / "model"), *changes])
    with prepared_run(config, resume=False) as run:
        before = run.read_endpoints()
        result = megasao("engine", "--run", run.path, "--add", "0")
        assert result.returncode == 1 and "engine-0-1: the SGLang server ended with code 1" in result.stderr
        assert "Traceback" not in result.stderr
        assert run.read_endpoints() == before


def test_help_lists_every_command() -> None:
    result = megasao("--help")
    for command in ("check", "train", "sft", "report", "info", "controller", "rollout", "engine", "trainer"):
        assert command in result.stdout
