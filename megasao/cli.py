"""The command line. Every option lives in the config file; ``key=value`` overrides it.

Modules that import torch are imported inside the commands that need them, so that ``check`` answers at once.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from megasao.config.errors import UserError
from megasao.conversion.command import app as convert

if TYPE_CHECKING:
    from megasao.config import Config
    from megasao.config.rundir import RunDirectory

USER_ERROR = 2
RUN_FAILED = 1
INTERRUPTED = 130

app = typer.Typer(
    help="Asynchronous RL of mixture-of-experts language models: SAO on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(convert, name="convert")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERLAY.yaml | KEY.PATH=VALUE",
        help="Changes, the last one wins: more config files (configs/algorithms/grpo.yaml), or single values "
        "(loop.steps=100).",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in its existing run directory.")]
RunPath = Annotated[Path, typer.Option("--run", metavar="DIR", help="Run directory.")]


class Stage(StrEnum):
    """What a trainer rank does."""

    sft = "sft"
    value = "value"
    rl = "rl"


@app.command()
def check(
    config_file: ConfigFile,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print", help="Show the resolved config with the help of every field.")
    ] = False,
) -> None:
    """Validate a config without starting anything."""
    config, model_there = _load_checked(config_file, overrides, target="any")
    if print_config:
        from megasao.config.help import describe_config

        sys.stdout.write(describe_config(config))
        return
    typer.echo(f"{config_file} is valid.")
    if not model_there:
        typer.echo(f"note: model.path = {config.model.path} is not there yet, so the model was not checked")
    from megasao.config.unread import unread_settings

    for setting in unread_settings(config):
        typer.echo(f"note: {setting.path} is set, and nothing reads it here: {setting.reason}")


@app.command()
def plan(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Sizes, layers and memory of every pipeline stage, the way of the weights, and whether it fits."""
    from megasao.config.load import load_config

    config = load_config(config_file, overrides or [])
    from megasao.planning import make_plan
    from megasao.planning.report import describe_plan

    found = make_plan(config)
    typer.echo(describe_plan(found, config))
    if not found.fits:
        raise typer.Exit(RUN_FAILED)


@app.command()
def simulate(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG | RUN", help="Config, or a measured run.")],
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(metavar="N,N,...", help="Nodes of trainer and rollout fleet together.")] = (
        "8,16,32,64,128,256,512"
    ),
    lengths: Annotated[Path | None, typer.Option(metavar="RUN", help="Take episodes from this run's journal.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Predict the wall time of a run by the rates of this one.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them, as .png.")] = None,
) -> None:
    """A model of the fleet in time: sync, one-step-off and asynchronous at several sizes (docs/simulation.md)."""
    from megasao.config.load import load_config
    from megasao.simulation import command

    if calibrate is not None:
        if overrides or json or plot:
            raise UserError("simulate --calibrate: takes a run directory, and no changes, --json or --plot")
        command.predict(config_file, calibrate, lengths, typer.echo)
        return
    config, sizes = load_config(config_file, overrides or []), command.sizes_of(nodes)
    command.simulate(config, sizes, lengths=lengths, json=json, plot=plot, say=typer.echo)


@app.command()
def train(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train on this machine: fine-tuning and value pretraining if the config says so, then reinforcement learning.

    The algorithm is SAO unless the config names another: `megasao train CONFIG configs/algorithms/grpo.yaml`.
    """
    _launch(config_file, overrides, resume=resume, last=Stage.rl)


@app.command()
def sft(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Only the fine-tuning stage; `train --resume` goes on from its result."""
    _launch(config_file, overrides, resume=resume, last=Stage.sft)


@app.command("pretrain-value")
def pretrain_value(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Only the stages before RL: the critic learns the returns of trajectories in Arrow files.

    They are named in the section value_pretraining. Another run starts from the result with critic.path;
    `train --resume` goes on with this one.
    """
    _launch(config_file, overrides, resume=resume, last=Stage.value)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """Write the run's report, one self-contained HTML page."""
    from megasao.observability.record import load_record, require_metrics
    from megasao.observability.report import write_report

    directory, _ = _open_run(run)
    try:
        require_metrics(load_record(directory))
    except ValueError as error:
        raise UserError(str(error)) from error
    typer.echo(f"wrote {write_report(directory)}")


@app.command("eval")
def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG [CHANGE ...] | compare A B | table DIR ...",
            help="A config with changes, to measure a checkpoint; or two results to compare; or results for a table.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Hugging Face checkpoint to measure; default model.path.")
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run whose final policy to measure.")] = None,
    benchmarks: Annotated[str | None, typer.Option(metavar="A,B,...", help="Which benchmarks.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the records go; begun results go on.")] = Path(
        "results"
    ),
    show_list: Annotated[bool, typer.Option("--list", help="Name the benchmarks and their set-up.")] = False,
) -> None:
    """Measure a checkpoint on benchmarks: mean@k, pass@k, maj@k with intervals, and every response in Arrow files."""
    if show_list:
        from megasao.environments.benchmarks.table import markdown_table

        typer.echo(markdown_table())
        return
    match words or []:
        case []:
            raise UserError("eval: expected a config, `compare A B`, `table DIR ...` or --list")
        case ["compare", *directories]:
            from megasao.evaluation.results import compare_results

            if len(directories) != 2:
                raise UserError(f"eval compare: expected two result directories, got {len(directories)}")
            typer.echo("\n".join(compare_results(Path(directories[0]), Path(directories[1]))))
        case ["table", *directories]:
            from megasao.evaluation.results import results_table

            if not directories:
                raise UserError("eval table: expected at least one directory, of a result or of a run")
            typer.echo(results_table([Path(directory) for directory in directories]))
        case [config_file, *overrides]:
            from megasao.config.load import load_config
            from megasao.evaluation import command

            config, chosen = load_config(config_file, overrides), command.choose(benchmarks)
            with _kept_when_interrupted():
                command.run_evaluation(config, command.subject(config, checkpoint, run), chosen, out, typer.echo)


@app.command()
def status(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """How a run does: steps, speed, staleness, rollouts, last checkpoint, errors. From any node that sees RUN."""
    from megasao.observability.status import describe_status

    typer.echo(describe_status(*_open_run(run)))


@app.command()
def info() -> None:
    """Versions of what training depends on, and what this machine offers."""
    from megasao.launch.about import about

    for name, value in about().items():
        typer.echo(f"{name:<18} {value}")


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="collapse, ablation, online or staleness; or all.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each arm; default 5, with --quick 1.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Very short runs, to see whether it works.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes, one core each; default: all cores.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the page goes; default docs/studies, with --quick build/quick."),
    ] = None,
) -> None:
    """Run a study (the arms of configs/studies/NAME.yaml, seed by seed): a table, every run's numbers, and a figure.

    What is finished is kept in build/studies, so an interrupted study goes on where it was.
    """
    from megasao.studies.command import run_studies

    with _kept_when_interrupted():
        run_studies(name, seeds=seeds or (1 if quick else 5), quick=quick, jobs=jobs, out=out, say=typer.echo)


@app.command()
def slurm(
    config_file: ConfigFile,
    overrides: Overrides = None,
    arguments: Annotated[bool, typer.Option("--arguments", help="Only the arguments of sbatch, a line each.")] = False,
    header: Annotated[bool, typer.Option("--header", help="Only the same as #SBATCH lines of a script.")] = False,
) -> None:
    """What a run asks of a Slurm cluster, and every step that it would start. Submits nothing."""
    from megasao.config.load import load_config
    from megasao.slurm.command import describe

    if arguments and header:
        raise UserError("slurm: --arguments and --header show the same in two forms; give one of them")
    config = load_config(config_file, overrides or [])
    typer.echo(describe(config, "arguments" if arguments else "header" if header else "plan"))


@app.command("slurm-job")
def slurm_job(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Inside a Slurm job: the whole run (started by slurm/glm_scale.sh)."""
    from megasao.launch.supervisor import RoleFailed
    from megasao.slurm.job import Job

    config, model_there = _load_checked(config_file, overrides, target="cluster")
    if not model_there:
        raise UserError(_no_model(config))
    try:
        job = Job.of(config, os.environ)
        outcome = job.perform(resume=resume)
    except RoleFailed as failure:
        _complain(str(failure))
        raise typer.Exit(RUN_FAILED) from None
    if outcome == "interrupted":
        _complain("interrupted; everything is stopped. Continue with: slurm/glm_scale.sh --resume ...")
        raise typer.Exit(INTERRUPTED)
    if outcome == "finished":
        from megasao.observability.summary import print_summary

        print_summary(job.run, config)
        _show_results(job.run)


@app.command("slurm-node")
def slurm_node(run: RunPath, component: Annotated[int, typer.Option(min=0, help="Component of the job.")]) -> None:
    """Inside a Slurm job: check this node before anything starts (started by the launcher)."""
    from megasao.config.rundir import RunDirectory
    from megasao.slurm.node import check_node

    report = check_node(RunDirectory(run), component)
    typer.echo(f"{report.node}: {'; '.join(report.problems) or 'as it should be'}")


@app.command()
def controller(run: RunPath) -> None:
    """Role: the controller of a run (started by the launcher)."""
    from megasao.controller.main import run as run_controller

    directory, config = _begin_role(run)
    _refuse_before_launch(directory)
    run_controller(directory, config)


@app.command()
def rollout(
    run: RunPath, index: Annotated[int, typer.Option(min=0, help="Which of the run's rollout workers.")] = 0
) -> None:
    """Role: one rollout worker (started by the launcher)."""
    directory, config = _begin_role(run)
    if index >= config.rollout.workers:
        raise UserError(f"--index {index}: the run has rollout.workers = {config.rollout.workers}, counted from 0")
    _refuse_before_launch(directory)
    from megasao.rollout.worker import run as run_worker

    run_worker(directory, config, index)


@app.command()
def engine(
    run: RunPath,
    index: Annotated[int | None, typer.Option(min=0, help="Which of the run's SGLang servers; 0 if not said.")] = None,
    add: Annotated[
        int | None, typer.Option(min=0, metavar="WORKER", help="One more server, of this rollout worker, here.")
    ] = None,
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Drain this server (engine-0-1) and let it end.")
    ] = None,
) -> None:
    """Role: one SGLang server (started by the launcher). With --add or --remove: change the servers of a run that goes
    on; an added one runs in this process, until it is removed or ended."""
    directory, config = _begin_role(run)
    if add is not None or remove is not None:
        if index is not None:
            raise UserError(f"--index {index} is of the launcher's servers; leave it out with --add and --remove")
        _refuse_before_launch(directory)
        _change_servers(directory, config, add, remove)
        return
    from megasao.config.rundir import all_engine_names

    names = all_engine_names(config)
    which = index or 0
    if which >= len(names):
        raise UserError(f"--index {which}: the run has {len(names)} SGLang servers, counted from 0")
    _refuse_before_launch(directory)
    from megasao.rollout.server import run as run_server

    run_server(directory, config, names[which])


def _refuse_before_launch(run: "RunDirectory") -> None:
    try:
        launched = run.controller_address() is not None
    except ValueError as error:
        raise UserError(str(error)) from error
    if not launched:
        raise UserError(f"{run.path} was never launched (it has no endpoints.json); `megasao train CONFIG` does that")


def _change_servers(run: "RunDirectory", config: "Config", add: int | None, remove: str | None) -> None:
    from megasao.config.rundir import server_ports
    from megasao.launch.ports import free_ports
    from megasao.rollout import registration

    try:
        if remove is not None:
            registration.remove(run, config, remove)
        if add is None:
            return
        [port] = free_ports(1, promised=server_ports(config) or ())
        name = registration.add(run, config, add, port)
    except (ValueError, TimeoutError) as error:
        raise UserError(str(error)) from error
    from megasao.rollout.server import ServerDied
    from megasao.rollout.server import run as run_server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # its server must not outlive it
    typer.echo(f"{name} starts")
    try:
        run_server(run, config, name, added=True)
    except ServerDied as died:
        _complain(f"{name}: {died}")
        raise typer.Exit(RUN_FAILED) from None
    finally:
        run.change_engines(lambda engines: registration.without(engines, name))


@app.command()
def trainer(
    run: RunPath, stage: Annotated[Stage, typer.Option(help="Fine-tuning, value pretraining or RL.")] = Stage.rl
) -> None:
    """Role: one trainer rank (started by the launcher, torchrun or srun; the world is in the environment)."""
    from megasao.launch.world import world_of_srun

    directory, config = _begin_role(run)
    os.environ.update(world_of_srun(os.environ))
    if stage is Stage.sft:
        from megasao.training.sft import run as run_sft

        run_sft(directory, config)
    elif stage is Stage.value:
        from megasao.training.pretrain_value import run as run_pretrain_value

        run_pretrain_value(directory, config)
    else:
        from megasao.training.main import run as run_trainer

        run_trainer(directory, config)


@app.command()
def critic(run: RunPath) -> None:
    """Role: one rank of a critic in a world of its own (started by the launcher; the world is in the environment)."""
    from megasao.launch.world import world_of_srun

    directory, config = _begin_role(run)
    if not config.critic_is_separate:
        raise UserError(f"{run}: the critic is no role of its own here (critic.placement is not separate)")
    os.environ.update(world_of_srun(os.environ))
    from megasao.training.main import run_critic

    run_critic(directory, config)


def _load_checked(
    config_file: Path, overrides: list[str] | None, *, target: Literal["machine", "cluster", "any"] = "machine"
) -> "tuple[Config, bool]":
    """The config, and whether its model is there.

    ``target`` is where the run will be; "any": on a cluster if the config has one, and SGLang is asked if it is here.
    """
    from megasao.config.load import load_with_places
    from megasao.launch.preflight import preflight

    config, document = load_with_places(config_file, overrides or [])
    on_cluster = target == "cluster" or (target == "any" and config.slurm is not None)
    ask_sglang = not on_cluster or (target == "any" and Path(config.rollout.sglang.python).exists())
    return config, preflight(config, document, on_cluster=on_cluster, ask_sglang=ask_sglang)


def _no_model(config: "Config") -> str:
    return (
        f"model.path = {config.model.path} does not exist; give the directory of a Hugging Face checkpoint (nothing is "
        "downloaded by its name)"
    )


def _open_run(path: Path) -> "tuple[RunDirectory, Config]":
    """A run directory that exists, with its config."""
    from megasao.config.load import load_config
    from megasao.config.rundir import RunDirectory

    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise UserError(f"{path} is not a run directory (no config.yaml); `megasao train CONFIG` makes one")
    return directory, load_config(directory.config)


def _begin_role(path: Path) -> "tuple[RunDirectory, Config]":
    """The run of a role, whose log lines go to standard error (the launcher keeps it in a file).

    What processes that were killed have left on this node, of whatever run, is removed first.
    """
    import logging

    from megasao.weights.ownership import clear_abandoned

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megasao").setLevel(logging.INFO)
    run, config = _open_run(path)
    clear_abandoned(Path(config.weights.node_directory))
    return run, config


def _launch(config_file: Path, overrides: list[str] | None, *, resume: bool, last: Stage) -> None:
    from megasao.launch.local import launch
    from megasao.launch.supervisor import RoleFailed

    config, model_there = _load_checked(config_file, overrides)
    if not model_there:
        raise UserError(_no_model(config))
    if last is Stage.sft and config.sft is None:
        raise UserError(f"{config_file} has no section sft, so there is nothing to fine-tune")
    if last is Stage.value and config.value_pretraining is None:
        raise UserError(
            f"{config_file} has no section value_pretraining, so there is nothing to pretrain on; add "
            "configs/stages/value_pretraining.yaml and value_pretraining.trajectories=[runs/EARLIER]"
        )
    again, onward = (_resuming(stage, config_file, overrides) for stage in (last, Stage.rl))
    try:
        outcome, directory = launch(config, resume=resume, last=last.value)
    except RoleFailed as failure:
        _complain(f"{failure}\nOnce the cause is mended, continue with: {again}")
        raise typer.Exit(RUN_FAILED) from None
    if outcome == "interrupted":
        _complain(f"interrupted; everything is stopped. Continue with: {again}")
        raise typer.Exit(INTERRUPTED)
    if last is Stage.sft:
        typer.echo(f"fine-tuned checkpoint: {directory.sft}\ncontinue with: {onward}")
        return
    if last is Stage.value:
        typer.echo(f"{_value_result(directory)}\nvalue model: {directory.value}\ncontinue with: {onward}")
        return
    _show_results(directory)


def _resuming(last: Stage, config_file: Path, overrides: list[str] | None) -> str:
    """The command that goes on with a run up to the stage ``last``."""
    command = {Stage.sft: "sft", Stage.value: "pretrain-value", Stage.rl: "train"}[last]
    return shlex.join(["megasao", command, str(config_file), *(overrides or []), "--resume"])


def _show_results(directory: "RunDirectory") -> None:
    from megasao.observability.report import write_report

    typer.echo(f"policy: {directory.final_policy}\nreport: {write_report(directory)}")


def _value_result(directory: "RunDirectory") -> str:
    """What value pretraining came to."""
    from megasao.observability.formats import count, number
    from megasao.observability.jsonl import read_metrics

    row = read_metrics(directory.metrics / "value.jsonl")[-1]
    variance, trajectories = row.get("value/held_out/explained_variance"), row.get("value/held_out/trajectories")
    text = f"explained variance on {count(trajectories)} held-out trajectories: {number(variance)}"
    return text if variance is not None else f"{text} (their returns are all the same)"


@contextmanager
def _kept_when_interrupted() -> Iterator[None]:
    """Say what follows from an interrupt of work that goes on where it was."""
    try:
        yield
    except KeyboardInterrupt:
        _complain("interrupted; what is finished is kept, and the same command goes on")
        raise typer.Exit(INTERRUPTED) from None


def _complain(message: str) -> None:
    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: what the user can mend is one clean message and exit code 2; anything else keeps its traceback.

    ``arguments``: those of the process where None.
    """
    try:
        app(arguments, prog_name="megasao")
    except UserError as error:
        _complain(f"error: {error}")
        sys.exit(USER_ERROR)
