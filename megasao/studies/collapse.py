"""Study `collapse`: which group-relative objectives survive stale rollouts (arXiv 2606.03070).

Two settings: every rollout 16 versions old, and the paper's threshold, half of a step stale (1 to 16 versions) and half
fresh, at a higher learning rate. S is the mean token NLL of a response under the current policy, nats.
"""

from collections.abc import Sequence
from pathlib import Path

from megasao.studies.figures import draw_curves, figure
from megasao.studies.study import CHAIN_MODEL, LAST, SHORT_CHAIN, Arm, Numbers, Run, Study, mean_after

ALL_OLD = ("loop.max_stale_share=1", "rollout.logprobs=always")
HALF_OLD = ("loop.max_stale_share=0.5", "actor.optimizer.lr=1e-3", "rollout.logprobs=always")
COLLAPSE_ARMS = (
    Arm("naive", ("naive", *ALL_OLD)),
    Arm("gpg", ("gpg", *ALL_OLD)),
    Arm("grpo", ("grpo", *ALL_OLD)),
    Arm("spo", ("spo", *ALL_OLD)),
    Arm("asympo", ("asympo", *ALL_OLD)),
    Arm("spo_alpha_0", ("spo", *ALL_OLD, "algorithm.objective.alpha=0")),
    Arm("spo_alpha_1", ("spo", *ALL_OLD, "algorithm.objective.alpha=1")),
    Arm("naive_tight_clip", ("naive", *ALL_OLD, "actor.optimizer.clip_grad=0.1")),
    Arm("grpo_no_clip", ("grpo", *ALL_OLD, "actor.optimizer.clip_grad=0")),
    Arm("grpo_dis", ("grpo_dis", *ALL_OLD)),
    Arm("naive_fresh", ("naive", *ALL_OLD, "loop.max_lag=0")),
    Arm("half_naive", ("naive", *HALF_OLD)),
    Arm("half_gpg", ("gpg", *HALF_OLD)),
    Arm("half_grpo", ("grpo", *HALF_OLD)),
    Arm("half_spo", ("spo", *HALF_OLD)),
    Arm("half_asympo", ("asympo", *HALF_OLD)),
)
DRAWN = ("naive", "gpg", "grpo", "spo", "asympo")


def numbers(run: Run) -> Numbers:
    """The columns of the table."""
    negative, positive = mean_after(run, "actor/negative_loss", 0), mean_after(run, "actor/positive_loss", 0)
    return {
        "start reward": run.records[0]["evaluation/sampled"],
        "end reward": mean_after(run, "evaluation/sampled", LAST),
        "S+ at the end": mean_after(run, "actor/positive_nll", LAST),
        "S- at the end": mean_after(run, "actor/negative_nll", LAST),
        "loss balance": None if not positive or negative is None else -negative / positive,
        "entropy at the end": mean_after(run, "behaviour/entropy", LAST),
        "largest gradient norm": max((record.get("actor/grad_norm") or 0.0) for record in run.records),
    }


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward, S of both sides, the two sides of the loss, entropy; and reward at the threshold of one half."""
    with figure(path, 2, 3) as axes:
        draw_curves(axes[0], runs, "evaluation/sampled", "reward, all 16 versions old", arms=DRAWN, legend=True)
        draw_curves(axes[1], runs, "actor/positive_nll", "S of positive responses, nats", arms=DRAWN, smooth=10)
        draw_curves(axes[2], runs, "actor/negative_nll", "S of negative responses, nats", arms=DRAWN, smooth=10)
        draw_curves(axes[3], runs, "actor/negative_loss", "loss of negative responses", arms=DRAWN, smooth=10)
        draw_curves(axes[4], runs, "behaviour/entropy", "entropy of the sampling policy, nats", arms=DRAWN, smooth=10)
        half = [f"half_{name}" for name in DRAWN]
        draw_curves(axes[5], runs, "evaluation/sampled", "reward, half stale", arms=half, legend=True)


COLLAPSE = Study(
    name="collapse",
    arms=COLLAPSE_ARMS,
    model=CHAIN_MODEL,
    numbers=numbers,
    draw=draw,
    quick=(*SHORT_CHAIN, "loop.steps=6", "evaluation.every=3"),
)
