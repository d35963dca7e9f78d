"""Problems drawn from text keys, and their split into training and held-out ones.

Invariant: both are functions of text alone, the same on every machine and in every process.
"""

from hashlib import blake2b

from megasao.environments.base import Split

EVAL_SHARE = 8
"""One problem in this many is held out."""


def text_hash(*parts: object) -> int:
    """64 bits that depend on the parts' text alone."""
    return int.from_bytes(blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def split_of(family: str, problem: str) -> Split:
    """The split that a problem of a task family belongs to for good."""
    return "eval" if text_hash(f"{family}-split", problem) % EVAL_SHARE == 0 else "train"
