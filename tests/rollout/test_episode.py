"""The episode loop on a scripted engine: ids, masks, version spans, rewards, limits, failures."""

import asyncio
import runpy
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from scripted_engine import ScriptedEngine

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Environment, EnvironmentFailure, Episode, Prompt, StepResult
from megasao.environments.calculator import CalculatorEnvironment, CalculatorOptions
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.engines.base import EngineError, GenerateResult
from megasao.rollout.episode import EpisodeRunner, turn_seed
from megasao.trajectories.schema import to_batch
from megasao.trajectories.validation import validate
from megasao.transport.messages import Lease

LEASE = Lease("lease-1", "calculator/train/0", "group", "train", 0, "calculator_2", 11, 1.0, 0)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(Path(__file__).parents[2] / "tools" / "make_laptop_model.py"))["write_tokenizer"](path)
    return TokenizerCodec.from_directory(path)


class Echo(Environment):
    """Answers what the test wrote down; the reward comes with each answer."""

    name = "echo"

    def __init__(self, *answers):
        self.answers, self.heard, self.closed = list(answers), [], 0

    @property
    def stop_strings(self):
        return ("</call>", "</answer>")

    def prompt(self, split, index):
        return Prompt("echo/0", "echo", "<problem>1+2</problem>", {})

    def start(self, prompt, seed):
        environment = self

        class Running(Episode):
            async def step(self, action_text):
                environment.heard.append(action_text)
                answer = environment.answers[len(environment.heard) - 1]
                if isinstance(answer, Exception):
                    raise answer
                return answer

            async def close(self):
                environment.closed += 1

        return Running()

    def demonstration(self, index, seed):
        return []


def says(codec, *turns, versions=None):
    """A script: turn i of the model, each token with log-prob -0.1 - 0.01 * position, versions as given."""

    def script(request):
        turn = int(request.request_id.rpartition("/")[2])
        ids = codec.encode(turns[turn])[: request.sampling.max_new_tokens]
        stopped = ids[-1] in request.sampling.stop_token_ids
        spans = versions[turn] if versions else [(0, 0)]
        logprobs = [-0.1 - 0.01 * i for i in range(len(ids))]
        return GenerateResult(ids, logprobs, spans, "stop" if stopped else "length")

    return ScriptedEngine(script)


def play(environment, engine, codec, lease=LEASE, **limits):
    runner = EpisodeRunner.build(environment, engine, codec, EnvironmentConfig(**limits))
    trajectory = asyncio.run(runner.run(lease))
    validate(to_batch([trajectory]))
    return trajectory


def test_a_solved_problem_is_recorded_token_for_token(codec):
    environment = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0, three_operations=0.0))
    careful = {"answers_early": 0.0, "ignores_precedence": 0.0, "two_operations_in_one_call": 0.0}
    demonstration = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0, three_operations=0.0, **careful))
    turns = demonstration.demonstration(5, 0)
    prompt = Prompt("p", "calculator_2", turns[0].text, {"answer": int(turns[-1].text[8:-9])})
    environment.prompt = lambda split, index: prompt
    engine = says(codec, *(turn.text for turn in turns if turn.is_action))
    trajectory = play(environment, engine, codec)
    assert codec.decode(trajectory.tokens) == "".join(turn.text for turn in turns)
    assert trajectory.action_mask == [turn.is_action for turn in turns for _ in codec.encode(turn.text)]
    assert trajectory.rewards == [0.0] * (len(trajectory.tokens) - 1) + [1.0]
    assert trajectory.finish_reason == "done"
    assert trajectory.trajectory_id == LEASE.lease_id
    assert trajectory.metrics == {"tool_calls": 2.0, "tool_errors": 0.0, "turns": 3.0}
    for turn, start in enumerate(trajectory.turn_starts):
        assert trajectory.action_mask[start] and not trajectory.action_mask[start - 1]
        assert engine.requests[turn].input_ids == tuple(trajectory.tokens[:start])
        assert trajectory.rollout_logprobs[start : start + 2] == pytest.approx([-0.1, -0.11])
    masked = [lp for lp, acted in zip(trajectory.rollout_logprobs, trajectory.action_mask, strict=True) if not acted]
    assert set(masked) == {0.0}
    assert engine.ended == ["lease-1"]


def test_version_spans_follow_the_engine(codec):
    environment = Echo(StepResult("<result>3</result>", 0.0, False), StepResult("", 1.0, True))
    engine = says(codec, "<call>1+2</call>", "<answer>3</answer>", versions=[[(0, 4), (3, 5)], [(0, 5), (2, 7)]])
    trajectory = play(environment, engine, codec)
    # prompt 5 tokens, call 5, result 3, answer 3
    assert trajectory.turn_starts == [5, 13]
    assert trajectory.weight_versions == [(0, 4), (8, 5), (15, 7)]
    assert (trajectory.oldest_version, trajectory.newest_version) == (4, 7)
    same = play(
        Echo(*environment.answers),
        says(codec, "<call>1+2</call>", "<answer>3</answer>", versions=[[(0, 4)], [(0, 4)]]),
        codec,
    )
    assert same.weight_versions == [(0, 4)]


def test_a_reward_with_an_observation_lies_on_the_observation(codec):
    environment = Echo(StepResult("<result>3</result>", 0.25, False), StepResult("", 1.0, True))
    trajectory = play(environment, says(codec, "<call>1+2</call>", "<answer>3</answer>"), codec)
    assert {i: r for i, r in enumerate(trajectory.rewards) if r} == {12: 0.25, 15: 1.0}


def test_episodes_begin_in_the_order_of_their_leases(codec):
    """What a batch of the engine holds decides how its numbers are rounded: a run could not be repeated otherwise."""

    class Uneven(Echo):
        def prompt(self, split, index):
            time.sleep(0.1 * (index == 0))
            return super().prompt(split, index)

    leases = [structs.replace(LEASE, lease_id=f"lease-{number}", prompt_index=number) for number in range(4)]
    environment, engine = Uneven(*[StepResult("", 1.0, True)] * 4), says(codec, "<answer>3</answer>")
    runner = EpisodeRunner.build(environment, engine, codec, EnvironmentConfig(max_turns=1))

    async def together():
        await asyncio.gather(*map(runner.run, leases))

    asyncio.run(together())
    assert [request.session_id for request in engine.requests] == [lease.lease_id for lease in leases]


def test_a_prompt_that_waits_holds_up_no_other_episode(codec):
    both_asked = threading.Barrier(2, timeout=120)

    class Slow(Echo):
        prompts_wait = True

        def prompt(self, split, index):
            both_asked.wait()
            return super().prompt(split, index)

    done = StepResult("", 1.0, True)
    runner = EpisodeRunner.build(
        Slow(done, done), says(codec, "<answer>3</answer>"), codec, EnvironmentConfig(max_turns=1)
    )

    async def together():
        return await asyncio.gather(
            *(runner.run(structs.replace(LEASE, lease_id=name)) for name in ("lease-1", "lease-2"))
        )

    assert [trajectory.rewards[-1] for trajectory in asyncio.run(together())] == [1.0, 1.0]


def test_max_turns_ends_on_the_last_action(codec):
    environment = Echo(*[StepResult("<result>3</result>", 0.5, False)] * 3)
    trajectory = play(environment, says(codec, *["<call>1+2</call>"] * 3), codec, max_turns=3)
    assert trajectory.finish_reason == "max_turns"
    assert trajectory.action_mask[-1] and trajectory.rewards[-1] == 0.5
    assert len(trajectory.turn_starts) == len(environment.heard) == 3


@pytest.mark.parametrize("max_tokens", range(6, 22))
def test_no_episode_exceeds_its_tokens(codec, max_tokens):
    environment = Echo(*[StepResult("<result>3</result>", 0.0, False)] * 8)
    engine = says(codec, *["<call>1+2</call>"] * 8)
    trajectory = play(environment, engine, codec, max_tokens=max_tokens)
    assert len(trajectory.tokens) <= max_tokens
    assert trajectory.finish_reason == "max_tokens" and trajectory.action_mask[-1]
    for request in engine.requests:
        assert len(request.input_ids) + request.sampling.max_new_tokens <= max_tokens
    assert all(text.endswith("</call>") for text in environment.heard)  # a turn that was cut is not answered


def test_a_turn_without_a_stop_token_goes_to_the_environment(codec):
    environment = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0))
    answer = environment.prompt("train", 0).payload["answer"]
    engine = says(codec, "+" * 40, f"<answer>{answer}</answer>")
    trajectory = play(environment, engine, codec)
    assert sum(trajectory.action_mask[: trajectory.turn_starts[1]]) == 16
    assert "<result>error</result>" in codec.decode(trajectory.tokens)
    assert trajectory.finish_reason == "done" and trajectory.rewards[-1] == 1.0


def test_sampling_parameters_come_from_the_lease(codec):
    environment = Echo(StepResult("<result>3</result>", 0.0, False), StepResult("", 1.0, True))
    engine = says(codec, "<call>1+2</call>", "<answer>3</answer>")
    trajectory = play(environment, engine, codec, lease=replace_lease(temperature=0.0, want_logprobs=False))
    assert trajectory.rollout_logprobs is None and trajectory.temperature == 0.0
    assert [r.sampling.temperature for r in engine.requests] == [0.0, 0.0]
    assert [r.sampling.return_logprobs for r in engine.requests] == [False, False]
    assert [r.sampling.seed for r in engine.requests] == [turn_seed(11, 0), turn_seed(11, 1)]
    assert len({turn_seed(seed, turn) for seed in range(50) for turn in range(8)}) == 400
    stops = {codec.single_token("</call>"), codec.single_token("</answer>")}
    assert set(engine.requests[0].sampling.stop_token_ids) == stops


def replace_lease(**changes):
    import msgspec

    return msgspec.structs.replace(LEASE, **changes)


def test_failures_are_raised_and_everything_is_released(codec):
    broken = Echo(EnvironmentFailure("sandbox is gone"))
    engine = says(codec, "<call>1+2</call>")
    with pytest.raises(EnvironmentFailure, match="sandbox is gone"):
        play(broken, engine, codec)
    assert engine.ended == ["lease-1"] and broken.closed == 1
    failing = ScriptedEngine(lambda request: EngineError("no memory"))
    with pytest.raises(EngineError, match="no memory"):
        play(Echo(), failing, codec)
    assert failing.ended == ["lease-1"]
    aborting = ScriptedEngine(lambda request: GenerateResult([1], [-0.1], [(0, 0)], "abort"))
    with pytest.raises(EngineError, match="aborted after 1 tokens"):
        play(Echo(), aborting, codec)


def test_a_timed_out_episode_leaves_nothing_in_the_engine(codec):
    engine, environment = ScriptedEngine(lambda request: None), Echo()
    runner = EpisodeRunner.build(environment, engine, codec, EnvironmentConfig())

    async def run():
        async with asyncio.timeout(60) as limit:
            engine.script = lambda request: limit.reschedule(0.0)  # the time is over once the engine is at work
            await runner.run(LEASE)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert engine.aborted == ["lease-1/0"] and engine.ended == ["lease-1"] and environment.closed == 1


def test_a_prompt_without_room_for_an_action_is_refused(codec):
    with pytest.raises(ValueError, match=r"has 5 tokens; environment.max_tokens = 5 leaves no room"):
        play(Echo(), says(codec), codec, max_tokens=5)


def test_a_stop_string_of_several_tokens_is_refused(codec):
    class Wordy(Echo):
        @property
        def stop_strings(self):
            return ("12",)

    with pytest.raises(ValueError, match="must be one token"):
        EpisodeRunner.build(Wordy(), says(codec), codec, EnvironmentConfig())


def test_the_schema_rejects_what_the_loop_must_not_make(codec):
    """Negative control of every ``validate`` above."""
    environment = Echo(StepResult("", 1.0, True))
    trajectory = play(environment, says(codec, "<answer>3</answer>"), codec)
    shifted = replace(trajectory, action_mask=trajectory.action_mask[1:])
    with pytest.raises(ValueError, match="action_mask"):
        validate(to_batch([shifted]))
