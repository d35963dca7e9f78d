"""Group and running-mean baselines: definitions, refusals, and state that goes on."""

import json
import statistics

import pytest

from megasao.algorithms.baselines import MOST_KEYS, RunningMeans, group_advantages
from megasao.config.algorithm import GroupBaseline, RunningMean
from megasao.transport.messages import ManifestEntry


def entry(number: int, reward: float, group: str = "g", prompt: str = "p", task: str = "t") -> ManifestEntry:
    return ManifestEntry(f"t{number}", 4, 2, 0, 0, reward, prompt_id=prompt, group_id=group, task=task)


REWARDS = {"a": [1.0, 0.0, 0.0, 0.5], "b": [1.0, 1.0, 1.0], "c": [0.0, 1.0]}


def entries() -> list[ManifestEntry]:
    """Groups of several sizes, members not side by side."""
    pairs = [(group, reward) for group, rewards in REWARDS.items() for reward in rewards]
    return [entry(number, reward, group) for number, (group, reward) in enumerate(pairs[::-1])]


def by_group(advantages: dict[str, float]) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {}
    for item in entries():
        result.setdefault(item.group_id, []).append(advantages[item.trajectory_id])
    return {group: values[::-1] for group, values in result.items()}


def test_mean_baseline() -> None:
    got = by_group(group_advantages(entries(), GroupBaseline()))
    assert got["a"] == pytest.approx([0.625, -0.375, -0.375, 0.125])
    assert got["b"] == [0, 0, 0] and got["c"] == [-0.5, 0.5]
    assert all(abs(sum(values)) < 1e-12 for values in got.values())


def test_standard_deviation() -> None:
    got = by_group(group_advantages(entries(), GroupBaseline(std=True)))
    scale = statistics.pstdev(REWARDS["a"]) + 1e-6
    assert got["a"] == pytest.approx([value / scale for value in (0.625, -0.375, -0.375, 0.125)])
    assert got["b"] == [0, 0, 0], "equal rewards teach nothing, and divide nothing by 0"
    assert got["a"] != pytest.approx(
        [value / statistics.stdev(REWARDS["a"]) for value in (0.625, -0.375, -0.375, 0.125)]
    )


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    got = by_group(group_advantages(entries(), GroupBaseline(leave_one_out=True)))
    for group, rewards in REWARDS.items():
        others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
        assert got[group] == pytest.approx([reward - other for reward, other in zip(rewards, others, strict=True)])


def test_rescaling_makes_up_for_groups_that_teach_nothing() -> None:
    plain = group_advantages(entries(), GroupBaseline())
    scaled = group_advantages(entries(), GroupBaseline(rescale=True))
    assert scaled == pytest.approx({name: value * 9 / 6 for name, value in plain.items()})
    equal = [entry(number, 1.0) for number in range(3)]
    assert set(group_advantages(equal, GroupBaseline(rescale=True)).values()) == {0.0}


def test_order_does_not_matter() -> None:
    options = GroupBaseline(std=True, leave_one_out=True)
    assert group_advantages(entries()[::-1], options) == pytest.approx(group_advantages(entries(), options))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group 'alone' has one trajectory"):
        group_advantages([*entries(), entry(99, 1.0, "alone")], GroupBaseline())


def test_the_running_mean_is_of_earlier_rewards_of_the_same_prompt() -> None:
    means = RunningMeans(RunningMean(window=3))
    assert means.step([entry(0, 1.0), entry(1, 0.5), entry(2, 0.25, prompt="q")]) == {"t0": 1.0, "t1": 0.5, "t2": 0.25}
    assert means.step([entry(3, 1.0), entry(4, 0.0)]) == pytest.approx({"t3": 0.25, "t4": -0.75})
    # The window holds .5, 1, 0 now: the oldest has left it.
    assert means.step([entry(5, 1.0)]) == pytest.approx({"t5": 0.5})
    assert means.step([entry(6, 1.0, prompt="q")]) == pytest.approx({"t6": 0.75})


@pytest.mark.parametrize(("scope", "expected"), [("prompt", 0.0), ("task", 0.5), ("global", 0.75)])
def test_the_scope_says_whose_rewards_count(scope: str, expected: float) -> None:
    means = RunningMeans(RunningMean(window=100, scope=scope))
    means.step([entry(0, 1.0, prompt="a", task="x"), entry(1, 0.5, prompt="b", task="y")])
    assert means.baseline(entry(2, 0.0, prompt="c", task="y")) == pytest.approx(expected)


def test_initial_baseline() -> None:
    assert RunningMeans(RunningMean(initial=0.5)).step([entry(0, 1.0)]) == {"t0": 0.5}


def test_state_goes_on_through_json() -> None:
    options = RunningMean(window=2)
    means, again = RunningMeans(options), RunningMeans(options)
    means.step(entries())
    again.load(json.loads(json.dumps(means.state())))
    more = [entry(50, 0.5), entry(51, 1.0, prompt="new")]
    assert again.step(more) == means.step(more) != RunningMeans(options).step(more)
    assert again.state() == means.state()
    with pytest.raises(ValueError, match="expected a list 'rewards'"):
        again.load({})


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_KEYS >= 10_000
    monkeypatch.setattr("megasao.algorithms.baselines.MOST_KEYS", 2)
    means = RunningMeans(RunningMean())
    means.step(
        [entry(0, 1.0, prompt="a"), entry(1, 1.0, prompt="b"), entry(2, 1.0, prompt="a"), entry(3, 1.0, prompt="c")]
    )
    assert [key for key, _ in means.state()["rewards"]] == ["a", "c"]
