"""A checkpoint on the sample rows of every benchmark, with the embedded engine; resumed, compared, in a table."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from megasao.cli import app
from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.environments.benchmarks.background import background_benchmarks
from megasao.environments.benchmarks.sources import fingerprint, locate
from megasao.environments.benchmarks.table import BENCHMARKS, markdown_table
from megasao.environments.mathematics import BOXED_PROMPT
from megasao.environments.rows import load_problems
from megasao.environments.sandbox import bubblewrap
from megasao.evaluation.command import choose, run_evaluation, subject
from megasao.evaluation.evaluate import checkpoint_id
from megasao.evaluation.records import SCHEMA, Record, ResultDirectory
from megasao.evaluation.results import compare_results, load_results, results_table, summarize
from tests.benchmark_rows import ROWS, write_rows
from tests.chat_checkpoint import bigram_checkpoint
from tests.swebench_rows import write_instances

DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"
LAPTOP = str(Path(__file__).parents[2] / "configs" / "laptop.yaml")

# \boxed{14} or \boxed{15}, then the end of the turn: 14 is right for two of the four problems of some benchmarks.
BIGRAMS = {
    "\n": "\\",
    "\\": "b",
    "b": "o",
    "o": "x",
    "x": "e",
    "e": "d",
    "d": "{",
    "{": "1",
    "1": "45",
    "}": ["<|im_end|>"],
}
BIGRAMS |= {"4": "}", "5": "}"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint, and the sample rows of every benchmark."""
    path = tmp_path_factory.mktemp("evaluation")
    bigram_checkpoint(path / "model", BIGRAMS)
    (path / "data").mkdir()
    for name in ROWS:
        write_rows(path / "data", name)
    write_instances(path / "data")
    return path


def small_site(place):
    """Where the instances of the sample rows run."""
    small = {"time_s": 60.0, "test_time_s": 200.0, "memory_mb": 512, "processes": 64, "disk_mb": 32}
    sandbox = "none" if bubblewrap._why_not() else "bubblewrap"
    return {"repositories": str(place / "data" / "repositories"), "sandbox": sandbox, **small}


def configured(place, **changes):
    given = {"data": str(place / "data"), "samples": 4, "max_tokens": 1000, "swebench": small_site(place), **changes}
    overrides = [f"benchmarks.{name}={json.dumps(value)}" for name, value in given.items()]
    return load_config(LAPTOP, [f"model.path={place / 'model'}", "rollout.concurrency=16", *overrides])


def run(place, out, names, **changes):
    config, said = configured(place, **changes), []
    run_evaluation(config, subject(config, None, None), choose(names), out, said.append)
    return "\n".join(said)


def rows(out, name):
    return sorted(ResultDirectory(out / name).read(), key=lambda record: (record.problem_id, record.sample))


def test_every_benchmark_is_measured_on_its_sample_rows(place, tmp_path):
    assert set(BENCHMARKS) == {*ROWS, "swebench_verified"}
    said = run(place, tmp_path, ",".join(BENCHMARKS))
    results = load_results(tmp_path)
    assert list(results) == list(BENCHMARKS)
    for name, result in results.items():
        records = rows(tmp_path, name)
        assert len(records) == 16 and result.samples == 4 and not result.excluded
        assert {r.finish_reason for r in records} == {"done"}
        answers = {record.answer for record in records}
        assert answers == ({None} if name == "swebench_verified" else {"14", "15"})
        assert {record.tokens for record in records} == {11} and {record.weight_version for record in records} == {0}
    for name in ("gsm8k", "aime24", "aime2025", "amc23"):
        problems = load_problems(locate(name, str(place / "data"), {}))
        references = {f"math/eval/{problem.problem_id}": int(problem.reference) for problem in problems}
        assert sorted(references.values()) == [5, 14, 14, 121]
        for record in rows(tmp_path, name):
            assert record.reward == float(int(record.answer) == references[record.problem_id])
    assert sum(record.reward for name in BENCHMARKS for record in rows(tmp_path, name)) > 0
    assert "mean@4" in said and "pass@4" in said and "maj@4" in said and "over 4 problems" in said


def test_the_chat_template_gets_the_configs_variables_as_in_a_run(place, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(place / "model", model)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] += "{% if boxed %}\\boxed{{ '{' }}{% endif %}"
    file.write_text(json.dumps(settings))

    def said(variables, out):
        config = configured(place, samples=1)
        environment = config.environment.model_copy(update={"template_variables": variables})
        config = config.model_copy(update={"environment": environment})
        run_evaluation(config, subject(config, model, None), choose("amc23"), out, lambda text: None)
        return {record.response[:1] for record in rows(out, "amc23")}

    assert said({}, tmp_path / "plain") == {"\\"} and said({"boxed": True}, tmp_path / "boxed") == {"1"}
    with pytest.raises(UserError, match=r"begun with other settings .*template_variables"):
        said({"boxed": True}, tmp_path / "plain")


WORK = "```sh\nsed -i s/insert.0,/append\\(/ stack.py\n```"
LOOK = "```sh\nls; exit 3\n```"


def test_swebench_is_measured_by_what_the_model_did(place, tmp_path):
    """One of the four issues is resolved by the commands of a turn, where the model does not hand in before it."""
    acting = {"\n": [WORK, LOOK, "a"], WORK: ["<|im_end|>"], LOOK: ["<|im_end|>"], "a": ["<|im_end|>"]}
    bigram_checkpoint(tmp_path / "acting", acting, (WORK, LOOK))
    config = configured(place, samples=8)
    said = []
    run_evaluation(
        config, subject(config, tmp_path / "acting", None), choose("swebench_verified"), tmp_path / "out", said.append
    )
    records = rows(tmp_path / "out", "swebench_verified")
    assert len(records) == 32 and {record.excluded for record in records} == {None}
    stack = [record for record in records if record.problem_id == "swebench/eval/tiny__stack-3"]
    assert {(record.reward, "sed" in record.response) for record in stack} == {(1.0, True), (0.0, False)}
    assert {record.reward for record in records if record not in stack} == {0.0}
    assert any(record.response.count("```sh") > 1 for record in records), "more than one turn"
    [summary] = [line for line in said if "mean@8" in line]
    assert f"{100 * sum(record.reward for record in stack) / 32:.1f} [" in summary
    assert "pass@1" in "".join(said) and "pass@8" in "".join(said) and "maj@" not in "".join(said)


def test_swebench_is_measured_in_the_background_of_a_run_too(place):
    overrides = ['evaluation.benchmarks=["swebench_verified"]', "environment.max_tokens=1000"]
    settings = {"data": str(place / "data"), "samples": 2, "max_tokens": 1000, "swebench": small_site(place)}
    overrides += [f"benchmarks.{name}={json.dumps(value)}" for name, value in settings.items()]
    found = background_benchmarks(load_config(LAPTOP, [f"model.path={place / 'model'}", *overrides]))
    benchmark = found["swebench_verified"]
    assert benchmark.responses == 8 and (benchmark.limits.max_turns, benchmark.limits.max_tokens) == (300, 1000)
    assert benchmark.environment.prompt("eval", benchmark.problem(5)).prompt_id == "swebench/eval/tiny__words-2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "x"}, r"benchmarks\.swebench\.data: the benchmark has its own"),
        ({"memory": 1}, r"benchmarks\.swebench\.memory: .* no such option \(did you mean 'memory_mb'\?\)"),
        ({"repositories": "absent"}, "tiny__words-1: neither absent/tiny__words"),
    ],
)
def test_where_swebench_cannot_run_is_said_before_anything_starts(place, tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        run(place, tmp_path, "swebench_verified", swebench={**small_site(place), **given})


def test_an_interrupted_evaluation_ends_as_a_whole_one(place, tmp_path):
    run(place, tmp_path / "whole", "gsm8k")
    run(place, tmp_path / "parts", "gsm8k", samples=1)
    said = run(place, tmp_path / "parts", "gsm8k")
    assert "12 responses to go (4 are there)" in said
    assert rows(tmp_path / "parts", "gsm8k") == rows(tmp_path / "whole", "gsm8k")
    torn = tmp_path / "parts" / "gsm8k" / "records-000009.12.tmp"
    torn.write_bytes(b"ARROW1")
    assert "0 responses to go" in run(place, tmp_path / "parts", "gsm8k")
    for changes in ({"temperature": 0.0}, {"max_tokens": 500}):
        with pytest.raises(UserError, match=f"{next(iter(changes))}: .*use another --out"):
            run(place, tmp_path / "parts", "gsm8k", **changes)


def test_greedy_samples_are_all_the_same_and_others_are_not(place, tmp_path):
    run(place, tmp_path / "greedy", "amc23", temperature=0.0)
    run(place, tmp_path / "sampled", "amc23", samples=8)
    assert len({record.answer for record in rows(tmp_path / "greedy", "amc23")}) == 1
    sampled = rows(tmp_path / "sampled", "amc23")
    assert len({record.answer for record in sampled}) == 2 and len({record.seed for record in sampled}) == 32


def test_what_cannot_be_answered_is_excluded_with_its_reason(place, tmp_path):
    said = run(place, tmp_path, "gsm8k", max_tokens=20, samples=1)
    assert "no graded response; 4 responses excluded (invalid_request 4)" in said
    assert all(record.reward is None for record in rows(tmp_path, "gsm8k"))


def write_result(directory, template, rewards, **changes):
    """A result directory with these rewards: one list of samples a problem, None for excluded."""
    source = ResultDirectory(template).manifest()
    result = ResultDirectory(directory / source.benchmark)
    from dataclasses import replace

    result.begin(replace(source, **changes))
    result.append(
        [
            Record(
                f"p{n}",
                k,
                0,
                0,
                reward=reward,
                excluded=None if reward is not None else "verifier_timeout",
                answer=None if reward is None else f"{reward}",
                tokens=10,
                finish_reason="done",
            )
            for n, samples in enumerate(rewards)
            for k, reward in enumerate(samples)
        ]
    )


def test_summaries_comparisons_and_tables_are_those_of_the_records(place, tmp_path):
    run(place, tmp_path / "real", "gsm8k", samples=1)
    template = tmp_path / "real" / "gsm8k"
    write_result(tmp_path / "A", template, [[1, 0], [0, 0], [0, None], [None, None]])
    write_result(tmp_path / "B", template, [[1, 1], [1, 0], [1, 0], [1, 1]])
    lines = "\n".join(summarize(load_results(tmp_path / "A")["gsm8k"]))
    assert "mean@2     16.7 [" in lines and "over 3 problems; 3 responses excluded (verifier_timeout 3)" in lines
    assert "pass@1     16.7" in lines and "pass@2     50.0" in lines and "maj@2      25.0" in lines
    compared = "\n".join(compare_results(tmp_path / "A", tmp_path / "B"))
    assert "A 16.7, B 66.7, B - A  50.0 [50.0, 50.0] over 3 problems, p = 0.25" in compared
    assert results_table([tmp_path / "A", tmp_path / "B"]).splitlines() == [
        "| benchmark | A | B |",
        "|---|---|---|",
        "| gsm8k | 16.7 | **75.0** |",
    ]
    write_result(tmp_path / "C", template, [[1, 1]], data_sha256="other")
    with pytest.raises(UserError, match="different data"):
        compare_results(tmp_path / "A", tmp_path / "C")
    with pytest.raises(UserError, match="no results"):
        load_results(tmp_path)
    with pytest.raises(UserError, match="same name"):
        results_table([tmp_path / "A", tmp_path / "A"])


def test_runs_stand_in_the_table_with_the_last_evaluation_of_each_benchmark(place, tmp_path):
    def write(name, *lines):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        rows = [{"mode": mode, "step": step, "success": success} for mode, step, success in lines]
        run.evaluations.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"mode": "gsm8k", "succ')
        return run.path

    one = write("one", ("gsm8k", 0, 0.1), ("greedy", 5, 1.0), ("gsm8k", 5, 0.625), ("math500", 5, 0.25))
    other = write("other", ("gsm8k", 5, 0.5), ("math500", 5, None))
    assert results_table([one, other]).splitlines() == [
        "| benchmark | one | other |",
        "|---|---|---|",
        "| math500 | **25.0** | – |",
        "| gsm8k | **62.5** | 50.0 |",
    ]
    with pytest.raises(
        UserError, match=r"none/evaluations\.jsonl has results of no benchmark; name some in evaluation"
    ):
        results_table([write("none", ("greedy", 5, 1.0))])


def test_the_table_passes_over_numbers_that_are_none_and_has_a_name_for_every_directory(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "one")
    run.path.mkdir()
    lines = [
        {"mode": "gsm8k", "step": 1, "success": 0.5},
        *({"mode": "gsm8k", "step": 2 + n, "success": odd} for n, odd in enumerate(["0.9", True, float("nan"), [1]])),
        {"mode": ["gsm8k"], "step": 9, "success": 0.9},
        {"mode": "math500", "step": 9, "success": 0.25, "evaluation_id": ["x"]},
    ]
    run.evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(run.path)
    assert results_table([Path(".")]).splitlines() == [
        "| benchmark | one |",
        "|---|---|",
        "| math500 | **25.0** |",
        "| gsm8k | **50.0** |",
    ]


def test_a_file_that_is_cut_off_is_named_and_can_be_removed(tmp_path):
    directory = ResultDirectory(tmp_path)
    for number in range(3):
        directory.append([Record(f"p{number}", 0, 0, 0, reward=1.0)])
    damaged = tmp_path / "records-000001.arrow"
    damaged.write_bytes(damaged.read_bytes()[:60])
    with pytest.raises(UserError, match=r"records-000001\.arrow holds no records of this version, or is cut off"):
        directory.read()
    damaged.unlink()
    directory.append([Record("p1", 0, 0, 0, reward=1.0)])
    assert [record.problem_id for record in directory.read()] == ["p0", "p2", "p1"]


def table_of(*columns):
    """Records of one response whose columns are replaced by these: (name, type, value)."""
    fields = {field.name: (field.type, None if field.nullable else 0) for field in SCHEMA}
    fields |= {"problem_id": (pa.string(), "p")} | {name: (kind, value) for name, kind, value in columns}
    return pa.table({name: pa.array([value], kind) for name, (kind, value) in fields.items()})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([("reward", pa.string(), "right")], r"its columns are problem_id: string, .*reward: string"),
        ([("sample", pa.int64(), 1)], "sample: int64"),
        ([], "sample 0 of problem 'p' is there already"),
    ],
)
def test_rows_of_other_columns_and_rows_that_are_there_twice_are_refused(tmp_path, columns, message):
    directory = ResultDirectory(tmp_path)
    directory.append([Record("p", 0, 0, 0, reward=1.0)])
    table = table_of(*columns)
    schema = SCHEMA if not columns else table.schema
    with pa.OSFile(str(tmp_path / "records-000001.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table.cast(schema))
    with pytest.raises(UserError, match=r"records-000001\.arrow holds no records .*" + message):
        directory.read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("{", "truncated"),
        ('{"benchmark": "gsm8k"}', "missing required field"),
        ('{"benchmark": 3}', "Expected `str`, got `int`"),
        ("\xff", "is no manifest"),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path, text, message):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"gsm8k/manifest\.json is no manifest") as caught:
        load_results(tmp_path)
    assert message in str(caught.value) and "another --out" in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/gsm8k cannot be written: .*choose another --out"):
        run(place, tmp_path / "file", "gsm8k")


def test_a_runs_final_policy_is_measured_under_its_weight_version(place, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    config = configured(place)
    with pytest.raises(UserError, match="no final policy"):
        subject(config, None, directory.path)
    directory.final_policy.symlink_to(place / "model")
    with pytest.raises(UserError, match="no metrics"):
        subject(config, None, directory.path)
    lines = [{"step": 1, "weight_version": 3}, {"step": 2, "weight_version": 4}]
    (directory.metrics / "trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = subject(config, None, directory.path)
    assert (found.checkpoint, found.weight_version) == (directory.final_policy, 4)
    with pytest.raises(UserError, match="exclude each other"):
        subject(config, place, directory.path)
    run_evaluation(configured(place, samples=1), found, choose("gsm8k"), tmp_path / "out", lambda line: None)
    assert {record.weight_version for record in rows(tmp_path / "out", "gsm8k")} == {4}


def test_data_is_found_by_name_or_pinned(place, tmp_path, monkeypatch):
    assert locate("gsm8k", str(place / "data"), {}) == place / "data" / "gsm8k.parquet"
    assert locate("gsm8k", "absent", {"gsm8k": str(place / "data" / "math500.jsonl")}).name == "math500.jsonl"
    with pytest.raises(ValueError, match=r"absent/gsm8k\.json .*benchmarks\.sources\.gsm8k"):
        locate("gsm8k", "absent", {})
    for source in ("hf:openai/gsm8k", "hf:openai/gsm8k@main:f.parquet"):
        with pytest.raises(ValueError, match="commit of 40 hex digits"):
            locate("gsm8k", "absent", {"gsm8k": source})
    assert fingerprint(place / "data" / "gsm8k.parquet") != fingerprint(place / "data" / "math500.jsonl")


def test_a_pinned_data_set_comes_from_the_hubs_own_cache(place, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "datasets--openai--gsm8k" / "snapshots" / commit / "main"
    snapshot.mkdir(parents=True)
    write_rows(snapshot, "gsm8k")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = locate("gsm8k", "absent", {"gsm8k": f"hf:openai/gsm8k@{commit}:main/gsm8k.parquet"})
    assert found == snapshot / "gsm8k.parquet"
    with pytest.raises(ValueError, match="could not be had"):
        locate("gsm8k", "absent", {"gsm8k": f"hf:openai/gsm8k@{commit}:main/other.parquet"})


def test_checkpoints_are_told_apart(place, tmp_path):
    other = bigram_checkpoint(tmp_path / "other", {**BIGRAMS, "1": "5"})
    assert checkpoint_id(place / "model") == checkpoint_id(place / "model") != checkpoint_id(other)
    with pytest.raises(ValueError, match="not a Hugging Face checkpoint"):
        checkpoint_id(tmp_path)


def test_the_table_in_the_docs_is_the_one_that_is_used():
    docs = DOCS.read_text(encoding="utf-8")
    assert markdown_table() in docs
    assert "\n".join(f"    {line}" if line else "" for line in BOXED_PROMPT.split("\n")) in docs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "expected a config"),
        (["eval", "compare", "a"], "two result directories"),
        (["eval", "table"], "at least one"),
        (["eval", "compare", "absent", "absent"], "holds no results"),
        (["eval", LAPTOP], "--benchmarks"),
        (["eval", LAPTOP, "--benchmarks", "gsm9k"], "did you mean 'gsm8k'"),
        (["eval", LAPTOP, "--benchmarks", "gsm8k", "--run", "absent"], "no final policy"),
        (["eval", LAPTOP, "--benchmarks", "gsm8k", "benchmarks.data=absent"], "does not exist"),
        (
            ["eval", LAPTOP, "--benchmarks", "gsm8k", "benchmarks.sources.gsm9k=x"],
            "sources.gsm9k: no such benchmark (did",
        ),
        (["eval", LAPTOP, "--benchmarks", "gsm8k", "benchmarks.swebench.memory=1"], "swebench.memory: environment"),
        (
            ["check", LAPTOP, "benchmarks.sources.gsm9k=x"],
            "'benchmarks.sources.gsm9k=x': benchmarks.sources.gsm9k: no such",
        ),
        (
            ["check", LAPTOP, "benchmarks.swebench.memory=1"],
            "benchmarks.swebench.memory: environment 'swebench' has no",
        ),
    ],
)
def test_user_errors_of_the_command(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and message in str(result.exception)


def test_the_command_measures_lists_and_compares(place, tmp_path):
    runner = CliRunner()
    assert markdown_table() in runner.invoke(app, ["eval", "--list"]).output
    changes = [f"benchmarks.data={place / 'data'}", "benchmarks.samples=2", "benchmarks.max_tokens=512"]
    for out in ("a", "b"):
        names = ["--benchmarks", "gsm8k,amc23", "--out", str(tmp_path / out)]
        result = runner.invoke(
            app,
            ["eval", LAPTOP, *changes, f"run.seed={int(out == 'b')}", "--checkpoint", str(place / "model"), *names],
        )
        assert result.exit_code == 0 and "gsm8k: weights v0" in result.output, result.output
    compared = runner.invoke(app, ["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]).output
    assert "gsm8k: A " in compared and "amc23: A " in compared and "p = " in compared
    assert "| gsm8k |" in runner.invoke(app, ["eval", "table", str(tmp_path / "a"), str(tmp_path / "b")]).output
