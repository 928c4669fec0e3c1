"""Networks and data sets by name, and the script that trains one on the other: `elastic-ps train`."""
