"""A worker that keeps its trajectories: it says what it has, and gives it to whoever has the run's keys."""

import asyncio
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import zmq
from controller_peer import bench, heartbeat, lease

from megasao.environments.calculator import CalculatorEnvironment, CalculatorOptions
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.engines.base import GenerateResult
from megasao.rollout.payload import PayloadService, own_host
from megasao.training.payload import PayloadReader, PayloadUnreachable
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.schema import Trajectory, from_batch, to_batch
from megasao.transport.client import ControllerClient, PayloadClient
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Ack, FetchRequest, Forget, Hello, ManifestEntry, Refused, Stored

ENVIRONMENT = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0))


def row(name: str, tokens: int = 3, experts: bytes | None = None) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        prompt_id="prompt",
        group_id="group",
        task="task",
        tokens=[1] * tokens,
        action_mask=[False] + [True] * (tokens - 1),
        rewards=[0.0] * tokens,
        weight_versions=[(0, 0)],
        turn_starts=[1],
        finish_reason="done",
        rollout_logprobs=[0.0] * tokens,
        routed_experts=experts,
    )


def entry(name: str, address: str, nbytes: int = 100) -> ManifestEntry:
    return ManifestEntry(name, 3, 2, 0, 0, 1.0, nbytes=nbytes, payload=address)


class Host:
    """A journal with some rows, and its service, which notes what it was asked."""

    def __init__(self, directory: Path, rows: list[Trajectory], keys: CurveKeys | None = None) -> None:
        journal = PayloadJournal(directory)
        journal.keep(to_batch(rows))
        self.asked: list[list[str]] = []
        fetch = journal.fetch

        def noting(names: list[str]):
            self.asked.append(names)
            return fetch(names)

        journal.fetch = noting  # type: ignore[method-assign]
        self.service = PayloadService(journal, "127.0.0.1", keys=keys)

    @property
    def address(self) -> str:
        return self.service.address


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "host", [row("a"), row("b", 5), row("c")])
    yield made
    made.service.close()


def reader(keys: CurveKeys | None = None, timeout_s: float = 60.0) -> PayloadReader:
    controller = ControllerClient("tcp://127.0.0.1:1", resend_s=0.1)
    return PayloadReader(controller, identity="payload-0", keys=keys, timeout_s=timeout_s)


# the host and the trainer's rank


def test_a_rank_gets_what_it_asks_for_from_each_host(host: Host, tmp_path: Path) -> None:
    other = Host(tmp_path / "other", [row("d")])
    rank = reader()
    entries = [entry("c", host.address), entry("d", other.address), entry("a", host.address)]
    found = {each.trajectory_id: each for each in rank.fetch(entries, 1.0)}
    assert found == {"a": row("a"), "c": row("c"), "d": row("d")}
    assert (host.asked, other.asked) == ([["c", "a"]], [["d"]]), "nothing that it does not need"
    rank.close()
    other.service.close()


def test_much_payload_is_asked_for_in_parts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasao.training.payload.CHUNK_BYTES", 150)
    rank = reader()
    sizes = {"a": 100, "b": 400, "c": 50}
    found = rank.fetch([entry(name, host.address, size) for name, size in sizes.items()], 1.0)
    assert [each.trajectory_id for each in found] == ["a", "b", "c"] and host.asked == [["a"], ["b"], ["c"]]
    rank.close()


def test_a_host_without_the_payload_or_without_life_is_named(host: Host) -> None:
    rank, hasty = reader(), reader(timeout_s=0.3)
    with pytest.raises(PayloadUnreachable, match=f"payload at {host.address}: .*first 'z'"):
        rank.fetch([entry("z", host.address)], 1.0)
    assert len(rank.fetch([entry("a", host.address)], 1.0)) == 1
    with pytest.raises(PayloadUnreachable, match=r"tcp://127.0.0.1:1: the rollout host .* did not answer"):
        hasty.fetch([entry("a", "tcp://127.0.0.1:1")], 1.0)
    with pytest.raises(TimeoutError, match="the controller"):
        rank.fetch([entry("a", "")], 0.2)
    rank.close()
    hasty.close()


def test_a_host_that_sends_what_are_no_rows_is_named(host: Host) -> None:
    """Then every rank asks again; another error would leave the other ranks in their collective."""
    host.service.journal.fetch = lambda _: pa.record_batch({"strange": [1]})  # type: ignore[method-assign]
    rank = reader()
    with pytest.raises(PayloadUnreachable, match=f"payload at {host.address}: .*trajectory schema version"):
        rank.fetch([entry("a", host.address)], 1.0)
    rank.close()


def test_a_host_that_starts_again_is_asked_where_it_was(tmp_path: Path) -> None:
    first = Host(tmp_path, [row("a")])
    address = first.address
    first.service.close()
    again = PayloadService(PayloadJournal(tmp_path), "127.0.0.1")
    assert again.address == address
    with PayloadClient(address) as client:
        reply, _ = client.request(FetchRequest(["a"]), timeout_s=60.0)
    assert not isinstance(reply, Refused)
    again.close()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind(address)
        elsewhere = PayloadService(PayloadJournal(tmp_path), "127.0.0.1")
        assert elsewhere.address != address
        elsewhere.close()


def test_only_peers_with_the_keys_of_the_run_are_answered(tmp_path: Path) -> None:
    keys = CurveKeys.generate()
    with pytest.raises(ValueError, match="CURVE"):
        PayloadService(PayloadJournal(tmp_path / "open"), "0.0.0.0")
    made = Host(tmp_path / "host", [row("a")], keys)
    for strange in (None, CurveKeys.generate()):
        rank = reader(strange, timeout_s=0.5)
        with pytest.raises(PayloadUnreachable, match="did not answer"):
            rank.fetch([entry("a", made.address)], 1.0)
        rank.close()
    rank = reader(keys)
    assert rank.fetch([entry("a", made.address)], 1.0) == [row("a")] and made.asked == [["a"]]
    rank.close()
    made.service.close()


def test_what_is_not_a_question_is_refused(host: Host) -> None:
    context = zmq.Context()
    dealer = connect_dealer(context, host.address, identity=b"stranger", high_water_mark=4)
    for frames in ([b"\x00", b""], [b"one frame"], [msgspec.msgpack.encode(Hello("a")), b""]):
        dealer.send_multipart(frames)
        assert dealer.poll(60_000)
        assert msgspec.msgpack.decode(dealer.recv_multipart()[0], type=Refused).reason
    dealer.close(linger=0)
    context.term()
    with PayloadClient(host.address) as client:
        client.request(FetchRequest(["b"]), timeout_s=60.0)
    assert host.asked == [["b"]]


def test_the_address_is_that_of_the_way_to_the_controller() -> None:
    assert own_host("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert own_host("tcp://[::1]:5555") == "::1"


# the worker


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TokenizerCodec:
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(Path(__file__).parents[2] / "tools" / "make_laptop_model.py"))["write_tokenizer"](path)
    return TokenizerCodec.from_directory(path)


def test_a_worker_keeps_its_trajectories_and_says_what_they_are(codec: TokenizerCodec, tmp_path: Path) -> None:
    """And says it all again to a controller that is new; what nobody wants it lets go."""
    journal = PayloadJournal(tmp_path)
    journal.keep(to_batch([row("from an earlier life")]))

    def solve(engine, request):
        ids = codec.encode("<answer>1</answer>")
        return GenerateResult(ids, [-0.5] * len(ids), [(0, engine.version)], "stop")

    def held() -> list[str]:
        return [summary.trajectory_id for summary in journal.summaries]

    async def stored(peer) -> Stored:
        return await peer.receive(Stored)

    async def body() -> None:
        async with bench(ENVIRONMENT, codec, solve, payload=journal) as made:
            first = await stored(made.peer)
            assert [each.trajectory_id for each in first.summaries] == ["from an earlier life"]
            await made.peer.send(Ack(first.seq, forget=["from an earlier life"]))
            await made.peer.grant(lease("a"))
            second = await made.peer.receive(Stored, where=lambda message: message.seq != first.seq)
            assert [each.trajectory_id for each in second.summaries] == held() == ["a"]
            assert second.summaries[0].action_tokens > 0
            await made.peer.send(Ack(second.seq))
            await heartbeat(made.peer, unacknowledged=0.0, active=0.0)
            peer = await made.restart_controller()
            again = await stored(peer)
            assert again.summaries == second.summaries
            await peer.send(Ack(again.seq))
            await peer.send(Forget(["a"]))
            await heartbeat(peer, unacknowledged=0.0)
            assert held() == []

    asyncio.run(body())
    assert from_batch(journal.fetch(["a"]))[0].action_mask, "its segment is still being written"
    journal.close()


def test_questions_are_answered_while_the_worker_is_busy(host: Host) -> None:
    async def body() -> None:
        answered = threading.Event()

        def ask() -> None:
            with PayloadClient(host.address) as client:
                client.request(FetchRequest(["a"]), timeout_s=60.0)
            answered.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert answered.wait(60), "the event loop is held up meanwhile"
        thread.join()

    asyncio.run(body())
