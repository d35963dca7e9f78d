"""The loader: every problem with its field, file and line; overrides; round trips."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megasao.config import Config
from megasao.config.document import parse_value
from megasao.config.errors import ConfigError
from megasao.config.help import describe_config
from megasao.config.load import dump_config, dump_yaml, load_config

MINIMAL = """\
run:
  name: tiny
model:
  path: some/model
actor:
  optimizer:
    lr: 1e-4
critic:
  optimizer:
    lr: 1e-3
loop:
  steps: 20
"""
LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def problems(tmp_path: Path, text: str, *overrides: str) -> list[tuple[str, str, str]]:
    return [(p.path, p.where, p.reason) for p in refusal(write(tmp_path, text), *overrides).problems]


def test_minimal_config_loads_with_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.actor.optimizer.lr == 1e-4  # YAML 1.1 would have read text
    assert config.loop.steps == 20
    assert config.loop.batch_size == 128
    assert config.sft is None


@pytest.mark.parametrize("override", ["run.name=.", "run.name=..", "run.name=a/b", "run.seed=2147483648"])
def test_names_and_seeds_that_would_fail_later(tmp_path: Path, override: str) -> None:
    """A name must be one directory inside run.directory; a seed must fit every generator."""
    assert [p[0] for p in problems(tmp_path, MINIMAL, override)] == [override.partition("=")[0]]


def test_shipped_configs_load() -> None:
    for path in [*LAPTOP.parent.glob("*.yaml"), *LAPTOP.parent.glob("studies/*.yaml")]:
        assert load_config(path).run.name


def test_the_config_that_the_readme_shows_loads(tmp_path: Path) -> None:
    """And its comments name what it has."""
    text = LAPTOP.parents[1].joinpath("README.md").read_text(encoding="utf-8")
    lines = text.partition("\n    run: {name: mine}")
    block = (lines[1] + lines[2]).partition("\n\n")[0].lstrip("\n")
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(line.removeprefix("    ") for line in block.splitlines()), encoding="utf-8")
    config = load_config(path)
    assert config.run.name == "mine" and config.rollout.engine == "sglang" and config.loop.batch_size == 128


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "empty"), ("# only a comment\n", "empty"), ("- a\n- b\n", "got a list"), ("hello\n", "got the single value")],
)
def test_file_that_holds_no_config(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in str(refusal(write(tmp_path, text)))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in str(refusal(tmp_path / "absent.yaml"))
    assert "directory" in str(refusal(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"run: \xff\xfe")
    assert "not UTF-8" in str(refusal(binary))


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "run:\n  name: [a\nmodel: x\n")
    assert f"{path}:3" in str(refusal(path))


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    found = problems(tmp_path, MINIMAL + "  steps: 30\n")
    assert found == [("loop.steps", f"{path}:13", f"the key is written twice, first at {path}:12; keep one of them")]


@pytest.mark.parametrize(
    ("line", "path", "expected"),
    [
        ("  batch_size: '64'", "loop.batch_size", "expected a whole number, got '64' (text)"),
        ("  batch_size: 6.5", "loop.batch_size", "expected a whole number, got 6.5 (number)"),
        ("  batch_size: true", "loop.batch_size", "expected a whole number, got True (true/false)"),
        ("  batch_size: [1]", "loop.batch_size", "expected a whole number, got a list of 1"),
        ("  batch_size:", "loop.batch_size", "expected a whole number, got null"),
        ("  batch_size: -4", "loop.batch_size", "expected a value greater than or equal to 1, got -4 (whole number)"),
        ("  mode: asynk", "loop.mode", "expected 'async' or 'sync', got 'asynk' (text)"),
        ("  batch_timeout_s: .inf", "loop.batch_timeout_s", "expected a finite number, got inf (number)"),
        ("  batch_timeout_s: .nan", "loop.batch_timeout_s", "expected a finite number, got nan (number)"),
        ("  3: 4", "loop", "keys are text, got 3; put it in quotes"),
        ("  batch_size: !!python/object:os.system 3", "loop.batch_size", "not allowed"),
        ("  batch_size: !!int x", "loop.batch_size", "'x' is not a value of type int"),
    ],
)
def test_wrong_values_name_field_line_expected_and_got(tmp_path: Path, line: str, path: str, expected: str) -> None:
    found = problems(tmp_path, MINIMAL + line + "\n")
    assert found[0][:2] == (path, f"{tmp_path / 'config.yaml'}:13")
    assert expected in found[0][2]


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: tiny", "name: a b").replace("lr: 1e-3", "lr: -1") + "  batchsize: 3\nrolout: {}\n"
    found = problems(tmp_path, text)
    assert {path for path, _, _ in found} == {"run.name", "critic.optimizer.lr", "loop.batchsize", "rolout"}


def test_missing_fields_name_the_section_line(tmp_path: Path) -> None:
    found = problems(tmp_path, MINIMAL.replace("  name: tiny", "  seed: 1").replace("loop:\n  steps: 20\n", ""))
    where = tmp_path / "config.yaml"
    assert ("run.name", f"{where}:1", "missing, and it has no default") in found
    assert any(path == "loop" and "steps" in reason for path, _, reason in found)


def test_misspelt_required_key_is_reported_once(tmp_path: Path) -> None:
    found = problems(tmp_path, MINIMAL.replace("steps: 20", "step: 20"))
    assert [(path, reason) for path, _, reason in found] == [("loop.step", "unknown key; did you mean loop.steps?")]


def test_alias_that_contains_itself(tmp_path: Path) -> None:
    found = problems(tmp_path, MINIMAL + "environment:\n  options: &o\n    x: *o\n")
    assert any("contains itself" in reason for _, _, reason in found)


def test_anchor_used_twice_is_fine(tmp_path: Path) -> None:
    text = MINIMAL.replace("  optimizer:\n    lr: 1e-4", "  optimizer: &adam\n    lr: 1e-4")
    config = load_config(write(tmp_path, text.replace("  optimizer:\n    lr: 1e-3", "  optimizer: *adam")))
    assert config.critic.optimizer == config.actor.optimizer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("8_192", 8192),
        ("010", 10),
        ("off", "off"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("[1, 2.0]", [1, 2.0]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    read = parse_value(text, "test")
    assert read == value
    assert type(read) is type(value)


# overrides


def test_overrides_replace_and_create(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = ["loop.steps=5", "critic.warmup_steps=1", "actor.optimizer.lr=1e-5", "observability.panel=off"]
    config = load_config(path, [*overrides, "environment.options.depth=3", "critic.head_bias=1"])
    assert config.loop.steps == 5
    assert config.actor.optimizer.lr == 1e-5
    assert config.observability.panel == "off"
    assert config.environment.options == {"depth": 3}
    assert config.critic.head_bias == 1.0  # a whole number is a number
    sft = ["sft.steps=3", "sft.optimizer={lr: 1e-3}"]
    assert load_config(path, sft).sft is not None
    assert load_config(path, [*sft, "sft=null"]).sft is None


def test_a_path_below_home_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken literally it would be a directory named ~ below the working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ["model.path=~/models/x", "run.directory=a/~/b", "environment.options={data: ~/d, more: [~/e, ~f, 1~/]}"]
    config = load_config(LAPTOP, changes)
    assert config.model.path == f"{tmp_path}/models/x" and config.run.directory == "a/~/b"
    assert config.environment.options == {"data": f"{tmp_path}/d", "more": [f"{tmp_path}/e", "~f", "1~/"]}


def test_an_override_mends_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("steps: 20", "steps: many"))
    refusal(path)
    assert load_config(path, ["loop.steps=30"]).loop.steps == 30


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("loop.steps", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("loop..steps=3", "expected key.path=value"),
        ("loop.steps=", "has no value; write null for none"),
        ("loop.steps=[1", "not valid YAML"),
        ("loop.steps={a: 1, a: 2}", "written twice"),
        ("loop.steps=five", "loop.steps: expected a whole number, got 'five' (text)"),
        ("loop.steps.more=5", "loop.steps holds 20"),
        ("loop.setps=5", "did you mean loop.steps?"),
        ("lop.steps=5", "did you mean loop?"),
        ("actor.lr=5", "did you mean actor.optimizer.lr or"),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, override: str, reason: str) -> None:
    message = str(refusal(write(tmp_path, MINIMAL), override))
    assert f"override {override!r}" in message
    assert reason in message


# round trips

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(PLAIN)
@example("1e-4")
@example("off")
@example("010")
@example("1_000")
@example("~")
@example("")
@example("2020-01-01")
@example({"\x85": "a\u2028b\r"})
def test_plain_data_survives_dump_and_load(value: Any) -> None:
    back = parse_value(dump_yaml({"x": value}), "test")["x"]
    assert back == value
    assert type(back) is type(value)


def full_config() -> dict[str, Any]:
    """Plain data of a config in which every section is present."""
    return load_config(LAPTOP).model_dump()


@settings(deadline=None, max_examples=60)
@given(
    lr=st.floats(min_value=1e-12, max_value=1.0),
    options=st.dictionaries(st.text(min_size=1), PLAIN, max_size=3),
    name=st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,11}", fullmatch=True),
    sft=st.booleans(),
)
def test_a_dumped_config_loads_back_equal(lr: float, options: dict[str, Any], name: str, sft: bool) -> None:
    data = full_config()
    data["actor"]["optimizer"]["lr"] = lr
    data["environment"]["options"] = options
    data["run"]["name"] = name
    if not sft:
        data["sft"] = None
    config = Config.model_validate(data)
    with tempfile.TemporaryDirectory() as directory:
        for text in (dump_config(config), describe_config(config)):
            assert load_config(write(Path(directory), text)) == config


def test_described_config_holds_the_help_of_every_field() -> None:
    text = describe_config(load_config(LAPTOP))
    flat = " ".join(line.strip().lstrip("# ") for line in text.splitlines())

    def fields(section: Any) -> Any:
        for name, field in type(section).model_fields.items():
            yield field.description
            value = getattr(section, name)
            if hasattr(type(value), "model_fields"):
                yield from fields(value)

    helps = list(fields(load_config(LAPTOP)))
    assert len(helps) > 80
    for help_text in helps:
        assert help_text, "a field without help"
        assert help_text in flat
