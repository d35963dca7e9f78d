"""The slot table against a plain model of it, under random traffic."""

from hypothesis import given
from hypothesis import strategies as st

from megasao.rollout.engines.slots import SlotTable, common_prefix

_steps = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "end", "invalidate"]),
        st.integers(0, 5),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
    ),
    max_size=60,
)


@given(_steps)
def test_slots_are_exclusive_and_hold_a_prefix(steps: list[tuple[str, int, list[int]]]) -> None:
    table, busy, ended = SlotTable(3), {}, set()
    for action, number, ids in steps:
        session = str(number)
        if action == "acquire" and session not in busy:
            slot = table.acquire(session, ids)
            assert (slot is None) == (len(busy) == 3)
            if slot is None:
                continue
            assert slot.index not in {other.index for other in busy.values()}
            assert slot.tokens == ids[: len(slot.tokens)] and len(slot.tokens) < len(ids)
            slot.tokens[:] = ids
            busy[session] = slot
        elif action == "release" and session in busy:
            table.release(busy.pop(session))
            if session in ended:
                ended.discard(session)
                assert session not in table._by_session
        elif action == "end":
            table.end_session(session)
            if session in busy:
                ended.add(session)
        elif action == "invalidate":
            table.invalidate()
            assert not any(slot.tokens for slot in busy.values())
    assert len(table._free) + len(table._by_session) == 3


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length in (len(left), len(right)) or left[length] != right[length]
