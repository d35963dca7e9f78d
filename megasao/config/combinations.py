"""Combinations of fields that are fine alone and cannot work together; refused before anything starts.

Each rule is one function from the config to the problems it sees. What needs the model's own files is in
``model_check.py``.
"""

import ipaddress
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megasao.config import megatron
from megasao.config.errors import Problem
from megasao.config.fleet import fleet_problems
from megasao.config.sglang import CONTEXT_SLACK, SET_BY_US
from megasao.config.training import OptimizerConfig

if TYPE_CHECKING:
    from megasao.config.root import Config

_HERE = ("127.0.0.1", "localhost", "::1")
"""Where servers listen that are not of a Slurm job."""


def is_loopback(host: str) -> bool:
    """True if sockets bound to ``host`` cannot be reached from another machine."""
    return host == "localhost" or (is_ipv4(host) and ipaddress.IPv4Address(host).is_loopback)


def is_ipv4(host: str) -> bool:
    """True for four numbers with dots."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def batch(config: "Config") -> Iterator[Problem]:
    """A batch must be able to exist, and must teach the critic something."""
    size, room = config.loop.batch_size, config.buffer.max_trajectories
    if size == 1 and config.algorithm.advantages.needs_critic:
        reason = (
            "with one trajectory a step the critic cannot learn: it fits the one return it sees, and the explained "
            "variance of a single trajectory says nothing; use at least 2 (the paper uses 128)"
        )
        yield Problem("loop.batch_size", reason)
    if size > room:
        reason = f"a batch of {size} cannot be collected in a buffer of buffer.max_trajectories = {room}"
        yield Problem("loop.batch_size", f"{reason}; enlarge the buffer or shrink the batch")


def steps(config: "Config") -> Iterator[Problem]:
    """Some steps must be left for the actor after the critic's warm-up."""
    warmup, total = config.warmup_steps, config.loop.steps
    if warmup >= total:
        reason = f"{warmup} warm-up steps of loop.steps = {total} leave no step in which the actor is trained"
        yield Problem("critic.warmup_steps", f"{reason}; use more steps or a shorter warm-up")


def schedules(config: "Config") -> Iterator[Problem]:
    """Every learning rate must reach its peak before it falls, and before the end."""
    actor_steps, named = config.loop.steps - config.warmup_steps, "loop.steps"
    if config.warmup_steps:
        named += " - critic.warmup_steps"
    if actor_steps > 0:  # else it is refused by itself
        yield from _schedule("actor.optimizer", config.actor.optimizer, actor_steps, named)
    if config.critic is not None:
        yield from _schedule("critic.optimizer", config.critic.optimizer, config.loop.steps, "loop.steps")
    if config.sft is not None:
        yield from _schedule("sft.optimizer", config.sft.optimizer, config.sft.steps, "sft.steps")
    if (stage := config.value_pretraining) is not None:
        yield from _schedule("value_pretraining.optimizer", stage.optimizer, stage.steps, "value_pretraining.steps")


def _schedule(path: str, optimizer: OptimizerConfig, total: int, total_name: str) -> Iterator[Problem]:
    warmup, decay = optimizer.warmup_steps, optimizer.decay_start
    if warmup >= total:
        reason = f"{warmup} warm-up steps of {total_name} = {total}: the learning rate never reaches its peak"
        yield Problem(f"{path}.warmup_steps", f"{reason}; shorten the warm-up")
    elif decay is not None and warmup > decay * total:
        reason = (
            f"decay begins at step {decay * total:g} (decay_start = {decay:g} of {total_name} = {total}), before the "
            f"warm-up of {warmup} steps ends; start the decay later or shorten the warm-up"
        )
        yield Problem(f"{path}.decay_start", reason)


def lengths(config: "Config") -> Iterator[Problem]:
    """A turn fits an episode, and an episode fits a packed row."""
    turn, episode, row = (
        config.environment.max_turn_tokens,
        config.environment.max_tokens,
        config.trainer.token_budget,
    )
    longest = config.environment.longest_episode
    if turn > episode:
        reason = f"one turn of {turn} tokens is longer than a whole episode, environment.max_tokens = {episode}"
        yield Problem("environment.max_turn_tokens", reason)
    if row < longest:
        reason = f"{_longest_episode(config)} does not fit a packed row of {row} tokens"
        yield Problem("trainer.token_budget", f"{reason}; use a budget of at least {longest}")


def _longest_episode(config: "Config") -> str:
    compaction = config.environment.compaction
    segments = f" in {compaction.max_segments} segments" if compaction is not None else ""
    return f"an episode of environment.max_tokens = {config.environment.max_tokens}{segments}"


def conversations(config: "Config") -> Iterator[Problem]:
    """A summary leaves room for work and reaches the next segment; the chat template's own variables stay its own."""
    environment, compaction = config.environment, config.environment.compaction
    for name in sorted({"messages", "tools", "add_generation_prompt"} & set(environment.template_variables)):
        yield Problem(f"environment.template_variables.{name}", "is set by megasao for every prompt; leave it out")
    if compaction is None:
        return
    if 2 * compaction.summary_tokens > environment.max_tokens:
        reason = f"{compaction.summary_tokens} tokens are more than half of environment.max_tokens"
        yield Problem("environment.compaction.summary_tokens", f"{reason} = {environment.max_tokens}; use fewer")
    if "{summary}" not in compaction.resume:
        reason = f"expected {{summary}} in it, got {compaction.resume!r}: the model would forget what it did"
        yield Problem("environment.compaction.resume", reason)


def benchmarks(config: "Config") -> Iterator[Problem]:
    """Benchmarks in the background fit the run's engines, each once."""
    names, window, longest = config.evaluation.benchmarks, config.environment.max_tokens, config.benchmarks.max_tokens
    if len(set(names)) < len(names):
        yield Problem("evaluation.benchmarks", f"the same name twice in {', '.join(names)}; name each once")
    if names and longest > window:
        reason = (
            f"{longest} tokens are more than the run's engines have room for (environment.max_tokens = {window}), and "
            f"evaluation.benchmarks are asked there; use at most {window}"
        )
        yield Problem("benchmarks.max_tokens", reason)


def waits(config: "Config") -> Iterator[Problem]:
    """An outer wait must be longer than what it waits for."""
    episode = config.environment.episode_timeout_s
    if config.buffer.lease_timeout_s < episode:
        reason = (
            f"leases would go back after {config.buffer.lease_timeout_s:g} s while an episode may still run: "
            f"environment.episode_timeout_s = {episode:g}; make the lease at least as long"
        )
        yield Problem("buffer.lease_timeout_s", reason)
    if config.loop.batch_timeout_s < episode:
        reason = (
            f"the run would fail after {config.loop.batch_timeout_s:g} s while an episode may still run: "
            f"environment.episode_timeout_s = {episode:g}; make the wait at least as long"
        )
        yield Problem("loop.batch_timeout_s", reason)
    if config.transport.dead_after_s < 2 * config.transport.heartbeat_s:
        reason = (
            f"a live peer would count as dead: it sends a heartbeat every transport.heartbeat_s = "
            f"{config.transport.heartbeat_s:g} s; allow at least two"
        )
        yield Problem("transport.dead_after_s", reason)


def payload(config: "Config") -> Iterator[Problem]:
    """A batch whose payload is with a worker that restarts is waited for, by all ranks together."""
    if config.buffer.payload == "controller":
        if config.buffer.payload_directory is not None:
            yield Problem("buffer.payload_directory", "has no meaning with buffer.payload = controller; take it out")
        return
    place = config.buffer.payload_directory
    if place is not None and not place.startswith("/"):
        yield Problem("buffer.payload_directory", f"expected an absolute path, got {place!r}")
    longest = config.transport.dead_after_s + config.supervision.start_timeout_s
    if config.loop.batch_timeout_s <= longest:
        reason = (
            f"the run would fail after {config.loop.batch_timeout_s:g} s while a worker that has payload may still "
            f"come back: transport.dead_after_s + supervision.start_timeout_s = {longest:g}; make the wait longer"
        )
        yield Problem("loop.batch_timeout_s", reason)
    worlds, silence = (config.parallel, config.of_critic.parallel), config.transport.dead_after_s
    bound = min((world.timeout_s for world in worlds if world.ranks > 1), default=float("inf"))
    if bound <= silence:
        reason = (
            f"a rank asks a worker that died for {silence:g} s, while the others wait in a collective of at most "
            f"parallel.timeout_s = {bound:g}; raise that bound"
        )
        yield Problem("transport.dead_after_s", reason)


def weight_waits(config: "Config") -> Iterator[Problem]:
    """The trainer's ranks wait in a collective while rank 0 waits for both phases of the update before."""
    bound, phases = config.parallel.timeout_s, 2 * config.transport.weights_timeout_s
    if config.parallel.ranks > 1 and bound <= phases:
        reason = (
            f"two phases of {config.transport.weights_timeout_s:g} s are longer than the bound on a collective, "
            f"parallel.timeout_s = {bound:g}, in which the other ranks wait; raise that bound"
        )
        yield Problem("transport.weights_timeout_s", reason)


def exposure(config: "Config") -> Iterator[Problem]:
    """Sockets that other machines can reach are authenticated."""
    host = config.transport.host
    if host != "localhost" and not is_ipv4(host):
        yield Problem("transport.host", f"expected localhost or an IPv4 address of this machine, got {host!r}")
    elif not is_loopback(host) and not config.transport.curve:
        reason = (
            f"{host} can be reached from other machines and transport.curve is false: anyone there could send "
            "trajectories or weights; set transport.curve=true or bind to 127.0.0.1"
        )
        yield Problem("transport.host", reason)


def weights(config: "Config") -> Iterator[Problem]:
    """Options of the disk are for runs that publish through it, and FP8 is for servers that can compute with it."""
    if config.weights.directory is not None and config.weight_transport != "disk":
        reason = f"has no reader while weights travel by {config.weight_transport}; set weights.transport = disk"
        yield Problem("weights.directory", reason)
    asked, default = config.weights.node_directory, type(config.weights).model_fields["node_directory"].default
    if asked != default and config.weight_transport != "distributed":
        reason = f"has no reader while weights travel by {config.weight_transport}; leave it"
        yield Problem("weights.node_directory", reason)
    elif asked != default and config.rollout.engine != "sglang":
        reason = f"has no reader while rollout.engine = {config.rollout.engine}, whose workers keep them in memory"
        yield Problem("weights.node_directory", f"{reason}; leave it")
    elif not asked.startswith("/"):
        yield Problem("weights.node_directory", f"expected an absolute path, got {asked!r}")
    if config.weights.carrier != "tcp" and config.weight_transport != "distributed":
        reason = f"carries weights.transport = distributed, and they travel by {config.weight_transport}; use tcp"
        yield Problem("weights.carrier", f"{config.weights.carrier} {reason}")
    if config.weight_transport == "embedded" and config.rollout.engine != "embedded":
        reason = (
            f"embedded shares memory with the embedded engine, and rollout.engine = {config.rollout.engine}; "
            "use disk or distributed"
        )
        yield Problem("weights.transport", reason)
    elif config.weight_transport == "embedded" and config.slurm is not None:
        reason = "embedded needs trainer and engines on one machine, and in a Slurm job they are on nodes of their own"
        yield Problem("weights.transport", f"{reason}; use distributed or disk")
    if config.weights.dtype == "fp8_block":
        yield from _fp8(config)


def _fp8(config: "Config") -> Iterator[Problem]:
    if config.rollout.engine != "sglang":
        reason = f"fp8_block is for SGLang servers; rollout.engine = {config.rollout.engine} has no FP8: use same"
        yield Problem("weights.dtype", reason)
    elif config.weight_transport == "stream":
        reason = "fp8_block is made where ranks have their shares; with stream use same, or set disk or distributed"
        yield Problem("weights.dtype", reason)
    for name, allowed in (("quantization", ("fp8",)), ("load_format", ()), ("speculative_algorithm", ())):
        value = config.rollout.sglang.server_args.get(name)
        if value is not None and value not in allowed:
            reason = (
                f"{value!r} does not go with weights.dtype = fp8_block: servers start empty, with the products of "
                "published versions in FP8; leave it"
            )
            yield Problem(f"rollout.sglang.server_args.{name}", reason)


def estimator(config: "Config") -> Iterator[Problem]:
    """There is a critic exactly where one is needed, and groups where rewards are compared within them."""
    options, size = config.algorithm.advantages, config.loop.group_size
    if options.needs_critic and config.critic is None:
        reason = f"algorithm.advantages.name = {options.name} needs a value model; write its section, with optimizer.lr"
        yield Problem("critic", reason)
    if not options.needs_critic and config.critic is not None:
        reason = f"algorithm.advantages.name = {options.name} has no use for a value model; write critic: null"
        yield Problem("critic", reason)
    if options.needs_groups and size == 1:
        reason = (
            "with groups of 1 the baseline of a rollout is its own reward, and every advantage is 0: set "
            "loop.group_size to at least 2"
        )
        yield Problem("algorithm.advantages.name", reason)


def critic_placement(config: "Config") -> Iterator[Problem]:
    """Only a critic in a world of its own has a layout of its own, and its rows hold an episode."""
    critic, longest = config.critic, config.environment.longest_episode
    if critic is None:
        return
    for name in ("parallel", "token_budget") if critic.placement == "colocated" else ():
        if getattr(critic, name) is not None:
            reason = "has no reader while critic.placement = colocated, where the critic is on the actor's ranks"
            yield Problem(f"critic.{name}", f"{reason}; set critic.placement to separate, or take it out")
    if critic.token_budget is not None and critic.token_budget < longest:
        reason = f"{_longest_episode(config)} does not fit a row of {critic.token_budget} tokens"
        yield Problem("critic.token_budget", f"{reason}; use a budget of at least {longest}")


def value_pretraining(config: "Config") -> Iterator[Problem]:
    """There is a critic to pretrain, and it starts from one place."""
    if config.value_pretraining is None:
        return
    if config.critic is None:
        yield Problem("value_pretraining", "critic: null, so there is no value model to pretrain; take the section out")
    elif config.critic.path is not None:
        reason = f"RL would start from value_pretraining's result, not from {config.critic.path}; take one of them out"
        yield Problem("critic.path", reason)


def groups(config: "Config") -> Iterator[Problem]:
    """Batches hold whole groups."""
    size, batch_size = config.loop.group_size, config.loop.batch_size
    if batch_size % size:
        reason = f"{batch_size} trajectories are no whole number of groups of loop.group_size = {size}"
        yield Problem("loop.batch_size", f"{reason}; use {size * max(1, batch_size // size)}, say")


def objective(config: "Config") -> Iterator[Problem]:
    """The objective gets what it reads, is divided by what it means, and fits the loop."""
    options, algorithm = config.algorithm.objective, config.algorithm
    if options.needs_logprobs and not config.wants_logprobs:
        reason = (
            f"algorithm.objective.name = {options.name} needs the log-probs that rollout.logprobs = never leaves out"
        )
        yield Problem("rollout.logprobs", f"{reason}; use auto")
    if options.needs_versions and not config.wants_versions:
        reason = (
            f"algorithm.objective.name = {options.name} corrects for the weights that produced each token, which "
            "rollout.weight_versions = never leaves out"
        )
        yield Problem("rollout.weight_versions", f"{reason}; use auto")
    if options.response_level and algorithm.denominator != "sequences":
        reason = (
            f"{options.name} is a mean over responses, each already divided by its tokens; got "
            f"{algorithm.denominator}, use sequences"
        )
        yield Problem("algorithm.denominator", reason)
    if algorithm.denominator == "accepted_tokens" and options.name != "dis":
        yield Problem("algorithm.denominator", f"accepted_tokens are those in the band of dis; {options.name} has none")
    if options.name == "ppo_clip" and config.loop.mode == "async" and not algorithm.allow_uncorrected:
        reason = (
            "on asynchronous rollouts ppo_clip corrects nothing: its clip bounds the ratio on one side only, by the "
            "sign of the advantage; use dis, loop.mode = sync, or algorithm.allow_uncorrected = true"
        )
        yield Problem("algorithm.objective.name", reason)


def router_replay(config: "Config") -> Iterator[Problem]:
    """Engines record the experts, every pass of a layer sees its row, and Megatron's router asks for them."""
    if not config.actor.router_replay:
        return
    servers = config.rollout.sglang.server_args if config.rollout.engine == "sglang" else {}
    if servers.get("pp_size", 1) != 1:
        reason = "actor.router_replay: SGLang tells the experts of its last stage only; use tp_size and ep_size"
        yield Problem("rollout.sglang.server_args.pp_size", reason)
    options = config.megatron.model
    modules = options.get("recompute_modules")
    if config.trainer.recompute == "selective" and isinstance(modules, list) and {"moe", "mlp"} & set(modules):
        reason = (
            "actor.router_replay: experts alone are recomputed, without the row that they belong to; take them out, or "
            "use trainer.recompute = full"
        )
        yield Problem("megatron.model.recompute_modules", reason)
    if options.get("moe_router_fusion"):
        yield Problem("megatron.model.moe_router_fusion", "the fused router cannot replay; take it out")


def megatron_options(config: "Config") -> Iterator[Problem]:
    """What is passed on to Megatron-Core exists there, and is not set by other fields."""
    yield from megatron.problems(config)


def slurm_nodes(config: "Config") -> Iterator[Problem]:
    """Every node of a component is filled alike, and processes of a node share no GPU."""
    options = config.slurm
    if options is None:
        return
    gpus, ranks, workers = options.gpus_per_node, config.parallel.ranks, config.rollout.workers
    on_node, own = options.ranks_on_a_node(), config.of_critic.parallel.ranks
    if ranks > on_node and ranks % on_node:
        reason = f"parallel.ranks = {ranks} do not fill whole nodes of {on_node}; give a number that divides them"
        yield Problem("slurm.ranks_per_node", reason)
    elif gpus and min(on_node, max(ranks, own)) > gpus:
        yield Problem("slurm.ranks_per_node", f"{on_node} ranks on a node of slurm.gpus_per_node = {gpus}: one each")
    if own != ranks and own > on_node and own % on_node:
        reason = f"critic.parallel.ranks = {own} do not fill whole nodes of {on_node}; give a number that divides them"
        yield Problem("slurm.ranks_per_node", reason)
    if config.rollout.engine == "sglang":
        yield from fleet_problems(config)
    elif options.nodes_per_server > 1:
        reason = f"has no reader while rollout.engine = {config.rollout.engine}; set rollout.engine to sglang"
        yield Problem("slurm.nodes_per_server", reason)
    elif workers % options.rollout_nodes:
        reason = f"rollout.workers = {workers} cannot be spread evenly over {options.rollout_nodes} nodes"
        yield Problem("slurm.rollout_nodes", f"{reason}; give a number that divides them, or more workers")
    elif gpus and workers // options.rollout_nodes > gpus:
        reason = f"{workers // options.rollout_nodes} workers on a node of {gpus} GPUs would share them; use more nodes"
        yield Problem("slurm.rollout_nodes", reason)
    if options.leave_before_limit_s >= 60 * options.time_limit_minutes:
        reason = (
            f"{options.leave_before_limit_s} s before a limit of {options.time_limit_minutes} min is before the start"
        )
        yield Problem("slurm.leave_before_limit_s", f"{reason}; use fewer seconds or a longer limit")
    if config.plan.rollout_gpus and gpus and config.plan.rollout_gpus != gpus * options.rollout_nodes:
        reason = (
            f"{gpus * options.rollout_nodes} GPUs of rollout nodes, but plan.rollout_gpus = {config.plan.rollout_gpus}"
        )
        yield Problem("slurm.rollout_nodes", f"{reason}; the plan would be of another fleet, make them equal")


def fleet_of_plan(config: "Config") -> Iterator[Problem]:
    """The fleet that a plan assumes is whole engines."""
    gpus, engine = config.plan.rollout_gpus, config.plan.engine_gpus
    if gpus % engine:
        reason = f"{gpus} GPUs are no whole number of engines of plan.engine_gpus = {engine}"
        yield Problem("plan.rollout_gpus", f"{reason}; use {engine * max(1, gpus // engine)}, say, or smaller engines")


def simulate(config: "Config") -> Iterator[Problem]:
    """A simulated episode has its law's parameters, and fits an episode and an engine."""
    options, longest = config.simulate, config.environment.max_tokens
    if options is None:
        return
    episode = options.episode
    for name, law in (("sigma", "lognormal"), ("alpha", "pareto")):
        if (getattr(episode, name) is None) == (episode.response == law):
            reason = "is needed" if episode.response == law else "is of another law"
            yield Problem(f"simulate.episode.{name}", f"{reason}: simulate.episode.response = {episode.response}")
    least = round(episode.prompt_tokens.value) + (episode.turns - 1) * round(episode.observation_tokens.value)
    if least + episode.turns > longest:
        reason = f"{least} tokens of prompt and observations leave no room in environment.max_tokens = {longest}"
        yield Problem("simulate.episode", f"{reason}; use fewer turns or shorter ones")
    if options.engine.kv_tokens.value < longest:
        reason = f"holds less than one episode, environment.max_tokens = {longest}"
        yield Problem("simulate.engine.kv_tokens", f"{reason}: it would never begin")
    if options.discard >= options.steps:
        reason = f"{options.discard} of simulate.steps = {options.steps} leave no step to measure"
        yield Problem("simulate.discard", f"{reason}; discard fewer or simulate more")


def _router(config: "Config") -> Iterator[Problem]:
    """What a router needs, and what does not pass through it."""
    options = config.rollout.sglang
    if options.prefill_servers >= options.servers and options.prefill_servers:
        reason = f"leaves no server that decodes: rollout.sglang.servers = {options.servers}"
        yield Problem("rollout.sglang.prefill_servers", reason)
    if options.prefill_servers and options.router is None:
        reason = "a router leads a request from the one kind of server to the other; set rollout.sglang.router"
        yield Problem("rollout.sglang.prefill_servers", reason)
    if options.prefill_servers and options.server_args.get("disaggregation_transfer_backend") == "fake":
        reason = "fake moves no keys and values, so that servers would decode after nothing; use mooncake or nixl"
        yield Problem("rollout.sglang.server_args.disaggregation_transfer_backend", reason)
    if options.router is None:
        return
    if config.rollout.engine != "sglang":
        reason = f"has no reader while rollout.engine = {config.rollout.engine}; set rollout.engine to sglang"
        yield Problem("rollout.sglang.router", reason)
    place = _place(options.router)
    if place is None:
        yield Problem("rollout.sglang.router", f"expected an address http://HOST:PORT, got {options.router!r}")
    elif place[0] in _HERE and place[1] in (ports := _server_ports(config)):
        reason = f"port {place[1]} is one of {ports[0]} to {ports[-1]}, which are the servers' own; use another"
        yield Problem("rollout.sglang.router", reason)
    if config.slurm is not None:
        reason = (
            "the servers of a Slurm job get their addresses when it starts, and no router knows them; leave it null"
        )
        yield Problem("rollout.sglang.router", reason)
    elif options.first_port is None:
        reason = "a router must know its servers before they start: with rollout.sglang.router, set their first port"
        yield Problem("rollout.sglang.first_port", reason)
    if config.rollout.workers > 1:
        reason = "one router is in front of the servers of one worker"
        yield Problem("rollout.workers", f"{reason}, got rollout.workers = {config.rollout.workers}")
    if options.pause == "none":
        reason = "requests that a router sends on do not wait for an update; use retract or in_place"
        yield Problem("rollout.sglang.pause", reason)
    if config.actor.router_replay:
        reason = "SGLang's router does not pass the request for the experts on"
        yield Problem("rollout.sglang.router", f"{reason}; not with actor.router_replay")


def _place(address: str) -> tuple[str, int | None] | None:
    """Host and port of an HTTP address; None if it is none."""
    try:
        parts = urlsplit(address)
        found = parts.hostname, parts.port
    except ValueError:  # a port that is no number, or too large
        return None
    return (found[0], found[1]) if parts.scheme in ("http", "https") and found[0] else None


def _server_ports(config: "Config") -> range:
    """From ``first_port`` on: those of all servers, and where each that prefills is met; empty without it."""
    options = config.rollout.sglang
    first, count = options.first_port, config.rollout.workers * (options.servers + 1) + options.prefill_servers
    return range(first, first + count) if first is not None else range(0)


def sglang(config: "Config") -> Iterator[Problem]:
    """Server arguments leave to us what is ours, and episodes fit the server."""
    options, longest = config.rollout.sglang, config.environment.max_tokens
    for name in SET_BY_US:
        if name in options.server_args:
            yield Problem(
                f"rollout.sglang.server_args.{name}", "is set by megasao from the rest of the config; leave it"
            )
    for name in options.wrong_sizes():
        reason = f"expected a whole number above 0, got {options.server_args[name]!r}"
        yield Problem(f"rollout.sglang.server_args.{name}", f"{reason}: the GPUs of a server are counted by it")
    context = options.server_args.get("context_length")
    if isinstance(context, int) and context < longest + CONTEXT_SLACK:
        reason = f"{context} positions are too few for environment.max_tokens = {longest}"
        yield Problem("rollout.sglang.server_args.context_length", f"{reason}; use at least {longest + CONTEXT_SLACK}")
    yield from _router(config)
    if options.server_args and config.rollout.engine != "sglang":
        reason = f"has no reader while rollout.engine = {config.rollout.engine}; set rollout.engine to sglang"
        yield Problem("rollout.sglang.server_args", reason)
    ports = _server_ports(config)
    if ports.stop > 65536:
        yield Problem("rollout.sglang.first_port", f"{len(ports)} ports from {options.first_port} on go beyond 65535")


RULES: tuple[Callable[["Config"], Iterator[Problem]], ...] = (
    batch,
    estimator,
    critic_placement,
    value_pretraining,
    groups,
    objective,
    steps,
    schedules,
    lengths,
    conversations,
    benchmarks,
    waits,
    payload,
    weight_waits,
    exposure,
    weights,
    router_replay,
    megatron_options,
    slurm_nodes,
    fleet_of_plan,
    simulate,
    sglang,
)


def impossible_combinations(config: "Config") -> list[Problem]:
    """Everything in ``config`` that cannot work, all rules at once."""
    return [problem for rule in RULES for problem in rule(config)]
