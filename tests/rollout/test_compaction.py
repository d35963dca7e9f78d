"""Long episodes in segments on a scripted engine: what each segment holds, its limits, and who learns what."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from megasao.config.compaction import CompactionConfig
from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Environment, Episode, Prompt, StepResult
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.compaction import Compaction
from megasao.rollout.engines.base import GenerateResult
from megasao.rollout.episode import EpisodeRunner, Transcript, turn_seed
from megasao.trajectories.schema import from_batch, to_batch
from megasao.transport.messages import Lease
from tests.chat_checkpoint import chat_checkpoint
from tests.rollout.scripted_engine import ScriptedEngine

LEASE = Lease("lease", "p", "g", "train", 0, "walk", 11, 1.0, 0)
REQUEST = "Sum up."
OPTIONS = {
    "max_segments": 3,
    "summary_tokens": 32,
    "request": REQUEST,
    "resume": " So far: {summary} Seen: {observation}",
}
TASK = "Walk."


class Walk(Environment):
    """Shows what the test wrote down, one thing a turn, for a reward of 0.25 each; ends when there is no more."""

    name = "walk"

    def __init__(self, sights, *, chat=True):
        self.sights, self.chat = sights, chat

    @property
    def stop_strings(self):
        return ("<|im_end|>",)

    def prompt(self, split, index):
        return Prompt("walk/0", "walk", TASK, {}, ({"role": "user", "content": TASK},) if self.chat else ())

    def start(self, prompt, seed):
        left, chat = list(self.sights), self.chat

        class Running(Episode):
            async def step(self, action_text):
                if not left:
                    return StepResult("", 1.0, True)
                text = left.pop(0)
                if chat:
                    return StepResult("", 0.25, False, {}, ({"role": "user", "content": text},))
                return StepResult(text, 0.25, False)

        return Running()

    def demonstration(self, index, seed):
        return []


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TokenizerCodec.from_directory(chat_checkpoint(tmp_path_factory.mktemp("chat") / "model"))


def play(codec, environment, *, says="go", compaction=OPTIONS, sums="<think>hm</think> I went {}", **limits):
    """(trajectory, engine): the model says ``says`` in every turn, and ``sums`` with a number when it is asked to."""
    summaries, turns = iter(range(100)), iter(range(1000))

    def script(request):
        asked = REQUEST in codec.decode(request.input_ids[-len(codec.encode(REQUEST)) - 30 :])
        text = sums.format(next(summaries)) if asked else says(next(turns)) if callable(says) else says
        ids = codec.encode(f"{text}<|im_end|>")[: request.sampling.max_new_tokens]
        stopped = ids[-1] == codec.single_token("<|im_end|>")
        return GenerateResult(ids, [-0.5] * len(ids), [(0, len(engine.requests))], "stop" if stopped else "length")

    engine = ScriptedEngine(script)
    settings = {"max_tokens": 200, "max_turn_tokens": 30, "max_turns": 50, **limits}
    options = CompactionConfig(**compaction) if compaction else None
    runner = EpisodeRunner.build(environment, engine, codec, EnvironmentConfig(**settings, compaction=options))
    trajectory = asyncio.run(runner.run(LEASE))
    assert from_batch(to_batch([trajectory])) == [trajectory]
    return trajectory, engine


def segments(trajectory):
    """Token positions of each segment."""
    bounds = [*(trajectory.segment_starts or [0]), len(trajectory.tokens)]
    return [range(start, end) for start, end in pairwise(bounds)]


def text_of(codec, trajectory, positions):
    return codec.decode([trajectory.tokens[position] for position in positions])


def test_an_episode_goes_on_with_its_summary_twice_and_is_then_capped(codec):
    sights = [f"sight {n}" for n in range(30)]
    trajectory, _ = play(codec, Walk(sights))
    assert trajectory.finish_reason == "max_tokens" and trajectory.action_mask[-1]
    parts = [text_of(codec, trajectory, part) for part in segments(trajectory)]
    assert len(parts) == 3 and trajectory.metrics["segments"] == 3.0
    for number, part in enumerate(parts):
        assert part.startswith(f"<s><|im_start|>user\n{TASK}")
        assert part.count(REQUEST) == (number < 2), "the last segment writes no summary"
        if number:
            shown = part.partition("<|im_end|>")[0]
            assert shown.partition(TASK)[2].startswith(f" So far: I went {number - 1} Seen: sight ")
            assert "hm" not in shown, "thoughts are not part of a summary"
    everything = "".join(parts)
    seen = [n for n in range(30) if f"sight {n}<|im_end|>" in everything]
    assert seen == list(range(len(seen))) and all(everything.count(f"sight {n}<|im_end|>") == 1 for n in seen)
    assert trajectory.metrics["turns"] == len(seen) + 1
    # summaries are actions, and what the next segment says of them is not
    actions = [t for t, acted in zip(trajectory.tokens, trajectory.action_mask, strict=True) if acted]
    assert codec.decode(actions).count("I went") == 2 and everything.count("I went") == 4
    # every reward arrived once: one for each answered turn
    assert sum(trajectory.rewards) == 0.25 * (len(seen) + 1)


def test_the_engine_sees_one_segment_at_a_time_under_a_name_of_its_own(codec):
    trajectory, engine = play(codec, Walk(["sight"] * 30))
    parts = segments(trajectory)
    for request, start in zip(engine.requests, trajectory.turn_starts, strict=True):
        part = next(part for part in parts if start in part)
        assert request.input_ids == tuple(trajectory.tokens[part.start : start])
        assert len(request.input_ids) + request.sampling.max_new_tokens <= 200
        number = parts.index(part)
        assert request.session_id == (f"lease/{number}" if number else "lease")
    assert engine.ended == ["lease", "lease/1", "lease/2"]
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)
    assert [r.sampling.seed for r in engine.requests] == [turn_seed(11, n) for n in range(len(engine.requests))]
    # versions run over all segments, and the oldest is that of the first turn
    assert (trajectory.oldest_version, trajectory.newest_version) == (1, len(engine.requests))


@pytest.mark.parametrize("max_tokens", range(110, 250, 3))
def test_no_segment_exceeds_the_window_and_there_are_no_more_than_asked_for(codec, max_tokens):
    for sight, says in (("sight", "go"), ("s" * 37, "g" * 60)):
        trajectory, engine = play(codec, Walk([sight] * 60), says=says, max_tokens=max_tokens)
        parts = segments(trajectory)
        assert len(parts) <= 3 and max(map(len, parts)) <= max_tokens
        assert len(parts) == 3 or max_tokens < 180, "a short window may have no room for what was not seen"
        assert all(not trajectory.action_mask[part.start] for part in parts)
        assert all(trajectory.action_mask[part.stop - 1] for part in parts)
        for request in engine.requests:
            assert len(request.input_ids) + request.sampling.max_new_tokens <= max_tokens


def test_a_turn_that_the_window_cuts_is_not_answered(codec):
    sights = ["first", "second"]
    trajectory, _ = play(codec, Walk(sights), says="g" * 200, max_turn_tokens=140, max_tokens=180)
    assert len(segments(trajectory)) == 3 and trajectory.finish_reason == "max_tokens"
    assert "first" not in codec.decode(trajectory.tokens) and trajectory.metrics["turns"] == 3.0


def test_a_turn_that_the_window_cut_goes_on_and_counts_once(codec):
    """So a single long answer may take several segments."""
    long = ["g" * 200, "done"]
    trajectory, _ = play(
        codec, Walk([]), says=lambda n: long[min(n, 1)], max_turn_tokens=180, max_tokens=180, max_turns=1
    )
    assert len(segments(trajectory)) == 2 and trajectory.finish_reason == "done" and trajectory.rewards[-1] == 1.0


def test_an_episode_that_ends_in_time_is_as_without_compaction(codec):
    short = ["sight"] * 2
    with_it, engine = play(codec, Walk(short))
    without, _ = play(codec, Walk(short), compaction=None)
    assert with_it.tokens == without.tokens and with_it.rewards == without.rewards
    assert with_it.segment_starts is None and with_it.finish_reason == "done"
    assert with_it.metrics == {"turns": 3.0, "segments": 1.0} and engine.ended == ["lease"]
    # negative control: without compaction the long one ends in the first window
    cut, _ = play(codec, Walk(["sight"] * 30), compaction=None)
    assert cut.finish_reason == "max_tokens" and len(cut.tokens) <= 200 and cut.segment_starts is None


def test_a_summary_that_leaves_no_room_ends_the_episode_with_it(codec):
    long = ["x" * 160, "sight"]
    trajectory, _ = play(codec, Walk(long))
    assert trajectory.finish_reason == "max_tokens" and trajectory.segment_starts is None
    assert codec.decode(trajectory.tokens).endswith("I went 0<|im_end|>") and trajectory.action_mask[-1]
    assert trajectory.metrics == {"turns": 1.0, "segments": 1.0}


def test_plain_text_goes_on_too(codec):
    trajectory, _ = play(codec, Walk(["see"] * 60, chat=False), sums="I went {}")
    parts = [text_of(codec, trajectory, part) for part in segments(trajectory)]
    assert [part.startswith(TASK) for part in parts] == [True] * 3
    assert all(part.startswith(f"Walk. So far: I went {n} Seen: ") for n, part in enumerate(parts[1:]))
    assert codec.decode(trajectory.tokens).count("I went") == 4


def test_a_summary_is_shown_without_special_tokens(codec):
    compaction = Compaction(CompactionConfig(**OPTIONS), codec)
    prompt = Walk([]).prompt("train", 0)
    said = codec.encode("<think>{observation}</think>a<|im_start|>b {observation}")
    shown = codec.decode(compaction.resume(prompt, said, StepResult("last", 0.0, False)))
    assert "Walk. So far: ab {observation} Seen: last<|im_end|>" in shown, "places in a summary are text"


def test_a_prompt_without_room_for_work_and_summary_is_refused(codec):
    with pytest.raises(ValueError, match=r"max_tokens = 60 leaves no room .* tokens kept for a summary"):
        play(codec, Walk(["sight"]), max_tokens=60)


def test_experts_of_each_segment_are_those_the_engine_reported():
    transcript = Transcript()
    expected = []
    for segment in range(2):
        prompt, said = [1, 2, 3], [4, 5]
        (transcript.begin_segment if segment else transcript.observe)(prompt)
        routed = np.arange(4, dtype=np.uint8).reshape(4, 1, 1) + 10 * segment
        transcript.act(GenerateResult(said, [-1.0, -1.0], [(0, 0)], "stop", routed_experts=routed))
        expected += [*routed.flatten().tolist(), routed[-1, 0, 0]]
    assert list(transcript.routing()) == expected and len(expected) == len(transcript.tokens)
