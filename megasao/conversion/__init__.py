"""Checkpoints made into other checkpoints, tensor by tensor, without a model and without Megatron-Core.

Invariants (tests assert them):

- Hugging Face -> model checkpoint -> Hugging Face gives the same names, shapes, dtypes and bits, for every family;
- memory holds a piece of a tensor, whatever the size of the checkpoint;
- what is wrong with the input, the output's place or the disk is told before any tensor is read;
- the output appears at once and whole; work that was interrupted goes on with the same command.
"""
