"""Does the model's checkpoint fit the config? Reads its config.json; needs neither torch nor transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasao.config.errors import ConfigError, Problem
from megasao.config.root import Config

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def check_model(config: Config) -> bool:
    """Check parallel layout and lengths against ``model.path``/config.json.

    Returns False where that file does not exist (yet). ConfigError lists everything that does not fit.
    """
    path = Path(config.model.path) / "config.json"
    if not path.is_file():
        return False
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(str(path), [Problem("model.path", f"config.json is not valid JSON: {error}")]) from None
    if not isinstance(shape, dict):
        raise ConfigError(str(path), [Problem("model.path", "config.json is not a JSON object")])
    problems = [*_layout(config, shape), *_lengths(config, shape), *_files(Path(config.model.path))]
    if problems:
        raise ConfigError(str(path), problems)
    return True


def expert_count(shape: dict[str, Any]) -> int:
    """Routed experts per MoE layer; 0 for a dense model."""
    return next((int(shape[key]) for key in _EXPERT_KEYS if shape.get(key)), 0)


def _layout(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    parallel, experts = config.parallel, expert_count(shape)
    yield from _divisible("parallel.tensor", parallel.tensor, shape, ("num_attention_heads", "num_key_value_heads"))
    yield from _divisible("parallel.pipeline", parallel.pipeline, shape, ("num_hidden_layers",))
    if not experts:
        for name in ("expert", "expert_tensor"):
            if (size := getattr(parallel, name)) > 1:
                yield Problem(f"parallel.{name}", f"{size} has no meaning: the model has no experts; set it to 1")
        yield from _divisible("parallel.tensor", parallel.tensor, shape, ("intermediate_size",))
        return
    if experts % parallel.expert:
        yield Problem("parallel.expert", f"{experts} experts cannot be split evenly over {parallel.expert} ranks")
    yield from _divisible("parallel.expert_tensor", parallel.expert_tensor, shape, ("moe_intermediate_size",))
    if parallel.tensor > 1 and not parallel.sequence:
        reason = (
            f"a mixture of experts with parallel.tensor = {parallel.tensor} needs sequence parallelism: without it the "
            "experts would see every token once per tensor rank; set parallel.sequence=true"
        )
        yield Problem("parallel.sequence", reason)


def _divisible(path: str, size: int, shape: dict[str, Any], keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys:
        count = shape.get(key)
        if isinstance(count, int) and count % size:
            yield Problem(path, f"the model's {key} = {count} cannot be split evenly over {size} ranks")


def _lengths(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    longest = shape.get("max_position_embeddings")
    if isinstance(longest, int) and config.environment.max_tokens > longest:
        reason = f"{config.environment.max_tokens} tokens are more than the model's max_position_embeddings = {longest}"
        yield Problem("environment.max_tokens", reason)


def _files(model: Path) -> Iterator[Problem]:
    if not (model / "tokenizer.json").is_file():
        yield Problem("model.path", f"{model} has no tokenizer.json")
    if not any(model.glob("*.safetensors")):
        yield Problem("model.path", f"{model} has no *.safetensors")
