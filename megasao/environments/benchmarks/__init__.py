"""The benchmarks: their table, where their files lie, and their problems in the background of a run."""
