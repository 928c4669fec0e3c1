"""Writes container images as files in Docker's archive format, which containerd and buildah both read.

Two images start from nothing here (the base and the pause image); a tar of one layer, its digest and two
small JSON files are all that takes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write_image(
    destination: Path, *, layer: Path, tag: str, architecture: str, command: Sequence[str] = ()
) -> None:
    """Write an image of one layer (an uncompressed tar) to `destination`, by a rename at the end."""
    digest = _sha256(layer)
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": [f"PATH={PATH}", "LANG=C.UTF-8"], "Cmd": list(command), "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created_by": "elastic-ps test cluster"}],
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}]
    temporary = destination.with_suffix(".partial")
    with tarfile.open(temporary, "w") as output:
        output.add(layer, f"{digest}/layer.tar")
        for path, data in ((name, config), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            output.addfile(entry, io.BytesIO(data))
    temporary.rename(destination)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
