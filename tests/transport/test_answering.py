"""A socket with a thread of its own."""

import logging

import pytest
import zmq
from transport_support import free_address, zmq_context

from megasao.transport.answering import AnsweringThread, Frames
from megasao.transport.endpoints import bind_router, connect_dealer


def upper(frames: list[bytes]) -> Frames:
    """KeyError for ``lower``."""
    return [{b"a": b"A", b"b": b"B"}[frame] for frame in frames]


def test_a_question_without_an_answer_costs_nobody_theirs(caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    with zmq_context() as context, caplog.at_level(logging.ERROR):
        thread = AnsweringThread(bind_router(context, address, high_water_mark=4), upper, name="upper")
        dealer = connect_dealer(context, address, identity=b"peer", high_water_mark=4)
        for question in (b"a", b"no such letter", b"b"):
            dealer.send(question)
        answers = []
        while len(answers) < 2 and dealer.poll(60_000, zmq.POLLIN):
            answers.append(dealer.recv())
        thread.close()
        dealer.close(linger=0)
    assert answers == [b"A", b"B"]
    assert "no such letter" in caplog.text and "upper" in caplog.text
