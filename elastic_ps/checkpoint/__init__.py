"""A version of the model on disk.

A checkpoint is a directory `version-0000001290` with a safetensors file for each shard and `manifest.json`,
which names each file with its size and SHA-256 and holds everything that is not a tensor. It is written under
a temporary name, the manifest last, flushed and renamed. So a directory with that name is complete unless the
disk damages it, which the digests reveal.
"""
