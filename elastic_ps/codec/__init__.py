"""The encodings of tensors on the network: their own memory, or the output of a codec."""

from __future__ import annotations

from elastic_ps.codec.memory import as_bytes, as_tensor, checksum, dtype_of, name_of, overlaps

NONE = "none"
"""The name of the codec that sends elements unchanged, in little-endian order."""

__all__ = ["NONE", "as_bytes", "as_tensor", "checksum", "dtype_of", "name_of", "overlaps"]
