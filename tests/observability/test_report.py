"""The report: self-contained, escaped, true to the numbers, and working in a browser."""

import html
import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from synthetic import example, make_run, trainer_row, write_lines

from megasao.config.rundir import RunDirectory
from megasao.observability.examples import read_examples, write_examples
from megasao.observability.record import load_record
from megasao.observability.report import write_report
from megasao.observability.report_curves import benchmark_chart, task_chart
from megasao.observability.report_script import JS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "input", "wbr", "br"}


class Page(HTMLParser):
    """Elements with their attributes and text; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def tokens(self) -> list[dict[str, str | None]]:
        return [
            attrs for tag, attrs in self.elements if tag == "span" and (attrs.get("class") or "").split()[:1] == ["t"]
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("report"))[0]


@pytest.fixture(scope="module")
def text(run: RunDirectory) -> str:
    path = write_report(run)
    assert path == run.path / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_page_asks_for_nothing_outside_itself(text: str, page: Page) -> None:
    for tag, attrs in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attrs.get(name) in (None, "data:,"), (tag, attrs)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not a request
    assert "@import" not in text and "url(" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", JS)


def test_every_curve_is_there(page: Page, text: str) -> None:
    labels = " ".join(attrs.get("aria-label") or "" for tag, attrs in page.elements if tag == "svg")
    for title in (
        "Evaluation: greedy, sampled at T = 1 by weight version",
        "Reward: reward by step",
        "Lag: mean, max",
        "Masked tokens: below the band, above the band",
        "Explained variance",
        "Response length",
        "Truncated",
        "Actor loss",
        "Critic loss",
        "Gradient norm: actor, critic",
        "KL (k3)",
        "Throughput: rollout, trainer",
        "Idle: rollout, trainer",
        "Time of a step: wait, fetch, values, critic, actor, publish, checkpoint",
        "Loss: loss by fine-tuning step",
    ):
        assert title in labels
    charts = re.findall(r'class="chart-data">(.*?)</script>', text, re.S)
    assert len(charts) >= 15
    for chart in charts:
        data = json.loads(chart)
        assert all(len(series["text"]) == len(series["y"]) == len(data["x"]) for series in data["series"])


def test_no_number_on_the_page_is_nan_or_infinite(text: str) -> None:
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", text.replace(JS, ""))


def test_the_table_holds_the_evaluations(text: str, run: RunDirectory) -> None:
    evaluations = [json.loads(line) for line in run.evaluations.read_text().splitlines()]
    cells = re.findall(r"<td>(.*?)</td>", text)
    for row in evaluations:
        assert f"{100 * row['success']:.1f} %" in cells
        assert f"v{row['newest_version']}" in cells
    assert "dropped, stale (arithmetic-3)" in cells and "failed attempts, timeout" in cells
    assert "accept rate, arithmetic-3" in cells and "0.6 %" in cells


def test_benchmarks_in_the_background_have_a_chart_and_rows_of_their_own(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=20)
    assert benchmark_chart(load_record(run)) is None
    line = {"mode": "gsm8k", "problems": 8, "solved": 3, "failures": 0, "newest_version": 12, "oldest_version": 12}
    rows = [{**line, "step": 12, "success": 0.375}, {**line, "step": 20, "success": 0.5, "oldest_version": 19}]
    write_lines(run.evaluations, rows)
    chart = benchmark_chart(load_record(run))
    assert chart is not None and chart.x == [12.0, 19.0]
    assert [(one.name, one.y) for one in chart.series] == [("gsm8k", [0.375, 0.5])]
    text = write_report(run).read_text()
    assert "<td>gsm8k</td><td>v12</td><td>12</td><td>37.5 %</td><td>3 of 8</td>" in text


def test_several_tasks_have_a_chart_of_their_own(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=20)
    assert task_chart(load_record(run)) is None
    line = {"mode": "greedy", "problems": 8, "solved": 3, "failures": 0, "newest_version": 12, "oldest_version": 12}
    rows = [
        {**line, "step": 12, "success": 0.375, "success_by_task": {"a": 0.5, "b": 0.25}},
        {**line, "step": 20, "success": 0.5, "success_by_task": {"a": 0.5}, "oldest_version": 19},
        {**line, "step": 20, "mode": "sampled", "success": 0.5, "success_by_task": {"a": 0.0, "b": 1.0}},
    ]
    write_lines(run.evaluations, rows)
    chart = task_chart(load_record(run))
    assert chart is not None and chart.x == [12.0, 19.0]
    assert [(one.name, one.y) for one in chart.series] == [("a", [0.5, 0.5]), ("b", [0.25, None])]
    assert "Evaluation by task" in write_report(run).read_text()


def test_ten_examples_with_every_token_and_its_numbers(page: Page, run: RunDirectory) -> None:
    articles = [attrs for tag, attrs in page.elements if tag == "article"]
    assert len(articles) == 10
    assert len(page.tokens()) == sum(52 for _ in range(10))
    row = next(row for row in read_examples(run) if row["trajectory_id"] == "lease-0-0")
    titles = [attrs["title"] or "" for attrs in page.tokens()][:52]
    for index, title in enumerate(titles):
        lines = dict(line.split(": ", 1) for line in title.split("\n")[1:])
        assert lines["position"] == f"{index}, id {row['tokens'][index]}"
        if not row["action_mask"][index]:
            assert lines["role"].startswith("observation") and "ratio" not in lines
            continue
        for label, name in (
            ("log-prob, trainer", "logprobs"),
            ("log-prob, rollout", "rollout_logprobs"),
            ("ratio", "ratio"),
            ("advantage", "advantages"),
            ("value", "values"),
            ("return", "returns"),
        ):
            assert float(lines[label].replace(",", "")) == pytest.approx(row[name][index], abs=6e-5), (index, label)
        assert lines["weights"] == "v0"
        assert lines["role"] == ("action, kept" if row["kept"][index] else "action, masked (outside the band)")


def test_masked_and_observation_tokens_are_told_apart(page: Page, run: RunDirectory) -> None:
    row = next(row for row in read_examples(run) if row["trajectory_id"] == "lease-0-0")
    classes = [(attrs["class"] or "").split() for attrs in page.tokens()][:52]
    assert ["a" in css for css in classes] == row["action_mask"]
    assert ["m" in css for css in classes] == [kept is False for kept in row["kept"]]
    assert sum("m" in css for css in classes) == 1


def test_version_changes_are_marked_where_they_happen(text: str) -> None:
    (card,) = re.findall(r"<article.*?</article>", text, re.S)[1:2]
    before, after = card.split('title="weights v11 from here on"')
    assert before.count('<span class="t') == 26 and "weights v9 from here on" in before
    assert 'weights: v11"' in after and 'weights: v9"' not in after


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=20)
    bad = "</script><img src=x onerror=alert(1)>\"'&"
    row = {**example(0, 0, 20, random.Random(0)), "task": bad, "prompt_id": bad, "finish_reason": bad}
    row["text"] = [bad] * len(row["tokens"])
    row["weight_versions"] = [[0, bad]]
    write_examples(run, 0, 0, [row])
    write_lines(run.evaluations, [{"step": 1, "mode": bad, "success": 0.5, "oldest_version": bad}])
    config = yaml.safe_load(run.config.read_text())
    config["model"]["path"] = config["environment"]["name"] = bad
    run.config.write_text(yaml.safe_dump(config))
    text = write_report(run).read_text(encoding="utf-8")
    assert "<img" not in text and html.escape(bad) in text
    assert not any("onerror" in attrs for _, attrs in Page(text).elements)
    assert any("<img" in part for part in Page(text).texts)  # the reader sees it as it was


def test_script_json_cannot_end_its_script() -> None:
    from megasao.observability.charts import script_json

    value = {"</script>": "<!--&"}
    assert not set("<>&") & set(script_json(value)) and json.loads(script_json(value)) == value
    assert "</script>" in json.dumps(value)  # negative control


def test_white_space_tokens_can_be_seen(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=20)
    row = example(0, 0, 20, random.Random(0))
    row["text"] = ["", " ", "\n", "  a", *row["text"][4:]]
    write_examples(run, 0, 0, [row])
    text = write_report(run).read_text(encoding="utf-8")
    assert all(f">{shown}</span>" in text for shown in ("∅", "␣", "↵", "  a"))


def test_without_examples_or_steps_the_page_says_so(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, done=0)
    for path in run.examples.iterdir():
        path.unlink()
    run.evaluations.unlink()
    text = write_report(run).read_text(encoding="utf-8")
    Page(text)
    assert "No example trajectories were saved" in text and "No evaluation was finished" in text
    assert "no training step was finished" in text and "partial: 0 of 160 steps" in text


def test_metrics_that_no_step_has_are_said_to_be_missing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    write_lines(run.metrics / "trainer.jsonl", [{"step": 0, "time": 1.0, "reward/mean": 0.5}])
    text = write_report(run).read_text(encoding="utf-8")
    assert "not measured, or undefined at every step" in text and "No config.yaml" in text


def test_a_long_run_is_binned_and_says_so(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=20)
    (run.metrics / "trainer.jsonl").unlink()
    rng = random.Random(0)
    write_lines(run.metrics / "trainer.jsonl", [trainer_row(step, 3000, rng) for step in range(3000)])
    text = write_report(run).read_text(encoding="utf-8")
    assert "each point is a mean of 5 steps" in text and len(text) < 3_000_000


def test_no_run_and_no_metrics_are_errors_that_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory at .*nowhere"):
        write_report(RunDirectory(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"has no metrics: expected .*trainer\.jsonl"):
        write_report(RunDirectory(tmp_path))


PROBE = """<script>addEventListener("load", () => {
  const out = {tip: document.getElementById("tip").textContent};
  const text = () => document.getElementById("tip").innerText.replace(/\\s+/g, " ").trim();
  const over = (node, type, at) => node.dispatchEvent(new PointerEvent(type, {bubbles: true, ...at}));
  const token = document.querySelector(".t.m");
  over(token, "pointerover", {});
  out.token = text();
  out.title = token.getAttribute("title");
  const color = () => getComputedStyle(document.querySelector(".t.a")).backgroundColor;
  out.colors = [...document.querySelectorAll("input[name=mode]")].map((input) => { input.click(); return color(); });
  const svg = document.querySelector("figure.chart svg"), box = svg.getBoundingClientRect();
  over(svg, "pointermove", {clientX: box.right - 4, clientY: box.top + 40});
  out.chart = text();
  out.marks = svg.querySelectorAll(".cursor *").length;
  over(svg, "pointerleave", {});
  out.hidden = getComputedStyle(document.getElementById("tip")).display;
  out.wide = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.probe = JSON.stringify(out);
});</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1400, 700])
def test_in_a_browser(text: str, run: RunDirectory, tmp_path: Path, width: int) -> None:
    path = tmp_path / "probe.html"
    path.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *flags, path.as_uri()], capture_output=True, text=True, timeout=400)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    probe = json.loads(html.unescape(found.group(1)))
    row = next(row for row in read_examples(run) if row["trajectory_id"] == "lease-0-0")
    masked = row["kept"].index(False)
    assert probe["tip"] == "" and probe["title"] is None
    assert "action, masked" in probe["token"] and f"ratio {row['ratio'][masked]:.4f}" in probe["token"]
    last = json.loads(run.evaluations.read_text().splitlines()[-1])
    assert probe["chart"].startswith("weight version 150 greedy") and f"{100 * last['success']:.3g} %" in probe["chart"]
    assert probe["marks"] == 3 and probe["hidden"] == "none"
    assert len(set(probe["colors"])) == 4
    assert not probe["wide"]
