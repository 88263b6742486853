"""Tables of vLLM and SGLang: names and keys by the engines' public rules, restated here; refusals; whole files.

The rules, as both engines' loaders had them in November 2026. A fused MoE is looked up as E (experts), N (the input of
the down projection: an expert's intermediate size), then the device's name with underscores for its spaces, then
``dtype=`` unless activations and weights are 16 bits, then ``block_shape=`` where weights have scales in blocks:
without a space in vLLM, as Python prints a list in SGLang. vLLM calls every H200 ``NVIDIA_H200``. The object maps batch
sizes, as text, to the arguments of the kernel; every key must be a number, and the nearest one is taken. SGLang looks
below ``configs/triton_<version>/`` of the folder in SGLANG_MOE_CONFIG_DIR, vLLM in VLLM_TUNED_CONFIG_FOLDER's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutekernels import cli
from cutekernels import gpu as gpus
from cutekernels.db.certificate import Certificate
from cutekernels.db.store import Environment, Gpu, Store, Trial
from cutekernels.errors import StoreError
from cutekernels.guests import tables
from cutekernels.guests.fused_moe import FusedMoeConfig

QWEN = "experts=128 n=768 k=2048 top_k=8"
FAST = "BLOCK_SIZE_M=16 BLOCK_SIZE_N=128 BLOCK_SIZE_K=64 GROUP_SIZE_M=1 num_warps=4 num_stages=4"
VLLM, SGLANG = "cutekernels.guests.vllm:fused_moe", "cutekernels.guests.sglang:fused_moe"


def row(
    problem: str, *, op: str = VLLM, gpu: str = "h200", config: str = FAST, triton: str = "3.7.1", **more: Any
) -> Trial:
    spec = gpus.lookup(gpu)
    sizes = (spec.sm_count, spec.smem_per_block_bytes, spec.l2_bytes, spec.memory_bytes)
    values = {"revision": 1, "origin": "measured", "status": "ok", "median_us": 100.0, "ratio": 1.25} | more
    return Trial.new(
        gpu=Gpu(spec.name, spec.target, *sizes), environment=Environment(triton=triton),
        op=op, problem=problem, config=config,
        certificate=Certificate(FAST, (FAST,), 3, 2, (1.0,) * 7), **values,
    )  # fmt: skip


def moe(m: int, **more: Any) -> Trial:
    return row(f"m={m} {QWEN}", **more)


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "tuned.db")


def stored(db: str, *rows: Trial) -> None:
    with Store(db) as store:
        store.record(rows)
        for t in rows:
            store.crown(t.id)


def export(db: str, folder: Path, *words: str) -> Any:
    return CliRunner().invoke(cli.app, ["db", "export", str(folder), "--db", db, *words])


def loaded(path: Path) -> dict[int, dict[str, int]]:
    """As the engines load a table."""
    return {int(m): entry for m, entry in json.loads(path.read_text()).items()}


def test_vllm_finds_what_was_tuned(db: str, tmp_path: Path) -> None:
    other = FAST.replace("BLOCK_SIZE_N=128", "BLOCK_SIZE_N=32")
    stored(db, moe(16, config=other), moe(1), moe(4096), row(f"m=1 {QWEN}", op=SGLANG))
    done = export(db, tmp_path / "tables", "--format", "vllm")
    assert done.exit_code == 0, done.output
    table = tmp_path / "tables" / "E=128,N=768,device_name=NVIDIA_H200.json"
    found = loaded(table)
    assert list(found) == [1, 16, 4096]
    assert found[1] == FusedMoeConfig.parse(FAST).as_dict() and found[16]["BLOCK_SIZE_N"] == 32
    assert list(found[1]) == list(tables.KEYS) and {type(v) for v in found[1].values()} == {int}
    evidence = json.loads(table.with_suffix(".certificate.json").read_text())
    assert evidence["16"]["config"] == other and evidence["16"]["certificate"]["processes"] == 2
    assert sorted(p.name for p in table.parent.iterdir()) == [table.with_suffix(".certificate.json").name, table.name]
    assert f"VLLM_TUNED_CONFIG_FOLDER={tmp_path / 'tables'}" in " ".join(done.stderr.split())


def test_sglang_finds_it_below_the_version_of_triton(db: str, tmp_path: Path) -> None:
    fp8 = "experts=256 n=256 k=7168 top_k=8 dtype=fp8_w8a8 block_n=128 block_k=128"
    for triton in ("", "3/../../../x", "3.5.1+git1a2b"):  # SGLang takes a folder's name for numbers, and fails
        with pytest.raises(StoreError, match="tune it again with a release of Triton"):
            tables.tables("sglang", [moe(1, op=SGLANG, triton=triton)])
    stored(db, moe(8, op=SGLANG), row(f"m=8 {fp8}", op=SGLANG))
    assert export(db, tmp_path, "--format", "sglang").exit_code == 0
    written = (p.name for p in (tmp_path / "configs" / "triton_3_7_1").iterdir())
    assert {name for name in written if not name.endswith(".certificate.json")} == {
        "E=128,N=768,device_name=NVIDIA_H200.json",
        "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
    }


@pytest.mark.parametrize(
    ("format", "op", "problem", "gpu", "name"),
    [
        ("vllm", VLLM, f"m=1 {QWEN} dtype=fp16", "rtx5090", "E=128,N=768,device_name=NVIDIA_GeForce_RTX_5090.json"),
        ("vllm", VLLM, f"m=1 {QWEN}", "h100", "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (
            "vllm", VLLM, "m=1 experts=8 n=1024 k=4096 top_k=2 dtype=fp8_w8a8 block_n=128 block_k=128", "h200",
            "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            "vllm", "cutekernels.guests.vllm:block_fp8_linear", "m=1 n=4096 k=7168", "l40s",
            "N=4096,K=7168,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            "sglang", "cutekernels.guests.sglang:block_fp8_linear", "m=1 n=4096 k=7168", "l40s",
            "N=4096,K=7168,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
    ],
)  # fmt: skip
def test_names(format: str, op: str, problem: str, gpu: str, name: str) -> None:
    (table,) = tables.tables(format, [row(problem, op=op, gpu=gpu)])
    assert Path(table.path).name == name


def test_names_of_a_device_that_torch_calls_otherwise() -> None:
    for device, vllm, sglang in (
        ("NVIDIA H200 NVL", "NVIDIA_H200", "NVIDIA_H200_NVL"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",)
        + ("NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",) * 2,
    ):
        made = [
            tables.tables(f, [moe(1, op=op)], device=device)[0].path for f, op in (("vllm", VLLM), ("sglang", SGLANG))
        ]
        assert [path.partition("device_name=")[2] for path in made] == [f"{vllm}.json", f"{sglang}.json"]
    # vLLM has one name for the family where it looks for a MoE's table, not where it looks for a product's.
    product = row("m=1 n=4096 k=7168", op="cutekernels.guests.vllm:block_fp8_linear")
    assert "=NVIDIA_H200_NVL," in tables.tables("vllm", [product], device="NVIDIA H200 NVL")[0].path
    for bad in ("", "a\0b", "N" * 101):
        with pytest.raises(StoreError, match="a device's name has 1 to 100 characters"):
            tables.tables("vllm", [product], device=bad)


def test_a_kernel_of_ones_own_is_named(db: str, tmp_path: Path) -> None:
    stored(db, moe(1, op="mine.moe:kernel"))
    refused = export(db, tmp_path / "none", "--format", "vllm")
    assert refused.exit_code == 1 and "no measured winner of a guest cutekernels.guests.vllm:" in refused.stderr
    assert not (tmp_path / "none").exists()
    assert export(db, tmp_path / "mine", "--format", "vllm", "--op", "mine.moe:kernel").exit_code == 0
    assert len(list((tmp_path / "mine").iterdir())) == 2


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no measured winner"),
        ([moe(1, origin="predicted")], "no measured winner"),
        ([moe(1), row("m=2 experts=128 n=768 k=4096 top_k=8")], "rows of two layers.*choose one with --problem"),
        ([moe(1), moe(2, triton="3.6.0")], r"Triton 3.7.1 and of .* 3.6.0: choose with --gpu or --op"),
        ([moe(1), moe(2, op="cutekernels.guests.vllm:another")], "tune the older again"),
    ],
)
def test_what_makes_no_table_is_refused_in_a_sentence(rows: list[Trial], why: str) -> None:
    with pytest.raises(StoreError, match=why) as raised:
        tables.tables("vllm", rows)
    assert "\n" not in str(raised.value)


def test_rows_that_are_no_tables_are_refused_by_name_and_passed_over_otherwise() -> None:
    strange = row("m=1 cols=8", op="mine.moe:kernel", config="parts=2")
    with pytest.raises(StoreError, match="is no row of a fused MoE"):
        tables.tables("vllm", [strange], op="mine.moe:kernel")
    bad = ["m=1 experts=a n=768 k=2048 top_k=8", "m=1 cols=8"]
    for bad_problem in [*(f"m=2 {QWEN} {word}" for word in ("dtype=../x", "dtype=", "m=3")), f"m=0 {QWEN}", *bad]:
        (table,) = tables.tables("vllm", [moe(1), row(bad_problem)])
        assert list(table.rows) == [1]
    for word in ("num_warps=0", "num_warps=04", "num_warps=4 num_warps=8"):
        with pytest.raises(StoreError, match="no measured winner"):
            tables.tables("vllm", [moe(1, config=FAST.replace("num_warps=4", word))])


def test_a_later_revision_replaces_a_row_and_one_layer_is_chosen(db: str, tmp_path: Path) -> None:
    newer = moe(1, revision=2, config=FAST.replace("num_stages=4", "num_stages=3"))
    for rows in ([moe(1), newer], [newer, moe(1)]):
        (table,) = tables.tables("vllm", rows)
        assert table.rows[1] is newer
    stored(db, moe(1), row("m=2 experts=128 n=768 k=4096 top_k=8"))
    assert export(db, tmp_path / "x", "--format", "vllm").exit_code == 1
    assert export(db, tmp_path / "x", "--format", "vllm", "--problem", "k=4096").exit_code == 0
    assert list(loaded(next(p for p in (tmp_path / "x").iterdir() if "cert" not in p.name))) == [2]


def test_a_layer_is_chosen_by_fields_that_its_row_leaves_out(db: str, tmp_path: Path) -> None:
    stored(db, moe(1), row(f"m=2 {QWEN} dtype=fp16"))
    assert "of two layers" in export(db, tmp_path, "--format", "vllm").stderr
    for dtype, m in (("bf16", 1), ("fp16", 2)):
        assert export(db, tmp_path, "--format", "vllm", "--problem", f"dtype={dtype} block_k=0").exit_code == 0
        assert list(loaded(tmp_path / "E=128,N=768,device_name=NVIDIA_H200.json")) == [m]
    typo, none = (export(db, tmp_path, "--format", "vllm", "--problem", text) for text in ("kk=2048", "k=1"))
    assert typo.exit_code == 2 and "'kk' is not a field" in typo.stderr
    assert none.exit_code == 1 and f"[{QWEN}]" in " ".join(none.stderr.split())


def test_a_table_of_others_is_never_replaced(db: str, tmp_path: Path) -> None:
    """The folder may be the engine's own, whose tables nobody could bring back."""
    layers = moe(1), row("m=1 experts=8 n=768 k=2048 top_k=8")
    stored(db, *layers)
    theirs = tmp_path / "E=8,N=768,device_name=NVIDIA_H200.json"
    theirs.write_text("{}")
    refused = export(db, tmp_path, "--format", "vllm")
    assert refused.exit_code == 1 and "was not exported here" in " ".join(refused.stderr.split())
    assert theirs.read_text() == "{}" and [p for p in tmp_path.iterdir() if p.suffix == ".json"] == [theirs]
    theirs.unlink()
    assert [export(db, tmp_path, "--format", "vllm").exit_code for _ in range(2)] == [0, 0]


def test_a_table_is_written_whole_after_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the second file leaves no table without its evidence, and the old one as it was."""
    (table,) = tables.tables("vllm", [moe(1)])
    (old,) = tables.write(tmp_path, [table])
    before, real = old.read_text(), tables.replace_file
    order: list[str] = []

    def failing(path: Path, text: str) -> None:
        order.append(path.name)
        if len(order) == 2:
            raise OSError(28, "No space left on device")
        real(path, text)

    monkeypatch.setattr(tables, "replace_file", failing)
    with pytest.raises(OSError, match="No space"):
        tables.write(tmp_path, tables.tables("vllm", [moe(1), moe(2)]))
    assert order == [old.with_suffix(".certificate.json").name, old.name]
    assert old.read_text() == before and len(list(tmp_path.iterdir())) == 2


def test_misuse_of_the_command_line(db: str, tmp_path: Path) -> None:
    stored(db, moe(1))
    file = tmp_path / "a-file"
    file.write_text("kept")
    for words, code in (
        (["-", "--format", "vllm"], 2),
        ([str(tmp_path / "t"), "--format", "vllm", "--slim"], 2),
        ([str(tmp_path / "t.jsonl"), "--device-name", "NVIDIA H200"], 2),
        ([str(tmp_path / "t"), "--format", "vllm", "--op", "gemm"], 2),
        ([str(file), "--format", "vllm"], 1),
    ):
        done = CliRunner().invoke(cli.app, ["db", "export", *words, "--db", db])
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (code, True), (words, done.output)
    assert file.read_text() == "kept"
