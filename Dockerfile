# The training image: parameter server, workers and the examples. Build it from the repository's root:
#   docker build -t localhost/elastic-ps:0.1.0 .
# The dependencies are a layer of their own, which changes only with constraints.txt and this file; what comes after
# them adds to it and copies nothing of it. They are compiled, on all processors: a process that has to compile torch
# first takes seconds longer to come back. Nobody imports their tests, some of which are for newer Pythons.
# To build on the very same base again, name it by its digest: --build-arg BASE_IMAGE=python@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG VERSION=0.1.0
FROM ${BASE_IMAGE} AS build
# For torch without CUDA, name PyTorch's index of CPU builds (its installation page has the address):
#   --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
COPY constraints.txt /src/
RUN python3 -m venv --without-pip /opt/venv && \
    python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --no-compile --disable-pip-version-check \
        -c /src/constraints.txt \
        torch numpy grpcio cryptography protobuf pydantic PyYAML rich safetensors scikit-learn zstandard blosc && \
    /opt/venv/bin/python -m compileall -q -j 0 -x '/tests/|/testing/_internal/' /opt/venv/lib
# What a script needs besides: --build-arg PACKAGES="transformers accelerate"
ARG PACKAGES=
RUN [ -z "${PACKAGES}" ] || python3 -m pip --python /opt/venv/bin/python install --no-cache-dir \
        --disable-pip-version-check -c /src/constraints.txt ${PACKAGES}

# What the image is made of, as a CycloneDX document.
FROM build AS sbom
ARG VERSION
COPY tools/sbom.py /src/
RUN python3 -m pip install --no-cache-dir --no-compile --disable-pip-version-check -c /src/constraints.txt \
        --target /opt/sbom cyclonedx-python-lib && \
    PYTHONPATH=/opt/sbom python3 /src/sbom.py elastic-ps ${VERSION} /opt/venv/lib/python3*/site-packages > /sbom.cdx.json

FROM build
COPY --from=sbom /sbom.cdx.json /usr/share/sbom/elastic-ps.cdx.json
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
ARG BASE_IMAGE
ARG VERSION
# The commit that it is built from.
ARG REVISION=
LABEL org.opencontainers.image.title="elastic-ps" \
      org.opencontainers.image.description="Parameter server, workers and examples of elastic-ps" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"
CMD ["python", "-m", "elastic_ps.worker"]
# What changes comes last.
COPY elastic_ps/ /app/elastic_ps/
COPY examples/ /app/examples/
RUN /opt/venv/bin/python -m compileall -q /app
USER 65532:65532
