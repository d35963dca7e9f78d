"""What a role removes when it starts: weights on its node, of servers that were killed together with their launcher."""

import subprocess
import sys
from pathlib import Path

from megasao.config import Config
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.launch.prepare import prepared_run
from megasao.weights.ownership import clear_abandoned
from tests.conversion.support import write_family

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop_sglang.yaml"
NAME, SIBLING = "engine-0-0", "engine-0-evaluation"
SERVE = """
import sys
from pathlib import Path
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.rollout.server_weights import NodeReceiver

run = RunDirectory(Path(sys.argv[1]))
config = load_config(run.config)
receiver = NodeReceiver(run, config, sys.argv[2], sys.argv[2])
(run.node_weights(config, sys.argv[2]) / "7.abc").mkdir()
print("there", flush=True)
sys.stdin.read()
receiver.close()
"""


def serving(run: RunDirectory, name: str) -> "subprocess.Popen[bytes]":
    """A process that takes the weights of a server and has a version."""
    command = [sys.executable, "-c", SERVE, str(run.path), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    return process


def a_run(tmp_path: Path, name: str, transport: str) -> tuple[RunDirectory, Config]:
    """A run whose launcher is gone."""
    settings = [f"model.path={tmp_path / 'hf'}", f"run.directory={tmp_path}", f"run.name={name}", "sft=null"]
    settings += ["rollout.sglang.python=/bin/false", f"weights.transport={transport}"]
    config = load_config(LAPTOP, settings)
    with prepared_run(config, resume=False) as run:
        return run, config


def test_a_role_of_any_run_gives_the_memory_of_its_node_back(tmp_path: Path) -> None:
    """Also one that keeps no weights there itself; what a living server has stays."""
    write_family(tmp_path / "hf", "llama", "float32")
    (killed, config), (other, _) = a_run(tmp_path, "killed", "distributed"), a_run(tmp_path, "other", "disk")
    left, sibling = (killed.node_weights(config, name) for name in (NAME, SIBLING))
    dead, alive = (serving(killed, name) for name in (NAME, SIBLING))
    try:
        dead.kill()
        dead.wait()
        role = [sys.executable, "-m", "megasao", "engine", "--run", str(other.path)]
        ended = subprocess.run(role, capture_output=True, text=True, timeout=300)
        assert "ServerDied" in ended.stderr, "it only begins"
        # A role of any other run on this machine may have been first.
        assert not left.exists() and (sibling / "7.abc").is_dir()
        alive.communicate()
        assert not left.parent.exists()
    finally:
        for process in (dead, alive):
            process.kill()
            process.communicate()
        clear_abandoned(left.parent.parent)
