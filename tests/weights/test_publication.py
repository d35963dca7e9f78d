"""The two-phase commit under random events and a virtual clock."""

from hypothesis import given
from hypothesis import strategies as st
from weight_world import weights

from megasao.weights.flat import pack
from megasao.weights.publication import Publication

_NAMES = ["a", "b", "c", "late"]
_events = st.lists(
    st.tuples(st.sampled_from(["ready", "committed", "fail", "time"]), st.sampled_from(_NAMES)), max_size=40
)


def publication(required: list[str]) -> Publication:
    return Publication(pack(7, weights(0), 1000), required, now=0.0, timeout_s=10.0)


@given(st.sets(st.sampled_from(_NAMES[:3])), _events)
def test_commit_waits_for_all_that_are_left_and_ends(required: set[str], events: list[tuple[str, str]]) -> None:
    publishing, now = publication(sorted(required)), 0.0
    for event, name in events:
        if event == "ready":
            publishing.set_ready(name)
        elif event == "committed":
            publishing.set_committed(name)
        elif event == "fail":
            publishing.quarantine(name, "broken")
        else:
            now += 4.0
        before = publishing.phase
        late = publishing.advance(now)
        if before == "prepare" and publishing.phase != "prepare":
            assert required <= publishing.ready | publishing.quarantined.keys()
        assert not late or now >= 10.0
    publishing.advance(now + 10.0)
    publishing.advance(now + 20.0)
    publishing.advance(now + 20.0)
    result = publishing.result(now + 20.0)
    assert set(result.engines) | result.quarantined.keys() == required
    assert not set(result.engines) & result.quarantined.keys()
    assert set(result.engines) <= publishing.committed


def test_nobody_connected_is_fine() -> None:
    publishing = publication([])
    publishing.advance(0.0)
    publishing.advance(0.0)
    assert publishing.result(0.0).engines == []


def test_late_ones_are_named_with_the_phase_they_missed() -> None:
    publishing = publication(["a", "b"])
    publishing.set_ready("a")
    assert publishing.advance(9.9) == set()
    assert publishing.advance(10.0) == {"b"}
    assert publishing.advance(20.0) == {"a"}
    assert publishing.result(20.0).quarantined == {
        "b": "was not ready within 10 s",
        "a": "did not commit within 10 s",
    }
