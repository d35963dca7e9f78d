"""Environments, rollout workers, engines, evaluation, transport, supervision, observability."""

from typing import Any, Literal

from pydantic import Field

from megasao.config.base import Section
from megasao.config.compaction import CompactionConfig
from megasao.config.sglang import SGLangConfig


class EnvironmentConfig(Section):
    """What the agent acts in."""

    name: str = Field("calculator", description="Registered environment.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the environment, which checks every key."
    )
    template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the checkpoint's chat template, such as enable_thinking."
    )
    max_turns: int = Field(8, ge=1, description="Most turns of an episode.")
    max_tokens: int = Field(110, ge=2, description="Most tokens of an episode, observations included.")
    compaction: CompactionConfig | None = Field(
        None, description="Episodes of several segments, each of up to max_tokens; null ends them where they are full."
    )
    max_turn_tokens: int = Field(16, ge=1, description="Most tokens the model may generate in one turn.")
    episode_timeout_s: float = Field(60.0, gt=0, description="Longest life of an episode; then it is excluded.")

    @property
    def longest_episode(self) -> int:
        """Most tokens of an episode over all its segments."""
        return self.max_tokens * (self.compaction.max_segments if self.compaction is not None else 1)


class EmbeddedEngineConfig(Section):
    """The transformers engine inside a rollout process (the laptop default)."""

    slots: int = Field(64, ge=1, description="Requests decoded together.")
    threads: int = Field(1, ge=1, description="CPU threads of the engine.")
    kv_after_update: Literal["keep", "recompute"] = Field(
        "keep", description="New weights: keep the KV cache of running requests, or recompute it under them."
    )


class RolloutConfig(Section):
    """Rollout processes and sampling."""

    workers: int = Field(1, ge=1, description="Rollout processes.")
    concurrency: int = Field(64, ge=1, description="Episodes in flight per worker.")
    engine: Literal["embedded", "sglang"] = Field(
        "embedded", description="Rollout engine: a transformers model inside the worker, or SGLang servers."
    )
    embedded: EmbeddedEngineConfig = Field(
        default_factory=EmbeddedEngineConfig, description="Options of the embedded engine."
    )
    sglang: SGLangConfig = Field(default_factory=SGLangConfig, description="Options of SGLang servers.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs are those of the sampled law.")
    logprobs: Literal["auto", "always", "never"] = Field(
        "auto", description="Record the sampled tokens' log-probs: auto is where algorithm.objective needs them."
    )
    weight_versions: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Record which weights produced each token: auto is where algorithm.objective needs it. Without, "
        "staleness counts from the version that an episode's lease was granted for.",
    )


class BufferConfig(Section):
    """Bounds of the trajectory buffer; when it is full no new leases are given, and nothing is dropped."""

    max_trajectories: int = Field(256, ge=1, description="Trajectories waiting or on lease.")
    max_bytes: int = Field(256 * 2**20, ge=1, description="Bytes waiting or reserved by leases.")
    lease_timeout_s: float = Field(120.0, gt=0, description="A lease not answered in this time goes back.")
    max_attempts: int = Field(
        3, ge=1, description="Attempts at a prompt after failures before it is given up, counted."
    )
    payload: Literal["controller", "rollout"] = Field(
        "controller",
        description="Where trajectories lie until they are trained: in the controller's journal, or in one of each "
        "rollout worker, from which the trainer's ranks fetch them; the controller then has only what it decides with.",
    )
    payload_directory: str | None = Field(
        None,
        description="With payload = rollout: where workers keep it, such as a disk of their node; null is in the run "
        "directory. On a disk that a lost node takes along, so does it.",
    )


class EvaluationConfig(Section):
    """Held-out problems, run in the background, labelled with the weight version that produced the tokens."""

    every: int = Field(25, ge=0, description="Actor steps between evaluations; 0 evaluates only at the end.")
    problems: int = Field(512, ge=1, description="Held-out problems per evaluation.")
    sampled: bool = Field(True, description="Also measure success when sampling at T = 1.")
    benchmarks: list[str] = Field(
        default_factory=list,
        description="Benchmarks of `megasao eval --list` to measure as well, with the settings of section benchmarks.",
    )
    concurrency: int = Field(
        64, ge=1, description="Evaluation episodes in flight per worker, on its evaluation engine, beside the rollouts."
    )
    timeout_s: float = Field(300.0, gt=0, description="Longest wait for the last evaluation.")


class BenchmarksConfig(Section):
    """`megasao eval`. Prompt, answer and the number of samples of each benchmark stand in docs/evaluation.md."""

    data: str = Field("data/benchmarks", description="Directory of their files: NAME.parquet, .jsonl, .json or .csv.")
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="By name, where a benchmark lies elsewhere: a path, or hf:OWNER/NAME@COMMIT:FILE.",
    )
    samples: int | None = Field(
        None, ge=1, description="Responses to each problem; null is the benchmark's own number."
    )
    swebench: dict[str, Any] = Field(
        default_factory=dict, description="Options of environment swebench for swebench_verified: where it runs."
    )
    problems: int | None = Field(None, ge=1, description="Only the first so many problems; null is all.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    max_tokens: int = Field(131072, ge=2, description="Most tokens of prompt and response.")
    chat: bool = Field(True, description="Ask through the checkpoint's chat template; false: the prompt as it is.")
    response_timeout_s: float = Field(3600.0, gt=0, description="Longest time of one response; then it is excluded.")


class TransportConfig(Section):
    """ZeroMQ endpoints."""

    host: str = Field("127.0.0.1", description="Address that sockets bind to; beyond loopback CURVE is required.")
    curve: bool = Field(False, description="Authenticate and encrypt with CURVE keys made for this run.")
    heartbeat_s: float = Field(2.0, gt=0, description="Interval of worker heartbeats.")
    dead_after_s: float = Field(15.0, gt=0, description="Silence after which a peer counts as dead.")
    high_water_mark: int = Field(64, ge=2, description="ZeroMQ high-water mark of each socket, messages.")
    weights_timeout_s: float = Field(30.0, gt=0, description="Bound on each phase of a weight update.")


class SupervisionConfig(Section):
    """The local launcher restarts roles that die."""

    max_restarts: int = Field(3, ge=0, description="Restarts of one role before the run fails.")
    start_timeout_s: float = Field(180.0, gt=0, description="Longest start-up of a role.")
    hang_timeout_s: float = Field(
        240.0,
        gt=0,
        description="A role that shows no sign of life for this long is killed and restarted; "
        "longer than its start-up and than the longest training step.",
    )
    stop_timeout_s: float = Field(20.0, gt=0, description="Grace between a stop request and SIGKILL.")


class MismatchConfig(Section):
    """Alarm limits for log-probs of the trainer against those of the engine; null is off.

    ``current_`` is about tokens that the step's own weights sampled, where trainer and engine alone differ.
    """

    current_abs_mean: float | None = Field(
        0.1, gt=0, description="Mean |log-prob difference| on current tokens; bfloat16 alone gives up to about 0.02."
    )
    current_abs_max: float | None = Field(None, gt=0, description="Largest |log-prob difference| on current tokens.")
    kl: float | None = Field(None, gt=0, description="k3 estimate of KL(rollout || trainer) on all action tokens.")
    ess: float | None = Field(
        None, gt=0, le=1, description="Effective sample size as a share of all action tokens, from below."
    )


class ObservabilityConfig(Section):
    """Where numbers go. JSON lines and TensorBoard are always written."""

    panel: Literal["auto", "live", "lines", "off"] = Field(
        "auto", description="Terminal output; auto is live on a terminal, else one line a step."
    )
    wandb_project: str | None = Field(None, description="Weights & Biases project; null is off.")
    entropy: bool = Field(
        False,
        description="Report actor/entropy also where algorithm.entropy_bonus is 0; it costs more work in the loss.",
    )
    examples_every: int = Field(10, ge=1, description="Steps between saved example trajectories.")
    examples_per_step: int = Field(2, ge=1, description="Example trajectories saved each time.")
    mismatch: MismatchConfig = Field(
        default_factory=MismatchConfig, description="Alarms about log-probs of trainer and engine."
    )
