"""Who writes which tensor: work spread over ranks that hold the same bytes.

Invariant, asserted by the tests: every rank that is asked the same gives the same answer, and the fullest writer has at
most the mean and one tensor more.
"""

import heapq
from collections.abc import Sequence


def spread(sizes: Sequence[int], writers: int) -> list[int]:
    """The writer (from 0) of each tensor: largest first, each to whoever has least, the first of equals."""
    chosen = [0] * len(sizes)
    loads = [(0, writer) for writer in range(writers)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, writer = loads[0]
        chosen[index] = writer
        heapq.heapreplace(loads, (load + sizes[index], writer))
    return chosen
