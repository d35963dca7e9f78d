"""Prompts and decoding on real servers of their own behind a router; keys and values go from one to the other."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_checkpoints import MAX_TOTAL, Reference, load_tensors, make_checkpoint, moe_config, perturb, save_tensors
from sglang_server import RunningServer, imports, needs_sglang, routing, sglang_config

from megasao.config.sglang import SGLangConfig
from megasao.launch.ports import free_ports
from megasao.rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.fleet import Fleet

NEEDED = ("sglang_router", "prometheus_client", "mooncake.engine")
pytestmark = [
    pytest.mark.full,
    needs_sglang,
    pytest.mark.skipif(not imports(*NEEDED), reason=f"SGLang's environment lacks one of {', '.join(NEEDED)}"),
]
LONG = 180
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Split:
    """A server for prompts, one that decodes, and a router in front of them."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        ports = free_ports(3)
        self.checkpoint, self.directory, self.router_port = checkpoint, directory, ports[2]
        self.config = SGLangConfig.model_validate(
            {
                **sglang_config().model_dump(),
                "servers": 2,
                "first_port": ports[0],
                "prefill_servers": 1,
                "router": f"http://127.0.0.1:{ports[2]}",
                "stream_interval": 1,
                "server_args": {"disaggregation_transfer_backend": "mooncake_tcp"},
            }
        )
        self._ports = ports
        self.servers = [self.start(0), self.start(1)]

    def start(self, number: int) -> RunningServer:
        directory = self.directory / f"server-{number}"
        directory.mkdir(exist_ok=True)
        phase = self.config.phase_of(number, 2)
        port = self._ports[number]
        return RunningServer(self.checkpoint, directory, self.config, max_tokens=MAX_TOTAL, port=port, phase=phase)

    @contextmanager
    def routed(self) -> Iterator[None]:
        prompts, decoding = (server.wait().url for server in self.servers)
        bootstrap = str(self.config.phase_of(0, 2)["disaggregation_bootstrap_port"])
        words = ["--pd-disaggregation", "--prefill", prompts, bootstrap, "--decode", decoding]
        with routing([*words, "--policy", "round_robin"], self.directory / "router.log", self.router_port):
            yield

    def fleet(self) -> Fleet:
        engines = [
            SGLangEngine(
                server.url,
                self.checkpoint,
                self.config,
                staging=self.directory / str(server.port),
                max_total_tokens=MAX_TOTAL,
                seed=1,
                start_timeout_s=600.0,
                update_timeout_s=120.0,
                router=self.config.router,
            )
            for server in self.servers
        ]
        return Fleet(engines, self.checkpoint, staging=self.directory / "fleet", retries=8, patience_s=600.0)

    def close(self) -> None:
        for server in self.servers:
            server.kill()


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    found = Split(make_checkpoint(tmp_path / "checkpoint", moe_config()), tmp_path)
    try:
        yield found
    finally:
        found.close()


def make_request(name: str, *, tokens: int = 20, ids: list[int] = PROMPT) -> GenerateRequest:
    return GenerateRequest(name, name, ids, SamplingParams(1.0, tokens, seed=5))


async def load(fleet: Fleet, version: int, tensors: Mapping[str, object]) -> None:
    await fleet.prepare_weights(version, tensors)
    await fleet.commit_weights(version)


def off(reference: Reference, result: GenerateResult, first: int, end: int) -> float:
    """Largest difference of the log-probs of output tokens ``first`` to ``end``."""
    assert result.logprobs is not None
    ids = result.output_ids
    expected = reference.logprobs([*PROMPT, *ids[:first]], ids[first:end], 1.0).tolist()
    return max(abs(one - other) for one, other in zip(result.logprobs[first:end], expected, strict=True))


@pytest.mark.timeout(1800)
def test_prompts_and_decoding_may_be_apart(split: Split) -> None:
    """Log-probs are those of the weights before and after an update in flight, and after a server was killed."""
    tensors = load_tensors(split.checkpoint)
    changed = perturb(tensors, 3)

    async def body(fleet: Fleet) -> tuple[list[GenerateResult], list[GenerateResult], GenerateResult]:
        await load(fleet, 1, tensors)
        first = await asyncio.gather(*(fleet.generate(make_request(f"first-{number}")) for number in range(4)))
        version, crossing = 1, list[GenerateResult]()
        while not any(len(result.weight_versions) > 1 for result in crossing):  # it may have come too late
            before = fleet.stats()["generated_tokens"]
            running = [
                asyncio.create_task(fleet.generate(make_request(f"crossing-{version}-{n}", tokens=LONG)))
                for n in range(3)
            ]
            while fleet.stats()["generated_tokens"] < before + 30:
                await asyncio.sleep(0.001)
            version += 1
            await load(fleet, version, changed if version % 2 == 0 else tensors)
            crossing = await asyncio.gather(*running)
        if version % 2:
            version += 1
            await load(fleet, version, changed)
        split.servers[0].kill()
        split.servers[0] = split.start(0)
        await asyncio.to_thread(split.servers[0].wait)
        return first, crossing, await fleet.generate(make_request("after"))

    async def whole() -> tuple[list[GenerateResult], list[GenerateResult], GenerateResult]:
        fleet = split.fleet()
        await fleet.start()
        try:
            return await body(fleet)
        finally:
            await fleet.close()

    with split.routed():
        first, crossing, after = asyncio.run(asyncio.wait_for(whole(), 1500))
    references = [
        Reference(save_tensors(split.checkpoint, split.directory / "changed", changed)),
        Reference(split.checkpoint),
    ]
    for result in first:
        assert result.weight_versions == [(0, 1)] and off(references[1], result, 0, 20) < 5e-5
    crossed = [result for result in crossing if len(result.weight_versions) == 2]
    assert crossed, "no request had an update"
    for result in crossed:
        (_, old), (start, new) = result.weight_versions
        assert (len(result.output_ids), new) == (LONG, old + 1)
        assert (
            off(references[old % 2], result, 0, start) < 5e-5 and off(references[new % 2], result, start, LONG) < 5e-5
        )
        assert off(references[old % 2], result, start, LONG) > 1e-2, "other weights are far off"
    assert after.weight_versions[0][1] % 2 == 0 and off(references[0], after, 0, 20) < 5e-5
