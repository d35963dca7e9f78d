"""Benchmarks as the background evaluation of a run: their problems by number, the same in controller and workers.

Invariant: number n of a benchmark is the same problem and the same sample wherever it is asked for; each problem comes
``samples`` times.
"""

from dataclasses import dataclass

from megasao.config import Config
from megasao.config.rollout import EnvironmentConfig
from megasao.environments.benchmarks.sources import locate
from megasao.environments.benchmarks.table import BENCHMARKS, Benchmark
from megasao.environments.mathematics import GRADERS, MathEnvironment, MathOptions
from megasao.environments.options import nearest, read_options
from megasao.environments.rows import load_problems
from megasao.environments.swebench.environment import SwebenchEnvironment, SwebenchOptions
from megasao.environments.swebench.rows import load_instances
from megasao.environments.verifiers.pool import VerifierPool

BenchmarkEnvironment = MathEnvironment | SwebenchEnvironment


@dataclass(frozen=True)
class BackgroundBenchmark:
    """One benchmark of a run. ``environment`` has its problems as the eval split, ``limits`` those of a response."""

    environment: BenchmarkEnvironment
    limits: EnvironmentConfig
    samples: int

    @property
    def responses(self) -> int:
        """How many responses one evaluation takes."""
        return self.samples * self.environment.size("eval")

    def problem(self, number: int) -> int:
        """The index of the problem that response ``number`` answers."""
        return number % self.environment.size("eval")


def benchmark_environment(config: Config, benchmark: Benchmark, pool: VerifierPool) -> BenchmarkEnvironment:
    """Its problems as the eval split. ValueError where its file cannot be had or read, or there is no sandbox."""
    settings = config.benchmarks
    data = locate(benchmark.name, settings.data, settings.sources)
    if benchmark.answer == "tests":
        instances = load_instances(data)[: settings.problems]
        return SwebenchEnvironment(_swebench_options(config), {"train": [], "eval": instances})
    problems = load_problems(data)[: settings.problems]
    options = MathOptions(data=str(data), template=benchmark.template, chat=settings.chat, answer=benchmark.answer)
    return MathEnvironment(options, {"train": [], "eval": problems}, pool)


def check_settings(config: Config) -> None:
    """ValueError for a source of no benchmark, and for options that swebench_verified does not have: asked for or not,
    so that nothing in section benchmarks goes unread."""
    known = list(BENCHMARKS)
    for name in config.benchmarks.sources:
        if name not in BENCHMARKS:
            raise ValueError(
                f"benchmarks.sources.{name}: no such benchmark{nearest(name, known)}; there are {', '.join(known)}"
            )
    _swebench_options(config)


def background_benchmarks(config: Config) -> dict[str, BackgroundBenchmark]:
    """Those of ``evaluation.benchmarks``, by name. ValueError for an unknown name, or data that cannot be had."""
    check_settings(config)
    pool = VerifierPool(GRADERS)
    found = {}
    for name in config.evaluation.benchmarks:
        if name not in BENCHMARKS:
            known = list(BENCHMARKS)
            guess = nearest(name, known)
            raise ValueError(f"evaluation.benchmarks: no benchmark {name!r}{guess}; there are {', '.join(known)}")
        benchmark = BENCHMARKS[name]
        environment, limits = benchmark_environment(config, benchmark, pool), benchmark_limits(config, benchmark)
        found[name] = BackgroundBenchmark(environment, limits, config.benchmarks.samples or benchmark.samples)
    return found


def benchmark_limits(config: Config, benchmark: Benchmark) -> EnvironmentConfig:
    """Its turns, in up to ``benchmarks.max_tokens`` with the prompt."""
    longest = config.benchmarks.max_tokens
    return EnvironmentConfig(name="math", max_turns=benchmark.turns, max_tokens=longest, max_turn_tokens=longest)


def _swebench_options(config: Config) -> SwebenchOptions:
    given = config.benchmarks.swebench
    taken = sorted({"data", "eval_data", "chat"} & set(given))
    if taken:
        raise ValueError(f"benchmarks.swebench.{taken[0]}: the benchmark has its own; use benchmarks.sources or .chat")
    try:
        return read_options(SwebenchOptions, {**given, "chat": config.benchmarks.chat}, owner="swebench")
    except ValueError as error:
        raise ValueError(str(error).replace("environment.options.", "benchmarks.swebench.", 1)) from error
