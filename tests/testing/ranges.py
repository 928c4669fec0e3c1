"""A web server of a folder, which knows ranges of bytes or not, and other places of a file."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec


class _Whole(SimpleHTTPRequestHandler):
    """Sends whole files, whatever is asked for."""

    def __init__(self, *given: Any, asked: list[str], version: str, **others: Any) -> None:
        self._asked, self._version = asked, version
        super().__init__(*given, **others)

    def log_message(self, *_: Any) -> None:
        """Keep the method: pytest would show what is logged."""
        self._asked.append(self.command)

    def send_header(self, keyword: str, value: str) -> None:
        """Send the time of writing in the header that was chosen for it."""
        keyword = self._version if keyword == "Last-Modified" else keyword
        if keyword:
            super().send_header(keyword, value)


class _Ranges(_Whole):
    """Sends the bytes that are asked for."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, last = map(int, asked.groups())
        content = path.read_bytes()
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextmanager
def serving(
    folder: Path, *, ranges: bool = True, asked: list[str] | None = None, version: str = "ETag"
) -> Iterator[str]:
    """The address of a server of the files in a folder.

    Args:
        asked: gets the methods of the requests.
        version: the header that changes with a file; "" for none.
    """
    asked = [] if asked is None else asked
    kind = _Ranges if ranges else _Whole
    handler = partial(kind, directory=str(folder), asked=asked, version=version)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, name="files over HTTP")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PLACES_OF_FILES = ("local", "memory", "http")


@contextmanager
def file_at(path: Path, place: str) -> Iterator[tuple[str, Callable[[bytes], None]]]:
    """The URL of a file in a place, and what writes other content to it there."""
    with ExitStack() as stack:
        url = str(path)
        if place == "memory":
            url = f"memory://{path.parent.name}/{path.name}"
            fsspec.filesystem("memory").pipe_file(url, path.read_bytes())
        if place == "http":
            url = f"{stack.enter_context(serving(path.parent))}/{path.name}"

        def write(content: bytes) -> None:
            later = path.stat().st_mtime + 5
            path.write_bytes(content)
            if place == "memory":
                fsspec.filesystem("memory").pipe_file(url, content)
            if place == "http":  # which tells whole seconds
                os.utime(path, (later, later))

        yield url, write
