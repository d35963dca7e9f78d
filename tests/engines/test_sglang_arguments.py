"""Server arguments against the installed SGLang, the served directory, and the hash of seeded sampling."""

import importlib.util
import json
import subprocess
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from engine_checkpoints import dense_config, make_checkpoint, moe_config
from sglang_server import PYTHON, needs_sglang, sglang_config
from transformers import AutoConfig

from megasao.config.architecture import read_hf_config
from megasao.config.load import load_with_places
from megasao.config.sglang import CONTEXT_SLACK
from megasao.families.routing import Routing
from megasao.launch.preflight import preflight
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.sglang_arguments import (
    CHECK_TIMEOUT_S,
    CPU_SUPPORT,
    SERVE_SCRIPT,
    check_server_args,
    make_served_directory,
    model_problem,
    served_config,
    server_arguments,
    server_environment,
    vocab_size,
)
from megasao.rollout.engines.sglang_experts import ExpertRows
from megasao.rollout.server import training_server
from megasao.studies.tiny_model import write_tokenizer
from tests.megatron.tiny import write_tiny_tokenizer
from tests.megatron.tiny_families import SETTINGS, write_tiny_family

LAPTOP = Path(__file__).resolve().parents[2] / "configs" / "laptop_sglang.yaml"

WRONG = [
    ({"tp_sise": 2}, "unknown", "tp_sise"),
    ({"tp_size": "two"}, "error", "invalid int value"),
    ({"attention_backend": "nonsense"}, "error", "invalid choice"),
    ({"sleep_on_idle": 3}, "error", "true or false"),
]
RIGHT: dict[str, Any] = {
    "tp_size": 2,
    "sleep_on_idle": True,
    "enable_metrics": False,
    "max_running_requests": None,
    "cuda_graph_bs_decode": [1, 2, 4],
    "json_model_override_args": {"num_hidden_layers": 1},
    "schedule_conservativeness": 0.5,
}


def ask_sglang(questions: list[dict[str, Any]]) -> Any:
    """What the script that ``check_server_args`` runs says to each, in one process: SGLang's import takes seconds."""
    body = "import json, runpy, sys; check = runpy.run_path(sys.argv[1])['check']; "
    body += "print(json.dumps([check(one) for one in json.loads(sys.argv[2])]))"
    done = subprocess.run(
        [PYTHON, "-P", "-c", body, SERVE_SCRIPT, json.dumps(questions)],
        env=server_environment(sglang_config(server_args={"device": "cpu"}), ""),
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@needs_sglang
def test_arguments_are_checked_by_the_installed_sglang() -> None:
    answer = check_server_args(sglang_config(server_args=RIGHT))
    assert (answer["unknown"], answer["error"]) == ([], None)
    assert {"tp_size", "mem_fraction_static", "page_size"} <= set(answer["known"])
    answers = ask_sglang([{**RIGHT, **arguments} for arguments, _, _ in WRONG])
    for (_, where, reason), found in zip(WRONG, answers, strict=True):
        assert reason in str(found[where]), found


@needs_sglang
def test_an_unknown_argument_is_refused_at_load_with_a_suggestion(tmp_path: Path) -> None:
    python = sglang_config().python
    overrides = [f"model.path={tmp_path}", f"rollout.sglang.python={python}", "rollout.sglang.server_args={tp_sise: 2}"]
    with pytest.raises(ValueError, match=r"server_args\.tp_sise: .*did you mean .*tp_size"):
        preflight(*load_with_places(LAPTOP, overrides))
    overrides[1] = f"rollout.sglang.python={tmp_path / 'absent'}"
    with pytest.raises(ValueError, match=r"rollout\.sglang\.python: .*make setup-sglang"):
        preflight(*load_with_places(LAPTOP, overrides))


@needs_sglang
def test_a_model_that_sglang_would_serve_otherwise_is_refused(tmp_path: Path) -> None:
    cpu, gpu = (sglang_config(server_args={"device": device}) for device in ("cpu", "cuda"))
    models = shapes(tmp_path)
    for config in (cpu, gpu):
        assert {model_problem(config, models[name], max_tokens=100) for name in ("qwen3_moe", "glm4_moe")} == {None}
        assert "mlp_only_layers" in str(model_problem(config, models["mixed"], max_tokens=100))
    sparse, keys = models["glm_moe_dsa"], models["glm_moe_dsa"]["index_topk"]
    assert f"index_topk = {keys} tokens" in str(model_problem(cpu, sparse, max_tokens=keys + 1))
    assert model_problem(cpu, sparse, max_tokens=keys) is model_problem(gpu, sparse, max_tokens=keys + 1) is None
    assert served_config(gpu, sparse)["architectures"] == sparse["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert served_config(cpu, sparse)["architectures"] == ["Glm4MoeLiteForCausalLM"]

    write_tiny_tokenizer(make_checkpoint(tmp_path / "mixed", moe_config(mlp_only_layers=[0])))
    overrides = [f"model.path={tmp_path / 'mixed'}", f"rollout.sglang.python={cpu.python}"]
    with pytest.raises(ValueError, match=r"rollout\.engine: .*mlp_only_layers"):
        preflight(*load_with_places(LAPTOP, overrides), ask_sglang=False)


def test_a_run_on_a_cluster_asks_its_nodes_and_not_this_machine(tmp_path: Path) -> None:
    """A login node, or the controller's, may have no SGLang and no GPU."""
    write_tokenizer(write_tiny_family(tmp_path / "glm", "glm_moe_dsa"))
    changes = [f"model.path={tmp_path / 'glm'}", "rollout.sglang.python=/nowhere/python", "sft=null", "critic=null"]
    changes += ["algorithm.advantages.name=group", "loop.group_size=2", "parallel.ranks=1"]
    changes += ["rollout.sglang.server_args={device: cpu}"]
    here, nodes, without_gpus = (
        load_with_places(LAPTOP, [*changes, *more])
        for more in ([], ["slurm.rollout_nodes=1"], ["slurm.rollout_nodes=1", "slurm.gpus_per_node=0"])
    )
    for known, options, reason in (
        (here, {}, r"rollout\.sglang\.python: .*cannot be asked for its SGLang"),
        (here, {"ask_sglang": False}, r"rollout\.engine: .*index_topk"),
        (without_gpus, {"ask_sglang": False, "on_cluster": True}, r"rollout\.engine: .*index_topk"),
    ):
        with pytest.raises(ValueError, match=reason):
            preflight(*known, **options)
    assert preflight(*nodes, ask_sglang=False, on_cluster=True)


def shapes(directory: Path) -> dict[str, Any]:
    """A config.json of each family, and one whose first layer is dense."""
    changes: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": []}, "mixed": {"mlp_only_layers": [0]}}
    found = {}
    for name in ("qwen3_moe", "mixed", "glm4_moe", "glm_moe_dsa"):
        family = "qwen3_moe" if name == "mixed" else name
        config = AutoConfig.for_model(family, **deepcopy({**SETTINGS[family], **changes.get(name, {})}))
        config.architectures = ["GlmMoeDsaForCausalLM"] if family == "glm_moe_dsa" else None
        config.save_pretrained(directory / name)
        found[name] = read_hf_config(directory / name)
    return found


@pytest.mark.parametrize("left_out", ["first_k_dense_replace", "hidden_act"])
def test_what_config_leaves_out_is_the_same_to_engine_and_trainer(tmp_path: Path, left_out: str) -> None:
    """transformers, and so SGLang, has a dense first layer of glm4_moe where config.json does not say how many."""
    written = {"model_type": "glm4_moe", **SETTINGS["glm4_moe"], "num_hidden_layers": 3, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in written.items() if k != left_out}))
    trained, experts = Routing.of(read_hf_config(tmp_path)), ExpertRows.of(tmp_path)
    assert trained is not None and experts is not None and trained.layers == 2
    request = GenerateRequest("r", "s", [1, 2, 3], SamplingParams(1.0, 4))
    said = np.broadcast_to(np.arange(3, dtype="<i4")[:, None], (6, 3, trained.top_k))
    assert np.unique(experts.read(said.tobytes(), request, 4, "here")).tolist() == [1, 2]
    (tmp_path / "config.json").write_text('{"model_type": "another", "num_hidden_layers": 2}')
    assert ExpertRows.of(tmp_path) is None, "of no family here"


def test_the_user_wins_over_defaults_and_we_over_the_user() -> None:
    config = sglang_config(server_args={"dtype": "bfloat16", "port": 1}, pause="in_place", stream_interval=3)
    arguments = server_arguments(config, served=Path("model"), host="127.0.0.1", port=2, max_tokens=100)
    assert (arguments["dtype"], arguments["port"], arguments["stream_interval"]) == ("bfloat16", 2, 3)
    assert arguments["context_length"] == 100 + CONTEXT_SLACK
    assert arguments["disable_overlap_schedule"], "spans of in-place updates would be off by one token"


def test_servers_behind_a_router_may_have_a_part_each() -> None:
    config = sglang_config(servers=3, first_port=30000, prefill_servers=2, router="http://127.0.0.1:30100")
    phases = [config.phase_of(server, 4) for server in (0, 1, 2, None)]
    modes = [(phase.get("disaggregation_mode"), phase.get("disaggregation_bootstrap_port")) for phase in phases]
    assert modes == [("prefill", 30004), ("prefill", 30005), ("decode", None), (None, None)]
    assert [training_server(role) for role in ("engine-0-2", "engine-3-0.1", "engine-0-evaluation")] == [2, 0, None]
    where = {"served": Path("model"), "host": "127.0.0.1", "port": 2, "max_tokens": 100}
    assert server_arguments(config, **where, phase=phases[0])["disaggregation_mode"] == "prefill"  # type: ignore[arg-type]


def test_only_a_cpu_server_sees_the_stand_ins() -> None:
    parent = {"PATH": "/bin", "PYTHONPATH": "ours"}
    cpu = server_environment(sglang_config(server_args={"device": "cpu"}), "Any", parent)
    cuda = server_environment(sglang_config(server_args={"device": "cuda"}), "Any", parent)
    assert cpu["PYTHONPATH"] == str(CPU_SUPPORT) and "PYTHONPATH" not in cuda
    assert cuda["PATH"] == "/bin" and "SGLANG_USE_CPU_ENGINE" not in cuda
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu
    split = server_environment(sglang_config(server_args={"device": "cpu", "tp_size": 3}), "Any", parent)
    assert len(split["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3, "SGLang asks for a NUMA node of each rank else"


def test_a_prefill_server_that_comes_back_in_seconds_is_noticed_on_a_cpu() -> None:
    """By SGLang's own bounds (two questions, 5 s apart) the others would go on waiting for the one that died."""
    names = ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE")
    cpu = server_environment(sglang_config(server_args={"device": "cpu"}), "Any", {names[0]: "3"})
    cuda = server_environment(sglang_config(server_args={"device": "cuda"}), "Any", {})
    assert [cpu[name] for name in names] == ["3", "1"], "what the user sets stands"
    assert not set(names) & set(cuda)


def test_the_served_model_has_no_end_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", dense_config(eos_token_id=[3, 4]))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert json.loads((checkpoint / "config.json").read_text())["eos_token_id"] == [3, 4]
    for _ in range(2):  # a restarted server makes it anew
        assert make_served_directory(sglang_config(), checkpoint, tmp_path / "served") == "Qwen3ForCausalLM"
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["eos_token_id"] is None
    assert not (tmp_path / "served" / "generation_config.json").exists()
    assert (tmp_path / "served" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert vocab_size(checkpoint) == config["vocab_size"]


def murmur3(message: bytes) -> int:
    """MurmurHash3, 32 bits, seed 0, of whole 4-byte blocks and a tail, after its published description."""
    state = 0
    whole = len(message) - len(message) % 4
    for start in range(0, whole, 4):
        state ^= _scramble(int.from_bytes(message[start : start + 4], "little"))
        state = (_rotate(state, 13) * 5 + 0xE6546B64) % 2**32
    if message[whole:]:
        state ^= _scramble(int.from_bytes(message[whole:], "little"))
    state ^= len(message)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor % 2**32
    return state ^ state >> 16


def _scramble(block: int) -> int:
    return _rotate(block * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) % 2**32


def load_kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sgl_kernel", CPU_SUPPORT / "sgl_kernel" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hash_of_seeded_sampling() -> None:
    assert murmur3(b"hello") == 0x248BFA47, "the reference itself, by a published value"
    kernels = load_kernels()
    seeds = torch.tensor([0, 1, 42, 2**31, 2**40 + 3, 2**63 - 1], dtype=torch.int64)
    positions, columns = torch.arange(6, dtype=torch.int64) * 977, torch.arange(7)
    hashed = kernels.murmur_hash32(seeds.to(torch.uint64), positions, columns).tolist()
    for seed, position, row in zip(seeds.tolist(), positions.tolist(), hashed, strict=True):
        for column, value in enumerate(row):
            blocks = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert value == murmur3(blocks)
    with pytest.raises(NotImplementedError, match="rmsnorm"):
        kernels.rmsnorm()
