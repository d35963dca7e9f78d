"""What may be passed on to Megatron-Core, and how everything else is refused; nothing here needs torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megasao.config import Config
from megasao.config.errors import ConfigError
from megasao.config.load import dump_config, load_config
from megasao.config.megatron import Kind, fields, ours

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"


def load(*changes: str) -> Config:
    return load_config(LAPTOP, list(changes))


def refusal(*changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("model.recompute_modules", "[core_attn, mlp]", ["core_attn", "mlp"]),
        ("model.moe_router_dtype", "fp32", "fp32"),
        ("model.cpu_offloading", "true", True),
        ("model.moe_router_topk_limited_devices", "null", None),
        ("optimizer.optimizer_cpu_offload", "true", True),
        ("optimizer.optimizer_offload_fraction", "0.5", 0.5),
        ("optimizer.optimizer_offload_fraction", "1", 1),
        ("optimizer.exp_avg_dtype", "bfloat16", "bfloat16"),
        ("gradients.bucket_size", "1000", 1000),
    ],
)
def test_options_are_taken_as_they_are(key: str, text: str, value: Any) -> None:
    config = load(f"megatron.{key}={text}")
    kind, name = key.split(".")
    assert getattr(config.megatron, kind) == {name: value}


def test_options_survive_the_run_directory(tmp_path: Path) -> None:
    config = load("megatron.model.recompute_modules=[mlp]", "megatron.gradients.bucket_size=7")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.recompute_module", "recompute_modules"),
        ("optimizer.optimizer_cpu_ofload", "optimizer_cpu_offload"),
        ("gradients.buckets_size", "bucket_size"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    message = refusal(f"megatron.{key}=1")
    assert f"megatron.{key}" in message
    assert f"did you mean {nearest}?" in message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.tensor_model_parallel_size", "use parallel.tensor"),
        ("model.num_layers", "config.json"),
        ("model.glu_linear_offset", "another model than config.json describes"),
        ("model.no_rope_freq", "another model than config.json describes"),
        ("model.activation_func_clamp_value", "another model than config.json describes"),
        ("model.softmax_type", "another model than config.json describes"),
        ("model.attention_dropout", "the loss is the algorithm's alone"),
        ("model.recompute_granularity", "use trainer.recompute"),
        ("optimizer.lr", "use actor.optimizer.lr"),
        ("optimizer.use_distributed_optimizer", "use parallel.distributed_optimizer"),
        ("gradients.average_in_collective", "gradients must be summed"),
    ],
)
def test_a_name_that_has_its_own_field_is_refused_with_it(key: str, hint: str) -> None:
    assert hint in refusal(f"megatron.{key}=1")


@pytest.mark.parametrize(
    "change",
    [
        "model.cpu_offloading=1",
        "model.moe_router_dtype=fp8",
        "model.recompute_modules=mlp",
        "model.init_method=xavier",
        "optimizer.optimizer_offload_fraction=half",
        "optimizer.exp_avg_dtype=float33",
        "gradients.bucket_size=true",
        "gradients.bucket_size=1.5",
    ],
)
def test_a_value_of_another_kind_is_refused(change: str) -> None:
    assert "expected " in refusal(f"megatron.{change}")


def test_every_problem_is_reported_at_once() -> None:
    message = refusal("megatron.model.foo=1", "megatron.optimizer.lr=1", "megatron.gradients.bucket_size=x")
    assert all(name in message for name in ("megatron.model.foo", "megatron.optimizer.lr", "megatron.gradients"))


@pytest.mark.parametrize("kind", ["model", "optimizer", "gradients"])
def test_the_refused_names_are_megatrons(kind: Kind) -> None:
    """Of the installed version; a name that a later one drops may stay in the table."""
    assert len(fields(kind)) > 20
    assert len(ours(kind).keys() - fields(kind).keys()) <= 3


def test_checking_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from megasao.config.load import load_config; "
        f"load_config({str(LAPTOP)!r}, ['megatron.gradients.bucket_size=1']); "
        "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=LAPTOP.parents[1])
