"""The handlers of calls, on shard 0 and on every shard."""
