"""The role that serves: a real server as the launcher starts it, on IPv6 and on two nodes, and who gets an answer."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from engine_checkpoints import MAX_TOTAL, Reference, load_tensors, make_checkpoint, moe_config, perturb, save_tensors
from sglang_server import PYTHON, START_S, ask, needs_sglang

from megasao.config import Config
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.launch.ports import free_ports
from megasao.launch.prepare import prepared_run
from megasao.launch.roles import megasao_command
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.server import own_part
from megasao.transport.keys import load_server_key

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop_sglang.yaml"
FIRST = "engine-0-0"
IPV6 = os.path.exists("/proc/net/if_inet6")


@dataclass
class Served:
    """A run of which one server is up; ``processes`` are its roles, one a node."""

    run: RunDirectory
    config: Config
    checkpoint: Path
    processes: list[subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        return self.run.read_endpoints().engines[FIRST]

    @property
    def logs(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self.run.logs.iterdir()))

    def wait(self) -> "Served":
        deadline = time.monotonic() + START_S
        while ask(self.url, "/health_generate") != 200:
            assert all(process.poll() is None for process in self.processes), self.logs[-4000:]
            assert time.monotonic() < deadline, self.logs[-4000:]
            time.sleep(0.3)
        return self

    def close(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def serve(checkpoint: Path, directory: Path, hosts: Sequence[str], *overrides: str) -> Served:
    """Start the run's first server with a node on each of ``hosts``."""
    config = load_config(
        LAPTOP,
        [
            f"model.path={checkpoint}",
            f"run.directory={directory}",
            f"rollout.sglang.python={PYTHON}",
            "sft=null",
            f"environment.max_tokens={MAX_TOTAL}",
            f"trainer.token_budget={2 * MAX_TOTAL}",
            *overrides,
        ],
    )
    with prepared_run(config, resume=False) as run:
        urls = [f"http://{host}:{free_ports(1, host.strip('[]'))[0]}" for host in hosts]
        endpoints = replace(run.read_endpoints(), engines={FIRST: urls[0]})
        if len(hosts) > 1:
            meeting = f"{hosts[0]}:{free_ports(1, hosts[0])[0]}"
            endpoints = replace(endpoints, followers={FIRST: urls[1:]}, meetings={FIRST: meeting})
        run.write_endpoints(endpoints)
        processes = []
        for rank in range(len(hosts)):
            with (run.logs / f"{FIRST}.{rank}.log").open("ab") as log:
                processes.append(
                    subprocess.Popen(
                        megasao_command(run)("engine", 0),
                        env=os.environ | {"SLURM_PROCID": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
    return Served(run, config, checkpoint, processes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that logs all it can."""
    host = "[::1]" if IPV6 else "127.0.0.1"
    running = serve(checkpoint, tmp_path_factory.mktemp("runs"), [host], "rollout.sglang.server_args={log_level: info}")
    try:
        yield running.wait()
    finally:
        running.close()


CALLS = [
    ("/model_info", False),
    ("/server_info", False),
    ("/v1/models", False),
    ("/generate", True),
    ("/abort_request", True),
    ("/pause_generation", True),
    ("/continue_generation", True),
    ("/flush_cache", True),
    ("/update_weights_from_disk", True),
    ("/init_weights_update_group", True),
    ("/update_weights_from_distributed", True),
    ("/update_weights_from_tensor", True),
    ("/get_weights_by_name", True),
]


@needs_sglang
def test_a_stranger_gets_nothing_from_a_server(served: Served) -> None:
    key, other = load_server_key(served.run.keys), "x" * 43
    for path, post in CALLS:
        for wrong in (None, other, "", key[:-1], key + " "):
            if wrong != key + " ":  # blanks around a header's value are no part of it
                assert ask(served.url, path, wrong, post=post) == 401, (path, wrong)
        assert ask(served.url, path, key, post=post) != 401, path
    assert ask(served.url, "/model_info", key) == 200
    assert ask(served.url, "/health_generate") == 200, "this one is open"


@needs_sglang
def test_the_key_is_in_one_file_only(served: Served) -> None:
    key = load_server_key(served.run.keys)
    holders = [file for file in served.run.path.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    assert holders == [served.run.keys / "sglang.key"] and stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert "server_args=" in served.logs and "***" in served.logs, "it did not log what would have had the key in it"
    tree = [psutil.Process(process.pid) for process in served.processes]
    tree += [child for process in tree for child in process.children(recursive=True)]
    assert len(tree) > 2 and not [process for process in tree if key in " ".join(process.cmdline())]


def play(served: Served, directory: Path) -> None:
    """Log-probs are those of the checkpoint, and of other weights once those are loaded."""
    key, ids = load_server_key(served.run.keys), [3, 1, 4, 1, 5]
    changed = perturb(load_tensors(served.checkpoint), 3)

    async def body() -> tuple[list[float], ...]:
        engine = SGLangEngine(
            served.url,
            served.checkpoint,
            served.config.rollout.sglang,
            staging=directory / "weights",
            max_total_tokens=MAX_TOTAL,
            seed=0,
            start_timeout_s=60.0,
            update_timeout_s=60.0,
            key=key,
        )
        await engine.start()
        try:
            found = []
            after = save_tensors(served.checkpoint, directory / "changed", changed)
            for version, path in enumerate((served.checkpoint, after)):
                if version:
                    await engine.prepare_weights(version, changed)
                    await engine.commit_weights(version)
                result = await engine.generate(GenerateRequest(str(version), "s", ids, SamplingParams(1.0, 40)))
                assert result.weight_versions == [(0, version)] and result.logprobs is not None
                found += [result.logprobs, Reference(path).logprobs(ids, result.output_ids, 1.0).tolist()]
            return tuple(found)
        finally:
            await engine.close()

    before, expected, after, expected_after = asyncio.run(asyncio.wait_for(body(), 120))
    assert before == pytest.approx(expected, abs=5e-5) and after == pytest.approx(expected_after, abs=5e-5)
    assert after != pytest.approx(expected[: len(after)], abs=1e-2), "the same tokens under any weights"


@needs_sglang
def test_a_friend_samples_and_updates(served: Served, tmp_path: Path) -> None:
    assert ("[::1]" in served.url) is IPV6
    play(served, tmp_path)


@needs_sglang
@pytest.mark.full
def test_a_server_spans_two_nodes(checkpoint: Path, tmp_path: Path) -> None:
    """Each node has one of two tensor parallel ranks; the second one alone is not a server."""
    running = serve(checkpoint, tmp_path, ["127.0.0.1", "127.0.0.2"], "rollout.sglang.server_args={tp_size: 2}")
    try:
        play(running.wait(), tmp_path)
        worlds = [json.loads((running.run.engine(name) / "args.json").read_text()) for name in (FIRST, f"{FIRST}.1")]
        assert [(world["nnodes"], world["node_rank"]) for world in worlds] == [(2, 0), (2, 1)]
        (other,) = running.run.read_endpoints().followers[FIRST]
        key = load_server_key(running.run.keys)
        assert ask(other, "/health") == 200 and ask(other, "/generate", key, post=True) == 404
        os.killpg(running.processes[1].pid, signal.SIGKILL)
        assert running.processes[0].wait(120) != 0, "half of a server is none"
    finally:
        running.close()


def test_a_server_that_the_run_does_not_have(tmp_path: Path) -> None:
    config = load_config(LAPTOP, [f"run.directory={tmp_path}"])
    with prepared_run(config, resume=False) as run:
        endpoints = run.read_endpoints()
    assert own_part(endpoints, FIRST, {"SLURM_PROCID": "3"}).world == {}, "its launcher runs inside a step of Slurm's"
    with pytest.raises(ValueError, match="it has engine-0-0, engine-0-evaluation"):
        own_part(endpoints, "engine-7-0", {})
