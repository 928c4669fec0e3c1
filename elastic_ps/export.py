"""`python -m elastic_ps.export DIR OUT`, for `elastic-ps export`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from elastic_ps.checkpoint.plain import export
from elastic_ps.contract.words import amount
from elastic_ps.embedding.stored import exported
from elastic_ps.errors import ElasticPSError, UserError
from elastic_ps.evaluation import results as evaluations


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m elastic_ps.export", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", type=_version)
    parsed = parser.parse_args(arguments)
    try:
        given = parsed.version
        wanted = evaluations.best_version(parsed.directory) if given == "best" else given
        with warnings.catch_warnings(record=True) as warned:
            version, tensors = export(
                parsed.directory, parsed.out, version=wanted, beside=lambda reader: exported(reader.rows())
            )
    except ElasticPSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    for each in warned:
        print(f"warning: {each.message}", file=sys.stderr)
    print(f"{parsed.out}: version {version}, {amount(tensors, 'tensor')}")
    return 0


def _version(text: str) -> int | str:
    return text if text == "best" else int(text)


if __name__ == "__main__":
    sys.exit(main())
