"""``megasao eval``: the words of the command line, and what they start."""

from pathlib import Path

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.rundir import RunDirectory
from megasao.environments.benchmarks.table import BENCHMARKS, Benchmark
from megasao.environments.options import nearest
from megasao.evaluation.evaluate import Say, Subject, evaluate
from megasao.evaluation.results import load_results, summarize
from megasao.observability.jsonl import read_metrics


def choose(names: str | None) -> list[Benchmark]:
    """The benchmarks of a comma-separated list; UserError names one that does not exist."""
    words = [word.strip() for word in (names or "").split(",") if word.strip()]
    if not words:
        raise UserError("--benchmarks: name some, with commas between; `megasao eval --list` shows them")
    for word in words:
        if word not in BENCHMARKS:
            raise UserError(f"--benchmarks: unknown benchmark {word!r}{nearest(word, list(BENCHMARKS))}")
    return [BENCHMARKS[word] for word in dict.fromkeys(words)]


def subject(config: Config, checkpoint: Path | None, run: Path | None) -> Subject:
    """The weights to measure: a checkpoint, a run's final policy, or ``model.path``. UserError if there are none."""
    if checkpoint is not None and run is not None:
        raise UserError("--checkpoint and --run exclude each other")
    if run is None:
        return Subject(checkpoint or Path(config.model.path), 0)
    directory = RunDirectory(run)
    if not (directory.final_policy / "config.json").is_file():
        raise UserError(f"{run} has no final policy ({directory.final_policy}); is the run finished?")
    rows = read_metrics(directory.metrics / "trainer.jsonl")
    versions = [row["weight_version"] for row in rows if "weight_version" in row]
    if not versions:
        raise UserError(f"{run} has no metrics that say which weight version its policy is")
    return Subject(directory.final_policy, versions[-1])


def run_evaluation(config: Config, weights: Subject, benchmarks: list[Benchmark], out: Path, say: Say) -> None:
    """Measure and tell the result. UserError for what the user can mend."""
    try:
        evaluate(config, weights, benchmarks, out, say)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    results = load_results(out)
    for benchmark in benchmarks:
        for line in summarize(results[benchmark.name]):
            say(line)
