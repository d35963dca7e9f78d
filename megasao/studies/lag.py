"""Study `staleness`: reward and masked tokens against the lag bound, with DIS and without a correction."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from megasao.studies.figures import colours, figure
from megasao.studies.study import CHAIN_MODEL, LAST, SHORT_CHAIN, Arm, Numbers, Run, Study, mean_after, share_masked

BOUNDS = {"sao": (0, 1, 2, 4, 8, 16), "no_dis": (0, 4, 16)}
OBJECTIVES = {"sao": ("sao",), "no_dis": ("vapo", "critic.freeze_attention=true", "critic.updates_per_actor_update=2")}
"""``no_dis`` is SAO with PPO's clip in place of DIS, and nothing else changed."""


def numbers(run: Run) -> Numbers:
    """The columns of the table. The share masked is that of tokens outside the band of DIS, or clipped."""
    return {
        "start reward": run.records[0]["evaluation/sampled"],
        "end reward": mean_after(run, "evaluation/sampled", LAST),
        "best reward": max(record.get("evaluation/sampled") or 0.0 for record in run.records),
        "share masked": share_masked(run),
        "largest abs(log ratio), mean": max(record.get("actor/log_ratio_abs_mean") or 0.0 for record in run.records),
        "S of negative responses": mean_after(run, "actor/negative_nll", LAST),
    }


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward at the end, and the share of masked tokens, over the bound; a dot is a run."""
    columns = {"end reward": "reward at the end, T = 1", "share masked": "share of action tokens masked or clipped"}
    with figure(path, 1, 2) as axes:
        for one, (column, title) in zip(axes, columns.items(), strict=True):
            for objective, colour in colours(list(OBJECTIVES)).items():
                means = []
                places = [BOUNDS["sao"].index(bound) for bound in BOUNDS[objective]]
                for place, bound in zip(places, BOUNDS[objective], strict=True):
                    values = [numbers(run)[column] for run in runs if run.arm == f"{objective}_lag_{bound}"]
                    found = [value for value in values if value is not None]
                    one.scatter([place] * len(found), found, color=colour, s=12, alpha=0.5, linewidths=0)
                    means.append(fmean(found))
                one.plot(places, means, color=colour, label=objective)
            one.set_xticks(range(len(BOUNDS["sao"])), [str(bound) for bound in BOUNDS["sao"]])
            one.set_xlabel("loop.max_lag, versions")
            one.set_title(title, fontsize=10)
            one.legend(fontsize=8, frameon=False)


STALENESS = Study(
    name="staleness",
    arms=tuple(
        Arm(f"{objective}_lag_{bound}", (*changes, f"loop.max_lag={bound}"))
        for objective, changes in OBJECTIVES.items()
        for bound in BOUNDS[objective]
    ),
    model=CHAIN_MODEL,
    numbers=numbers,
    draw=draw,
    quick=(*SHORT_CHAIN, "loop.steps=14", "evaluation.every=4"),
)
