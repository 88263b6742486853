"""Records and their text form: allowed values, and untrusted lines that are refused."""

from __future__ import annotations

import json
import platform
import threading
import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutekernels.db.storage import uuid7 as uuid7_module
from cutekernels.db.storage.trial import MESSAGE_LIMIT, Environment, Gpu, Trial
from cutekernels.db.storage.uuid7 import is_uuid7, uuid7
from cutekernels.errors import StoreError
from tests.db.trials import BOX, H200, trial


def test_ids_are_version_7_and_carry_the_time() -> None:
    before = datetime.now(UTC).timestamp()
    made = uuid.UUID(uuid7())
    after = datetime.now(UTC).timestamp()
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert int(before * 1000) <= made.int >> 80 <= int(after * 1000)


def test_ids_grow_within_a_millisecond_and_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([5_000_000_000_000] * 500 + [4_000_000_000_000] * 500 + [6_000_000_000_000] * 3)
    monkeypatch.setattr(uuid7_module, "_sequence", uuid7_module._Sequence())
    monkeypatch.setattr(uuid7_module.time, "time_ns", lambda: next(ticks))
    ids = [uuid7() for _ in range(1003)]
    assert ids == sorted(set(ids))
    assert all(is_uuid7(i) for i in ids)


def test_the_random_part_overflows_into_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = uuid7_module._Sequence()
    sequence.millis, sequence.tail = 1 << 47, (1 << 74) - 1
    monkeypatch.setattr(uuid7_module, "_sequence", sequence)
    made = uuid.UUID(uuid7())
    assert made.int >> 80 == (1 << 47) + 1
    assert made.version == 7


def test_threads_never_share_an_id() -> None:
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.extend([uuid7() for _ in range(500)])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 2000


# Written out: parametrized tests must have the same names in every process of pytest-xdist.
UUID4 = "fa4dc7ec-c579-4fe5-8e96-9a3b52e68e28"
UUID7 = "01a1fc2b-3224-78c2-8a88-a11cbb1d4ba5"


def test_a_forked_child_starts_its_own_sequence() -> None:
    sequence = uuid7_module._sequence
    uuid7_module._start_afresh()  # what os.register_at_fork runs in the child
    assert uuid7_module._sequence is not sequence
    assert uuid7_module._sequence.millis == 0


@pytest.mark.parametrize(
    "text",
    ["", "x" * 36, UUID4, UUID7.upper().replace("0", "A"), UUID7.replace("-", ""), f"{UUID7} "],
)
def test_other_ids_are_told_apart(text: str) -> None:
    assert not is_uuid7(text)


def test_a_line_gives_the_trial_back() -> None:
    full = trial(
        p20_us=1.0,
        p80_us=2.0,
        samples=7,
        ratio=1.1,
        ratio_low=1.0,
        ratio_high=1.2,
        baseline_us=3.0,
        error=0.5,
        registers=128,
        stack_bytes=0,
        smem_bytes=98304,
        message="line\nand ünïcode",
    )
    line = full.as_line()
    assert "\n" not in line
    assert line.isascii()
    assert Trial.from_line(line) == full
    bare = trial(median_us=None)
    assert "median_us" not in json.loads(bare.as_line())
    assert Trial.from_line(bare.as_line()) == bare


def test_moments_come_back_in_utc() -> None:
    east = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=9)))
    row = trial().as_row() | {"created_at": east.isoformat()}
    read = Trial.from_row(row)
    assert read.created_at == east
    assert read.created_at.tzinfo is UTC


@settings(suppress_health_check=[HealthCheck.too_slow])  # a draw took 1.2 s on a machine that did other things
@given(st.text(), st.floats(), st.integers(min_value=0, max_value=2**63 - 1))
def test_whatever_a_tuner_meets_can_be_stored_and_exported(message: str, error: float, registers: int) -> None:
    made = trial(message=message, error=abs(error), registers=registers)
    assert Trial.from_line(made.as_line()) == made
    made.message.encode()


def test_new_cleans_what_it_is_given() -> None:
    made = trial(message="\x1b[31mred\x1b[0m\x00 " + "x" * 9000 + "end", error=float("inf"), median_us=float("nan"))
    assert made.message.startswith("red x")
    assert made.message.endswith("xend")
    assert "[...]" in made.message
    assert len(made.message) == MESSAGE_LIMIT
    assert made.error is None
    assert made.median_us is None


def test_environment_takes_what_it_knows() -> None:
    found = Environment.of({"driver": "1", "torch": "2", "python": "3.12", "commit": "abc"})
    assert (found.driver, found.torch, found.commit, found.triton) == ("1", "2", "abc", "")
    machine, _, node = found.host.partition(" ")
    assert found.version and machine.endswith("cpu") and node in platform.node()
    assert found.anonymous.host == machine and found.anonymous.torch == "2"


def test_as_row_is_ordered_and_nested() -> None:
    row = trial().as_row()
    assert list(row)[:5] == ["id", "created_at", "gpu", "environment", "op"]
    assert row["gpu"]["name"] == "h200"
    assert row["environment"] == {
        name: getattr(BOX, name) for name in ("driver", "cuda", "dsl", "ptxas", "triton", "torch")
    }


BAD_VALUES = [
    ("id", "1"),
    ("id", None),
    ("id", UUID4),
    ("created_at", "yesterday"),
    ("created_at", 5),
    ("created_at", "0001-01-01T00:00:00+23:59"),
    ("gpu", "h200"),
    ("gpu", {"name": "h200"}),
    ("gpu", trial().as_row()["gpu"] | {"serial": "123"}),
    ("gpu", trial().as_row()["gpu"] | {"name": "../h200"}),
    ("gpu", trial().as_row()["gpu"] | {"sm_count": 0}),
    ("gpu", trial().as_row()["gpu"] | {"sm_count": "132"}),
    ("gpu", trial().as_row()["gpu"] | {"l2_bytes": 2**63}),
    ("environment", []),
    ("environment", {"driver": 580}),
    ("environment", {"hostname": "x"}),
    ("environment", {"driver": "x" * 101}),
    ("op", "GEMM"),
    ("op", "gemm; drop table trial"),
    ("op", ["gemm"]),
    ("revision", True),
    ("revision", 1.0),
    ("revision", -1),
    ("revision", 2**31),
    ("problem", "m=1\x00"),
    ("problem", "m=1\nn=2"),
    ("problem", "m=１"),
    ("problem", "\x1b[2J"),
    ("problem", "m" * 1001),
    ("config", {"tile_m": 1}),
    ("config", None),
    ("origin", "guessed"),
    ("status", "fine"),
    ("status", 1),
    ("median_us", "fast"),
    ("median_us", -1.0),
    ("median_us", True),
    ("median_us", 10**400),
    ("samples", 1.5),
    ("samples", -1),
    ("registers", 2**63),
    ("message", "\x07"),
    ("message", "\ud800"),
    ("message", "x" * (MESSAGE_LIMIT + 1)),
    ("message", None),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_and_named(name: str, value: object) -> None:
    row = trial().as_row() | {name: value}
    with pytest.raises(StoreError) as caught:
        Trial.from_row(row)
    message = str(caught.value)
    assert name in message or name in ("gpu", "environment")
    assert len(message) < 400


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not a JSON object"),
        ("{", "not a JSON object"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"id": NaN}', "NaN is not JSON"),
        ('{"op": "gemm", "op": "gemm"}', "stands twice"),
        ("[" * 50_000, "not a JSON object"),
        ("1" * 5000, "not a JSON object"),
        ("__import__('os').system('true')", "not a JSON object"),
        ('{"__class__": "os.system"}', "no field '__class__'"),
        ("{}", "needs config, created_at"),
        (" " * 70_000, "at most"),
    ],
)
def test_a_hostile_line_is_refused(line: str, reason: str) -> None:
    with pytest.raises(StoreError, match=reason.replace("(", r"\(")):
        Trial.from_line(line)


def test_records_check_themselves_when_made() -> None:
    with pytest.raises(StoreError, match="sm_count must be a whole number from 1"):
        Gpu("h200", "sm_90a", -1, 0, 0, 0)
    with pytest.raises(StoreError, match="origin must be one of measured, predicted; it is 'guess'"):
        trial(origin="guess")
    with pytest.raises(StoreError, match="gpu must be a Gpu"):
        trial(gpu="h200")
    assert trial().key == (H200.name, "gemm", 1, "m=16 n=64 k=32")
