"""What every real cluster has and Debian has no package of: names for Services, and volumes for claims.

One small process watches the API server and
 - writes a hosts file per Service (its cluster address, or its endpoints' when it is headless) into the
 directory
   that dnsmasq reads, which is this cluster's CoreDNS;
 - gives each claim of the storage class `standard` a directory, and removes it with the claim, which is this
   cluster's provisioner. Directories are writable by every user, as pods do not run as root.

Both are level-triggered: after any change, all is computed anew from what the watches have collected.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import shutil
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .layout import DOMAIN

STORAGE_CLASS = "standard"
PROVISIONER = "elastic-ps.dev/directory"
WATCH_SECONDS = 300
Objects = dict[str, dict[str, Any]]


class Api:
    """The API server by plain HTTP requests, as one identity of a kubeconfig with a token."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])

    def open(self, method: str, path: str, body: object = None, *, timeout: float = 30) -> Any:
        """Send a request and return the open response."""
        url = self._server + path
        assert urlsplit(url).scheme == "https"
        request = urllib.request.Request(
            url,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout, context=self._context)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the parsed answer."""
        with self.open(method, path, body) as response:
            return json.load(response)


class Watch(threading.Thread):
    """Keeps `objects` equal to a collection of the API server, and tells `changed` of every change."""

    def __init__(self, api: Api, path: str, changed: queue.Queue[None]) -> None:
        super().__init__(name=f"watch-{path.rsplit('/', 1)[1]}", daemon=True)
        self.objects: Objects = {}
        self.listed = threading.Event()
        self._api, self._path, self._changed = api, path, changed

    def run(self) -> None:
        while True:
            try:
                self._once()
            except (OSError, ValueError, http.client.HTTPException) as error:
                print(f"{self.name}: {error}; listing again", file=sys.stderr, flush=True)
                time.sleep(0.5)  # the API server is away or has forgotten our version

    def _once(self) -> None:
        answer = self._api.call("GET", self._path)
        self.objects = {_key(item): item for item in answer["items"]}
        self.listed.set()
        self._changed.put(None)
        version = answer["metadata"]["resourceVersion"]
        query = f"?watch=1&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}"
        with self._api.open("GET", self._path + query, timeout=WATCH_SECONDS + 30) as stream:
            for line in stream:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                objects = dict(self.objects)
                if event["type"] == "DELETED":
                    objects.pop(_key(event["object"]), None)
                else:
                    objects[_key(event["object"])] = event["object"]
                self.objects = objects
                self._changed.put(None)


def _key(item: dict[str, Any]) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def hosts_files(services: Objects, endpoints: Objects) -> dict[str, str]:
    """File name -> contents for dnsmasq's `--hostsdir`: one file per Service that has an address."""
    files = {}
    for key, service in services.items():
        namespace, name = key.split("/")
        domain = f"{name}.{namespace}.svc.{DOMAIN}"
        lines = []
        address = service["spec"].get("clusterIP")
        if address and address != "None":
            lines.append(f"{address} {domain}")
        elif address == "None":
            for subset in endpoints.get(key, {}).get("subsets") or []:
                for target in subset.get("addresses") or []:
                    own = f" {target['hostname']}.{domain}" if target.get("hostname") else ""
                    lines.append(f"{target['ip']} {domain}{own}")
        if lines:
            files[f"{name}.{namespace}"] = "\n".join(sorted(lines)) + "\n"
    return files


def write_hosts(directory: Path, files: dict[str, str]) -> None:
    """Make `directory` hold exactly `files`, each replaced as a whole."""
    for name, text in files.items():
        path = directory / name
        if not path.is_file() or path.read_text() != text:
            temporary = directory / f".{name}"  # dnsmasq leaves names with a dot at the front alone
            temporary.write_text(text)
            temporary.rename(path)
    for path in directory.iterdir():
        if path.name not in files and not path.name.startswith("."):
            path.unlink()


def provision(api: Api, root: Path, claims: Objects, volumes: Objects) -> None:
    """Give every waiting claim of our class a volume; remove volumes whose claim is gone."""
    for claim in claims.values():
        spec, meta = claim["spec"], claim["metadata"]
        name = f"pvc-{meta['uid']}"
        wanted = spec.get("storageClassName") == STORAGE_CLASS and not spec.get("volumeName")
        if not wanted or f"/{name}" in volumes or "deletionTimestamp" in meta:
            continue
        path = root / name
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        _quietly(api, "POST", "/api/v1/persistentvolumes", _volume(name, path, claim), ignore=409)
    for key, volume in volumes.items():
        mine = volume["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
        if mine and volume.get("status", {}).get("phase") in {"Released", "Failed"}:
            shutil.rmtree(root / key.lstrip("/"), ignore_errors=True)
            _quietly(api, "DELETE", f"/api/v1/persistentvolumes{key}", None, ignore=404)


def _volume(name: str, path: Path, claim: dict[str, Any]) -> dict[str, Any]:
    meta = claim["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "storageClassName": STORAGE_CLASS,
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"],
            },
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }  # fmt: skip


def _quietly(api: Api, method: str, path: str, body: object, *, ignore: int) -> None:
    try:
        api.call(method, path, body)
    except urllib.error.HTTPError as error:
        if error.code != ignore:
            raise


def main(kubeconfig: Path, hosts: Path, volumes: Path) -> None:
    """Watch and act until killed."""
    api = Api(kubeconfig)
    changed: queue.Queue[None] = queue.Queue()
    kinds = ("services", "endpoints", "persistentvolumeclaims", "persistentvolumes")
    watches = {kind: Watch(api, f"/api/v1/{kind}", changed) for kind in kinds}
    for watch in watches.values():
        watch.start()
    for watch in watches.values():
        watch.listed.wait()
    while True:
        changed.get()
        with contextlib.suppress(queue.Empty):
            while True:
                changed.get_nowait()
        write_hosts(hosts, hosts_files(watches["services"].objects, watches["endpoints"].objects))
        try:
            provision(
                api, volumes, watches["persistentvolumeclaims"].objects, watches["persistentvolumes"].objects
            )
        except OSError as error:
            print(f"volumes: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(0.5)
            changed.put(None)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
