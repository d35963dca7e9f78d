"""How an SGLang server is started: its arguments, its environment, and the directory that it serves.

Invariants, asserted by the tests:
- a user's argument wins over our defaults; what follows from the config (``SET_BY_US``) is not the user's;
- the served model has no end-of-sequence token: only a request's own stop tokens end it, as in every other engine;
- a model that SGLang would serve otherwise than it was trained is refused.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasao.config.sglang import CONTEXT_SLACK, SGLangConfig
from megasao.families import HfConfig
from megasao.families.facts import is_moe_layer
from megasao.rollout.engines.sglang_client import SERVER_KEEPS_ALIVE_S
from megasao.rollout.engines.sglang_fp8 import fp8_problem

SERVE_SCRIPT = Path(__file__).with_name("sglang_serve.py")
CPU_SUPPORT = Path(__file__).with_name("sglang_cpu")
CHECK_TIMEOUT_S = 180.0

_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 32768,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
    "enable_deterministic_inference": True,
}
"""Defaults on a machine without a GPU: fp32 as the trainer there, and an idle server that leaves the cores alone."""

_DENSE_TWIN = "Glm4MoeLiteForCausalLM"
"""SGLang's model with GLM-5.2's latent attention and experts, and without its selection of keys."""

_NOT_SERVED = ("config.json", "generation_config.json")


def server_arguments(
    config: SGLangConfig,
    *,
    served: Path,
    host: str,
    port: int,
    max_tokens: int,
    routed_experts: bool = False,
    phase: Mapping[str, Any] | None = None,
    empty: bool = False,
) -> dict[str, Any]:
    """ServerArgs of one server by name.

    Args:
        max_tokens: the longest episode.
        routed_experts: whether the server is to record where its tokens went.
        phase: what only this server has.
        empty: it reads no weights, and has numbers without a meaning until a version comes.
    """
    defaults: dict[str, Any] = {"context_length": max_tokens + CONTEXT_SLACK, "log_level": "warning"}
    if runs_on_cpu(config):
        defaults |= _ON_CPU
    if phase and runs_on_cpu(config):
        # A step ahead waits for an event of an accelerator before it sends keys and values on.
        defaults["disable_overlap_schedule"] = True
    if config.pause == "in_place":
        # A step that is computed ahead would be counted to the new weights though the old ones made it.
        defaults["disable_overlap_schedule"] = True
    ours = {
        "model_path": str(served),
        "host": host,
        "port": port,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "stream_interval": config.stream_interval,
        "enable_return_routed_experts": routed_experts,
    }
    if empty:
        ours["load_format"] = "dummy"
    return {**defaults, **config.server_args, **ours, **(phase or {})}


def server_environment(
    config: SGLangConfig, architecture: str, parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a server that serves the model class ``architecture``."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")  # those of the Python that runs us, not of SGLang's
    environment = {name: value for name, value in parent.items() if name not in ours}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by CONTEXT_SLACK, which no token ever reaches
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPS_ALIVE_S),
    }
    if runs_on_cpu(config):
        environment |= {
            "PYTHONPATH": str(CPU_SUPPORT),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "megasao_sglang_models",
            "MEGASAO_SGLANG_ARCHITECTURE": architecture,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        # A prefill server that died is back here in seconds: by default (5 s, twice) the others would not notice.
        environment.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
        environment.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")
        if (ranks := config.gpus_of_server()) > 1:  # SGLang wants to know their cores; without, a NUMA node for each
            cores = sorted(os.sched_getaffinity(0))
            bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)
    return environment


def runs_on_cpu(config: SGLangConfig) -> bool:
    """Whether the servers run on the CPU: asked for, or no GPU is there."""
    device = config.server_args.get("device")
    return device == "cpu" or (device is None and not Path("/dev/nvidiactl").exists())


def model_problem(
    config: SGLangConfig, hf_config: HfConfig, *, max_tokens: int, on_cpu: bool | None = None, fp8: bool = False
) -> str | None:
    """Why SGLang would not serve the model of a config.json, or would serve another one; None if it serves it.

    ``max_tokens`` is the longest episode: up to ``index_topk`` tokens sparse attention selects every key. ``on_cpu``:
    whether the servers run on the CPU, where that is not as on this machine. ``fp8``: in blocks of FP8.
    """
    family, layers = hf_config["model_type"], range(hf_config["num_hidden_layers"])
    if family == "qwen3_moe" and not all(is_moe_layer(hf_config, layer) for layer in layers):
        return "SGLang gives experts to every layer of qwen3_moe, and this model has dense ones (mlp_only_layers)"
    on_cpu = runs_on_cpu(config) if on_cpu is None else on_cpu
    if family == "glm_moe_dsa" and on_cpu and max_tokens > hf_config["index_topk"]:
        return (
            f"SGLang has sparse attention on GPUs only, and dense attention is the same up to index_topk = "
            f"{hf_config['index_topk']} tokens; environment.max_tokens = {max_tokens}"
        )
    return fp8_problem(config, hf_config) if fp8 else None


def server_command(config: SGLangConfig, mode: str, arguments: Path, *, key: Path | None = None) -> list[str]:
    """The command that serves, or checks, the arguments in a file; ``key`` is the file of the server's key."""
    return [config.python, "-P", str(SERVE_SCRIPT), mode, str(arguments), *([str(key)] if key is not None else [])]


def check_server_args(config: SGLangConfig, *, timeout_s: float = CHECK_TIMEOUT_S) -> dict[str, Any]:
    """What the installed SGLang says to ``config.server_args``: ``version``, ``known``, ``unknown`` names, ``error``.

    ValueError if there is no SGLang that could say.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "args.json"
        asked = {**config.server_args, **config.phase_of(0)}
        path.write_text(json.dumps(asked), encoding="utf-8")
        try:
            done = subprocess.run(
                server_command(config, "check", path),
                env=server_environment(config, ""),
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(
                f"{config.python} cannot be asked for its SGLang: {error}; run `make setup-sglang`"
            ) from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ValueError(f"{config.python} has no working SGLang: {reason[0]}; run `make setup-sglang`")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def make_served_directory(config: SGLangConfig, checkpoint: Path, target: Path, *, fp8: bool = False) -> str:
    """Links to ``checkpoint`` in a new directory ``target``, with a config.json of its own; the model's class name.

    With ``fp8`` config.json is that of the checkpoint in blocks of FP8, which the server is to get.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in _NOT_SERVED:
            (target / file.name).symlink_to(file.resolve())
    served = served_config(config, _fp8_config(checkpoint) if fp8 else _read_config(checkpoint))
    (target / "config.json").write_text(json.dumps(served), encoding="utf-8")
    return str((served.get("architectures") or [""])[0])


def _read_config(checkpoint: Path) -> HfConfig:
    config: HfConfig = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config


def _fp8_config(checkpoint: Path) -> HfConfig:
    from megasao.conversion.hf import open_hf
    from megasao.conversion.to_hf import quantized_config

    return quantized_config(open_hf(checkpoint))


def served_config(config: SGLangConfig, hf_config: HfConfig) -> HfConfig:
    """config.json without end-of-sequence tokens; on a CPU, sparse attention as the dense one (``model_problem``)."""
    served = {**hf_config, "eos_token_id": None}
    if "eos_token_id" in served.get("text_config", {}):
        served["text_config"] = {**served["text_config"], "eos_token_id": None}
    if hf_config.get("model_type") == "glm_moe_dsa" and runs_on_cpu(config):
        served["architectures"] = [_DENSE_TWIN]
    return served


def vocab_size(checkpoint: Path) -> int:
    """Rows of the model's embedding; ids beyond them would end the server."""
    config = _read_config(checkpoint)
    return int(config.get("text_config", config)["vocab_size"])
