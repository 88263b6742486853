"""Other projects' products with packed weights: each repacks the weight of a case once, outside of the timed call.

Their scales are bf16 where a project has no other: a rounding of 2^-9 that a row's error shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch
from bench.suites import Case
from bench.workloads import parse_case
from cutekernels.quant import layout

_INNER_K_TILES = 8  # of tinygemm: its widest loads
_QUACK_ROWS = 128  # QuACK pads N to these, and then cannot write to out


@dataclass(frozen=True, slots=True)
class Rows:
    """A weight as checkpoints have it: codes ``(N, K)``, one in a byte, and scales ``(N or blocks of N, groups)``."""

    codes: Tensor
    scales: Tensor


def rows_of(problem: Any, packed: Tensor, scales: Tensor) -> Rows:
    """The weight of a problem of ``quantized_linear`` or ``dequantize``, unpacked."""
    codes = layout.unpack(packed, problem.code, problem.n, problem.k)
    rows = problem.n if problem.scale_rows == 1 else -(-problem.n // problem.scale_rows)
    return Rows(codes, scales.t()[:rows].contiguous())


def nibbles(codes: Tensor, first_high: bool = False) -> Tensor:
    """``codes`` of four bits, two in a byte along K: the first in the low half, or in the high one."""
    even, odd = codes[:, ::2], codes[:, 1::2]
    return ((even << 4) | odd if first_high else even | (odd << 4)).contiguous()


def _problem(case: Case, codes: Sequence[str], dtypes: Sequence[str] = ("bf16",)) -> Any:
    """The problem of ``case``. Absent where the peer has no such elements, or the suite's options are others."""
    p = parse_case(case)[1]
    if p.code not in codes or p.dtype not in dtypes:
        raise Absent(f"it has {', '.join(codes)} times {', '.join(dtypes)}, not {p.code} times {p.dtype}")
    if (p.code == "int4" and p.group != 128) or p.zeros or p.bias != "none" or p.activation != "none":
        raise Absent("it is called for groups of 128 without zero points, bias and activation")
    return p


def humming(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Its layer with its own heuristics: int4 with bf16 (fp16) scales, e4m3 with a scale per channel or fp32 blocks."""
    p = _problem(case, ("int4", "e4m3"), ("bf16", "fp16"))
    from humming.layer import HummingLayer

    config: dict[str, Any] = {"dtype": "uint4" if p.code == "int4" else "float8e4m3", "group_size": p.group}
    if p.scale_rows > 1:
        if p.n % p.scale_rows or p.k % p.group:
            raise Absent(f"blocks of 128 x 128 must fill the weight; it is {p.n} x {p.k}")
        config["group_size_n"] = p.scale_rows

    def bind(i: Inputs) -> Launch:
        x, packed, scales = i.operands
        rows = rows_of(p, packed, scales)
        weight = nibbles(rows.codes) if p.code == "int4" else rows.codes
        layer = HummingLayer(shape_n=p.n, shape_k=p.k, weight_config=dict(config), torch_dtype=DTYPES[p.dtype])
        layer = layer.to(x.device)
        layer.load_from_tensors({"weight": weight.view(torch.int32), "weight_scale": rows.scales})
        layer.transform()
        return partial(layer, x, i.out)

    return [bind(i) for i in sets]


def quack(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Its W4A16 with bf16 scales, or W8A16 with an epilogue that scales channels; tiles by its own rules."""
    p = _problem(case, ("int4", "e4m3"))
    if p.scale_rows > 1:
        raise Absent("it has no scales per block")
    if p.n % _QUACK_ROWS:
        raise Absent(f"it writes whole tiles of {_QUACK_ROWS} rows; N is {p.n}")
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

    def bind(i: Inputs) -> Launch:
        x, packed, scales = i.operands
        rows = rows_of(p, packed, scales)
        if p.code == "int4":
            blob, strip = prepare_w4_weight(nibbles(rows.codes), rows.scales.bfloat16(), "int4")
            return partial(gemm_w4a16, x, blob, strip, out=i.out, wformat="int4")
        from bench.workloads.quack_channels import channels

        blob, _ = prepare_w4_weight(rows.codes.view(torch.float8_e4m3fn), None, "fp8")
        return channels(x, blob, rows.scales.view(1, p.n).float(), i.out)

    return [bind(i) for i in sets]


def tinygemm(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """torch's int4 product. Its codes 0 to 15 are -8 to 7, and beside each bf16 scale it adds an offset: 0 here."""
    p = _problem(case, ("int4",))
    if p.k % (16 * _INNER_K_TILES) or p.n % 8:
        raise Absent(f"it takes K in multiples of {16 * _INNER_K_TILES} and N of 8; they are {p.k} and {p.n}")

    def bind(i: Inputs) -> Launch:
        x, packed, scales = i.operands
        rows = rows_of(p, packed, scales)
        weight = torch._convert_weight_to_int4pack(nibbles(rows.codes, first_high=True), _INNER_K_TILES)
        steps = rows.scales.t().bfloat16()
        table = torch.stack((steps, torch.zeros_like(steps)), -1).contiguous()
        return partial(torch._weight_int4pack_mm, x, weight, p.group, table)

    return [bind(i) for i in sets]


PEERS = (Contender("humming", humming), Contender("quack", quack), Contender("tinygemm", tinygemm))
