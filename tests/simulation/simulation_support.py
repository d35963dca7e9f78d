"""Small fleets whose times a hand can compute."""

from typing import Any

from megasao.config import Config
from megasao.simulation.fleet import SimulatedFleet
from megasao.simulation.lengths import Lengths, Shape, Turn
from megasao.simulation.rates import EngineRates, Line, Rates, TrainingRates

NOTHING = Line(0.0, 0.0)


def make_config(**sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "unused"},
        "actor": {"optimizer": {"lr": 1e-4}},
        "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 0},
        "environment": {"max_tokens": 2000, "max_turn_tokens": 2000},
        "loop": {"steps": 10, "batch_size": 4, "max_lag": 4},
        "buffer": {"max_trajectories": 1000},
        "rollout": {"concurrency": 64, "workers": 1},
    }
    return Config.model_validate(
        {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    )


def make_engine(**changes: Any) -> EngineRates:
    plain = {"step": 0.1, "step_per_request": 0.0, "step_per_cached_token": 0.0, "prefill_per_token": 0.0}
    return EngineRates(**{**plain, "kv_tokens": 1e9, **changes})


def make_rates(*, engine: EngineRates | None = None, **changes: Any) -> Rates:
    """An actor's update takes 2 s; all else that is not named takes no time."""
    training = {"values": NOTHING, "critic": NOTHING, "actor": Line(2.0, 0.0), "overhead": 0.0, "publish": 0.0}
    training |= {name: changes.pop(name) for name in tuple(changes) if name in training}
    rest = {"transfer": 0.0, "environment": 0.0, "delivery": 0.0, **changes}
    return Rates(engine=engine or make_engine(), training=TrainingRates(**training), **rest)


def always(*turns: Turn) -> Lengths:
    """Every episode is alike."""
    return lambda seed: Shape(turns)


def make_fleet(config: Config, rates: Rates, lengths: Lengths | None = None) -> SimulatedFleet:
    return SimulatedFleet(config, rates, lengths or always(Turn(10, 10)))
