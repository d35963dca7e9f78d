"""Frequencies of rotary embeddings that Megatron-Core does not make as config.json says."""

import math

import torch
from torch import Tensor

from megasao.families.facts import Rope


def llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Llama 3's scaling of ``frequencies`` [d / 2]: slow ones are divided by ``factor``, fast ones kept.

    Those between turn gradually. Megatron-Core has the constants of one model; these are config.json's.
    """
    numbers = rope.settings
    factor, context = float(numbers["factor"]), float(numbers["original_max_position_embeddings"])
    low, high = float(numbers["low_freq_factor"]), float(numbers["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.where(kept == 1.0, frequencies, (1 - kept) * frequencies / factor + kept * frequencies)
