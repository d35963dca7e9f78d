"""The check of the nodes: what a node says of itself, and what the launcher makes of it."""

import dataclasses
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from megasao.config.errors import UserError
from megasao.config.fleet import FleetLayout
from megasao.config.rundir import RunDirectory
from megasao.launch.world import world_of_srun
from megasao.ops import extension
from megasao.rollout.server import own_part
from megasao.slurm import node
from megasao.slurm.check import LARGEST_SKEW_S, endpoints_of, meeting_ports, problems_of, with_servers
from megasao.slurm.node import LEAST_FILES, check_node, interface_address
from megasao.slurm.report import Expected, NodeReport, expected_path, read_reports
from megasao.slurm.stages import first_dead_task, last_words
from megasao.transport.endpoints import bind_router, connect_dealer
from megasao.transport.keys import CurveKeys
from tests.engines.sglang_server import needs_sglang, sglang_config

GOOD = Expected(nonce="abc", interface="lo", ipv6=False, gpus=[0, 0, 0])


def ask(directory: Path, expected: Expected = GOOD) -> RunDirectory:
    """A run directory in which the launcher has asked."""
    run = RunDirectory(directory)
    expected_path(run).parent.mkdir(exist_ok=True)
    expected_path(run).write_text(json.dumps(dataclasses.asdict(expected)))
    return run


def test_a_good_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ask(tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("SLURM_PROCID", "3")
    report = check_node(run, 1)
    assert report.problems == [] and (report.node, report.component, report.index) == ("n7", 1, 3)
    assert report.address == "127.0.0.1" and len(set(report.ports)) == 5 and abs(report.clock_s) < LARGEST_SKEW_S
    assert report.facts["torch"] not in ("", "not installed")
    assert (report.facts["compiled operators"] == "not built") is not extension.FILE.is_file()
    assert read_reports(run, "abc") == [report]
    assert read_reports(run, "of another launch") == []
    assert sorted(file.name for file in (tmp_path / "nodes").iterdir()) == ["1-n7.json", "expected.json"]
    assert "compiled operators" not in check_node(run, 0).facts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interface": "ib9"}, "no network interface 'ib9'; there are"),
        ({"gpus": [99, 99, 99]}, "the config asks for 99"),
    ],
)
def test_a_bad_node_says_why_and_still_reports(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    run = ask(tmp_path, dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert [reason in problem for problem in check_node(run, 1).problems] == [True]
    assert len(read_reports(run, "abc")) == 1


def test_a_damaged_file_of_operators_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "_fused.abi3.so"
    damaged.write_bytes(b"\x7fELF and nothing more")
    monkeypatch.setattr(extension, "FILE", damaged)
    monkeypatch.setattr(extension, "load_extension", extension.load_extension.__wrapped__)
    [problem] = check_node(ask(tmp_path), 1).problems
    assert problem.startswith("the compiled operators do not load: ") and damaged.name in problem


def test_operators_of_another_version_are_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale() -> extension.Extension:
        raise RuntimeError("operator megasao::new does not exist")

    monkeypatch.setattr(extension, "FILE", Path(__file__))
    monkeypatch.setattr(extension, "load_extension", stale)
    problem = "the compiled operators do not load: operator megasao::new does not exist"
    assert check_node(ask(tmp_path), 1).problems == [problem]
    assert check_node(ask(tmp_path), 0).problems == [], "the controller has no use for them"


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files(tmp_path: Path) -> None:
    with open_files(LEAST_FILES - 1):
        assert any("ulimit -n" in problem for problem in check_node(ask(tmp_path), 0).problems)


def test_too_few_free_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasao.launch.ports._TRIES", 3)
    [problem] = check_node(ask(tmp_path), 0).problems
    assert problem.startswith("only ") and "of 5 free ports found on 127.0.0.1" in problem


def test_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_node(ask(tmp_path), 0)
    now = time.time
    monkeypatch.setattr(node.time, "time", lambda: now() + 100.0)
    wrong = check_node(ask(tmp_path), 1)
    assert 95 < wrong.clock_s < 110 and abs(right.clock_s) < LARGEST_SKEW_S
    others = [dataclasses.replace(right, node="a"), dataclasses.replace(right, node="b")]
    [problem] = problems_of([*others, wrong])
    assert problem.startswith(f"{wrong.node}: its clock differs by ")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """On a real read-only mount."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    run = ask(tmp_path)
    check = [sys.executable, "-m", "megasao", "slurm-node", "--run", str(run.path), "--component", "0"]
    environment = {**os.environ, "SLURMD_NODENAME": "n7", "COLUMNS": "300"}
    done = []
    for mount in ("--ro-bind", "--bind"):
        command = ["bwrap", "--dev-bind", "/", "/", mount, str(run.path), str(run.path), *check]
        done.append(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400))
    assert (done[0].returncode, done[1].returncode) == (2, 0), done
    assert "n7 cannot write into the run directory: " in done[0].stderr and "Read-only" in done[0].stderr
    assert done[1].stdout == "n7: as it should be\n"


def test_a_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not on a file system that all nodes share"):
        check_node(RunDirectory(tmp_path), 0)


def test_an_interface_that_is_down_or_lacks_the_family_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no network interface"):
        interface_address("nothing0", ipv6=False)
    for name, state in psutil.net_if_stats().items():
        if not state.isup and name in psutil.net_if_addrs():
            with pytest.raises(OSError, match=f"the network interface '{name}' is down"):
                interface_address(name, ipv6=False)
    only_ipv4 = {"lo": [entry for entry in psutil.net_if_addrs()["lo"] if entry.family == socket.AF_INET]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: only_ipv4)
    assert interface_address("lo", ipv6=False) == "127.0.0.1"
    with pytest.raises(OSError, match="the network interface 'lo' has no IPv6 address"):
        interface_address("lo", ipv6=True)
    monkeypatch.undo()
    if os.path.exists("/proc/net/if_inet6"):
        assert interface_address("lo", ipv6=True) == "::1"


def reports(**changes: object) -> list[NodeReport]:
    """Three nodes; ``changes`` are those of the second."""
    facts = {"python": "3.11.7", "msgspec": "0.19.0"}
    good = [
        NodeReport(f"n{index}", index, "abc", 0, f"10.0.0.{index}", [5000, 5001, 5002, 5003, 5004], facts)
        for index in range(3)
    ]
    good[1] = dataclasses.replace(good[1], **changes)  # type: ignore[arg-type]
    return good


def replace_fact(node: NodeReport, name: str, value: str) -> NodeReport:
    return dataclasses.replace(node, facts={**node.facts, name: value})


def test_nodes_that_differ_are_named() -> None:
    assert problems_of(reports()) == []
    other = {"python": "3.11.7", "msgspec": "0.18.0"}
    assert problems_of(reports(facts=other)) == ["n1: msgspec 0.18.0, but 0.19.0 on 2 of 3 nodes"]
    assert problems_of(reports(facts={"python": "3.11.7"})) == ["n1: msgspec unknown, but 0.19.0 on 2 of 3 nodes"]
    for name in ("python", "torch"):
        differs = [replace_fact(node, name, "a" if node.node == "n1" else "b") for node in reports()]
        assert problems_of(differs) == [f"n1: {name} a, but b on 2 of 3 nodes"]
    assert problems_of(reports(clock_s=LARGEST_SKEW_S - 1)) == []
    assert problems_of(reports(clock_s=9.0)) == ["n1: its clock differs by 9.0 s from most others"]
    assert problems_of(reports(problems=["it is on fire"])) == ["n1: it is on fire"]


def test_the_sockets_of_a_run() -> None:
    endpoints = endpoints_of(reports())
    assert endpoints.controller == "tcp://10.0.0.0:5000" and endpoints.weights == "tcp://10.0.0.1:5001"
    assert (endpoints.torch_host, endpoints.torch_port) == ("10.0.0.1", 5002)
    assert meeting_ports(reports()) == {"trainer": 5002, "sft": 5003, "value": 5004}
    assert endpoints_of(reports(address="fd00::2")).weights == "tcp://[fd00::2]:5001"


def test_the_addresses_of_servers() -> None:
    """Two nodes, first with two servers each, then with one server on both."""
    ports = list(range(6000, 6007))
    here = [*reports()[:2], *(NodeReport(f"r{index}", 2, "abc", index, f"fd00::{index}", ports) for index in range(2))]
    names = ["engine-0-0", "engine-0-1", "engine-0-2", "engine-0-evaluation"]
    each = with_servers(endpoints_of(here), here, FleetLayout(1, 4, 2, 1, 4), names)
    assert each.controller == endpoints_of(here).controller and (each.meetings, each.followers) == ({}, {})
    urls = [f"http://[fd00::{node}]:{port}" for node in range(2) for port in (6005, 6006)]
    assert each.engines == dict(zip(names, urls, strict=True))

    both = with_servers(endpoints_of(here), here, FleetLayout(1, 1, 2, 2, 16), names[:1])
    assert both.engines == {names[0]: "http://[fd00::0]:6005"}
    assert both.followers == {names[0]: ["http://[fd00::1]:6005"]} and both.meetings == {names[0]: "[fd00::0]:6006"}
    first, second = (own_part(both, names[0], {"SLURM_PROCID": rank}) for rank in ("0", "1"))
    assert (first.role, first.url) == (names[0], both.engines[names[0]])
    assert (second.role, second.url) == (f"{names[0]}.1", both.followers[names[0]][0])
    assert first.world == {"nnodes": 2, "node_rank": 0, "dist_init_addr": "[fd00::0]:6006"}
    assert second.world == {**first.world, "node_rank": 1}


def test_operators_of_another_build_are_told() -> None:
    here = [*reports(), NodeReport("r3", 2, "abc", 1, "10.0.0.3", [], reports()[2].facts)]
    here[1:] = [replace_fact(node, "compiled operators", "abc") for node in here[1:]]
    assert problems_of(here) == [], "the controller has no use for them"
    here[2] = replace_fact(here[2], "compiled operators", "not built")
    assert problems_of(here) == ["n2: compiled operators not built, but abc on 2 of 3 nodes"]


def test_only_rollout_nodes_have_an_sglang() -> None:
    here = [*reports(), NodeReport("r3", 2, "abc", 1, "10.0.0.3", [], reports()[2].facts)]
    facts = {**here[2].facts, "sglang": "0.5.23"}
    here[2:] = [dataclasses.replace(node, facts=facts) for node in here[2:]]
    assert problems_of(here) == []
    here[3] = dataclasses.replace(here[3], facts={**facts, "sglang": "0.5.22"})
    assert problems_of(here) == ["r3: sglang 0.5.22, but 0.5.23 on 1 of 2 nodes"]


@needs_sglang
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"server_args": {"tp_sizes": 2}}, "SGLang 0.5.23 does not know these server_args: tp_sizes"),
        ({"python": "/nowhere/python"}, "rollout.sglang.python: /nowhere/python cannot be asked for its SGLang"),
        ({"python": sys.executable}, "has no working SGLang"),
    ],
)
def test_a_node_is_asked_for_its_sglang(tmp_path: Path, options: dict[str, object], reason: str | None) -> None:
    asked = {**sglang_config().model_dump(), **options}
    run = ask(tmp_path, dataclasses.replace(GOOD, server_ports=3, sglang=asked, sglang_timeout_s=120.0))
    report = check_node(run, 2)
    assert len(set(report.ports)) == 8
    assert [reason in problem for problem in report.problems] == ([True] if reason else [])
    assert report.facts["sglang"] == ("none" if "python" in options else "0.5.23")
    if reason is None:
        trainer = check_node(run, 1)
        assert "sglang" not in trainer.facts and len(trainer.ports) == 5


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_sockets_carry_ipv6(tmp_path: Path) -> None:
    report = check_node(ask(tmp_path, dataclasses.replace(GOOD, ipv6=True)), 0)
    address, keys = f"tcp://[{report.address}]:{report.ports[0]}", CurveKeys.generate()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = bind_router(context, address, high_water_mark=4, keys=keys)
    dealer = connect_dealer(context, address, identity=b"w", high_water_mark=4, keys=keys)
    dealer.send(b"hello")
    assert router.poll(60_000) and router.recv_multipart() == [b"w", b"hello"]
    router.close()
    dealer.close()
    context.term()


def test_the_world_of_a_task() -> None:
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "99"}
    assert world_of_srun(task) == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    assert world_of_srun({**task, "RANK": "0"}) == {} == world_of_srun({})


def test_the_last_words_of_a_rank_begin_with_its_error(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert last_words(log).splitlines() == [f"line {number}" for number in range(70, 100)]
    stack = [f'  File "x.py", line {number}' for number in range(80)]
    log.write_text("\n".join(["before", "Traceback (most recent call last)", "Fatal Python error: Aborted", *stack]))
    assert last_words(log).splitlines() == ["Fatal Python error: Aborted", *stack]
    log.write_text("Fatal Python error: Aborted\nshort\n")
    assert last_words(log) == "Fatal Python error: Aborted\nshort"


def test_the_rank_that_died_first() -> None:
    earlier = "--- 2026 trainer, start 1: srun\nsrun: error: n1: task 7: Killed\n"
    now = "--- 2026 trainer, start 2: srun\nsrun: error: n3: task 12: Exited with exit code 3\n"
    after = "srun: error: n1: tasks 0-3: Terminated\n"
    assert first_dead_task(earlier + now + after) == 12 and first_dead_task(earlier) == 7
    assert first_dead_task("--- 2026 trainer, start 1: srun\nsrun: Force Terminated StepId=2.5\n") is None
