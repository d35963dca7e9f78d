"""Settings of a config that nothing reads beside its others: `megasao check` notes them.

They are no errors: one file serves several engines and placements, switched by an override, and keeps the options of
each. What a run would be relied on for and cannot give (a layout, an address, a directory) is refused at load instead
(``combinations.py``). Invariants, asserted by the tests:
- only what differs from its default is noted, so that a config written out with all its fields gets the same notes;
- each setting is noted where nothing reads it, and not where something does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megasao.config.base import Section
from megasao.config.errors import Problem
from megasao.config.root import Config

_SERVERS = ("python", "servers", "first_port", "pause", "stream_interval", "silence_timeout_s", "retries")


@dataclass(frozen=True)
class _Rule:
    """``reason`` why nothing reads ``paths`` where ``unread`` holds."""

    paths: tuple[str, ...]
    unread: Callable[[Config], bool]
    reason: str


_RULES = (
    _Rule(
        ("critic.timeout_s",),
        lambda config: not config.critic_is_separate,
        "critic.placement = colocated has no critic that is waited for",
    ),
    _Rule(
        ("critic.head_bias",),
        lambda config: config.critic is not None and config.critic.path is not None,
        "the value model of critic.path has its own value head",
    ),
    _Rule(
        (*(f"rollout.sglang.{name}" for name in _SERVERS), "slurm.cpus_per_server"),
        lambda config: config.rollout.engine != "sglang",
        "rollout.engine = embedded has no servers",
    ),
    _Rule(
        ("rollout.embedded.slots", "rollout.embedded.kv_after_update"),
        lambda config: config.rollout.engine != "embedded",
        "rollout.engine = sglang has an engine of its own",
    ),
    _Rule(
        ("weights.shard_bytes",),
        lambda config: not _weights_are_files(config),
        "weights do not pass through files on their way",
    ),
    _Rule(
        ("loop.partial_groups",),
        lambda config: config.loop.group_size == 1,
        "groups of loop.group_size = 1 have no part",
    ),
    _Rule(
        ("algorithm.advantages.alpha",),
        lambda config: getattr(config.algorithm.advantages, "policy_lambda", None) != "length_adaptive",
        "algorithm.advantages.policy_lambda is a number",
    ),
    _Rule(
        ("algorithm.kl.estimator",),
        lambda config: config.algorithm.kl.coefficient == 0,
        "algorithm.kl.coefficient = 0 computes no distance",
    ),
    _Rule(
        ("algorithm.allow_uncorrected",),
        lambda config: config.algorithm.objective.name != "ppo_clip" or config.loop.mode == "sync",
        "it permits algorithm.objective.name = ppo_clip with loop.mode = async, and nothing else",
    ),
    _Rule(
        ("ops.logprob_chunk",),
        lambda config: config.ops.backend == "reference",
        "ops.backend = reference takes the logits of all tokens at once",
    ),
    _Rule(
        ("observability.mismatch.kl", "observability.mismatch.ess"),
        lambda config: not config.wants_logprobs,
        "the engine's log-probs are not recorded (rollout.logprobs)",
    ),
    _Rule(
        ("observability.mismatch.current_abs_mean", "observability.mismatch.current_abs_max"),
        lambda config: not (config.wants_logprobs and config.wants_versions),
        "the engine's log-probs or their weight versions are not recorded (rollout.logprobs, rollout.weight_versions)",
    ),
)


def unread_settings(config: Config) -> list[Problem]:
    """What is set in ``config`` and has no reader, with the reason."""
    return [
        Problem(path, rule.reason)
        for rule in _RULES
        if rule.unread(config)
        for path in rule.paths
        if _differs_from_default(config, path)
    ]


def _weights_are_files(config: Config) -> bool:
    nodes = config.weight_transport == "distributed" and config.rollout.engine == "sglang"
    return nodes or config.weight_transport == "disk"


def _differs_from_default(config: Config, path: str) -> bool:
    """Whether ``path`` is there, and is not what it would be if nobody had written it."""
    *sections, name = path.split(".")
    section: object = config
    for each in sections:
        section = getattr(section, each, None)
    if not isinstance(section, Section) or name not in type(section).model_fields:
        return False  # a section that is null, or of another kind
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(section, name) != default)
