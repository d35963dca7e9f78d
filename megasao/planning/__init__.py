"""`megasao plan`: how large a model is, where its layers go, and whether everything fits, before a machine is used.

Invariants (tests assert them):

- parameters are counted on the real Megatron model, built on the meta device, and equal the published numbers;
- what one rank has is what a rank of a real world with that layout has;
- the estimated peak of a training step is within 15 % of the measured one;
- a layout that cannot work is refused, by the rules that a run is refused by.
"""

from megasao.planning.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
