"""The run directory: whose it is, what a resumed run may change, ports and keys."""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.config.rundir import Endpoints, RunDirectory, server_ports
from megasao.launch.ports import free_ports, taken_ports
from megasao.launch.prepare import new_endpoints, prepared_run
from megasao.launch.roles import child_environment, megasao_command, rollout_role, trainer_roles

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"


def config(directory: Path, *overrides: str) -> Config:
    return load_config(LAPTOP, [f"run.directory={directory}", *overrides])


def test_a_fresh_run_directory(tmp_path: Path) -> None:
    wanted = config(tmp_path / "deep" / "runs")
    with prepared_run(wanted, resume=False) as run:
        assert load_config(run.config) == wanted
        endpoints = run.read_endpoints()
        assert endpoints.controller.startswith("tcp://127.0.0.1:")
        ports = {
            endpoints.controller.rpartition(":")[2],
            endpoints.weights.rpartition(":")[2],
            str(endpoints.torch_port),
        }
        assert len(ports) == 3
        assert run.logs.is_dir()
        assert not run.keys.exists()


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", Path("/proc/nowhere")):
        told = rf"the run directory {directory}.* cannot be written.*choose another run.directory"
        with pytest.raises(UserError, match=told), prepared_run(config(directory), resume=False):
            raise AssertionError("it cannot have begun")
    elsewhere = ["transport.host=192.0.2.1", "transport.curve=true"]
    with pytest.raises(UserError, match=r"transport.host = 192.0.2.1: .* is the address one of this machine"):
        new_endpoints(config(tmp_path, *elsewhere))


def test_a_server_port_that_somebody_has_is_told(tmp_path: Path) -> None:
    """And one that a connection of an ended server still holds is none."""
    port = next(port for port in free_ports(50) if not taken_ports([port, port + 1]))
    with socket.create_server(("127.0.0.1", port)) as server:
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
        wanted = config(tmp_path, "rollout.engine=sglang", f"rollout.sglang.first_port={port}")
        told = rf"first_port = {port}: another program listens on {port}; stop it"
        with pytest.raises(UserError, match=told):
            new_endpoints(wanted)
    accepted.close()
    assert new_endpoints(wanted).engines["engine-0-0"] == f"http://127.0.0.1:{port}"


def test_a_run_does_not_end_before_the_step_that_it_is_at(tmp_path: Path) -> None:
    with prepared_run(config(tmp_path), resume=False) as run:
        (run.checkpoints / "latest").write_text("step_000120")
    with (
        pytest.raises(UserError, match=r"made 120 steps, and loop.steps = 119 is less; give 120"),
        prepared_run(config(tmp_path, "loop.steps=119"), resume=True),
    ):
        raise AssertionError("it cannot have begun")
    assert load_config(run.config).loop.steps == 210, "a start that was refused wrote its config"
    with prepared_run(config(tmp_path, "loop.steps=120"), resume=True) as run:
        assert load_config(run.config).loop.steps == 120


def test_a_start_that_failed_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has a config.yaml it is no run yet, and from then on it is one that can be resumed."""
    wanted = config(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    for place in ("megasao.config.rundir.os.fsync", "megasao.config.rundir.RunDirectory.create"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with (
                pytest.raises(UserError, match="cannot be written: no space left; make room"),
                prepared_run(wanted, resume=False),
            ):
                raise AssertionError("it cannot have begun")
    with prepared_run(wanted, resume=True) as run:
        assert run.journal.is_dir()


def test_an_existing_run_is_refused_without_resume(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    with prepared_run(wanted, resume=False):
        pass
    with (
        pytest.raises(UserError, match=r"already exists; continue that run with --resume"),
        prepared_run(wanted, resume=False),
    ):
        pass
    with prepared_run(wanted, resume=True):
        pass


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "thesis.tex").write_text("important")
    for resume in (False, True):
        with pytest.raises(UserError), prepared_run(config(tmp_path), resume=resume):
            pass
    assert [path.name for path in (tmp_path / "laptop").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="not a directory"),
        prepared_run(config(tmp_path, "run.name=file"), resume=False),
    ):
        pass


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    with prepared_run(config(tmp_path), resume=False):
        pass


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"), prepared_run(config(tmp_path), resume=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_resume_may_change_what_is_safe(tmp_path: Path) -> None:
    with prepared_run(config(tmp_path), resume=False):
        pass
    changed = config(
        tmp_path,
        "loop.steps=500",
        "observability.panel=off",
        "checkpoint.every=7",
        "evaluation.problems=9",
        "benchmarks.samples=2",
        "supervision.max_restarts=1",
        "weights.transport=disk",
        "plan.rollout_gpus=16",
        "slurm.rollout_nodes=1",
        "slurm.gpus_per_node=16",
    )
    with prepared_run(changed, resume=True) as run:
        assert load_config(run.config) == changed


def test_resume_refuses_other_changes_and_names_them(tmp_path: Path) -> None:
    old = config(tmp_path)
    with prepared_run(old, resume=False) as run:
        pass
    changed = config(tmp_path, "loop.batch_size=32", "sft=null", "loop.steps=500", "run.seed=3")
    with pytest.raises(UserError) as caught, prepared_run(changed, resume=True):
        pass
    message = str(caught.value)
    assert "loop.batch_size: was 64, now 32" in message
    assert "run.seed: was 0, now 3" in message
    assert "sft: was" in message
    assert "loop.steps: was" not in message
    assert load_config(run.config) == old


def test_the_same_directory_may_be_spelled_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared_run(config(tmp_path), resume=False):
        pass
    monkeypatch.chdir(tmp_path)
    with prepared_run(config(Path(".")), resume=True):
        pass


def test_what_a_run_keeps_elsewhere_is_found_by_any_spelling_of_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be resumed by another one: its payload must not seem to be lost then."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = config(tmp_path, "buffer.payload=rollout", f"buffer.payload_directory={tmp_path}/disk")
    spelled = [tmp_path / "runs" / "laptop", Path("../runs/laptop"), tmp_path / "here" / ".." / "runs" / "laptop"]
    assert len({RunDirectory(path).payload(made, "rollout-0") for path in spelled}) == 1
    other = RunDirectory(tmp_path / "here" / "runs" / "laptop")
    assert other.payload(made, "rollout-0") != RunDirectory(spelled[0]).payload(made, "rollout-0")


def test_two_launchers_cannot_hold_one_run(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    script = (
        "import sys\nfrom megasao.config.load import load_config\nfrom megasao.launch.prepare import prepared_run\n"
        f"config = load_config({str(LAPTOP)!r}, [{f'run.directory={tmp_path}'!r}])\n"
        "with prepared_run(config, resume=False):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"another launcher \(process {other.pid}\)"),
            prepared_run(wanted, resume=True),
        ):
            pass
        threading.Timer(0.5, other.kill).start()
        with prepared_run(wanted, resume=True, lock_wait_s=120.0):  # the lock died with its holder
            pass


def test_the_sockets_may_be_placed_elsewhere(tmp_path: Path) -> None:
    elsewhere = Endpoints("tcp://10.0.0.1:1", "tcp://10.0.0.2:2", "10.0.0.2", 3)
    with prepared_run(config(tmp_path), resume=False, place=lambda run, _: elsewhere) as run:
        assert run.read_endpoints() == elsewhere


def test_keys_are_made_when_asked_for_and_kept_on_resume(tmp_path: Path) -> None:
    wanted = config(tmp_path, "transport.curve=true")
    contents = []
    for resume in (False, True):
        with prepared_run(wanted, resume=resume) as run:
            (file,) = run.keys.iterdir()
            contents.append(file.read_text())
            assert file.stat().st_mode & 0o077 == 0
    assert contents[0] == contents[1]


def test_free_ports_are_free_different_and_outside_the_outgoing_range() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert not any(low <= port <= high for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_free_ports_skip_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr("megasao.launch.ports._LOWEST", port)
    monkeypatch.setattr("megasao.launch.ports._HIGHEST", port + 1)
    monkeypatch.setattr("megasao.launch.ports._outgoing_range", lambda: (0, 0))
    assert free_ports(1) == [port]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(OSError, match="only 0 of 1 free ports"):
            free_ports(1)


def test_nobody_gets_a_port_that_a_server_will_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of servers are free until they start, and those of the run are taken before."""
    monkeypatch.setattr("megasao.launch.ports._LOWEST", 25_000)
    monkeypatch.setattr("megasao.launch.ports._HIGHEST", 25_040)
    monkeypatch.setattr("megasao.launch.ports._outgoing_range", lambda: (0, 0))
    sglang = {"first_port": 25_010, "router": "http://127.0.0.1:30100", "servers": 2, "prefill_servers": 1}
    changes = [f"rollout.sglang.{name}={value}" for name, value in sglang.items()]
    made = config(tmp_path, "rollout.engine=sglang", *changes)
    assert server_ports(made) == range(25_010, 25_014), "three servers, and where the one that prefills is met"
    for _ in range(30):
        endpoints = new_endpoints(made)
        assert [int(url.rpartition(":")[2]) for url in endpoints.engines.values()] == [25_010, 25_011, 25_012]
        own = [int(address.rpartition(":")[2]) for address in (endpoints.controller, endpoints.weights)]
        assert not {*own, endpoints.torch_port} & {*range(25_010, 25_014)}


def test_trainer_roles_form_a_world(tmp_path: Path) -> None:
    with prepared_run(config(tmp_path, "parallel.ranks=3"), resume=False) as run:
        wanted = load_config(run.config)
        roles = trainer_roles(run, wanted, megasao_command(run), stage="sft", host="127.0.0.1", port=4242)
    assert [role.env["RANK"] for role in roles] == ["0", "1", "2"]
    assert {role.env["WORLD_SIZE"] for role in roles} == {"3"}
    assert {role.env["MASTER_PORT"] for role in roles} == {"4242"}
    where = ["--run", str(run.path)]
    assert all(role.command[1:] == ["-P", "-m", "megasao", "trainer", *where, "--stage", "sft"] for role in roles)
    assert len({role.log for role in roles}) == 3


def test_child_environment_is_offline_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasao.launch.roles.has_nvidia_device", lambda: False)
    environment = child_environment(threads=2, parent={"PATH": "/bin", "RANK": "5", "OMP_NUM_THREADS": "64"})
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "RANK" not in environment
    with prepared_run(config(tmp_path, "rollout.embedded.threads=2"), resume=False) as run:
        role = rollout_role(run, load_config(run.config), megasao_command(run), 0)
    assert role.env["OMP_NUM_THREADS"] == "2"
    monkeypatch.setattr("megasao.launch.roles.has_nvidia_device", lambda: True)
    environment = child_environment(threads=2, parent={"OMP_NUM_THREADS": "64"})
    assert environment["OMP_NUM_THREADS"] == "64"
    assert "TORCHDYNAMO_DISABLE" not in environment


def test_endpoints_are_json_of_plain_data(tmp_path: Path) -> None:
    with prepared_run(config(tmp_path, "transport.host=localhost"), resume=False) as run:
        data = json.loads((run.path / "endpoints.json").read_text())
    assert set(data) == {field.name for field in fields(Endpoints)}
    assert "localhost" not in data["controller"]  # ZeroMQ binds addresses, not names
    assert os.path.exists(run.logs)


def test_a_file_of_the_users_directory_is_no_module_of_a_role(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("raise SystemExit('imported the wrong file')")
    command = megasao_command(RunDirectory(tmp_path / "absent"))("controller", 0)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert "is not a run directory" in result.stderr, result.stderr
