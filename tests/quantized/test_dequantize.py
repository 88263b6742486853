"""``dequantize`` and the gradient that decodes with it: the op, its kernel compiled, the parts of a weight."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import cutekernels as ck
from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.smem import DequantizeSmem
from cutekernels.ops.products import backward
from cutekernels.ops.products import packed_api as api
from cutekernels.ops.products.dequantize import DEQUANTIZE, DequantizeConfig, DequantizeProblem
from tests.compiled import H200, TARGETS, cubin, opcodes, pairs, sass
from tests.quantized import cases
from tests.quantized.cases import BF16, FP16, FP32, KINDS, error, make

assert api, "it registers the op"
SUITE = [DequantizeProblem.parse(text) for text in DEQUANTIZE.suite]


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_the_reference_is_the_definition(kind: cases.Kind) -> None:
    made = make(129, 200, kind)
    weight = made.weight()
    held = weight.packed, weight.scales, weight.zeros, weight.factors
    found = DEQUANTIZE.path(*held, kind.code, kind.group, 129, 200, 72, "bf16", 64, None)
    assert torch.equal(found, made.exact()[:, 64:136].float().bfloat16())
    assert torch.equal(weight.dequantize(torch.float32), made.exact().float())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [cases.Kind(group=64, zeros=True), cases.Kind("e4m3", 128, 128)], ids=str)
def test_opcheck(kind: cases.Kind) -> None:
    weight = make(40, 136, kind).weight()
    given = weight.packed, weight.scales, weight.zeros, weight.factors
    options = kind.code, kind.group, 40, 136, 72, "fp16", 64
    torch.library.opcheck(torch.ops.cutekernels.dequantize.default, (*given, *options))
    out = torch.empty(40, 72, dtype=torch.float16)
    torch.library.opcheck(torch.ops.cutekernels.dequantize_out.default, (*given, out, *options))


def test_refusals() -> None:
    weight = make(40, 136).weight()

    def called(packed: torch.Tensor, scales: torch.Tensor, *options: object) -> None:
        DEQUANTIZE.path(packed, scales, None, None, *options, None)

    good = "int4", 128, 40, 136, 72, "bf16", 64
    called(weight.packed, weight.scales, *good)
    for change, message in (
        ({0: "int5"}, "code must be one of"),
        ({2: 300}, r"takes packed .* = \(5, 3, 2048\); got \(1, 3, 2048\)"),
        ({3: 300}, r"takes packed .* = \(1, 5, 2048\)"),
        ({1: 64}, r"takes scales .* = \(3, 64 or 1\); got \(2, 64\)"),
        ({4: 0}, "columns must be"),
        ({5: "fp32"}, "dtype must be"),
    ):
        options = [change.get(i, value) for i, value in enumerate(good)]
        with pytest.raises(UnsupportedProblem, match=message) as error:
            called(weight.packed, weight.scales, *options)
        assert "\n" not in str(error.value)
    with pytest.raises(UnsupportedProblem, match="takes packed in uint8"):
        called(weight.packed.int(), weight.scales, *good)
    with pytest.raises(UnsupportedProblem, match="takes scales in float16 or bfloat16"):
        called(weight.packed, weight.scales.double(), *good)


def test_problems_that_no_weight_poses() -> None:
    for text, message in (
        ("n=64 columns=64 k=64 code=int8 zeros=1", "zero points are of int4"),
        ("n=64 columns=64 k=64 group=64 scale_rows=128", "blocks of 128 x 128"),
        ("n=64 columns=60 k=64", "out_align=8 must divide"),
    ):
        with pytest.raises(UnsupportedProblem, match=message):
            DequantizeProblem.parse(text)


def test_out_of_any_alignment_poses_a_problem() -> None:
    given = make(40, 136).weight()
    options = {"code": "int4", "group": 128, "n": 40, "k": 136, "columns": 72, "dtype": "bf16"}
    memory = torch.empty(40, 90, dtype=BF16)
    for out, align in ((torch.empty(40, 72, dtype=BF16), 8), (memory[:, 8:80], 1), (memory.view(-1)[1:2881], 1)):
        p = DEQUANTIZE.problem(
            out.view(40, 72) if out.dim() == 1 else out, given.packed, given.scales, None, None, **options
        )
        assert p.out_align == align
        assert p.columns == 72


# ---- the kernel, compiled -------------------------------------------------------------------------------


@pytest.mark.parametrize(("problem", "spec"), pairs(SUITE), ids=lambda x: getattr(x, "target", str(x)))
def test_it_compiles_without_a_stack(problem: DequantizeProblem, spec: gpu.GpuSpec) -> None:
    """The default and a random config, in turns."""
    chosen = DEQUANTIZE.default(problem, spec)
    if SUITE.index(problem) // len(TARGETS) % 2:
        chosen = random.Random(f"{problem} {spec.target}").choice(list(DEQUANTIZE.valid(problem, spec)))
    facts = DEQUANTIZE.build(problem, chosen, spec).facts
    assert facts.stack_bytes == 0, (chosen, facts)
    assert facts.smem_bytes == DequantizeSmem(chosen.tiles).total_bytes
    assert facts.registers <= 64, "fewer CTAs are resident"


@pytest.mark.parametrize(("code", "tiles"), [("int4", 1), ("int8", 1), ("e4m3", 2), ("int4", 4)])
def test_memory_is_read_and_written_16_bytes_at_a_time(code: str, tiles: int) -> None:
    problem = DequantizeProblem.parse(f"n=4096 columns=4096 k=4096 group=64 code={code}")
    made = DEQUANTIZE.build(problem, DequantizeConfig(tiles, True), H200)
    found = opcodes(made)
    assert found["STG.E.128"] == 4 * tiles
    assert found["LDG.E.128"] == tiles * (1 if code == "int4" else 2)
    assert not found["BAR.SYNC"]
    # 16 CTAs of an SM, 2,048 threads, have 32 registers each.
    assert tiles > 1 or made.facts.registers <= 32


def test_rows_of_any_alignment_are_not_written_16_bytes_at_a_time() -> None:
    problem = DequantizeProblem.parse("n=4096 columns=4096 k=4096 group=64 out_align=1")
    found = opcodes(DEQUANTIZE.build(problem, DequantizeConfig(1, True), H200))
    assert not any(name.startswith("STG") and name.endswith("128") for name in found)


def test_nothing_is_read_before_the_previous_kernel_has_ended() -> None:
    text = sass(cubin(DEQUANTIZE.build(SUITE[2], DequantizeConfig(1, True), H200)))
    assert text.index("ACQBULK") < text.index("LDG.E") < text.index("PREEXIT") < text.index("STG.E")
    alone = sass(cubin(DEQUANTIZE.build(SUITE[2], DequantizeConfig(1, False), H200)))
    assert "ACQBULK" not in alone
    assert "PREEXIT" not in alone


def test_a_knob_that_a_gpu_or_a_problem_lacks_is_refused() -> None:
    p = SUITE[3]
    assert "more than 64 columns" in str(DEQUANTIZE.why_not(p, DequantizeConfig(2, False), H200))
    assert "dependent launch" in str(DEQUANTIZE.why_not(p, DequantizeConfig(1, True), TARGETS[0]))
    assert DEQUANTIZE.default(p, H200) == DequantizeConfig(1, True)


# ---- the gradient ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, k", [(64, 64), (4096, 3072), (4096, 3080), (4096, 14336), (14336, 4096), (8192, 8192), (57344, 8200), (1, 1)]
)
def test_parts_of_a_weight(n: int, k: int) -> None:
    found = list(backward.parts(n, k, 1 << 20, gpu.lookup("h200")))
    assert found[0][0] == 0
    assert found[-1][1] == k
    assert all(end == begin for (_, end), (begin, _) in pairwise(found))
    assert (len(found) == 1) == (n * k * 2 <= backward.DECODED_BYTES)
    unit = 256 if n * 512 <= backward.DECODED_BYTES else 64
    for begin, end in found:
        assert n * (end - begin) * 2 <= backward.DECODED_BYTES
        assert begin % unit == 0
        assert end == k or (end - begin) % unit == 0


def test_parts_of_few_tokens_fill_the_gpu_at_hand() -> None:
    widths = {name: next(iter(backward.parts(2048, 1 << 20, 128, gpu.lookup(name))))[1] for name in ("h200", "l40s")}
    assert all(width * 128 >= gpu.lookup(name).sm_count * 128 * 256 * 0.95 for name, width in widths.items())
    assert widths["l40s"] > widths["h200"], "142 SMs against 132"


@pytest.mark.parametrize(
    "n, k, m", [(28672, 8192, 2048), (28672, 8192, 8192), (4096, 14336, 2048), (4096, 14336, 8192)]
)
def test_parts_are_whole_waves_of_the_product_s_tiles(n: int, k: int, m: int) -> None:
    (_, width), *_ = backward.parts(n, k, m, gpu.lookup("h200"))
    waves = (m // 128) * (width // 256) / 132
    assert waves / -(-waves // 1) > 0.95


def test_a_weight_of_very_many_rows_is_decoded_a_tile_at_a_time() -> None:
    assert list(backward.parts(1 << 20, 136, 1 << 20, gpu.lookup("h200"))) == [(0, 64), (64, 128), (128, 136)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
def test_the_gradient_op(dtype: torch.dtype) -> None:
    made = make(72, 200, cases.Kind(group=64, zeros=True))
    weight, dout = made.weight(), torch.randn(5, 72).to(dtype)
    given = dout, weight.packed, weight.scales, weight.zeros, weight.factors
    options = "int4", 64, 72, 200
    dx = backward.LINEAR_BACKWARD(*given, *options)
    dense = made.exact().to(dtype).double()
    assert error(dx, (dout.double() @ dense).to(dtype), 72) <= 1
    out = torch.full((5, 210), 7.0, dtype=dtype)
    torch.ops.cutekernels.quantized_linear_backward_out(*given, out[:, 4:204], *options)
    assert torch.equal(out[:, 4:204], dx)
    assert bool((out[:, :4] == 7).all() and (out[:, 204:] == 7).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck_of_the_gradient() -> None:
    weight = make(40, 136, cases.Kind("e4m3", 128, 128)).weight()
    given = torch.randn(3, 40).bfloat16(), weight.packed, weight.scales, None, None
    torch.library.opcheck(torch.ops.cutekernels.quantized_linear_backward.default, (*given, "e4m3", 128, 40, 136))


def test_a_graph_sees_one_op() -> None:
    weight = make(40, 136).weight()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(ck.linear(x, weight).sum(), x)[0]

    graph = make_fx(step)(torch.randn(3, 136).requires_grad_()).graph
    names = [str(node.target) for node in graph.nodes if "cutekernels" in str(node.target)]
    assert names == ["cutekernels._quantized_linear.default", "cutekernels._quantized_linear_backward.default"]


def test_refusals_of_the_gradient() -> None:
    weight = make(40, 136).weight()
    held = weight.packed, weight.scales, None, None, "int4", 128
    dout = torch.randn(3, 40).bfloat16()
    for given, options, message in (
        (dout[:, 1:], (40, 136), "dout must be"),
        (dout[0], (40, 136), "dout must be"),
        (dout.int(), (40, 136), "dout must be fp16 or bf16"),
        (dout, (40, 300), r"takes packed .* = \(1, 5, 2048\)"),
    ):
        with pytest.raises(UnsupportedProblem, match=message):
            backward.LINEAR_BACKWARD(given, *held, *options)
    with pytest.raises(UnsupportedProblem, match="dx must be"):
        torch.ops.cutekernels.quantized_linear_backward_out(
            dout, *held[:4], torch.empty(3, 135, dtype=BF16), *held[4:], 40, 136
        )
    x = dout.clone().requires_grad_()
    with pytest.raises(UnsupportedProblem, match="no gradient"):
        backward.LINEAR_BACKWARD(x, *held, 40, 136).sum().backward()
