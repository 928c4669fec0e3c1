"""The decisions of the test cluster's code that need no cluster, and no Debian either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import (
    addons,
    apt,
    archive,
    build,
    components,
    images,
    layout,
    metrics,
    pipsettings,
    processes,
    shell,
)
from tests.e2e.cluster.errors import ClusterError
from tests.testing.addresses import PORTS
from tests.testing.polling import eventually


def test_source_lists_are_debians_own_with_sources_enabled(tmp_path: Path) -> None:
    parts, out = tmp_path / "apt/sources.list.d", tmp_path / "out"
    parts.mkdir(parents=True)
    out.mkdir()
    stanza = (
        "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
    )
    other = "Types: deb\nURIs: http://vendor.test/\nSuites: nodistro\nComponents: main\n"
    (parts / "debian.sources").write_text(f"{stanza}\n{other}")
    (parts / "vendor.list").write_text("deb http://vendor.test/apt cloud-bookworm main\n")
    (parts.parent / "sources.list").write_text(
        "# old\ndeb [arch=amd64] http://mirror.test/d bookworm main contrib\n"
    )
    assert apt.write_source_lists(tmp_path / "apt", out, "bookworm") == 2
    assert sorted(path.name for path in out.iterdir()) == ["debian.sources", "sources.list"]
    assert (out / "debian.sources").read_text().startswith("Types: deb deb-src\n")
    assert "vendor" not in (out / "debian.sources").read_text()
    assert (
        "deb-src [arch=amd64] http://mirror.test/d bookworm main contrib"
        in (out / "sources.list").read_text()
    )


@pytest.mark.parametrize(
    ("debian", "upstream"),
    [("1.20.5+really1.20.2-1.1+deb12u1", "1.20.2"), ("1.31.4+ds-1", "1.31.4")],
)
def test_upstream_version(debian: str, upstream: str) -> None:
    assert build.upstream_version(debian) == upstream


def test_a_version_that_is_none_is_an_error_that_shows_it() -> None:
    with pytest.raises(ClusterError, match="unknown"):
        build.upstream_version("unknown")


def test_names_of_services() -> None:
    def service(name: str, address: str | None) -> dict[str, object]:
        return {"metadata": {"name": name, "namespace": "n"}, "spec": {"clusterIP": address}}

    ready = [{"ip": "10.0.0.2", "hostname": "ps-0"}, {"ip": "10.0.0.3"}]
    files = addons.hosts_files(
        {
            "n/web": service("web", "10.96.0.9"),
            "n/ps": service("ps", "None"),
            "n/empty": service("empty", "None"),
            "n/external": service("external", None),
        },
        {"n/ps": {"subsets": [{"addresses": ready}, {"notReadyAddresses": [{"ip": "10.0.0.4"}]}]}},
    )
    assert files == {
        "web.n": "10.96.0.9 web.n.svc.cluster.local\n",
        "ps.n": "10.0.0.2 ps.n.svc.cluster.local ps-0.ps.n.svc.cluster.local\n"
        "10.0.0.3 ps.n.svc.cluster.local\n",
    }


def test_hosts_directory_follows(tmp_path: Path) -> None:
    addons.write_hosts(tmp_path, {"a.n": "1\n", "b.n": "2\n"})
    addons.write_hosts(tmp_path, {"b.n": "3\n"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b.n": "3\n"}


def test_pip_settings_go_into_a_build_with_the_paths_that_they_name(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    settings = {
        "find-links": f"{wheels} /does/not/exist",
        "extra-index-url": f"file://{index}",
        "disable-pip-version-check": "1",
    }
    mounts = pipsettings.volumes(settings, tmp_path)
    text = (tmp_path / "pip.conf").read_text()
    assert "disable-pip-version-check = 1\n" in text
    # The index's pages link to files beside it, so its parent is mounted.
    assert mounts[1:] == [f"{path}:{path}:ro" for path in (index.parent, wheels)]


def test_pip_variables_go_over_files_and_the_certificate_is_found() -> None:
    settings = pipsettings.read({"PIP_FIND_LINKS": "/w", "PIP_USER": "1", "PIP_CERT": "/c.pem"})
    assert settings["find-links"] == "/w"
    assert settings["cert"] == "/c.pem"
    assert "user" not in settings


def test_an_image_archive_is_what_docker_writes(tmp_path: Path) -> None:
    layer = tmp_path / "layer.tar"
    with tarfile.open(layer, "w") as output:
        output.add(__file__, "program")
    target = tmp_path / "image.tar"
    archive.write_image(target, layer=layer, tag="localhost/x:1", architecture="amd64", command=["/program"])
    with tarfile.open(target) as written:

        def read(name: str) -> Any:
            stream = written.extractfile(name)
            assert stream is not None
            return json.load(stream)

        (manifest,) = read("manifest.json")
        config = read(manifest["Config"])
        assert manifest["RepoTags"] == ["localhost/x:1"]
        assert set(manifest["Layers"]) <= set(written.getnames())
    assert config["config"]["Cmd"] == ["/program"]
    assert len(config["rootfs"]["diff_ids"]) == 1


DOCKERFILE = """\
ARG BASE_IMAGE=python
FROM ${BASE_IMAGE} AS build
COPY constraints.txt /src/
RUN echo COPY this
COPY --chown=1:1 code/a.py code/b.py /app/
FROM ${BASE_IMAGE}
COPY --from=build /opt /opt
COPY data/ /data/
"""


def test_what_a_dockerfile_takes_from_its_context() -> None:
    assert images.stages_of(DOCKERFILE) == ["build"]
    assert images.copied(DOCKERFILE) == ["constraints.txt", "code/a.py", "code/b.py", "data"]


def test_an_image_is_built_anew_when_what_it_copies_changes(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM base\nCOPY code/ /app/\n")
    (tmp_path / "code").mkdir()
    with pytest.raises(ClusterError, match="copies code, but there is no such file"):
        images.digest_of(dockerfile, tmp_path, {})
    (tmp_path / "code" / "a.py").write_text("1")
    (tmp_path / "other.md").write_text("1")
    before = images.digest_of(dockerfile, tmp_path, {})
    (tmp_path / "other.md").write_text("2")
    assert images.digest_of(dockerfile, tmp_path, {}) == before
    (tmp_path / "code" / "a.py").write_text("2")
    assert images.digest_of(dockerfile, tmp_path, {}) != before


def test_an_image_that_another_process_has_just_built_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    archive, built, said = tmp_path / "image.tar", list[Path](), ""

    def waits() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "another process is building an image" in said

    with ThreadPoolExecutor(1) as threads:
        with shell.locked(shell.cache_dir() / "images.lock", "building an image"):
            second = threads.submit(images.build_once, archive, lambda: built.append(archive))
            eventually(waits, "it waits for the first one")
            archive.touch()
        second.result(60)
    assert built == []
    archive.unlink()
    for _ in range(2):
        images.build_once(archive, archive.touch)
    assert archive.is_file()


def test_a_test_may_wait_for_another_process_for_longer_than_a_test_may_take(tmp_path: Path) -> None:
    waiting = f"""
from pathlib import Path
from tests.e2e.cluster.shell import locked

def test_waits():
    with locked(Path({str(tmp_path / "lock")!r}), "building"):
        pass
"""
    (tmp_path / "test_waiting.py").write_text(waiting)
    limit = ["-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-s", *limit]
    with shell.locked(tmp_path / "lock", "building"):
        test = subprocess.Popen([*command, tmp_path / "test_waiting.py"], stderr=subprocess.PIPE, text=True)
        assert test.stderr is not None
        assert "another process is building" in test.stderr.readline()
        time.sleep(3)
    with test.stderr:
        assert test.wait(60) == 0, test.stderr.read()


def test_what_was_not_used_for_long_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "elastic-ps" / "images"
    (directory / "tmp-of-a-killed-build").mkdir(parents=True)
    (directory / "localhost_x@old.tar").touch()
    long_ago = time.time() - images.KEPT.total_seconds() - 1
    for path in directory.iterdir():
        os.utime(path, (long_ago, long_ago))
    (directory / "localhost_x@new.tar").touch()
    images.prune()
    assert [path.name for path in directory.iterdir()] == ["localhost_x@new.tar"]


def test_flags_follow_the_version(tmp_path: Path) -> None:
    plan = layout.Layout.create(tmp_path / "state")
    paths = {
        name: Path("/bin") / name
        for name in (*build.KUBERNETES, *build.OPTIONAL, "etcd", "containerd", "dnsmasq", "runc")
    }
    old, new = (build.Binaries(paths, version) for version in ((1, 20), (1, 33)))
    assert "--port=0" in components.command("kube-scheduler", plan, old)
    assert "--port=0" not in components.command("kube-scheduler", plan, new)
    assert "--container-runtime=remote" in components.command("kubelet", plan, old)
    assert not any("container-runtime" in flag for flag in components.command("kubelet", plan, new))
    for name in (*components.COMPONENTS, metrics.NAME):
        assert components.command(name, plan, old)[0]
    for binaries, fails in ((old, True), (new, False)):
        components.write_configuration(plan, binaries, restrict_oom_score=False, snapshotter="overlayfs")
        config = json.loads((plan.config / "kubelet.json").read_text())
        assert config.get("failCgroupV1", True) is fails, "an old one does not know the setting"


def test_a_saved_layout_is_found_again_and_secrets_are_private(tmp_path: Path) -> None:
    plan = layout.Layout.create(tmp_path)
    plan.save()
    assert layout.Layout.load(tmp_path) == plan
    assert (tmp_path / "cluster.json").stat().st_mode & 0o077 == 0
    assert len(set(plan.ports.values())) == len(layout.PORTS)
    taken = {*plan.ports.values()}
    assert taken <= {*layout.FREE}
    assert not {*layout.FREE} & {near for port in PORTS for near in (port, port + 1)}, "those of other tests"
    assert layout.Layout.load(tmp_path / "nowhere") is None


def test_processes_are_found_by_their_mark_and_ended(tmp_path: Path) -> None:
    plan = layout.Layout.create(tmp_path / "state")
    pid = processes.spawn("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], plan)
    try:
        assert processes.pid_of("sleeper", plan) == pid
        # Its environment is there a moment after its program.
        eventually(lambda: pid in processes.marked(plan.state_dir), "the process is found by its mark")
    finally:
        processes.end([pid], force=True)
    assert processes.pid_of("sleeper", plan) is None
    with pytest.raises(ClusterError, match="sleeper has ended"):
        processes.require_alive(["sleeper"], plan)


def test_a_record_of_another_process_is_not_believed(tmp_path: Path) -> None:
    plan = layout.Layout.create(tmp_path / "state")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as somebody:
        record = {"pid": somebody.pid, "started": "1", "argv": []}
        (plan.pids / "etcd.json").write_text(json.dumps(record))
        assert processes.pid_of("etcd", plan) is None
        assert somebody.poll() is None
