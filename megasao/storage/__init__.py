"""Checkpoints as files: safetensors read in slices and written as a stream, without Megatron.

Invariants (tests assert them):

- a read takes from the file the bytes of its slice and no others;
- a damaged or truncated file is refused by its header, before any tensor is read;
- what the writer makes is what the safetensors library reads, every tensor aligned to its dtype.
"""
