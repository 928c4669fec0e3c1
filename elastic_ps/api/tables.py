"""The counts of tables that grow, as a status reports them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from elastic_ps.api.fields import CamelModel


class TableStatus(CamelModel):
    """The rows of a table that grows, and what has happened to them in this term."""

    name: str = Field(description="The table's name.")
    rows: int = Field(default=0, description="Rows of the table.")
    waiting: int = Field(default=0, description="Ids that wait for a row because of admit_after.")
    size_bytes: int = Field(default=0, description="Memory of the table, in bytes.")
    admitted: int = Field(default=0, description="Rows that were created.")
    expired: int = Field(default=0, description="Rows that were dropped.")
    refused: int = Field(default=0, description="Rows that were not created because the table was full.")
    looked_up: int = Field(default=0, description="Rows that were looked up.")
    hits: int = Field(default=0, description="Rows that were looked up and existed.")
    used: int = Field(default=0, description="Rows that the forward passes of workers have used.")
    used_ahead: int = Field(
        default=0, description="Rows that were prefetched, and used without another fetch."
    )

    @property
    def hit_rate(self) -> float | None:
        """The share of the look-ups that found a row, from 0 to 1; None if there were none."""
        return self.hits / self.looked_up if self.looked_up else None

    def __add__(self, other: TableStatus) -> TableStatus:
        counts = [name for name in type(self).model_fields if name != "name"]
        return TableStatus(
            name=self.name, **{name: getattr(self, name) + getattr(other, name) for name in counts}
        )


MOST_LISTED = 20
"""The most tables in a TrainingJob's status."""


class TableRows(CamelModel):
    """The rows of a table that grows, in a TrainingJob's status."""

    name: str = Field(description="The table's name.")
    rows: int = Field(default=0, description="Rows of the table.")
    size_bytes: int = Field(default=0, description="Memory of the table, in bytes.")
    admitted: int = Field(
        default=0,
        description="Rows created since the parameter servers started, or went back to a checkpoint.",
    )
    expired: int = Field(
        default=0,
        description="Rows dropped since the parameter servers started, or went back to a checkpoint.",
    )

    @classmethod
    def of(cls, tables: Iterable[TableStatus]) -> list[TableRows]:
        """Those of the largest tables, `MOST_LISTED` at most, in the order of their names."""
        largest = sorted(tables, key=lambda table: (-table.size_bytes, table.name))[:MOST_LISTED]
        found = [cls(**{name: getattr(table, name) for name in cls.model_fields}) for table in largest]
        return sorted(found, key=lambda table: table.name)


def added(parts: Iterable[Iterable[TableStatus]]) -> list[TableStatus]:
    """The tables of several shards, in the order of their names."""
    found: dict[str, TableStatus] = {}
    for part in parts:
        for table in part:
            found[table.name] = found[table.name] + table if table.name in found else table
    return [table for _, table in sorted(found.items())]
