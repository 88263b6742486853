"""Workloads of quantized weights: contenders agree with the truth, and peers get the weight in their own layout."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import run, workloads
from bench.baselines import Absent, Contender, Inputs
from bench.suites import Case
from bench.workloads import quantized, quantized_peers
from cutekernels.gpu import lookup
from cutekernels.measure import Samples
from cutekernels.ops.products.dequantize import DEQUANTIZE
from cutekernels.ops.products.packed import QUANTIZED_LINEAR

H200 = lookup("h200")
SMALL: dict[str, dict[str, int]] = {
    "quantized_linear": {"m": 5, "n": 256, "k": 384},
    "quantized_linear_backward": {"m": 5, "n": 256, "k": 384},
    "dequantize": {"n": 256, "k": 384, "columns": 128},
}
FORMATS = tuple(quantized.FORMATS)


def small(op: str, form: str, dtype: str = "bf16") -> tuple[Case, Any, Inputs]:
    case = next(c for c in workloads.cases(op, next(iter(workloads.get(op).suites)), dtype=dtype) if form in c.label)
    problem = run.parse_case(case)[1].replace(**SMALL[op])
    case = dataclasses.replace(case, problem=str(problem))
    return case, problem, workloads.get(op).inputs(case, problem, "cpu", 0)


def check(case: Case, i: Inputs, bind: Callable[..., Any]) -> None:
    (exact,) = workloads.get(case.op).truth(case, i)
    i.out.fill_(float("nan"))
    written = bind(case, [i])[0]()
    written = written[0] if isinstance(written, tuple) else written
    assert written.shape == exact.shape
    torch.testing.assert_close(written.double(), exact, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("op", SMALL)
def test_ours_and_plain_torch_agree_with_the_truth(op: str, form: str) -> None:
    plain = [p for p in workloads.get(op).peers if p.name in ("cublas", "our ops in bf16", "eager")]
    assert plain
    for contender in (*plain, run.ours("cutekernels")):
        case, _, i = small(op, form)
        check(case, i, contender.bind)


def test_the_suites_are_ten_weights_of_four_models_in_three_formats() -> None:
    assert len(quantized.WEIGHTS) == 4
    for suite, tokens in (("decode", (1, 4, 8, 16)), ("tokens", (1, 8, 32, 64, 128, 256))):
        problems = [run.parse_case(case)[1] for case in workloads.cases("quantized_linear", suite)]
        assert {p.m for p in problems} == set(tokens)
        weights = {(p.n, p.k) for p in problems}
        assert len(weights) == 10
        assert len(problems) == 10 * len(tokens) * len(FORMATS)
    held = {(p.n, p.k) for p in (run.parse_case(c)[1] for c in workloads.cases("quantized_linear", "heldout"))}
    assert not held & weights


@pytest.mark.parametrize("form", FORMATS)
def test_operands_pose_the_case(form: str) -> None:
    _, p, i = small("quantized_linear", form)
    options = {"code": p.code, "group": p.group, "n": p.n, "activation": "none"}
    assert QUANTIZED_LINEAR.problem(i.out, *i.operands, None, None, None, **options) == p
    _, d, i = small("dequantize", form)
    options = {name: getattr(d, name) for name in DEQUANTIZE.options}
    assert DEQUANTIZE.problem(i.out, *i.operands, None, None, **options) == d
    assert i.bytes == pytest.approx(DEQUANTIZE.work(d).bytes, rel=1e-3)


def test_a_gradient_has_one_row_of_ours_without_a_config() -> None:
    case, _, _ = small("quantized_linear_backward", "int4")
    plan = run.RunPlan("qlora", H200, {}, rounds=5, device="cpu", warm=True)
    (own,) = [w for w in run.contenders(case, plan) if w.name.startswith("cutekernels")]
    assert (own.name, own.config) == ("cutekernels", "")
    forward = workloads.work(dataclasses.replace(case, op="quantized_linear"))
    assert workloads.work(case).flops == forward.flops


# ---- peers, by what their own references say of their layouts ---------------------------------------------


def _nibbles(packed: Tensor, first_high: bool) -> Tensor:
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if first_high else (low, high), -1).flatten(1)


def _humming(monkeypatch: pytest.MonkeyPatch, off: float = 0.0) -> None:
    """``HummingLayer`` as its ``dequantize_weight`` and ``get_tensors_attrs`` define it."""

    class HummingLayer(torch.nn.Module):
        def __init__(self, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype) -> None:
            super().__init__()
            self.shape, self.config, self.kind = (shape_n, shape_k), weight_config, torch_dtype
            self.weight: Tensor | None = None

        def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
            (n, k), group = self.shape, self.config["group_size"] or self.shape[1]
            rows = n // self.config.get("group_size_n", 1)
            assert tensors["weight_scale"].shape == (rows, k // group)
            data = tensors["weight"]
            bits = {"uint4": 4, "float8e4m3": 8}[self.config["dtype"]]
            assert data.dtype == torch.int32
            assert data.shape == (n, k * bits // 32)
            flat = data.view(torch.uint8)
            values = _nibbles(flat, False).float() - 8 if bits == 4 else flat.view(torch.float8_e4m3fn).float()
            scales = tensors["weight_scale"].to(torch.float32 if rows < n else self.kind).float()
            self.loaded = values * scales.repeat_interleave(group, 1).repeat_interleave(n // rows, 0)

        def transform(self) -> None:
            self.ready = self.loaded

        def forward(self, inputs: Tensor, outputs: Tensor) -> Tensor:
            return outputs.copy_(inputs.float() @ self.ready.t() + off)

    module = ModuleType("humming.layer")
    module.HummingLayer = HummingLayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)


def _quack(monkeypatch: pytest.MonkeyPatch) -> None:
    """``quack.gemm_w4`` as its ``dequant_int4_reference`` and ``Fp8`` define it."""

    def prepare_w4_weight(q: Tensor, sf: Tensor | None, wformat: str) -> tuple[Tensor, None]:
        if wformat == "fp8":
            return q.float(), None
        assert sf is not None
        assert sf.dtype == torch.bfloat16
        return (_nibbles(q, False).float() - 8) * sf.float().repeat_interleave(128, 1), None

    def gemm_w4a16(act: Tensor, blob: Tensor, sf: None, *, out: Tensor, wformat: str) -> Tensor:
        return out.copy_(act.float() @ blob.t())

    def channels(x: Tensor, blob: Tensor, scales: Tensor, out: Tensor) -> Callable[[], Tensor]:
        assert scales.shape == (1, out.shape[1])
        return lambda: out.copy_((x.float() @ blob.t()) * scales)

    ours, theirs = ModuleType("bench.workloads.quack_channels"), ModuleType("quack.gemm_w4")
    ours.channels = channels  # type: ignore[attr-defined]
    theirs.gemm_w4a16, theirs.prepare_w4_weight = gemm_w4a16, prepare_w4_weight  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_w4", theirs)
    monkeypatch.setitem(sys.modules, "bench.workloads.quack_channels", ours)


def _tinygemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchao's ``groupwise_affine_dequantize_tensor`` undoes it: ``(q - 8) * scale + offset``."""

    def product(x: Tensor, packed: Tensor, group: int, table: Tensor) -> Tensor:
        assert table.dtype == torch.bfloat16
        scale, offset = (table[..., at].t().float().repeat_interleave(group, 1) for at in (0, 1))
        weight = (_nibbles(packed, True).float() - 8) * scale + offset
        return (x.float() @ weight.t()).to(x.dtype)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda packed, inner: packed)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", product)


@pytest.mark.parametrize(
    ("name", "forms"), [("humming", FORMATS), ("quack", FORMATS[:2]), ("tinygemm", FORMATS[:1])], ids=lambda x: str(x)
)
def test_a_peer_gets_the_weight_in_its_own_layout(
    monkeypatch: pytest.MonkeyPatch, name: str, forms: tuple[str, ...]
) -> None:
    (peer,) = [p for p in quantized_peers.PEERS if p.name == name]
    {"humming": _humming, "quack": _quack, "tinygemm": _tinygemm}[name](monkeypatch)
    for form in FORMATS:
        case, _, i = small("quantized_linear", form)
        if form in forms:
            check(case, i, peer.bind)
        else:
            with pytest.raises(Absent):
                peer.bind(case, [i])


def test_a_peer_takes_fp16_only_where_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _humming(monkeypatch)
    case, _, i = small("quantized_linear", "int4", "fp16")
    check(case, i, quantized_peers.humming)
    for bind in (quantized_peers.quack, quantized_peers.tinygemm):
        with pytest.raises(Absent, match="not int4 times fp16"):
            bind(case, [i])


def test_a_peer_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = small("quantized_linear", "int4")
    plan = run.RunPlan("decode", H200, {}, rounds=5, device="cpu", warm=True)
    for name, bind in (("humming", quantized_peers.humming), ("quack", quantized_peers.quack)):
        monkeypatch.setitem(sys.modules, name, None)
        (row,) = run.run_case(case, plan, [Contender(name, bind)], run.Timer())
        assert row.status == "absent" and name in row.reason


def test_a_wrong_peer_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = small("quantized_linear", "int4")
    plan = run.RunPlan("decode", H200, {}, rounds=5, device="cpu", warm=True)

    def prepare(launches: Any, least_us: float) -> Any:
        round_ = lambda: 10.0  # noqa: E731
        round_.launches = 1  # type: ignore[attr-defined]
        return round_

    timer = run.Timer(prepare, lambda launch, **_: Samples((1.0,) * 5))
    for off, status in ((0.0, "ok"), (0.5, "wrong_result")):
        _humming(monkeypatch, off)
        (row,) = run.run_case(case, plan, [Contender("humming", quantized_peers.humming)], timer)
        assert row.status == status, row.reason
        assert (row.median_us is None) == (status != "ok")
