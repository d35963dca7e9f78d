"""`megasao simulate`: a fleet in time, before there is one. No torch: the plan's numbers are given to it.

Invariants (tests assert them):

- leases, staleness, drops and batches are those of the product: its own controller state, driven by a virtual clock;
- a run is a function of config, rates and seed: the same again gives the same numbers;
- nothing is lost: every lease is trained on, dropped, waiting or on its way;
- small cases have the times that a hand computes.
"""
