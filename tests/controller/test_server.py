"""The controller on real sockets: what is refused, what is acknowledged, what is handed out."""

import dataclasses
import json
import pickle
import threading
from contextlib import suppress

import msgspec
import pytest
import zmq
from controller_support import (
    PATIENCE_S,
    TinyEnvironment,
    WireWorker,
    free_address,
    make_config,
    make_run,
    result_of,
    serving,
    trajectory,
)

from megasao.controller.recovery import Opened
from megasao.controller.server import ControllerServer, TakenOver
from megasao.trajectories.schema import from_batch, from_ipc, to_batch, to_ipc
from megasao.transport.client import ControllerClient
from megasao.transport.codec import encode
from megasao.transport.keys import make_run_keys
from megasao.transport.messages import (
    SAY_HELLO,
    BatchRequest,
    CheckpointSaved,
    Credit,
    EvaluateRequest,
    Failure,
    FetchRequest,
    FinishRequest,
    Heartbeat,
    Manifest,
    Refused,
    State,
    StateRequest,
    StatusRequest,
    Stop,
    Trajectories,
    Waiting,
    Welcome,
)

CONFIG = make_config()


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, free_address())


def client_of(run, **options) -> ControllerClient:
    return ControllerClient(run.read_endpoints().controller, **options)


def worker_of(run, name="rollout-0", **options) -> WireWorker:
    return WireWorker(run.read_endpoints().controller, name, **options)


def ask(client, message):
    return client.request(message, timeout_s=PATIENCE_S)[0]


def batch(client, step, version):
    """Ask until the batch is complete."""
    while True:
        answer = ask(client, BatchRequest(step, version))
        if not isinstance(answer, Waiting):
            return answer


def ids(manifest) -> list[str]:
    return [entry.trajectory_id for entry in manifest.entries]


def test_a_whole_step(run):
    with serving(run, CONFIG), worker_of(run) as worker, client_of(run) as client:
        assert worker.hello(free=4) == []
        waiting = ask(client, BatchRequest(0, 0))
        assert (waiting.have, waiting.need) == (0, 4)
        leases = worker.get_leases(4)
        rows = [trajectory(lease, finish_reason="max_tokens") for lease in leases]
        assert worker.submit_acked(rows) == {}
        manifest = batch(client, 0, 0)
        assert ids(manifest) == [lease.lease_id for lease in leases]
        assert manifest.entries[0].truncated and manifest.entries[0].reward == 1.0
        assert manifest.rollout["workers"] == 1
        reply, payload = client.request(FetchRequest(ids(manifest)[::-1]), timeout_s=PATIENCE_S)
        assert reply.count == 4
        assert from_batch(from_ipc(payload)) == rows[::-1]
        missing = ask(client, FetchRequest(["nobody"]))
        assert isinstance(missing, Refused) and "'nobody'" in missing.reason
        state = ask(client, StateRequest(1))
        assert isinstance(state, State) and state.state["next_step"] == 1
        assert state.state["journal"] == {"segments": [1], "trajectories": 4}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state.state)) == state.state
        refused = ask(client, BatchRequest(3, 1))
        assert isinstance(refused, Refused) and "step 3" in refused.reason
    metrics = [json.loads(line) for line in (run.metrics / "controller.jsonl").read_text().splitlines()]
    assert metrics and all("buffer" in line for line in metrics)


MALFORMED = {
    "one frame": [b"x"],
    "no frames to speak of": [b"", b"", b"", b""],
    "garbage": [bytes(range(256)), b""],
    "wrong tag": [msgspec.msgpack.encode({"type": "Exec", "code": "x"}), b""],
    "a message for the other direction": encode(Stop("no")),
    "wrong types": [msgspec.msgpack.encode({"type": "Credit", "free": "many", "weight_version": 0}), b""],
    "pickle": [pickle.dumps(print), b""],
    "oversized": [b"\xc4" + bytes(9 * 2**20), b""],
    "nested to death": [b"\x91" * 10**6, b""],
}


@pytest.mark.parametrize("kind", list(MALFORMED))
def test_malformed_messages_are_refused_and_the_next_one_works(run, kind):
    with serving(run, CONFIG), worker_of(run) as worker:
        worker.hello(free=2)
        worker.socket.send_multipart(MALFORMED[kind])
        refused = worker.expect(Refused)
        assert refused.reason
        worker.send(Heartbeat({"generated_tokens": 1.0}))
        worker.expect(Welcome)


def test_bad_rows_are_refused_by_name_and_the_good_ones_survive(run):
    with serving(run, CONFIG), worker_of(run) as worker, client_of(run) as client:
        worker.hello(free=6)
        ask(client, BatchRequest(0, 0))
        good, bad, foreign, unlisted, silent, last = worker.get_leases(6)
        rows = [
            trajectory(good),
            trajectory(bad, rollout_logprobs=[0.0, float("nan"), -1.0]),
            trajectory(foreign, prompt_id="someone else's"),
            trajectory(unlisted),
        ]
        refused = worker.submit_acked(rows, lease_ids=[x.lease_id for x in (good, bad, foreign, silent)])
        assert refused[bad.lease_id].startswith("rollout_logprobs: not finite at an action token")
        assert refused[foreign.lease_id].startswith("prompt_id:")
        assert "not among the lease_ids" in refused[unlisted.lease_id]
        assert "no row" in refused[silent.lease_id]
        assert set(refused) == {x.lease_id for x in (bad, foreign, unlisted, silent)}
        worker.send(Credit(6, 0, 6))
        again = {lease.prompt_index for lease in worker.get_leases(4)}
        assert again == {x.prompt_index for x in (bad, foreign, unlisted, silent)}
        assert worker.submit_acked([trajectory(last)]) == {}
        assert ask(client, StatusRequest()).counters["failures/refused"] == 4


@pytest.mark.parametrize("kind", ["empty", "pickle", "truncated", "other schema version", "missing column"])
def test_payload_that_is_no_trajectories_gives_its_leases_back(run, kind):
    with serving(run, CONFIG), worker_of(run) as worker, client_of(run) as client:
        worker.hello(free=1)
        ask(client, BatchRequest(0, 0))
        [lease] = worker.get_leases(1)
        whole = to_batch([trajectory(lease)])
        payload = {
            "empty": b"",
            "pickle": pickle.dumps([lease.lease_id]),
            "truncated": to_ipc(whole)[:-20],
            "other schema version": to_ipc(whole.replace_schema_metadata({b"megasao.trajectory_schema_version": b"9"})),
            "missing column": to_ipc(whole.drop_columns(["rewards"])),
        }[kind]
        refused = worker.submit_acked([], payload=payload, lease_ids=[lease.lease_id])
        expected = {"other schema version": "schema version", "missing column": "column rewards: missing"}
        assert expected.get(kind, "not a") in refused[lease.lease_id]
        worker.send(Credit(1, 0, 1))
        [again] = worker.get_leases(1)
        assert again.prompt_index == lease.prompt_index
        assert worker.submit_acked([trajectory(again)]) == {}


def test_duplicates_are_acknowledged_and_stored_once(run):
    with serving(run, CONFIG) as server, worker_of(run) as worker, client_of(run) as client:
        worker.hello(free=1)
        ask(client, BatchRequest(0, 0))
        [lease] = worker.get_leases(1)
        assert worker.submit_acked([trajectory(lease), trajectory(lease)]) == {}
        assert worker.submit_acked([trajectory(lease)]) == {}
        assert len(server.state.batches.buffer) == 1
    assert len(Opened(run).store) == 1


def test_high_water_mark_2_and_a_slow_reader_get_everything_once(run):
    config = make_config(
        loop={"batch_size": 32, "max_lag": 1, "steps": 11},
        buffer={"max_trajectories": 64},
        transport={"high_water_mark": 2, "dead_after_s": 60.0},
        rollout={"concurrency": 64},
    )
    with serving(run, config) as server, worker_of(run, high_water_mark=2) as worker, client_of(run) as client:
        worker.hello(free=64)
        ask(client, BatchRequest(0, 0))
        leases = worker.get_leases(64)
        # All of it is sent before one answer is read: the answers wait in the controller, which goes on meanwhile.
        seqs = [worker.submit([trajectory(lease)]) for lease in leases for _ in (1, 2)]
        assert isinstance(batch(client, 0, 0), Manifest)
        worker.until(lambda: len(worker.acks) == len(seqs))
        assert sorted(worker.acks) == seqs and not any(worker.acks.values())
        assert len(ids(batch(client, 1, 1))) == 32
        assert server.state.counters["duplicates"] == 64


def test_evaluations_end_in_the_runs_file(run):
    config = make_config(evaluation={"problems": 2})
    with serving(run, config), worker_of(run) as worker, client_of(run) as client:
        worker.hello(free=8)
        status = ask(client, EvaluateRequest(0, 0))
        assert status.open_evaluations == ["step-000000/greedy", "step-000000/sampled"]
        for number, lease in enumerate(worker.get_leases(4)):
            if number == 3:
                worker.send(Failure(100, lease.lease_id, "engine_error", "tried"))
                worker.send(Credit(8, 0, 8))
                [lease] = worker.get_leases(1)
            worker.send(result_of(lease, number, reward=float(number % 2 == 0)))
        while ask(client, StatusRequest()).open_evaluations:
            pass
        worker.until(lambda: worker.acks.keys() == {0, 1, 2, 3, 100})
        assert ask(client, EvaluateRequest(0, 0)).open_evaluations == []
    lines = [json.loads(line) for line in run.evaluations.read_text().splitlines()]
    assert [(line["mode"], line["success"], line["failures"]) for line in lines] == [
        ("greedy", 0.5, 0),
        ("sampled", 0.5, 0),
    ]


def test_a_restarted_trainer_gets_the_same_batches(run):
    config = make_config(loop={"batch_size": 2, "max_lag": 2})
    with serving(run, config), worker_of(run) as worker:
        worker.hello(free=6)
        with client_of(run) as client:
            ask(client, BatchRequest(0, 0))
            worker.submit_acked([trajectory(lease) for lease in worker.get_leases(6)])
            first = [batch(client, step, step).entries for step in range(2)]
        with client_of(run) as client:
            assert [batch(client, step, step).entries for step in range(2)] == first
            later = batch(client, 2, 2).entries
        names = [entry.trajectory_id for entries in (*first, later) for entry in entries]
        assert len(set(names)) == 6


def test_a_restarted_controller_is_told_by_workers_what_they_have(run):
    config = make_config(loop={"batch_size": 2, "max_lag": 2})
    with worker_of(run) as worker, client_of(run, resend_s=0.5) as client:
        with serving(run, config):
            worker.hello(free=6)
            ask(client, BatchRequest(0, 0))
            stored, unacked, running, *rest = worker.get_leases(6)
            worker.submit_acked([trajectory(stored)])
        seq = worker.submit([trajectory(unacked)])
        with serving(run, config):
            worker.send(Heartbeat({}))
            while worker.expect(Refused).reason != SAY_HELLO:
                pass
            names = [lease.lease_id for lease in (stored, unacked, running)]
            assert worker.hello(active=names, free=0) in ([names[0]], names[:2])
            worker.until(lambda: worker.acks.get(seq) == {})
            assert ids(batch(client, 0, 0)) == [stored.lease_id, unacked.lease_id]
            assert worker.submit_acked([trajectory(running)]) == {}
            assert ids_waiting(client) == 1
            assert rest


def ids_waiting(client) -> int:
    return int(ask(client, StatusRequest()).counters["buffer"])


def test_leases_that_left_while_a_connection_was_gone_are_given_again(run):
    transport, buffer = {"heartbeat_s": 0.5, "dead_after_s": 2.0}, {"lease_timeout_s": 10_000.0}
    config = make_config(transport=transport, buffer=buffer, rollout={"concurrency": 4})
    with serving(run, config) as server, client_of(run) as client:
        with worker_of(run) as worker:
            worker.hello(free=4)
        ask(client, BatchRequest(0, 0))  # what is leased now reaches nobody
        while not {"leased", "workers_lost"} & ask(client, StatusRequest()).counters.keys():
            pass  # given up before it was leased anything: a slow machine
        with worker_of(run) as worker:

            def arrived():
                worker.send(Heartbeat({}, active_leases=[]))
                worker.send(Credit(4, 0, 4))
                if any(isinstance(message, Refused) for message in worker.others):  # a slow machine: given up
                    worker.hello(free=4)
                worker.others.clear()
                return worker.leases

            worker.until(arrived)
            assert worker.submit_acked([trajectory(lease) for lease in worker.leases.values()]) == {}
    assert "failures/lease_timeout" not in server.state.counters


def test_finish_stops_the_workers_and_the_controller(run):
    server = ControllerServer(run, CONFIG, TinyEnvironment(), Opened(run), address=run.read_endpoints().controller)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with worker_of(run) as worker, worker_of(run, "rollout-1") as late, client_of(run) as client:
        worker.hello(free=2)
        ask(client, FinishRequest("done"))
        assert worker.expect(Stop).reason == "done"
        late.send(Credit(1, 0, 1))
        assert late.expect(Stop).reason == "done"
        assert ask(client, FinishRequest("done")).open_evaluations == []
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    server.close()


def test_curve_on_the_controllers_socket(run):
    keys = make_run_keys(run.keys)
    with serving(run, CONFIG, keys=keys), worker_of(run, "stranger") as stranger, worker_of(run, keys=keys) as worker:
        with suppress(zmq.Again):  # refused at once, its socket has nobody to send to
            stranger.socket.send_multipart(encode(Heartbeat({})), zmq.NOBLOCK)
        worker.hello(free=1)
        with client_of(run, keys=keys) as client:
            ask(client, BatchRequest(0, 0))
            assert len(worker.get_leases(1)) == 1
            assert ask(client, StatusRequest()).counters["workers"] == 1
        assert stranger.poll(200) is None


def test_one_controller_a_run(run):
    opened = Opened(run)
    with pytest.raises(ValueError, match="another controller of this run is alive"):
        Opened(run)
    opened.close()
    Opened(run).close()


def test_segments_that_no_checkpoint_needs_are_deleted(run):
    config = make_config(loop={"batch_size": 2, "max_lag": 9}, checkpoint={"keep": 2})
    opened = Opened(run, segment_bytes=1)
    server = ControllerServer(run, config, TinyEnvironment(), opened, address=run.read_endpoints().controller)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with worker_of(run) as worker, client_of(run) as client:
        worker.hello(free=8)
        ask(client, BatchRequest(0, 0))
        leases = worker.get_leases(8)
        for lease in leases:
            worker.submit_acked([trajectory(lease)])
        manifests = [batch(client, step, 0) for step in range(3)]
        for step in (1, 2):
            ask(client, CheckpointSaved(step))
            ask(client, CheckpointSaved(step))
        assert len(opened.journal.segments()) == 6, "only the batch of step 0 is behind both checkpoints"
        assert isinstance(ask(client, FetchRequest(ids(manifests[0]))), Refused)
        again = ask(client, BatchRequest(0, 0))
        assert isinstance(again, Refused) and "resume from a newer checkpoint" in again.reason
        book = server.state.batches
        assert list(book._batches) == [1, 2] and book._consumed_at.keys().isdisjoint(ids(manifests[0])), "memory grows"
        assert batch(client, 1, 0).entries == manifests[1].entries
    server.stop()
    thread.join(PATIENCE_S)
    server.close()
    with serving(run, config) as server, worker_of(run) as worker, client_of(run) as client:
        assert batch(client, 1, 0).entries == manifests[1].entries
        assert server.state.prompts.is_settled(leases[0].prompt_index), "deleted, but not forgotten"
        worker.hello()
        assert worker.submit_acked([trajectory(leases[0])]) == {}
        assert len(server.state.batches.buffer) == 2


def test_a_worker_that_does_not_read_is_given_up_and_the_others_go_on(run, monkeypatch):
    monkeypatch.setattr("megasao.controller.server.MAX_QUEUED_ANSWERS", 20)
    config = make_config(transport={"high_water_mark": 2, "dead_after_s": 60.0})
    with serving(run, config) as server, worker_of(run, "deaf", high_water_mark=2) as deaf, worker_of(run) as worker:
        deaf.hello(free=1)
        with client_of(run) as client:
            ask(client, BatchRequest(0, 0))
            [lost] = deaf.get_leases(1)
            worker.hello()
            # Each message is answered by a refusal of its own size, far more than the kernel's buffers hold.
            for seq in range(100):
                deaf.send(Trajectories(seq, ["x" * 500_000]))
            worker.until(lambda: b"deaf" not in server.state.workers)
            assert server.state.counters["workers_lost"] == 1
            worker.send(Credit(1, 0, 1))
            assert worker.get_leases(1)[0].prompt_index == lost.prompt_index


def test_a_controller_whose_run_was_taken_over_ends(run):
    """A node that the cluster gave up may live on: two controllers must not serve one run."""
    endpoints = run.read_endpoints()
    server = ControllerServer(run, CONFIG, TinyEnvironment(), Opened(run), address=endpoints.controller)
    for _ in range(3):
        server.tick()
    (run.path / "endpoints.json").write_text("")
    server._metrics_due = 0.0
    server.tick()  # what cannot be read now is no other launch
    run.write_endpoints(dataclasses.replace(endpoints, controller=free_address()))
    with pytest.raises(TakenOver, match=f"this one, at {endpoints.controller}, ends"):
        server.run()
    threading.Timer(0.5, server.close).start()
    Opened(run, lock_wait_s=120.0).close()
