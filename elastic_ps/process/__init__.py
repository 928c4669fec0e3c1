"""The parts that all processes share: life cycle, entrypoint, HTTP port, telemetry."""
