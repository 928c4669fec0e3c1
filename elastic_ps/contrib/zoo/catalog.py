"""The networks and data sets by name. torch is only imported when one is built or read.

Names ignore case, hyphens and underscores: `ResNet-18` and `resnet18` are the same network.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from elastic_ps.errors import UserError

MNIST_PAGE = "https://yann.lecun.com/exdb/mnist"
CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
"""The addresses of the files."""

Kind: TypeAlias = Literal["image", "text", "table"]
"""The kind of a record: an image with a class; a piece of text; a row of a table with categories."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network that can be built by name.

    Attributes:
        name: its name in lists and messages.
        kind: the kind of its records.
        place: its class, as module:Class.
        options: keyword arguments of the class for this network.
    """

    name: str
    kind: Kind
    place: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **facts: Any) -> Any:
        """A new `torch.nn.Module`.

        Args:
            facts: facts about the data. For an image: size (height and width in pixels), channels, classes.
            For text:
                vocabulary, context (both in tokens). For a table: fields, the number of categories of each.

        Raises:
            InvalidModel: the network cannot take such records.
        """
        return _load(self.place)(**self.options, **facts)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that can be read by name.

    Attributes:
        name: its name in lists and messages.
        kind: the kind of its records.
        place: the function that reads it, as module:function.
        classes: the number of classes; for text, the number of tokens.
        directory: the default directory of its files; None if it needs none.
        needs: its files, in words.
        page: the address of the files; None if they have none.
    """

    name: str
    kind: Kind
    place: str
    classes: int
    directory: Path | None
    needs: str
    page: str | None = None

    def read(self, directory: Path | None) -> tuple[Any, Any]:
        """The training set and the test set, as map-style torch data sets. Blocks for reading the files.

        Args:
            directory: the directory of the files; None for `self.directory`.

        Raises:
            UserError: a file is missing, truncated or of another kind, or the data set has no files to look
                for.
        """
        place = self.check_place(directory)
        training, test = _load(self.place)() if place is None else _load(self.place)(place)
        return training, test

    def check_place(self, directory: Path | None) -> Path | None:
        """The directory of the files, which must exist; None if the data set has no files.

        Raises:
            UserError: it does not exist, or the data set has no files to look for.
        """
        if self.directory is None:
            if directory is None:
                return None
            raise UserError(
                f"the data set {self.name} has no files to look for in {directory}: {self.needs}. Leave the "
                "directory out"
            )
        place = self.directory if directory is None else directory
        if not place.exists():
            source = "" if self.page is None else f". They come from {self.page}"
            raise UserError(
                f"{place} does not exist; expected the files of {self.name}: {self.needs}{source}"
            )
        return place


def _of_depth(kind: str, depth: int) -> Network:
    place = f"elastic_ps.contrib.models.{kind.lower()}:{kind}"
    return Network(name=f"{kind}{depth}", kind="image", place=place, options={"depth": depth})


NETWORKS: Sequence[Network] = (
    Network(name="LeNet", kind="image", place="elastic_ps.contrib.models.lenet:LeNet"),
    *(_of_depth("ResNet", depth) for depth in (18, 32, 34, 50, 101, 110, 152)),
    *(_of_depth("VGG", depth) for depth in (11, 13, 16, 19)),
    Network(name="GPT", kind="text", place="elastic_ps.contrib.models.gpt:GPT"),
    Network(name="WideDeep", kind="table", place="elastic_ps.contrib.models.tables:WideDeep"),
    Network(name="DeepFM", kind="table", place="elastic_ps.contrib.models.tables:DeepFM"),
)
DATA_SETS: Sequence[DataSet] = (
    DataSet(
        name="digits",
        kind="image",
        place="elastic_ps.contrib.datasets.digits:digits",
        classes=10,
        directory=None,
        needs="scikit-learn ships them",
    ),
    DataSet(
        name="MNIST",
        kind="image",
        place="elastic_ps.contrib.datasets.mnist:mnist",
        classes=10,
        directory=Path("mnist_data"),
        needs="four IDX files, packed by gzip or not",
        page=MNIST_PAGE,
    ),
    *(
        DataSet(
            name=f"Cifar{classes}",
            kind="image",
            place=f"elastic_ps.contrib.datasets.cifar:cifar{classes}",
            classes=classes,
            directory=Path(f"cifar{classes}_data"),
            needs="its original files, for Python or binary, in this directory or in their folder in it",
            page=CIFAR_PAGE,
        )
        for classes in (10, 100)
    ),
    DataSet(
        name="text",
        kind="text",
        place="elastic_ps.contrib.datasets.text:text",
        classes=256,
        directory=Path("text_data"),
        needs="a file, or a directory with files *.txt",
    ),
)

TRAINED: Sequence[Network] = [each for each in NETWORKS if any(each.kind == data.kind for data in DATA_SETS)]
"""The networks that are trained on one of these data sets."""

_Named = TypeVar("_Named", Network, DataSet)


def find_network(name: str) -> Network:
    """The network of this name. Raises UserError, which lists the names and says which is the nearest."""
    return _find(name, NETWORKS, TRAINED, "network")


def find_dataset(name: str) -> DataSet:
    """The data set of this name. Raises UserError, which lists the names and says which is the nearest."""
    return _find(name, DATA_SETS, DATA_SETS, "data set")


def check_fit(network: Network, dataset: DataSet) -> None:
    """Raise UserError unless the network is trained on records of the data set's kind."""
    if network.kind == dataset.kind:
        return
    fitting = [other.name for other in DATA_SETS if other.kind == network.kind]
    told = "none of the zoo's data sets fits it"
    if fitting:
        told = f"{network.name} is trained on {', '.join(fitting)}"
    hint = "" if fitting else f"; build it in a script of your own, with {network.place.replace(':', '.')}"
    raise UserError(
        f"the network {network.name} takes records of kind {network.kind}, and the data set {dataset.name} "
        f"has records of kind {dataset.kind}; {told}{hint}"
    )


def _find(name: str, known: Sequence[_Named], listed: Sequence[_Named], what: str) -> _Named:
    by_key = {_key(each.name): each for each in known}
    if found := by_key.get(_key(name)):
        return found
    near = difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.5)
    hint = f"did you mean {by_key[near[0]].name}? There" if near else "there"
    names = ", ".join(each.name for each in listed)
    raise UserError(f"there is no {what} {name!r}; {hint} are: {names}")


def _key(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
