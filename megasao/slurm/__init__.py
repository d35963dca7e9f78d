"""Runs on a Slurm cluster: the plan of a job, the check of its nodes, and the job itself."""
