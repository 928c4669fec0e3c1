"""Evaluation of checkpoints while a job trains: the process, what its script uses, the queue, the results."""
