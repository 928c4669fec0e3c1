"""The job on shard 0: its state, its versions, its checkpoints and standbys."""
