"""Scores of reasoning-gym's own verifiers. Only for processes in a sandbox: some evaluate the answer as Python.

Invariant: the score is that of the problem which the model saw; if another one comes out here, that is an error.
"""

import json
from functools import lru_cache
from typing import Any

import reasoning_gym


def score(answer: str, dataset: str, settings: str, index: int, question: str) -> float:
    """The data set's score of ``answer``, in [0, 1]; ``settings`` is JSON. Any exception is an error."""
    problems = _dataset(dataset, settings)
    entry = problems[index]
    if entry["question"] != question:
        raise ValueError(f"{dataset} gives another problem {index} here than the environment had")
    return float(problems.score_answer(answer, entry))


@lru_cache(maxsize=64)
def _dataset(name: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(settings))


GRADERS = {"reasoning_gym": score}
