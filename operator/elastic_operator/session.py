"""The HTTP session with which kopf reaches the API server. It counts requests and reports watches.

After some answers kopf ends, and the operator with it: for example when a kind of object is gone, or when
etcd has just lost its leader. Here, a refusal that kopf takes for final becomes a lost connection, so that
kopf asks again, less and less often. Any error in the stream of a watch becomes the one that kopf can handle,
a version that is too old, so that kopf lists again. `listings` checks that the watches are alive.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import aiohttp
import kopf
from aiohttp.typedefs import JSONDecoder

from elastic_operator.api import Api
from elastic_operator.documents import read_json, shallow
from elastic_operator.listings import Listings

logger = logging.getLogger(__name__)

_DELAYS = (1, 1, 2, 3, 5, 8, 13, 20)

_ERROR = re.compile(rb'\{"type": ?"ERROR"')

_TOO_OLD = b'{"type":"ERROR","object":{"code":410}}'


class Delays:
    """The seconds between the attempts of a request, without an end."""

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform

    def __iter__(self) -> Iterator[float]:
        for delay in itertools.chain(_DELAYS, itertools.repeat(_DELAYS[-1])):
            yield delay * self._uniform(0.8, 1.2)


class _Lines:
    """The stream of a watch, in whole lines that can be read. A line that is cut off is left out."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        rest = b""
        async for part in self._content.iter_any():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                if _ERROR.match(line):
                    logger.warning(
                        "a watch reports an error; listing again: %s", line.decode(errors="replace")
                    )
                yield (_TOO_OLD if _ERROR.match(line) else shallow(line)) + b"\n"


class _Response(aiohttp.ClientResponse):
    """An answer that can be read however deeply an object in it is nested."""

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: JSONDecoder = read_json,
        content_type: str | None = "application/json",
    ) -> Any:
        return await super().json(encoding=encoding, loads=loads, content_type=content_type)


def connection(api: Api) -> kopf.ConnectionInfo:
    """How kopf reaches the API server: as our own client does."""
    ours = api.configuration
    return kopf.ConnectionInfo(
        server=ours.host,
        ca_path=ours.ssl_ca_cert,
        insecure=not ours.verify_ssl,
        certificate_path=ours.cert_file,
        private_key_path=ours.key_file,
    )


def session(api: Api, listings: Listings) -> kopf.AiohttpSession:
    """The session for kopf, which closes it. Call this in kopf's event loop."""
    info = connection(api)

    async def ask(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        *_, above, namespace, plural = f"//{request.url.path}".split("/")
        resource = next((resource for resource in listings.monitors if resource == plural), None)
        verb = "get" if resource is None else "watch" if "watch" in request.url.query else "list"
        api.metrics.requests.labels(verb, resource or "apis").inc()
        if (authorization := api.authorization()) is not None:
            request.headers["Authorization"] = authorization
        response = await send(request)
        if response.status >= 400:
            error = api.error(verb, resource or "apis", response.status, await response.read())
            searched = resource is None and error.status == 404
            if error.status < 500 and error.status != 429 and not searched:
                raise aiohttp.ClientConnectionError(f"{verb} {request.url.path}: {error}")
        elif resource is not None:
            listings.answered(verb, (resource, namespace if above == "namespaces" else ""))
            if verb == "watch":
                response.content = cast(aiohttp.StreamReader, _Lines(response.content))
        return response

    return kopf.AiohttpSession(
        server=info.server,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            middlewares=[ask],
            response_class=_Response,
            proxy=api.proxy,
        ),
    )
