"""What a tensor looks like on the wire: its own memory, or what a codec makes of it."""

from __future__ import annotations

from elastic_ps.codec.memory import as_bytes, as_tensor, checksum, dtype_of, name_of

NONE = "none"
"""Name of the codec that sends the elements as they are, in little-endian order."""

__all__ = ["NONE", "as_bytes", "as_tensor", "checksum", "dtype_of", "name_of"]
