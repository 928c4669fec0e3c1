"""The part of a TrainingJob that says how gradients and values travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from elastic_ps.api.codecs import check_options
from elastic_ps.api.fields import AUTO, CamelModel, check_named
from elastic_ps.api.rules import OnlyWith

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "signsgd", "powersgd")
"""The names of built-in codecs. A user's own codec is named as module:Class."""

CODEC = Annotated[
    str, AfterValidator(lambda name: check_named(name, CODECS, what="codec", own="module:Class"))
]

MAX_ERROR = 0.02
"""The default of `Compression.max_error`."""

CODEC_OR_AUTO = Annotated[
    str, AfterValidator(lambda name: check_named(name, (*CODECS, AUTO), what="codec", own="module:Class"))
]


class CompressionRule(CamelModel):
    """A codec for some of the parameters."""

    match: str = Field(
        min_length=1,
        description="A pattern of parameter names, written like a pattern of file names: *.bias matches "
        "layer1.bias. The first rule that matches a parameter counts.",
    )
    codec: CODEC = Field(description="As compression.codec.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="As compression.options.")

    @model_validator(mode="after")
    def _check_options(self) -> CompressionRule:
        check_options(self.codec, self.options)
        return self


class Compression(CamelModel):
    """How gradients and the model's values are encoded on the network."""

    codec: CODEC_OR_AUTO = Field(
        default="none",
        description="How workers encode gradients. With none, they are sent as they are. bf16 and fp16 take "
        "half the bytes, int8 a quarter, int4 an eighth, signsgd 1/21, topk sends only the largest "
        "elements, and powersgd a matrix of low rank. With the last three, the part that a step does not "
        "send is added to the worker's next step. With auto, each worker tries several, and uses the fastest "
        "that loses no more than maxError. A codec of your own is named as module:Class.",
    )
    max_error: Annotated[float | None, OnlyWith("codec", (AUTO,))] = Field(
        default=None,
        ge=0,
        le=1,
        description="With codec auto: how much of a gradient may be lost in a step, 0.02 if unset. This "
        "is the norm of the error after decoding, divided by the norm of what was encoded: the gradient "
        "plus what earlier steps left over. It holds for each bucket of each step.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Arguments of the codec. For int8, int4 and signsgd: block, the number of elements "
        "that share a scale. For topk: ratio, the share of elements that is sent; warmup, the number of "
        "versions over which the share falls to ratio; momentum, which is applied to the workers' "
        "gradients before they are sent; and dtype, bfloat16 or float32, of the elements. For powersgd: "
        "rank, the number of columns.",
    )
    rules: list[CompressionRule] = Field(
        default_factory=list, description="Other codecs for some of the parameters, selected by name."
    )
    lossless: Literal["none", "zstd", "blosc"] = Field(
        default="none",
        description="A lossless compression of the output of the codecs of gradients and values, also of "
        "codec none: zstd (Zstandard, which saves more) or blosc (Blosc, which is faster). "
        "They need the packages zstandard and blosc.",
    )
    values: Literal["none", "changed", "bf16", "int8", "int4", "topk", "signsgd"] = Field(
        default="none",
        description="How the parameter server sends the model's values to the workers. With none, they "
        "are sent as they are. With bf16, trained float32 parameters take half the bytes: "
        "workers compute on rounded values, and the parameter server keeps and updates the "
        "float32 ones. With changed, only the values that a version has changed are sent, "
        "with their positions. With int8, int4, topk or signsgd, the changes are sent in that "
        "encoding, and the part that it loses is added to the next change.",
    )
    values_options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Arguments of the codec of values, like compression.options: block (int8, int4, "
        "signsgd), ratio, warmup and dtype (topk).",
    )

    @property
    def wants_whole_matrices(self) -> bool:
        """Whether a codec compresses a whole matrix better than small pieces of it."""
        return any(codec == "powersgd" for codec, _ in self._of_gradients)

    @property
    def _of_gradients(self) -> list[tuple[str, Mapping[str, JsonValue]]]:
        """Codecs and their options: the default, then those of the rules."""
        return [(self.codec, self.options), *((rule.codec, rule.options) for rule in self.rules)]

    @property
    def momentum(self) -> JsonValue:
        """The option momentum of the first built-in codec of gradients that has it; 0 if none has.

        A user's own codec may mean something else by this option.
        """
        known = (options.get("momentum") for codec, options in self._of_gradients if ":" not in codec)
        return next((momentum for momentum in known if momentum), 0)

    @model_validator(mode="after")
    def _check_options(self) -> Compression:
        if self.codec == AUTO and self.options:
            raise ValueError(
                f"codec auto takes no options; given: {', '.join(self.options)}. Leave them out; its limit "
                "is compression.maxError"
            )
        check_options(self.codec, self.options)
        if self.values_options and self.values in ("none", "bf16"):
            raise ValueError(
                f"valuesOptions {self.values_options} has no meaning with values {self.values}. Leave it "
                "out, or set values to one of changed, int8, int4, topk, signsgd"
            )
        check_options(self.values, self.values_options)
        if momentum := self.values_options.get("momentum"):
            raise ValueError(
                f"valuesOptions has momentum {momentum}, but only gradients have momentum. Leave it out, or "
                "set it in compression.options"
            )
        return self
