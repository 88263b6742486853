"""``cutekernels calibrate``: measures this GPU's own rates and stores them, for the models in place of scaled ones.

Exit codes: 0 the rates are stored, or listed with --dry-run; 1 none could be read; 2 there is no GPU to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutekernels import terminal
from cutekernels.errors import CuteKernelsError, UnknownGpu
from cutekernels.terminal import As, Format

if TYPE_CHECKING:
    from cutekernels.autotune.probes import Lab
    from cutekernels.gpu import GpuSpec

app = typer.Typer()
BUDGET_S = 30.0
UNITS = {
    "_mhz": "MHz",
    "_bytes_per_us": "bytes/us",
    "_flops_per_us": "flops/us",
    "_us": "us",
    "_share": "of data sheet",
    "overlap": "exponent",
}
PLANNED = ("rate", "unit", "scaled", "h200_reading", "what")  # columns of the tables, which fit into 80
MEASURED = ("rate", "unit", "scaled", "reading", "calibrated", "note")


@app.command("calibrate")
def command(
    db: Annotated[str | None, typer.Option(help="Path or URL of the database; default: the settings'.")] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="After this many seconds nothing new is measured.")] = BUDGET_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be measured, measure nothing.")] = False,
    gpu: Annotated[
        str, typer.Option(help="With --dry-run: whose rates to list. Only the GPU here is measured.")
    ] = "auto",
    format: As = Format.table,
) -> None:
    """Measure this GPU's own rates in about half a minute; the models then use them in place of scaled ones."""
    try:
        spec = _spec(gpu, dry_run=dry_run)
        if dry_run:
            _write([_row(spec, probe) for probe in _probes(spec)], format, PLANNED)
            return
        from cutekernels.autotune.probes import Lab
        from cutekernels.db.storage.store import Store

        with Store(db) as store:  # before anything is measured: a database that cannot be written costs no time
            rows = measured(Lab(spec), budget_s)
            store.keep_rates([row["row"] for row in rows if row.get("row")])
    except UnknownGpu as error:
        terminal.fail(str(error), code=2)
    except CuteKernelsError as error:
        terminal.fail(str(error))
    _write([{name: value for name, value in row.items() if name != "row"} for row in rows], format, MEASURED)
    stored = sum("row" in row for row in rows)
    terminal.say(f"{stored} of {len(rows)} rates of {spec.name} are stored; `cutekernels doctor` shows them all")
    raise typer.Exit(0 if stored else 1)


def measured(lab: Lab, budget_s: float, clock: Callable[[], float] = time.monotonic) -> list[dict[str, Any]]:
    """A row to show for each probe, with the row to store where its reading gives a rate."""
    from cutekernels import environment, rates
    from cutekernels.db.storage.store import Rate

    end, driver, rows = clock() + budget_s, environment.collect()["driver"], []
    for probe in _probes(lab.gpu):
        shown = _row(lab.gpu, probe)
        rows.append(shown)
        if clock() >= end:
            shown["note"] = f"not reached in {budget_s:g} s"
            continue
        try:
            reading = probe.read(lab)
        except Exception as error:  # noqa: BLE001  a foreign failure becomes a row
            shown["note"] = f"failed: {type(error).__name__}: {error}".partition("\n")[0][:200]
            continue
        shown["reading"] = reading
        if reading <= 0:
            shown["note"] = "no speed: not stored"
        else:
            seen = lab.watch.seen
            words = {"reading": reading, "clock_mhz": seen.clock_mhz, "temperature_c": seen.temperature_c}
            words |= {"power_w": seen.power_w, "driver": driver or None}
            told = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in words.items() if v is not None)
            shown["calibrated"] = value = probe.rate_of(reading)
            shown["row"] = Rate(
                gpu=lab.gpu.base_name,
                name=probe.rate,
                revision=rates.REVISION,
                value=value,
                unit=shown["unit"],
                conditions=" ".join(told),
                source=f"cutekernels {environment.package_version('cutekernels') or 'from source'}, {probe.what}",
            )
    return rows


def unit_of(rate: str) -> str:
    """The unit that the rate's name ends in."""
    return next(unit for end, unit in UNITS.items() if rate.endswith(end))


def _spec(gpu: str, *, dry_run: bool) -> GpuSpec:
    from cutekernels import gpu as gpus

    named = not gpus.is_auto(gpu)
    if named and not dry_run:
        raise UnknownGpu("calibrate measures the GPU of this machine: leave --gpu out, or give --dry-run")
    try:
        return gpus.lookup(gpu)
    except UnknownGpu:
        if named:
            raise
        if not dry_run:
            raise UnknownGpu("no CUDA device is visible to be measured; --dry-run lists what would be") from None
        terminal.say("no GPU is here: these are an H200's; --gpu names another")
        return gpus.lookup("h200")


def _probes(spec: GpuSpec) -> list[Any]:
    from cutekernels.autotune.probes import PROBES

    return [probe for probe in PROBES if probe.takes(spec)]


def _row(spec: GpuSpec, probe: Any) -> dict[str, Any]:
    from cutekernels import rates
    from cutekernels.autotune.probes import ON_H200

    scaled = getattr(rates.scaled(spec), probe.rate)
    shown = {"rate": probe.rate, "unit": unit_of(probe.rate), "scaled": scaled, "calibrated": None, "reading": None}
    return shown | {"h200_reading": ON_H200[probe.rate], "what": probe.what, "note": ""}


def _write(rows: list[dict[str, Any]], format: Format, columns: tuple[str, ...]) -> None:
    terminal.write(rows, format, columns if format is Format.table else ())
