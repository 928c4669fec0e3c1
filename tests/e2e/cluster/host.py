"""What a cluster changes on the machine, so that it can be put back: links, iptables, mounts, control groups,
kernel settings and the few directories that containerd, CNI and kubelet do not let one move.

`snapshot` is taken before anything starts and saved with the cluster; `restore` needs nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from .errors import ClusterUnavailable
from .layout import BRIDGE, GATEWAY, NODE_CIDR, POD_CIDR, SERVICE_CIDR
from .shell import run, wait_for

# kubelet and kube-proxy set these, whatever they are told.
SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "net/bridge/bridge-nf-call-iptables",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# Directories whose place is compiled in; what is new in them after `up` is ours.
FIXED_DIRECTORIES = (
    "/var/log/pods",
    "/var/log/containers",
    "/var/lib/kubelet",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/pod-resources",
    "/var/lib/cni",
    "/var/lib/cni/results",
    "/run/containerd",
    "/run/containerd/s",
    "/run/xtables.lock",
)
TABLES = ("filter", "nat", "mangle", "raw")
OUR_CHAINS = re.compile(r"(KUBE|CNI)-")
CGROUP = "kubepods"

Inventory = Mapping[str, list[str]]
"""What can be left behind, by kind: links, mounts, rules, control groups, settings, files."""


def snapshot() -> dict[str, Any]:
    """The state of the machine that `restore` puts back, as plain JSON data."""
    return {
        "sysctls": {name: value for name in SYSCTLS if (value := _sysctl(name)) is not None},
        "chains": {tool: {table: _chains(tool, table) for table in TABLES} for tool in _tools()},
        "directories": {path: _listing(Path(path)) for path in FIXED_DIRECTORIES},
    }


def inventory() -> Inventory:
    """What is on the machine now."""
    rules = []
    for tool in _tools():
        for table in TABLES:
            lines = run([f"{tool}-save", "-t", table], check=False).stdout.splitlines()
            # A built-in chain that came to life by being listed is no rule, and counters change by
            # themselves.
            rules += [f"{tool} {table} {line}" for line in lines if re.match(r"-A|:\S+ -", line)]
    return {
        "links": sorted(_links()),
        # A drill that runs beside the cluster has a small disk of its own.
        "mounts": sorted(path for path in _mounts() if "/elastic-ps-disk-" not in path),
        "iptables": sorted(re.sub(r"\[\d+:\d+\]", "", rule) for rule in rules),
        "cgroups": sorted(str(path) for path in _cgroups()),
        "sysctls": [f"{name}={_sysctl(name)}" for name in SYSCTLS],
        "files": [f"{path}: {_listing(Path(path))}" for path in FIXED_DIRECTORIES],
    }


def left_behind(before: Inventory) -> list[str]:
    """What is on the machine now and was not in an earlier `inventory`, in words."""
    return [
        f"{kind}: {entry}"
        for kind, entries in inventory().items()
        for entry in entries
        if entry not in before[kind]
    ]


def check_free() -> None:
    """Raise ClusterUnavailable where another cluster's network or pods are in the way."""
    if BRIDGE in _links():
        raise ClusterUnavailable(
            f"a network link {BRIDGE} exists already; remove it with `ip link del {BRIDGE}`"
        )
    if _cgroups():
        raise ClusterUnavailable(f"control group {_cgroups()[0]} exists: a kubelet runs pods on this machine")
    for route in json.loads(run(["ip", "-json", "-4", "route", "show"]).stdout or "[]"):
        if route["dst"] == "default":
            continue
        network = ip_network(route["dst"], strict=False)
        for ours in (POD_CIDR, SERVICE_CIDR):
            if network.overlaps(ip_network(ours)):
                raise ClusterUnavailable(
                    f"the machine routes {network}, and the cluster needs {ours} for itself"
                )


def prepare() -> None:
    """Make the bridge with the gateway's address and let packets be forwarded."""
    run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "address", "add", f"{GATEWAY}/{NODE_CIDR.split('/')[1]}", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def lacks_sys_resource() -> bool:
    """Whether this process may not lower an OOM score (CAP_SYS_RESOURCE is absent)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return match is not None and not int(match[1], 16) & (1 << 24)


def snapshotter_for(directory: Path) -> str:
    """`overlayfs` where a mount of it works in `directory`, `native` (slow copies) otherwise."""
    probe = directory / "overlay-probe"
    parts = {name: probe / name for name in ("lower", "upper", "work", "merged")}
    for path in parts.values():
        path.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    done = run(["mount", "-t", "overlay", "overlay", "-o", options, parts["merged"]], check=False)
    if done.returncode == 0:
        run(["umount", parts["merged"]])
    shutil.rmtree(probe)
    return "overlayfs" if done.returncode == 0 else "native"


def restore(before: Mapping[str, Any]) -> None:
    """Remove the cluster's links, rules, control groups and files, and put settings back. Safe to repeat.

    The cluster's processes must be gone and its mounts (see `unmount_below`) too.
    """
    remove_links()
    for tool in _tools():
        for table in TABLES:
            _remove_chains(tool, table, set(before.get("chains", {}).get(tool, {}).get(table, [])))
    wait_for(_remove_cgroups, what="control groups of the pods vanish", timeout=timedelta(seconds=20))
    for name, value in before.get("sysctls", {}).items():
        if _sysctl(name) != value:
            (Path("/proc/sys") / name).write_text(value)
    # Children before parents: a directory that was not there before goes as a whole.
    for name, names in sorted(before.get("directories", {}).items(), reverse=True):
        _restore_directory(Path(name), names)


def unmount_below(directory: Path) -> None:
    """Unmount everything at or below `directory`, the innermost first."""
    prefix = f"{directory}/"
    for path in reversed(_mounts()):
        if path == str(directory) or path.startswith(prefix):
            # Lazily: a process of somebody else may sit in it (a shell that looks at a log).
            run(["umount", "-l", path], check=False)


def remove_links() -> None:
    """Delete the bridge and what hangs on it."""
    for name in _links_of_bridge():
        run(["ip", "link", "del", name], check=False)
    if BRIDGE in _links():
        run(["ip", "link", "del", BRIDGE])


def pods_pids() -> set[int]:
    """Processes in the pods' control groups."""
    found: set[int] = set()
    for root in _cgroups():
        for path in root.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in path.read_text().split())
    return found


def _restore_directory(path: Path, before: list[str] | None) -> None:
    if before is None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return
    for name in set(_listing(path) or []) - set(before):
        child = path / name
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)


def _remove_chains(tool: str, table: str, keep: set[str]) -> None:
    """Delete the KUBE-* and CNI-* chains that were not there before, and the rules that lead into them."""
    doomed = [name for name in _chains(tool, table) if OUR_CHAINS.match(name) and name not in keep]
    if not doomed:
        return
    jumps = []
    for line in run([f"{tool}-save", "-t", table]).stdout.splitlines():
        words = shlex.split(line) if line.startswith("-A") else []
        target = words[words.index("-j") + 1] if "-j" in words else ""
        if target in doomed and words[1] not in doomed:
            jumps.append("-D" + line[2:])
    commands = [
        f"*{table}",
        *jumps,
        *(f"-F {name}" for name in doomed),
        *(f"-X {name}" for name in doomed),
        "COMMIT",
    ]
    run([f"{tool}-restore", "--noflush", "--wait=10"], stdin="\n".join(commands) + "\n")


def _chains(tool: str, table: str) -> list[str]:
    """The chains of a table that are not built in."""
    lines = run([f"{tool}-save", "-t", table], check=False).stdout.splitlines()
    return [line[1:].split()[0] for line in lines if re.match(r":\S+ -", line)]


def _tools() -> list[str]:
    return [tool for tool in ("iptables", "ip6tables") if shutil.which(f"{tool}-save")]


def _links() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def _links_of_bridge() -> list[str]:
    ports = Path("/sys/class/net") / BRIDGE / "brif"
    return [path.name for path in ports.iterdir()] if ports.is_dir() else []


def _mounts() -> list[str]:
    """Mount points in the order of mounting."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[1]) for line in lines]


def _cgroups() -> list[Path]:
    """The pods' control group in every hierarchy that is mounted."""
    roots = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if kind in {"cgroup", "cgroup2"}:
            roots.append(Path(point) / CGROUP)
    return [path for path in roots if path.is_dir()]


def _remove_cgroups() -> bool:
    for root in _cgroups():
        for path, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):
                Path(path).rmdir()
    return not _cgroups()


def _sysctl(name: str) -> str | None:
    path = Path("/proc/sys") / name
    return path.read_text().strip() if path.is_file() else None


def _listing(path: Path) -> list[str] | None:
    """The names in a directory; None where it does not exist."""
    if path.is_dir():
        return sorted(child.name for child in path.iterdir())
    return [] if path.exists() else None
