"""The terminal: what the panel and the lines show, at the widths people have."""

import errno
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import evaluation_rows, make_config, make_run, trainer_row, write_lines

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.observability.formats import duration, number, share, sparkline
from megasao.observability.panel import Panel, _Console
from megasao.observability.panel_state import PanelState
from megasao.observability.panel_view import draw


def configured(config: Config, mode: str) -> Config:
    return Config.model_validate({**config.model_dump(), "observability": {"panel": mode}})


def console(width: int = 100, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, legacy_windows=False)


def printed(panel: Panel) -> str:
    assert isinstance(panel.console.file, io.StringIO)
    text = panel.console.file.getvalue()
    panel.console.file.truncate(0)
    panel.console.file.seek(0)
    return text


def picture(state: PanelState, width: int) -> str:
    target = console(width)
    target.print(draw(state, width))
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


@pytest.fixture
def fresh(tmp_path: Path) -> tuple[RunDirectory, Config]:
    config = make_config(tmp_path)
    run = RunDirectory(tmp_path / config.run.name)
    run.create()
    return run, config


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_the_panel_fits_and_shows_everything(tmp_path: Path, width: int) -> None:
    run, config = make_run(tmp_path, done=87)
    panel = Panel(run, config, console=console())
    panel.update({"controller": 0, "rollout-0": 2})
    text = picture(panel.state, width)
    assert max(map(len, text.splitlines())) <= width
    last = panel.state.last
    if width >= 80:
        assert "87/160" in text and "v77" in text and "left 1:4" in text
    for what in ("reward", "greedy", "sampled", "expl. var", "length", "truncated", "lag mean", "masked", "rollout"):
        assert what in text
    assert share(last["actor/masked_low"], 2) in text
    assert f"low, {share(last['actor/masked_high'], 2).replace(' ', '')} high" in text and "64 on lease" in text
    assert f"{last['throughput/trainer_tokens_per_s']:,.0f}" in text and "max " in text
    assert "rollout-0 2" in text
    assert "at v65" in text


def test_a_null_explained_variance_is_a_dash(tmp_path: Path) -> None:
    run, config = make_run(tmp_path)
    state = Panel(run, config, console=console()).state
    assert state.last["critic/explained_variance"] is None
    (line,) = [line for line in picture(state, 80).splitlines() if "expl. var" in line]
    assert line.split()[3] == "-"
    state.last["critic/explained_variance"] = 0.25
    (line,) = [line for line in picture(state, 80).splitlines() if "expl. var" in line]
    assert line.split()[3] == "0.25"


def test_stages(fresh: tuple[RunDirectory, Config]) -> None:
    run, config = fresh
    panel = Panel(run, config, console=console())
    stages = [panel.state.stage]
    for path, row in (
        (run.metrics / "sft.jsonl", {"step": 3, "time": 1.0}),
        (run.metrics / "sft.jsonl", {"step": 39, "time": 2.0}),
        (run.metrics / "trainer.jsonl", {"step": 0, "time": 3.0}),
        (run.metrics / "trainer.jsonl", {"step": 10, "time": 4.0}),
        (run.metrics / "trainer.jsonl", {"step": 159, "time": 5.0}),
    ):
        write_lines(path, [row])
        panel.update()
        stages.append(panel.state.stage)
        assert panel.state.stage in picture(panel.state, 100)
    panel.close()
    assert [*stages, panel.state.stage] == [
        "starting",
        "fine-tuning",
        "starting SAO",
        "SAO, critic warm-up",
        "SAO",
        "last evaluation",
        "ended",
    ]


def test_lines_are_one_per_step_and_only_what_is_new(fresh: tuple[RunDirectory, Config]) -> None:
    import random

    run, config = fresh
    rng = random.Random(0)
    write_lines(run.metrics / "trainer.jsonl", [trainer_row(step, 160, rng) for step in range(3)])
    panel = Panel(run, config, console=console(60))
    panel.update()
    assert printed(panel) == ""  # what was there before belongs to an earlier life's log
    write_lines(run.metrics / "trainer.jsonl", [trainer_row(step, 160, rng) for step in (3, 4)])
    write_lines(run.evaluations, evaluation_rows(25, 160, rng))
    panel.update({"trainer": 1})
    lines = printed(panel).splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "restarted trainer (1 so far)",
        "step   4/160",
        "step   5/160",
        "evaluation greedy",
        "evaluation sampled",
    ]
    assert "reward 0." in lines[1] and "ev 0." in lines[1] and "v15" in lines[3]
    panel.update({"trainer": 1})
    panel.close()
    panel.close()
    assert printed(panel) == ""


def test_each_kind_of_failure_is_told_once(fresh: tuple[RunDirectory, Config]) -> None:
    """A run in which every episode fails has no steps to show."""
    run, config = fresh
    before = {"time": 1.0, "buffer": 0, "failures/engine_error": 1.0}
    write_lines(run.metrics / "controller.jsonl", [before])
    panel = Panel(run, config, console=console())
    bad = {**before, "failures/invalid_request": 3.0, "refused/x": 0.0, "dropped/stale/sums": 2.0}
    write_lines(run.metrics / "controller.jsonl", [bad, {**bad, "failures/invalid_request": 90.0, "given_up": 1.0}])
    panel.update()
    assert printed(panel).splitlines() == [
        f"failures/invalid_request: 90 so far, not trained on; see {run.logs}/rollout-*.log",
        f"given_up: 1 so far, not trained on; see {run.logs}/rollout-*.log",
    ]
    write_lines(run.metrics / "controller.jsonl", [{**bad, "failures/invalid_request": 99.0}])
    panel.update()
    assert printed(panel) == ""
    (line,) = [line for line in picture(panel.state, 140).splitlines() if "failed" in line]
    assert "99 invalid_request" in line
    panel.state.controller.clear()
    assert "failed" not in picture(panel.state, 140)


def test_a_torn_line_waits_for_its_end(fresh: tuple[RunDirectory, Config]) -> None:
    run, config = fresh
    panel = Panel(run, config, console=console())
    line = json.dumps({"step": 0, "time": 1.0, "reward/mean": 0.5})
    with (run.metrics / "trainer.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        panel.update()
        assert printed(panel) == ""
        file.write(line[20:] + "\n")
        file.flush()
    panel.update()
    assert printed(panel).count("reward 0.500") == 1


def test_a_resume_takes_back_the_lost_steps(fresh: tuple[RunDirectory, Config]) -> None:
    run, config = fresh
    panel = Panel(run, config, console=console())
    write_lines(run.metrics / "trainer.jsonl", [{"step": step, "time": float(step)} for step in range(9)])
    write_lines(run.metrics / "trainer.jsonl", [{"step": 4, "time": 20.0}])
    panel.update()
    assert panel.state.finished == 5
    assert [row["step"] for row in panel.state.trainer] == [0, 1, 2, 3, 4]


def test_time_left_is_the_recent_median_pace_not_the_mean(fresh: tuple[RunDirectory, Config]) -> None:
    _, config = fresh
    state = PanelState(config)
    assert state.remaining_seconds is None
    for step, time in enumerate([0.0, 2.0, 4.0, 104.0, 106.0, 108.0]):  # a pause of 100 s, as after a restart
        state.feed_trainer({"step": step, "time": time})
    assert state.remaining_seconds == pytest.approx(2.0 * (160 - 6))
    assert state.remaining_seconds != pytest.approx(108 / 5 * (160 - 6))


@pytest.mark.parametrize(
    ("mode", "terminal", "expected"),
    [
        ("auto", True, "live"),
        ("auto", False, "lines"),
        ("off", True, "off"),
        ("lines", True, "lines"),
    ],
)
def test_modes(fresh: tuple[RunDirectory, Config], mode: str, terminal: bool, expected: str) -> None:
    run, config = fresh
    panel = Panel(run, configured(config, mode), console=console(terminal=terminal))
    assert panel.mode == expected
    write_lines(run.metrics / "trainer.jsonl", [{"step": 0, "time": 1.0, "reward/mean": 0.5}])
    panel.update({"controller": 1})
    panel.close()
    text = printed(panel)
    assert ("megasao" in text and "/160" in text) == (expected == "live")
    assert (text == "") == (expected == "off")


class Closed(io.StringIO):
    """A terminal that was closed, or a pipe that nobody reads any more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "it is gone")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
@pytest.mark.parametrize("mode", ["live", "lines"])
def test_a_terminal_that_is_gone_is_not_written_to_again(
    fresh: tuple[RunDirectory, Config], mode: str, number: int
) -> None:
    run, config = fresh
    output = sys.stdout
    given = [_Console(force_terminal=True) if mode == "live" else None for _ in range(2)]
    panel, late = (Panel(run, configured(config, mode), console=each) for each in given)
    for each in (panel, late):
        each.console.file = io.StringIO()
    panel.update({})
    panel.console.file = Closed(number)
    write_lines(run.metrics / "trainer.jsonl", [{"step": 0, "time": 1.0, "reward/mean": 0.5}])
    panel.update({"controller": 1})
    assert panel.mode == "off" and sys.stdout is output, "others print as before"
    panel.update({"controller": 2})
    panel.close()
    late.update({})
    late.console.file = Closed(number)
    late.close()
    assert sys.stdout is output


def test_sparkline_is_scaled_to_its_own_range_and_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([5.0, 5.0], 9) == "▄▄"
    assert sparkline([], 9) == "" and sparkline([float("nan")], 9) == ""
    assert len(sparkline([float(i) for i in range(1000)], 17)) == 17


def test_numbers_that_are_missing_are_dashes_and_small_ones_are_not_zero() -> None:
    assert number(None) == share(None) == duration(None) == "-"
    assert number(0.0) == "0.000" and number(0.00042) == "4.20e-04" and number(12.3456, 2) == "12.35"
    assert [duration(s) for s in (0.4, 59, 61, 3661)] == ["0 s", "59 s", "1:01", "1:01:01"]
