"""Small fleets whose every time is known in closed form."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from simulation_support import always, make_config, make_engine, make_fleet, make_rates

from megasao.simulation.clock import Clock
from megasao.simulation.engine import SimulatedEngine
from megasao.simulation.lengths import Turn
from megasao.simulation.outcome import outcome
from megasao.simulation.rates import EngineRates, Line, Pace


def seconds_of_steps(fleet):
    ends = [0.0, *(step.ended for step in fleet.run().steps)]
    return [later - earlier for earlier, later in pairwise(ends)]


def everything(**changes):
    engine = {"step_per_request": 0.05, "prefill_per_token": 0.01, "commit": 0.25, **changes}
    return make_rates(
        engine=make_engine(**engine),
        values=Line(0.05, 0.0025),
        critic=Line(0.1, 0.005),
        actor=Line(0.4, 0.02),
        overhead=1.0,
        publish=0.25,
        transfer=1.5,
        delivery=0.5,
    )


def test_a_synchronous_step_is_the_sum_of_its_parts():
    """4 prompts of 10 tokens one after another, 10 steps of 4 requests, delivery, training on 80 tokens, weights."""
    generation, training = 4 * 0.1 + 10 * (0.1 + 4 * 0.05), 1.0 + 0.25 + 2 * 0.5 + 2.0 + 0.25
    first, *later = seconds_of_steps(make_fleet(make_config(loop={"mode": "sync"}), everything()))
    assert first == pytest.approx(generation + 0.5 + training)
    assert later == pytest.approx([1.5 + 0.25 + generation + 0.5 + training] * 9)


def test_a_slow_machine_takes_longer_for_its_part():
    """Twice as long for what engines do, three times for training, in the second half of the run."""
    generation, training = 4 * 0.1 + 10 * (0.1 + 4 * 0.05), 1.0 + 0.25 + 2 * 0.5 + 2.0
    rates = replace(everything(), pace=Pace(training=(1.0, 3.0), engine=(1.0, 2.0)))
    _, *later = seconds_of_steps(make_fleet(make_config(loop={"mode": "sync"}), rates))
    rest = 1.5 + 0.25 + 0.5 + 0.25
    assert later == pytest.approx([rest + generation + training] * 4 + [rest + 2 * generation + 3 * training] * 5)


def test_the_numbers_of_a_synchronous_run():
    config = make_config(loop={"mode": "sync"})
    found = outcome(make_fleet(config, everything()).run(), config, mode="sync", gpus=2, trainer_gpus=1, discard=3)
    assert found.step_seconds == pytest.approx(10.15)
    assert found.trainer_utilisation == pytest.approx(4.5 / 10.15)
    assert found.engine_utilisation == pytest.approx(3.4 / 10.15)
    assert found.running == pytest.approx(4 * 3.0 / 10.15)
    assert found.tokens_per_s == pytest.approx(80 / 10.15)
    assert found.trajectories_per_s == pytest.approx(4 / 10.15)
    assert (found.staleness_mean, found.staleness_max, found.dropped) == (0.0, 0, 0.0)
    assert found.longest_wait_s == pytest.approx(1.75 + 3.4 + 0.5)
    assert found.longest_episode_s == pytest.approx(0.25 + 3.4)


def test_an_asynchronous_trainer_never_waits_where_engines_are_fast():
    [first, *later] = seconds_of_steps(make_fleet(make_config(), make_rates()))
    assert first == pytest.approx(1.0 + 2.0)
    assert later == pytest.approx([2.0] * 9)


def test_engines_bound_the_step_where_training_is_fast():
    """Only one request fits the cache: an episode takes 1 s, a batch of four 4 s, whatever the trainer does."""
    rates = make_rates(engine=make_engine(kv_tokens=20), actor=Line(1.0, 0.0))
    config = make_config(buffer={"max_trajectories": 8})
    fleet = make_fleet(config, rates)
    assert seconds_of_steps(fleet) == pytest.approx([5.0] + [4.0] * 9)
    found = outcome(fleet.history, config, mode="async", gpus=2, trainer_gpus=1, discard=1)
    assert found.engine_utilisation == pytest.approx(35 / 36), "in the last second nothing is left to begin"
    assert found.trainer_utilisation == pytest.approx(1.0 / 4.0)


@pytest.mark.parametrize(("kv_tokens", "rounds"), [(20, 4), (45, 2), (79, 2), (80, 1)])
def test_who_finds_no_room_in_the_cache_waits(kv_tokens, rounds):
    rates = make_rates(engine=make_engine(kv_tokens=kv_tokens))
    together = {1: 4, 2: 2, 4: 1}[rounds]
    assert rounds * together == 4
    assert seconds_of_steps(make_fleet(make_config(loop={"mode": "sync"}), rates)) == pytest.approx([rounds + 2.0] * 10)


def test_turns_wait_for_the_environment_and_compute_only_what_is_new():
    lengths = always(Turn(10, 5), Turn(3, 5), Turn(3, 2))
    rates = make_rates(engine=make_engine(prefill_per_token=0.1), environment=0.7)
    config = make_config(loop={"mode": "sync", "batch_size": 2}, rollout={"workers": 2})
    [first, *_] = seconds_of_steps(make_fleet(config, rates, lengths))
    assert first == pytest.approx(16 * 0.1 + 12 * 0.1 + 2 * 0.7 + 2.0)


def test_the_critics_warm_up_publishes_nothing():
    config = make_config(loop={"mode": "sync"}, critic={"warmup_steps": 3})
    rates = make_rates(critic=Line(0.25, 0.0), transfer=1.5)
    assert seconds_of_steps(make_fleet(config, rates)) == pytest.approx([1.5] * 3 + [3.5] + [5.0] * 6)


def test_a_publication_waits_for_the_one_before():
    config = make_config(loop={"max_lag": 30}, buffer={"max_trajectories": 8})
    steps = make_fleet(config, make_rates(transfer=5.0)).run().steps
    assert [later.ended - earlier.ended for earlier, later in pairwise(steps[1:])] == (pytest.approx([5.0] * 8))
    assert sum(step.ended - step.began for step in steps) == pytest.approx(20.0), "that is waiting, not work"


@pytest.mark.parametrize(("stands_still", "seconds"), [(False, 10.0), (True, 13.0)])
def test_engines_stand_still_for_new_weights_or_do_not(stands_still, seconds):
    clock, ends = Clock(), []
    engine = SimulatedEngine(clock, make_engine())
    engine.generate(Turn(0, 100), 0, lambda version: None, lambda version: ends.append((clock.now, version)))
    clock.after(2.0, lambda: engine.stand_still(3.0) if stands_still else None)
    clock.after(5.0, lambda: engine.take(1))
    while clock.step():
        pass
    assert ends == [(pytest.approx(seconds), 1)]
    assert engine.busy == pytest.approx(10.0)


# the flow of an engine


def played(rates: EngineRates, arrivals: list[tuple[float, Turn]]) -> list[float]:
    """When each turn is done."""
    clock, ends = Clock(), [math.nan] * len(arrivals)
    engine = SimulatedEngine(clock, rates)
    for number, (time, turn) in enumerate(arrivals):

        def done(version: int, number: int = number) -> None:
            ends[number] = clock.now

        clock.after(time, lambda turn=turn, done=done: engine.generate(turn, 0, lambda version: None, done))
    while clock.step():
        pass
    return ends


def in_small_pieces(rates: EngineRates, arrivals: list[tuple[float, Turn]], piece: float = 2e-4) -> list[float]:
    """The same law, integrated by stepping through time."""
    now, cached, ends = 0.0, 0.0, [math.nan] * len(arrivals)
    prefill = [turn.prefill * rates.prefill_per_token for _, turn in arrivals]
    left = [float(turn.decode) for _, turn in arrivals]
    decoding: set[int] = set()
    while any(math.isnan(end) for end in ends):
        here = [n for n, (time, _) in enumerate(arrivals) if time <= now and math.isnan(ends[n]) and n not in decoding]
        if here:
            prefill[here[0]] -= piece
            if prefill[here[0]] <= 0:
                decoding.add(here[0])
                cached += arrivals[here[0]][1].prefill
        elif decoding:
            step = rates.step + rates.step_per_request * len(decoding) + rates.step_per_cached_token * cached
            for number in list(decoding):
                left[number] -= piece / step
                cached += piece / step
                if left[number] <= 0:
                    decoding.remove(number)
                    ends[number] = now
                    cached -= sum((arrivals[number][1].prefill, arrivals[number][1].decode))
        now += piece
    return ends


ARRIVALS = [(0.0, Turn(50, 30)), (0.5, Turn(20, 40)), (1.0, Turn(100, 10)), (9.0, Turn(10, 20))]


def test_requests_that_come_and_go_follow_the_law_of_a_step():
    rates = make_engine(step=0.05, step_per_request=0.02, step_per_cached_token=0.001, prefill_per_token=0.004)
    exact = in_small_pieces(rates, ARRIVALS)
    assert played(rates, ARRIVALS) == pytest.approx(exact, abs=0.01)
    for changed in ({"step_per_cached_token": 0.0}, {"step_per_request": 0.01}, {"prefill_per_token": 0.0}):
        law = {"step": 0.05, "step_per_request": 0.02, "step_per_cached_token": 0.001, "prefill_per_token": 0.004}
        wrong = played(make_engine(**{**law, **changed}), ARRIVALS)
        assert max(abs(a - b) for a, b in zip(wrong, exact, strict=True)) > 0.05, changed


def test_a_growing_cache_slows_each_step_down():
    """100 steps of one request, whose cache grows from 50 to 150 tokens: 100 x 0.1 at its mean of 100."""
    rates = make_engine(step=1e-9, step_per_cached_token=0.001)
    [end] = played(rates, [(0.0, Turn(50, 100))])
    assert end == pytest.approx(100 * 0.001 * 100, rel=1e-6)
