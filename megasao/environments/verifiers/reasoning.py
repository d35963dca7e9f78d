"""Scores of reasoning-gym's own verifiers. Only for processes in a sandbox: some evaluate the answer as Python.

Invariant: the score is that of the problem which the model saw; if another one comes out here, that is an error.
"""

import reasoning_gym

from megasao.environments.reasoning_gym import make_problem


def score(answer: str, dataset: str, settings: str, seed: int, question: str) -> float:
    """The data set's score of ``answer``, in [0, 1]; ``settings`` is JSON. Any exception is an error."""
    problems, entry = make_problem(dataset, settings, seed)
    if entry["question"] != question:
        raise ValueError(f"{dataset} gives another problem for seed {seed} here than the environment had")
    return float(problems.score_answer(answer, entry))


GRADERS = {"reasoning_gym": score}
_ = reasoning_gym.create_dataset  # imported here so that every worker is forked with it
