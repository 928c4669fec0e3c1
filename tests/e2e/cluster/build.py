"""Obtains the programs of a Kubernetes control plane and node on Debian 12, without a download of binaries.

Debian 12 has no package of a Kubernetes server, but it has the whole source package. It is built once
(about eight minutes on two cores) and kept in the user's cache directory under a name made of its version and
our patch revision, so that a later run finds it there and a change of the patch builds anew.

Other binaries can be used without a build: `ELASTIC_PS_KUBERNETES_BIN` names a directory with any of them,
also etcd, containerd and metrics-server. `KUBEBUILDER_ASSETS` (the convention of envtest) is looked at next.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from . import apt
from .errors import ClusterError, ClusterUnavailable
from .shell import cache_dir, locked, run, run_logged, say, take_long

KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
# Two rounds, so that a failure of the second does not lose sight of which part failed.
ROUNDS = (KUBERNETES[:3], KUBERNETES[3:])
CONTAINERD = ("containerd", "containerd-shim-runc-v2", "ctr")
OPTIONAL = ("metrics-server",)
"""Used where they are given; Debian has no source of them."""
# Raise this when `_patch` changes: it is part of the cache's key.
PATCH_REVISION = 1
BUILD_TIMEOUT = timedelta(hours=3)
NEEDED_DISK = 6 * 1024**3

RUNTIME_PACKAGES = (
    "etcd-server", "containerd", "runc", "containernetworking-plugins", "dnsmasq-base", "iptables",
    "iproute2", "conntrack", "openssl", "util-linux", "mount", "socat",
)  # fmt: skip
BUILD_PACKAGES = (
    "golang-go",
    "dpkg-dev",
    "rsync",
    "jq",
    "gcc",
    "libc6-dev",
    "make",
    "git",
    "patch",
    "xz-utils",
)


@dataclass(frozen=True)
class Binaries:
    """Where each program is; every path exists. `version` is the API server's (major, minor)."""

    paths: dict[str, Path]
    version: tuple[int, int]

    def __getitem__(self, name: str) -> Path:
        return self.paths[name]

    def __contains__(self, name: str) -> bool:
        return name in self.paths


def obtain() -> Binaries:
    """Find or build every program that a cluster needs, installing Debian packages that are missing.

    Blocks for minutes the first time and for less than a second afterwards. Raises ClusterUnavailable where
    it cannot work at all, ClusterError (with the log's tail) where a step failed.
    """
    apt.require_debian()
    apt.install(RUNTIME_PACKAGES, log=cache_dir() / "apt.log")
    given = _given_directories()
    paths = {name: path for name in KUBERNETES if (path := _find(name, given))}
    absent = [name for name in KUBERNETES if name not in paths]
    if absent:
        built = cached() or build()
        paths.update({name: built / name for name in absent})
        if given:
            say(f"not in the given directories, so taken from {built}: {', '.join(absent)}")
    etcd = _find("etcd", given)
    paths["etcd"] = etcd or _which("etcd")
    paths |= {name: _which(name) for name in ("runc", "dnsmasq")}
    paths |= {name: path for name in OPTIONAL if (path := _find(name, given))}
    # These three are made for each other.
    ours = {name: _find(name, given) for name in CONTAINERD}
    paths |= {name: path if all(ours.values()) and path else _which(name) for name, path in ours.items()}
    return Binaries(paths, version_of(paths["kube-apiserver"]))


def version_of(apiserver: Path) -> tuple[int, int]:
    """(major, minor) of a kube-apiserver binary."""
    output = run([apiserver, "--version"]).stdout
    match = re.search(r"v(\d+)\.(\d+)", output)
    if not match:
        raise ClusterError(f"{apiserver} --version printed no version: {output!r}")
    return int(match[1]), int(match[2])


def cached() -> Path | None:
    """The directory of an earlier complete build, or None."""
    for path in sorted(cache_dir().glob(f"kubernetes-*-p{PATCH_REVISION}"), reverse=True):
        if all((path / name).is_file() for name in KUBERNETES):
            return path
    return None


def build() -> Path:
    """Build Kubernetes from Debian's source package into the cache and return the directory.

    Safe to call from several processes: the second waits and then finds the first one's result. The result
    appears by a rename, so an interrupted build leaves nothing that looks complete.
    """
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "build.lock", "building Kubernetes"):
        found = cached()
        if found:
            return found
        free = shutil.disk_usage(cache).free
        if free < NEEDED_DISK:
            raise ClusterUnavailable(
                f"building Kubernetes needs {NEEDED_DISK >> 30} GiB in {cache}, "
                f"and {free / 1024**3:.1f} are free"
            )
        for stale in cache.glob("building-*"):
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            return _build_in(work, cache)
        finally:
            # Go's module and build directories hold read-only folders; root removes them all the same.
            shutil.rmtree(work, ignore_errors=True)


def _build_in(work: Path, cache: Path) -> Path:
    take_long()
    log = cache / "build.log"
    log.unlink(missing_ok=True)
    say(f"building Kubernetes from Debian's source package: 8 minutes on two cores, once (log: {log})")
    apt.install(BUILD_PACKAGES, log=cache / "apt.log")
    archive = apt.SourceArchive(work / "apt")
    say("step 1 of 5: package lists, with sources")
    archive.update()
    debian_version = archive.candidate("kubernetes")
    version = upstream_version(debian_version)
    say(f"step 2 of 5: source of kubernetes {debian_version} (upstream {version})")
    tree = archive.fetch_source("kubernetes", work / "source")
    say("step 3 of 5: patching")
    _patch(tree, archive.fetch_binary("golang-github-modern-go-reflect2-dev", work / "reflect2"))
    for step, names in enumerate(ROUNDS, start=4):
        say(f"step {step} of 5: compiling {', '.join(names)}")
        _make(tree, names, version=version, work=work, log=log)
    result = work / "result"
    result.mkdir()
    for name in KUBERNETES:
        (tree / "_output/local/bin/linux" / _architecture() / name).rename(result / name)
    target = cache / f"kubernetes-{version}-p{PATCH_REVISION}"
    shutil.rmtree(target, ignore_errors=True)
    result.rename(target)
    say(f"built Kubernetes {version} into {target}")
    return target


def upstream_version(debian_version: str) -> str:
    """The upstream part of a Debian version: `1.20.5+really1.20.2-1` is 1.20.2."""
    match = re.search(r"really(\d+\.\d+\.\d+)", debian_version) or re.search(
        r"(\d+\.\d+\.\d+)", debian_version
    )
    if not match:
        raise ClusterError(f"cannot read an upstream version out of {debian_version!r}")
    return match[1]


def _patch(tree: Path, unpacked: Path) -> None:
    """Replace the vendored reflect2 by Debian's newer one.

    1.0.1 reads Go's runtime maps through a layout that changed with Go 1.18: the API server dies at the first
    custom resource, with `fatal error: fault` in reflect.mapiterinit.
    """
    vendored = tree / "vendor/github.com/modern-go/reflect2"
    newer = unpacked / "usr/share/gocode/src/github.com/modern-go/reflect2"
    sources = [path for path in newer.iterdir() if path.suffix in {".go", ".s"}]
    sources = [path for path in sources if not path.name.endswith("_test.go")]
    if not vendored.is_dir() or not sources:
        raise ClusterError(f"no reflect2 to replace: {vendored} or {newer} is not as expected")
    for path in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
        path.unlink()
    for path in sources:
        shutil.copy(path, vendored / path.name)


def _make(tree: Path, names: tuple[str, ...], *, version: str, work: Path, log: Path) -> None:
    major, minor, _ = version.split(".")
    settings = {
        "WHAT": " ".join(f"cmd/{name}" for name in names),
        "KUBE_GIT_VERSION": f"v{version}",
        "KUBE_GIT_MAJOR": major,
        "KUBE_GIT_MINOR": minor,
        "KUBE_GIT_COMMIT": "debian",
        "KUBE_GIT_TREE_STATE": "clean",
        "GOFLAGS": "-trimpath",
        "GOLDFLAGS": "-s -w",
    }
    (work / "tmp").mkdir(exist_ok=True)
    environment = {
        "GOCACHE": str(work / "gocache"),
        "GOPATH": str(work / "gopath"),
        "GOPROXY": "off",
        "TMPDIR": str(work / "tmp"),
    }
    run_logged(
        ["nice", "-n", "5", "make", *(f"{key}={value}" for key, value in settings.items())],
        log=log, timeout=BUILD_TIMEOUT, cwd=tree, env=environment,
    )  # fmt: skip


def _architecture() -> str:
    """Go's name of this machine's architecture, which for Debian's ports that matter is dpkg's too."""
    return run(["dpkg", "--print-architecture"]).stdout.strip()


def _given_directories() -> list[Path]:
    given = []
    for variable in ("ELASTIC_PS_KUBERNETES_BIN", "KUBEBUILDER_ASSETS"):
        value = os.environ.get(variable)
        if not value:
            continue
        if not Path(value).is_dir():
            raise ClusterUnavailable(f"{variable}={value} is not a directory")
        given.append(Path(value))
    return given


def _find(name: str, directories: list[Path]) -> Path | None:
    return next((path / name for path in directories if os.access(path / name, os.X_OK)), None)


def _which(name: str) -> Path:
    # Debian keeps daemons in directories that an ordinary user's PATH lacks.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        raise ClusterError(f"`{name}` is not on the PATH although its Debian package is installed")
    return Path(found)
