"""The networks of the zoo: their sizes are those that were published, and they learn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ps.contrib.models import GPT, VGG, DeepFM, LeNet, ResNet, WideDeep, ids_for
from elastic_ps.contrib.models.tables import ids_of_fields, interactions
from elastic_ps.contrib.zoo.catalog import DATA_SETS, NETWORKS, check_fit, find_dataset, find_network
from elastic_ps.contrib.zoo.train import build
from elastic_ps.embedding import FTRL, Adagrad
from elastic_ps.embedding.module import Embedding
from elastic_ps.embedding.tables import LocalTables
from elastic_ps.errors import InvalidModel, UserError

IMAGENET: dict[str, Any] = {"size": 224, "classes": 1000}
PUBLISHED = {
    # LeCun et al. 1998 count 60,000, without the output layer, with factors and biases of the two
    # subsampling layers (12 and 32), and with 60 of the 96 pairs of maps in the second convolution
    "lenet5": (LeNet, {}, 60_000 - 12 - 32 + 36 * 25 + 10 * 85),
    # torchvision's documentation of its models for ImageNet
    "resnet18": (ResNet, {"depth": 18, **IMAGENET}, 11_689_512),
    "resnet34": (ResNet, {"depth": 34, **IMAGENET}, 21_797_672),
    "resnet50": (ResNet, {"depth": 50, **IMAGENET}, 25_557_032),
    "resnet101": (ResNet, {"depth": 101, **IMAGENET}, 44_549_160),
    "resnet152": (ResNet, {"depth": 152, **IMAGENET}, 60_192_808),
    "vgg11_bn": (VGG, {"depth": 11, **IMAGENET}, 132_868_840),
    "vgg13_bn": (VGG, {"depth": 13, **IMAGENET}, 133_053_736),
    "vgg16_bn": (VGG, {"depth": 16, **IMAGENET}, 138_365_992),
    "vgg19_bn": (VGG, {"depth": 19, **IMAGENET}, 143_678_248),
    # GPT-2's smallest, of 124 million
    "gpt2": (
        GPT,
        {"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
        124_439_808,
    ),
}
CIFAR = {
    # He et al., table 6, in millions: without parameters in the shortcuts
    "ResNet32": 0.46,
    "ResNet110": 1.7,
    # the others are ImageNet's with a 3 x 3 first layer and ten classes
    "ResNet18": (11_689_512 - 64 * 3 * (49 - 9) - 990 * 513) / 1e6,
    "ResNet34": (21_797_672 - 64 * 3 * (49 - 9) - 990 * 513) / 1e6,
    "ResNet50": (25_557_032 - 64 * 3 * (49 - 9) - 990 * 2049) / 1e6,
    "ResNet101": (44_549_160 - 64 * 3 * (49 - 9) - 990 * 2049) / 1e6,
    "ResNet152": (60_192_808 - 64 * 3 * (49 - 9) - 990 * 2049) / 1e6,
    # ImageNet's convolutions, and three layers of 512, 512 and 10 units
    "VGG11": (132_868_840 - 123_642_856 + 2 * 512 * 513 + 10 * 513) / 1e6,
    "VGG13": (133_053_736 - 123_642_856 + 2 * 512 * 513 + 10 * 513) / 1e6,
    "VGG16": (138_365_992 - 123_642_856 + 2 * 512 * 513 + 10 * 513) / 1e6,
    "VGG19": (143_678_248 - 123_642_856 + 2 * 512 * 513 + 10 * 513) / 1e6,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small tensors are computed many times as fast on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_network_has_as_many_parameters_as_was_published(name: str) -> None:
    kind, options, parameters = PUBLISHED[name]
    with torch.device("meta"):
        assert count(kind(**options)) == parameters


@pytest.mark.parametrize("name", CIFAR)
def test_a_network_for_small_images_has_as_many_parameters_as_was_published(name: str) -> None:
    with torch.device("meta"):
        model = find_network(name).build(size=32, channels=3, classes=10)
    if name in ("ResNet32", "ResNet110"):
        assert count(model) / 1e6 == pytest.approx(CIFAR[name], rel=0.02)
    else:
        assert count(model) == round(CIFAR[name] * 1e6)


def test_tensors_have_the_names_of_torchvision() -> None:
    """So that its weights for ImageNet load."""
    with torch.device("meta"):
        resnet = ResNet(50, **IMAGENET).state_dict()
        vgg = VGG(11, **IMAGENET).state_dict()
    assert len(resnet) == 320
    assert {"conv1.weight", "bn1.running_mean", "layer3.5.conv3.weight", "layer4.0.downsample.1.bias"} <= set(
        resnet
    )
    assert resnet["fc.weight"].shape == (1000, 2048)
    assert {"features.0.weight", "features.1.running_var", "features.25.bias", "classifier.6.bias"} <= set(
        vgg
    )


@pytest.mark.parametrize(
    ("network", "size"), [("resnet18", 8), ("resnet32", 8), ("resnet50", 8), ("vgg11", 32)]
)
def test_every_part_of_a_network_is_trained(network: str, size: int) -> None:
    model = find_network(network).build(size=size, channels=1, classes=3)
    model(torch.randn(2, 1, size, size)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_large_image_is_halved_five_times() -> None:
    model = ResNet(18, size=64, classes=7)
    seen = []
    model.get_submodule("layer4").register_forward_hook(lambda _module, _given, made: seen.append(made.shape))
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert seen == [(2, 512, 2, 2)]


def test_a_shortcut_without_parameters_keeps_what_it_can() -> None:
    """With its convolutions at zero, a block of ResNet-32 passes on every second pixel, between zeros."""
    block = ResNet(32).get_submodule("layer2.0")
    for name in ("bn1", "bn2"):
        torch.nn.init.zeros_(block.get_parameter(f"{name}.weight"))
    images = torch.rand(1, 16, 4, 4)
    made = block(images)
    assert made.shape == (1, 32, 2, 2)
    assert torch.equal(made[:, 8:24], images[:, :, ::2, ::2])
    assert not made[:, :8].any()
    assert not made[:, 24:].any()


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=11, context=6, width=16, layers=2, heads=2)
    text = torch.randint(11, (1, 6))
    other = text.clone()
    other[0, 3] = (other[0, 3] + 1) % 11
    before, after = model(text), model(other)
    assert before.shape == (1, 6, 11)
    assert torch.equal(before[0, :3], after[0, :3])
    assert not torch.equal(before[0, 3:], after[0, 3:])


def test_a_gpt_learns_a_text_by_heart() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=8, context=8, width=32, layers=1, heads=2)
    text = torch.tensor([[0, 3, 1, 3, 2, 3, 7, 5, 6]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:]).backward()
        optimizer.step()
    assert torch.equal(model(text[:, :-1]).argmax(2), text[:, 1:])


def test_the_interactions_of_fields_are_the_products_of_all_pairs() -> None:
    vectors = torch.randn(4, 5, 3, dtype=torch.float64)
    pairs = itertools.combinations(range(5), 2)
    expected = torch.stack([(vectors[:, one] * vectors[:, two]).sum(1) for one, two in pairs]).sum(0)
    assert torch.allclose(interactions(vectors), expected)


@pytest.mark.parametrize("network", ["wide-deep", "DeepFM"])
def test_a_network_for_tables_learns_what_depends_on_two_fields(network: str) -> None:
    torch.manual_seed(0)
    model = find_network(network).build(fields=(2, 3, 2), hidden=(16,))
    rows = torch.tensor(list(itertools.product(range(2), range(3), range(2))))
    labels = (rows[:, 0] + rows[:, 2]) % 2  # neither field alone says anything
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    assert torch.equal(model(rows).argmax(1), labels)


TABLES = {"optimizer": Adagrad(lr=0.1)}


@pytest.mark.parametrize("network", ["wide-deep", "DeepFM"])
def test_a_network_with_tables_that_grow_takes_any_category(network: str) -> None:
    torch.manual_seed(0)
    model = find_network(network).build(fields=2, hidden=(16,), tables=TABLES)
    largest = 2**63 - 1
    rows = torch.tensor([[one, other] for one in (-largest - 1, largest) for other in (0, -5)])
    labels = torch.tensor([0, 1, 1, 0])  # neither field alone says anything
    optimizer, tables = torch.optim.Adam(model.parameters(), lr=0.05), LocalTables(model)
    tables.begin(optimizer.param_groups, lambda: True)
    for step in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        tables.prepare(optimizer.param_groups)
        tables.ended(True, step + 1)
    assert torch.equal(model(rows).argmax(1), labels)
    layers = [each for each in model.modules() if isinstance(each, Embedding)]
    assert [len(each.table) for each in layers] == [4] * len(layers)


def test_the_wide_table_may_have_an_optimizer_of_its_own() -> None:
    model = WideDeep(fields=2, tables=TABLES, wide={"optimizer": FTRL(lr=0.1, l1=1.0)})
    kinds = {m.spec.name: type(m.spec.optimizer) for m in model.modules() if isinstance(m, Embedding)}
    assert kinds == {"wide": FTRL, "deep": Adagrad}
    assert [*ids_for(model, torch.zeros(1, 2, dtype=torch.int64))] == ["wide", "deep"]


def test_a_category_has_another_id_in_each_field() -> None:
    found = ids_of_fields(torch.arange(1000)[:, None].expand(1000, 3))
    assert len(found.unique()) == 3000


def test_the_parameters_of_a_network_for_tables_follow_from_its_fields() -> None:
    fields = (100, 20, 7)
    deep = 3 * 8 * 5 + 5
    assert count(WideDeep(fields=fields, width=8, hidden=(5,))) == 127 * (8 + 2) + deep + 5 * 2 + 2
    assert count(DeepFM(fields=fields, width=8, hidden=(5,))) == 127 * (8 + 1) + deep + 5 + 1


@pytest.mark.parametrize("name", ["ResNet18", "resnet-18", "RESNET_18"])
def test_a_name_is_found_however_it_is_written(name: str) -> None:
    assert find_network(name).name == "ResNet18"


def test_every_network_can_be_built() -> None:
    facts: dict[str, dict[str, Any]] = {"image": {"size": 32}, "text": {}, "table": {"fields": [3, 4]}}
    for network in NETWORKS:
        with torch.device("meta"):
            assert count(network.build(**facts[network.kind]))


SHAPES = {"digits": (1, 8), "MNIST": (1, 28), "Cifar10": (3, 32), "Cifar100": (3, 32)}


@pytest.mark.parametrize("dataset", SHAPES)
@pytest.mark.parametrize("network", ["LeNet", "ResNet18", "ResNet110", "VGG16"])
def test_a_network_is_built_for_the_images_of_a_data_set(dataset: str, network: str) -> None:
    channels, size = SHAPES[dataset]
    records = [(torch.zeros(channels, size, size), 0)]
    data = find_dataset(dataset)
    if network == "VGG16" and size < 32:
        with pytest.raises(InvalidModel, match=f"got {size} x {size}"):
            build(find_network(network), data, records)
        return
    with torch.device("meta"):
        model = build(find_network(network), data, records)
        assert model.eval()(torch.zeros(1, channels, size, size)).shape == (1, data.classes)


def test_a_gpt_is_built_for_pieces_of_text() -> None:
    with torch.device("meta"):
        model = build(find_network("GPT"), find_dataset("text"), [(torch.zeros(128), torch.zeros(128))])
        assert model(torch.zeros(2, 128, dtype=torch.int64)).shape == (2, 128, 256)


def test_an_unknown_name_gives_the_nearest_and_all() -> None:
    with pytest.raises(
        UserError, match=r"no network 'ResNet19'; did you mean ResNet1\S+\? There are: LeNet, ResNet18,"
    ):
        find_network("ResNet19")
    with pytest.raises(UserError, match=r"no network 'xyzzy'; there are: LeNet"):
        find_network("xyzzy")
    with pytest.raises(UserError, match=r"no data set 'digit'; did you mean digits\? There are: digits"):
        find_dataset("digit")


def test_a_network_that_does_not_fit_the_data_is_refused() -> None:
    digits = find_dataset("digits")
    with pytest.raises(
        UserError, match=r"DeepFM takes records of kind table.*elastic_ps\.contrib\.models\.tables\.DeepFM"
    ):
        check_fit(find_network("DeepFM"), digits)
    for dataset in DATA_SETS:
        check_fit(next(network for network in NETWORKS if network.kind == dataset.kind), dataset)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (ResNet, {"depth": 20}, "no ResNet of depth 20 .* there are depths 18, 32, 34, 50, 101, 110, 152"),
        (ResNet, {"depth": 32, "size": 224}, "depth 32 for images of 224 x 224 .* 18, 34, 50, 101, 152"),
        (ResNet, {"depth": 18, "size": 4}, "8 x 8 pixels or more"),
        (VGG, {"depth": 12}, "there are depths 11, 13, 16, 19"),
        (VGG, {"depth": 11, "size": 28}, "needs 32 x 32 pixels or more; got 28 x 28"),
        (GPT, {"width": 10, "heads": 4}, "expected a multiple of heads"),
        (DeepFM, {"fields": []}, "number of categories of each field"),
        (WideDeep, {"fields": [3, 0]}, "number of categories of each field"),
        (WideDeep, {"fields": 3}, "fields is 3, without tables"),
        (DeepFM, {"fields": [3], "tables": TABLES}, r"fields is \[3\], with tables"),
        (LeNet, {"size": 30}, "multiple of 4"),
    ],
)
def test_a_network_that_cannot_be_built_says_why(kind: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        kind(**options)
