"""One episode: turns of the engine and answers of the environment, token in, token out.

Invariants:
- what the engine sampled is what is recorded, id for id; an observation is tokenised on its own and appended;
- the version of every action token is the engine's word; an observation has the version of the action before it,
  the prompt that of the first action;
- an episode never exceeds ``max_tokens`` and ends with an action token;
- a reward lies on the last token that was seen when it arrived.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Environment, Prompt, StepResult
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult, SamplingParams
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import Lease


@dataclass
class Transcript:
    """A growing trajectory; the lists are aligned with ``tokens``."""

    tokens: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    routed_experts: list[np.ndarray] = field(default_factory=list)

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not choose."""
        self._append(ids, False, [0.0] * len(ids))

    def act(self, result: GenerateResult) -> None:
        """Append a turn of the model."""
        start = len(self.tokens)
        self.turn_starts.append(start)
        self._append(result.output_ids, True, result.logprobs or [0.0] * len(result.output_ids))
        for offset, version in result.weight_versions:
            first = start + offset if self.weight_versions else 0
            if not self.weight_versions or self.weight_versions[-1][1] != version:
                self.weight_versions.append((first, version))
        if result.routed_experts is not None:
            known = sum(map(len, self.routed_experts))
            first = len(self.tokens) - 1 - len(result.routed_experts)
            assert first <= known, "an engine computes what follows the tokens that it computed before"
            self.routed_experts.append(result.routed_experts[known - first :])

    def routing(self) -> bytes:
        """[T, M, K] of all tokens; the last one, which the engine never ran, as the one before it."""
        return np.concatenate([*self.routed_experts, self.routed_experts[-1][-1:]]).tobytes()

    def reward(self, reward: float) -> None:
        """A reward arrives now."""
        self.rewards[-1] += reward

    def count(self, metrics: dict[str, float]) -> None:
        """Add metrics of one turn to the episode's totals."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def _append(self, ids: Sequence[int], is_action: bool, logprobs: list[float]) -> None:
        assert len(logprobs) == len(ids), (len(logprobs), len(ids))
        self.tokens += ids
        self.action_mask += [is_action] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays leases of one environment on one engine."""

    environment: Environment
    engine: Engine
    codec: TokenizerCodec
    limits: EnvironmentConfig
    stop_token_ids: tuple[int, ...]

    @classmethod
    def build(
        cls, environment: Environment, engine: Engine, codec: TokenizerCodec, limits: EnvironmentConfig
    ) -> "EpisodeRunner":
        """ValueError if a stop string is not one token of this tokenizer."""
        stops = tuple(codec.single_token(text) for text in environment.stop_strings)
        return cls(environment, engine, codec, limits, stops)

    async def run(self, lease: Lease) -> Trajectory:
        """Play one lease to its end.

        Raises what the engine (EngineError) or the environment (EnvironmentFailure) raises, and ValueError for a
        prompt that leaves no room for an action.
        """
        started = time.time()
        prompt = self.environment.prompt(lease.split, lease.prompt_index)  # type: ignore[arg-type]
        transcript = Transcript()
        transcript.observe(self.codec.encode(prompt.text))
        if len(transcript.tokens) >= self.limits.max_tokens:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {len(transcript.tokens)} tokens; environment.max_tokens = "
                f"{self.limits.max_tokens} leaves no room for an action"
            )
        episode = self.environment.start(prompt, lease.seed)
        try:
            finish_reason = await self._turns(lease, episode.step, transcript)
        finally:
            await self.engine.end_session(lease.lease_id)
            await episode.close()
        return self._trajectory(lease, prompt, transcript, finish_reason, started)

    async def _turns(self, lease: Lease, step: Callable[[str], Awaitable[StepResult]], transcript: Transcript) -> str:
        for turn in range(self.limits.max_turns):
            result = await self._generate(lease, turn, transcript.tokens)
            transcript.act(result)
            if result.finish_reason == "length" and len(transcript.tokens) >= self.limits.max_tokens:
                return "max_tokens"
            answer = await step(self.codec.decode(result.output_ids))
            transcript.count(answer.metrics)
            if answer.done or turn == self.limits.max_turns - 1:
                transcript.reward(answer.reward)
                return "done" if answer.done else "max_turns"
            observation = self.codec.encode(answer.observation)
            if len(transcript.tokens) + len(observation) >= self.limits.max_tokens:
                transcript.reward(answer.reward)
                return "max_tokens"
            transcript.observe(observation)
            transcript.reward(answer.reward)
        raise AssertionError("unreachable: max_turns >= 1")

    async def _generate(self, lease: Lease, turn: int, tokens: list[int]) -> GenerateResult:
        request = GenerateRequest(
            request_id=f"{lease.lease_id}/{turn}",
            session_id=lease.lease_id,
            input_ids=tuple(tokens),
            sampling=SamplingParams(
                temperature=lease.temperature,
                max_new_tokens=min(self.limits.max_turn_tokens, self.limits.max_tokens - len(tokens)),
                stop_token_ids=self.stop_token_ids,
                seed=turn_seed(lease.seed, turn),
                return_logprobs=lease.want_logprobs,
                return_routed_experts=lease.want_routed_experts,
            ),
        )
        try:
            result = await self.engine.generate(request)
        except BaseException:
            # A cancelled or timed-out episode must not leave a request decoding in the engine.
            await self.engine.abort(request.request_id)
            raise
        if result.finish_reason == "abort":
            raise EngineError(f"request {request.request_id} was aborted after {len(result.output_ids)} tokens")
        return result

    def _trajectory(
        self, lease: Lease, prompt: Prompt, transcript: Transcript, finish_reason: str, started: float
    ) -> Trajectory:
        return Trajectory(
            trajectory_id=lease.lease_id,
            prompt_id=lease.prompt_id,
            group_id=lease.group_id,
            task=prompt.task,
            tokens=transcript.tokens,
            action_mask=transcript.action_mask,
            rewards=transcript.rewards,
            weight_versions=transcript.weight_versions if lease.want_versions else None,
            turn_starts=transcript.turn_starts,
            finish_reason=finish_reason,
            rollout_logprobs=transcript.logprobs if lease.want_logprobs else None,
            temperature=lease.temperature,
            routed_experts=transcript.routing() if lease.want_routed_experts else None,
            metrics={**transcript.metrics, "turns": float(len(transcript.turn_starts))},
            created_at=started,
            finished_at=time.time(),
        )


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of one turn, a pure function of the lease's seed: in [0, 2**63)."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big") >> 1
