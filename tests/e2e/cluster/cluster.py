"""One real Kubernetes on this machine: up, down, and the damage that a test does to it.

`up` is the only way in. It finds what a previous process left (a cluster that serves is used again, the rest
of a killed one is removed first), and what it starts can be taken down by any later process: all that `down`
needs is in the state directory and in the environment of the processes.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from . import build, components, host, images, metrics, pki, processes
from .addons import PROVISIONER, STORAGE_CLASS
from .base import GivenCluster, find_kubectl
from .build import Binaries
from .components import CNI_NETWORK, COMPONENTS
from .errors import ClusterError, ClusterUnavailable
from .host import Inventory
from .layout import GATEWAY, NODE, PAUSE_IMAGE, Layout, default_state_dir
from .shell import locked, run, say, wait_for

READY_TIMEOUT = timedelta(seconds=90)
IMPORT_TIMEOUT = timedelta(minutes=10)
CNI_RESULTS = Path("/var/lib/cni/results")


class Cluster(GivenCluster):
    """Our own cluster. Use it as a context manager to have it taken down, unless it was up before."""

    def __init__(self, layout: Layout, binaries: Binaries, before: Inventory | None) -> None:
        super().__init__(layout.kubeconfig, before)
        self.layout = layout
        self._binaries = binaries

    @classmethod
    def up(cls, state_dir: Path | None = None) -> Cluster:
        """Bring a cluster up, or find the one that is up. Blocks until pods can run.

        Takes about fifteen seconds, and minutes the first time (see build.py). Raises ClusterUnavailable with
        the reason where a cluster cannot run, ClusterError with a log's tail where something failed; in both
        cases nothing is left running.
        """
        directory = (state_dir or default_state_dir()).absolute()
        find_kubectl()
        binaries = build.obtain()
        with locked(directory / "lock", "bringing the cluster up or down"):
            found = cls._find(directory, binaries)
            if found:
                say(f"the cluster in {directory} is up already")
                return found
            _refuse_a_second(directory)
            _remove(directory)
            host.check_free()
            before = host.inventory()
            pause = images.pause_image()
            layout = Layout.create(directory)
            cluster = cls(layout, binaries, before)
            try:
                cluster._bring_up(pause)
            except BaseException:
                say("it did not come up; removing what was started (logs are kept)")
                _remove(directory)
                raise
            return cluster

    @classmethod
    def _find(cls, directory: Path, binaries: Binaries) -> Cluster | None:
        layout = Layout.load(directory)
        if layout is None or not layout.ready:
            return None
        if any(processes.pid_of(name, layout) is None for name in COMPONENTS):
            return None
        cluster = cls(layout, binaries, None)
        return cluster if cluster._api_ready() else None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.reused:
            self.down()

    def down(self) -> None:
        """Take it down and leave nothing behind but the logs. Safe to repeat."""
        down(self.layout.state_dir)

    def load_image(self, tag: str) -> None:
        """Put an image that `images.build_image` built into the cluster, unless it is there."""
        self._import(images.find_image(tag))

    def stop(self, component: str, *, kill: bool = False) -> None:
        pid = processes.pid_of(self._known(component), self.layout)
        if pid is not None:
            processes.end([pid], force=kill)

    def start(self, component: str) -> None:
        if processes.pid_of(self._known(component), self.layout) is None:
            self._spawn(component)
        self._await(component)

    @property
    def has_metrics_server(self) -> bool:
        """Whether there is one to be started."""
        return metrics.NAME in self._binaries

    @contextmanager
    def metrics_server(self) -> Iterator[None]:
        """While this lasts, the cluster has a metrics server."""
        self.apply(*metrics.service(self.layout), namespace=metrics.NAMESPACE)
        self._spawn(metrics.NAME)
        try:
            self._wait("the metrics server answers", self._metrics_answer, of=(metrics.NAME,))
            with self.api_service(metrics.NAME, metrics.NAMESPACE):
                yield
        finally:
            pid = processes.pid_of(metrics.NAME, self.layout)
            processes.end([] if pid is None else [pid])
            self.kubectl("-n", metrics.NAMESPACE, "delete", f"service/{metrics.NAME}")

    @contextmanager
    def api_service(self, name: str, namespace: str) -> Iterator[None]:
        """While this lasts, a Service answers requests for metrics."""
        self.apply(metrics.api_service(name, namespace))
        try:
            self.kubectl("wait", "--for=condition=Available", f"apiservice/{metrics.API}", "--timeout=60s")
            yield
        finally:
            # One that nobody serves would hold the deletion of every namespace up.
            self.kubectl("delete", "apiservice", metrics.API)

    def veth_of(self, pod: str, *, namespace: str = "default") -> str:
        wanted = {("K8S_POD_NAME", pod), ("K8S_POD_NAMESPACE", namespace)}
        paths = sorted(
            CNI_RESULTS.glob(f"{CNI_NETWORK}-*"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in paths:
            saved = json.loads(path.read_text())
            if wanted <= {tuple(item) for item in saved.get("cniArgs") or []}:
                for link in saved["result"]["interfaces"]:
                    if link["name"].startswith("veth") and not link.get("sandbox"):
                        return str(link["name"])
        raise ClusterError(f"pod {namespace}/{pod} has no network link here: is it running?")

    def cut(self, pod: str, *, namespace: str = "default") -> None:
        run(["ip", "link", "set", self.veth_of(pod, namespace=namespace), "down"])

    def heal(self, pod: str, *, namespace: str = "default") -> None:
        run(["ip", "link", "set", self.veth_of(pod, namespace=namespace), "up"])

    def limit_bandwidth(self, pod: str, rate: str | None, *, namespace: str = "default") -> None:
        link = self.veth_of(pod, namespace=namespace)
        if rate is None:
            run(["tc", "qdisc", "del", "dev", link, "root"], check=False)
        else:
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            run(["tc", "qdisc", "replace", "dev", link, "root", *shape])

    def pod_pid(self, pod: str, *, namespace: str = "default") -> int:
        statuses = self.get("pod", "-n", namespace, pod)["status"].get("containerStatuses") or [{}]
        container = statuses[0].get("containerID", "").removeprefix("containerd://")
        for line in self.ctr("tasks", "ls").stdout.splitlines():
            fields = line.split()
            if container and fields[0] == container:
                return int(fields[1])
        raise ClusterError(f"pod {namespace}/{pod} has no running container")

    def ctr(
        self, *arguments: str | Path, timeout: timedelta = timedelta(minutes=2)
    ) -> subprocess.CompletedProcess[str]:
        """Run containerd's client on the cluster's own containerd."""
        return run(
            [
                self._binaries["ctr"],
                f"--address={self.layout.containerd_socket}",
                "--namespace=k8s.io",
                *arguments,
            ],
            timeout=timeout,
        )

    def _bring_up(self, pause: images.Image) -> None:
        layout = self.layout
        layout.host_before = host.snapshot()
        layout.save()
        pki.create(layout)
        host.prepare()
        components.write_configuration(
            layout,
            self._binaries,
            restrict_oom_score=host.lacks_sys_resource(),
            snapshotter=host.snapshotter_for(layout.state_dir),
        )
        say("starting the control plane")
        for name in ("etcd", "containerd", "kube-apiserver"):
            self._spawn(name)
        self._await("containerd")
        self._import(pause)
        self._await("kube-apiserver")
        say("starting the node")
        for name in (
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "dnsmasq",
            "addons",
        ):
            self._spawn(name)
        self._create_storage_class()
        for name in COMPONENTS:
            self._await(name)
        self._wait("namespace default gets its service account", self._has_default_account)
        layout.ready = True
        layout.save()
        say("the cluster is up")

    def _spawn(self, name: str) -> None:
        # This package's own parent directory, because `python -m` must find it from anywhere.
        root = Path(__file__).parents[len((__package__ or "").split("."))]
        # containerd looks for its shim there.
        own = self._binaries["containerd"].parent
        path = f"{own}:{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
        # kubelet 1.20 looks for a cloud around it, and waits where nothing answers.
        environment = {"PYTHONPATH": str(root), "PATH": path, "AWS_EC2_METADATA_DISABLED": "true"}
        processes.spawn(
            name, components.command(name, self.layout, self._binaries), self.layout, env=environment
        )

    def _await(self, name: str) -> None:
        """Wait until a component does its work, as far as that can be seen."""
        checks: dict[str, Callable[[], bool]] = {
            "kube-apiserver": self._api_ready,
            "containerd": lambda: self._answers(
                [self._binaries["ctr"], f"--address={self.layout.containerd_socket}", "version"]
            ),
            "kubelet": self._node_ready,
            "kube-proxy": lambda: self._http_ok(
                f"http://127.0.0.1:{self.layout.ports['kube-proxy-health']}/healthz"
            ),
            "etcd": lambda: self._http_ok(f"http://127.0.0.1:{self.layout.ports['etcd']}/health"),
            "addons": lambda: any(components.hosts_directory(self.layout).glob("kubernetes.default")),
        }
        self._wait(f"{name} is ready", checks.get(name, lambda: True), of=(name,))

    def _wait(self, what: str, check: Callable[[], bool], *, of: tuple[str, ...] = COMPONENTS) -> None:
        def checked() -> bool:
            processes.require_alive(of, self.layout)
            return check()

        wait_for(checked, what=what, timeout=READY_TIMEOUT, explain=lambda: f"Logs: {self.layout.logs}")

    def _api_ready(self) -> bool:
        return self._http_ok(f"{self.layout.server}/readyz", token=self.layout.tokens["admin"])

    def _http_ok(self, url: str, *, token: str = "") -> bool:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = ssl.create_default_context(cafile=str(self.layout.pki / "ca.crt")) if token else None
        try:
            request = urllib.request.Request(url, headers=headers)
            # Proxies of the environment are not for addresses on this machine.
            handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
            if context:
                handlers.append(urllib.request.HTTPSHandler(context=context))
            with urllib.request.build_opener(*handlers).open(request, timeout=5) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def _metrics_answer(self) -> bool:
        # Not its /readyz, which waits for the first pod.
        port, token = self.layout.ports[metrics.NAME], self.layout.tokens[metrics.NAME]
        return self._http_ok(f"https://{GATEWAY}:{port}/livez", token=token)

    def _answers(self, command: list[str | Path]) -> bool:
        return run(command, check=False, timeout=timedelta(seconds=10)).returncode == 0

    def _node_ready(self) -> bool:
        answer = self.kubectl("get", "node", NODE, "-o", "json", check=False)
        if answer.returncode != 0:
            return False
        node = json.loads(answer.stdout)
        ready = {item["type"]: item["status"] for item in node["status"].get("conditions", [])}.get(
            "Ready"
        ) == "True"
        return ready and not node["spec"].get("taints")

    def _has_default_account(self) -> bool:
        return self.kubectl("get", "serviceaccount", "default", check=False).returncode == 0

    def _create_storage_class(self) -> None:
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        self.apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": STORAGE_CLASS, "annotations": default},
                "provisioner": PROVISIONER,
                "reclaimPolicy": "Delete",
            }
        )

    def _import(self, image: images.Image) -> None:
        record = self.layout.state_dir / "images.json"
        with locked(self.layout.state_dir / "images.lock", "loading an image"):
            if _loaded(record).get(image.tag) == image.digest:
                return
            if image.tag != PAUSE_IMAGE:
                say(f"loading image {image.tag} into the cluster")
            self.ctr("images", "import", image.archive, timeout=IMPORT_TIMEOUT)
            temporary = record.with_suffix(".tmp")
            temporary.write_text(json.dumps({**_loaded(record), image.tag: image.digest}))
            temporary.rename(record)

    def _known(self, component: str) -> str:
        if component not in COMPONENTS:
            raise ClusterError(f"there is no component {component!r}; there are {', '.join(COMPONENTS)}")
        return component


def down(state_dir: Path | None = None) -> bool:
    """Take the cluster of a state directory down, whoever started it and however far it came.

    Returns whether there was anything. Leaves only `logs` in the directory.
    """
    directory = (state_dir or default_state_dir()).absolute()
    if not directory.is_dir() and not processes.marked(directory):
        return False
    with locked(directory / "lock", "bringing the cluster up or down"):
        return _remove(directory)


def status(state_dir: Path | None = None) -> dict[str, Any] | None:
    """Process ids (None where one has ended) and paths of a cluster; None where there is no cluster."""
    directory = (state_dir or default_state_dir()).absolute()
    layout = Layout.load(directory)
    if layout is None:
        return None
    return {
        "ready": layout.ready,
        "kubeconfig": str(layout.kubeconfig),
        "logs": str(layout.logs),
        "components": {name: processes.pid_of(name, layout) for name in COMPONENTS},
    }


def _loaded(record: Path) -> dict[str, str]:
    """The digests of the images that the cluster has, by tag."""
    found: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    return found


def _remove(directory: Path) -> bool:
    layout = Layout.load(directory)
    components_left = processes.marked(directory)
    if layout is None and not components_left:
        return False
    started = time.monotonic()
    # First those who would start containers again, then containers with the shims that hold them.
    shims = {pid for pid in components_left if "containerd-shim" in " ".join(processes.command_line(pid)[:1])}
    processes.end(set(components_left) - shims, force=True)
    shims |= {
        pid
        for pid in processes.marked(directory)
        if "containerd-shim" in " ".join(processes.command_line(pid)[:1])
    }
    processes.end(processes.descendants(shims) | host.pods_pids(), force=True)
    processes.end(set(processes.marked(directory)), force=True)
    if layout is not None:
        for path in layout.containerd_state.glob("io.containerd.runtime.v2.task/*/*/address"):
            Path(path.read_text().strip().removeprefix("unix://")).unlink(missing_ok=True)
    host.unmount_below(directory)
    if layout is not None:
        host.restore(layout.host_before)
    for path in directory.iterdir() if directory.is_dir() else []:
        if path.name not in {"logs", "lock"}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    say(f"the cluster is down ({time.monotonic() - started:.1f} s)")
    return True


def _refuse_a_second(directory: Path) -> None:
    others = {value for value in processes.marked().values() if value != str(directory)}
    if others:
        raise ClusterUnavailable(
            f"another cluster is up on this machine, in {', '.join(sorted(others))}: a machine carries one. "
            "Set ELASTIC_PS_CLUSTER_DIR to that directory to use it or take it down"
        )
