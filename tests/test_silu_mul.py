"""``silu_mul`` without a GPU: declaration, kernels under Triton's interpreter, compiled code, the CPU path.

Triton decides at decoration time whether a kernel is interpreted, so the numerics run in one child process
(this file as a script, with TRITON_INTERPRET=1), which reports an error ratio per case. What the child runs
is the op's own ``build`` and ``bind``; only the compiler between them is replaced.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from cutekernels import gpu
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops import activations as ops
from cutekernels.ops import strides
from cutekernels.ops.activations import SILU_MUL, SILU_MUL_BACKWARD, SiluMulConfig, SiluMulProblem, silu_mul

OPS = {op.name: op for op in (SILU_MUL, SILU_MUL_BACKWARD)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
H200 = gpu.lookup("h200")
TARGETS = [gpu.lookup(name) for name in ("a100", "rtx3090", "l40s", "h200", "rtx5090")]

if not hasattr(torch.ops.cutekernels, "silu_mul"):
    _LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")
    ops.register(_LIBRARY)


# ---- the judge ------------------------------------------------------------------------------------------


OVERFLOWN = 88.8 / torch.finfo(torch.float32).max


def error_ratio(actual: Tensor, exact: Tensor, magnitude: Tensor, factor: Tensor) -> float:
    """Worst error over its tolerance. ``exact`` in fp64, ``magnitude`` the size of the terms it is made of,
    ``factor`` what silu or its derivative is multiplied by.

    Rounding once costs half an ulp of the output's type; twice that is granted (the interpreter truncates to
    bf16), plus 8 ulp of fp32 for the arithmetic, relative to the largest term (dgate crosses zero between terms
    that do not), plus what PyTorch loses too where e^-x overflows fp32, below gate = -88.7.
    """
    kind = torch.finfo(actual.dtype)
    rounded = exact.to(actual.dtype).double()
    _, exponent = torch.frexp(exact.abs().clamp(kind.smallest_normal, kind.max))
    ulp = torch.ldexp(torch.full_like(exact, kind.eps), exponent - 1)
    ratio = (actual.double() - exact).abs() / (ulp + 8 * 2.0**-23 * magnitude + OVERFLOWN * factor)
    ratio = torch.where(rounded.isinf() & (actual.double() == rounded), 0.0, ratio)
    return float(torch.nan_to_num(ratio, nan=1e30, posinf=1e30).max()) if ratio.numel() else 0.0


def truth(op: str, inputs: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each result: its value in fp64, the magnitude of its terms, and what silu or its slope is multiplied by."""
    *d, g, u = [t.double() for t in inputs]
    s = torch.sigmoid(g)
    if op == "silu_mul":
        return [(g * s * u, (g * s * u).abs(), u.abs())]
    slope = s + g * s * (1 - s)
    return [
        (d[0] * u * slope, (d[0] * u).abs() * s * (1 + g.abs() * (1 - s)), (d[0] * u).abs()),
        (d[0] * g * s, (d[0] * g * s).abs(), d[0].abs()),
    ]


# ---- operands -------------------------------------------------------------------------------------------


def fill(memory: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(memory.shape, generator=generator)
    values[torch.rand(memory.shape, generator=generator) < 0.02] *= 40  # outliers: exp overflows for half of them
    return memory.copy_(values)


def operands(
    kind: str, op: str, rows: int, cols: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(results filled with NaN, inputs, the memory behind each result) in one of several arrangements."""
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    declared = OPS[op]

    def place(pitch: int, col: int = 1, offset: int = 0) -> tuple[Tensor, Tensor]:
        memory = torch.full((max(1, rows * max(pitch, cols * col) + offset + 64),), float("nan"), dtype=dtype)
        return memory, memory.as_strided((rows, cols), (pitch, col), offset)

    arrange: dict[str, Callable[[int], tuple[int, int, int]]] = {
        "dense": lambda i: (cols, 1, 0),
        "misaligned": lambda i: (cols, 1, i + 1),
        "halves": lambda i: (2 * cols, 1, i % 2 * cols),
        "padded": lambda i: (cols + 16 - cols % 8, 1, 8 * i),
        "every other": lambda i: (2 * cols, 2, i),
        "transposed": lambda i: (1, rows, 0) if i % 2 else (cols, 1, 0),
        "expanded rows": lambda i: (0, 1, 0) if i == len(declared.results) else (cols, 1, 0),
        "expanded everywhere": lambda i: (0, 0, 0) if i == len(declared.results) else (cols, 1, 0),
    }
    placed = [place(*arrange[kind](i)) for i in range(len(declared.results) + len(declared.inputs))]
    results, inputs = placed[: len(declared.results)], placed[len(declared.results) :]
    for memory, _ in inputs:
        fill(memory, generator)
    return [view for _, view in results], [view for _, view in inputs], [memory for memory, _ in results]


# ---- the child process ----------------------------------------------------------------------------------


def interpret(
    op_name: str, results: list[Tensor], inputs: list[Tensor], config: str | None, edit: dict[str, int]
) -> str:
    """Runs the op's kernel on CPU tensors; ``edit`` changes run-time arguments, to plant bugs. Returns the problem."""
    from cutekernels.backends import triton as backend
    from cutekernels.kernels.triton import activations as kernels

    op = OPS[op_name]
    problem = op.problem(*results, *inputs)
    chosen = op.default(problem, H200) if config is None else SiluMulConfig.parse(config)
    op.check(problem, chosen, H200)
    built: dict[str, Any] = {}
    backend.compile_kernel = lambda fn, **given: built.update(given)  # type: ignore[assignment]
    op.build(problem, chosen, H200)
    tensors = {t.data_ptr(): t.as_strided((1,), (1,)) for t in (*results, *inputs)}

    def kernel(grid: tuple[int, int, int], *args: Any) -> None:
        names = dict(zip(built["signature"], args, strict=False))
        for name, value in built["constexprs"].items():  # what was promised must be what is passed
            assert name not in names or names[name] == value or problem.rows == 1, (name, names[name], value)
        for name, divisor in built["divisible"].items():
            assert names[name] % divisor == 0 or (name.endswith("_row") and problem.rows == 1), (name, names[name])
        names = {n: v + edit.get(n, 0) for n, v in names.items()} | built["constexprs"]
        names |= {n: tensors[v] for n, v in names.items() if n.endswith("_ptr")}
        getattr(kernels, op_name)[grid](**names, num_warps=chosen.warps)

    op.bind(problem, chosen, kernel)(*results, *inputs)
    return str(problem)


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    if "values" in case:
        results = [
            torch.full((len(case["values"]),), 7.0, dtype=DTYPES[case["dtype"]]) for _ in OPS[case["op"]].results
        ]
        inputs = [torch.ones_like(results[0]) for _ in OPS[case["op"]].inputs]
        inputs[-2].copy_(torch.tensor([float(v) for v in case["values"]]))
        interpret(case["op"], results, inputs, None, {})
        return {"results": [[str(v) for v in r.tolist()] for r in results]}
    results, inputs, memory = operands(case["kind"], case["op"], case["rows"], case["cols"], DTYPES[case["dtype"]])
    if case.get("inplace"):
        results = [inputs[-2], *results[1:]]
    exact = truth(case["op"], inputs)
    problem = interpret(case["op"], results, inputs, case.get("config"), case.get("edit", {}))
    outside = True
    for view, whole in zip(results, memory, strict=True):
        if not case.get("inplace"):
            untouched = torch.ones_like(whole, dtype=torch.bool)
            untouched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            outside &= bool(whole[untouched].isnan().all())
    ratios = [error_ratio(r, *e) for r, e in zip(results, exact, strict=True)]
    return {"ratio": max(ratios), "outside": outside, "problem": problem}


def child() -> None:
    from cutekernels.kernels.triton import activations as kernels

    cases = json.load(sys.stdin)
    healthy = kernels._over_one_plus_exp
    replies = []
    for case in cases:
        kernels._over_one_plus_exp = slightly_off if case.get("planted") else healthy
        replies.append(child_case(case))
    json.dump(replies, sys.stdout)


@triton.jit
def slightly_off(x, y, PRECISE):
    return x / (1.0 + tl.exp(-1.01 * y))


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    kinds = [
        "dense",
        "misaligned",
        "halves",
        "padded",
        "every other",
        "transposed",
        "expanded rows",
        "expanded everywhere",
    ]
    for op, kind, (rows, cols) in product(OPS, kinds, [(3, 100), (5, 37), (1, 515)]):
        cases[f"{op} {kind} {rows}x{cols}"] = {"op": op, "kind": kind, "rows": rows, "cols": cols, "dtype": "bf16"}
    for op, dtype, kind in product(OPS, ("fp16", "fp32"), ("dense", "halves", "every other")):
        cases[f"{op} {kind} {dtype}"] = {"op": op, "kind": kind, "rows": 7, "cols": 130, "dtype": dtype}
    for op, (rows, cols) in product(OPS, [(0, 8), (8, 0), (1, 1), (9, 1)]):
        cases[f"{op} {rows}x{cols}"] = {"op": op, "kind": "dense", "rows": rows, "cols": cols, "dtype": "bf16"}
    for name in OPS:
        cases[f"{name} inplace"] = {
            "op": name,
            "kind": "dense",
            "rows": 4,
            "cols": 300,
            "dtype": "fp16",
            "inplace": True,
        }
    rng = random.Random(20)
    for op, text in product(
        OPS.values(), ["rows=9 cols=75 layout=rows", "rows=9 cols=75 layout=strided", "rows=9 cols=75"]
    ):
        problem = SiluMulProblem.parse(text)
        kind = {"rows": "padded", "strided": "every other", "dense": "dense"}[problem.layout]
        for config in rng.sample(list(op.valid(problem, H200)), 4):
            key = f"{op.name} {kind} [{config}]"
            cases[key] = {"op": op.name, "kind": kind, "rows": 9, "cols": 75, "dtype": "bf16", "config": str(config)}
    return cases


VALUES = ["-inf", "inf", "nan", "-100", "-88.7", "-87", "88.5", "100", "-0.0", "0.0", "1e-30", "-2.5"]
CASES = numerics_cases()
SPECIAL = {
    f"{op} {dtype}": {"op": op, "dtype": dtype, "values": VALUES} for op, dtype in product(OPS, ("bf16", "fp32"))
}
_SMALL = {"op": "silu_mul", "rows": 5, "cols": 100, "dtype": "bf16"}
PLANTED = {
    "a column forgotten": _SMALL | {"kind": "halves", "edit": {"cols": -1}},
    "a row forgotten": _SMALL | {"kind": "halves", "edit": {"rows": -1}},
    "written past the rows": _SMALL | {"kind": "halves", "edit": {"cols": 1}},
    "up read by gate's pitch": _SMALL | {"kind": "padded", "edit": {"up_row": -4}},
    "out written by another pitch": _SMALL | {"kind": "padded", "edit": {"out_row": -4}},
    "the exponent one per cent off": _SMALL | {"kind": "dense", "planted": True},
    "the gradient one per cent off": _SMALL | {"op": "silu_mul_backward", "kind": "dense", "planted": True},
}


@pytest.fixture(scope="session")
def interpreted() -> dict[str, dict[str, Any]]:
    """What the child says of every case above."""
    cases = {**CASES, **SPECIAL, **PLANTED}
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(list(cases.values())),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


# ---- kernels, interpreted -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_kernel_numerics(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    reply = interpreted[case]
    assert reply["ratio"] <= 1, reply
    assert reply["outside"], f"wrote outside of its result: {reply}"


def test_every_layout_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [SiluMulProblem.parse(interpreted[case]["problem"]) for case in CASES]
    assert {p.layout for p in problems} == {"dense", "rows", "strided"}
    assert {p.align for p in problems if p.layout != "strided"} == {2, 4, 8, 16}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(interpreted: dict[str, dict[str, Any]], bug: str) -> None:
    reply = interpreted[bug]
    assert reply["ratio"] > 1 or not reply["outside"], reply


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values_are_torch_s(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    """NaN, infinities and signed zeros come out as from ``F.silu`` in fp32."""
    gate = torch.tensor([float(v) for v in VALUES], dtype=DTYPES[SPECIAL[case]["dtype"]]).float().requires_grad_()
    silu = torch.nn.functional.silu(gate)
    if SPECIAL[case]["op"] == "silu_mul":
        expected = [silu.detach()]
    else:
        silu.sum().backward()
        assert gate.grad is not None
        # torch has no value of its own for silu at inf as a factor; dup is silu(gate) as s * gate.
        expected = [gate.grad, (gate * torch.sigmoid(gate)).detach()]
    for got, want in zip(interpreted[case]["results"], expected, strict=True):
        actual = torch.tensor([float(v) for v in got])
        tolerance = 2.0**-7 if "bf16" in case else 2.0**-20
        torch.testing.assert_close(actual, want, rtol=tolerance, atol=1e-37, equal_nan=True)
        assert torch.equal(actual.signbit() | actual.isnan(), want.signbit() | want.isnan())


# ---- kernels, compiled ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTEKERNELS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@cache
def ptx(op: str, problem: SiluMulProblem, config: SiluMulConfig, target: str) -> str:
    return OPS[op].build(problem, config, gpu.lookup(target)).ptx  # type: ignore[attr-defined, no-any-return]


def accesses(text: str) -> set[str]:
    return set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", text))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name)
    for text in (
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=64 cols=99 dtype=fp32 layout=strided",
    ):
        problem = SiluMulProblem.parse(text)
        configs = [op.default(problem, spec), rng.choice(list(op.valid(problem, spec)))]
        for config in configs:
            facts = op.build(problem, config, spec).facts
            assert facts.stack_bytes == 0, (text, config, facts)
            assert facts.smem_bytes == 0
            assert facts.registers * 32 * config.warps <= 64 * 1024


def test_the_largest_tiles_do_not_spill() -> None:
    """The rule on registers in why_not is there to keep every valid config free of spills."""
    for op, text in product(OPS.values(), ["rows=64 cols=8192 layout=rows", "rows=64 cols=99 layout=strided"]):
        problem = SiluMulProblem.parse(text)
        worst = max(op.valid(problem, H200), key=lambda c: c.block_rows * c.block_cols / c.warps)
        assert op.build(problem, worst, H200).facts.stack_bytes == 0, worst


BASE = {
    "dense": SiluMulConfig(1, 2048, 4, "normal"),
    "rows": SiluMulConfig(2, 1024, 4, "normal"),
    "strided": SiluMulConfig(16, 32, 4, "normal"),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("layout", BASE)
def test_every_knob_changes_the_code_or_the_grid(op: Any, layout: str) -> None:
    problem = SiluMulProblem(2048, 11008, layout=layout)
    base = op.check(problem, BASE[layout], H200)
    seen = {(ptx(op.name, problem, base, "h200"), op.grid(problem, base))}
    for knob, values in SiluMulConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        others = [c for c in others if op.why_not(problem, c, H200) is None]
        assert others or (knob == "block_rows" and layout == "dense"), knob
        for config in others[:2]:
            made = (ptx(op.name, problem, config, "h200"), op.grid(problem, config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("rows=2048 cols=11008", {"v4.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows", {"v4.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=8", {"v2.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=4", {"b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=2", {"b16"}),
        ("rows=2048 cols=11008 dtype=fp32", {"v4.b32", "b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(text: str, widths: set[str]) -> None:
    """The narrow ones belong to the ragged end of a row, whatever its length."""
    problem = SiluMulProblem.parse(text)
    for target in ("a100", "h200", "rtx5090"):
        config = SILU_MUL.default(problem, gpu.lookup(target))
        assert accesses(ptx("silu_mul", problem, config, target)) == widths


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = BASE["rows"]
    first, second = (SiluMulProblem(rows, cols, layout="rows") for rows, cols in ((2048, 11008), (64, 999)))
    assert first.static() == second.static()
    assert ptx("silu_mul", first, config, "h200") == ptx("silu_mul", second, config, "h200")


# ---- the declaration ------------------------------------------------------------------------------------

problems = st.builds(
    SiluMulProblem,
    rows=st.integers(0, 1 << 40) | st.integers(0, 70),
    cols=st.integers(0, 1 << 40) | st.integers(0, 70),
    dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(["dense", "rows", "strided"]),
    align=st.sampled_from([16, 8, 4]),
)


@given(problem=problems, spec=st.sampled_from(gpu.GPUS))
@settings(deadline=None, max_examples=200)
def test_default_is_valid_and_everything_round_trips(problem: SiluMulProblem, spec: gpu.GpuSpec) -> None:
    for op in OPS.values():
        config = op.default(problem, spec)
        assert op.why_not(problem, config, spec) is None, (problem, config)
        assert op.estimate_us(problem, config, spec) > 0
        assert SiluMulConfig.parse(str(config)) == config
        x, y, z = op.grid(problem, config)
        assert x < 1 << 31
        assert z == 1
        if problem.rows * problem.cols < 1 << 50:
            assert y < 1 << 16
    assert SiluMulProblem.parse(str(problem)) == problem
    assert problem.bucket().bucket() == problem.bucket()


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_suite_samples_pose_their_problem(op: Any) -> None:
    for text in op.suite:
        problem = SiluMulProblem.parse(text)
        small = problem.replace(rows=min(problem.rows, 40))
        args = op.sample(small, "cpu", 3)
        results = op.outputs(small, *args)
        assert op.problem(*results, *args) == small
        assert [r.shape for r in results] == [args[0].shape] * len(op.results)
        again = op.sample(small, "cpu", 3)
        assert all(torch.equal(a, b) for a, b in zip(args, again, strict=True))
        assert not torch.equal(args[0], op.sample(small, "cpu", 4)[0])
        reference = op.reference(small, *args)
        for result, exact in zip(reference, truth(op.name, list(args)), strict=True):
            assert error_ratio(result, *exact) <= 1


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize(
    "text", ["rows=6 cols=33 layout=rows", "rows=6 cols=33 layout=rows align=4", "rows=6 cols=40 align=8"]
)
def test_awkward_problems_can_be_posed(op: Any, text: str) -> None:
    """A promised alignment that a contiguous row does not have: outputs come padded."""
    problem = SiluMulProblem.parse(text)
    args = op.sample(problem, "cpu", 0)
    assert op.problem(*op.outputs(problem, *args), *args) == problem


def test_work_is_what_must_be_moved() -> None:
    problem = SiluMulProblem(2048, 4096)
    assert SILU_MUL.work(problem).bytes == 3 * 2 * 2048 * 4096
    assert SILU_MUL_BACKWARD.work(problem).bytes == 5 * 2 * 2048 * 4096
    # KERNELS.md: compiled SwiGLU takes 13.1 µs at 2048x4096 and 55.1 at 2048x18944 on an H200; the model is near.
    for cols, measured in ((4096, 13.1), (18944, 55.1)):
        problem = SiluMulProblem(2048, cols)
        model = SILU_MUL.estimate_us(problem, SILU_MUL.default(problem, H200), H200)
        assert measured / 1.25 < model < measured * 1.25


@pytest.mark.parametrize(
    ("problem", "config", "rule"),
    [
        ("rows=4 cols=4096", "block_rows=1 block_cols=256 warps=4 evict=normal", "need a tile of 1024"),
        ("rows=4 cols=4096", "block_rows=1 block_cols=8192 warps=1 evict=normal", "registers"),
        ("rows=4 cols=4096", "block_rows=2 block_cols=2048 warps=4 evict=normal", "block_rows must be 1"),
        ("rows=4 cols=300 layout=rows", "block_rows=1 block_cols=1024 warps=4 evict=normal", "rows of 300"),
        ("rows=3 cols=4096 layout=rows", "block_rows=8 block_cols=256 warps=4 evict=normal", "with 3 rows"),
        ("rows=64 cols=64 layout=strided", "block_rows=32 block_cols=64 warps=2 evict=normal", "registers"),
    ],
)
def test_rules_say_what_is_wrong(problem: str, config: str, rule: str) -> None:
    with pytest.raises(InvalidConfig, match=rule):
        SILU_MUL.check(SiluMulProblem.parse(problem), SiluMulConfig.parse(config), H200)


def test_alignment_covers_an_element() -> None:
    with pytest.raises(UnsupportedProblem, match="one element of fp32, 4 bytes; it is 2"):
        SiluMulProblem(1, 1, "fp32", align=2)


# ---- strides --------------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn, size: int = 60) -> Tensor:
    """Any view of one small buffer."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    strided = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    reach = sum((n - 1) * s for n, s in zip(shape, strided, strict=True) if n)
    return BUFFER.as_strided(shape, strided, draw(st.integers(0, max(0, size - reach - 1))))


BUFFER = torch.zeros(256, dtype=torch.int16)


def addresses(t: Tensor) -> list[int]:
    return [
        t.data_ptr() + 2 * sum(i * s for i, s in zip(at, t.stride(), strict=True))
        for at in product(*map(range, t.shape))
    ]


@given(view=views())
@settings(deadline=None)
def test_matrix_and_self_overlap(view: Tensor) -> None:
    found = strides.matrix(view.shape, view.stride())
    if found is not None:
        rows, cols, row_stride, col_stride = found
        walked = [view.data_ptr() + 2 * (r * row_stride + c * col_stride) for r in range(rows) for c in range(cols)]
        assert walked == addresses(view)
        assert view.numel() == 0 or rows < 2 or strides.row_stride(view) == row_stride
    every = addresses(view)
    if len(set(every)) < len(every):
        assert strides.overlaps_itself(view)
    if view.is_contiguous() and view.numel():
        assert found is not None
        assert not strides.overlaps_itself(view)


@given(out=views(), t=views())
@settings(deadline=None, max_examples=400)
def test_relation_never_misses_an_overlap(out: Tensor, t: Tensor) -> None:
    said = strides.relation(out, t)
    if said == "apart":
        assert not set(addresses(out)) & set(addresses(t))
    elif said == "same":
        assert addresses(out) == addresses(t)


@given(data=st.data(), pitch=st.integers(1, 12))
def test_relation_is_exact_between_slices_of_one_buffer(data: st.DataObject, pitch: int) -> None:
    def rows_of() -> Tensor:
        rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, pitch))
        return BUFFER.as_strided((rows, width), (pitch, 1), data.draw(st.integers(0, 60)))

    out, t = rows_of(), rows_of()
    shared = bool(set(addresses(out)) & set(addresses(t)))
    assert (strides.relation(out, t) != "apart") == shared


# ---- the function, on the CPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    out = silu_mul(gate, up)
    assert out.dtype == dtype
    assert out.shape == shape
    assert error_ratio(out, *truth("silu_mul", [gate, up])[0]) <= 1


def test_out_is_written_where_it_lies() -> None:
    gate, up, whole = torch.randn(4, 6), torch.randn(4, 6), torch.full((4, 20), 9.0)
    expected = silu_mul(gate, up)
    out = whole[:, 3:15:2]
    assert silu_mul(gate, up, out=out) is out
    assert torch.equal(out, expected)
    assert (whole == 9).sum() == 4 * 14
    assert silu_mul(gate, up, out=gate) is gate
    assert torch.equal(gate, expected)


def refusals() -> dict[str, Callable[[], Any]]:
    x, whole = torch.randn(4, 6), torch.randn(8, 12)
    return {
        "one shape": lambda: silu_mul(x, x[:1]),
        "one dtype": lambda: silu_mul(x, x.double()),
        "takes bfloat16, float16, float32, float64; got torch.int32": lambda: silu_mul(x.int(), x.int()),
        "got torch.complex64": lambda: silu_mul(x.cfloat(), x.cfloat()),
        "operands of one device": lambda: silu_mul(x, x, out=torch.empty(4, 6, device="meta")),
        "one shape; got .*4, 6.* and .*6, 4": lambda: silu_mul(x, x, out=torch.empty(6, 4)),
        "overlap itself": lambda: silu_mul(x, x, out=torch.empty(1, 6).expand(4, 6)),
        "element upon element": lambda: silu_mul(whole[:4], x.repeat(1, 2), out=whole[1:5]),
        "not differentiable": lambda: silu_mul(x.clone().requires_grad_(), x, out=torch.empty(4, 6)),
    }


@pytest.mark.parametrize("rule", refusals())
def test_refusals_say_the_rule(rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        refusals()[rule]()


def test_gradients() -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(silu_mul, (gate, up))
    assert torch.autograd.gradcheck(silu_mul, (gate, up.detach()))
    assert torch.autograd.gradcheck(silu_mul, (gate.detach(), up))


def test_second_derivatives_are_refused_clearly() -> None:
    gate = torch.randn(3, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(silu_mul(gate, gate.detach()).sum(), gate, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck(gradient: bool) -> None:
    gate, up = torch.randn(4, 6, requires_grad=gradient), torch.randn(8, 6)[::2].requires_grad_(gradient)
    torch.library.opcheck(torch.ops.cutekernels.silu_mul.default, (gate, up))
    if not gradient:
        torch.library.opcheck(torch.ops.cutekernels.silu_mul_out.default, (gate, up, torch.empty(4, 6)))
        torch.library.opcheck(torch.ops.cutekernels.silu_mul_backward.default, (gate, gate, up))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_whole() -> None:
    """No graph break, forward and backward, into ``out`` too; one graph per op."""
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module

    @torch.compile(fullgraph=True, backend=backend)
    def mlp(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
        silu_mul(gate.detach(), up.detach(), out=out)
        return silu_mul(gate, up) * 2

    gate, up, out = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True), torch.empty(4, 6)
    result = mlp(gate, up, out)
    torch.testing.assert_close(result, silu_mul(gate, up) * 2)
    torch.testing.assert_close(out, silu_mul(gate, up).detach())
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert [t for t in targets if "silu" in t] == [
        "cutekernels.silu_mul_out.default",
        "cutekernels.silu_mul.default",
    ] or [t for t in targets if "silu" in t] == ["cutekernels.silu_mul_out", "cutekernels.silu_mul"]
    result.sum().backward()
    assert gate.grad is not None


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[SiluMulProblem]:
    """Replaces dispatch by the reference, and records the problem of every launch."""
    seen: list[SiluMulProblem] = []

    def plan(op: Any, problem: SiluMulProblem, device: int, config: object = None) -> Any:
        def launch(*given: Tensor) -> None:
            results, args = given[: len(op.results)], given[len(op.results) :]
            assert op.problem(*given) == problem
            seen.append(problem)
            for result, value in zip(results, op.reference(problem, *args), strict=True):
                result.copy_(value)

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(ops.dispatch, "plan", plan, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # the index of CPU tensors
    monkeypatch.setattr(ops, "_CALLS", {})
    return seen


def run(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    return ops._run(SILU_MUL, None if out is None else (out,), (gate, up), None)[0]


def test_launch_poses_what_it_launches(launches: list[SiluMulProblem]) -> None:
    joint = torch.randn(2, 3, 32)
    gate, up = joint.chunk(2, dim=-1)
    assert torch.equal(run(gate, up), silu_mul(gate, up))
    run(gate.contiguous(), up.contiguous())
    run(gate[..., 1:], up[..., 1:])
    run(gate.transpose(1, 2)[0], up.transpose(1, 2)[0])
    run(gate[0, 0], up[0, 0])
    assert list(map(str, launches)) == [
        "rows=6 cols=16 dtype=fp32 layout=rows",
        "rows=6 cols=16 dtype=fp32",
        "rows=6 cols=15 dtype=fp32 layout=rows align=4",
        "rows=16 cols=3 dtype=fp32 layout=strided",
        "rows=1 cols=16 dtype=fp32",
    ]


def test_operands_that_are_no_matrix_are_copied(launches: list[SiluMulProblem]) -> None:
    gate, up = torch.randn(4, 3, 8).transpose(0, 1), torch.randn(3, 4, 8)
    out = torch.zeros(4, 3, 8).transpose(0, 1)
    expected = silu_mul(gate, up)
    assert torch.equal(run(gate, up), expected)
    assert run(gate, up, out) is out
    assert torch.equal(out, expected)
    assert run(gate, up, gate) is gate
    assert torch.equal(gate, expected)
    assert [str(p) for p in launches] == ["rows=12 cols=8 dtype=fp32"] * 3


def test_nothing_is_launched_for_nothing(launches: list[SiluMulProblem]) -> None:
    assert run(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)
    assert launches == []


def test_calls_are_told_apart(launches: list[SiluMulProblem]) -> None:
    """One memo entry per shape, strides, dtype and alignment, and a refusal is not remembered as a success."""
    x = torch.randn(9, 64)
    for begin in (0, 1, 2, 4, 0, 1):
        run(x[:8, begin : begin + 32], x[1:, begin : begin + 32])
    assert [p.align for p in launches] == [16, 4, 8, 16, 16, 4]
    whole = torch.randn(8, 64)
    run(whole[:, :32], whole[:, :32], whole[:, 32:])
    with pytest.raises(UnsupportedProblem, match="element upon element"):
        run(whole[:, :32], whole[:, :32], whole[:, 16:48])
    with pytest.raises(UnsupportedProblem, match="one shape"):
        run(whole[:, :32], whole[:, :31])


def test_half_only_on_a_gpu() -> None:
    with pytest.raises(UnsupportedProblem, match="takes bf16, fp16, fp32"):
        SILU_MUL.problem(torch.randn(4, dtype=torch.float64))


if __name__ == "__main__":
    child()
