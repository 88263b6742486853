"""The ready guests call vLLM and SGLang as their public source has them: stand-ins with the same signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from cutekernels import gpu as gpus
from cutekernels import guests
from cutekernels.errors import CompileError
from cutekernels.guests.block_fp8 import BlockFp8Problem
from cutekernels.guests.fused_moe import FusedMoeProblem
from cutekernels.op import Problem

H200 = gpus.lookup("h200")
BF16 = FusedMoeProblem.parse("m=4 experts=4 n=64 k=128 top_k=2")
FP8 = BF16.replace(dtype="fp8_w8a8", block_n=64, block_k=64)


class Engine:
    """Stand-in modules, and what their functions were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.config: Any = None
        self.seen: dict[str, Any] = {}

    def module(self, name: str, **values: Any) -> ModuleType:
        words = name.split(".")
        for end in range(1, len(words) + 1):
            made = sys.modules.get(".".join(words[:end])) or ModuleType(".".join(words[:end]))
            made.__path__ = []  # type: ignore[attr-defined]
            self._patch.setitem(sys.modules, ".".join(words[:end]), made)
            if end > 1:
                self._patch.setattr(sys.modules[".".join(words[: end - 1])], words[end - 1], made, raising=False)
        for key, value in values.items():
            self._patch.setattr(made, key, value, raising=False)
        return made

    @contextmanager
    def override_config(self, config: dict[str, Any]) -> Iterator[None]:
        self.config = config
        yield
        self.config = None

    def experts(self, **values: Any) -> Any:
        self.seen = values | {"config": dict(**self.config)}
        return torch.full_like(values["x"], 7.0)

    def called(self, name: str, problem: Problem) -> Any:
        """The guest's output, after a call with its default config."""
        guest: Any = guests.load(name)
        guest.begin()
        args = guest.sample(problem, "cpu", 0)
        outputs = guest.outputs(problem, *args)
        guest.bind(problem, guest.default(problem, H200), None)(*outputs, *args)
        assert outputs[0].unique().tolist() == [7.0]
        return guest.default(problem, H200).as_dict()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        monkeypatch.delitem(sys.modules, name)
    return Engine(monkeypatch)


def test_vllm_with_a_config_object(engine: Engine) -> None:
    class QuantConfig:
        @staticmethod
        def make(dtype: Any, *, w1_scale: Any, w2_scale: Any, block_shape: list[int]) -> Any:
            return dtype, w1_scale.shape, block_shape

    def fused_experts(
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        inplace: bool = False,
        quant_config: Any = None,
    ) -> Any:
        return engine.experts(x=hidden_states, ids=topk_ids, quant=quant_config)

    engine.module("vllm.model_executor.layers.fused_moe", override_config=engine.override_config)
    engine.module("vllm.model_executor.layers.fused_moe.fused_moe", fused_experts=fused_experts)
    engine.module("vllm.model_executor.layers.fused_moe.config", FusedMoEQuantConfig=QuantConfig)
    config = engine.called("cutekernels.guests.vllm:fused_moe", BF16)
    assert engine.seen["config"] == config and engine.seen["quant"] is None and engine.config is None
    engine.called("cutekernels.guests.vllm:fused_moe", FP8)
    assert engine.seen["quant"] == (torch.float8_e4m3fn, (4, 2, 2), [64, 64])


def test_vllm_with_flags(engine: Engine) -> None:
    def fused_experts(
        hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, inplace: bool = False,
        use_fp8_w8a8: bool = False, w1_scale: Any = None, w2_scale: Any = None, block_shape: Any = None,
    ) -> Any:  # fmt: skip
        return engine.experts(x=hidden_states, fp8=use_fp8_w8a8, shape=block_shape)

    engine.module("vllm.model_executor.layers.fused_moe", override_config=engine.override_config)
    engine.module("vllm.model_executor.layers.fused_moe.fused_moe", fused_experts=fused_experts)
    engine.called("cutekernels.guests.vllm:fused_moe", FP8)
    assert (engine.seen["fp8"], engine.seen["shape"]) == (True, [64, 64])


@pytest.mark.parametrize(
    "home", ["sglang.srt.layers.moe.moe_runner.triton_utils", "sglang.srt.layers.moe.fused_moe_triton"]
)
def test_sglang_in_either_home(engine: Engine, home: str) -> None:
    def fused_experts(
        hidden_states: Any, w1: Any, w2: Any, topk_output: Any, moe_runner_config: Any, use_fp8_w8a8: bool = False,
        w1_scale: Any = None, w2_scale: Any = None, block_shape: Any = None,
    ) -> Any:  # fmt: skip
        return engine.experts(x=hidden_states, routed=topk_output, runner=moe_runner_config, fp8=use_fp8_w8a8)

    told: list[Any] = []
    engine.module("sglang.srt.server_args", ServerArgs=dict, set_global_server_args_for_scheduler=told.append)
    engine.module("sglang.srt.layers.moe.topk", StandardTopKOutput=lambda *parts: parts)
    engine.module("sglang.srt.layers.moe.moe_runner", MoeRunnerConfig=dict)
    engine.module(home, override_config=engine.override_config)
    engine.module(f"{home}.fused_moe", fused_experts=fused_experts)
    from cutekernels.guests import sglang

    sglang._serving.cache_clear()
    config = engine.called("cutekernels.guests.sglang:fused_moe", BF16)
    assert engine.seen["config"] == config and engine.seen["runner"] == {"inplace": False}
    assert [part.shape for part in engine.seen["routed"][:2]] == [(4, 2), (4, 2)]
    engine.called("cutekernels.guests.sglang:fused_moe", FP8)
    assert engine.seen["fp8"] is True and told == [{"model_path": "dummy"}]


def test_a_sglang_without_its_moe_says_what_each_home_lacks(engine: Engine) -> None:
    engine.module("sglang.srt.layers.moe.moe_runner.triton_utils")
    with pytest.raises(CompileError, match=r"triton_utils has no override_config; .*fused_moe_triton: No module named"):
        guests.load("cutekernels.guests.sglang:fused_moe").begin()


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("vllm", "vllm.model_executor.layers.quantization.utils.fp8_utils", "w8a8_triton_block_scaled_mm"),
        ("sglang", "sglang.srt.layers.quantization.fp8_kernel", "w8a8_block_fp8_matmul_triton"),
    ],
)
def test_the_block_fp8_product_reads_a_table_of_one_entry(
    engine: Engine, name: str, module: str, function: str
) -> None:
    problem = BlockFp8Problem.parse("m=4 n=64 k=256")

    def multiply(a: Any, b: Any, a_scale: Any, b_scale: Any, block_size: list[int], output_dtype: Any) -> Any:
        n, k = b.shape
        table = home.get_w8a8_block_fp8_configs(n, k, *block_size)
        engine.seen = {m: dict(**config) for m, config in table.items()}
        return torch.full((a.shape[0], n), 7.0, dtype=output_dtype)

    def shipped(*shape: int) -> Any:
        raise AssertionError("the engine's own table was read")

    home: Any = engine.module(module, get_w8a8_block_fp8_configs=shipped, **{function: multiply})
    config = engine.called(f"cutekernels.guests.{name}:block_fp8_linear", problem)
    assert engine.seen == {4: config}
    assert home.get_w8a8_block_fp8_configs is shipped

    def moved(a: Any, b: Any, *rest: Any) -> Any:
        return torch.full((a.shape[0], b.shape[0]), 7.0, dtype=torch.bfloat16)

    vars(home)[function] = moved
    with pytest.raises(CompileError, match="did not read the config"):
        engine.called(f"cutekernels.guests.{name}:block_fp8_linear", problem)


def test_a_moe_that_ignores_its_config_is_no_measurement(engine: Engine) -> None:
    """Else every candidate would run, and be stored, as the default."""
    engine.module("vllm.model_executor.layers.fused_moe", override_config=engine.override_config)
    home = engine.module("vllm.model_executor.layers.fused_moe.fused_moe")
    for read in (lambda c: c["num_warps"], list, dict, lambda c: dict(**c), lambda c: c.copy(), lambda c: None):

        def fused_experts(x: Any, *rest: Any, read: Any = read) -> Any:
            read(engine.config)
            return torch.full_like(x, 7.0)

        home.fused_experts = fused_experts  # type: ignore[attr-defined]
        if read({"num_warps": 1}):
            engine.called("cutekernels.guests.vllm:fused_moe", BF16)
    with pytest.raises(CompileError, match="this version takes it in another place"):
        engine.called("cutekernels.guests.vllm:fused_moe", BF16)
