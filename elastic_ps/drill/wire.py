"""Relays between workers and parameter servers of one machine that can be cut and reset.

The loopback cannot be cut for a single process. So if a drill cuts, workers connect to a relay on the
loopback, and the relay to the parameter servers. While a worker is cut off, its bytes are held back in both
directions, and connections stay open, as when packets are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CHUNK = 1 << 18

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: what is not sent is thrown away, and closing the socket sends a reset."""


class Wires:
    """The relays of one job's workers, served by a thread of its own until closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._whole: defaultdict[int, asyncio.Event] = defaultdict(_set)
        self._relays: dict[tuple[int, str], str] = {}
        self._connections: defaultdict[int, set[asyncio.StreamWriter]] = defaultdict(set)
        self._servers: list[asyncio.Server] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def route(self, worker: int, addresses: Sequence[str]) -> tuple[str, ...]:
        """`host:port` at which this worker reaches each of these; the same at each call."""
        with self._lock:
            return tuple(self._relay(worker, address) for address in addresses)

    @contextmanager
    def cut(self, worker: int) -> Iterator[None]:
        """Nothing passes between this worker and the parameter servers."""
        self._loop.call_soon_threadsafe(self._whole[worker].clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._whole[worker].set)

    def reset(self, worker: int) -> int:
        """End this worker's connections with a TCP reset on both sides; returns how many there were."""

        async def abort() -> int:
            ends = self._connections[worker]
            for end in ends:
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.transport.abort()
            return len(ends) // 2

        return asyncio.run_coroutine_threadsafe(abort(), self._loop).result()

    def _relay(self, worker: int, address: str) -> str:
        if (worker, address) not in self._relays:
            listening = socket.create_server(("127.0.0.1", 0))
            # What is accepted inherits it; asyncio sets it on no socket that does not name its protocol.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._relays[worker, address] = f"127.0.0.1:{listening.getsockname()[1]}"
            whole, ends = self._whole[worker], self._connections[worker]

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(asyncio.CancelledError):  # asyncio would report it as an error
                    await _connect(address, reader, writer, whole, ends)

            started = asyncio.start_server(serve, sock=listening)
            self._servers.append(asyncio.run_coroutine_threadsafe(started, self._loop).result())
        return self._relays[worker, address]

    async def _end_all(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def _connect(
    address: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    whole: asyncio.Event,
    ends: set[asyncio.StreamWriter],
) -> None:
    """Pass bytes on in both directions until one side ends the connection."""
    host, _, port = address.rpartition(":")
    with contextlib.closing(writer), contextlib.suppress(OSError):
        await whole.wait()
        their_reader, their_writer = await asyncio.open_connection(host, int(port))
        ways = [
            asyncio.create_task(_pass_on(reader, their_writer, whole)),
            asyncio.create_task(_pass_on(their_reader, writer, whole)),
        ]
        ends |= {writer, their_writer}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ends -= {writer, their_writer}
            for way in ways:
                way.cancel()
            their_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            await whole.wait()
            writer.write(data)
            await writer.drain()
