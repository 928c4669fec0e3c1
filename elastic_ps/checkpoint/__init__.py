"""A version of the model on disk.

A checkpoint is a directory `version-0000001290` that holds one safetensors file for each shard and
`manifest.json`, which names each file with its size and SHA-256 and carries everything that is not a
tensor. It is written under a temporary name, flushed, and renamed, the manifest last; so a directory with
that name is whole unless the disk spoils it, which the digests tell.
"""
