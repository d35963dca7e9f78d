"""What the records of evaluations come to: a summary, a comparison of two, a table of several.

Invariant: every number comes from the records, and says over how many problems and samples it is.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megasao.config.errors import UserError
from megasao.config.rundir import RunDirectory
from megasao.environments.benchmarks.table import BENCHMARKS
from megasao.evaluation.records import Manifest, Record, ResultDirectory
from megasao.evaluation.statistics import Estimate, compare, estimate, majority, pass_at
from megasao.observability.record import by_mode, read_evaluations


@dataclass(frozen=True)
class Result:
    """One benchmark of one result directory. ``problems``: the graded records of each."""

    manifest: Manifest
    problems: dict[str, list[Record]]
    excluded: dict[str, int]

    @property
    def samples(self) -> int:
        """Most graded samples of a problem."""
        return max((len(records) for records in self.problems.values()), default=0)

    def means(self) -> dict[str, float]:
        """Mean reward of each problem that has a graded sample."""
        return {name: sum(_rewards(r)) / len(r) for name, r in self.problems.items() if r}


def load_results(directory: Path) -> dict[str, Result]:
    """The benchmarks of a result directory, in the table's order. UserError if there is none."""
    found = {}
    for name in BENCHMARKS:
        one = ResultDirectory(directory / name)
        if one.exists:
            found[name] = _load(one)
    if not found:
        raise UserError(f"{directory} holds no results of `megasao eval`")
    return found


def _load(directory: ResultDirectory) -> Result:
    problems: dict[str, list[Record]] = {}
    excluded: dict[str, int] = {}
    for record in directory.read():
        graded = problems.setdefault(record.problem_id, [])
        if record.excluded is not None:
            excluded[record.excluded] = excluded.get(record.excluded, 0) + 1
        else:
            graded.append(record)
    return Result(directory.manifest(), problems, excluded)


def summarize(result: Result) -> list[str]:
    """Lines of text: mean@k, pass@k, maj@k with intervals, lengths, and what was left out."""
    n, manifest = result.samples, result.manifest
    lines = [f"{manifest.benchmark}: weights v{manifest.weight_version} of {manifest.checkpoint}"]
    if not result.means():
        return [*lines, f"  no graded response{_left_out(result)}"]
    lines.append(f"  mean@{n:<4} {_shown(estimate(list(result.means().values())))}{_left_out(result)}")
    for k in _powers(n):
        lines.append(f"  pass@{k:<4} {_shown(_over(result, k, partial(_pass_at, k)))}")
    if n > 1 and manifest.answer != "tests":  # work has no answer that could be voted on
        lines.append(f"  maj@{n:<5} {_shown(_over(result, n, _majority))}")
    records = [record for graded in result.problems.values() for record in graded]
    tokens = sum(record.tokens or 0 for record in records) / len(records)
    cut = sum(record.finish_reason != "done" for record in records) / len(records)
    lines.append(f"  {tokens:.1f} tokens a response, {100 * cut:.1f} % cut off")
    return lines


def compare_results(a: Path, b: Path) -> list[str]:
    """Two result directories problem by problem. UserError where they have no benchmark with the same data."""
    one, other = load_results(a), load_results(b)
    lines = [f"A = {a}", f"B = {b}"]
    for name in one.keys() & other.keys():
        if one[name].manifest.data_sha256 != other[name].manifest.data_sha256:
            raise UserError(f"{name}: A and B were measured on different data, so they cannot be compared")
    for name in [name for name in one if name in other]:
        first, second = one[name].means(), other[name].means()
        shared = [problem for problem in first if problem in second]
        if not shared:
            continue
        before, after = [first[p] for p in shared], [second[p] for p in shared]
        found = compare(before, after)
        lines.append(
            f"{name}: A {100 * sum(before) / len(shared):.1f}, B {100 * sum(after) / len(shared):.1f}, "
            f"B - A {_shown(found.difference)}, p = {found.p:.3g} (sign flips over {len(shared)} problems)"
        )
    if len(lines) == 2:
        raise UserError(f"{a} and {b} have no benchmark in common")
    return lines


def results_table(directories: Sequence[Path]) -> str:
    """A Markdown table: benchmarks down, results across, the best of a line in bold; mean over samples, in per cent.

    A directory is a result of ``megasao eval``, or a run: then the last evaluation of each benchmark in its background.
    UserError where there is neither.
    """
    results = {Path(os.path.abspath(directory)).name: _percents(directory) for directory in directories}
    if len(results) < len(directories):
        raise UserError("two of the directories have the same name, which the table is headed with")
    lines = ["| benchmark | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for name in BENCHMARKS:
        cells = [found.get(name) for found in results.values()]
        numbers = [cell for cell in cells if cell is not None]
        if numbers:
            best = max(numbers)
            texts = ["–" if c is None else f"**{c:.1f}**" if c == best else f"{c:.1f}" for c in cells]
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _percents(directory: Path) -> dict[str, float]:
    """By benchmark, where anything was graded."""
    run = RunDirectory(directory)
    if not run.evaluations.is_file():
        means = {name: list(result.means().values()) for name, result in load_results(directory).items()}
        return {name: round(100 * sum(of_one) / len(of_one), 1) for name, of_one in means.items() if of_one}
    evaluations = read_evaluations(run)
    found = {name: round(100 * rows[-1]["success"], 1) for name in BENCHMARKS if (rows := by_mode(evaluations, name))}
    if not found:
        raise UserError(
            f"{run.evaluations} has results of no benchmark; name some in evaluation.benchmarks, or measure the run's "
            "policy with `megasao eval --run`"
        )
    return found


def _over(result: Result, k: int, value: Callable[[list[Record]], float]) -> Estimate:
    """Over the problems that have k graded samples; there is one, since k is at most the most of all."""
    return estimate([value(records) for records in result.problems.values() if len(records) >= k])


def _pass_at(k: int, records: list[Record]) -> float:
    return pass_at(k, len(records), _right(records))


def _majority(records: list[Record]) -> float:
    return majority([record.answer for record in records], _rewards(records))


def _rewards(records: list[Record]) -> list[float]:
    return [record.reward if record.reward is not None else 0.0 for record in records]


def _right(records: list[Record]) -> int:
    return sum(reward >= 1 for reward in _rewards(records))


def _powers(n: int) -> list[int]:
    return [2**power for power in range(n.bit_length()) if 2**power <= n]


def _shown(found: Estimate) -> str:
    return f"{100 * found.value:5.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}] over {found.problems} problems"


def _left_out(result: Result) -> str:
    total = sum(result.excluded.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(result.excluded.items()))
    return f"; {total} responses excluded ({reasons})" if total else ""
