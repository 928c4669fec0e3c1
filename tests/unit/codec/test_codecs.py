"""What the codecs promise, and what is refused of what others send."""

from __future__ import annotations

import importlib
import math
import sys
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_ps.api.compression import CODECS, Compression
from elastic_ps.codec.base import Codec, Encoded, Packed, PackedTensor, pack, unpack
from elastic_ps.codec.builtin import TopK
from elastic_ps.codec.lossless import LOSSLESS, Compressed, Plain, Zstd
from elastic_ps.codec.plan import BUILT_IN, Plan, make
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import InvalidJob, Malformed
from tests.testing.defaults import defaults

SHARE = {"bf16": 0.5, "fp16": 0.5, "int8": 0.27, "int4": 0.15, "topk": 0.0101, "signsgd": 0.048}
"""Of the plain bytes, at most, in a large tensor. Those that encode any tensor; `powersgd` needs a matrix."""


UNBIASED = ("int8", "int4")


class Negative(Codec):
    """A user's own."""

    lossless = True

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        state["calls"] = state.get("calls", 0) + 1
        return Encoded({"negative": -tensor}, {"factor": -1})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(encoded.tensors["negative"] * encoded.values["factor"])


class Needy(Negative):
    """A codec that needs a package."""

    def __init__(self) -> None:
        importlib.import_module("no_such_package")


class Heavy(Negative):
    """A user's own, with momentum; whether it keeps what it does not send is its caller's choice."""

    def __init__(self, momentum: Any = 0.9, feedback: bool = False) -> None:
        self.momentum, self.feedback = momentum, feedback


def through(codec: Codec, tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Encoded, packed as it travels, and decoded."""
    random = torch.Generator()
    random.manual_seed(seed)
    before = tensor.clone()
    packed = pack(codec.encode(tensor, {}, random))
    assert torch.equal(tensor, before)
    body = memoryview(b"".join(packed.body))
    assert packed.nbytes == len(body)
    (encoded,) = unpack([packed], body)
    out = torch.full_like(tensor, math.nan)
    codec.decode(encoded, out)
    return out


def error_bound(name: str, tensor: torch.Tensor) -> float:
    """No element changes by more than this. What `topk` and `signsgd` leave out is left over."""
    relative = {"bf16": 2.0**-8, "fp16": 2.0**-10, "int8": (1 + 1e-5) / 127, "int4": (1 + 1e-5) / 7}
    if name in ("topk", "signsgd"):
        return math.inf
    return float(tensor.abs().max()) * relative.get(name, 0.0)


def gradient(elements: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    random = torch.Generator()
    random.manual_seed(seed)
    return torch.randn(elements, generator=random) * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_script_sets_as_defaults_is_not_for_codecs(name: str, dtype: torch.dtype) -> None:
    """The same bytes come; `meta` stands in for a GPU."""

    def encoded(values: torch.Tensor) -> list[bytes]:
        random = torch.Generator("cpu")
        codec: Codec | None = make(name, {})
        assert codec is not None
        if codec.by_piece:
            codec = codec.for_matrix(200, 500)
            assert codec is not None
        return [bytes(part) for part in pack(codec.encode(values, {}, random.manual_seed(1))).body]

    for values in (gradient(100_000, 0), torch.zeros(100_000)):
        plain = encoded(values)
        with defaults(dtype, "meta"):
            assert encoded(values) == plain


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_script_sets_as_defaults_is_not_for_the_share_that_is_sent(codec: str) -> None:
    plan = Plan(Compression.model_validate({"codec": codec, "values": "changed"}))
    usual = plan.sent
    with defaults(torch.float64, "meta"):
        assert plan.sent == usual


@given(
    elements=st.integers(1, 2000),
    seed=st.integers(0, 1 << 30),
    exponent=st.integers(-149, 125),
    spread=st.integers(0, 60),
)
@example(elements=100, seed=0, exponent=-149, spread=0)  # float32's smallest numbers
@example(elements=100, seed=0, exponent=-30, spread=0)  # float16 has none of them
@example(elements=100, seed=0, exponent=-20, spread=0)  # and of these a few digits
@example(elements=100, seed=0, exponent=125, spread=60)
def test_fp16_keeps_the_digits_of_small_gradients(
    elements: int, seed: int, exponent: int, spread: int
) -> None:
    """A relative error of 2^-10 at most, of all elements but those that are far smaller than the largest."""
    codec = make("fp16", {})
    assert codec is not None
    random = torch.Generator().manual_seed(seed)
    powers = exponent - torch.rand(elements, generator=random, dtype=torch.float64) * spread
    tensor = (torch.randn(elements, generator=random).double() * 2.0**powers).float()
    result = through(codec, tensor).double()
    lost, before = (result - tensor.double()).abs(), tensor.double().abs()
    counts = before >= before.max() * 2.0**-29
    assert bool((lost[counts] <= before[counts] * 2.0**-10).all())
    assert bool((lost <= error_bound("fp16", tensor)).all())


def test_all_names_are_known() -> None:
    assert set(CODECS) == {"none", *BUILT_IN}
    assert {*SHARE, "powersgd"} == set(BUILT_IN)


@pytest.mark.parametrize("name", [*SHARE, "tests.unit.codec.test_codecs:Negative"])
@given(
    elements=st.integers(1, 5000),
    seed=st.integers(0, 1 << 30),
    scale=st.sampled_from([1e-30, 1e-20, 1e-3, 1.0, 1e6, 1e30]),
)
def test_no_element_changes_by_more_than_the_bound(name: str, elements: int, seed: int, scale: float) -> None:
    codec = make(name, {})
    assert codec is not None
    tensor = gradient(elements, seed, scale)
    result = through(codec, tensor)
    assert torch.isfinite(result).all()
    difference = float((result.double() - tensor.double()).abs().max())
    assert difference <= error_bound(name, tensor) * (1 + 1e-6)
    if codec.lossless:
        assert torch.equal(result, tensor)
    assert codec.lossless or codec.feedback or name in ("bf16", "fp16", *UNBIASED)


@pytest.mark.parametrize("name", UNBIASED)
def test_an_unbiased_codec_is_right_on_average(name: str) -> None:
    codec = make(name, {"block": 64})
    assert codec is not None
    tensor = gradient(200, 1)
    times = 4000
    mean = sum(through(codec, tensor, seed).double() for seed in range(times)) / times
    step = error_bound(name, tensor)
    assert float((mean - tensor.double()).abs().max()) < 5 * step / 2 / math.sqrt(times)


@pytest.mark.parametrize("name", list(SHARE))
def test_the_bytes_of_a_large_tensor(name: str) -> None:
    codec = make(name, {})
    assert codec is not None
    tensor = gradient(1 << 18, 0)
    packed = pack(codec.encode(tensor, {}, torch.Generator()))
    assert packed.nbytes <= SHARE[name] * tensor.nbytes


@pytest.mark.parametrize("name", list(SHARE))
def test_zeros_stay_zeros(name: str) -> None:
    codec = make(name, {})
    assert codec is not None
    assert not through(codec, torch.zeros(1000)).any()


@pytest.mark.parametrize("block", [64, 256, 24])
def test_signs_of_elements_of_different_size_hold_none_up(block: int) -> None:
    """A large one does not wait for the others, and these do not get its magnitude."""
    codec = make("signsgd", {"block": block})
    assert codec is not None
    step = gradient(1000, 0, scale=0.1)
    step[::block] = 10
    sent, rest = torch.zeros(1000), torch.zeros(1000)
    for _ in range(16):
        decoded = through(codec, step + rest)
        rest = step + rest - decoded
        sent += decoded
    assert float((sent / 16 - step).norm()) < 0.15 * float(step.norm())
    assert float(rest.norm()) < 2 * float(step.norm())


def test_what_is_left_over_comes_in_the_end() -> None:
    """With error feedback the sum of what was sent is the sum of the gradients, but for the last rest."""
    for codec in (make("topk", {}), make("signsgd", {}), powersgd(25, 20)):
        assert codec is not None
        assert codec.feedback
        sent, rest, total = torch.zeros(500), torch.zeros(500), torch.zeros(500)
        for seed in range(300):
            step = gradient(500, seed) + 0.5
            total += step
            decoded = through(codec, step + rest)
            rest = step + rest - decoded
            sent += decoded
        assert torch.allclose(sent + rest, total, atol=1e-2)
        assert float(rest.norm() / total.norm()) < 0.4


@given(
    elements=st.sampled_from([1, 999, 100_000]),
    ratio=st.floats(0.001, 0.2),
    warmup=st.integers(1, 50),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=25)
def test_topk_sends_less_with_each_version_of_the_warmup(
    elements: int, ratio: float, warmup: int, seed: int
) -> None:
    """From a quarter to `ratio`, by the same factor each time; all of it can be decoded."""
    codec, plain = make("topk", {"ratio": ratio, "warmup": warmup}), make("topk", {"ratio": ratio})
    assert isinstance(codec, TopK)
    assert isinstance(plain, TopK)
    shares = [codec.share(version) for version in range(warmup + 2)]
    assert shares[0] == 0.25
    assert shares[-2:] == [ratio, ratio]
    for before, share in pairwise(shares[:-1]):
        assert share == pytest.approx(before * (ratio / 0.25) ** (1 / warmup))
    tensor, out = gradient(elements, seed), torch.empty(elements)
    for version in (0, warmup // 2, warmup - 1, warmup, warmup + 9):
        random = torch.Generator().manual_seed(seed)
        encoded = codec.encode(tensor, {"version": version}, random)
        sent = encoded.tensors["values"].numel()
        most = math.ceil(codec.share(version) * elements)
        assert most / 2 <= sent <= most
        codec.decode(encoded, out)
        assert int(out.count_nonzero()) == sent
        assert torch.equal(out[out != 0], tensor[out != 0].to(torch.bfloat16).to(torch.float32))
    alike = plain.encode(tensor, {"version": 0}, torch.Generator().manual_seed(seed))
    assert alike.tensors.keys() == encoded.tensors.keys()
    for name, part in alike.tensors.items():
        assert torch.equal(part, encoded.tensors[name]), "when it is over, it is as without"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("largest", [1.0, torch.finfo(torch.float32).max])
def test_topk_sends_large_elements_with_the_digits_of_the_dtype(dtype: str, largest: float) -> None:
    """Also those that bfloat16 would round up to infinity."""
    codec = make("topk", {"ratio": 0.1, "dtype": dtype})
    assert codec is not None
    tensor = torch.linspace(-1, 1, 1001) * largest
    out = through(codec, tensor)
    sent = out != 0
    assert int(sent.sum()) == 101
    assert out.isfinite().all()
    within = 0.0 if dtype == "float32" else 2.0**-8
    torch.testing.assert_close(out[sent], tensor[sent], rtol=within, atol=0.0)


def test_more_than_the_warmup_sends_is_not_decoded() -> None:
    codec, quarter = make("topk", {"warmup": 5}), make("topk", {"ratio": 0.25})
    most = make("topk", {"ratio": 0.26})
    assert codec is not None
    assert quarter is not None
    assert most is not None
    tensor, out = gradient(1000, 0), torch.empty(1000)
    codec.decode(quarter.encode(tensor, {}, torch.Generator()), out)
    with pytest.raises(ValueError, match=r"260 values .* at most 250, of"):
        codec.decode(most.encode(tensor, {}, torch.Generator()), out)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("int9", {}, ["int9", "none, bf16", "module:Class"]),
        ("none", {"ratio": 1}, ["no options", "ratio"]),
        ("topk", {"ratio": 0}, ["ratio is 0", "above 0"]),
        ("topk", {"share": 0.1}, ["takes: ratio, warmup, momentum, dtype", "share"]),
        ("topk", {"warmup": -1}, ["warmup is -1", "0 or more"]),
        ("topk", {"warmup": 0.5}, ["warmup is 0.5"]),
        ("topk", {"momentum": 1}, ["momentum is 1;", "below 1"]),
        ("topk", {"momentum": -0.1}, ["momentum is -0.1"]),
        ("topk", {"momentum": True}, ["momentum is True"]),
        ("topk", {"momentum": "0.9"}, ["momentum is '0.9'", "expected a number"]),
        ("topk", {"dtype": "int8"}, ["dtype is 'int8'", "bfloat16, float32"]),
        ("topk", {"dtype": []}, ["dtype is []"]),
        ("topk", {"ratio": [0.1]}, ["ratio is [0.1]", "expected a number"]),
        ("topk", {"ratio": 0.3, "warmup": 9}, ["warmup is 9", "ratio is 0.3", "0.25"]),
        ("int8", {"block": 3}, ["block is 3"]),
        ("int8", {"block": "a"}, ["block"]),
        ("signsgd", {"block": 12}, ["multiple of 8"]),
        ("powersgd", {"rank": 0}, ["rank is 0", "from 1 to 1024"]),
        ("powersgd", {"rank": 1.5}, ["rank is 1.5"]),
        ("no.such.module:Codec", {}, ["no.such.module:Codec", "cannot be imported", "parameter server"]),
        ("tests.unit.codec.test_codecs:Nobody", {}, ["Nobody", "cannot be imported"]),
        ("tests.unit.codec.test_codecs:through", {}, ["is not a subclass"]),
        (
            "tests.unit.codec.test_codecs:Heavy",
            {},
            ["Heavy has momentum 0.9, but no feedback", "feedback = True"],
        ),
        ("tests.unit.codec.test_codecs:Heavy", {"momentum": 1, "feedback": True}, ["momentum 1;", "below 1"]),
        ("tests.unit.codec.test_codecs:Heavy", {"momentum": "0.9", "feedback": True}, ["momentum '0.9';"]),
    ],
)
def test_a_codec_that_cannot_be_is_refused(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidJob) as error:
        make(name, options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bf16", {"values": torch.zeros(9, dtype=torch.bfloat16)}),
        ("bf16", {"values": torch.zeros(10)}),
        ("fp16", {"other": torch.zeros(10)}),
        ("int8", {"scale": torch.zeros(2)}),
        ("int8", {"integers": torch.zeros(10, dtype=torch.uint8)}),
        ("int4", {"pairs": torch.zeros(3, dtype=torch.uint8)}),
        ("topk", {"low": torch.tensor([10], dtype=torch.int16)}),
        ("topk", {"low": torch.tensor([-1], dtype=torch.int16)}),
        ("topk", {"low": torch.tensor([1], dtype=torch.int32)}),
        ("topk", {"low": torch.zeros(2, dtype=torch.int16)}),
        ("topk", {"values": torch.zeros(1)}),
        ("topk", {"values": torch.zeros(2).bfloat16(), "low": torch.zeros(2, dtype=torch.int16)}),
        ("signsgd", {"signs": torch.zeros(9, dtype=torch.uint8)}),
        ("powersgd", {"p": torch.zeros(4)}),
        ("powersgd", {"q": torch.zeros(5, dtype=torch.float64)}),
        ("powersgd", {"other": torch.zeros(5)}),
    ],
)
def test_what_does_not_fit_is_not_decoded(name: str, change: dict[str, torch.Tensor]) -> None:
    codec = make(name, {"rank": 1} if name == "powersgd" else {})
    codec = codec.for_matrix(2, 5) if codec is not None and codec.by_piece else codec
    assert codec is not None
    encoded = codec.encode(torch.ones(10), {}, torch.Generator())
    tensors = {**encoded.tensors, **change}
    if "other" in change:
        del tensors["values" if name != "powersgd" else "q"]
    with pytest.raises((ValueError, KeyError, RuntimeError)):
        codec.decode(Encoded(tensors, encoded.values), torch.empty(10))


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        ([PackedTensor("a", "float32", 3)], ""),
        ([PackedTensor("a", "float128", 1)], ""),
        ([PackedTensor("a", "__class__", 1)], ""),
        ([PackedTensor("a", "uint8", 8)], "{"),
        ([PackedTensor("a", "uint8", 8)], "[1]"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(parts: list[PackedTensor], values: str) -> None:
    with pytest.raises(Malformed):
        unpack([Packed(tuple(parts), values)], memoryview(bytes(8)))


def test_parts_need_not_be_aligned() -> None:
    parts = (PackedTensor("a", "uint8", 1), PackedTensor("b", "float32", 1))
    (encoded,) = unpack([Packed(parts, "")], memoryview(bytes(5)))
    assert encoded.tensors["b"].tolist() == [0.0]


def powersgd(rows: int, columns: int, rank: int = 2) -> Codec:
    codec = make("powersgd", {"rank": rank})
    assert codec is not None
    own = codec.for_matrix(rows, columns)
    assert own is not None
    return own


@given(
    rows=st.integers(5, 60),
    columns=st.integers(5, 60),
    seed=st.integers(0, 1 << 30),
    scale=st.sampled_from([1e-40, 1e-20, 1.0, 1e30]),
)
@example(rows=8, columns=59, seed=33887, scale=1e-40)
def test_a_matrix_of_low_rank_arrives_as_it_is(rows: int, columns: int, seed: int, scale: float) -> None:
    """Any other one loses a part of itself. Numbers below float32's normal ones have four or five digits."""
    codec = powersgd(rows, columns)
    nothing = 1e-3 if scale > torch.finfo(torch.float32).tiny else 0.05
    low = gradient(rows * 2, seed).view(rows, 2) @ gradient(columns * 2, seed + 1).view(2, columns)
    for matrix, exact in ((low.view(-1), True), (gradient(rows * columns, seed), False)):
        tensor = matrix * scale
        result = through(codec, tensor, seed)
        lost = float((result.double() - tensor.double()).norm() / tensor.double().norm())
        assert lost < (nothing if exact else 1 + 1e-3)
        assert float((result - tensor).abs().max()) <= float(tensor.double().norm()) * (1 + 1e-3)
    assert not through(codec, torch.zeros(rows * columns), seed).any()


def test_each_step_begins_where_the_one_before_has_ended() -> None:
    """Of the same gradient the part that arrives grows to the largest that the rank can hold."""
    tensor = gradient(40 * 30, 0)
    best = float(torch.linalg.svdvals(tensor.view(40, 30))[2:].norm())
    codec, random = powersgd(40, 30), torch.Generator()
    lost, state = [], dict[str, Any]()
    for _ in range(60):
        before = state.get("q")
        kept = before.clone() if before is not None else torch.empty(0)
        out = torch.empty_like(tensor)
        codec.decode(codec.encode(tensor, state, random), out)
        lost.append(float((out - tensor).norm()))
        assert before is None or torch.equal(before, kept)  # it is replaced: the step may be void
        if not len(lost) % 20:
            codec.encode(torch.zeros_like(tensor), state, random)  # a step without a gradient changes nothing
    assert lost[0] > 1.02 * best
    assert lost[-1] < 1.005 * best


def test_powersgd_takes_each_matrix_by_itself() -> None:
    """Biases and small matrices are sent as they are, in one run with their neighbours."""
    shapes = {"a.weight": (40, 30), "a.bias": (40,), "b.bias": (30,), "c.weight": (20, 4, 5), "tiny": (3, 3)}
    tensors = tuple(TensorSpec(name, shape, "float32", Rule.GRADIENT, 0) for name, shape in shapes.items())
    pieces = [Piece(index, 0, tensor.elements) for index, tensor in enumerate(tensors)]
    pieces[0] = Piece(0, 30 * 10, 30 * 20)  # a tensor that is larger than a bucket
    layout = Layout(tensors, (Bucket(0, 0, "float32", Rule.GRADIENT, tuple(pieces)),), 1)
    for lossless, after in (("none", ""), ("zstd", "+zstd")):
        spec = {"codec": "powersgd", "options": {"rank": 2}, "lossless": lossless}
        runs = Plan(Compression.model_validate(spec)).runs(layout, layout.buckets[0])
        assert [(run.name, run.length) for run in runs] == [
            (f"powersgd{after}", 600),
            (f"none{after}", 70),
            (f"powersgd{after}", 400),
            (f"none{after}", 9),
        ]
        if not after:
            first = runs[0].codec
            assert first is not None
            assert pack(first.encode(gradient(600, 0), {}, torch.Generator())).nbytes == 2 * (20 + 30) * 4


@pytest.mark.parametrize("kind", LOSSLESS.values())
@pytest.mark.parametrize("name", ["none", *SHARE, "tests.unit.codec.test_codecs:Negative"])
@settings(max_examples=25)
@given(elements=st.integers(1, 5000), seed=st.integers(0, 1 << 30), zeros=st.booleans())
def test_a_lossless_codec_changes_nothing(
    kind: type[Compressed], name: str, elements: int, seed: int, zeros: bool
) -> None:
    """Of what the codec before it gives back, with the same random numbers."""
    inner = make(name, {}) or Plain()
    codec = kind(inner)
    tensor = gradient(elements, seed)
    if zeros:
        tensor = tensor.relu()
    assert torch.equal(through(codec, tensor, seed), through(inner, tensor, seed))
    kinds = (codec.lossless, codec.feedback, codec.momentum)
    expected = (inner.lossless, inner.feedback, inner.momentum)
    assert kinds == expected


@pytest.mark.parametrize("kind", LOSSLESS.values())
def test_a_lossless_codec_finds_what_is_alike(kind: type[Compressed]) -> None:
    """The exponents of float32; half of the elements of a layer after a ReLU."""
    tensor = gradient(1 << 18, 0)
    for values, share in ((tensor, 0.95), (tensor.relu(), 0.9)):
        assert pack(kind(Plain()).encode(values, {}, torch.Generator())).nbytes < share * tensor.nbytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": {"parts": [["values", "float32", 11]], "values": ""}}, "its parts have 44"),
        ({"values": {"parts": [["values", "float32", 1 << 40]], "values": ""}}, "at most"),
        ({"values": {"parts": [["values", "float32", -1], ["b", "float32", 11]], "values": ""}}, "at most"),
        ({"values": {"parts": [["values", "bfloat16", 20]], "values": ""}}, "bfloat16"),
        ({"values": {"parts": [["values", "float32"]], "values": ""}}, "unpack"),
        ({"values": {"parts": [["values", "__class__", 1]], "values": ""}}, "__class__"),
        ({"values": {}}, "parts"),
        (
            {"tensors": torch.zeros(30, dtype=torch.uint8)},
            "content size|has 0 bytes|expected .* bytes|incomplete",
        ),
        ({"tensors": torch.zeros(0, dtype=torch.uint8)}, "content size|header"),
        ({"tensors": {}}, "zstd|blosc"),
    ],
)
@pytest.mark.parametrize("kind", LOSSLESS.values())
def test_what_no_lossless_codec_made_is_refused(
    kind: type[Compressed], change: dict[str, Any], words: str
) -> None:
    codec = kind(Plain())
    if isinstance(data := change.get("tensors"), torch.Tensor):
        change = {"tensors": {kind.name: data}}
    encoded = codec.encode(gradient(10, 0), {}, torch.Generator())
    fields = {"tensors": encoded.tensors, "values": encoded.values, **change}
    with pytest.raises(Exception, match=words):
        codec.decode(Encoded(**fields), torch.empty(10))


@pytest.mark.parametrize("kind", LOSSLESS.values())
def test_a_frame_that_is_cut_off_or_too_long_is_refused(kind: type[Compressed]) -> None:
    codec = kind(Plain())
    encoded = codec.encode(gradient(1000, 0).relu(), {}, torch.Generator())
    whole = encoded.tensors[kind.name]
    for data, words in (
        (whole[:-10], "decompress|incomplete"),
        (torch.cat((whole, whole)), "unused data|more"),
    ):
        with pytest.raises(Exception, match=words):
            codec.decode(Encoded({kind.name: data}, encoded.values), torch.empty(1000))


@given(place=st.integers(0, 1 << 16), value=st.integers(0, 255))
def test_bytes_that_blosc_did_not_make_give_some_numbers_or_are_refused(place: int, value: int) -> None:
    """Nothing is read or written that is not there; it has no checksum, the connection has."""
    codec = LOSSLESS["blosc"](Plain())
    encoded = codec.encode(gradient(1000, 0).relu(), {}, torch.Generator())
    data = encoded.tensors["blosc"].clone()
    data[place % len(data)] = value
    with suppress(ValueError, sys.modules["blosc"].blosc_extension.error):
        codec.decode(Encoded({"blosc": data}, encoded.values), torch.empty(1000))


@pytest.mark.parametrize("kind", LOSSLESS.values())
def test_without_its_package_a_lossless_job_does_not_begin(
    kind: type[Compressed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind.package, None)
    words = rf"{kind.package}, for the workers and for the param.*elastic-ps\[{kind.name}\]"
    with pytest.raises(InvalidJob, match=words):
        Plan(Compression.model_validate({"lossless": kind.name}))
    Plan(Compression(codec="int8"))


def test_the_lossless_codec_follows_all_others() -> None:
    """A lossless one leaves float64 alone: codecs get float32."""
    tensors = tuple(TensorSpec(name, (4,), "float32", Rule.GRADIENT, 0) for name in ("weight", "bias"))
    pieces = tuple(Piece(tensor=index, start=0, length=4) for index in range(2))
    buckets = [Bucket(i, 0, dtype, Rule.GRADIENT, pieces) for i, dtype in enumerate(("float32", "float64"))]
    layout = Layout(tensors, tuple(buckets), 1)
    rules = [{"match": "bias", "codec": "none"}]
    spec = {"codec": "int8", "values": "bf16", "lossless": "zstd", "rules": rules}
    plan = Plan(Compression.model_validate(spec))
    assert (plan.name, plan.values) == ("int8+zstd", "bf16+zstd")
    assert [run.name for run in plan.runs(layout, buckets[0])] == ["int8+zstd", "none+zstd"]
    assert [run.name for run in plan.runs(layout, buckets[1])] == ["int8+zstd", "none"]
    assert isinstance(plan.of_values(layout, buckets[0]), Zstd)
    assert plan.of_values(layout, buckets[1]) is None


def test_a_rule_may_name_a_shared_parameter_by_any_of_its_names() -> None:
    tied = TensorSpec("wte.weight", (4,), "float32", Rule.GRADIENT, 0, aliases=("lm_head.weight",))
    rules = [{"match": "lm_head.*", "codec": "none"}]
    plan = Plan(Compression.model_validate({"codec": "int8", "rules": rules}))
    assert plan.of(tied) == ("none", None)
    assert plan.unmatched([tied]) == []


class Apart(Negative):
    """A user's own, for each parameter by itself."""

    by_piece = True


def test_a_codec_for_each_parameter_by_itself_gets_no_neighbours() -> None:
    tensors = tuple(TensorSpec(name, (4,), "float32", Rule.GRADIENT, 0) for name in "ab")
    pieces = tuple(Piece(tensor=index, start=0, length=4) for index in range(2))
    layout = Layout(tensors, (Bucket(0, 0, "float32", Rule.GRADIENT, pieces),), 1)
    for codec, lengths in (("Negative", [8]), ("Apart", [4, 4])):
        plan = Plan(Compression(codec=f"{__name__}:{codec}"))
        assert [run.length for run in plan.runs(layout, layout.buckets[0])] == lengths


def test_rules_choose_by_the_name_of_the_parameter() -> None:
    """The first rule that matches counts. Neighbours with the same codec are encoded together."""
    tensors = tuple(
        TensorSpec(name, (4,), "float32", Rule.GRADIENT, 0)
        for name in ("a.weight", "a.bias", "b.bias", "b.weight", "c.weight")
    )
    pieces = tuple(Piece(tensor=index, start=0, length=4) for index in range(5))
    layout = Layout(tensors, (Bucket(0, 0, "float32", Rule.GRADIENT, pieces),), 1)
    rules = [{"match": "*.bias", "codec": "none"}, {"match": "c.*", "codec": "topk", "options": {"ratio": 1}}]
    plan = Plan(Compression.model_validate({"codec": "int8", "rules": rules}))
    assert plan.encodes
    runs = plan.runs(layout, layout.buckets[0])
    assert [(run.name, run.elements.start, run.length) for run in runs] == [
        ("int8", 0, 4),
        ("none", 4, 8),
        ("int8", 12, 4),
        ("topk version 2", 16, 4),
    ]
    nothing = Plan(Compression.model_validate({"rules": [{"match": "z*", "codec": "int8"}]}))
    assert nothing.encodes
    assert (nothing.unmatched(tensors), plan.unmatched(tensors)) == (["z*"], [])
    assert nothing.runs(layout, layout.buckets[0]) == []
    assert not Plan(Compression()).encodes
