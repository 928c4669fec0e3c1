"""A worker's calls to the parameter servers, and the group of its processes."""
