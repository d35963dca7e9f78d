"""Is the model's checkpoint whole, and does it fit the config? Reads headers; needs neither torch nor transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megasao.config.architecture import config_file, read_architecture
from megasao.config.errors import ConfigError, Problem
from megasao.config.root import Config
from megasao.families import family_of
from megasao.families.facts import expert_count, stage_problem
from megasao.families.names import name_problem, shape_problem
from megasao.storage.hf_directory import checkpoint_files

Find = Callable[[Config, dict[str, Any]], Iterator[Problem]]


def check_model(config: Config) -> bool:
    """Check parallel layout and lengths against ``model.path``/config.json, and that its weights are whole.

    Returns False where nothing is at ``model.path`` (yet). ConfigError lists everything that does not fit.
    """
    try:
        path = config_file(Path(config.model.path))
        if path is None:
            return False
        shape = read_architecture(path)
    except ValueError as error:
        raise ConfigError(config.model.path, [Problem("model.path", str(error))]) from None
    problems = [*layout_problems(config, shape), *untrainable(config, shape), *_files(path.parent, shape)]
    problems += [*of_critic(layout_problems, config, shape), *of_critic(untrainable, config, shape)]
    if problems:
        raise ConfigError(str(path), problems)
    return True


def layout_problems(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    """What of the layout and the lengths does not fit a model with config.json ``shape``."""
    yield from _layout(config, shape)
    yield from _lengths(config, shape)


def of_critic(find: Find, config: Config, shape: dict[str, Any]) -> list[Problem]:
    """What ``find`` sees in a separate critic's own layout and not in the actor's; nothing where it has none.

    What is of its layout has the path of that.
    """
    if config.critic is None or config.critic.parallel is None:
        return []
    own = set(find(config.of_critic, shape))
    of_layout = [Problem(f"critic.{each.path}", each.reason) for each in own if each.path.startswith("parallel.")]
    others = [
        Problem(each.path, f"in the critic's layout: {each.reason}")
        for each in own.difference(find(config, shape))
        if not each.path.startswith("parallel.")
    ]
    return sorted(of_layout + others, key=lambda each: (each.path, each.reason))


def untrainable(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    """What can be planned, and cannot be trained."""
    latent, context = family_of(shape).attention == "sparse_latent", config.parallel.context
    modules = config.megatron.model.get("recompute_modules") if config.trainer.recompute == "selective" else None
    if latent and context > 1 and isinstance(modules, list) and "mla_up_proj" in modules:
        reason = f"mla_up_proj alone does not go with parallel.context = {context}; use trainer.recompute = full"
        yield Problem("megatron.model.recompute_modules", reason)
    for name, value in family_of(shape).megatron(shape).items():
        if name in config.megatron.model:
            reason = f"not to be set here: it is {value!r} for model_type = {shape['model_type']!r}"
            yield Problem(f"megatron.model.{name}", reason)


def _layout(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    parallel, experts = config.parallel, expert_count(shape)
    yield from _divisible("parallel.tensor", parallel.tensor, shape, ("num_attention_heads", "num_key_value_heads"))
    yield from _stages(config, shape)
    if not experts:
        for name in ("expert", "expert_tensor"):
            if (size := getattr(parallel, name)) > 1:
                yield Problem(f"parallel.{name}", f"{size} has no meaning: the model has no experts; set it to 1")
        if config.actor.router_replay:
            yield Problem("actor.router_replay", "has no meaning: the model has no experts; take it out")
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
    if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        reason = (
            f"{parallel.expert_tensor} must equal parallel.tensor = {parallel.tensor} while parallel.expert = 1: "
            "Megatron-Core would reduce the experts' gradients over the wrong ranks; set it so, or use expert > 1"
        )
        yield Problem("parallel.expert_tensor", reason)


def _stages(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    """A split of the layers that cannot be, or that parts layers which share what an indexer selects."""
    where = "parallel.pipeline" if config.parallel.pipeline_layers is None else "parallel.pipeline_layers"
    where = where if config.parallel.virtual_pipeline == 1 else "parallel.virtual_pipeline"
    try:
        stages = config.parallel.stages(shape["num_hidden_layers"])
    except ValueError as error:
        yield Problem(where, str(error))
        return
    if family_of(shape).attention == "sparse_latent":
        reasons = (stage_problem(shape, stage) for stage in stages)
        yield from (Problem(where, reason) for reason in reasons if reason is not None)


def _divisible(path: str, size: int, shape: dict[str, Any], keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys:
        if shape[key] % size:
            yield Problem(path, f"the model's {key} = {shape[key]} cannot be split evenly over {size} ranks")


def _lengths(config: Config, shape: dict[str, Any]) -> Iterator[Problem]:
    longest = shape["max_position_embeddings"]
    if config.environment.max_tokens > longest:
        reason = f"{config.environment.max_tokens} tokens are more than the model's max_position_embeddings = {longest}"
        yield Problem("environment.max_tokens", reason)


def _files(model: Path, shape: dict[str, Any]) -> Iterator[Problem]:
    """Files that are missing or damaged, and tensors that are not those of config.json."""
    if not (model / "tokenizer.json").is_file():
        yield Problem("model.path", f"{model} has no tokenizer.json")
    if shape.get("quantization_config") is not None:
        reason = f"{model} is quantised (quantization_config), and training starts from a checkpoint that is not"
        yield Problem("model.path", f"{reason}; of FP8 `megasao convert quantize --dequantize` makes one")
        return
    found, problems = dict[str, tuple[int, ...]](), list[Problem]()
    try:
        files = checkpoint_files(model)
    except ValueError as error:
        yield Problem("model.path", str(error))
        return
    for file in files:
        try:
            found |= _shapes(file)
        except (OSError, ValueError) as error:
            problems.append(Problem("model.path", f"{file} is damaged: {error}; copy or download it again"))
    problem = None if problems else name_problem(shape, "actor", set(found)) or shape_problem(shape, found.items())
    yield from problems if problem is None else [Problem("model.path", f"{model} {problem}")]


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor that the header of a safetensors file names. ValueError if the file's length denies it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"its header does not fit into its {size} bytes")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"its header cannot be read ({error!r})") from None
    if size != 8 + length + end:
        raise ValueError(f"it should have {8 + length + end} bytes and has {size}")
    return shapes
