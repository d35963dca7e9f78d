"""What a separate critic says and when, on real sockets without a model; and the values that pass between worlds."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from megasao.config.lifesign import LifeSign
from megasao.launch.ports import free_ports
from megasao.training.batch import Batch, entry_of, pack_trajectories
from megasao.training.critic_world import CriticWorld
from megasao.training.remote_critic import RemoteCritic, connect, read_values
from megasao.training.value_exchange import of_rows, whole_step
from megasao.training.value_service import ValueService
from megasao.transport.client import RequestClient
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Refused
from megasao.transport.values import (
    CriticLacksPayload,
    Learned,
    LearnedRequest,
    Leave,
    Leaving,
    Save,
    Saved,
    Train,
    Values,
    Working,
)
from tests.training.cases import trajectories

ALONE: Any = SimpleNamespace(rank=0, broadcast_bytes=lambda payload: payload)


@pytest.fixture
def address() -> str:
    [port] = free_ports(1)
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture
def service(address: str) -> Iterator[ValueService]:
    service = ValueService(address, high_water_mark=16)
    yield service
    service.close()


@pytest.fixture
def client(address: str) -> Iterator[RequestClient]:
    with connect(address, high_water_mark=16, keys=None) as client:
        yield client


def ask(client: RequestClient, message: Any) -> Any:
    return client.request(message, timeout_s=60.0)[0]


def test_a_command_is_handed_on_once_and_answered_for_good(service: ValueService, client: RequestClient) -> None:
    train = Train(3, [])
    assert [ask(client, train), ask(client, train), ask(client, LearnedRequest(3))] == [Working()] * 3
    assert service.next(60.0) == train and service.next(0.0) is None
    service.say(Values(3, ["a"], [2]), b"12345678")
    for _ in range(2):
        assert client.request(train, timeout_s=60.0) == (Values(3, ["a"], [2]), b"12345678")
    assert ask(client, LearnedRequest(3)) == Working()
    service.say(Learned(3, {"loss": 0.5}, 1.0))
    assert ask(client, LearnedRequest(3)) == Learned(3, {"loss": 0.5}, 1.0)
    assert service.next(0.0) is None


def test_commands_come_in_their_order(service: ValueService, client: RequestClient) -> None:
    commands = [Train(0, []), Save(1), Train(1, []), Leave(2)]
    for command in commands:
        assert ask(client, command) == Working()
    assert [service.next(60.0) for _ in commands] == commands
    service.say(Saved(1))
    service.say(Leaving(2))
    assert [ask(client, Save(1)), ask(client, Leave(2))] == [Saved(1), Leaving(2)]


def test_what_is_past_is_refused(service: ValueService, client: RequestClient) -> None:
    """An actor that went back alone must not get values of another state."""
    ask(client, Train(4, []))
    answer = ask(client, Train(3, []))
    assert isinstance(answer, Refused) and "step 3, but the critic was asked for that of step 4" in answer.reason
    assert service.next(60.0) == Train(4, []) and service.next(0.0) is None
    service.refuse(Train(4, []), "why not")
    assert ask(client, Train(4, [])) == Refused("why not")


def test_a_step_is_asked_for_again_only_where_its_payload_was_lacking(
    service: ValueService, client: RequestClient
) -> None:
    first, again = Train(2, []), Train(2, [], attempt=1)
    assert ask(client, first) == Working() and service.next(60.0) == first
    service.say(CriticLacksPayload(2, 0, "nobody has it"))
    for _ in range(2):
        assert ask(client, first) == CriticLacksPayload(2, 0, "nobody has it"), "however often: that attempt is over"
    assert [ask(client, again), ask(client, again)] == [Working()] * 2
    assert service.next(60.0) == again and service.next(0.0) is None
    service.say(Values(2, [], [], attempt=1))
    assert ask(client, again) == Values(2, [], [], attempt=1)
    assert isinstance(ask(client, first), Refused) and service.next(0.0) is None, "it came late"
    assert ask(client, Train(3, [])) == Working() and service.next(60.0) == Train(3, [])


def test_noise_is_refused_and_changes_nothing(service: ValueService, client: RequestClient, address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_dealer(context, address, identity=b"noise", high_water_mark=4)
    for frames in ([b"\x81", b""], [b"one"], [b"\xff" * 100, b"x"]):
        socket.send_multipart(frames)
        assert socket.poll(60_000)
        assert b"Refused" in socket.recv_multipart()[0]
    socket.close(linger=0)
    context.term()
    assert ask(client, Train(0, [])) == Working() and service.next(60.0) == Train(0, [])


def test_beyond_this_machine_it_needs_keys(address: str) -> None:
    with pytest.raises(ValueError, match="needs CURVE keys"):
        ValueService(address.replace("127.0.0.1", "0.0.0.0"), high_water_mark=4)
    keys = CurveKeys.generate()
    service = ValueService(address, high_water_mark=4, keys=keys)
    with connect(address, high_water_mark=4, keys=keys) as friend:
        assert ask(friend, Save(0)) == Working()
    with connect(address, high_water_mark=4, keys=CurveKeys.generate()) as stranger, pytest.raises(TimeoutError):
        stranger.request(Save(0), timeout_s=0.5)
    service.close()


def remote(address: str, tmp_path: Path, timeout_s: float) -> RemoteCritic:
    client = connect(address, high_water_mark=4, keys=None)
    return RemoteCritic(address, client, ALONE, timeout_s, LifeSign(tmp_path / "beat"))


def test_a_critic_that_never_was_is_named_within_the_bound(address: str, tmp_path: Path) -> None:
    critic = remote(address, tmp_path, 0.3)
    batch = packed(0, 1, 64)
    error = (
        r"the critic at {} to answer {} of step 0 longer than critic\.timeout_s = 0\.3 s \(it does not answer; is it"
    )
    for name, wait in {
        "Train": lambda: critic.values(batch, step=0),
        "LearnedRequest": lambda: critic.learned(step=0),
        "Save": lambda: critic.save(step=0),
        "Leave": lambda: critic.leave(step=0),
    }.items():
        with pytest.raises(TimeoutError, match=error.format(address, name)):
            wait()
    critic.close()


def test_a_critic_at_work_is_not_taken_for_a_silent_one(service: ValueService, address: str, tmp_path: Path) -> None:
    """However little of the time is left for the last question."""
    critic = remote(address, tmp_path, 0.001)
    service._lock.acquire()  # it has other things to do, and answers late
    threading.Timer(0.1, service._lock.release).start()
    with pytest.raises(TimeoutError, match=r"longer than critic\.timeout_s = 0\.001 s \(it is still at work\)"):
        critic.learned(step=0)
    critic.close()


def test_a_checkpoint_begins_before_the_next_step(service: ValueService, address: str, tmp_path: Path) -> None:
    """``save`` returns when the critic has heard of it, and does not wait for the disk."""
    critic = remote(address, tmp_path, 60.0)
    critic.save(step=5)
    assert service.next(0.0) == Save(5), "it is there before anything that is asked for later"
    assert not critic.saved(step=5)
    service.say(Saved(5))
    deadline = time.monotonic() + 60.0
    while not critic.saved(step=5):
        assert time.monotonic() < deadline
    critic.close()


def test_an_actor_that_is_silent_is_an_error(service: ValueService, client: RequestClient, tmp_path: Path) -> None:
    """Every rank waits for as long as the actor's own waits may last, together, and no longer."""
    short = SimpleNamespace(timeout_s=0.1, batch_timeout_s=0.1)
    config: Any = SimpleNamespace(value_model=short, loop=short, checkpoint=short, evaluation=short)
    parts: dict[str, Any] = dict.fromkeys(("run", "critic", "estimator", "source"))
    lifesign = LifeSign(tmp_path / "beat")
    world = CriticWorld(**parts, config=config, topology=ALONE, service=service, lifesign=lifesign)
    ask(client, Save(4))
    assert world.next_command() == Save(4)
    with pytest.raises(TimeoutError, match=r"after step 0 the actor asked for nothing in 0\.6 s"):
        world.next_command()


def packed(rank: int, size: int, budget: int) -> Batch:
    return pack_trajectories(trajectories(7), data_rank=rank, data_size=size, token_budget=budget)


def value_of(trajectory_id: str, tokens: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(int(trajectory_id[1:])).standard_normal(tokens, dtype=np.float32))


def own_values(batch: Batch) -> list[torch.Tensor]:
    """A different number for every token; padding has others."""
    rows = []
    for row in batch.rows:
        parts = [value_of(t.trajectory_id, len(t.tokens)) for t in row.trajectories]
        flat = torch.cat(parts) if parts else torch.zeros(0)
        rows.append(torch.nn.functional.pad(flat, (0, row.action_mask.numel() - flat.numel()), value=9.0))
    return rows


@pytest.mark.parametrize(("senders", "budget"), [(1, 4096), (2, 64), (3, 128)])
def test_values_pass_between_any_two_packings(senders: int, budget: int) -> None:
    parts = [packed(rank, senders, budget) for rank in range(senders)]
    add: Any = SimpleNamespace(all_reduce_data=lambda tensor: tensor)
    step = torch.stack([whole_step(batch, own_values(batch), add) for batch in parts]).sum(0)
    for rank in range(2):
        batch = packed(rank, 2, 256)
        for got, expected, row in zip(of_rows(batch, step), own_values(batch), batch.rows, strict=True):
            inside = sum(len(t.tokens) for t in row.trajectories)
            assert torch.equal(got[:inside], expected[:inside]) and not got[inside:].any()


def test_values_of_trajectories_in_segments_pass_whole() -> None:
    """A row has a sequence for each segment, and more of them than trajectories."""
    two = replace(trajectories(3, 1)[0], tokens=[1] * 9, action_mask=[False, True, True] * 3, rewards=[0.0] * 9)
    two = replace(two, rollout_logprobs=[0.0] * 9, segment_starts=[0, 3, 6])
    batch = pack_trajectories([two, replace(trajectories(4, 2)[1])], data_rank=0, data_size=1, token_budget=4096)
    assert batch.rows[0].row.cu_seqlens.numel() > batch.rows[0].cu_seqlens.numel()
    alone: Any = SimpleNamespace(all_reduce_data=lambda tensor: tensor)
    [expected] = own_values(batch)
    step = whole_step(batch, [expected], alone)
    by_trajectory = {t.trajectory_id: value_of(t.trajectory_id, len(t.tokens)) for t in batch.rows[0].trajectories}
    assert torch.equal(step, torch.cat([by_trajectory[entry.trajectory_id] for entry in batch.entries]))
    assert torch.equal(of_rows(batch, step)[0], expected)


def test_values_of_another_step_are_refused() -> None:
    batch = packed(0, 1, 4096)
    ids, tokens = [e.trajectory_id for e in batch.entries], [e.tokens for e in batch.entries]
    payload = np.arange(batch.tokens, dtype="<f4").tobytes()
    assert torch.equal(read_values(Values(2, ids, tokens), payload, batch, 2), torch.arange(batch.tokens).float())
    shuffled = random.Random(0).sample(ids, len(ids))
    for answer, sent in (
        (Values(3, ids, tokens), payload),
        (Values(2, shuffled, tokens), payload),
        (Values(2, ids[:-1], tokens[:-1]), payload),
        (Values(2, ids, [*tokens[:-1], tokens[-1] + 1]), payload),
        (Values(2, ids, tokens), payload[:-4]),
    ):
        with pytest.raises(ValueError, match="are both worlds of one run and one checkpoint"):
            read_values(answer, sent, batch, 2)
    other = replace(batch, entries=tuple(entry_of(t) for t in trajectories(8)))
    with pytest.raises(ValueError, match="expected those of 13 trajectories of step 2"):
        read_values(Values(2, ids, tokens), payload, other, 2)
