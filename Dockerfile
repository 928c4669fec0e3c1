# The training image: parameter server, workers and the examples. Build it from the repository's root:
#   docker build -t localhost/elastic-ps:0.1.0 .
# The dependencies are a layer of their own, which changes only with constraints.txt and pyproject.toml. They are
# compiled: a process that has to compile torch first takes seconds longer to come back.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE} AS build
# For torch without CUDA, name PyTorch's index of CPU builds (its installation page has the address):
#   --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
COPY constraints.txt /src/
RUN python3 -m venv /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        -c /src/constraints.txt \
        torch numpy grpcio cryptography protobuf pydantic PyYAML rich safetensors scikit-learn zstandard && \
    /opt/venv/bin/pip uninstall -y pip setuptools

FROM ${BASE_IMAGE}
COPY --from=build /opt/venv /opt/venv
COPY elastic_ps/ /app/elastic_ps/
COPY examples/ /app/examples/
RUN /opt/venv/bin/python -m compileall -q /app
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 65532:65532
CMD ["python", "-m", "elastic_ps.worker"]
