"""Which curves the report shows, in which groups."""

from megasao.observability.charts import Chart, Series, Values
from megasao.observability.formats import finite
from megasao.observability.jsonl import Row
from megasao.observability.record import RunRecord, by_mode

_COLORS = 7
"""Lines that a chart can tell apart."""

TIME_PARTS = ("wait", "fetch", "values", "critic", "actor", "publish", "checkpoint")


def groups(record: RunRecord) -> list[tuple[str, str, list[Chart]]]:
    """(heading, one sentence, charts) of each group."""
    steps = _Steps(record.trainer)
    parts = [
        (
            "Learning",
            "Faint: single steps; strong: their moving mean. The number in a legend is the last value.",
            _learning(record, steps),
        ),
        ("Off-policy data", "How old the data is, and what the DIS band removes.", _staleness(steps)),
        ("Optimisation", "Losses, gradients and learning rates.", _optimisation(steps)),
        ("Speed", "Where the time goes; idle is the share of wall time spent waiting.", _speed(steps)),
    ]
    charts = [(name, note, drawn) for name, note, drawn in parts if record.trainer or name == "Learning"]
    return charts + ([("Fine-tuning", "Before SAO.", _fine_tuning(record.sft))] if record.sft else [])


class _Steps:
    """Charts over the training steps."""

    def __init__(self, rows: list[Row], x_name: str = "step") -> None:
        self.rows = rows
        self.x_name = x_name
        self.x = [float(row["step"]) for row in rows]

    def chart(
        self,
        title: str,
        note: str,
        *lines: tuple[str, str],
        smooth: bool = True,
        percent: bool = False,
        stacked: bool = False,
        from_zero: bool = False,
    ) -> Chart:
        """``lines``: (name shown, metric)."""
        series = [
            Series(name, values(self.rows, metric), color, smooth)
            for color, (name, metric) in enumerate(lines, start=1)
        ]
        return Chart(
            title,
            note,
            self.x_name,
            self.x,
            series,
            percent=percent,
            stacked=stacked,
            from_zero=from_zero,
        )


def values(rows: list[Row], metric: str) -> Values:
    """One metric over the rows; None where it is absent, null or no number."""
    return [finite(row.get(metric)) for row in rows]


def evaluation_chart(record: RunRecord) -> Chart:
    """Held-out success over the weight version that produced the tokens (the oldest, if there were several)."""
    found = {mode: _by_version(by_mode(record.evaluations, mode)) for mode in ("greedy", "sampled")}
    versions = sorted({version for points in found.values() for version in points})
    series = [
        Series(name, [found[mode].get(version) for version in versions], color)
        for color, (mode, name) in enumerate((("greedy", "greedy"), ("sampled", "sampled at T = 1")), start=1)
    ]
    note = "success on held-out problems"
    return Chart("Evaluation", note, "weight version", versions, series, percent=True, dots=True)


def task_chart(record: RunRecord) -> Chart | None:
    """Greedy held-out success of each task, over the weight version; None where there is one task only."""
    rows = [row for row in by_mode(record.evaluations, "greedy") if isinstance(row.get("success_by_task"), dict)]
    names = sorted({name for row in rows for name in row["success_by_task"]})[:_COLORS]
    if len(names) < 2:
        return None
    found = {
        name: _by_version([{**row, "success": row["success_by_task"].get(name)} for row in rows]) for name in names
    }
    versions = sorted({version for points in found.values() for version in points})
    series = [
        Series(name, [found[name].get(version) for version in versions], color)
        for color, name in enumerate(names, start=1)
    ]
    note = "greedy success on held-out problems"
    return Chart("Evaluation by task", note, "weight version", versions, series, percent=True, dots=True)


def benchmark_chart(record: RunRecord) -> Chart | None:
    """Mean reward share of each benchmark in the background, over the weight version; None without one."""
    names = sorted({str(row["mode"]) for row in record.evaluations} - {"greedy", "sampled"})[:_COLORS]
    found = {name: _by_version(by_mode(record.evaluations, name)) for name in names}
    versions = sorted({version for points in found.values() for version in points})
    if not versions:
        return None
    series = [
        Series(name, [found[name].get(version) for version in versions], color)
        for color, name in enumerate(names, start=1)
    ]
    note = "share of right responses, over all samples"
    return Chart("Benchmarks", note, "weight version", versions, series, percent=True, dots=True)


def _by_version(rows: list[Row]) -> dict[float, float]:
    points = [(finite(row.get("oldest_version")), finite(row.get("success"))) for row in rows]
    return {version: success for version, success in points if version is not None and success is not None}


def _learning(record: RunRecord, steps: _Steps) -> list[Chart]:
    more = [chart for chart in (task_chart(record), benchmark_chart(record)) if chart is not None]
    evaluation = [evaluation_chart(record), *more]
    if not record.trainer:
        return evaluation
    return [
        *evaluation,
        steps.chart("Reward", "mean over the trajectories of a step", ("reward", "reward/mean")),
        steps.chart("Response length", "action tokens of an episode, mean", ("tokens", "data/response_tokens")),
        steps.chart(
            "Truncated",
            "share of episodes cut by a limit",
            ("truncated", "data/truncated"),
            percent=True,
            from_zero=True,
        ),
        steps.chart(
            "Explained variance",
            "by the critic; a gap where rewards vary too little",
            ("explained variance", "critic/explained_variance"),
        ),
        steps.chart(
            "Value", "what the critic expects, and what came", ("value", "critic/value_mean"), ("reward", "reward/mean")
        ),
    ]


def _staleness(steps: _Steps) -> list[Chart]:
    lag = (("mean", "data/lag_mean"), ("max", "data/lag_max"))
    band = (("below the band", "actor/masked_low"), ("above the band", "actor/masked_high"))
    return [
        steps.chart("Lag", "weight versions behind, when trained on", *lag, smooth=False, from_zero=True),
        steps.chart(
            "Mixed versions",
            "share of episodes made by more than one version",
            ("mixed", "data/mixed_versions"),
            percent=True,
            from_zero=True,
        ),
        steps.chart(
            "Masked tokens", "share of action tokens outside the DIS band", *band, percent=True, from_zero=True
        ),
        steps.chart("KL (k3)", "trainer against rollout, per action token", ("k3", "actor/kl_k3"), from_zero=True),
        steps.chart("Largest ratio", "trainer over rollout probability of a token", ("max ratio", "actor/ratio_max")),
        steps.chart("Effective sample size", "share of the action tokens", ("ESS", "actor/ess")),
        steps.chart(
            "Engine against trainer",
            "|log-prob difference| on tokens that the step's own weights sampled",
            ("mean", "actor/current_log_ratio_abs_mean"),
            ("max", "actor/current_log_ratio_abs_max"),
            smooth=False,
            from_zero=True,
        ),
    ]


def _optimisation(steps: _Steps) -> list[Chart]:
    return [
        steps.chart("Actor loss", "DIS objective", ("actor", "actor/loss")),
        steps.chart("Critic loss", "squared error against the return", ("critic", "critic/loss"), from_zero=True),
        steps.chart("Gradient norm", "before clipping", ("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")),
        steps.chart(
            "Learning rate",
            "at each step",
            ("actor", "actor/lr"),
            ("critic", "critic/lr"),
            smooth=False,
            from_zero=True,
        ),
        steps.chart(
            "Expert load",
            "tokens of the busiest expert over those of an average one",
            ("busiest", "actor/expert_load_max"),
        ),
    ]


def _speed(steps: _Steps) -> list[Chart]:
    speeds = (("rollout", "throughput/rollout_tokens_per_s"), ("trainer", "throughput/trainer_tokens_per_s"))
    times = [(part, f"time/{part}") for part in TIME_PARTS]
    return [
        steps.chart("Throughput", "tokens per second", *speeds, from_zero=True),
        steps.chart(
            "Idle",
            "share of wall time",
            ("rollout", "idle/rollout"),
            ("trainer", "idle/trainer"),
            percent=True,
            from_zero=True,
        ),
        steps.chart("Time of a step", "seconds, by part", *times, stacked=True),
    ]


def _fine_tuning(rows: list[Row]) -> list[Chart]:
    steps = _Steps(rows, "fine-tuning step")
    return [
        steps.chart("Loss", "cross-entropy per action token", ("loss", "sft/loss"), from_zero=True),
        steps.chart("Throughput", "tokens per second", ("tokens/s", "sft/tokens_per_s"), from_zero=True),
    ]
