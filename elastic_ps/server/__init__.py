"""The parameter server: `python -m elastic_ps.server` is one shard."""
