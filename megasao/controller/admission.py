"""How many training leases may be out. Pure.

Invariants:
- waiting and leased trajectories together never exceed the buffer's bounds, each lease counted at its worst case;
- a full buffer means no new leases, never a drop.
"""

from dataclasses import dataclass
from pathlib import Path

from megasao.config import Config
from megasao.config.architecture import read_hf_config
from megasao.families.routing import Routing

# Generous for what a row holds beside its per-token columns: ids, metrics, version spans, turn starts.
_ROW_OVERHEAD_BYTES = 4096
_BYTES_PER_TOKEN = 4 + 1 + 4 + 4


@dataclass
class Admission:
    """The bounds of one run. ``worst_bytes`` grows when a larger row than expected was seen."""

    limit: int
    max_bytes: int
    worst_bytes: int

    @classmethod
    def from_config(cls, config: Config) -> "Admission":
        """ValueError where one batch does not fit into ``buffer.max_bytes``."""
        worst = config.environment.longest_episode * (_BYTES_PER_TOKEN + _expert_bytes(config)) + _ROW_OVERHEAD_BYTES
        need = worst * config.loop.batch_size
        if need > config.buffer.max_bytes:
            raise ValueError(
                f"buffer.max_bytes = {config.buffer.max_bytes} cannot hold one batch: loop.batch_size = "
                f"{config.loop.batch_size} trajectories of up to {worst} bytes need {need}"
            )
        limit = min(config.buffer.max_trajectories, (config.loop.max_lag + 1) * config.loop.batch_size)
        return cls(limit, config.buffer.max_bytes, worst)

    def saw(self, nbytes: int) -> None:
        """A row of this size arrived."""
        self.worst_bytes = max(self.worst_bytes, nbytes)

    def room(self, *, waiting: int, waiting_bytes: int, leased: int) -> int:
        """How many more training leases may be given."""
        by_count = self.limit - waiting - leased
        by_bytes = (self.max_bytes - waiting_bytes) // self.worst_bytes - leased
        return max(0, min(by_count, by_bytes))


def _expert_bytes(config: Config) -> int:
    """What the experts take that are recorded for a token; 0 where the model is not here to tell."""
    if not config.actor.router_replay:
        return 0
    try:
        routing = Routing.of(read_hf_config(Path(config.model.path)))
    except ValueError:  # whoever needs the model says what is wrong with it
        return 0
    return routing.token_bytes if routing is not None else 0
