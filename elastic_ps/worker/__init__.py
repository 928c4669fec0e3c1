"""The worker's side: the session that a training script talks to. `python -m elastic_ps.worker` is one."""
