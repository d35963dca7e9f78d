"""The check of one node, run there as a task of its own: everything that can be wrong with it, at once.

Invariant: a report is written whatever is wrong, as long as the run directory is there; nothing here ends with an
exception that a broken node could cause.
"""

import hashlib
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

import megasao
from megasao.config.errors import UserError
from megasao.config.rundir import RunDirectory
from megasao.config.sglang import SGLangConfig
from megasao.launch.about import PACKAGES, installed_version
from megasao.launch.ports import free_ports
from megasao.slurm.plan import CONTROLLER, ROLLOUT
from megasao.slurm.report import OPERATORS, PORTS, SGLANG, Expected, NodeReport, expected_path, write_report

LEAST_FILES = 1024
"""Open files that a process must be allowed: sockets of a large world."""
_IMPORTED_TOO = ("numpy", "safetensors", "tokenizers", "jinja2", "triton", "transformer-engine", "deep-ep")
"""Beside what `megasao info` shows; where there is none of a package on any node, that is the same too."""
Value = TypeVar("Value")
_FAMILIES = {False: socket.AF_INET, True: socket.AF_INET6}


def check_node(run: RunDirectory, component: int) -> NodeReport:
    """Check this node and write its report. UserError where the run directory is not the launcher's."""
    try:
        expected = Expected(**json.loads(expected_path(run).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{expected_path(run)} is not there on {node_name()}: the run directory is not on a file system that all "
            "nodes share"
        ) from None
    problems: list[str] = []
    servers = component == ROLLOUT and expected.sglang is not None
    count = PORTS + (expected.server_ports if servers else 0)
    address = _found(problems, lambda: interface_address(expected.interface, ipv6=expected.ipv6), "")
    report = NodeReport(
        node=node_name(),
        component=component,
        nonce=expected.nonce,
        index=int(os.environ.get("SLURM_PROCID", "0")),
        address=address,
        ports=_found(problems, lambda: free_ports(count, address), []) if address else [],
        facts={
            **facts(),
            **({OPERATORS: _operators()} if component != CONTROLLER else {}),
            **(_sglang(expected, problems) if servers else {}),
        },
        clock_s=_found(problems, lambda: clock_offset_s(run), 0.0),
        problems=[*problems, *_limits(), *_torch(component, expected.gpus[component])],
    )
    try:
        write_report(run, report)
    except OSError as error:
        raise UserError(f"{node_name()} cannot write into the run directory: {error}") from error
    return report


def _sglang(expected: Expected, problems: list[str]) -> dict[str, str]:
    """The version of the SGLang that servers on this node would be; what keeps it from serving goes to ``problems``."""
    from megasao.rollout.engines.sglang_arguments import check_server_args

    options = SGLangConfig.model_validate(expected.sglang)
    try:
        answer = check_server_args(options, timeout_s=expected.sglang_timeout_s)
    except ValueError as error:
        problems.append(f"rollout.sglang.python: {error}")
        return {SGLANG: "none"}
    if answer["unknown"]:
        problems.append(f"SGLang {answer['version']} does not know these server_args: {', '.join(answer['unknown'])}")
    elif answer["error"] is not None:
        problems.append(f"SGLang {answer['version']} does not take rollout.sglang.server_args: {answer['error']}")
    return {SGLANG: answer["version"]}


def node_name() -> str:
    """Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def facts() -> dict[str, str]:
    """What must be the same on every node: the versions of Python and of what a role imports."""
    found = {"megasao": megasao.__version__, "python": platform.python_version()}
    return found | {name: installed_version(name) for name in (*PACKAGES, *_IMPORTED_TOO)}


def _operators() -> str:
    """The first digits of the checksum of the compiled operators' file."""
    file = Path(megasao.__file__).with_name("_fused.abi3.so")
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except FileNotFoundError:
        return "not built"


def interface_address(interface: str, *, ipv6: bool) -> str:
    """The first address of ``interface`` that other nodes can use. OSError where there is none."""
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise OSError(f"no network interface {interface!r}; there are {', '.join(sorted(interfaces))}")
    if not psutil.net_if_stats()[interface].isup:
        raise OSError(f"the network interface {interface!r} is down")
    found = [entry.address for entry in interfaces[interface] if entry.family == _FAMILIES[ipv6]]
    usable = [address for address in found if not address.startswith("fe80:")]
    if not usable:
        raise OSError(f"the network interface {interface!r} has no {'IPv6' if ipv6 else 'IPv4'} address")
    return usable[0]


def clock_offset_s(run: RunDirectory) -> float:
    """This node's clock minus the file server's, seconds; writing shows that the directory can be written."""
    probe = run.path / "nodes" / f".clock-{node_name()}-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        return time.time() - probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _found(problems: list[str], find: Callable[[], Value], otherwise: Value) -> Value:
    """What ``find`` finds; a failure becomes a problem."""
    try:
        return find()
    except OSError as error:
        problems.append(str(error))
        return otherwise


def _limits() -> Iterator[str]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        yield f"a process may open {files} files, at least {LEAST_FILES} are needed; raise it with ulimit -n"


def _torch(component: int, gpus: int) -> Iterator[str]:
    """What torch finds; the controller has no use for it."""
    if component == CONTROLLER:
        return
    import torch

    from megasao.ops.extension import FILE, load_extension

    try:
        problem = load_extension().problem
    except RuntimeError as error:  # operators of another version than the Python that calls them
        problem = str(error)
    if FILE.is_file() and problem is not None:
        yield f"the compiled operators do not load: {problem}"
    if gpus and (seen := torch.cuda.device_count()) < gpus:
        yield f"torch sees {seen} GPUs, the config asks for {gpus}"
