"""Counts what a worker sends and receives, and what its codecs cost."""

from __future__ import annotations

import threading

from elastic_ps.transport import messages_pb2 as pb


class Traffic:
    """Of one stay, over all shards. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = pb.Traffic()

    def reset(self) -> None:
        """Another stay begins."""
        with self._lock:
            self._counts = pb.Traffic()

    def pushed(self, nbytes: int, *, plain: int, seconds: float = 0.0) -> None:
        """A gradient is sent. `plain`: its bytes without a codec; `seconds`: what it took to encode."""
        with self._lock:
            self._counts.pushed_bytes += nbytes
            self._counts.pushed_plain_bytes += plain
            self._counts.encode_seconds += seconds

    def pulled(self, nbytes: int, *, plain: int, seconds: float = 0.0) -> None:
        """Values have been received. `plain`: their bytes without a codec; `seconds`: to decode them."""
        with self._lock:
            self._counts.pulled_bytes += nbytes
            self._counts.pulled_plain_bytes += plain
            self._counts.decode_seconds += seconds

    def busy(self, seconds: float) -> None:
        """For so long gradients were being encoded or sent."""
        with self._lock:
            self._counts.push_seconds += seconds

    def chose(self, codec: str) -> None:
        """Gradients are sent with this codec from now on."""
        with self._lock:
            self._counts.codec = codec

    def counts(self) -> pb.Traffic:
        """A copy."""
        with self._lock:
            copy = pb.Traffic()
            copy.CopyFrom(self._counts)
            return copy
