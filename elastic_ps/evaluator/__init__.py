"""The process that evaluates a job's checkpoints while the job trains, and what its script uses."""
