"""The numerical core: pure functions on flat, packed tensors."""

from megasao.ops.dis import accepted_tokens, count_accepted, dis_loss
from megasao.ops.gae import gae

__all__ = ["accepted_tokens", "count_accepted", "dis_loss", "gae"]
