"""Debian packages and Debian sources, through the machine's own apt and its own mirrors.

No address is written down here: the source lists are derived from the ones that the machine has, with
`deb-src` added, and live in a directory of ours, so that the machine's apt configuration is not changed.
Services that a freshly installed package starts (containerd, etcd) are stopped: the cluster runs its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from .errors import ClusterError, ClusterUnavailable, CommandError
from .shell import run, run_logged, say

SERVICES = ("containerd.service", "etcd.service", "dnsmasq.service")
APT_TIMEOUT = timedelta(minutes=15)
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}


def missing(packages: Iterable[str]) -> list[str]:
    """Those of `packages` that are not installed."""
    wanted = list(packages)
    done = run(["dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\\n", *wanted], check=False)
    installed = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in installed]


def install(packages: Sequence[str], *, log: Path) -> None:
    """Install what is missing, without recommended packages and without starting services."""
    absent = missing(packages)
    if not absent:
        return
    say(f"installing Debian packages: {' '.join(absent)}")
    running = {name for name in SERVICES if _service_active(name)}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *absent]
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_logged(command, log=log, timeout=APT_TIMEOUT, env=_ENVIRONMENT)
    except CommandError:
        say("refreshing the package lists, then trying again")
        # One broken third-party list must not keep Debian's own from being used.
        run(["apt-get", "update"], timeout=APT_TIMEOUT, env=_ENVIRONMENT, check=False)
        run_logged(command, log=log, timeout=APT_TIMEOUT, env=_ENVIRONMENT)
    for name in SERVICES:
        if name not in running and _service_active(name):
            say(f"stopping {name}, which the installation started")
            run(["systemctl", "disable", "--now", name])


def fetch_binaries(packages: Sequence[str], destination: Path) -> list[Path]:
    """Download the files of packages into `destination`, a directory, and install nothing."""
    # As root, apt hands downloads to the user _apt, who may not enter a directory of ours.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *packages]
    try:
        run(command, cwd=destination, timeout=APT_TIMEOUT, env=_ENVIRONMENT)
    except CommandError:
        run(["apt-get", "update"], timeout=APT_TIMEOUT, env=_ENVIRONMENT, check=False)
        run(command, cwd=destination, timeout=APT_TIMEOUT, env=_ENVIRONMENT)
    return sorted(destination.glob("*.deb"))


def _service_active(name: str) -> bool:
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return False
    return run(["systemctl", "is-active", "--quiet", name], check=False).returncode == 0


class SourceArchive:
    """apt with source packages enabled, in a working directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts = directory / "sources"
        self._lists = directory / "lists"
        self._options = [
            "-o", "Dir::Etc::sourcelist=/dev/null",
            "-o", f"Dir::Etc::sourceparts={self._parts}",
            "-o", f"Dir::State::lists={self._lists}",
            "-o", "APT::Get::List-Cleanup=false",
            # As root, apt hands downloads to the user _apt, who may not enter a directory of ours.
            "-o", "APT::Sandbox::User=root",
        ]  # fmt: skip

    def update(self) -> None:
        """Fetch the lists of Debian's own binary and source packages."""
        self._parts.mkdir(parents=True, exist_ok=True)
        (self._lists / "partial").mkdir(parents=True, exist_ok=True)
        count = write_source_lists(Path("/etc/apt"), self._parts, debian_codename())
        if count == 0:
            raise ClusterUnavailable(
                "apt on this machine has no Debian archive configured, so no source packages"
            )
        run(["apt-get", *self._options, "update"], timeout=APT_TIMEOUT, env=_ENVIRONMENT)

    def fetch_source(self, package: str, destination: Path) -> Path:
        """Download, verify and unpack a source package with Debian's patches; return its directory."""
        destination.mkdir(parents=True, exist_ok=True)
        run(
            ["apt-get", *self._options, "source", package],
            cwd=destination, timeout=APT_TIMEOUT, env=_ENVIRONMENT,
        )  # fmt: skip
        trees = [path for path in destination.glob(f"{package}-*") if path.is_dir()]
        if len(trees) != 1:
            raise ClusterError(f"`apt-get source {package}` left {trees or 'no directory'} in {destination}")
        return trees[0]

    def fetch_binary(self, package: str, destination: Path) -> Path:
        """Download a binary package and unpack it into `destination` without installing it."""
        destination.mkdir(parents=True, exist_ok=True)
        run(
            ["apt-get", *self._options, "download", package],
            cwd=destination, timeout=APT_TIMEOUT, env=_ENVIRONMENT,
        )  # fmt: skip
        (archive,) = destination.glob(f"{package}_*.deb")
        run(["dpkg-deb", "-x", archive, destination])
        return destination

    def candidate(self, package: str) -> str:
        """The version of a source package that `fetch_source` would get."""
        done = run(["apt-cache", *self._options, "showsrc", "--only-source", package], env=_ENVIRONMENT)
        versions = re.findall(r"^Version: (\S+)$", done.stdout, re.MULTILINE)
        if not versions:
            raise ClusterUnavailable(f"Debian's archive on this machine has no source package {package}")
        return str(versions[0])


def write_source_lists(apt: Path, destination: Path, release: str) -> int:
    """Copy the machine's Debian source lists with `deb-src` enabled; return how many were usable."""
    count = 0
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        stanzas = [part for part in re.split(r"\n\s*\n", path.read_text()) if _is_debian(part, release)]
        if stanzas:
            text = "\n\n".join(re.sub(r"(?mi)^Types:.*$", "Types: deb deb-src", part) for part in stanzas)
            (destination / path.name).write_text(text + "\n")
            count += 1
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]:
        if not path.is_file():
            continue
        lines = [line.strip() for line in path.read_text().splitlines()]
        entries = [re.sub(r"^deb(-src)?\s+", "", line) for line in lines if re.match(r"deb(-src)?\s", line)]
        entries = sorted({entry for entry in entries if _is_debian(entry, release)})
        if entries:
            text = "".join(f"deb {entry}\ndeb-src {entry}\n" for entry in entries)
            (destination / f"{path.stem}.list").write_text(text)
            count += 1
    return count


def mirror() -> str:
    """The address of this machine's Debian archive, for debootstrap."""
    release = debian_codename()
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for part in re.split(r"\n\s*\n", path.read_text()):
            found = re.search(r"(?mi)^URIs:\s*(\S+)", part)
            suites = re.search(r"(?mi)^Suites:(.*)$", part)
            if found and suites and _is_debian(part, release) and release in suites[1].split():
                return found[1]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.list"))]:
        text = path.read_text() if path.is_file() else ""
        for found in re.finditer(r"(?m)^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)$", text):
            if found[2] == release and "main" in found[3].split():
                return found[1]
    raise ClusterUnavailable("apt on this machine has no Debian archive configured")


def _is_debian(text: str, release: str) -> bool:
    """Whether a list entry is Debian's own archive (or a mirror of it), judged by its component `main`
    together with the release's code name; third parties use suites and components of their own."""
    words = set(text.replace("\n", " ").split())
    return "main" in words and any(word == release or word.startswith(f"{release}-") for word in words)


def debian_codename() -> str:
    """The code name in /etc/os-release, empty when this is not Debian."""
    release = Path("/etc/os-release")
    if not release.is_file():
        return ""
    fields = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    if fields.get("ID", "").strip('"') != "debian":
        return ""
    return fields.get("VERSION_CODENAME", "").strip('"')


def require_debian() -> None:
    """Raise ClusterUnavailable unless this is Debian 12 with apt, and we are root."""
    if os.geteuid() != 0:
        raise ClusterUnavailable("a test cluster needs root: containers, network bridges and mounts are made")
    if debian_codename() != "bookworm" or shutil.which("apt-get") is None:
        raise ClusterUnavailable(
            "a test cluster is built from Debian 12's packages, and this is not Debian 12"
        )
