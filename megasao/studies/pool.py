"""Work of a study in several processes.

Invariant: an interrupt ends the work at once, in every process, and leaves none behind. No torch.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any


class RunsFailed(RuntimeError):
    """Some runs of a study failed."""


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose work ends when this process is interrupted, and is not waited for."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """What is started inside ignores a terminal's interrupt, which goes to every process of its group."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_all(
    pool: ProcessPoolExecutor,
    tasks: Sequence[tuple[Callable[..., None], tuple[Any, ...], str]],
    say: Callable[[str], None],
) -> None:
    """Do them in any order, and say which is done. RunsFailed names what failed, when all others are done."""
    with _interrupts_ignored():
        futures = {pool.submit(task, *arguments): label for task, arguments, label in tasks}
    failures = []
    for number, future in enumerate(as_completed(futures), 1):
        label, error = futures[future], future.exception()
        say(f"[{number}/{len(futures)}] {label}" + (f": FAILED: {error!r}" if error else ""))
        if error:
            failures.append(f"{label}: {error!r}")
    if failures:
        raise RunsFailed("; ".join(failures))
