"""Hugging Face checkpoints <-> Megatron parameters.

Invariants (tests assert them):

- a round trip HF -> Megatron -> HF is bit-exact under every layout;
- a missing, unknown or misshapen tensor is an error that names it and the nearest name.
"""

from megasao.megatron.bridge.export import export_hf, export_tensors
from megasao.megatron.bridge.load import load_hf
from megasao.megatron.bridge.saving import save_hf

__all__ = ["export_hf", "export_tensors", "load_hf", "save_hf"]
