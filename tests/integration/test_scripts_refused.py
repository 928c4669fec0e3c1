"""What a script cannot do is refused with a sentence that helps."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from elastic_ps.errors import ElasticPSError, InvalidModel, ModelMismatch, UsageError
from elastic_ps.worker.model.checks import left_over
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import (
    MakeOptimizer,
    assert_each_record_once,
    mse,
)
from tests.testing.trained import (
    MakeModel,
    adam,
    alone,
    failing,
    sgd,
)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("change", ["add", "load", "assign", "swap", "remove"])
def test_other_parameter_groups(tmp_path: Path, change: str, several: bool) -> None:
    """The job would never train what is added, or use rates that are changed in what was loaded or assigned.

    It would go on training what was removed.
    """

    def script(session: Session) -> None:
        model = make_mlp()
        wrapped = torch.optim.SGD(model[0].parameters(), lr=0.02)
        optimizers = {"first": wrapped, "last": adam(model[4])}
        optimizer = session.optimizer(optimizers if several else wrapped, model)
        for step, (x, y) in enumerate(session.loader(Numbers(20), 4)):
            if step == 2 and change == "add":
                wrapped.add_param_group({"params": list(model[2].parameters())})
            elif step == 2 and change == "load":
                wrapped.load_state_dict(wrapped.state_dict())
            elif step == 2 and change == "assign":
                optimizer.param_groups = [{**group} for group in optimizer.param_groups]
            elif step == 2 and change == "swap":
                optimizer.param_groups[0]["params"] = list(model[2].parameters())
            elif step == 2:
                del optimizer.param_groups[0]["params"][0]
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            assert step < 2

    failing(tmp_path, script, UsageError, "the parameter groups are no longer those that")


def test_a_parameter_group_is_added_before_the_worker_joins_again(tmp_path: Path) -> None:
    """The settings that it gets then have fewer groups than its optimizer."""

    def script(session: Session) -> None:
        model = make_mlp()
        wrapped = sgd(model[0])
        optimizer = session.optimizer(wrapped, model)
        for step, (x, y) in enumerate(session.loader(Numbers(20), 4)):
            assert step < 2
            mse(model, x, y).backward()
            optimizer.step()
            if step == 1:
                wrapped.add_param_group({"params": list(model[2].parameters())})
                job.declare_gone(session.worker)

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.start(0, script)
        with pytest.raises(UsageError, match="the parameter groups are no longer those that"):
            job.join()


def forget(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if "momentum_buffer" in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"].zero_()


RESETS: dict[str, Callable[[Any], object]] = {
    "assigned": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "cleared": lambda optimizer: optimizer.state.clear(),
    "zeroed": forget,
    "all zeroed": lambda optimizer: [each["momentum_buffer"].zero_() for each in optimizer.state.values()],
}


@pytest.mark.parametrize("mode", ["sync", "local"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("reset", RESETS.values(), ids=list(RESETS))
def test_the_optimizers_state_is_reset_where_it_is(
    tmp_path: Path, reset: Callable[[Any], object], several: bool, mode: str
) -> None:
    """On the parameter server it cannot be, and that is no secret."""
    model, plain = make_mlp(), make_mlp()
    batches = list[Any]()

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: Iterable[Any]) -> None:
        for step, (x, y) in enumerate(given):
            batches.append((x, y))
            if step == 3:
                reset(optimizer)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def script(session: Session) -> None:
        wrapped = sgd(model)
        optimizer = session.optimizer({"only": wrapped} if several else wrapped, model)
        train(model, optimizer["only"] if several else optimizer, session.loader(Numbers(20), 4))

    if mode == "sync":
        failing(tmp_path, script, UsageError, "the optimizer's state is on the parameter server")
        return
    alone(tmp_path, script, consistency={"mode": "local", "steps": 5, "outer": "average"})
    train(plain, sgd(plain), list(batches))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs)


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """As prefetchers do: a batch is copied to the device while the one before it is trained."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@pytest.mark.parametrize("wrap", [one_ahead, itertools.cycle])
def test_a_step_after_the_end_of_the_loop(tmp_path: Path, wrap: Callable[[Any], Iterator[Any]]) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in wrap(session.loader(Numbers(20), 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, "step of a batch before you load the next one; DataLoader")


def test_clipping_is_refused_with_overlap_and_works_without(tmp_path: Path) -> None:
    def script(session: Session, *, overlap: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            (100 * mse(model, x, y)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            if session.version == 1:
                moved = torch.cat(
                    [(a - b).detach().reshape(-1) for a, b in zip(before, model.parameters(), strict=True)]
                )
                assert float(moved.norm()) == pytest.approx(0.02 * 0.1, rel=1e-3)

    match = "use session.optimizer.*max_grad_norm=.*overlap=False"  # only the first is what torch does
    failing(tmp_path / "a", lambda s: script(s, overlap=True), UsageError, match)
    alone(tmp_path / "b", lambda s: script(s, overlap=False))


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            mse(model, x, y).backward()
            mse(model, x, y).backward()

    failing(tmp_path, script, UsageError, "no_sync")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_step_with_a_batch_is_told_what_to_do(tmp_path: Path, overlap: bool) -> None:
    """As of two networks that share an optimizer."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for x, y in session.loader(Numbers(20), batch_size=4):
            for _ in range(2):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

    failing(tmp_path, script, UsageError, r'has had its step, .*one step only.* "One model, one or')


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_loop_around_the_loop_over_the_loader_is_refused(tmp_path: Path, accumulated: int) -> None:
    """Where it begins again: the first time has trained all epochs, also if the last step comes after it."""
    begun = 0

    def script(session: Session) -> None:
        nonlocal begun
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        loader = session.loader(Numbers(40), batch_size=4, epochs=2)
        for _ in range(2):
            begun += 1
            for number, (x, y) in enumerate(loader, start=1):
                mse(model, x, y).backward()
                if number % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if accumulated > 1:
                optimizer.step()
                optimizer.zero_grad()

    failing(tmp_path, script, UsageError, r"for epoch in loader\.epochs\(\)` instead of")
    assert begun == 2


def test_a_loop_after_the_training_was_stopped_is_refused(tmp_path: Path) -> None:
    """No loop has trained all epochs then."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(Numbers(40), batch_size=4)
        for _ in range(2):
            for x, y in loader:
                mse(model, x, y).backward()
                optimizer.step()
                session.stop("it is good enough")

    failing(tmp_path, script, UsageError, "one loop .* trains all epochs, and that loop has ended")


def test_a_batch_from_elsewhere_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model, data = make_mlp(), Numbers(40)
        optimizer = session.optimizer(sgd(model), model)
        mse(model, data.x, data.y).backward()
        optimizer.step()

    failing(tmp_path, script, UsageError, "session.loader")


def test_a_backward_without_a_step_needs_no_batch(tmp_path: Path) -> None:
    """As for saliency maps, or adversarial examples of an evaluation, while training and afterwards."""

    def script(session: Session) -> None:
        model, data = make_mlp(), Numbers(40)
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            mse(model, data.x, data.y).backward()
        mse(model, data.x, data.y).backward()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == 40


def test_a_batch_whose_iterator_is_gone_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        x, y = next(iter(session.loader(Numbers(40), 4)))
        mse(model, x, y).backward()
        optimizer.step()

    failing(tmp_path, script, UsageError, "keep the iterator")


class MySGD(torch.optim.SGD):
    """A subclass, whose step could be anything."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def frozen() -> torch.nn.Module:
    return make_mlp().requires_grad_(False)


def empty() -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3)))
    return model


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """As one that has been made, which needs a process group."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.module = make_mlp()


class _FabricModule(torch.nn.Sequential):
    """Stands for Lightning's, which is told by its name."""

    __module__ = "lightning.fabric.wrappers"


class LightningModule(torch.nn.Sequential):
    """Stands for Lightning's, which is told by its name."""

    __module__ = "pytorch_lightning.core.module"
    _trainer: object = None


class AcceleratedOptimizer(torch.optim.SGD):
    """Stands for accelerate's, which is told by its name."""

    __module__ = "accelerate.optimizer"
    optimizer = None


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make_model", "make", "match"),
    [
        (
            make_mlp,
            lambda m: torch.optim.LBFGS(m.parameters()),
            "LBFGS cannot run .* use one of .* SGD, Adam.*mode: local",
        ),
        (make_mlp, lambda m: MySGD(m.parameters(), lr=0.1), "MySGD.* no subclasses"),
        (frozen, sgd, "no trainable parameter"),
        (empty, sgd, "no trainable parameter"),
        (make_mlp, lambda m: torch.optim.SGD(make_mlp().parameters(), lr=0.1), "not parameters of the model"),
        (lambda: torch.nn.LazyLinear(3), sgd, "weight is lazy .* once on a batch"),
        (lambda: torch.nn.Linear(3, 3, device="meta"), sgd, "meta device"),
        (make_mlp, lambda m: AcceleratedOptimizer(m.parameters(), lr=0.1), "before accelerator.prepare"),
        (Wrapped, sgd, "wrapped in torch's Wrapped.* Leave out the wrapper and init_process_group"),
        (lambda: _FabricModule(torch.nn.Linear(3, 3)), sgd, r"_FabricModule.* before fabric\.setup"),
    ],
)
def test_what_cannot_be_trained(
    tmp_path: Path, make_model: MakeModel, make: MakeOptimizer, match: str
) -> None:
    def script(session: Session) -> None:
        model = make_model()
        session.optimizer(make(model), model)

    failing(tmp_path, script, InvalidModel, match)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (Stream(), r'stream without a length.*"Streams" in docs/guides/data\.md'),
        (TensorDataset(torch.zeros(0, 2)), "empty"),
        (DataLoader(Stream()), "stream without a length"),
    ],
)
def test_data_that_cannot_be_handed_out(tmp_path: Path, source: Any, match: str) -> None:
    def script(session: Session) -> None:
        session.loader(source, None if isinstance(source, DataLoader) else 4)

    failing(tmp_path, script, InvalidModel, match)


def test_a_second_optimizer_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.optimizer(sgd(model), model)

    failing(tmp_path, script, UsageError, 'a job trains one model.*"Two networks in turn" in docs')


def test_a_model_that_moved_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            model.double()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()

    failing(tmp_path, script, ElasticPSError, "session.optimizer")


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    def script(session: Session, records: int) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for _ in session.loader(Numbers(records), 4):
            break

    with running_job(tmp_path) as job:
        job.start(0, lambda s: script(s, 40))
        job.join()
        job.start(1, lambda s: script(s, 41))
        with pytest.raises(InvalidModel, match=r"41 records .* 40 records"):
            job.join()


def test_a_worker_with_another_model_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    data = Numbers(120)
    refusals: list[str] = []
    once = threading.Lock()  # whoever comes to it first: the other one may have no records any more

    def good(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            if session.version >= 5 and once.acquire(blocking=False):
                job.start(2, bad)
                job.until(lambda: bool(refusals), "the other model is refused")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def bad(session: Session) -> None:
        model = make_mlp((6, 16, 17, 1))
        try:
            session.optimizer(adam(model), model)
        except ModelMismatch as error:
            refusals.append(str(error))

    with running_job(tmp_path) as job:
        job.run(good, workers=2)
        assert_each_record_once(job.commits(), records=120, epochs=1)
    for part in ("2.weight", "[17, 16]", "[16, 16]", "4.weight", "Adam", "SGD"):
        assert part in refusals[0]


def replace(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    parameter.grad = gradient.clamp(-0.1, 0.1)


def change_data(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    gradient.data.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize(("change", "check"), [(replace, False), (change_data, True)])
def test_gradients_that_change_after_they_were_sent(tmp_path: Path, change: Any, check: bool) -> None:
    """Through `.data` it is noticed only if values are compared."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, check_gradients=check)
        for x, y in session.loader(Numbers(8), 4):
            mse(model, x, y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                change(parameter.grad, parameter)
            optimizer.step()

    failing(tmp_path, script, UsageError, "changed or replaced between backward")


def test_an_optimizer_whose_result_is_not_used_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = sgd(model)
        session.optimizer(optimizer, model)
        for x, y in session.loader(Numbers(8), 4):
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, r"Call it on the optimizer that session\.optimizer")


def scaling(scaler: torch.amp.GradScaler) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(20), 4):
            optimizer.zero_grad()
            scaler.scale(mse(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return script


def test_a_grad_scaler_is_refused_with_overlap(tmp_path: Path) -> None:
    """What it does to gradients leaves their version counters as they are."""
    script = scaling(torch.amp.GradScaler("cpu", init_scale=8.0))
    failing(tmp_path, script, UsageError, "a GradScaler divides gradients .* overlap=False")


def test_a_grad_scaler_that_does_nothing_is_not(tmp_path: Path) -> None:
    assert len(alone(tmp_path, scaling(torch.amp.GradScaler("cpu", enabled=False)))) == 5


class Ending(Dataset[torch.Tensor]):
    """Asks for the next of its items, of which there are too few."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(iter([torch.ones(1)] if index < 17 else []))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_record_that_ends_torchs_loop_is_no_end_of_the_data(tmp_path: Path, processes: int) -> None:
    """The job would wait for ever: the records were handed out."""

    def script(session: Session) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = session.optimizer(sgd(model), model)
        for batch in session.loader(Ending(), 4, num_workers=processes):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, "StopIteration was raised while.*Ending, a transform or collate_fn")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 64, "drop_last": True}, "has 20 records, fewer than the 64 of a batch"),
        ({"batch_size": 8.0}, r"batch_size is 8\.0; expected a whole number"),
        ({"batch_size": "8"}, "batch_size is '8'; expected a whole number"),
        ({"batch_size": 8, "shufle": True}, "got the option shufle, which neither it nor a DataLoader has"),
        ({"batch_size": 4, "epochs": 1.5}, r"epochs is 1\.5; expected a whole number"),
    ],
)
def test_batches_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.loader(Numbers(20), **arguments)

    failing(tmp_path, script, UsageError, match)


def test_shares_without_a_whole_batch(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.loader(Numbers(20), 8, drop_last=True)

    match = "a share of the data set has 6 records, fewer than the 8 of a batch"
    shared: dict[str, Any] = {"consistency": {"deterministic": True}, "worker": {"replicas": 3}}
    failing(tmp_path, script, UsageError, match, **shared)


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        given: Any = model
        optimizer: Any = sgd(model)
        with pytest.raises(
            UsageError, match=r"takes a torch optimizer, .* the first argument is a Sequential"
        ):
            session.optimizer(given, model)
        with pytest.raises(UsageError, match=r"a torch.nn.Module as its second argument, not a SGD"):
            session.optimizer(given, optimizer)
        for own in ([model], 3, iter(["0.weight"])):
            with pytest.raises(InvalidModel, match="expected a list of names of modules or tensors"):
                session.optimizer(optimizer, model, own=cast("Any", own))
        session.optimizer(optimizer, model)
        with pytest.raises(UsageError, match="got the class Numbers; expected an instance"):
            session.loader(Numbers, 4)
        with pytest.raises(UsageError, match=r"takes a learning-rate scheduler, .* got Sequential"):
            session.scheduler(given, interval="step")
        other = torch.optim.lr_scheduler.StepLR(sgd(make_mlp()), 1)
        with pytest.raises(UsageError, match="the StepLR belongs to another optimizer"):
            session.scheduler(other, interval="step")
        session.stop("that was all")

    alone(tmp_path, script)


@pytest.mark.parametrize("when", ["before", "later"])
def test_the_loop_of_a_lightning_trainer_is_refused_before_it_trains(tmp_path: Path, when: str) -> None:
    """Workers' epochs have different numbers of batches. Without a Trainer it is a model as others."""

    def script(session: Session) -> None:
        model = LightningModule(*make_mlp())
        model._trainer = object() if when == "before" else None  # noqa: SLF001  as Lightning does
        optimizer = session.optimizer(sgd(model), model)
        assert when == "later"
        for x, y in session.loader(Numbers(4), 4):
            mse(model, x, y).backward()
            optimizer.step()
        model._trainer = object()  # noqa: SLF001  as Lightning does
        next(iter(session.loader(Numbers(4), 4)))

    failing(tmp_path, script, UsageError, r"loop over the data is Lightning's.* session\.loader")


def test_what_a_script_for_torchrun_gets_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK") as group:
        torch.distributed.init_process_group("gloo")
    with pytest.raises((ValueError, RuntimeError)) as wrapped:
        torch.nn.parallel.DistributedDataParallel(make_mlp())
    for error in (group.value, wrapped.value):
        assert "leave out init_process_group and DistributedDataParallel" in left_over(error)
    assert left_over(ValueError("another one")) == ""
