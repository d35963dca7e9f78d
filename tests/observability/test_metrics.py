"""Metrics: what is written, what a crash or a resume leaves, and that readers see the truth."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import Tail, last_life, parse_lines, read_rows
from megasao.observability.metrics import MetricsWriter, read_metrics


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def strict(line: str) -> dict[str, object]:
    """JSON as the standard has it: NaN is an error."""

    def refuse(word: str) -> object:
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)  # type: ignore[no-any-return]


def test_a_line_holds_time_step_and_values(run: RunDirectory) -> None:
    with MetricsWriter(run, "trainer", tensorboard=False) as writer:
        writer.log(3, {"weight_version": 2, "reward/mean": 0.5, "critic/explained_variance": None})
    (line,) = (run.metrics / "trainer.jsonl").read_text().splitlines()
    row = strict(line)
    assert abs(row.pop("time") - os.stat(run.metrics / "trainer.jsonl").st_mtime) < 5  # type: ignore[operator]
    assert row == {"step": 3, "weight_version": 2, "reward/mean": 0.5, "critic/explained_variance": None}
    assert isinstance(row["weight_version"], int)


def test_lines_can_be_read_before_the_writer_is_closed(run: RunDirectory) -> None:
    with MetricsWriter(run, "trainer", tensorboard=False) as writer:
        writer.log(0, {"a": 1.0})
        assert [row["a"] for row in read_metrics(writer.path)] == [1.0]


def test_nonfinite_is_null_counted_and_warned_once_per_name(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    with pytest.raises(ValueError):
        strict(json.dumps(values))  # negative control: plain json writes what is no JSON
    with caplog.at_level(logging.WARNING), MetricsWriter(run, "trainer", tensorboard=True) as writer:
        writer.log(0, values)
        writer.log(1, {"a": math.nan})
    first, second = [strict(line) for line in writer.path.read_text().splitlines()]
    assert [first[name] for name in "abcd"] == [None, None, None, 1.0]
    assert (first["metrics/nonfinite"], second["metrics/nonfinite"]) == (3, 1)
    assert sorted(record.getMessage().split()[3] for record in caplog.records) == ["a", "b", "c"]


def test_threads_do_not_mix_lines(run: RunDirectory) -> None:
    with MetricsWriter(run, "controller", tensorboard=False) as writer:

        def work(thread: int) -> None:
            for step in range(200):
                writer.log(step, {"thread": thread, "padding": 10.0**thread})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    rows = [strict(line) for line in writer.path.read_text().splitlines()]
    assert sorted((row["thread"], row["step"]) for row in rows) == [(t, s) for t in range(4) for s in range(200)]


def test_closing_twice_is_fine_and_logging_after_it_is_an_error(run: RunDirectory) -> None:
    writer = MetricsWriter(run, "trainer", tensorboard=True)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="was closed"):
        writer.log(0, {})


def test_a_torn_line_costs_only_itself(run: RunDirectory) -> None:
    with MetricsWriter(run, "trainer", tensorboard=False) as writer:
        writer.log(0, {"a": 0.0})
    with writer.path.open("a") as file:
        file.write('{"step": 1, "a": 1')
    assert [row["step"] for row in read_metrics(writer.path)] == [0]
    naive = writer.path.read_bytes() + b'{"step": 2}\n'  # negative control: appending as if nothing had happened
    assert [row["step"] for row in parse_lines(naive)[0]] == [0]
    with MetricsWriter(run, "trainer", tensorboard=False) as writer:
        writer.log(2, {"a": 2.0})
    assert [row["step"] for row in read_metrics(writer.path)] == [0, 2]


def test_a_writer_killed_at_any_time_leaves_a_readable_file(run: RunDirectory) -> None:
    program = """
        import sys
        from pathlib import Path
        from megasao.config.rundir import RunDirectory
        from megasao.observability.metrics import MetricsWriter
        writer = MetricsWriter(RunDirectory(Path(sys.argv[1])), "trainer", tensorboard=False)
        for step in range(10**9):
            writer.log(step, {"a": float(step)})
            if step == 50:
                print("ready", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait(120)
    process.stdout.close()
    rows = read_metrics(run.metrics / "trainer.jsonl")
    assert len(rows) > 50
    assert [row["step"] for row in rows] == list(range(len(rows)))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6))
def test_after_resumes_each_step_has_the_values_of_the_last_life(lives: list[tuple[int, int]]) -> None:
    rows, truth = [], {}
    for life, (start, length) in enumerate(lives):
        start = min(start, max(truth, default=-1) + 1)  # a life resumes at a step that was reached
        truth = {step: value for step, value in truth.items() if step < start} if length else truth
        for step in range(start, start + length):
            rows.append({"step": step, "life": life})
            truth[step] = life
    assert {row["step"]: row["life"] for row in last_life(rows)} == truth
    assert [row["step"] for row in last_life(rows)] == sorted(truth)


def test_the_last_line_per_step_alone_would_show_steps_of_a_lost_life() -> None:
    rows = [{"step": step, "life": 0} for step in range(5)] + [{"step": step, "life": 1} for step in (2, 3)]
    naive = {row["step"]: row["life"] for row in rows}
    assert naive[4] == 0  # negative control
    assert [(row["step"], row["life"]) for row in last_life(rows)] == [(0, 0), (1, 0), (2, 1), (3, 1)]


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_tail_gives_every_row_once_whatever_the_writes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "file.jsonl"
    data = b"".join(json.dumps({"step": step, "text": "ä\n"}).encode() + b"\n" for step in range(8))
    tail, seen, at = Tail(path), [], 0
    assert tail.read() == []
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[at : at + cut])
        at += cut
        seen += [row["step"] for row in tail.read()]
    assert seen == list(range(8)) and tail.skipped == 0


def test_what_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    """A file system that fails for a moment does not end whoever looks on."""
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.mkdir()
    assert tail.read() == []
    path.rmdir()
    path.write_text('{"step": 1}\n')
    assert tail.read() == [{"step": 1}]


def test_a_tail_starts_again_with_a_replaced_file(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    tail = Tail(path)
    assert len(tail.read()) == 2
    other.write_text('{"step": 7}\n{"step": 8}\n{"step": 9}\n')
    os.replace(other, path)
    assert [row["step"] for row in tail.read()] == [7, 8, 9]


def test_lines_that_are_no_object_are_skipped_and_counted(tmp_path: Path) -> None:
    rows, skipped = parse_lines(b'{"step": 0}\n[1]\nnull\n\xff\xfe\n\n{"step": 1}\n')
    assert [row["step"] for row in rows] == [0, 1] and skipped == 3
    assert read_rows(tmp_path / "absent.jsonl") == []


def scalars(run: RunDirectory, role: str, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.tensorboard / role))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_gets_the_scalars_and_forgets_a_lost_life(run: RunDirectory) -> None:
    with MetricsWriter(run, "trainer", tensorboard=True) as writer:
        for step in range(4):
            writer.log(step, {"reward/mean": step / 2, "absent": None})
    assert scalars(run, "trainer", "reward/mean") == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    with MetricsWriter(run, "trainer", tensorboard=True) as writer:
        writer.log(2, {"reward/mean": 8.0})
    assert scalars(run, "trainer", "reward/mean") == [(0, 0.0), (1, 0.5), (2, 8.0)]


def test_writing_needs_no_torch(run: RunDirectory) -> None:
    program = """
        import sys
        from pathlib import Path
        from megasao.config.rundir import RunDirectory
        import megasao.observability.metrics, megasao.observability.panel, megasao.observability.summary
        import megasao.observability.report
        assert "tensorboard" not in sys.modules
        with megasao.observability.metrics.MetricsWriter(RunDirectory(Path(sys.argv[1])), "c", tensorboard=True) as w:
            w.log(0, {"a": 1.0})
        assert "torch" not in sys.modules and "tensorflow" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(run.path)], check=True, timeout=400)


def test_wandb_that_is_asked_for_but_missing_is_an_error_that_says_what_to_do(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail, installed or not
    with pytest.raises(ValueError, match=r"wandb_project = 'p'.*pip install 'megasao\[wandb\]'"):
        MetricsWriter(run, "trainer", tensorboard=False, wandb_project="p")


def test_wandb_gets_what_json_gets(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "wandb.py").write_text(
        f"""
from pathlib import Path
def note(*what):
    with Path({str(calls)!r}).open("a") as file:
        print(*what, file=file)
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish")
def init(project, name, group, config):
    note("init", project, name, group, config)
    return Run()
"""
    )
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    writer = MetricsWriter(
        run, "trainer", tensorboard=False, wandb_project="p", run_name="r", config={"loop": {"steps": 1}}
    )
    writer.log(4, {"a": 1.0, "b": None, "c": math.nan})
    writer.close()
    assert calls.read_text().splitlines() == [
        "init p r-trainer r {'loop': {'steps': 1}}",
        "log 4 {'a': 1.0}",
        "finish",
    ]
    sys.modules.pop("wandb")
