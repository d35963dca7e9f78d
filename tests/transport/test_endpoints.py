"""Sockets: what may bind where, who may connect, and that nothing is dropped."""

import dataclasses
import time
from contextlib import suppress

import pytest
import zmq
import zmq.asyncio
from transport_support import free_address, zmq_context

from megasao.transport.endpoints import bind_router, connect_dealer, is_loopback
from megasao.transport.keys import CurveKeys

SOON_MS = 60_000
NEVER_MS = 400


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://[::ffff:10.0.0.1]:1", False),
        ("ipc:///tmp/x", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://example.org:1", False),
        ("tcp://[::]:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_what_counts_as_loopback(address, expected):
    assert is_loopback(address) is expected


def test_binding_beyond_loopback_needs_keys():
    with zmq_context() as context:
        with pytest.raises(ValueError, match=r"transport\.curve"):
            bind_router(context, "tcp://0.0.0.0:0", high_water_mark=4)
        bind_router(context, "tcp://0.0.0.0:*", high_water_mark=4, keys=CurveKeys.generate())


def test_a_taken_address_is_an_error_that_names_it():
    address = free_address()
    with zmq_context() as context:
        first = bind_router(context, address, high_water_mark=4)
        with pytest.raises(ValueError, match=address):
            bind_router(context, address, high_water_mark=4)
        first.close()  # held until here: a socket that is collected frees its address


def test_curve_carries_messages_both_ways():
    address, keys = free_address(), CurveKeys.generate()
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=4, keys=keys)
        dealer = connect_dealer(context, address, identity=b"w", high_water_mark=4, keys=keys)
        dealer.send(b"to the router")
        assert router.poll(SOON_MS)
        assert router.recv_multipart() == [b"w", b"to the router"]
        router.send_multipart([b"w", b"back"])
        assert dealer.poll(SOON_MS)
        assert dealer.recv() == b"back"


def _strangers(keys: CurveKeys) -> dict[str, CurveKeys | None]:
    other = CurveKeys.generate()
    return {
        "no keys": None,
        "another run's keys": other,
        "the right server, a client key of its own": dataclasses.replace(other, server_public=keys.server_public),
    }


@pytest.mark.parametrize("stranger", list(_strangers(CurveKeys.generate())))
def test_a_client_without_the_runs_key_gets_nothing(stranger):
    address, keys = free_address(), CurveKeys.generate()
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=4, keys=keys)
        wrong = connect_dealer(context, address, identity=b"wrong", high_water_mark=4, keys=_strangers(keys)[stranger])
        with suppress(zmq.Again):  # refused at once, its socket has nobody to send to
            wrong.send(b"let me in", zmq.NOBLOCK)
        assert not router.poll(NEVER_MS)
        with pytest.raises(zmq.ZMQError) as raised:
            router.send_multipart([b"wrong", b"a secret"])
        assert raised.value.errno == zmq.EHOSTUNREACH
        assert not wrong.poll(50)
        right = connect_dealer(context, address, identity=b"right", high_water_mark=4, keys=keys)
        right.send(b"hello")
        assert router.poll(SOON_MS)
        assert router.recv_multipart() == [b"right", b"hello"]


def test_a_context_with_curve_ends_in_time_and_its_address_is_free_again():
    address, keys = free_address(), CurveKeys.generate()
    for make_context in (zmq.Context, zmq.asyncio.Context):
        context = make_context()
        bind_router(context, address, high_water_mark=4, keys=keys).close()
        context.term()


def test_high_water_mark_2_and_a_slow_reader_lose_nothing():
    address, count = free_address(), 300
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=2)
        dealer = connect_dealer(context, address, identity=b"w", high_water_mark=2)
        sent, received, deadline = 0, [], time.monotonic() + SOON_MS / 1000
        while len(received) < count:
            assert time.monotonic() < deadline
            while sent < count:
                try:
                    dealer.send(str(sent).encode() + bytes(10_000), zmq.NOBLOCK)
                except zmq.Again:
                    break
                sent += 1
            time.sleep(0.0005)
            if router.poll(10):  # not longer: the dealer may learn only at its next attempt that there is room again
                received.append(int(router.recv_multipart()[1].rstrip(b"\0")))
        assert received == list(range(count))


def test_a_peer_that_comes_back_takes_its_identity_over():
    address = free_address()
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=4)
        for message in (b"first life", b"second life"):
            dealer = connect_dealer(context, address, identity=b"w", high_water_mark=4)
            dealer.send(message)
            assert router.poll(SOON_MS)
            assert router.recv_multipart() == [b"w", message]
        router.send_multipart([b"w", b"to the living"])
        assert dealer.poll(SOON_MS)


def test_an_unknown_peer_is_an_error_to_the_sender():
    with zmq_context() as context:
        router = bind_router(context, free_address(), high_water_mark=4)
        with pytest.raises(zmq.ZMQError) as raised:
            router.send_multipart([b"nobody", b"x"])
        assert raised.value.errno == zmq.EHOSTUNREACH


@pytest.mark.parametrize("identity", [b"", b"\0reserved", bytes(300)])
def test_impossible_identities_are_refused(identity):
    with zmq_context() as context, pytest.raises(ValueError, match="identity"):
        connect_dealer(context, free_address(), identity=identity, high_water_mark=4)
