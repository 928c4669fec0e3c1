"""Runs a TrainingJob as processes on this machine.

::

    with Launcher(load_job(Path("job.yaml")), Options(schedule=(ScaleAt(150, 4),))) as launcher:
        launcher.start()
        launcher.wait()
        print(launcher.outcome().verdict)

`plan` decides, `supervisor` acts, and other terminals read `state`. The package loads neither torch nor the
programs that it starts.
"""

from elastic_ps.local.options import Options, Outcome, WorkerGone
from elastic_ps.local.plan import ScaleAt, Verdict
from elastic_ps.local.processes import Programs
from elastic_ps.local.record import Event, Record
from elastic_ps.local.state import JobDirectory, LocalStatus, ProcessStatus, known_jobs
from elastic_ps.local.supervisor import Launcher

__all__ = [
    "Event",
    "JobDirectory",
    "Launcher",
    "LocalStatus",
    "Options",
    "Outcome",
    "ProcessStatus",
    "Programs",
    "Record",
    "ScaleAt",
    "Verdict",
    "WorkerGone",
    "known_jobs",
]
