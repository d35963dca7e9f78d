"""The speeds that a simulated fleet goes by, and where each is from."""

from dataclasses import dataclass, field

from megasao.config.simulate import SimulateConfig


@dataclass(frozen=True)
class EngineRates:
    """One engine; seconds. ``stands_still``: while weights arrive too, not only when they are taken."""

    step: float
    step_per_request: float
    step_per_cached_token: float
    prefill_per_token: float
    kv_tokens: float
    commit: float = 0.0
    stands_still: bool = False


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the tokens of a step."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        """For so many tokens."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class TrainingRates:
    """The trainer. ``values``: the critic's forward pass; ``critic`` and ``actor``: one update."""

    values: Line
    critic: Line
    actor: Line
    overhead: float
    publish: float


@dataclass(frozen=True)
class Source:
    """A number as it is shown: what, how much, from where."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Pace:
    """How much longer things take than their rates say, in each of equal parts of a run: a machine that others use."""

    training: tuple[float, ...] = (1.0,)
    engine: tuple[float, ...] = (1.0,)

    def of_training(self, share: float) -> float:
        """At ``share`` of the run's steps, from 0 to 1."""
        return _part(self.training, share)

    def of_engine(self, share: float) -> float:
        """At ``share`` of the run's steps, from 0 to 1."""
        return _part(self.engine, share)


def _part(values: tuple[float, ...], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Rates:
    """Everything a simulated run needs to know about time; seconds."""

    engine: EngineRates
    training: TrainingRates
    transfer: float
    environment: float
    delivery: float
    sources: tuple[Source, ...] = field(default=())
    pace: Pace = Pace()


@dataclass(frozen=True)
class Work:
    """What `megasao plan` says of the model: parameters that a token meets without embedding, and seconds of an update
    of the engines' weights."""

    actor: float
    critic: float
    transfer: float | None


def configured(options: SimulateConfig, work: Work, trainer_gpus: int) -> Rates:
    """The rates of the config's section, for so many GPUs of the trainer.

    ValueError: neither the section nor the plan says how long new weights are on their way.
    """
    if options.transfer_s is not None:
        transfer, origin = options.transfer_s.value, options.transfer_s.source
    elif work.transfer is not None:
        transfer, origin = work.transfer, "megasao plan, at plan.link_gb_per_s"
    else:
        raise ValueError("simulate.transfer_s: null, and plan.rollout_gpus = 0 plans no transfer; give one of them")
    training = options.training
    per_operation = 1 / (trainer_gpus * training.peak_tflops.value * 1e12 * training.mfu.value)
    actor, critic = 2 * work.actor * per_operation, 2 * work.critic * per_operation
    optimizer = training.optimizer_s.value
    return Rates(
        engine=_engine(options),
        training=TrainingRates(
            values=Line(0.0, critic),
            critic=Line(optimizer, 3 * critic),
            actor=Line(optimizer, 3 * actor),
            overhead=training.overhead_s.value,
            publish=training.publish_s.value,
        ),
        transfer=transfer,
        environment=options.environment_s.value,
        delivery=options.delivery_s.value,
        sources=(
            *_written(options),
            Source("active parameters, actor", work.actor, "", "megasao plan, without the embedding"),
            Source("active parameters, critic", work.critic, "", "megasao plan, without embedding and head"),
            Source("transfer of weights", transfer, "s", origin),
        ),
    )


def _engine(options: SimulateConfig) -> EngineRates:
    engine = options.engine
    return EngineRates(
        step=engine.step_s.value,
        step_per_request=engine.step_per_request_s.value,
        step_per_cached_token=engine.step_per_cached_token_s.value,
        prefill_per_token=engine.prefill_per_token_s.value,
        kv_tokens=engine.kv_tokens.value,
        commit=engine.commit_s.value,
        stands_still=engine.pause == "transfer",
    )


def _written(options: SimulateConfig) -> list[Source]:
    """Every number of the section that has a source, by its path."""
    found = []
    sections = {"": options, "episode.": options.episode, "engine.": options.engine, "training.": options.training}
    for prefix, section in sections.items():
        for name in type(section).model_fields:
            rate = getattr(section, name)
            if name != "transfer_s" and hasattr(rate, "source"):
                found.append(Source(f"{prefix}{name}", rate.value, "", rate.source))
    return found
