"""The command line and the configuration of each program of the cluster: text made from a Layout, no actions.

Flags that exist only in some versions are chosen by the API server's version, so that newer binaries
(`ELASTIC_PS_KUBERNETES_BIN`) work too. The configurations are written as JSON, which all of these programs
read as YAML.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import metrics
from .build import Binaries
from .layout import (
    BRIDGE,
    DOMAIN,
    GATEWAY,
    NODE,
    NODE_CIDR,
    PAUSE_IMAGE,
    POD_CIDR,
    SERVICE_CIDR,
    TOKENS,
    Layout,
)

CNI_BINARIES = Path("/usr/lib/cni")
CNI_NETWORK = "elastic-ps"
SERVICE_IP = "10.96.0.1"
AGGREGATOR = "aggregator"
"""The name under which the API server passes requests on to the servers of other APIs."""
# In the order of their start. Each needs those before it, more or less.
COMPONENTS = (
    "etcd", "kube-apiserver", "containerd", "kube-controller-manager", "kube-scheduler",
    "kubelet", "kube-proxy", "dnsmasq", "addons",
)  # fmt: skip


def command(name: str, layout: Layout, binaries: Binaries) -> list[str]:
    """The argv of a component."""
    makers = {
        "etcd": _etcd,
        "kube-apiserver": _apiserver,
        "containerd": _containerd,
        "kube-controller-manager": _controller_manager,
        "kube-scheduler": _scheduler,
        "kubelet": _kubelet,
        "kube-proxy": _proxy,
        "dnsmasq": _dnsmasq,
        "addons": _addons,
        metrics.NAME: metrics.command,
    }
    return makers[name](layout, binaries)


def _etcd(layout: Layout, binaries: Binaries) -> list[str]:
    client, peer = (f"http://127.0.0.1:{layout.ports[name]}" for name in ("etcd", "etcd-peer"))
    return [
        str(binaries["etcd"]),
        f"--data-dir={layout.state_dir / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver(layout: Layout, binaries: Binaries) -> list[str]:
    pki = layout.pki
    return [
        str(binaries["kube-apiserver"]),
        f"--etcd-servers=http://127.0.0.1:{layout.ports['etcd']}",
        f"--bind-address={GATEWAY}",
        f"--advertise-address={GATEWAY}",
        f"--secure-port={layout.ports['kube-apiserver']}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--kubelet-client-certificate={pki / 'client.crt'}",
        f"--kubelet-client-key={pki / 'client.key'}",
        # Without it, `kubectl logs` looks the node's name up in DNS.
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--token-auth-file={pki / 'tokens.csv'}",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        f"--requestheader-allowed-names={AGGREGATOR}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / f'{AGGREGATOR}.crt'}",
        f"--proxy-client-key-file={pki / f'{AGGREGATOR}.key'}",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--allow-privileged=true",
        f"--cert-dir={layout.state_dir / 'apiserver'}",
    ]


def _controller_manager(layout: Layout, binaries: Binaries) -> list[str]:
    return [
        str(binaries["kube-controller-manager"]),
        f"--kubeconfig={layout.kubeconfig_of('kube-controller-manager')}",
        f"--service-account-private-key-file={layout.pki / 'service-account.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        "--use-service-account-credentials=true",
        # Dozens of controllers start at once, and by default wait for each other's requests.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        # The one node's addresses are in the CNI configuration; the allocator would hold all controllers that
        # start after it up for ten seconds.
        "--allocate-node-cidrs=false",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--horizontal-pod-autoscaler-sync-period=1s",
        *_serving("kube-controller-manager", layout, binaries),
    ]


def _scheduler(layout: Layout, binaries: Binaries) -> list[str]:
    return [
        str(binaries["kube-scheduler"]),
        f"--kubeconfig={layout.kubeconfig_of('kube-scheduler')}",
        *_serving("kube-scheduler", layout, binaries),
    ]


def _serving(name: str, layout: Layout, binaries: Binaries) -> list[str]:
    return [
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={layout.ports[name]}",
        f"--cert-dir={layout.state_dir / name}",
        *(["--port=0"] if binaries.version < (1, 23) else []),
    ]


def _containerd(layout: Layout, binaries: Binaries) -> list[str]:
    return [str(binaries["containerd"]), f"--config={layout.config / 'containerd.toml'}"]


def _kubelet(layout: Layout, binaries: Binaries) -> list[str]:
    endpoint = f"unix://{layout.containerd_socket}"
    old = binaries.version < (1, 27)
    return [
        str(binaries["kubelet"]),
        f"--kubeconfig={layout.kubeconfig_of('kubelet')}",
        f"--config={layout.config / 'kubelet.json'}",
        f"--root-dir={layout.state_dir / 'kubelet'}",
        f"--cert-dir={layout.state_dir / 'kubelet-certificates'}",
        f"--hostname-override={NODE}",
        f"--node-ip={GATEWAY}",
        *([f"--container-runtime-endpoint={endpoint}"] if old else []),
        *(["--container-runtime=remote"] if binaries.version < (1, 24) else []),
    ]


def _proxy(layout: Layout, binaries: Binaries) -> list[str]:
    return [str(binaries["kube-proxy"]), f"--config={layout.config / 'kube-proxy.json'}"]


def _dnsmasq(layout: Layout, binaries: Binaries) -> list[str]:
    return [
        str(binaries["dnsmasq"]),
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--user=root",
        "--bind-interfaces",
        f"--listen-address={GATEWAY}",
        "--no-hosts",
        "--no-resolv",
        f"--local=/{DOMAIN}/",
        "--local-ttl=1",
        f"--hostsdir={hosts_directory(layout)}",
        "--log-facility=-",
    ]


def _addons(layout: Layout, binaries: Binaries) -> list[str]:
    return [
        sys.executable,
        "-m",
        f"{__package__}.addons",
        str(layout.kubeconfig),
        str(hosts_directory(layout)),
        str(layout.state_dir / "volumes"),
    ]


def hosts_directory(layout: Layout) -> Path:
    return layout.state_dir / "hosts"


def write_configuration(
    layout: Layout, binaries: Binaries, *, restrict_oom_score: bool, snapshotter: str
) -> None:
    """Write every file that `command` refers to, but for keys and certificates (see pki.py)."""
    for name in TOKENS:
        path = layout.kubeconfig_of(name)
        path.touch(mode=0o600)
        path.write_text(json.dumps(_kubeconfig(name, layout), indent=1))
    hosts_directory(layout).mkdir(exist_ok=True)
    (layout.state_dir / "volumes").mkdir(exist_ok=True)
    # The machine's search domains and servers are not the pods' business.
    (layout.config / "resolv.conf").write_text("")
    (layout.config / "kubelet.json").write_text(json.dumps(_kubelet_config(layout, binaries), indent=1))
    (layout.config / "kube-proxy.json").write_text(json.dumps(_proxy_config(layout), indent=1))
    (layout.config / "cni").mkdir(exist_ok=True)
    (layout.config / "cni" / "10-elastic-ps.conflist").write_text(json.dumps(_cni_config(layout), indent=1))
    text = containerd_config(
        layout, runc=binaries["runc"], restrict_oom_score=restrict_oom_score, snapshotter=snapshotter
    )
    (layout.config / "containerd.toml").write_text(text)


def _kubeconfig(name: str, layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "elastic-ps",
                "cluster": {"server": layout.server, "certificate-authority": str(layout.pki / "ca.crt")},
            }
        ],
        "users": [{"name": name, "user": {"token": layout.tokens[name]}}],
        "contexts": [{"name": "elastic-ps", "context": {"cluster": "elastic-ps", "user": name}}],
        "current-context": "elastic-ps",
    }


def _kubelet_config(layout: Layout, binaries: Binaries) -> dict[str, object]:
    config: dict[str, object] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": GATEWAY,
        "port": layout.ports["kubelet"],
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": layout.ports["kubelet-health"],
        # Only the API server's client certificate gets in, and it may do everything.
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDNS": [GATEWAY],
        "clusterDomain": DOMAIN,
        "resolvConf": str(layout.config / "resolv.conf"),
        "volumePluginDir": str(layout.state_dir / "volume-plugins"),
        "maxPods": 250,
        # The node is ready one update after the network is; ten seconds otherwise.
        "nodeStatusUpdateFrequency": "1s",
        # Until a Secret that has changed is seen in pods; a minute and more otherwise.
        "syncFrequency": "5s",
        "oomScoreAdj": 0,
        # A developer's disk is often nearly full: neither evict pods nor collect images because of that.
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "kubeAPIQPS": 50,
        "kubeAPIBurst": 100,
        "eventRecordQPS": 50,
        "eventBurst": 100,
    }
    if binaries.version >= (1, 27):
        config["containerRuntimeEndpoint"] = f"unix://{layout.containerd_socket}"
    if binaries.version >= (1, 31):
        config["failCgroupV1"] = False
    if binaries.version < (1, 26):
        # Its directory cannot be moved out of /var/lib/kubelet.
        config["featureGates"] = {"DevicePlugins": False}
    return config


def _proxy_config(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.kubeconfig_of("kube-proxy"))},
        "hostnameOverride": NODE,
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "healthzBindAddress": f"127.0.0.1:{layout.ports['kube-proxy-health']}",
        "metricsBindAddress": f"127.0.0.1:{layout.ports['kube-proxy-metrics']}",
        # Zeros: leave the machine's connection tracking as it is.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        # Pods share a bridge, and an answer from a Service must come back through the host that translated
        # its address, also on kernels that do not show bridged packets to iptables (no br_netfilter).
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s", "syncPeriod": "30s"},
        "oomScoreAdj": 0,
    }


def _cni_config(layout: Layout) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": NODE_CIDR, "gateway": GATEWAY}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(layout.state_dir / "cni"),
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": CNI_NETWORK, "plugins": [bridge, ports]}


def containerd_config(layout: Layout, *, runc: Path, restrict_oom_score: bool, snapshotter: str) -> str:
    """containerd's TOML: every directory and socket is under the state directory.

    `restrict_oom_score`: needed where we lack CAP_SYS_RESOURCE (in a sandbox, say); every pod dies with
    "can't get final child's PID from pipe" otherwise.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    value = json.dumps  # a JSON string is a TOML string
    return f"""\
version = 2
root = {value(str(layout.state_dir / "containerd" / "root"))}
state = {value(str(layout.containerd_state))}
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = {value(str(layout.containerd_socket))}
[{cri}]
sandbox_image = {value(PAUSE_IMAGE)}
restrict_oom_score_adj = {value(restrict_oom_score)}
netns_mounts_under_state_dir = true
[{cri}.cni]
bin_dir = {value(str(CNI_BINARIES))}
conf_dir = {value(str(layout.config / "cni"))}
[{cri}.containerd]
snapshotter = {value(snapshotter)}
default_runtime_name = "runc"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = {value(str(runc))}
Root = {value(str(layout.state_dir / "runc"))}
SystemdCgroup = false
"""
