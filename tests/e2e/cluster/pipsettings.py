"""Makes pip inside an image build find what pip on this machine finds.

A machine may reach packages only through an index, a certificate bundle or a directory of wheels that its pip
configuration names. The same settings go into the build as one file, and every path that they name is mounted
at the same place, for the time of the build only.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from .shell import run

# Settings of the machine's own installation that would be wrong or useless in an image.
LEFT_OUT = {
    "user",
    "target",
    "prefix",
    "root",
    "python",
    "require-virtualenv",
    "cache-dir",
    "log",
    "no-index",
}
CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def read(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """pip's effective settings: its files (user, site, global), then PIP_* variables over them."""
    variables = os.environ if environment is None else environment
    settings = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"], check=False).stdout.splitlines():
        match = re.fullmatch(r"(?P<section>[\w:.-]+)\.(?P<name>[\w-]+)=(?P<value>'.*'|\".*\")", line)
        if match and match["section"] in {"global", "install"}:
            settings[match["name"]] = str(ast.literal_eval(match["value"]))
    for variable, value in variables.items():
        if variable.startswith("PIP_") and variable != "PIP_CONFIG_FILE":
            settings[variable[4:].lower().replace("_", "-")] = value
    if "cert" not in settings:
        named = [variables[name] for name in CERTIFICATE_VARIABLES if variables.get(name)]
        settings.update({"cert": named[0]} if named else {})
    return {name: value for name, value in settings.items() if name not in LEFT_OUT}


def volumes(settings: Mapping[str, str], directory: Path) -> list[str]:
    """The `--volume` values for buildah; writes the configuration file into `directory`."""
    # Lists of addresses may go on in indented lines, single values may not.
    lines = [f"{name} = " + "\n    ".join(value.split()) for name, value in sorted(settings.items())]
    configuration = directory / "pip.conf"
    configuration.write_text("[global]\n" + "\n".join(lines) + "\n")
    mounts = [f"{configuration}:/etc/pip.conf:ro"]
    for path in paths(settings):
        # The image has its own bundle at Debian's place; mounting there covers other programs, too.
        mounts.append(f"{path}:{path}:ro")
    return mounts


def paths(settings: Mapping[str, str]) -> list[Path]:
    """The files and directories that settings name, plainly or as file: addresses."""
    found = set()
    for value in settings.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if not path.is_absolute() or not path.exists():
                continue
            # The pages of an index in files link to wheels beside it (../../files/...).
            indexed = word.startswith("file://") and len(path.parts) > 2
            found.add(path.parent if indexed else path)
    return sorted(found)
