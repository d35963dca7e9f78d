"""Trajectories for tests: one plain, and arbitrary valid ones."""

from hypothesis import strategies as st

from megasao.trajectories.schema import Trajectory


def sample(name: str = "train-000000-1.1", **changes) -> Trajectory:
    fields = {
        "trajectory_id": name,
        "prompt_id": "prompt-0",
        "group_id": "prompt-0",
        "task": "calc",
        "tokens": [5, 6, 7, 8],
        "action_mask": [False, True, False, True],
        "rewards": [0.0, 0.0, 0.25, 1.0],
        "weight_versions": [(0, 3), (2, 5)],
        "turn_starts": [1, 3],
        "finish_reason": "done",
        "rollout_logprobs": [0.0, -0.5, 0.0, -2.25],
        "metrics": {"turns": 2.0},
        "created_at": 1.5,
        "finished_at": 2.5,
    }
    return Trajectory(**{**fields, **changes})


_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
_FINITE32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw) -> Trajectory:
    length = draw(st.integers(1, 12))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
    logprob = st.floats(-1e4, 0.0, width=32)
    logprobs = None
    if draw(st.booleans()):
        logprobs = [draw(logprob) if action else 0.0 for action in mask]
    starts = draw(st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set()))
    segments = None
    if not mask[0] and draw(st.booleans()):
        observed = [index for index in range(1, length) if not mask[index]]
        segments = [0, *sorted(draw(st.sets(st.sampled_from(observed))) if observed else [])]
    return Trajectory(
        trajectory_id=draw(_NAMES),
        prompt_id=draw(_NAMES),
        group_id=draw(st.text(max_size=5)),
        task=draw(_NAMES),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        action_mask=mask,
        rewards=draw(st.lists(_FINITE32, min_size=length, max_size=length)),
        weight_versions=[(start, draw(st.integers(0, 2**62))) for start in sorted({0, *starts})],
        turn_starts=sorted(draw(st.sets(st.integers(0, length - 1)))),
        finish_reason=draw(_NAMES),
        segment_starts=segments,
        rollout_logprobs=logprobs,
        temperature=draw(st.floats(0, 10)),
        routed_experts=draw(st.none() | st.binary(max_size=20)),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        created_at=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finished_at=draw(st.floats(allow_nan=False, allow_infinity=False)),
    )
