"""The outbox: nothing leaves it but by its acknowledgement."""

from hypothesis import given
from hypothesis import strategies as st

from megasao.rollout.outbox import Outbox


def send_all(outbox, now):
    sent = [entry.frames for entry in outbox.due(now)]
    for entry in outbox.due(now):
        entry.sent_at = now
    return sent


def filled(count):
    outbox = Outbox(resend_after_s=10.0)
    for _ in range(count):
        seq = outbox.next_seq()
        outbox.add(seq, [str(seq).encode()], (f"lease-{seq}",))
    return outbox


def test_messages_are_due_once_then_after_silence_or_a_reconnection():
    outbox = filled(2)
    assert send_all(outbox, 0.0) == [[b"1"], [b"2"]]
    assert send_all(outbox, 9.0) == []
    assert send_all(outbox, 11.0) == [[b"1"], [b"2"]]
    outbox.forget_sending()
    assert send_all(outbox, 11.5) == [[b"1"], [b"2"]]


def test_an_acknowledgement_settles_one_message_once():
    outbox = filled(3)
    assert outbox.settle(2) and not outbox.settle(2) and not outbox.settle(99)
    assert outbox.lease_ids() == {"lease-1", "lease-3"} and len(outbox) == 2


@given(st.lists(st.tuples(st.sampled_from(["add", "settle", "reconnect", "send"]), st.integers(0, 9))))
def test_everything_is_sent_until_it_is_settled(actions):
    outbox, open_seqs, now = Outbox(1e9), set(), 0.0
    for action, number in actions:
        now += 1.0
        if action == "add":
            seq = outbox.next_seq()
            outbox.add(seq, [str(seq).encode()], ())
            open_seqs.add(seq)
        elif action == "settle":
            assert outbox.settle(number) == (number in open_seqs)
            open_seqs.discard(number)
        elif action == "reconnect":
            outbox.forget_sending()
        else:
            send_all(outbox, now)
    outbox.forget_sending()
    assert send_all(outbox, now) == [[str(seq).encode()] for seq in sorted(open_seqs)]
