"""Study `ablation`: SAO and what is left of it when one part is taken away, on the multi-turn tool task
(arXiv 2607.07508)."""

from collections.abc import Sequence
from pathlib import Path

from megasao.studies.figures import draw_curves, figure
from megasao.studies.study import GLOBAL_MEAN, LAST, Arm, Numbers, Run, Study, first_step, mean_after, share_masked

ABLATION_ARMS = (
    Arm("sao", ("sao",)),
    Arm("sao_k1", ("sao_k1",)),
    Arm("sao_full_critic", ("sao_full_critic",)),
    Arm("sao_running_mean", ("sao_running_mean", *GLOBAL_MEAN)),
    Arm("vapo", ("vapo",)),
    Arm("sao_no_skip", ("sao_no_skip",)),
    Arm("grpo", ("grpo",)),
    Arm("grpo_dis", ("grpo_dis",)),
)
NAMES = tuple(arm.name for arm in ABLATION_ARMS)


def numbers(run: Run) -> Numbers:
    """The columns of the table. The share masked is that of tokens outside the band of DIS, or clipped."""
    final = run.records[-1]
    return {
        "start reward": run.records[0]["evaluation/sampled"],
        "final reward": mean_after(run, "evaluation/sampled", LAST),
        "final greedy": final["final/greedy"],
        "steps to 80 %": first_step(run, "evaluation/sampled", 0.8),
        "explained variance": mean_after(run, "critic/explained_variance", LAST),
        "critic gradient norm": mean_after(run, "critic/grad_norm", 0),
        "share masked": share_masked(run),
    }


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward, explained variance, critic gradient norm, share masked."""
    with figure(path, 2, 2) as axes:
        draw_curves(axes[0], runs, "evaluation/sampled", "reward on held-out problems, T = 1", arms=NAMES, legend=True)
        draw_curves(
            axes[1], runs, "critic/explained_variance", "explained variance of the critic", arms=NAMES, smooth=10
        )
        axes[1].set_ylim(-0.5, 1)
        draw_curves(axes[2], runs, "critic/grad_norm", "gradient norm of the critic", arms=NAMES, smooth=10)
        axes[2].set_yscale("log")
        draw_curves(axes[3], runs, "actor/masked_high", "share of tokens above the band", arms=NAMES, smooth=10)


ABLATION = Study(
    name="ablation",
    arms=ABLATION_ARMS,
    model={"hidden": 128, "layers": 2, "experts": 8, "moe_hidden": 96},
    numbers=numbers,
    draw=draw,
    quick=(
        "sft.steps=24",
        "sft.optimizer.warmup_steps=4",
        "sft.demonstrations=256",
        "loop.steps=14",
        "actor.optimizer.warmup_steps=2",
        "loop.batch_size=16",
        "evaluation.problems=8",
    ),
)
