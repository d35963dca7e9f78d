"""What the check of a node finds out: one JSON file a node, written by it, read by the launcher."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasao.config.rundir import RunDirectory, write_atomically

PORTS = 5
"""Free ports that each node offers: for the controller, for weights, and for the rendezvous of each stage's ranks."""
SGLANG = "sglang"
"""A fact that only rollout nodes have."""
OPERATORS = "compiled operators"
"""A fact that the controller's node has not."""


@dataclass(frozen=True)
class Expected:
    """What the launcher asks of every node; in the run directory, so that a node without it is noticed."""

    nonce: str
    interface: str
    ipv6: bool
    gpus: list[int]
    """GPUs of a node, by component."""
    server_ports: int = 0
    """Ports that a rollout node offers beside those of every node, for SGLang servers; 0 where there are none."""
    sglang: dict[str, Any] | None = None
    """The section rollout.sglang, whose SGLang a rollout node is asked about; None where no servers run."""
    sglang_timeout_s: float = 0.0
    """How long that may take."""


@dataclass(frozen=True)
class NodeReport:
    """One node. ``facts`` must be the same everywhere; ``problems`` must be none."""

    node: str
    component: int
    nonce: str
    index: int
    """Its place among the nodes of its component, in the order in which Slurm counts tasks."""
    address: str = ""
    ports: list[int] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    clock_s: float = 0.0
    """Its clock minus that of the file system's server, seconds."""
    problems: list[str] = field(default_factory=list)


def expected_path(run: RunDirectory) -> Path:
    """Where the launcher writes what it expects."""
    return run.path / "nodes" / "expected.json"


def report_path(run: RunDirectory, component: int, node: str) -> Path:
    """Where ``node`` writes its report."""
    return run.path / "nodes" / f"{component}-{node}.json"


def write_report(run: RunDirectory, report: NodeReport) -> None:
    """Write a node's report."""
    write_atomically(report_path(run, report.component, report.node), json.dumps(asdict(report), indent=2))


def read_reports(run: RunDirectory, nonce: str) -> list[NodeReport]:
    """The reports of this launch, by component and place."""
    files = (run.path / "nodes").glob("[0-9]-*.json")
    reports = [NodeReport(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    found = [report for report in reports if report.nonce == nonce]
    return sorted(found, key=lambda report: (report.component, report.index))
