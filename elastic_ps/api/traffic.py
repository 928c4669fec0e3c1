"""The traffic of workers, as a status reports it."""

from __future__ import annotations

from pydantic import Field

from elastic_ps.api.fields import CamelModel


class Traffic(CamelModel):
    """The gradients and values that a worker has sent and received, and the cost of its codecs."""

    pushed_bytes: int = Field(default=0, description="The size of the gradients that workers sent, in bytes.")
    pushed_plain_bytes: int = Field(
        default=0, description="The size of the gradients before encoding, in bytes."
    )
    pulled_bytes: int = Field(
        default=0, description="The size of the values that workers received, in bytes."
    )
    pulled_plain_bytes: int = Field(default=0, description="The size of the values after decoding, in bytes.")
    encode_seconds: float = Field(
        default=0.0, description="The time that workers took to encode gradients, in seconds."
    )
    decode_seconds: float = Field(
        default=0.0, description="The time that workers took to decode values, in seconds."
    )
    push_seconds: float = Field(
        default=0.0, description="The time during which a gradient was being encoded or sent, in seconds."
    )
    hidden_seconds: float = Field(
        default=0.0,
        description="The part of the time for encoding and sending gradients that overlaps with backward, "
        "before the script called optimizer.step(), in seconds.",
    )
    codec: str = Field(default="", description="The codecs that workers have chosen, with codec auto.")
    overlap: str = Field(
        default="",
        description="Says whether gradients are sent during backward and, if they are not, why. Empty "
        "before the first step, and with strategy all-reduce.",
    )

    @classmethod
    def counts(cls) -> list[str]:
        """The names of the numeric fields."""
        return [name for name in cls.model_fields if name not in ("codec", "overlap")]

    @property
    def hidden_share(self) -> float | None:
        """The share of the time of sending that backward hides, from 0 to 1; None if nothing was timed."""
        return round(self.hidden_seconds / self.push_seconds, 4) if self.push_seconds else None

    def __add__(self, other: Traffic) -> Traffic:
        sums = {name: getattr(self, name) + getattr(other, name) for name in Traffic.counts()}
        codecs = {*self.codec.split(", "), *other.codec.split(", ")} - {""}
        overlaps = {*self.overlap.split("; "), *other.overlap.split("; ")} - {""}
        return Traffic(**sums, codec=", ".join(sorted(codecs)), overlap="; ".join(sorted(overlaps)))


class TrafficStatus(CamelModel):
    """The gradients and values that all workers have sent and received, and the cost of their codecs."""

    pushed_bytes: int = Field(default=0, description="The size of the gradients that workers sent, in bytes.")
    pushed_ratio: float = Field(
        default=1.0, description="pushedBytes divided by the size of the same gradients without a codec."
    )
    pulled_bytes: int = Field(
        default=0, description="The size of the values that workers received, in bytes."
    )
    pulled_ratio: float = Field(
        default=1.0, description="pulledBytes divided by the size of the same values without a codec."
    )
    codec_seconds: float = Field(
        default=0.0,
        description="The time that workers took to encode gradients and to decode values, in seconds.",
    )
    codec: str = Field(default="", description="The codecs that workers have chosen, with codec auto.")
    bucket_bytes: int | None = Field(
        default=None,
        description="The bucket size that was chosen, in bytes, if parameterServer.bucketBytes is 0.",
    )
    overlap: str | None = Field(
        default=None,
        description="Says whether gradients are sent during backward and, if they are not, why.",
    )
    hidden_share: float | None = Field(
        default=None,
        description="The share of the encoding and sending time of gradients that overlaps with backward, "
        "from 0 to 1. Unset if all is sent in one call.",
    )

    @classmethod
    def of(cls, counts: Traffic, *, bucket_bytes: int = 0) -> TrafficStatus | None:
        """The totals of `counts`; None if nothing was sent."""
        if not (counts.pushed_plain_bytes or counts.pulled_plain_bytes):
            return None
        return cls(
            pushed_bytes=counts.pushed_bytes,
            pushed_ratio=round(counts.pushed_bytes / max(1, counts.pushed_plain_bytes), 4),
            pulled_bytes=counts.pulled_bytes,
            pulled_ratio=round(counts.pulled_bytes / max(1, counts.pulled_plain_bytes), 4),
            codec_seconds=round(counts.encode_seconds + counts.decode_seconds, 3),
            codec=counts.codec,
            bucket_bytes=bucket_bytes or None,
            overlap=counts.overlap or None,
            hidden_share=counts.hidden_share,
        )
