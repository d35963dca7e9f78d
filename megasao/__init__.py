"""megasao: asynchronous reinforcement learning of mixture-of-experts language models (SAO on Megatron-Core)."""

__version__ = "0.1.0"
