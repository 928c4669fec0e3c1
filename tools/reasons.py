"""Every reason that a TrainingJob's conditions and events give: what it means, and what to do.

`tools/reference.py` writes them into the reference. A test compares them with the operator's code.
"""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """A row of the table of conditions.

    Attributes:
        condition: the condition's type, with `=False` where that is what it says.
        names: the reasons, which the code gives in this meaning.
    """

    condition: str
    names: tuple[str, ...]
    meaning: str
    remedy: str = ""


CONDITIONS = (
    Reason("Created", ("Created",), "The operator has created all objects of the job."),
    Reason(
        "Running",
        ("Running",),
        "All parameter servers are ready, and at least `minReplicas` workers have joined.",
    ),
    Reason(
        "Running=False",
        ("WaitingForParameterServer", "WaitingForWorkers"),
        "Parameter servers or workers are starting.",
        "Wait.",
    ),
    Reason(
        "Degraded",
        ("Unschedulable",),
        "A pod fits on no node. The message is the scheduler's. It names the claim and its storage class if "
        "a claim is not bound.",
        "Add nodes, or lower requests or replicas.",
    ),
    Reason(
        "Degraded",
        ("SchedulingGated",),
        "A pod waits for its scheduling gates, which the message names.",
        "Look at the queue that has set them.",
    ),
    Reason(
        "Degraded",
        ("NodeNotAnswering",),
        "The node of a pod does not answer. Training goes on without its workers.",
        "Wait: the pods of a lost node are replaced. Or look at the node.",
    ),
    Reason(
        "Degraded",
        ("WorkerNotAnswering",),
        "The parameter server has given up on a worker whose pod still runs: it is frozen, or cut off.",
        "See `kubectl logs`. The worker is replaced if it does not come back.",
    ),
    Reason(
        "Degraded",
        ("Recovering",),
        "Nothing is wrong any more, but the job does not have all of its workers yet. The message ends with "
        "the last problem.",
        "Wait.",
    ),
    Reason(
        "Degraded",
        ("ImagePullFailed",),
        "A node cannot pull the image.",
        "Correct `image`, or the pull secrets in the template. The pod is then replaced.",
    ),
    Reason(
        "Degraded",
        ("QuotaExceeded",),
        "A ResourceQuota refuses a pod.",
        "Raise the quota. The operator tries again every 15 s.",
    ),
    Reason(
        "Degraded", ("Forbidden",), "Admission or RBAC refuses an object of the job.", "Read the message."
    ),
    Reason("Degraded", ("NamespaceTerminating",), "The namespace is being deleted, and the job with it."),
    Reason(
        "Degraded",
        ("NameTaken",),
        "An object of that name belongs to something else, or to an earlier job that is being deleted. "
        "If the name is that of the volume claim, no parameter server and no standby starts.",
        "Wait, or rename the job.",
    ),
    Reason(
        "Degraded",
        ("CheckpointsGone",),
        "The job's volume claim was deleted, and its checkpoints with it. The operator creates nothing "
        "meanwhile.",
        "Delete the job and create it again: with `existingClaim` if there is a copy of the claim, such as a "
        "snapshot, or unchanged to train from scratch.",
    ),
    Reason(
        "Degraded",
        ("RoleTooOld",),
        "The operator's Role lacks a permission that this version needs to annotate a Service or a pod, or "
        "to keep the claim of an earlier job, which is then deleted with that job. Training goes on.",
        "Upgrade the chart together with the image. The operator tries again after 10 minutes.",
    ),
    Reason(
        "Degraded",
        ("OutOfMemory",),
        "A container was killed at its memory limit.",
        "Raise the limit in the template. Pods that do not run get it at once, except a PS that would lose "
        "its checkpoints: ask for a restart (`elastic-ps.dev/restartedAt`), which starts from scratch.",
    ),
    Reason(
        "Degraded",
        ("WorkerFailed", "WorkerCrashed", "WorkerKilled", "WorkerLeft", "WorkerHung", "Lost"),
        "A worker is being replaced. The reason may also be one of Kubernetes, such as `Evicted`.",
        "Read the message, and `kubectl logs` while the pod exists.",
    ),
    Reason(
        "Degraded",
        ("ModelLost",),
        "A worker is being replaced because the parameter server was lost with its checkpoints. Training "
        "begins again from the start.",
        "Set `checkpoint.volumeClaim` in the next job.",
    ),
    Reason(
        "Degraded",
        ("ServerSilent",),
        "A worker is being replaced because the parameter server did not answer it for 15 minutes. Nothing "
        "is lost.",
        "Look at the parameter server, and at the network between the two.",
    ),
    Reason(
        "Degraded",
        ("CrashLoop",),
        "A parameter server keeps crashing.",
        "See `kubectl logs NAME-ps-0 --previous`.",
    ),
    Reason(
        "Degraded",
        ("StandbyNotFollowing",),
        "A standby does not have every version, although the job has run for 30 s. If its parameter server "
        "is lost now, the job goes back to the last checkpoint.",
        "Wait. See `kubectl logs NAME-standby-0`, and the warnings in `kubectl logs NAME-ps-0`.",
    ),
    Reason(
        "Degraded",
        ("CertificatesRefused",),
        "The operator cannot issue certificates: its Secret is missing or wrong, a quota or RBAC forbids the "
        "job's Secrets, or an object of another owner has the name of one.",
        "Read the message. The operator tries again every 15 s.",
    ),
    Reason(
        "Degraded",
        ("NoAnswer",),
        "The parameter server has not answered the operator for 30 s, although it is ready or all workers "
        "are done. The operator does not know how far the training is: the job cannot succeed, and no "
        "evaluator starts.",
        "Look at its pod. Let the operator reach its port 8080 (NetworkPolicy, service mesh).",
    ),
    Reason(
        "Degraded",
        ("NotStarting",),
        "A pod has had a node for 90 s, and none of its containers has started: a large image is being "
        "pulled, or a volume, a Secret or a ConfigMap is missing.",
        "See `kubectl describe pod`.",
    ),
    Reason(
        "Degraded",
        ("FinalizerRemains",),
        "A pod was deleted a minute ago, but a finalizer keeps it, so the operator cannot replace it. (A "
        "worker gets another index meanwhile, unless it has a fixed share of the records.)",
        "Find out what has set the finalizer.",
    ),
    Reason("Degraded", ("CannotStart",), "A container cannot be created.", "Correct the template."),
    Reason(
        "Degraded",
        ("ParameterServerProblem",),
        "The parameter server reports a problem, and goes on or waits: the disk is full or cannot be read, a "
        "checkpoint is damaged, and so on.",
        "Read the message.",
    ),
    Reason(
        "Degraded",
        ("ChangeRefused",),
        "The parameter server refuses a change of `consistency` or `compression`. The job goes on without "
        "the change.",
        "Read the message, and correct the spec.",
    ),
    Reason(
        "Degraded",
        ("Refused",),
        "A webhook or the API server refuses an action of the operator.",
        "Read the message. The operator tries again every 15 s.",
    ),
    Reason(
        "Degraded",
        ("SpecNotFollowed", "InvalidSpec"),
        "An edit cannot be applied, the API server or a policy refuses a pod made from it, or a template is "
        "no longer permitted. The job keeps its last valid spec, except that it is suspended or resumed as "
        "the edit says, and gets no new pods from templates that are not permitted. If the operator knows no "
        "valid spec (for example because it was too long to store), it leaves the job alone.",
        "Correct the spec, or the policy.",
    ),
    Reason("Degraded=False", ("AsAsked",), "Everything that the spec asks for exists or is starting."),
    Reason(
        "Diverged",
        ("LossNotFinite", "LossFarAboveBest", "LossNoBetter"),
        "The loss that scripts report shows that the model learns nothing. The job goes on.",
        "Read the message: it names what to change.",
    ),
    Reason("Diverged=False", ("NotFound",), "The model learns again."),
    Reason(
        "Suspended=False",
        ("Stopping",),
        "The workers leave. Then the parameter servers write a checkpoint and end.",
        "Wait.",
    ),
    Reason("Suspended=False", ("Resumed",), "The job runs again."),
    Reason(
        "Suspended",
        ("Suspended",),
        "The job has no pods.",
        """`kubectl patch tj NAME --type merge -p '{"spec":{"runPolicy":{"suspend":false}}}'` resumes it.""",
    ),
    Reason("Succeeded", ("Finished",), "Every record of every epoch is in the model."),
    Reason(
        "Succeeded",
        ("StoppedEarly",),
        "A script called `session.stop(reason)`. The message has the reason.",
    ),
    Reason(
        "Failed",
        ("InvalidSpec",),
        "The spec cannot be run, or the API server refuses a pod made from it before the job has "
        "made a version.",
        "Correct the spec. The operator tries again.",
    ),
    Reason(
        "Failed",
        ("InvalidJob",),
        "A process ended with exit status 78 before the first step, or did so on two nodes.",
        "Read the message, and create a new job.",
    ),
    Reason(
        "Failed",
        ("PodFailurePolicy",),
        "A rule of `runPolicy.podFailurePolicy` ends the job.",
        "Read the message.",
    ),
    Reason(
        "Failed",
        ("BackoffLimitExceeded",),
        "Processes failed more than `backoffLimit` times. The message begins with the cause of the last "
        "failure.",
        "Correct what was wrong, and restart the job. It starts from scratch if it has no volume claim.",
    ),
    Reason(
        "Failed",
        ("Diverged",),
        "The model learns nothing, and `runPolicy.onDivergence` is `stop`.",
        "Read the message and change what it names. Then restart the job, or create a new one.",
    ),
    Reason(
        "Failed",
        ("DeadlineExceeded",),
        "The job ran for `activeDeadlineSeconds`. Suspended time does not count.",
        "Raise the limit, and restart the job. It starts from scratch if it has no volume claim.",
    ),
    Reason(
        "Failed",
        ("RecordsLeft",),
        "Every worker, or one with a fixed share of the records, came to the end of its script, but some "
        "records were not trained.",
        "Call `session.stop(reason)` before leaving the loader's loop early.",
    ),
    Reason(
        "Failed",
        ("NotOnDisk",),
        "The training is done, but its last version could not be written within 10 minutes after the end of "
        "the last worker, or within 20 s if the parameter server has a problem.",
        "Make room on the volume, and restart the job. It continues from the newest version that is there. "
        "It starts from scratch if it has no volume claim.",
    ),
    Reason(
        "Failed",
        ("ModelLost",),
        "The parameter server was lost with its checkpoints when all workers were done, before it had said "
        "that all records are in the model.",
        "Set `checkpoint.volumeClaim`, and create a new job.",
    ),
    Reason("Failed=False", ("StartedAgain",), "The job was corrected or restarted, and starts again."),
    Reason("Running=False", ("Succeeded", "Failed", "Suspended"), "The job is over, or suspended."),
)

EVENTS = (
    Reason(
        "Normal", ("Created", "Deleted"), "The operator has created or deleted objects. The message says why."
    ),
    Reason(
        "Normal",
        ("Running", "Succeeded", "SucceededStoppedEarly", "Suspended"),
        "The condition has turned True.",
    ),
    Reason(
        "Warning",
        ("DegradedREASON", "DivergedREASON", "FailedREASON"),
        "The condition has turned True, or its reason has changed. REASON is the condition's reason, as in "
        "`DegradedUnschedulable`. The end of a pod gets only one Event.",
    ),
    Reason("Normal", ("Recovered",), "The job is not Degraded any more."),
    Reason(
        "Warning",
        ("WorkerFailed", "WorkerCrashed", "WorkerKilled", "WorkerLeft", "WorkerHung", "OutOfMemory", "Lost"),
        "A pod has ended, and is counted in `status.worker`. Other reasons of Degraded, and those of "
        "Kubernetes such as `Evicted`, are possible, too.",
    ),
    Reason(
        "Warning",
        ("ModelLost",),
        "A parameter server was lost with its checkpoints. Training begins again from the start.",
    ),
    Reason(
        "Warning",
        ("RolledBack",),
        "The parameter server was lost, or with all-reduce every worker that had the newest version. "
        "Training continues from the newest version that was kept.",
    ),
    Reason(
        "Normal",
        ("ConsistencyChanged", "CompressionChanged"),
        "Another consistency or compression is in force. The message names the new one and the old one.",
    ),
    Reason("Normal", ("Evaluated",), "The evaluator has evaluated a version. The message has its metrics."),
    Reason(
        "Warning",
        ("EvaluationMissed",),
        "A checkpoint will not be evaluated: the evaluator is too slow, or has failed on it.",
    ),
)
