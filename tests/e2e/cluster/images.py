"""Container images without a registry and without Docker.

The base image is Debian with Python, made by debootstrap from the machine's own Debian mirror; it stands in
for `python:3.11-slim-bookworm`, so a Dockerfile says `ARG BASE_IMAGE=python:3.11-slim-bookworm` and builds
here as it does elsewhere. buildah builds with a storage of its own under the cache directory. What is built
is kept as an archive next to a digest of all that went in; while that stays the same, nothing is built.
When it changes, layers whose inputs are as before come from buildah's storage, those of named stages too.
What nobody has used for a month is removed at the next build.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from . import apt, host, pipsettings
from .archive import write_image
from .errors import ClusterError
from .layout import PAUSE_IMAGE
from .shell import cache_dir, locked, run, run_logged, say, take_long

BASE_IMAGE = "localhost/elastic-ps-base:bookworm"
# Raise it when `_bootstrap` changes, so that cached base images are made anew.
BASE_REVISION = 1
BASE_PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
PACKAGES = ("debootstrap", "buildah", "gcc", "libc6-dev", "git")
BUILD_TIMEOUT = timedelta(minutes=30)
KEPT = timedelta(days=30)
# What the image does not need at run time, and some 100 MB of it.
SURPLUS = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "debootstrap",
)

PAUSE_SOURCE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void leave(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGINT, leave);
    signal(SIGTERM, leave);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


@dataclass(frozen=True)
class Image:
    """A built image: its tag, the digest of its inputs, and the archive that a cluster loads."""

    tag: str
    digest: str
    archive: Path


def pause_image() -> Image:
    """The image that holds a pod's namespaces: a static program that waits."""
    digest = _digest_of_text(PAUSE_SOURCE)
    archive = _archive_path(PAUSE_IMAGE, digest)
    if not archive.is_file():
        apt.install(PACKAGES, log=cache_dir() / "apt.log")
        with tempfile.TemporaryDirectory(dir=_directory()) as name:
            work = Path(name)
            (work / "pause.c").write_text(PAUSE_SOURCE)
            run(["gcc", "-Os", "-static", "-s", "-o", work / "pause", work / "pause.c"])
            run(["tar", "-C", work, "--owner=0", "--group=0", "-cf", work / "layer.tar", "pause"])
            write_image(
                archive,
                layer=work / "layer.tar",
                tag=PAUSE_IMAGE,
                architecture=_architecture(),
                command=["/pause"],
            )
    return Image(PAUSE_IMAGE, digest, archive)


def base_image() -> Image:
    """Debian 12 with Python 3.11 and pip; made once (about a minute), then taken from the cache."""
    digest = _digest_of_text(f"{BASE_REVISION} {BASE_PACKAGES}")
    archive = _archive_path(BASE_IMAGE, digest)
    with locked(cache_dir() / "base.lock", "making the base image"):
        if not _cached(archive):
            take_long()
            apt.install(PACKAGES, log=cache_dir() / "apt.log")
            say(f"making the base image {BASE_IMAGE} by debootstrap, once")
            _make_base(archive)
    return Image(BASE_IMAGE, digest, archive)


def _make_base(archive: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=_directory()))
    try:
        root, layer = work / "root", work / "layer.tar"
        _bootstrap(root)
        run(["tar", "-C", root, "--numeric-owner", "--sort=name", "-cf", layer, "."], timeout=BUILD_TIMEOUT)
        write_image(
            archive,
            layer=layer,
            tag=BASE_IMAGE,
            architecture=_architecture(),
            command=["python3"],
        )
    finally:
        _remove(work)


def build_image(
    dockerfile: Path,
    context: Path,
    tag: str,
    build_args: Mapping[str, str] | None = None,
) -> Image:
    """Build a Dockerfile with buildah and keep the result as an archive; do nothing while its inputs are the
    same.

    `BASE_IMAGE` is set to this machine's base image unless `build_args` has it. Layers are cached, so put
    what changes rarely (dependencies) first. pip inside finds what pip on this machine finds. `tag` should
    begin with `localhost/` and end with a version, and pods should not have `imagePullPolicy: Always`, which
    is the default for `latest`.

    Blocks: seconds, or minutes when large packages are installed. Raises ClusterError with the build's last
    lines.
    """
    apt.require_debian()
    base = base_image()
    arguments = {"BASE_IMAGE": BASE_IMAGE, **(build_args or {})}
    digest = digest_of(dockerfile, context, {**arguments, "base digest": base.digest})
    archive = _archive_path(tag, digest)

    def build() -> None:
        apt.install(PACKAGES, log=cache_dir() / "apt.log")
        try:
            _build(dockerfile, context, tag, arguments, base)
            _export(tag, archive)
            prune()
        finally:
            # buildah leaves its storage mounted on itself, and more when it is killed.
            host.unmount_below(cache_dir() / "buildah")

    build_once(archive, build)
    return Image(tag, digest, archive)


def build_once(archive: Path, build: Callable[[], None]) -> None:
    """Call `build`, which makes the archive, unless that is there. One process builds at a time."""
    if _cached(archive):
        return
    take_long()
    with locked(cache_dir() / "images.lock", "building an image"):
        if not archive.is_file():  # by now: whoever had the lock may have built it
            build()


def find_image(tag: str) -> Image:
    """The newest build of `tag` in the cache; raises ClusterError when there is none."""
    found = sorted(_directory().glob(f"{_file_name(tag)}@*.tar"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ClusterError(f"no image {tag} has been built; call build_image first")
    return Image(tag, found[-1].stem.rsplit("@", 1)[1], found[-1])


def _build(dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str], base: Image) -> None:
    if run([*_buildah(), "images", "-q", BASE_IMAGE], check=False).returncode != 0:
        run([*_buildah(), "pull", *_policy(), f"docker-archive:{base.archive}"], timeout=BUILD_TIMEOUT)
    say(f"building image {tag}")
    log = _directory() / f"{_file_name(tag)}.log"
    log.unlink(missing_ok=True)
    settings = pipsettings.read()
    options = ["--layers", "--pull-never", "--isolation", "chroot", "--network", "host", *_policy()]
    for name, value in arguments.items():
        options += ["--build-arg", f"{name}={value}"]
    with tempfile.TemporaryDirectory(dir=_directory()) as name:
        for volume in pipsettings.volumes(settings, Path(name)):
            options += ["--volume", volume]
        # A stage without a tag is pruned with all of its layers, which are what takes minutes.
        stages = [["--target", stage, "-t", f"{tag}-{stage}"] for stage in stages_of(dockerfile.read_text())]
        for what in [*stages, ["-t", tag]]:
            run_logged(
                [*_buildah(), "bud", *options, *what, "-f", dockerfile, context],
                log=log,
                timeout=BUILD_TIMEOUT,
            )


def stages_of(dockerfile: str) -> list[str]:
    """The names of a Dockerfile's stages, in order."""
    return re.findall(r"(?im)^FROM\s+\S+\s+AS\s+(\S+)", dockerfile)


def copied(dockerfile: str) -> list[str]:
    """The sources, files and folders, that a Dockerfile copies from its context, in order."""
    lines = re.findall(r"(?im)^(?:COPY|ADD)\s+(.*\S)", dockerfile)
    return [
        word.rstrip("/")
        for line in lines
        if "--from=" not in line
        for word in [word for word in line.split() if not word.startswith("--")][:-1]
    ]


def _export(tag: str, archive: Path) -> None:
    """Write the archive by a rename, and drop those of earlier inputs and the layers that only they used."""
    temporary = archive.with_suffix(".partial")
    temporary.unlink(missing_ok=True)
    run(
        [*_buildah(), "push", *_policy(), "--disable-compression", tag, f"docker-archive:{temporary}:{tag}"],
        timeout=BUILD_TIMEOUT,
    )
    for old in _directory().glob(f"{_file_name(tag)}@*.tar"):
        old.unlink()
    temporary.rename(archive)
    # What no tagged image stands on; the layers that the next build starts from stay.
    run([*_buildah(), "rmi", "--prune"], check=False)


def _cached(archive: Path) -> bool:
    """Whether it is there; that it is used is noted."""
    if archive.is_file():
        archive.touch()
        return True
    return False


def prune() -> None:
    """Remove what nobody has used for long: archives of an earlier base, and what killed builds left."""
    for path in _directory().iterdir():
        if time.time() - path.stat().st_mtime > KEPT.total_seconds():
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        host.unmount_below(path)  # a debootstrap that failed may have left /proc mounted in there
        shutil.rmtree(path)
    else:
        path.unlink()


def _bootstrap(root: Path) -> None:
    log = _directory() / "debootstrap.log"
    log.unlink(missing_ok=True)
    run_logged(
        ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root, apt.mirror()],
        log=log, timeout=BUILD_TIMEOUT,
    )  # fmt: skip
    for name in SURPLUS:
        shutil.rmtree(root / name, ignore_errors=True)
    # As in python:3.11-slim-bookworm, pip may install into the image's own Python.
    for marker in (root / "usr/lib").glob("python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    for name in ("etc/resolv.conf", "etc/hostname"):  # this machine's
        (root / name).unlink(missing_ok=True)


def _buildah() -> list[str]:
    storage = cache_dir() / "buildah"
    storage.mkdir(parents=True, exist_ok=True)
    driver = storage / "driver"
    if not driver.is_file():
        driver.write_text("overlay" if host.snapshotter_for(storage) == "overlayfs" else "vfs")
    registries = storage / "registries.conf"
    registries.write_text("unqualified-search-registries = []\n")
    return [
        "buildah",
        f"--root={storage / 'root'}",
        f"--runroot={storage / 'run'}",
        f"--storage-driver={driver.read_text()}",
        f"--registries-conf={registries}",
    ]


def _policy() -> list[str]:
    policy = cache_dir() / "buildah" / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    return [f"--signature-policy={policy}"]


def digest_of(dockerfile: Path, context: Path, arguments: Mapping[str, str]) -> str:
    """Changes when a build could have another result. Raises ClusterError for a file that is missing."""
    state = hashlib.sha256()
    for name, value in sorted(arguments.items()):
        state.update(f"{name}={value}\0".encode())
    files = _context_files(context)
    used = {dockerfile}
    for source in copied(dockerfile.read_text()):
        found = [path for path in files if context / source in (path, *path.parents)]
        if not found:
            raise ClusterError(f"{dockerfile} copies {source}, but there is no such file in {context}")
        used.update(found)
    for path in sorted(used):
        if path.is_file():
            executable = os.access(path, os.X_OK)
            state.update(f"{os.path.relpath(path, context)} {executable}\0".encode())
            state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


def _context_files(context: Path) -> list[Path]:
    """What git tracks or would track, in a work tree; every file elsewhere."""
    listed = run(["git", "-C", context, "ls-files", "-zco", "--exclude-standard"], check=False)
    if listed.returncode == 0:
        return sorted(context / name for name in listed.stdout.split("\0") if name)
    return sorted(path for path in context.rglob("*") if path.is_file())


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _archive_path(tag: str, digest: str) -> Path:
    return _directory() / f"{_file_name(tag)}@{digest}.tar"


def _file_name(tag: str) -> str:
    return tag.replace("/", "_").replace(":", "_")


def _directory() -> Path:
    path = cache_dir() / "images"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _architecture() -> str:
    return run(["dpkg", "--print-architecture"]).stdout.strip()
