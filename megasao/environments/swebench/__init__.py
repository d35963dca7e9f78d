"""SWE-bench: its rows, its repositories and images, its tests, and the environment that the model works in."""
