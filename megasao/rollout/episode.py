"""One episode: turns of the engine and answers of the environment, token in, token out.

Invariants:
- what the engine sampled is what is recorded, id for id; an observation is tokenised on its own and appended;
- the version of every action token is the engine's word; an observation has the version of the action before it,
  the prompt that of the first action;
- a segment never exceeds ``max_tokens``, there are at most ``compaction.max_segments`` (1 without compaction), and an
  episode ends with an action token;
- a segment that another one may follow keeps room for the request and the summary; both are part of it;
- a reward lies on the last token that was seen when it arrived.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Environment, Prompt, StepResult
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.compaction import Compaction
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
    segment_starts: list[int] = field(default_factory=lambda: [0])
    summaries: int = 0
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
            known = self.routed
            first = len(self.tokens) - 1 - len(result.routed_experts)
            assert first <= known, "an engine computes what follows the tokens that it computed before"
            self.routed_experts.append(result.routed_experts[known - first :])

    def begin_segment(self, ids: Sequence[int]) -> None:
        """Go on in a context of its own, which begins with these tokens."""
        self.segment_starts.append(len(self.tokens))
        if self.routed_experts:  # the engine never ran the last token: see ``routing``
            self.routed_experts.append(self.routed_experts[-1][-1:])
        self.observe(ids)

    @property
    def routed(self) -> int:
        """How many tokens have their experts."""
        return sum(map(len, self.routed_experts))

    @property
    def segment(self) -> list[int]:
        """The tokens of the segment that is being written."""
        return self.tokens[self.segment_starts[-1] :]

    def routing(self) -> bytes:
        """[T, M, K] of all tokens; the last one of a segment, which the engine never ran, as the one before it."""
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
        return cls(environment, engine, codec, limits, codec.stop_ids(environment))

    async def _prompt(self, lease: Lease) -> Prompt:
        make, split, index = self.environment.prompt, lease.split, lease.prompt_index
        if self.environment.prompts_wait:
            return await asyncio.to_thread(make, split, index)  # type: ignore[arg-type]
        return make(split, index)  # type: ignore[arg-type]

    async def run(self, lease: Lease) -> Trajectory:
        """Play one lease to its end.

        Raises what the engine (EngineError) or the environment (EnvironmentFailure) raises, and ValueError for a
        prompt that leaves no room for an action.
        """
        started = time.time()
        prompt = await self._prompt(lease)
        transcript = Transcript()
        transcript.observe(self.codec.encode_prompt(prompt))
        play = _Play(self, lease, prompt, transcript)
        if play.room <= 0:
            raise ValueError(
                f"prompt {prompt.prompt_id} has {len(transcript.tokens)} tokens; environment.max_tokens = "
                f"{self.limits.max_tokens} leaves no room for an action"
                + (f" before the {play.reserve} tokens kept for a summary" if play.reserve else "")
            )
        episode = self.environment.start(prompt, lease.seed)
        try:
            finish_reason = await play.turns(episode.step)
        finally:
            await self.engine.end_session(play.session)
            await episode.close()
        return self._trajectory(lease, prompt, transcript, finish_reason, started)

    def _trajectory(
        self, lease: Lease, prompt: Prompt, transcript: Transcript, finish_reason: str, started: float
    ) -> Trajectory:
        counts = {"turns": float(len(transcript.turn_starts) - transcript.summaries)}
        if self.limits.compaction is not None:
            counts["segments"] = float(len(transcript.segment_starts))
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
            segment_starts=transcript.segment_starts if len(transcript.segment_starts) > 1 else None,
            rollout_logprobs=transcript.logprobs if lease.want_logprobs else None,
            temperature=lease.temperature,
            routed_experts=transcript.routing() if lease.want_routed_experts else None,
            metrics={**transcript.metrics, **counts},
            created_at=started,
            finished_at=time.time(),
        )


class _Play:
    """One episode being played."""

    def __init__(self, runner: EpisodeRunner, lease: Lease, prompt: Prompt, transcript: Transcript) -> None:
        self._runner, self._lease, self._prompt, self._transcript = runner, lease, prompt, transcript
        self._limits, self._codec, self._engine = runner.limits, runner.codec, runner.engine
        options = runner.limits.compaction
        self._compaction = Compaction(options, runner.codec) if options is not None else None
        self._summary_room = self._compaction.reserve(prompt) if self._compaction is not None else 0

    @property
    def session(self) -> str:
        """The engine's name for this segment: what it cached belongs to one context."""
        number = len(self._transcript.segment_starts) - 1
        return f"{self._lease.lease_id}/{number}" if number else self._lease.lease_id

    @property
    def reserve(self) -> int:
        """Tokens kept free for a summary; 0 in the last segment."""
        compaction = self._compaction
        may_follow = compaction is not None and len(self._transcript.segment_starts) < compaction.options.max_segments
        return self._summary_room if may_follow else 0

    @property
    def room(self) -> int:
        """Tokens that the segment can still hold."""
        return self._limits.max_tokens - self.reserve - len(self._transcript.segment)

    async def turns(self, step: Callable[[str], Awaitable[StepResult]]) -> str:
        """Play to the end; the finish reason."""
        transcript, answered = self._transcript, 0
        while answered < self._limits.max_turns:
            result = await self._generate(min(self._limits.max_turn_tokens, self.room))
            transcript.act(result)
            answer = StepResult("", 0.0, False)
            if result.finish_reason != "length" or self.room > 0:  # else the window cut the turn: it has no answer
                answer, answered = await step(self._codec.decode(result.output_ids)), answered + 1
                transcript.count(answer.metrics)
            if answer.done or answered == self._limits.max_turns:
                transcript.reward(answer.reward)
                return "done" if answer.done else "max_turns"
            observation = self._codec.encode_observation(self._prompt, answer, transcript.tokens[-1])
            if len(observation) < self.room:
                transcript.observe(observation)
                transcript.reward(answer.reward)
                continue
            transcript.reward(answer.reward)
            if not await self._compact(answer):
                return "max_tokens"
        raise AssertionError("unreachable: max_turns >= 1")

    async def _compact(self, answer: StepResult) -> bool:
        """Let the model write a summary, and begin the next segment with it; False if there cannot be one.

        ``answer`` found no room: the next segment shows it.
        """
        transcript, compaction = self._transcript, self._compaction
        if compaction is None or not self.reserve:
            return False
        transcript.observe(compaction.request(self._prompt, transcript.tokens[-1]))
        result = await self._generate(compaction.options.summary_tokens)
        transcript.act(result)
        transcript.summaries += 1
        summary = result.output_ids[:-1] if result.finish_reason == "stop" else result.output_ids
        ids = compaction.resume(self._prompt, summary, answer)
        last = len(transcript.segment_starts) + 1 == compaction.options.max_segments
        if len(ids) >= self._limits.max_tokens - (0 if last else self._summary_room):
            return False
        await self._engine.end_session(self.session)
        transcript.begin_segment(ids)
        return True

    async def _generate(self, max_new_tokens: int) -> GenerateResult:
        lease, transcript, number = self._lease, self._transcript, len(self._transcript.turn_starts)
        request = GenerateRequest(
            request_id=f"{lease.lease_id}/{number}",
            session_id=self.session,
            input_ids=tuple(transcript.segment),
            sampling=SamplingParams(
                temperature=lease.temperature,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._runner.stop_token_ids,
                seed=turn_seed(lease.seed, number),
                return_logprobs=lease.want_logprobs,
                return_routed_experts=lease.want_routed_experts,
                routed_experts_from=max(0, transcript.routed - transcript.segment_starts[-1]),
            ),
        )
        try:
            result = await self._engine.generate(request)
        except BaseException:
            # A cancelled or timed-out episode must not leave a request decoding in the engine.
            await self._engine.abort(request.request_id)
            raise
        if result.finish_reason == "abort":
            raise EngineError(f"request {request.request_id} was aborted after {len(result.output_ids)} tokens")
        return result


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of one turn, a pure function of the lease's seed: in [0, 2**63)."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big") >> 1
