"""The tables. A change here needs a file in ``migrations/versions/`` (a test compares the two).

The tuning key is (gpu name, op, revision, problem). ``winner`` holds that key and *points* to a trial, so that a
configuration is stored in one row of ``trial`` only. Column names are the fields of
:class:`cutekernels.db.storage.trial.Trial`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.trial import LINE_LIMIT, ORIGINS, STATUSES
from cutekernels.errors import StoreError

KEY = ("gpu", "op", "revision", "problem")  # the tuning key


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite stores no offset, so it is added on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        """SQLite's own processor raises for a malformed moment, and so hides every row behind it."""
        if dialect.name != "sqlite":
            return super().result_processor(dialect, coltype)
        return _moment


def _moment(value: object) -> object:
    """The moment that SQLite stores as text; anything else as it is, for :class:`Trial` to refuse."""
    try:
        return datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
    except ValueError:
        return value


class CertificateText(TypeDecorator[Certificate]):
    """A certificate as JSON text."""

    impl = Text()
    cache_ok = True

    def process_bind_param(self, value: Certificate | None, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value.as_row(), allow_nan=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """The certificate; text that is none as it is, for :class:`Trial` to refuse."""
        try:
            return value if value is None or len(value) > LINE_LIMIT else Certificate.from_row(json.loads(value))
        except (StoreError, ArithmeticError, ValueError, TypeError, RecursionError):
            return value


class Base(DeclarativeBase):
    """Root of the tables; constraint names are fixed so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        float: Double(),
        datetime: UtcDateTime(),
        Certificate: CertificateText(),
    }


class Gpu(Base):
    """A GPU model, identified by all of its attributes."""

    __tablename__ = "gpu"
    __table_args__ = (
        UniqueConstraint("name", "target", "sm_count", "smem_per_block_bytes", "l2_bytes", "memory_bytes"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    target: Mapped[str]
    sm_count: Mapped[int]
    smem_per_block_bytes: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    memory_bytes: Mapped[int] = mapped_column(BigInteger)


class Environment(Base):
    """The versions a measurement depends on."""

    __tablename__ = "environment"
    __table_args__ = (UniqueConstraint("driver", "cuda", "dsl", "ptxas", "triton", "torch"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    driver: Mapped[str]
    cuda: Mapped[str]
    dsl: Mapped[str]
    ptxas: Mapped[str]
    triton: Mapped[str]
    torch: Mapped[str]


def _in(column: str, values: tuple[str, ...]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(v) for v in values)})", name=column)


class Trial(Base):
    """One attempt; rows are added and never changed."""

    __tablename__ = "trial"
    __table_args__ = (
        _in("origin", ORIGINS),
        _in("status", STATUSES),
        Index(None, "op", "revision", "problem", "gpu_id"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    created_at: Mapped[datetime]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpu.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    op: Mapped[str]
    revision: Mapped[int]
    problem: Mapped[str]
    config: Mapped[str]
    origin: Mapped[str]
    status: Mapped[str]
    median_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    samples: Mapped[int | None] = mapped_column(BigInteger)
    ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    baseline_us: Mapped[float | None]
    error: Mapped[float | None]
    registers: Mapped[int | None] = mapped_column(BigInteger)
    stack_bytes: Mapped[int | None] = mapped_column(BigInteger)
    smem_bytes: Mapped[int | None] = mapped_column(BigInteger)
    message: Mapped[str]
    sources: Mapped[str] = mapped_column(server_default="")
    certificate: Mapped[Certificate | None]
    version: Mapped[str] = mapped_column(server_default="")
    commit: Mapped[str] = mapped_column(server_default="")
    host: Mapped[str] = mapped_column(server_default="")


# The trial whose config a dispatcher uses for a tuning key. ``gpu`` is the GPU's name.
winner = Table(
    "winner",
    Base.metadata,
    *(Column(name, Integer if name == "revision" else Text, primary_key=True) for name in KEY),
    Column("trial_id", String(36), ForeignKey("trial.id"), index=True, nullable=False),
)


class Request(Base):
    """An untuned problem that was dispatched: the tuner's queue. ``gpu`` is the GPU's name."""

    __tablename__ = "request"

    gpu: Mapped[str] = mapped_column(primary_key=True)
    op: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    problem: Mapped[str] = mapped_column(primary_key=True)
    hits: Mapped[int] = mapped_column(BigInteger)
    last_seen: Mapped[datetime]


class Rate(Base):
    """A calibrated speed of a GPU's part; a later calibration replaces it. ``gpu`` is the GPU's name."""

    __tablename__ = "rate"

    gpu: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]
    unit: Mapped[str]
    created_at: Mapped[datetime]
    conditions: Mapped[str]
    source: Mapped[str]
