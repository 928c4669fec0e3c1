"""Where a cluster keeps its things and on which addresses it answers: plain data, saved as JSON.

One directory holds everything, so that any later process can find (and remove) what an earlier one started,
even one that was killed half-way. The cluster's own addresses live on a bridge that is ours: nothing listens
on the machine's network.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

BRIDGE = "eps0"
NODE = "elastic-ps-node"
POD_CIDR = "10.244.0.0/16"
NODE_CIDR = "10.244.0.0/24"
SERVICE_CIDR = "10.96.0.0/16"
# The bridge's address: the pods' gateway, their DNS server, the node's address and the API server's.
GATEWAY = "10.244.0.1"
DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/elastic-ps-pause:1"
# Every process of a cluster carries this variable with its state directory, which is how `down` finds them.
MARKER = "ELASTIC_PS_CLUSTER"

TOKENS = {
    # name: (user, groups)
    "admin": ("elastic-ps-admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "kube-proxy": ("system:kube-proxy", ""),
    "metrics-server": ("metrics-server", "system:masters"),
}
PORTS = (
    "etcd", "etcd-peer", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
    "kubelet", "kubelet-health", "kube-proxy-health", "kube-proxy-metrics",
    "metrics-server",
)  # fmt: skip

FREE = range(29_000, 30_000)
"""The ports for them are chosen from these. Tests listen on others while a component is stopped."""


def default_state_dir() -> Path:
    """`ELASTIC_PS_CLUSTER_DIR`, or a fixed place: a machine carries one cluster, because iptables' chains and
    the bridge are the machine's."""
    return Path(os.environ.get("ELASTIC_PS_CLUSTER_DIR") or "/var/lib/elastic-ps-cluster")


@dataclass
class Layout:
    """Paths, ports and tokens of one cluster, and what the machine looked like before it."""

    state_dir: Path
    ports: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    host_before: dict[str, object] = field(default_factory=dict)
    ready: bool = False

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def pids(self) -> Path:
        return self.state_dir / "pids"

    @property
    def pki(self) -> Path:
        return self.state_dir / "pki"

    @property
    def config(self) -> Path:
        return self.state_dir / "config"

    @property
    def kubeconfig(self) -> Path:
        return self.state_dir / "kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.state_dir / "containerd.sock"

    @property
    def containerd_state(self) -> Path:
        return self.state_dir / "containerd" / "state"

    @property
    def server(self) -> str:
        return f"https://{GATEWAY}:{self.ports['kube-apiserver']}"

    def kubeconfig_of(self, name: str) -> Path:
        """The kubeconfig of one identity of TOKENS; the administrator's is `kubeconfig` itself."""
        return self.kubeconfig if name == "admin" else self.config / f"{name}.kubeconfig"

    @classmethod
    def create(cls, state_dir: Path) -> Layout:
        """A new layout with free ports and fresh tokens, its directories made."""
        layout = cls(state_dir, ports=free_ports(), tokens={name: secrets.token_hex(24) for name in TOKENS})
        state_dir.mkdir(parents=True, exist_ok=True)
        state_dir.chmod(0o755)
        for path in (layout.logs, layout.pids, layout.pki, layout.config):
            path.mkdir(exist_ok=True)
        for old in layout.logs.iterdir():  # kept until now for whoever looks into what went wrong
            old.unlink()
        layout.pki.chmod(0o700)
        return layout

    @classmethod
    def load(cls, state_dir: Path) -> Layout | None:
        """The layout that an `up` saved there, or None where there is none."""
        path = state_dir / "cluster.json"
        if not path.is_file():
            return None
        fields = json.loads(path.read_text())
        return cls(state_dir, **{key: value for key, value in fields.items() if key != "state_dir"})

    def save(self) -> None:
        path = self.state_dir / "cluster.json"
        temporary = path.with_suffix(".tmp")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps({**asdict(self), "state_dir": str(self.state_dir)}, indent=1))
        temporary.rename(path)


def free_ports() -> dict[str, int]:
    """A free TCP port for each of PORTS, all held open at once so that they differ.

    They lie below the kernel's range for outgoing connections, so that none of those takes the port of a
    component that is stopped for a while.
    """
    candidates = random.sample(FREE, len(FREE))
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        for port in candidates:
            if len(ports) == len(PORTS):
                break
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("", port))
                ports[PORTS[len(ports)]] = port
    return ports
