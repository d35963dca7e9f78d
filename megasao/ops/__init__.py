"""The numerical core: pure functions on flat, packed tensors."""

from megasao.ops.dis import accepted_tokens, count_accepted, dis_loss
from megasao.ops.gae import gae
from megasao.ops.ppo import ppo_clip_loss, unclipped_tokens
from megasao.ops.response import response_loss, response_sums

__all__ = [
    "accepted_tokens",
    "count_accepted",
    "dis_loss",
    "gae",
    "ppo_clip_loss",
    "response_loss",
    "response_sums",
    "unclipped_tokens",
]
