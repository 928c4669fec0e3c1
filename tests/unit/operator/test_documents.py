"""JSON that is nested more deeply than Python can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_operator.api import Api, read_error
from elastic_operator.documents import MOST_LEVELS, read_json, shallow, too_deep
from elastic_operator.listings import Listings
from elastic_operator.metrics import Metrics
from elastic_operator.session import session
from elastic_operator.settings import Settings
from elastic_operator.store import Store
from elastic_ps.api.job import GROUP, VERSION
from tests.testing.api_server import JOBS, ApiServer
from tests.testing.simulation import Simulation, job_document, running

PATH = f"/apis/{GROUP}/{VERSION}/{JOBS}"
MOST_STORED = 10_000
"""The most levels of an object that an API server stores."""

DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{}é'), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.sampled_from('a"\\[{'), max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


def nested(levels: int) -> Any:
    """Lists in lists."""
    document: list[Any] = []
    for _ in range(levels - 1):
        document = [document]
    return document


def cut(document: Any, levels: int) -> Any:
    """What `shallow` leaves of a parsed document."""
    if not isinstance(document, dict | list):
        return document
    if levels == 0:
        return None
    if isinstance(document, list):
        return [cut(each, levels - 1) for each in document]
    return {key: cut(value, levels - 1) for key, value in document.items()}


@given(DOCUMENTS, st.integers(0, 4), st.sampled_from([None, 1]))
@example([{"a": ["[", {}], "b": []}, 1], 2, None)
def test_what_is_below_so_many_levels_is_cut_off(document: Any, levels: int, indent: int | None) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False).encode()
    assert json.loads(shallow(text, levels)) == cut(document, levels)


@pytest.mark.parametrize("levels", [900, 5_000, MOST_STORED, 100_000])
def test_whatever_is_nested_too_deeply_is_read(levels: int) -> None:
    text = f'{{"first": {"[" * levels}{"]" * levels}, "last": 1}}'
    for given_as in (text, text.encode()):
        assert read_json(given_as)["last"] == 1


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "]" * 100_000, "[1]]", '"["'])
def test_what_is_no_json_is_no_document(text: str) -> None:
    if text == '"["':
        assert read_json(text) == "["
        return
    with pytest.raises(ValueError):
        read_json(text)
    assert read_error(502, text).status == 502


def test_a_spec_has_so_many_levels_at_most() -> None:
    assert not too_deep(nested(MOST_LEVELS))
    assert too_deep([*nested(1), nested(MOST_LEVELS + 2)])
    assert too_deep({"a": {"b": nested(MOST_LEVELS)}})
    assert too_deep(nested(100_000))


def test_a_job_that_is_nested_too_deeply_is_invalid() -> None:
    simulation = Simulation(job_document())
    simulation.edit(arguments={"a": nested(600)})
    simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"] == (
        f"spec is nested deeper than {MOST_LEVELS} levels. Correct the spec, and the job starts"
    )


def test_a_job_that_runs_goes_on_though_its_template_is_nested_too_deeply() -> None:
    simulation = running()
    simulation.edit(worker={"template": {"spec": {"a": nested(600)}}})
    del simulation.pods["digits-worker-0"]
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0"]
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "keeps its last valid spec until you correct this: spec is nested" in degraded["message"]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """It has two jobs, one of which is nested as deeply as an API server allows."""
    server = ApiServer()
    server.texts["DEEP"] = "[" * MOST_STORED + "]" * MOST_STORED
    server.add_job("deep", arguments={"a": "DEEP"})
    server.add_job()
    yield server
    server.close()


def test_a_job_that_is_nested_too_deeply_hides_no_other(server: ApiServer, tmp_path: Path) -> None:
    settings, store = Settings(kubeconfig=server.kubeconfig(tmp_path)), Store()
    Listings(Api(settings, Metrics()), store, settings).list_all("trainingjobs")
    assert [name for _, name in store.jobs()] == ["deep", "digits"]
    snapshot = store.snapshot(("default", "deep"))
    assert snapshot is not None
    assert too_deep(snapshot.job["spec"])


def test_kopf_reads_a_job_that_is_nested_too_deeply(server: ApiServer, tmp_path: Path) -> None:
    settings = Settings(kubeconfig=server.kubeconfig(tmp_path))
    api = Api(settings, Metrics())

    async def ask() -> tuple[Any, Any]:
        kopfs = session(api, Listings(api, Store(), settings)).aiohttp_session
        async with kopfs:
            async with kopfs.get(f"{server.url}{PATH}") as answer:
                listed = await answer.json()
            async with kopfs.get(f"{server.url}{PATH}?watch=true") as answer:
                return listed, json.loads(await anext(aiter(answer.content.iter_chunked(1))))

    listed, first = asyncio.run(ask())
    jobs = [*listed["items"], first["object"]]
    assert [job["metadata"]["name"] for job in jobs] == ["deep", "digits", "deep"]
    assert [too_deep(job["spec"]) for job in jobs] == [True, False, True]
