"""The blocking client: one reply for each request, across restarts and delays, in bounded time."""

import threading
from contextlib import suppress

import pytest
import zmq
from transport_support import free_address, zmq_context

from megasao.transport.client import ControllerClient
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import bind_router
from megasao.transport.messages import BatchRequest, Fetched, FromTrainer, Refused, Status, StatusRequest, Waiting

SOON_MS = 60_000


def _serve(address, answers, ready=None):
    """Answer the requests that come, with ``answers`` in turn; None is no answer."""
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=4)
        if ready is not None:
            ready.set()
        for answer in answers:
            assert router.poll(SOON_MS)
            identity, *frames = router.recv_multipart()
            decode(frames, FromTrainer)
            if answer is not None:
                router.send_multipart([identity, *encode(answer, b"pay")])
        router.close(linger=2000)


def _serve_until(done, address):
    """Answer whoever asks: a request that was given up meanwhile is sent again, and wants an answer of its own."""
    with zmq_context() as context:
        router = bind_router(context, address, high_water_mark=4)
        while not done.is_set():
            if router.poll(20):
                identity, *_ = router.recv_multipart()
                with suppress(zmq.ZMQError):
                    router.send_multipart([identity, *encode(Status({}, []))])
        router.close(linger=0)


def _in_thread(*args):
    thread = threading.Thread(target=_serve, args=args, daemon=True)
    thread.start()
    return thread


def test_request_and_reply_with_payload():
    address = free_address()
    thread = _in_thread(address, [Fetched(3)])
    with ControllerClient(address) as client:
        assert client.request(StatusRequest(), timeout_s=60) == (Fetched(3), b"pay")
    thread.join(60)


def test_a_refusal_is_a_reply():
    address = free_address()
    thread = _in_thread(address, [Refused("no such step")])
    with ControllerClient(address) as client:
        assert client.request(StatusRequest(), timeout_s=60)[0] == Refused("no such step")
    thread.join(60)


def test_a_request_is_sent_again_to_a_controller_that_starts_later():
    address, done = free_address(), threading.Event()
    with ControllerClient(address, resend_s=0.2) as client:
        starter = threading.Timer(0.5, _serve_until, (done, address))
        starter.start()
        assert client.request(StatusRequest(), timeout_s=60)[0] == Status({}, [])
        done.set()
        starter.join(60)


def test_a_late_reply_is_never_taken_for_the_next_ones():
    """The first attempt is answered only after the second was: the client must not read that answer later."""
    address = free_address()
    ready = threading.Event()

    def serve():
        with zmq_context() as context:
            router = bind_router(context, address, high_water_mark=4)
            ready.set()
            first, *_ = router.recv_multipart()
            while True:
                asker, *frames = router.recv_multipart()
                assert asker != first
                if isinstance(decode(frames, FromTrainer)[0], StatusRequest):
                    break
                # On a slow machine this one may have been given up too: then it is answered when it comes once more.
                for peer, answer in ((asker, Waiting(1, 2, "the answer")), (first, Waiting(9, 9, "late"))):
                    with suppress(zmq.ZMQError):
                        router.send_multipart([peer, *encode(answer)])
            router.send_multipart([asker, *encode(Status({}, ["right"]))])
            router.close(linger=2000)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    with ControllerClient(address, resend_s=0.2) as client:
        assert client.request(BatchRequest(0, 0), timeout_s=60)[0].detail == "the answer"
        client._resend_s = 60
        assert client.request(StatusRequest(), timeout_s=60)[0] == Status({}, ["right"])
    thread.join(60)


def test_silence_ends_with_an_error_that_names_the_endpoint():
    address = free_address()
    with ControllerClient(address, resend_s=0.1) as client, pytest.raises(TimeoutError, match=address):
        client.request(StatusRequest(), timeout_s=0.5)
