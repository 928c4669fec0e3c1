"""Write the Python modules of every `*.proto` file beside it. Running it twice changes nothing.

`python tools/generate_protobuf.py --check` changes nothing and fails if a module is not up to date.

Modules that a newer compiler writes refuse every protobuf library older than the compiler, and every one
that is two major versions newer. The compiler used here is the last one whose modules run with all
libraries since its own version, 4.25. It comes with grpcio-tools, whose dependencies do not fit beside those
of this project, so it is installed into a folder of its own, in the user's cache, at first use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "elastic_ps" / "transport"
COMPILER = "grpcio-tools==1.62.3"


def compiler() -> Path:
    """The folder that holds the compiler; installs it with pip unless it is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-ps"
    folder = cache / f"{COMPILER}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    if sys.version_info >= (3, 13):
        raise SystemExit(f"{COMPILER} has no wheels for this Python; use Python 3.11 or 3.12")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix="compiler-", dir=folder.parent)
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # What pip says of the versions beside those of this project is of no use to anybody.
        done = subprocess.run(
            [*pip, "--only-binary", ":all:", "--target", unfinished, COMPILER],
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{COMPILER} cannot be installed:\n{done.stderr}")
        Path(unfinished).rename(folder)
    except OSError:  # somebody else was faster
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def generate(target: Path) -> list[Path]:
    """Write the modules below `target`, in the same folders as in the repository; returns their paths."""
    sources = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*.proto"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"--proto_path={ROOT}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            *sources,
        ],
        env=os.environ | {"PYTHONPATH": str(compiler())},
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return sorted((target / FOLDER.relative_to(ROOT)).glob("*_pb2.py*"))


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a module is not up to date")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        stale = [
            path.relative_to(target)
            for path in generate(target)
            if not (ROOT / path.relative_to(target)).is_file()
            or path.read_bytes() != (ROOT / path.relative_to(target)).read_bytes()
        ]
    for path in stale:
        print(f"{path} is not up to date; run `python tools/generate_protobuf.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
