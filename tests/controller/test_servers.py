"""SGLang servers that register, are added and leave: what the controller knows of them, and what their workers hear."""

from dataclasses import replace

import pytest
from controller_support import free_address, make_config, make_run, serving
from test_server import worker_of

from megasao.config import Config
from megasao.config.rundir import RunDirectory, training_servers
from megasao.controller.servers import ServerBook
from megasao.rollout import registration
from megasao.rollout.registration import Registration
from megasao.rollout.worker import servers_at_start
from megasao.transport.messages import Heartbeat, Welcome

SGLANG = {"engine": "sglang", "concurrency": 16, "sglang": {"servers": 2}}
NAMES, URLS = ("engine-0-0", "engine-0-1"), ("http://127.0.0.1:1", "http://127.0.0.1:2")


def book(now: float = 0.0) -> ServerBook:
    found = ServerBook(dead_after_s=10.0)
    for name, url in zip(NAMES, URLS, strict=True):
        found.up(name, "rollout-0", url, now)
    found.up("engine-1-0", "rollout-1", "http://127.0.0.1:3", now)
    return found


def test_a_worker_hears_of_its_own_servers_as_long_as_they_are_heard():
    servers = book()
    assert servers.of("rollout-0", 5.0) == list(URLS) and servers.leaving("rollout-0") == []
    servers.up("engine-0-1", "rollout-0", URLS[1], 11.0)
    assert servers.of("rollout-0", 12.0) == [URLS[1]] and servers.count(12.0) == 1
    assert servers.leaving("rollout-0") == [], "one that is silent may come back"


def test_a_server_leaves_once_and_stays_away():
    servers = book()
    assert servers.remove("engine-0-1", 1.0).leaving
    assert servers.of("rollout-0", 1.0) == [URLS[0]] and servers.leaving("rollout-0") == [URLS[1]]
    assert servers.up("engine-0-1", "rollout-0", URLS[1], 2.0).leaving
    assert servers.remove("engine-0-1", 3.0).leaving, "to say it twice is no error"
    servers.up("engine-0-2", "rollout-0", URLS[1], 4.0)
    assert servers.leaving("rollout-0") == [] and servers.of("rollout-0", 4.0) == list(URLS), "a new one at its address"


def test_the_last_server_and_an_unknown_one_cannot_leave():
    servers = book()
    with pytest.raises(ValueError, match=r"engine-1-0 is the last server of rollout-1; add another"):
        servers.remove("engine-1-0", 1.0)
    with pytest.raises(ValueError, match=r"no SGLang server 'engine-7'.*engine-0-0, engine-0-1, engine-1-0"):
        servers.remove("engine-7", 1.0)
    servers.up("engine-0-0", "rollout-0", URLS[0], 20.0)
    with pytest.raises(ValueError, match="last server of rollout-0"):
        servers.remove("engine-0-0", 20.0)


def test_a_controller_that_was_restarted_hears_that_a_server_is_leaving():
    servers = ServerBook(dead_after_s=10.0)
    servers.up(NAMES[0], "rollout-0", URLS[0], 0.0)
    assert servers.up(NAMES[1], "rollout-0", URLS[1], 0.0, leaving=True).leaving
    assert servers.of("rollout-0", 0.0) == [URLS[0]]


@pytest.fixture
def config() -> Config:
    return make_config(
        rollout=SGLANG,
        transport={"heartbeat_s": 0.05, "dead_after_s": 60.0},
        supervision={"stop_timeout_s": 60.0, "start_timeout_s": 60.0},
    )


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    made = make_run(tmp_path, free_address())
    made.change_engines(lambda _: dict(zip(NAMES, URLS, strict=True)))
    return made


def until_over(member: Registration) -> None:
    while not member.is_over():
        pass


def heard(worker) -> Welcome:
    worker.send(Heartbeat({}, worker.servers))
    return worker.expect(Welcome)


def test_a_server_registers_joins_and_leaves_over_the_wire(run, config):
    with serving(run, config), worker_of(run) as worker:
        worker.hello()
        worker.servers = list(URLS)
        members = [Registration(run, config, name) for name in NAMES]
        assert not any(member.is_over() for member in members)
        assert (heard(worker).servers, heard(worker).leaving) == (list(URLS), [])
        added = registration.add(run, config, 0, port=3)
        assert added == "engine-0-2" and training_servers(run.read_endpoints(), 0) == [*NAMES, added]
        newcomer = Registration(run, config, added, added=True)
        assert not newcomer.is_over()
        assert heard(worker).servers == [*URLS, run.read_endpoints().engines[added]]
        registration.remove(run, config, NAMES[1])
        members[1]._next = 0.0
        assert not members[1].is_over(), "its worker has it still"
        assert heard(worker).leaving == [URLS[1]]
        assert training_servers(run.read_endpoints(), 0) == [NAMES[0], added], "a worker that starts now leaves it out"
        worker.servers.remove(URLS[1])
        heard(worker)
        until_over(members[1])
        for member in (*members, newcomer):
            member.close()


def test_a_server_that_was_added_ends_when_the_run_is_gone_and_others_wait(run, config, monkeypatch):
    monkeypatch.setattr(registration, "_ANSWER_S", 0.05)
    config = config.model_copy(
        update={"supervision": config.supervision.model_copy(update={"start_timeout_s": 0.2, "stop_timeout_s": 0.1})}
    )
    added, planned = Registration(run, config, NAMES[0], added=True), Registration(run, config, NAMES[1])
    until_over(added)
    planned._next = 0.0
    assert not planned.is_over(), "the controller may be restarting"
    endpoints = run.read_endpoints()
    (run.path / "endpoints.json").write_text("")
    planned._next = 0.0
    assert not planned.is_over(), "what cannot be read now is no other launch"
    run.write_endpoints(replace(endpoints, controller=free_address()))
    until_over(planned)  # another launch has the run
    added.close()
    planned.close()


def test_a_worker_waits_for_servers_that_somebody_starts_again(run, config):
    """An added one may have died without a word, and is named by the controller when it is up."""
    run.change_engines(lambda engines: {**engines, "engine-0-2": "http://127.0.0.1:3"})
    assert servers_at_start(run, config, 0) == list(NAMES)
    run.change_engines(lambda engines: {name: url for name, url in engines.items() if name not in NAMES})
    assert servers_at_start(run, config, 0) == ["engine-0-2"], "no other is left"


def test_what_cannot_be_added_or_removed_is_refused(run, config):
    with serving(run, config):
        with pytest.raises(ValueError, match=r"rollout\.workers = 1, counted from 0; got 3"):
            registration.add(run, config, 3, port=3)
        with pytest.raises(ValueError, match="no SGLang server 'engine-9-9' has registered; registered are none"):
            registration.remove(run, config, "engine-9-9")
    options = config.rollout.sglang.model_copy(update={"router": "http://127.0.0.1:1"})
    routed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sglang": options})})
    with pytest.raises(ValueError, match=r"rollout\.sglang\.router chooses"):
        registration.add(run, routed, 0, port=3)
    with pytest.raises(ValueError, match=r"rollout\.sglang\.router chooses"):
        registration.remove(run, routed, NAMES[0])
    with pytest.raises(ValueError, match=r"rollout\.engine = embedded"):
        registration.add(run, make_config(), 0, port=3)


def test_two_processes_do_not_change_the_servers_at_once(run, monkeypatch):
    monkeypatch.setattr("megasao.config.rundir.CHANGE_WAIT_S", 0.0)

    def change_meanwhile(engines):
        with pytest.raises(ValueError, match="another process that changes the servers is alive"):
            run.change_engines(lambda _: {})
        return engines

    run.change_engines(change_meanwhile)
    assert list(run.read_endpoints().engines) == list(NAMES)
    run.change_engines(lambda _: {})
    assert not run.read_endpoints().engines, "the lock goes with its process, or its end"
