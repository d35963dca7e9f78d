"""Fail fast: every node is checked, all at once, before anything starts.

Invariants (tests assert them):
- every problem names its node; a node that gave no report is a problem too;
- the check ends within its bound, whatever a node does;
- of facts that differ, the nodes in the minority are named, with what the others have.
"""

import json
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.fleet import FleetLayout
from megasao.config.rundir import Endpoints, RunDirectory, write_atomically
from megasao.launch.process import Guardian, RoleProcess, describe_exit, tail
from megasao.slurm.allocation import Allocation
from megasao.slurm.plan import CONTROLLER, CRITIC, ROLLOUT, TRAINER, JobPlan
from megasao.slurm.report import OPERATORS, PORTS, SGLANG, Expected, NodeReport, expected_path, read_reports
from megasao.slurm.site import Site
from megasao.slurm.steps import Steps

LARGEST_SKEW_S = 5.0
_POLL_S = 0.1
_LOG_LINES = 15
_SGLANG_SHARE = 0.8
"""Of the time of a check, what SGLang has to answer: a node whose SGLang does not must still say so."""


def check_nodes(
    run: RunDirectory,
    plan: JobPlan,
    site: Site,
    allocation: Allocation,
    steps: Steps,
    guardian: Guardian,
    *,
    timeout_s: float,
) -> list[NodeReport]:
    """Check every node of the job at once; their reports. UserError naming each node that cannot be used, and why."""
    nonce = _ask(run, plan, site, steps.config, timeout_s)
    roles = [steps.check(index) for index in range(len(plan.components))]
    codes = _run([RoleProcess(role, guardian) for role in roles], timeout_s)
    reports = read_reports(run, nonce)
    problems = [*_silent(allocation, reports), *problems_of(reports)]
    if not problems:
        return reports
    for role, code in zip(roles, codes, strict=True):
        if code != 0:
            how = describe_exit(code) if code is not None else f"not ended within {timeout_s:g} s"
            problems.append(f"{role.name}: {how}; the last lines of {role.log}:\n{tail(role.log, _LOG_LINES)}")
    raise UserError("\n".join(["the nodes of this job cannot run it:", *(f"  {problem}" for problem in problems)]))


def endpoints_of(reports: list[NodeReport]) -> Endpoints:
    """Where the run's sockets are: the controller's on its node, a separate critic's on that of its rank 0, the others
    on that of trainer rank 0."""
    controller, first = (_first(reports, component) for component in (CONTROLLER, TRAINER))
    return Endpoints(
        controller=f"tcp://{_host(controller.address)}:{controller.ports[0]}",
        weights=f"tcp://{_host(first.address)}:{first.ports[1]}",
        torch_host=first.address,
        torch_port=first.ports[2],
        critic=_address_of_critic(reports),
    )


def with_servers(
    endpoints: Endpoints, reports: list[NodeReport], fleet: FleetLayout, names: Sequence[str]
) -> Endpoints:
    """``endpoints`` and the addresses of SGLang servers; ``names`` are those of all of them, in order."""
    nodes = [report for report in reports if report.component == ROLLOUT]
    engines: dict[str, str] = {}
    meetings: dict[str, str] = {}
    followers: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        place = fleet.place(index)
        here = [nodes[node] for node in place.nodes]
        engines[name], *others = [_server_url(node, place.slot) for node in here]
        if others:
            meetings[name] = f"{_host(here[0].address)}:{here[0].ports[PORTS + 1]}"
            followers[name] = others
    return replace(endpoints, engines=engines, meetings=meetings, followers=followers)


def _server_url(node: NodeReport, slot: int) -> str:
    return f"http://{_host(node.address)}:{node.ports[PORTS + slot]}"


def meeting_ports(reports: list[NodeReport]) -> dict[str, int]:
    """Where the ranks of each stage meet; one each, as the kernel may still hold that of the stage before."""
    ports = dict(zip(("trainer", "sft", "value"), _first(reports, TRAINER).ports[2:], strict=True))
    critic = [report for report in reports if report.component == CRITIC]
    return ports | (dict(zip(("critic", "value"), critic[0].ports[2:], strict=False)) if critic else {})


def _address_of_critic(reports: list[NodeReport]) -> str:
    if not any(report.component == CRITIC for report in reports):
        return ""
    first = _first(reports, CRITIC)
    return f"tcp://{_host(first.address)}:{first.ports[1]}"


def problems_of(reports: list[NodeReport]) -> list[str]:
    """What nodes say of themselves, and in what they differ from most others."""
    found = [f"{report.node}: {problem}" for report in reports for problem in report.problems]
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        those = [report for report in reports if _has(report.component, name)]
        values = Counter(report.facts.get(name, "unknown") for report in those)
        usual, count = values.most_common(1)[0]
        for report in those:
            if (value := report.facts.get(name, "unknown")) != usual:
                found.append(f"{report.node}: {name} {value}, but {usual} on {count} of {len(those)} nodes")
    clocks = sorted(report.clock_s for report in reports)
    for report in reports:
        if abs(skew := report.clock_s - clocks[len(clocks) // 2]) > LARGEST_SKEW_S:
            found.append(f"{report.node}: its clock differs by {skew:.1f} s from most others")
    return found


def _has(component: int, fact: str) -> bool:
    """Whether nodes of a component must know a fact."""
    return {SGLANG: component == ROLLOUT, OPERATORS: component != CONTROLLER}.get(fact, True)


def _ask(run: RunDirectory, plan: JobPlan, site: Site, config: Config, timeout_s: float) -> str:
    """Write what is expected, in place of what an earlier launch left; its nonce."""
    directory = expected_path(run).parent
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)  # a node that hangs may hold a file there; the nonce tells them apart
    gpus = [component.gpus_per_node for component in plan.components]
    expected = Expected(secrets.token_hex(8), site.interface, site.ipv6, gpus)
    if plan.fleet is not None:
        options = config.rollout.sglang.model_dump()
        expected = replace(
            expected,
            server_ports=plan.fleet.ports_on_node,
            sglang=options,
            sglang_timeout_s=_SGLANG_SHARE * timeout_s,
        )
    write_atomically(expected_path(run), json.dumps(asdict(expected)))
    return expected.nonce


def _run(processes: list[RoleProcess], timeout_s: float) -> list[int | None]:
    """Exit codes, None of what had to be ended."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.ask()
        for process in processes:
            process.kill()


def _silent(allocation: Allocation, reports: list[NodeReport]) -> list[str]:
    """Nodes without a report."""
    heard = {(report.component, report.node) for report in reports}
    return [
        f"{node}: gave no report"
        for index, share in enumerate(allocation.shares)
        for node in share.nodes
        if (index, node) not in heard
    ]


def _first(reports: list[NodeReport], component: int) -> NodeReport:
    return next(report for report in reports if report.component == component and report.index == 0)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
