"""`megasao simulate`: a config at several sizes, or a measured run predicted from measured rates."""

from collections.abc import Callable
from pathlib import Path

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.simulation.calibrate import calibrated, measured, predicted
from megasao.simulation.fleet import SimulatedFleet
from megasao.simulation.lengths import Lengths, of_law, of_run
from megasao.simulation.outcome import Outcome, outcome, warnings
from megasao.simulation.rates import Source, Work, configured
from megasao.simulation.report import describe, describe_prediction, draw, write_json
from megasao.simulation.scale import MODES, one_replica, scaled


def sizes_of(text: str) -> list[int]:
    """Numbers of nodes; UserError for anything else."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(f"--nodes: expected whole numbers above 0 with commas between them, got {text!r}")
    return sizes


def simulate(
    config: Config,
    nodes: list[int],
    *,
    lengths: Path | None,
    json: Path | None,
    plot: Path | None,
    say: Callable[[str], None],
) -> None:
    """Simulate ``config`` on each number of nodes in each mode, and show what comes of it. UserError."""
    if plot is not None and plot.suffix != ".png":
        raise UserError(f"--plot: expected a name that ends in .png, got {plot}")
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{option}: the directory of {path} is not there; make it first")
    each_has = config.slurm.gpus_per_node if config.slurm is not None else 8
    try:
        work = _work(config)
        results, sources = outcomes(config, [count * (each_has or 1) for count in nodes], work, lengths)
    except ValueError as error:
        raise UserError(f"simulate: {error}") from error
    notes = warnings(results, config, one_replica(config))
    if lengths is not None:
        sources = [source for source in sources if not source.name.startswith("episode.")]
        notes = [f"lengths of episodes: drawn from {lengths}", *notes]
    say(describe(results, sources, notes))
    if json is not None:
        write_json(json, results, sources, notes)
    if plot is not None:
        draw(plot, results)


def outcomes(
    config: Config, sizes: list[int], work: Work, lengths: Path | None = None
) -> tuple[list[Outcome], list[Source]]:
    """Every size, in GPUs, in every mode; and where the rates are from.

    ValueError: there is no section ``simulate``, or the GPUs cannot be shared as the config shares them.
    """
    options = config.simulate
    if options is None:
        raise ValueError("the config has no section simulate: write the rates of your machines (docs/simulation.md)")
    _refuse_what_is_not_modelled(config)
    drawn = of_run(lengths, config) if lengths is not None else of_law(options.episode, config.environment.max_tokens)
    results, sources = [], []
    for gpus in sizes:
        for mode in MODES:
            run, trainer = scaled(config, gpus, mode)
            rates = configured(options, work, trainer)
            sources = list(rates.sources)
            history = SimulatedFleet(run, rates, drawn).run(options.steps)
            results.append(outcome(history, run, mode=mode, gpus=gpus, trainer_gpus=trainer, discard=options.discard))
    return results, sources


def _refuse_what_is_not_modelled(config: Config) -> None:
    """ValueError for what would be counted as something else."""
    if config.critic_is_separate:
        raise ValueError("critic.placement: only a critic on the actor's ranks is modelled; set it to colocated")
    if config.environment.compaction is not None:
        raise ValueError("environment.compaction: episodes of several segments are not modelled; set it to null")


def _work(config: Config) -> Work:
    """What `megasao plan` says; it needs torch, and seconds for a large model."""
    from megasao.planning import make_plan

    plan = make_plan(config)
    _, no_embedding, neither = plan.sizes.active
    routes = [] if plan.transfer is None else plan.transfer.routes
    seconds = next((route.seconds for route in routes if route.transport == config.weight_transport), None)
    return Work(no_embedding, neither, seconds)


def predict(run: Path, calibrate: Path, lengths: Path | None, say: Callable[[str], None]) -> None:
    """The wall time of ``run`` by the rates measured in ``calibrate``, beside its measured one. UserError."""
    here, there = _open(run), _open(calibrate)
    try:
        config, other = load_config(here.config), load_config(there.config)
        for each in (config, other):
            _refuse_what_is_not_modelled(each)
        rates = calibrated(there, other)
        drawn: Lengths = of_run(lengths or there.path, config)
        found = measured(here)
        # As long as the run was, whatever it was meant to be.
        loop = config.loop.model_copy(update={"steps": found.steps})
        history = SimulatedFleet(config.model_copy(update={"loop": loop}), rates, drawn).run()
    except ValueError as error:
        raise UserError(f"simulate: {error}") from error
    say(describe_prediction(predicted(history), found, rates.sources, str(calibrate)))


def _open(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    if not run.config.is_file():
        raise UserError(f"simulate: {path} is not a run directory (no config.yaml)")
    return run
