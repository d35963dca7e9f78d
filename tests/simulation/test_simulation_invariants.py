"""Whatever the fleet: nothing is lost, nothing too old is trained on, and the same again is the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_support import make_config, make_engine, make_fleet, make_rates

from megasao.config.simulate import EpisodeConfig
from megasao.simulation.fleet import SimulatedFleet
from megasao.simulation.lengths import of_law
from megasao.simulation.rates import Line

LAW = of_law(
    EpisodeConfig.model_validate(
        {
            "response": "lognormal",
            "sigma": 1.0,
            "mean": {"value": 100.0, "source": "test"},
            "prompt_tokens": {"value": 20.0, "source": "test"},
            "turns": 3,
            "observation_tokens": {"value": 5.0, "source": "test"},
        }
    ),
    2000,
)
RATES = make_rates(
    engine=make_engine(step=0.01, step_per_request=0.002, prefill_per_token=1e-4, kv_tokens=6000, commit=0.1),
    actor=Line(0.5, 1e-3),
    transfer=0.5,
    environment=0.2,
    delivery=0.01,
)


def fleet(mode="async", *, lag=2, seed=0, workers=2, room=40, group=1, kind=SimulatedFleet):
    config = make_config(
        run={"seed": seed},
        loop={"mode": mode, "max_lag": lag, "steps": 12, "batch_size": 8, "group_size": group},
        rollout={"workers": workers, "concurrency": 12},
        buffer={"max_trajectories": room},
    )
    return kind(config, RATES, LAW)


def check_conservation(one: SimulatedFleet) -> None:
    """Every lease has become one thing; what was handed out was handed out once."""
    state = one.state
    trained = sum(step.trajectories for step in one.history.steps)
    dropped = sum(state.batches.dropped.values())
    ended = trained + dropped + one.history.recalled
    assert one.history.leases == ended + len(state.batches.buffer) + len(state.leases)
    on_lease = {held.lease_id for held in state.leases.all()}
    assert on_lease == one._episodes.keys(), "workers are at work on exactly what the controller thinks"


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["sync", "async"]),
    lag=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 4),
    room=st.integers(8, 80),
    group=st.sampled_from([1, 2, 4]),
)
def test_nothing_is_lost_and_nothing_is_too_old(mode, lag, seed, workers, room, group):
    one = fleet(mode, lag=lag, seed=seed, workers=workers, room=room, group=group)
    steps = one.run().steps
    check_conservation(one)
    assert all(len(step.lags) == 8 and max(step.lags) <= (0 if mode == "sync" else lag) for step in steps)
    for step, following in pairwise(steps):
        assert step.asked <= step.began <= step.ended == following.asked
    assert steps[-1].busy <= workers * steps[-1].ended + 1e-6


def test_a_fleet_that_loses_an_episode_is_noticed():
    class Losing(SimulatedFleet):
        lost = 0

        def _deliver(self, episode):
            if self.history.steps and not self.lost:
                self.lost += 1
                self.state.leases.release(episode.lease.lease_id)
                del self._episodes[episode.lease.lease_id]
                return
            super()._deliver(episode)

    one = fleet(kind=Losing)
    one.run()
    assert one.lost
    with pytest.raises(AssertionError):
        check_conservation(one)


def test_leases_of_groups_that_died_are_recalled():
    one = fleet(lag=0, room=8, group=2, workers=1)
    one.run()
    assert one.history.recalled > 0
    check_conservation(one)


def test_the_bound_binds_here():
    """With a wider bound the same fleet does train on older ones, so that the bound above is not idle."""
    assert max(lag for step in fleet(lag=6, room=80).run().steps for lag in step.lags) > 2


def test_asynchronous_is_never_slower_than_synchronous_with_the_same_episodes():
    for seed in range(5):
        seconds = {mode: fleet(mode, seed=seed, lag=4, workers=3).run().seconds for mode in ("sync", "async")}
        assert seconds["async"] <= seconds["sync"], seed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_controller_is_left_alone_only_where_it_would_give_nothing(mode):
    class Asking(SimulatedFleet):
        def _is_full(self):
            return False

    for lag, room in ((1, 40), (4, 16), (0, 24)):
        assert fleet(mode, lag=lag, room=room).run() == fleet(mode, lag=lag, room=room, kind=Asking).run()


def test_the_same_again_is_the_same_and_another_seed_is_not():
    one, again, other = (fleet(seed=seed).run() for seed in (3, 3, 4))
    assert one == again
    assert one != other


def test_modes_play_the_same_episodes():
    """The first batch of both is made of the first 8 leases where nothing else is begun."""
    sync, other = (fleet(mode, room=8).run().steps[0] for mode in ("sync", "async"))
    assert sync.tokens == other.tokens


def test_a_run_that_stands_still_says_so():
    """A cache without room for any episode: the config refuses that, and the model does not wait for ever."""
    one = make_fleet(make_config(), replace(RATES, engine=make_engine(kv_tokens=1)))
    with pytest.raises(RuntimeError, match=r"stands still before step 0: 0 trajectories wait, .* on lease, 4 needed"):
        one.run()
