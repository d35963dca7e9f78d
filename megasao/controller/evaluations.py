"""Evaluations in progress. Pure.

Invariants:
- every problem counts once: as a result, or as a failure after ``max_attempts``; failures are not zeros;
- an evaluation asked for again, finished or not, is the same evaluation;
- its line carries the versions that produced the tokens, as the results report them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megasao.controller.leases import Key
from megasao.trajectories.ledger import EvaluationStarted
from megasao.transport.messages import EvaluationResult

SOLVED_ABOVE = 0.5


@dataclass
class Evaluation:
    """One evaluation and what came of it so far. ``started`` is on the monotonic clock, seconds."""

    asked: EvaluationStarted
    problems: int
    started: float
    pending: deque[int]
    attempts: dict[int, int] = field(default_factory=dict)
    results: dict[int, EvaluationResult] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def is_open(self, index: int) -> bool:
        """Whether this problem is still wanted."""
        return 0 <= index < self.problems and index not in self.results and index not in self.failed

    @property
    def is_done(self) -> bool:
        """Whether every problem has an outcome."""
        return len(self.results) + len(self.failed) == self.problems

    def line(self, now: float, time: float) -> dict[str, Any]:
        """The line of the evaluations file; means are over the problems that have a result."""
        results = list(self.results.values())
        counted = len(results)
        solved = sum(result.reward > SOLVED_ABOVE for result in results)
        return {
            "evaluation_id": self.asked.evaluation_id,
            "step": self.asked.step,
            "mode": self.asked.mode,
            "problems": self.problems,
            "solved": solved,
            "success": solved / counted if counted else None,
            "success_by_task": success_by_task(results),
            "truncated": sum(result.truncated for result in results) / counted if counted else None,
            "response_tokens": sum(result.action_tokens for result in results) / counted if counted else None,
            "failures": len(self.failed),
            "oldest_version": min((result.oldest_version for result in results), default=None),
            "newest_version": max((result.newest_version for result in results), default=None),
            "seconds": round(now - self.started, 3),
            "time": time,
        }


class EvaluationBook:
    """All evaluations of a run: the finished ones by name, the open ones in order of asking."""

    def __init__(self, problems: Callable[[str], int], max_attempts: int, finished: set[str]) -> None:
        """``problems``: how many episodes an evaluation of a mode has."""
        self._problems = problems
        self._max_attempts = max_attempts
        self._finished = set(finished)
        self._open: dict[str, Evaluation] = {}

    @property
    def open(self) -> list[str]:
        """Ids of the evaluations that have not ended."""
        return list(self._open)

    def start(self, asked: EvaluationStarted, now: float) -> bool:
        """Begin, unless it was asked for before; whether it is new."""
        if asked.evaluation_id in self._finished or asked.evaluation_id in self._open:
            return False
        problems = self._problems(asked.mode)
        self._open[asked.evaluation_id] = Evaluation(asked, problems, now, deque(range(problems)))
        return True

    def take(self, version: int | None) -> tuple[Evaluation, int] | None:
        """The next problem to lease, of evaluations whose weights the trainer has reached."""
        for evaluation in self._open.values():
            if version is None or evaluation.asked.version > version:
                continue
            while evaluation.pending:
                index = evaluation.pending.popleft()
                if evaluation.is_open(index):
                    return evaluation, index
        return None

    def get(self, key: Key) -> Evaluation | None:
        """The evaluation, if it is open and still wants this problem."""
        evaluation = self._open.get(key.stream)
        return evaluation if evaluation is not None and evaluation.is_open(key.index) else None

    def give_back(self, key: Key) -> None:
        """Its lease ended without result."""
        evaluation = self.get(key)
        if evaluation is not None and key.index not in evaluation.pending:
            evaluation.pending.append(key.index)

    def fail(self, key: Key) -> bool:
        """An attempt failed; whether the problem is given up now."""
        evaluation = self.get(key)
        if evaluation is None:
            return False
        attempts = evaluation.attempts[key.index] = evaluation.attempts.get(key.index, 0) + 1
        if attempts < self._max_attempts:
            self.give_back(key)
            return False
        evaluation.failed.add(key.index)
        return True

    def adopt(self, key: Key) -> bool:
        """A worker says it is at work on this problem; True if it was on nobody's lease and is still wanted."""
        evaluation = self.get(key)
        if evaluation is None or key.index not in evaluation.pending:
            return False
        evaluation.pending.remove(key.index)
        return True

    def record(self, key: Key, result: EvaluationResult) -> None:
        """Take in a result; one that is no longer wanted changes nothing."""
        evaluation = self.get(key)
        if evaluation is not None:
            evaluation.results[key.index] = result

    def take_done(self, now: float, time: float) -> list[dict[str, Any]]:
        """Lines of the evaluations that have just ended."""
        done = [evaluation for evaluation in self._open.values() if evaluation.is_done]
        for evaluation in done:
            del self._open[evaluation.asked.evaluation_id]
            self._finished.add(evaluation.asked.evaluation_id)
        return [evaluation.line(now, time) for evaluation in done]


def success_by_task(results: Iterable[EvaluationResult]) -> dict[str, float]:
    """The share that is solved, of each task; in order of name."""
    found: dict[str, list[bool]] = {}
    for result in results:
        found.setdefault(result.task, []).append(result.reward > SOLVED_ABOVE)
    return {task: sum(solved) / len(solved) for task, solved in sorted(found.items())}


def problem_with(result: EvaluationResult) -> str | None:
    """Why a result cannot be counted, or None."""
    if not math.isfinite(result.reward):
        return f"reward: {result.reward} is not finite"
    if min(result.action_tokens, result.oldest_version) < 0 or result.total_tokens < result.action_tokens:
        return f"impossible counts: {result.action_tokens} action tokens of {result.total_tokens}"
    if result.newest_version < result.oldest_version:
        return f"newest_version {result.newest_version} is below oldest_version {result.oldest_version}"
    return None
