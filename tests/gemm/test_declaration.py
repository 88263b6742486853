"""GEMM's declaration: rules, default, model, text and samples, for any problem on any GPU of the table."""

from __future__ import annotations

import math
import random
from itertools import islice
from operator import eq
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutekernels import gpu
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops import registry
from cutekernels.ops.products.dense import GEMM, SCHEDULES
from cutekernels.ops.products.schedules.problem import WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import extras_of, mma_share, resident_ctas
from cutekernels.ops.shared.dtypes import DTYPES
from tests.gemm.cases import random_problem

GPUS = gpu.GPUS
TARGETS = [gpu.lookup(name) for name in ("a100", "rtx3090", "l40s", "h200", "rtx5090")]
SUITE = [GemmProblem.parse(text) for text in GEMM.suite]


@st.composite
def problems(draw: st.DrawFn, extents: st.SearchStrategy[int]) -> GemmProblem:
    """Any legal problem over ``extents``: every layout, alignment and epilogue."""
    of = {name: draw(extents) for name in "mnk"}
    a, b, out = (draw(st.sampled_from(majors)) for majors in ("km", "nk", "nm"))
    c = draw(st.sampled_from(("none", "n", "m")))

    def align(major: str) -> int:
        return draw(st.sampled_from([x for x in (8, 4, 2, 1) if of[major] % x == 0]))

    dtype = draw(st.sampled_from(tuple(DTYPES)))
    batched = draw(st.booleans())
    return GemmProblem(
        **of,
        batch=draw(st.integers(0, 5)) if batched else 1,
        dtype=dtype,
        a_major=a,
        b_major=b,
        out_major=out,
        c=c,
        bias=draw(st.sampled_from(("none", "same", "fp32"))),
        activation=draw(st.sampled_from(tuple(ACTIVATIONS))),
        accumulate=draw(st.sampled_from(("fp32", "fp16"))) if dtype == "fp16" else "fp32",
        a_align=align(a),
        b_align=align(b),
        c_align=WIDEST if c == "none" else align(c),
        out_align=align(out),
        batched=batched,
        wide=draw(st.booleans()),
    )


any_extent = st.integers(0, 70) | st.sampled_from([128 << i for i in range(10)]) | st.integers(0, 1 << 40)
any_problem = problems(any_extent)
small_problem = problems(st.integers(0, 40) | st.sampled_from([64, 96, 128]))
any_config = st.builds(
    GemmConfig, **{name: st.sampled_from(values) for name, values in GemmConfig.space().items()}
)  # rules not applied


def random_valid(problem: GemmProblem, spec: gpu.GpuSpec, seed: int, count: int) -> list[GemmConfig]:
    """Some configs of our own that ``why_not`` accepts."""
    valid = [c for c in GEMM.valid(problem, spec) if not c.vendors]
    return random.Random(seed).sample(valid, min(count, len(valid)))


class TestDefault:
    @pytest.mark.parametrize("spec", GPUS, ids=lambda g: g.name)
    def test_it_is_valid_for_the_suite(self, spec: gpu.GpuSpec) -> None:
        for problem in SUITE:
            config = GEMM.default(problem, spec)
            assert GEMM.why_not(problem, config, spec) is None, (problem, config)

    @given(problem=any_problem, spec=st.sampled_from(GPUS))
    @settings(deadline=None, max_examples=120)
    def test_it_is_valid_for_any_problem(self, problem: GemmProblem, spec: gpu.GpuSpec) -> None:
        config = GEMM.default(problem, spec)
        assert GEMM.check(problem, config, spec) is config
        assert GEMM.default(problem, spec) == config, "the choice is a function of problem and GPU"

    def test_it_fits_a_gpu_that_is_not_in_the_table(self) -> None:
        class Properties:
            name, major, minor, multi_processor_count = "NVIDIA RTX A2000", 8, 6, 26
            total_memory = 12 << 30

        spec = gpu.describe(Properties())
        assert spec not in GPUS
        for problem in SUITE:
            assert GEMM.why_not(problem, GEMM.default(problem, spec), spec) is None

    def test_a_decode_row_gets_a_low_tile_and_a_square_a_large_one(self) -> None:
        h200 = gpu.lookup("h200")
        thin = GEMM.default(GemmProblem.parse("m=1 n=4096 k=4096 b_major=k"), h200)
        square = GEMM.default(GemmProblem.parse("m=4096 n=4096 k=4096"), h200)
        assert (thin.body, thin.tile_m) == ("skinny_warpgroup", 8)
        warps = GEMM.default(GemmProblem.parse("m=1 n=4096 k=4096 b_major=k"), gpu.lookup("a100"))
        assert (warps.body, warps.tile_m) == ("skinny", 8)
        assert square.tile_m * square.tile_n >= 128 * 128


class TestRules:
    def test_a_grid_holds_every_tile(self) -> None:
        h200 = gpu.lookup("h200")
        many = GemmProblem.parse("m=1 n=1100000 k=1024 b_major=k")
        skinny = [c for c in GEMM.valid(many, h200) if c.body == "skinny"]
        assert skinny
        assert all(-(-many.n // c.tile_n) <= 65535 for c in skinny)
        endless = GemmProblem.parse("m=1 n=9000000 k=64 b_major=k")
        assert GEMM.default(endless, gpu.lookup("a100")).body == "multistage"
        assert GEMM.default(endless, h200).tile_n * 65535 >= endless.n
        assert GEMM.default(endless.replace(n=90_000_000), h200).body == "multistage"

    @pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
    def test_valid_is_what_why_not_accepts_and_the_rest_gets_a_sentence(self, spec: gpu.GpuSpec) -> None:
        problem = SUITE[3]
        valid = list(GEMM.valid(problem, spec))
        accepted = set(valid)
        assert len(valid) == len(accepted) > 20
        again = islice(GEMM.valid(problem, spec), 300)
        assert all(map(eq, valid, again)), "the order is fixed: a seeded choice repeats"
        assert all(GEMM.why_not(problem, config, spec) is None for config in valid[::9])
        reasons = set()
        for config in islice(GemmConfig.every(), TARGETS.index(spec), None, 3 * len(TARGETS)):
            reason = GEMM.why_not(problem, config, spec)
            assert (reason is None) == (config in accepted)
            if reason is not None:
                reasons.add(reason)
        for reason in reasons:
            assert len(reason.split()) >= 4, reason
            assert "\n" not in reason
            assert any(map(str.isdigit, reason)), f"a rule says the value that broke it: {reason}"
        assert len(reasons) > 10, "the space breaks more than one rule"

    @given(problem=any_problem, config=any_config, spec=st.sampled_from(GPUS))
    @settings(deadline=None, max_examples=300)
    def test_check_raises_exactly_what_why_not_says(
        self, problem: GemmProblem, config: GemmConfig, spec: gpu.GpuSpec
    ) -> None:
        reason = GEMM.why_not(problem, config, spec)
        if reason is None:
            assert GEMM.check(problem, config, spec) is config
            return
        with pytest.raises(InvalidConfig) as raised:
            GEMM.check(problem, config, spec)
        for part in (reason, str(problem), str(config), spec.name):
            assert part in str(raised.value)

    @pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
    def test_what_is_valid_fits_the_sm(self, spec: gpu.GpuSpec) -> None:
        for seed, problem in enumerate([*SUITE, random_problem(random.Random(5)), random_problem(random.Random(6))]):
            for c in random_valid(problem, spec, seed, 12):
                smem = SCHEDULES[c.body].smem(c, extras_of(problem)).total_bytes
                assert smem <= spec.smem_per_block_bytes
                assert c.ctas_per_sm * (smem + spec.SMEM_RESERVED_BYTES) <= spec.smem_per_sm_bytes
                assert c.ctas_per_sm * c.warps <= spec.max_warps
                assert SCHEDULES[c.body].threads(c) <= 1024

    def test_less_shared_memory_leaves_less_to_choose_from(self) -> None:
        problem = GemmProblem.parse("m=4096 n=4096 k=4096")
        sizes = {g.target: sum(1 for _ in GEMM.valid(problem, g)) for g in TARGETS}
        assert sizes["sm_90a"] > sizes["sm_120a"] > 50


class TestText:
    @given(any_problem)
    def test_problems_survive_it(self, problem: GemmProblem) -> None:
        assert GemmProblem.parse(str(problem)) == problem
        assert hash(GemmProblem.parse(str(problem))) == hash(problem)

    @given(any_config)
    def test_configs_survive_it(self, config: GemmConfig) -> None:
        assert GemmConfig.parse(str(config)) == config

    def test_short_texts_say_the_common_problem(self) -> None:
        assert str(GemmProblem(4096, 4096, 4096)) == "m=4096 n=4096 k=4096"
        assert GemmProblem.parse("m=16 n=11008 k=4096 dtype=fp16") == GemmProblem(16, 11008, 4096, dtype="fp16")

    def test_the_registry_knows_it(self) -> None:
        assert registry.get("gemm") is GEMM
        with pytest.raises(UnsupportedProblem, match=r"no op is called 'conv'. The ops: gemm, "):
            registry.get("conv")


class TestProblem:
    @given(any_problem)
    def test_a_bucket_is_legal_idempotent_and_no_smaller(self, problem: GemmProblem) -> None:
        bucket = problem.bucket()
        assert bucket.bucket() == bucket
        epilogue = {"bias": "none", "activation": "none", "c": "none", "c_align": 8, "wide": False}
        kind = {} if problem.accumulate == "fp16" else {"dtype": "bf16"}
        alike = problem.replace(**epilogue).replace(**kind)
        assert bucket.static() == alike.static(), "one tuning serves every epilogue and both types"
        assert bucket.m >= problem.m
        assert (bucket.n, bucket.k, bucket.batch) == (problem.n, problem.k, problem.batch)
        assert GemmProblem.parse(str(bucket)) == bucket

    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("m=8 n=8 k=12", "write a_align=4"),
            ("m=8 n=6 k=8", "write b_align=2"),
            ("m=8 n=6 k=8 b_align=2", "write out_align=2"),
            ("m=8 n=7 k=8 b_align=1 out_align=1 c=n", "write c_align=1"),
            ("m=100 n=8 k=8 a_major=m", "write a_align=4"),
            ("m=8 n=8 k=6 a_align=2 b_major=k", "write b_align=2"),
            ("m=5 n=8 k=8 out_major=m", "write out_align=1"),
            ("m=8 n=8 k=8 batch=3", "batch=3 needs batched=1"),
            ("m=8 n=8 k=8 accumulate=fp16", "accumulate='fp16' is for fp16 operands; they are bf16"),
        ],
    )
    def test_fields_that_disagree_are_refused_with_the_remedy(self, text: str, remedy: str) -> None:
        with pytest.raises(UnsupportedProblem) as raised:
            GemmProblem.parse(text)
        assert remedy in str(raised.value)

    @given(st.data())
    def test_the_remedy_for_an_alignment_works(self, data: st.DataObject) -> None:
        of = {name: data.draw(st.integers(0, 40)) for name in "mnk"}
        fields: dict[str, Any] = {}
        for _ in range(4):  # one remedy for each of a, b and out, and then it is legal
            try:
                GemmProblem(**of, **fields)
                return
            except UnsupportedProblem as error:
                name, _, value = str(error).rpartition("write ")[2].partition("=")
                assert name not in fields
                fields[name] = int(value)
        raise AssertionError(f"{of} {fields} is still refused")

    @pytest.mark.parametrize("change", [{"dtype": "fp32"}, {"a_align": 16}, {"activation": "tanh"}, {"m": -1}])
    def test_values_outside_of_the_fields_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedProblem):
            GemmProblem(8, 8, 8).replace(**change)

    def test_sides_swap_for_a_transposed_result(self) -> None:
        p = GemmProblem.parse("m=24 n=16 k=8 a_major=m b_major=k a_align=4 out_major=m")
        rows, columns = p.sides
        assert p.transposed
        assert (rows.extent, rows.k_major, rows.align) == (16, True, 8)
        assert (columns.extent, columns.k_major, columns.align) == (24, False, 4)
        rows, columns = p.replace(out_major="n").sides
        assert (rows.extent, columns.extent) == (24, 16)


class TestModel:
    @given(problem=any_problem, spec=st.sampled_from(GPUS), seed=st.integers(0, 1 << 30))
    @settings(deadline=None, max_examples=50)
    def test_estimates_are_times_near_or_above_the_roofline(
        self, problem: GemmProblem, spec: gpu.GpuSpec, seed: int
    ) -> None:
        floor = GEMM.work(problem).floor_us(spec)
        for config in [GEMM.default(problem, spec), *random_valid(problem, spec, seed, 2)]:
            estimate = GEMM.estimate_us(problem, config, spec)
            assert math.isfinite(estimate)
            if 0 in (problem.m, problem.n, problem.batch):
                assert estimate >= 0
            else:
                assert estimate > 0
                assert estimate >= 0.5 * floor, (problem, config)

    def test_more_work_takes_longer(self) -> None:
        h200 = gpu.lookup("h200")
        times = [
            GEMM.estimate_us(p, GEMM.default(p, h200), h200) for p in (GemmProblem(s, s, s) for s in (512, 2048, 8192))
        ]
        assert times[0] * 2 < times[1]
        assert times[1] * 10 < times[2]

    def test_models_know_what_an_sm_has(self) -> None:
        """A warp has one tensor core of four; CTAs share what the SM that runs has, a stand-in's its own. Of
        tiles of 64 x 128 two fit, since fragments are read ahead, not three: some are a second wave.
        """
        one, two, four, eight = (mma_share(warps, 64, 32) for warps in (1, 2, 4, 8))
        assert (4 * one, 2 * two, eight) == pytest.approx((four,) * 3)
        takes: dict[str, Any] = {"warps": 4, "registers": 128, "smem": 97 * 1024}
        held = [resident_ctas(gpu.lookup(name), **takes) for name in ("l40s", "a100", "h200", "h200-as-l40s")]
        assert held == [1, 1, 2, 2]
        problem = GemmProblem(64, 37888, 3584, b_major="k")
        tile = "tile_m=64 tile_n=128 tile_k={} warps_m=1 warps_n=4 stages={} raster=1 ctas_per_sm=1"
        two, three = (GemmConfig.parse(tile.format(*each)) for each in ((64, 3), (32, 6)))
        stand_in = gpu.lookup("h200-as-l40s")  # 101 and 90 us (bench/sweeps/h200-as-l40s)
        assert GEMM.estimate_us(problem, three, stand_in) < GEMM.estimate_us(problem, two, stand_in)

    def test_work_counts(self) -> None:
        work = GEMM.work(GemmProblem(3, 5, 7, 2, a_align=1, b_align=1, out_align=1, batched=True))
        assert work.flops == 2 * 2 * 3 * 5 * 7
        assert work.bytes == 2 * 2 * (3 * 7 + 7 * 5 + 3 * 5)
        plain = GemmProblem(8, 16, 24)
        assert GEMM.work(plain.replace(c="n")).bytes - GEMM.work(plain).bytes == 2 * 8 * 16
        assert GEMM.work(plain.replace(bias="same")).bytes - GEMM.work(plain).bytes == 2 * 16
        assert GEMM.work(plain.replace(bias="fp32")).bytes - GEMM.work(plain).bytes == 4 * 16
        assert GEMM.work(plain.replace(k=0)).flops == 0


class TestSample:
    @given(problem=small_problem)
    @settings(deadline=None, max_examples=200)
    def test_it_poses_the_problem(self, problem: GemmProblem) -> None:
        problem = problem.replace(wide=False)  # 2^31 elements are for the GPU's tests
        args = GEMM.sample(problem, "cpu", 1)
        a, b, c, bias, alpha, beta = args
        (out,) = GEMM.outputs(problem, *args)
        lead = (problem.batch,) if problem.batched else ()
        assert a.shape == (*lead, problem.m, problem.k)
        assert b.shape == (*lead, problem.k, problem.n)
        assert out.shape == (*lead, problem.m, problem.n)
        assert out.dtype == a.dtype == DTYPES[problem.dtype]
        assert (c is None) == (problem.c == "none")
        assert (bias is None) == (problem.bias == "none")
        assert alpha > 0
        assert (beta != 0) == (c is not None)
        if out.numel() and problem.k:  # nothing is launched for an empty result, and an empty tensor has no layout
            assert GEMM.problem(out, a, b, c, bias, **GEMM.options_of(problem)) == problem
        (expected,) = GEMM.reference(problem, *args)
        assert expected.shape == out.shape
        assert expected.dtype == out.dtype
        assert not torch.isnan(expected).any()

    def test_data_is_standard_normal_and_results_are_near_one(self) -> None:
        problem = GemmProblem.parse("m=128 n=128 k=256 c=n bias=fp32")
        args = GEMM.sample(problem, "cpu", 0)
        for t in args[:4]:
            assert abs(float(t.float().mean())) < 0.25
            assert 0.8 < float(t.float().std()) < 1.2
        (out,) = GEMM.reference(problem, *args)
        assert 0.5 < float(out.float().std()) < 3

    def test_outputs_are_fakes_on_meta(self) -> None:
        problem = GemmProblem.parse("m=10 n=24 k=32 batch=3 batched=1 out_major=m out_align=2")
        a, b = (torch.empty(3, *shape, device="meta", dtype=torch.bfloat16) for shape in ((10, 32), (32, 24)))
        (fake,) = GEMM.outputs(problem, a, b, None, None)
        assert fake.is_meta
        assert fake.shape == (3, 10, 24)
        assert fake.stride(-2) == 1
