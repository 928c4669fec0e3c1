"""Write the Python modules of every `*.proto` file beside it. Running it twice changes nothing.

`python tools/generate_protobuf.py --check` changes nothing and fails if a module is not up to date.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "elastic_ps" / "transport"


def generate(target: Path) -> list[Path]:
    """Write the modules below `target`, in the same folders as in the repository; returns their paths."""
    sources = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={well_known}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            *sources,
        ]
    )
    if status:
        raise SystemExit(status)
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
