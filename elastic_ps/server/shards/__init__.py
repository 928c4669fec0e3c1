"""A shard's part of the model: its buckets, their optimizer steps, and pulls of them."""
