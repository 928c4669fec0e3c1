"""What can go wrong with a test cluster, told apart by what the reader can do about it.

ClusterError            something failed that should have worked; the message has the log's tail
|- CommandError         a program returned a non-zero code
|- ClusterUnavailable   no cluster can run here (not root, not Debian, ...): tests skip with this reason
`- NotSupported         this cluster cannot do that (stop a component of a cluster that is not ours)
"""

from __future__ import annotations


class ClusterError(Exception):
    """Something failed that should have worked."""


class CommandError(ClusterError):
    """A program returned a non-zero code; the message carries the command and the end of its output."""

    def __init__(self, command: str, returncode: int, output: str) -> None:
        super().__init__(f"`{command}` returned {returncode}:\n{output}")
        self.returncode = returncode
        self.output = output


class ClusterUnavailable(ClusterError):
    """No cluster can run on this machine; the message is the reason, fit for a skipped test."""


class NotSupported(ClusterError):
    """This cluster cannot do what was asked, for example cut a pod of a cluster that is not ours."""
