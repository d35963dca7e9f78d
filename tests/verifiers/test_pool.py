"""The pool of killable verifier processes: what a bad sample does to itself, and that it does nothing to the others."""

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megasao.environments.base import EnvironmentFailure
from megasao.environments.verifiers.foreman import Foreman, Worker
from megasao.environments.verifiers.pool import MAX_ANSWER, Limits, VerifierError, VerifierPool
from megasao.rollout.service import failure_reason
from tests.verifiers.nasty_graders import NASTY

MODULE = ["tests.verifiers.nasty_graders"]
QUICK = Limits(workers=2, time_limit_s=4.0, memory_bytes=1 << 28)
PATIENT = Limits(workers=2, time_limit_s=60.0, memory_bytes=1 << 28)

OWNER = "VERIFIERS_OF_TEST_PROCESS"

REASONS = {
    "loop": "timeout",
    "ignores": "timeout",
    "sleep": "timeout",
    "stop": "timeout",
    "child": "timeout",
    "segfault": "crash",
    "abort": "crash",
    "hard_exit": "crash",
    "memory": "memory",
    "memory_swallowed": "memory",
    "descriptors": "output",
    "garbage": "output",
    "nameless": "output",
    "exit": "error",
    "nan": "error",
    "none": "error",
    "raise": "error",
    "interrupt": "error",
    "recursion": "error",
}
REFUSED = ["evaluates", "evaluates_swallowed", "shell", "writes", "socket", "imports", "forks", "kills_parent"]


@pytest.fixture(autouse=True, scope="module")
def named_owner():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OWNER, str(os.getpid()))
        yield


async def outcome(pool, answer):
    try:
        return await pool.grade("nasty", answer=answer)
    except VerifierError as error:
        return error.reason


def left_over():
    """Verifier processes of this test process, by a variable that they inherit."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "verifiers.foreman" in " ".join(process.info["cmdline"] or []):
            with suppress(psutil.Error):
                found += [process] * (process.environ().get(OWNER) == str(os.getpid()))
    return found


async def until_none_is_left():
    """A process that was killed dies when it is scheduled next."""
    async with asyncio.timeout(60):
        while left_over():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def opened(limits=QUICK, **options):
    pool = VerifierPool(MODULE, limits, **options)
    try:
        yield pool
    finally:
        await pool.close()
    await until_none_is_left()


def run(body):
    return asyncio.run(asyncio.wait_for(body, 240))


def test_each_bad_sample_is_excluded_with_its_reason_and_the_others_keep_their_rewards():
    async def body(limits, reasons):
        async with opened(limits, guarding="off") as pool:
            answers = [answer for bad in reasons for answer in (bad, "good", "bad")]
            found = await asyncio.gather(*(outcome(pool, answer) for answer in answers))
            assert found[1::3] == [1.0] * len(reasons) and found[2::3] == [0.0] * len(reasons)
            assert dict(zip(reasons, found[::3], strict=True)) == {k: f"verifier_{v}" for k, v in reasons.items()}
            expected = {reason: list(reasons.values()).count(reason) for reason in reasons.values()}
            assert pool.counts == {**expected, "graded": 2 * len(reasons)}

    # Whatever ends by itself, or by another limit, has time enough for it on any machine.
    run(body(QUICK, {bad: reason for bad, reason in REASONS.items() if reason == "timeout"}))
    run(body(PATIENT, {bad: reason for bad, reason in REASONS.items() if reason != "timeout"}))


def test_a_guarded_process_refuses_what_reaches_out_even_if_the_exception_is_caught():
    async def body():
        async with opened(PATIENT) as pool:
            found = await asyncio.gather(*(outcome(pool, answer) for answer in [*REFUSED, "good"]))
            assert found == ["verifier_refused"] * len(REFUSED) + [1.0]
        async with opened(PATIENT, guarding="off") as pool:  # without the guard these graders do it, and get their 1
            assert await outcome(pool, "evaluates") == await outcome(pool, "imports") == 1.0

    run(body())


def test_a_second_answer_of_one_job_is_never_that_of_the_next():
    """A sample that answers for itself is beyond help here; the one after it, on the same process, is not."""

    async def body():
        async with opened(Limits(1, 60.0, 1 << 28), guarding="off") as pool:
            answers = ["answers_twice", "good", "bad", "good"] * 5
            found = await asyncio.gather(*(outcome(pool, answer) for answer in answers))
            assert [found[1::4], found[2::4], found[3::4]] == [[1.0] * 5, [0.0] * 5, [1.0] * 5]
            assert set(found[::4]) <= {0.5, "verifier_output"}  # as the second answer came before, or with, the first

    run(body())


ANSWER = b'{"id": 2, "reward": 1.0, "retire": false}\n'
LEFT = {
    "an answer": b'{"id": 1, "reward": 0.25, "retire": false}\n',
    "no answer": b"?\n",
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_a_job_left_behind_may_come_with_the_next_ones_answer(left, capfd):
    """As it does where the foreman is slow: the second is not to blame, and runs again on another process."""

    def hears(said, *, used):
        ours, theirs = socket.socketpair()
        with subprocess.Popen(["sleep", "20"], start_new_session=True) as child, theirs:
            foreman = Foreman({}, {"workers": 1, "time_limit_s": 1.0, "memory_bytes": 1, "guarding": "off"})
            worker = Worker(child.pid, ours, job_id=2, job=b"the job", used=used)
            foreman._workers.append(worker)
            foreman._selector.register(ours, selectors.EVENT_READ, worker)
            theirs.sendall(said)
            foreman._receive(worker)
            if worker in foreman._workers:
                foreman._end(worker)
            child.returncode = 0  # it was waited for
        return list(foreman._waiting), capfd.readouterr().out

    assert hears(left + ANSWER, used=True) == ([(2, b"the job")], "")
    waiting, told = hears(left + ANSWER, used=False)
    assert waiting == [] and '"error": "output"' in told, "its own doing"
    assert hears(ANSWER, used=True) == ([], '{"id": 2, "reward": 1.0}\n')


def test_a_gigabyte_of_output_goes_nowhere():
    async def body():
        async with opened(Limits(workers=1, time_limit_s=200.0, memory_bytes=1 << 28)) as pool:
            assert await outcome(pool, "output") == 1.0

    run(body())


def test_a_thousand_at_once_with_bad_ones_between():
    async def body():
        async with opened(guarding="off") as pool:
            answers = ["loop" if n % 500 == 1 else "segfault" if n % 250 == 2 else "good" for n in range(1000)]
            found = await asyncio.gather(*(outcome(pool, answer) for answer in answers))
            assert found.count(1.0) == 994
            assert [f for f in found if f != 1.0] == ["verifier_timeout", "verifier_crash", "verifier_crash"] * 2

    run(body())


def test_a_cancelled_caller_leaves_the_pool_usable():
    async def body():
        async with opened() as pool:
            assert await outcome(pool, "good") == 1.0
            tasks = [asyncio.create_task(outcome(pool, "sleep")) for _ in range(2)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            assert await outcome(pool, "good") == 1.0

    run(body())


def test_a_foreman_that_dies_fails_what_waits_and_is_replaced():
    async def body():
        async with opened(Limits(workers=1, time_limit_s=60.0, memory_bytes=1 << 28)) as pool:
            assert await outcome(pool, "good") == 1.0
            waiting = asyncio.create_task(outcome(pool, "sleep"))
            await asyncio.sleep(0.2)
            workers = psutil.Process(pool._process.pid).children()
            pool._process.kill()
            assert await waiting == "verifier_pool"
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert not alive
            assert await outcome(pool, "good") == 1.0

    run(body())


def test_closing_with_work_under_way_ends_every_process():
    async def body():
        pool = VerifierPool(MODULE, Limits(workers=2, time_limit_s=60.0, memory_bytes=1 << 28), guarding="off")
        tasks = [asyncio.create_task(outcome(pool, "child")) for _ in range(3)]
        while len(left_over()) < 5:  # the foreman, two workers and their children
            await asyncio.sleep(0.05)
        await pool.close()
        assert await asyncio.gather(*tasks) == ["verifier_pool"] * 3
        await until_none_is_left()
        await pool.close()

    run(body())


def test_closing_or_cancelling_while_it_starts_leaves_no_process():
    async def body():
        pool = VerifierPool(MODULE, QUICK)
        first = asyncio.create_task(outcome(pool, "good"))
        while not left_over():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until_none_is_left()
        second = asyncio.create_task(outcome(pool, "good"))
        while not left_over():
            await asyncio.sleep(0.01)
        await pool.close()
        assert await second in (1.0, "verifier_pool")
        await until_none_is_left()

    run(body())


def test_a_closed_pool_starts_anew_in_another_event_loop():
    pool = VerifierPool(MODULE, QUICK)

    async def one():
        found = await outcome(pool, "good")
        await pool.close()
        return found

    assert [asyncio.run(one()) for _ in range(2)] == [1.0, 1.0]
    asyncio.run(until_none_is_left())


def test_a_killed_owner_leaves_no_verifier_process():
    code = (
        "import asyncio\n"
        "from megasao.environments.verifiers.pool import Limits, VerifierPool\n"
        "async def main():\n"
        f"    pool = VerifierPool({MODULE!r}, Limits(2, 60.0, 1 << 28), guarding='off')\n"
        "    jobs = [asyncio.create_task(pool.grade('nasty', answer='child')) for _ in range(2)]\n"
        "    await asyncio.gather(*jobs)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, cwd=root)
    deadline = time.monotonic() + 120
    while len(left_over()) < 5:
        assert time.monotonic() < deadline and owner.poll() is None
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    asyncio.run(until_none_is_left())


def test_pools_that_cannot_work_say_why():
    async def start(**options):
        pool = VerifierPool(**{"modules": MODULE, **options})
        with pytest.raises(VerifierError) as caught:
            await pool.grade("nasty", answer="good")
        await pool.close()
        return str(caught.value)

    assert "No module named 'no_such'" in run(start(modules=["no_such"]))
    small = Limits(memory_bytes=1 << 26)
    assert "verifiers need at least" in run(start(limits=small))

    async def too_long():
        async with opened() as pool:
            assert await outcome(pool, "x" * (MAX_ANSWER + 1)) == "verifier_output"

    run(too_long())
    for bad in ({"workers": 0}, {"time_limit_s": 0.0}, {"time_limit_s": float("inf")}, {"memory_bytes": 1}):
        with pytest.raises(ValueError, match="verifier"):
            Limits(**bad)


def test_a_verifier_failure_is_counted_by_its_reason():
    error = VerifierError("timeout", "longer than 1 s")
    assert isinstance(error, EnvironmentFailure) and failure_reason(error) == "verifier_timeout"
    assert failure_reason(EnvironmentFailure("x")) == "environment_failure"


def test_every_nasty_grader_has_a_test():
    assert set(NASTY) == {"good", "bad", "output", "answers_twice", *REASONS, *REFUSED}
    assert os.path.exists("/proc/self/status")
