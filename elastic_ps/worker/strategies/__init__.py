"""How a step becomes a version: through parameter servers, all-reduce, or several processes."""
