"""Versions that lie in the memory of the trainer's ranks, as a receiver takes them.

Invariant, asserted by the tests: a version is handed on only when all of it is here and intact.
"""

import asyncio
from collections.abc import Mapping

from torch import Tensor

from megasao.weights.fetching import Fetching, label
from megasao.weights.group_fetching import GroupsFetching
from megasao.weights.intake import Intake
from megasao.weights.messages import AnnounceShares
from megasao.weights.nodes import NodeWeights
from megasao.weights.shared import SMALL_BYTES, ShareTensors
from megasao.weights.small_fetching import SmallFetching


class SharesDownload:
    """The announced version on its way from the memory of the trainer's ranks."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceShares, intake: Intake) -> None:
        self.epoch, self.version = announce.epoch, announce.version
        self._announce, self._intake = announce, intake
        self._tensors: ShareTensors | None = None
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, once verified."""
        assert self._tensors is not None, "verify() comes first"
        return self._tensors

    async def verify(self, timeout_s: float) -> str | None:
        """Fetch and compare everything; what went wrong, or that it took too long."""
        fetching = self._attempt(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await fetching.finish()
            self._tensors = fetching.take()
        except TimeoutError:
            return f"fetching weights {self.version} from the trainer's ranks took more than {timeout_s:g} s"
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            fetching.stop()
        return None

    def _attempt(self, timeout_s: float) -> Fetching:
        if self._announce.carrier == "gloo":
            return GroupsFetching(self._announce, self._intake, timeout_s)
        small = sum(share.total_bytes for share in self._announce.shares) <= SMALL_BYTES
        return (SmallFetching if small else Fetching)(self._announce, self._intake, timeout_s)


class NodesDownload:
    """The announced version, of which a worker has the label: the nodes of its servers take the bytes."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceShares) -> None:
        self.epoch, self.version, self._label = announce.epoch, announce.version, label(announce)
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """None, under the version's label."""
        return NodeWeights(self._label)

    async def verify(self, timeout_s: float) -> str | None:
        """Nothing has arrived that could be wrong."""
        return None
