"""The worker's service over real sockets: leases in, trajectories out, nothing lost, failures named."""

import asyncio
import runpy
from pathlib import Path

import pytest
from controller_peer import bench, config, heartbeat, lease

from megasao.environments.base import EnvironmentFailure
from megasao.environments.calculator import CalculatorEnvironment, CalculatorOptions
from megasao.environments.encoding import TokenizerCodec
from megasao.rollout.engines.base import EngineError, GenerateResult
from megasao.rollout.link import ControllerSilent
from megasao.trajectories.ipc import from_ipc
from megasao.trajectories.schema import from_batch
from megasao.transport.messages import (
    Ack,
    Credit,
    EvaluationResult,
    Failure,
    Hello,
    Leases,
    Trajectories,
    Welcome,
)

ENVIRONMENT = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0))


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(Path(__file__).parents[2] / "tools" / "make_laptop_model.py"))["write_tokenizer"](path)
    return TokenizerCodec.from_directory(path)


def scenario(codec, script=None, environment=ENVIRONMENT, **options):
    """Run an async test body on a bench; ``script(engine, request)`` defaults to a right answer at once."""

    def solve(engine, request):
        problem = codec.decode(request.input_ids).removeprefix("<problem>").partition("<")[0]
        ids = codec.encode(f"<answer>{eval(problem)}</answer>")
        return GenerateResult(ids, [-0.5] * len(ids), [(0, engine.version)], "stop")

    def run(body):
        async def main():
            async with bench(environment, codec, script or solve, **options) as made:
                await body(made)

        asyncio.run(main())

    return run


async def trajectories(peer):
    message, payload = await peer.receive(Trajectories)
    return message, from_batch(from_ipc(payload))


def test_no_credit_before_the_first_weights_and_then_the_absolute_number_of_free_slots(codec):
    @scenario(codec, lambda engine, request: None, weights=False)
    async def _(b):
        await b.peer.receive(Hello)
        assert (await b.peer.receive(Credit)).free == 0
        await b.publish(0)
        await b.peer.grant(lease("a"), lease("b"))
        assert [m.free for m in b.peer.seen if isinstance(m, Credit)][-1] == 4
        await b.peer.receive(Credit, where=lambda m: m.free == 2)
        assert sorted((await heartbeat(b.peer, active=2.0)).active_leases) == ["a", "b"]
        assert await b.stop() == "the test is over"


def test_finished_episodes_arrive_as_valid_rows_until_they_are_acknowledged(codec):
    @scenario(codec)
    async def _(b):
        await b.peer.grant(lease("a"), lease("b", prompt_index=1), lease("c", prompt_index=2))
        rows, acks = {}, []
        while len(rows) < 3:
            message, found = await trajectories(b.peer)
            assert message.lease_ids == [t.trajectory_id for t in found]
            rows |= {t.trajectory_id: t for t in found}
            acks.append(message.seq)
        assert sorted(rows) == ["a", "b", "c"]
        assert all(t.rewards[-1] == 1.0 and t.group_id == f"group-{name}" for name, t in rows.items())
        await heartbeat(b.peer, active=0.0, unacknowledged=float(len(acks)), episodes=3.0)
        # Silence after sending: it is sent again, under the same number.
        message, _ = await trajectories(b.peer)
        assert message.seq in acks
        for seq in acks:
            await b.peer.send(Ack(seq))
        await heartbeat(b.peer, unacknowledged=0.0)
        assert await b.stop()


def test_a_restarted_controller_is_greeted_and_gets_what_the_old_one_did_not_acknowledge(codec):
    @scenario(codec)
    async def _(b):
        await b.peer.grant(lease("a"))
        first, rows = await trajectories(b.peer)
        peer = await b.restart_controller()
        hello = await peer.receive(Hello)
        assert hello.active_leases == ["a"]
        again, same_rows = await trajectories(peer)
        assert (again, same_rows) == (first, rows)
        await peer.send(Ack(again.seq))
        await heartbeat(peer, unacknowledged=0.0)
        await peer.grant(lease("b"))
        assert (await trajectories(peer))[1][0].trajectory_id == "b"


def test_leases_that_a_restarted_controller_does_not_know_are_dropped(codec):
    @scenario(codec, lambda engine, request: None)
    async def _(b):
        await b.peer.grant(lease("a"), lease("b"))
        await heartbeat(b.peer, active=2.0)
        peer = await b.restart_controller()
        peer.welcome = Welcome(["a", "never heard of"], "another")
        hello = await peer.receive(Hello)
        assert sorted(hello.active_leases) == ["a", "b"]
        await heartbeat(peer, active=1.0)
        assert b.train.aborted == ["a/0"] and b.train.ended == ["a"]


def test_a_lease_that_comes_twice_is_played_once(codec):
    @scenario(codec)
    async def _(b):
        await b.peer.grant(lease("a"), lease("a"))
        await trajectories(b.peer)
        await b.peer.send(Leases([lease("a")]))
        await heartbeat(b.peer, active=0.0, episodes=1.0)
        assert len(b.train.requests) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("no memory"), "engine_error"),
        (EnvironmentFailure("sandbox is gone"), "environment_failure"),
        (ValueError("too long"), "invalid_request"),
        (KeyError("a bug"), "internal_error"),
    ],
)
def test_failures_are_reported_by_reason_and_the_worker_goes_on(codec, error, reason):
    @scenario(codec, lambda engine, request: error)
    async def _(b):
        await b.peer.grant(lease("a"), lease("b"))
        failures = {}
        while len(failures) < 2:
            failure = await b.peer.receive(Failure)
            failures[failure.lease_id] = failure
            await b.peer.send(Ack(failure.seq))
        assert {f.reason for f in failures.values()} == {reason}
        assert type(error).__name__ in failures["a"].detail
        await heartbeat(b.peer, failures=2.0, unacknowledged=0.0, episodes=0.0)
        assert not any(isinstance(m, Trajectories) for m in b.peer.seen)


def test_a_dead_engine_ends_the_worker_and_a_few_errors_do_not(codec):
    errors = 0

    def script(engine, request):
        nonlocal errors
        errors += 1
        # Seven in a row, then one success, then only errors.
        if errors == 8:
            ids = codec.encode("<answer>3</answer>")
            return GenerateResult(ids, [-0.5] * 3, [(0, 0)], "stop")
        return EngineError("the device is gone")

    @scenario(codec, script, settings=config(rollout={"concurrency": 1}))
    async def _(b):
        for number in range(8):
            await b.peer.grant(lease(f"a{number}"))
            message = await b.peer.receive(Failure, Trajectories)
            await b.peer.send(Ack(message[0].seq if isinstance(message, tuple) else message.seq))
        assert not b.task.done()
        for number in range(8):
            await b.peer.grant(lease(f"b{number}"))
            if number < 7:
                await b.peer.send(Ack((await b.peer.receive(Failure)).seq))
        with pytest.raises(EngineError, match="8 engine errors in a row, the last: the device is gone"):
            await asyncio.wait_for(b.task, 60)


def test_an_episode_that_does_not_end_is_a_failure(codec):
    @scenario(codec, lambda engine, request: None, settings=config(environment={"episode_timeout_s": 2.0}))
    async def _(b):
        await b.peer.grant(lease("a"))
        assert (await b.peer.receive(Failure)).reason == "episode_timeout"
        assert b.train.aborted == ["a/0"]


def test_a_trajectory_that_breaks_the_schema_does_not_take_others_with_it(codec):
    def script(engine, request):
        ids = codec.encode("<answer>3</answer>")
        bad = request.session_id == "bad"
        return GenerateResult(ids, [-0.5] * 3, [(0, 2**70 if bad else 0)], "stop")

    @scenario(codec, script)
    async def _(b):
        await b.peer.grant(lease("bad"), lease("good"))
        outcomes = {}
        while len(outcomes) < 2:
            message = await b.peer.receive(Trajectories, Failure)
            message = message[0] if isinstance(message, tuple) else message
            names = message.lease_ids if isinstance(message, Trajectories) else [message.lease_id]
            outcomes |= dict.fromkeys(names, message)
            await b.peer.send(Ack(message.seq))
        assert isinstance(outcomes["good"], Trajectories)
        assert outcomes["bad"].reason == "invalid_trajectory"


def test_generation_waits_for_the_weights_that_the_lease_asks_for(codec):
    @scenario(codec)
    async def _(b):
        await b.peer.grant(lease("early"), lease("late", min_version=1))
        assert [t.trajectory_id for t in (await trajectories(b.peer))[1]] == ["early"]
        await heartbeat(b.peer, active=1.0)
        await b.publish(1)
        [late] = (await trajectories(b.peer))[1]
        assert late.weight_versions == [(0, 1)]


def test_weights_that_never_come_are_a_failure(codec):
    settings = config(transport={"heartbeat_s": 0.1, "weights_timeout_s": 0.3})

    @scenario(codec, settings=settings)
    async def _(b):
        await b.peer.grant(lease("a", min_version=7), lease("e", min_version=7, evaluation_id="step-000001/greedy"))
        failures = [await b.peer.receive(Failure) for _ in range(2)]
        assert {f.lease_id: f.reason for f in failures} == {"a": "weights_late", "e": "weights_late"}
        assert "no weight version >= 7" in failures[0].detail


def evaluation(name, step, mode="greedy", **changes):
    identity = f"step-{step:06d}/{mode}"
    return lease(name, split="eval", evaluation_id=identity, temperature=0.0, want_logprobs=False, **changes)


def test_an_evaluation_keeps_its_weights_while_training_gets_new_ones(codec):
    release = asyncio.Event()

    def script(engine, request):
        ids = codec.encode("<answer>3</answer>")

        async def answer():
            if request.session_id == "slow":
                await release.wait()
            return GenerateResult(ids, [-0.5] * 3, [(0, engine.version)], "stop")

        return answer()

    @scenario(codec, script, settings=config(rollout={"concurrency": 8}))
    async def _(b):
        versions = {}

        async def collect(count):
            while len(versions) < count:
                message = await b.peer.receive(EvaluationResult, Trajectories)
                if isinstance(message, tuple):
                    message, [row] = message[0], from_batch(from_ipc(message[1]))
                    versions[row.trajectory_id] = row.newest_version
                else:
                    assert message.oldest_version == message.newest_version
                    versions[message.lease_id] = message.newest_version
                await b.peer.send(Ack(message.seq))

        await b.publish(3)
        await b.peer.grant(evaluation("slow", 1, min_version=3), evaluation("a", 1))
        await collect(1)
        await b.publish(4)
        await b.peer.send(Leases([evaluation("b", 1, "sampled"), evaluation("c", 2, min_version=4), lease("train")]))
        await collect(3)
        # "c" is of the next evaluation: it waits for "slow", and training does not.
        assert versions == {"a": 3, "b": 3, "train": 4}
        await heartbeat(b.peer, active=2.0)
        release.set()
        await collect(5)
        assert versions == {"a": 3, "b": 3, "train": 4, "slow": 3, "c": 4}
        assert b.evaluation.tensors["w"].tolist() == [4.0] * 3


def test_evaluation_results_say_what_happened(codec):
    def script(engine, request):
        ids = codec.encode("+" * request.sampling.max_new_tokens)
        return GenerateResult(ids, None, [(0, engine.version)], "length")

    @scenario(codec, script, settings=config(environment={"max_turns": 2}))
    async def _(b):
        await b.peer.grant(evaluation("a", 5))
        result = await b.peer.receive(EvaluationResult)
        assert (result.reward, result.truncated, result.action_tokens) == (0.0, True, 32)
        assert result.evaluation_id == "step-000005/greedy" and result.prompt_id == "prompt-a"
        assert result.total_tokens == 32 + 3 + len(codec.encode(ENVIRONMENT.prompt("eval", 0).text))


def test_evaluations_take_no_place_of_rollouts(codec):
    @scenario(codec, lambda engine, request: None, settings=config(evaluation={"concurrency": 3}))
    async def _(b):
        credit = await b.peer.grant(evaluation("a", 5), evaluation("b", 5, "sampled"), lease("c"))
        assert (credit.free, credit.evaluation_free) == (4, 3)
        await b.peer.receive(Credit, where=lambda m: (m.free, m.evaluation_free) == (3, 1))
        await heartbeat(b.peer, active=3.0)


def test_a_benchmark_is_asked_its_own_problems_under_the_evaluations_weights(codec):
    other = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.0, seed=5, three_operations=1.0))
    asked = {}

    def script(engine, request):
        asked[request.session_id] = codec.decode(request.input_ids)
        ids = codec.encode("<answer>3</answer>")
        return GenerateResult(ids, None, [(0, engine.version)], "stop")

    @scenario(codec, script, benchmarks=[("gsm8k", other)])
    async def _(b):
        await b.publish(2)
        await b.peer.grant(evaluation("a", 5, "gsm8k", min_version=2), evaluation("b", 5, min_version=2))
        results = [await b.peer.receive(EvaluationResult) for _ in range(2)]
        assert {result.newest_version for result in results} == {2}
        assert asked == {"a": other.prompt("eval", 0).text, "b": ENVIRONMENT.prompt("eval", 0).text}
        assert asked["a"] != asked["b"]


def test_a_silent_controller_ends_the_worker_with_its_address(codec):
    settings = config(supervision={"start_timeout_s": 0.5})

    @scenario(codec, settings=settings)
    async def _(b):
        await b.peer.receive(Hello)
        address = b.peer.address
        b.peer.close()
        with pytest.raises(ControllerSilent, match=f"no controller at {address}"):
            await asyncio.wait_for(b.task, 60)


def test_a_malformed_message_is_passed_over(codec):
    @scenario(codec)
    async def _(b):
        await b.peer.receive(Hello)
        await b.peer._socket.send_multipart([b"rollout-0", b"\x93garbage", b""])
        await b.peer._socket.send_multipart([b"rollout-0", b"only one frame"])
        await b.peer.grant(lease("a"))
        await trajectories(b.peer)
