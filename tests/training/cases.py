"""What test worlds run for the training step: JSON payload in, JSON out; tensors go to ``payload["out"]``."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file

from megasao.algorithms.objectives import PolicyInputs, TokenLosses, objective
from megasao.config import Config
from megasao.config.algorithm import GpgObjective, ObjectiveOptions
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.families.routing import Routing
from megasao.megatron import context, models, router_replay, runtime, sparse_attention
from megasao.megatron.bridge import export_hf, export_tensors
from megasao.megatron.checkpoint import ModelSnapshot, TorchDistSnapshot, load_model, save_model
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import Optimizer, build_optimizer
from megasao.megatron.runtime import Topology
from megasao.training import checkpoint
from megasao.training.actor import Actor
from megasao.training.batch import Batch, pack_trajectories
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator
from megasao.training.pretrain_value import pretrain
from megasao.training.step import sao_step
from megasao.trajectories.schema import Trajectory
from tests.megatron import family_cases
from tests.training.float64 import everything_in_float64, widened

Payload = dict[str, Any]


def trajectory(number: int, generator: random.Random) -> Trajectory:
    """Alternating observations and actions of random lengths; behaviour log-probs near those of a random model."""
    tokens: list[int] = []
    mask: list[bool] = []
    for _ in range(generator.randint(1, 4)):
        for is_action in (False, True):
            count = generator.randint(1, 6)
            tokens += [generator.randrange(32) for _ in range(count)]
            mask += [is_action] * count
    rewards = [0.0] * len(tokens)
    rewards[-1] = float(generator.random() < 0.5)
    return Trajectory(
        trajectory_id=f"t{number}",
        prompt_id=f"p{number}",
        group_id=f"p{number}",
        task="test",
        tokens=tokens,
        action_mask=mask,
        rewards=rewards,
        weight_versions=[(0, 0)],
        turn_starts=[],
        finish_reason="done",
        rollout_logprobs=[generator.gauss(-3.5, 0.7) if action else 0.0 for action in mask],
        temperature=generator.choice([1.0, 0.8]),
    )


def trajectories(step: int, count: int = 13) -> list[Trajectory]:
    """The batch of a step, the same for every layout."""
    generator = random.Random(step)
    return [trajectory(number, generator) for number in range(count)]


def routed_anywhere(rows: list[Trajectory], routing: Routing) -> list[Trajectory]:
    """The same, with experts drawn at random for every token of every layer."""
    generator = np.random.default_rng(len(rows))

    def ids(row: Trajectory) -> bytes:
        order = generator.random((len(row.tokens), routing.layers, routing.experts)).argsort(-1)
        return order[..., : routing.top_k].astype(routing.dtype).tobytes()

    return [replace(row, routed_experts=ids(row)) for row in rows]


def grouped(rows: list[Trajectory], size: int) -> list[Trajectory]:
    """The same in groups of ``size``, side by side."""
    return [replace(row, group_id=f"g{number // size}") for number, row in enumerate(rows)]


def sao_steps(payload: Payload) -> Any:
    """Whole SAO steps under a layout: metrics of each; weights at the end and gradients of the first to files.

    ``mutation`` is a mistake that must show: "local_denominator" divides by the rank's own action tokens; "batched_p2p"
    lets pipeline stages send as Megatron does by default; "unsummed_context" takes gradients of gathered keys for
    complete; "own_keys" is that of ``family_cases.mistake``; "ungathered_weights" goes on with weights of which other
    ranks have updated their part; "replay_of_rank_0" takes the experts of a row's first tokens on every tensor-parallel
    rank; "frozen_input" lets no gradient reach the input of a critic's first layer.

    ``tile`` and ``scores`` are the queries and the indexer's scores that exist at a time. ``float64`` computes in
    float64, and updates nothing.
    """
    with everything_in_float64() if payload.get("float64") else nullcontext():
        return _sao_steps(payload)


def _sao_steps(payload: Payload) -> Any:
    context.TILE, sparse_attention.SCORES_AT_A_TIME = payload.get("tile", 1024), payload.get("scores", 2**26)
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    actor = Actor.build(Path(payload["path"]), config, topology)
    marked = payload.get("mutation") != "frozen_input"
    with nullcontext() if marked else patch.object(models, "require_input_gradients"):
        critic = Critic.build(Path(payload["path"]), config, topology) if config.critic is not None else None
    estimator = Estimator(config.algorithm, topology.all_reduce_data)
    with _mistake(payload.get("mutation"), actor):
        return _run_steps(payload, config, topology, actor, critic, estimator)


@contextmanager
def _mistake(name: str | None, actor: Actor) -> Iterator[None]:
    """Do something wrong, on purpose, inside the block."""
    if name == "own_keys":
        with family_cases.mistake(name):
            yield
        return
    gather, own = context.gather_parts, router_replay.own_tokens
    if name == "batched_p2p":
        actor.model.transformer_config.overlap_p2p_comm = False
        actor.model.transformer_config.batch_p2p_comm = True
    if name == "unsummed_context":
        context.gather_parts = lambda part: context.gather_outputs(part.movedim(0, -1), _all_of(part)).movedim(-1, 0)
    if name == "ungathered_weights":
        for chunk in actor.model.chunks:
            chunk.disable_forward_pre_hook()
    if name == "replay_of_rank_0":
        router_replay.own_tokens = lambda whole: whole[: len(whole) // 2]
    yield
    context.gather_parts, router_replay.own_tokens = gather, own


def _all_of(part: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    return torch.arange(len(part) * parallel_state.get_context_parallel_world_size())


def _run_steps(
    payload: Payload, config: Config, topology: Topology, actor: Actor, critic: Critic | None, estimator: Estimator
) -> Any:
    roles = {"actor": actor} | ({"critic": critic} if critic is not None else {})
    metrics = []
    for step in range(payload["steps"]):
        rows = grouped(trajectories(step, payload.get("count", 13)), payload.get("group_size", 1))
        routing = Routing.of(actor.model.hf_config) if config.actor.router_replay else None
        batch = pack_trajectories(
            routed_anywhere(rows, routing) if routing else rows,
            data_rank=topology.data_rank,
            data_size=topology.data_size,
            token_budget=payload.get("token_budget", 4096),
            routing=routing,
        )
        if payload.get("mutation") == "local_denominator":
            batch = _local_denominator(batch)
        if payload.get("float64"):
            batch = widened(batch)
        result = sao_step(actor, critic, estimator, batch, step=step, config=config)
        metrics.append({name: value for name, value in result.metrics.items() if not name.startswith("time/")})
        for name, role in roles.items() if step == 0 else ():
            _write(payload, f"{name}-gradients", _gradients(role.model, role.optimizer))
    for name, role in roles.items():
        _write(payload, f"{name}-weights", export_hf(role.model))
    return metrics


def _local_denominator(batch: Batch) -> Batch:
    local = sum(int(row.action_mask.sum()) for row in batch.rows)
    return replace(batch, action_tokens=local)


def _gradients(model: MegatronModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return export_tensors(model, lambda local: optimizer.gradient(local.parameter))


def _write(payload: Payload, name: str, tensors: dict[str, torch.Tensor]) -> None:
    if torch.distributed.get_rank() == 0:
        save_file(tensors, Path(payload["out"]) / f"{name}.safetensors")


def sao_config(payload: Payload) -> Config:
    """Both roles train from the first step; ``settings`` override sections of the config.

    Adam's eps is large: with the usual one, elements whose gradient is rounding noise move by that noise's sign.
    """
    config = {
        "run": {"name": "test"},
        "model": {"path": payload["path"]},
        "algorithm": {"objective": {"name": "dis", "eps_low": 0.8, "eps_high": 3.0}},
        "actor": {"optimizer": {"lr": 1e-3, "eps": 1e-4}},
        "critic": {"optimizer": {"lr": 2e-3, "eps": 1e-4}, "warmup_steps": 0, "head_bias": 0.5},
        "loop": {"steps": 100, "batch_size": 13},
        "parallel": {"ranks": 1},
    }
    return Config.model_validate({**config, **payload.get("settings", {})})


def optimizer_after_pushes(payload: Payload) -> Any:
    """Two actor updates with a push after each; then a checkpoint is saved and loaded, and a third update made.

    ``rebuild`` makes a new optimizer after each push instead of telling the actor of it.
    """
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    actor = Actor.build(Path(payload["path"]), config, topology)
    for step in range(3):
        rows = trajectories(step)
        batch = pack_trajectories(rows, data_rank=topology.data_rank, data_size=topology.data_size, token_budget=4096)
        advantages = [torch.where(row.action_mask, 1.0, 0.0) for row in batch.rows]
        actor.update(batch, advantages, actor_step=step)
        if payload.get("rebuild"):
            actor.optimizer = build_optimizer(actor.model, config.actor.optimizer)
        else:
            actor.pushed()
        directory = Path(payload["out"]) / f"checkpoint-{step}"
        save_model(actor.model, actor.optimizer, directory)
        load_model(actor.model, actor.optimizer, directory)
    _write(payload, "actor-weights", export_hf(actor.model))
    return actor.optimizer.updates()


@contextmanager
def _full_disk() -> Iterator[None]:
    """No part of a model can be written."""
    full = OSError(28, "No space left on device")
    with (
        patch.object(ModelSnapshot, "write", side_effect=full),
        patch.object(TorchDistSnapshot, "write", side_effect=full),
    ):
        yield


def train_and_save(payload: Payload) -> Any:
    """Go on from the run's latest checkpoint to ``until`` steps, and save; metrics of the steps, messages, the step.

    With ``more`` the checkpoint is begun ``more`` steps before the end, and completed at the end. ``damage`` makes
    writing fail on that rank.
    """
    config, form = sao_config(payload), payload.get("format", "safetensors")
    topology = runtime.set_layout(config.parallel, seed=1)
    run = RunDirectory(Path(payload["run"]))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    actor = Actor.build(Path(payload["path"]), config, topology)
    critic = Critic.build(Path(payload["path"]), config, topology)
    estimator = Estimator(config.algorithm, topology.all_reduce_data)
    messages: list[str] = []
    try:
        progress = checkpoint.restore(run, actor, critic, estimator, topology, messages.append)
    except ValueError as error:
        return {"refused": str(error)}
    metrics, pending = [], None
    for step in range(progress.step, payload["until"] + payload.get("more", 0)):
        batch = pack_trajectories(
            trajectories(step), data_rank=topology.data_rank, data_size=topology.data_size, token_budget=128
        )
        metrics.append(sao_step(actor, critic, estimator, batch, step=step, config=config).metrics["actor/loss"])
        if step + 1 == payload["until"]:
            progress = replace(progress, step=step + 1)
            state = {"step": step + 1} if topology.rank == 0 else None
            with _full_disk() if payload.get("damage") == topology.rank else nullcontext():
                pending = checkpoint.begin(
                    run, progress, actor, critic, estimator, topology, controller_state=state, format=form
                )
                while payload.get("damage") == topology.rank and pending.error is None:
                    time.sleep(0.01)
    try:
        while pending is not None and not pending.written():
            time.sleep(0.01)
    except RuntimeError as error:
        return {"failed": str(error)}
    if pending is not None:
        pending.complete(keep=2)
    if "out" in payload:
        _write(payload, "actor-weights", export_hf(actor.model))
        _write(payload, "critic-weights", export_hf(critic.model))
    return {"losses": metrics, "messages": messages, "step": progress.step, "rng": torch.get_rng_state().sum().item()}


def own_objective(payload: Payload) -> Any:
    """One actor update with gpg, and one with an objective that only this function knows: twice the same loss."""

    class Mine(ObjectiveOptions):
        factor: float = 2.0

    @objective(Mine)
    def mine(inputs: PolicyInputs, options: Mine) -> TokenLosses:
        return TokenLosses(-options.factor * inputs.advantages * inputs.logprobs)

    metrics = []
    for options in (GpgObjective(), Mine()):
        config = sao_config(payload)
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"objective": options})})
        assert not config.wants_logprobs and not config.wants_versions
        topology = runtime.set_layout(config.parallel, seed=1)
        actor = Actor.build(Path(payload["path"]), config, topology)
        batch = pack_trajectories(trajectories(0), data_rank=0, data_size=1, token_budget=64)
        advantages = [torch.linspace(-1, 1, row.row.tokens.numel()) for row in batch.rows]
        metrics.append(actor.update(batch, advantages, actor_step=0))
        runtime.clear_layout()
    return metrics


def pretrained_critic(payload: Payload) -> Any:
    """Value pretraining into ``out``: the held-out metrics, then what a critic that starts from it says of a batch.

    With ``start`` only that, from the critic of an earlier call (under another layout, say).
    """
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    directory, held_out = RunDirectory(Path(payload["out"])), None
    section = config.value_pretraining
    if section is not None:
        held_out = pretrain(directory, config, section, topology, None)
    start = Path(payload.get("start", directory.value))
    critic = Critic.build(Path(payload["path"]), config, topology, start=start)
    [row] = pack_trajectories(trajectories(0), data_rank=0, data_size=1, token_budget=4096).rows
    [values] = critic.values(replace(_EMPTY, rows=(row,)))
    fresh = export_tensors(build_model("critic", Path(payload["path"]), config), lambda local: local.parameter)
    moved = [
        name
        for name, tensor in export_tensors(critic.model, lambda local: local.parameter).items()
        if not torch.equal(tensor, fresh[name])
    ]
    return {"held_out": held_out, "values": values.tolist(), "moved": moved, "updates": critic.optimizer.updates()}


_EMPTY = Batch(rows=(), action_tokens=0, sequences=0, tokens=0, entries=())


def pretraining_errors(payload: Payload) -> Any:
    """The message with which each of ``sections`` and each of ``starts`` is refused."""
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    messages = []
    for section in payload["sections"]:
        changed = sao_config({**payload, "settings": {"value_pretraining": section}})
        assert changed.value_pretraining is not None
        try:
            pretrain(RunDirectory(Path(payload["out"])), changed, changed.value_pretraining, topology, None)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    for start in payload["starts"]:
        try:
            Critic.build(Path(payload["path"]), config, topology, start=Path(start))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def preset_steps(payload: Payload) -> Any:
    """Three steps of each preset on one process: the metrics of the last, by preset."""
    configs = Path(__file__).parents[2] / "configs"
    results = {}
    for name in payload["presets"]:
        changes = [str(configs / "algorithms" / f"{name}.yaml"), f"model.path={payload['path']}", "parallel.ranks=1"]
        config = load_config(configs / "laptop.yaml", [*changes, "loop.batch_size=16"])
        if config.critic is not None:
            config = load_config(configs / "laptop.yaml", [*changes, "loop.batch_size=16", "critic.warmup_steps=0"])
        topology = runtime.set_layout(config.parallel, seed=1)
        actor = Actor.build(Path(payload["path"]), config, topology)
        critic = Critic.build(Path(payload["path"]), config, topology) if config.critic is not None else None
        estimator = Estimator(config.algorithm, topology.all_reduce_data)
        for step in range(3):
            rows = grouped(trajectories(step, 16), config.loop.group_size)
            if not config.wants_logprobs:
                rows = [replace(row, rollout_logprobs=None) for row in rows]
            batch = pack_trajectories(rows, data_rank=0, data_size=1, token_budget=4096)
            result = sao_step(actor, critic, estimator, batch, step=step, config=config)
        results[name] = {key: value for key, value in result.metrics.items() if not key.startswith("time/")}
        runtime.clear_layout()
    return results


def row_logprobs(payload: Payload) -> Any:
    """Log-probs of every token of each packed row, and the critic's values, for episodes that are given as JSON:
    (tokens, action_mask, segment_starts or null)."""
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    actor = Actor.build(Path(payload["path"]), config, topology)
    critic = Critic.build(Path(payload["path"]), config, topology)
    for module in critic.model.modules:
        if module.post_process:
            with torch.no_grad():
                module.output_layer.weight.fill_(1 / 64)
    found = []
    for tokens, mask, starts in payload["episodes"]:
        [like] = trajectories(0, 1)
        zeros = [0.0] * len(tokens)
        episode = replace(
            like, tokens=tokens, action_mask=mask, rewards=zeros, rollout_logprobs=zeros, segment_starts=starts
        )
        batch = pack_trajectories([episode], data_rank=0, data_size=1, token_budget=4096)
        found.append([actor.logprobs(batch)[0].tolist(), critic.values(batch)[0].tolist()])
    return found
