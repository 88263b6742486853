"""Kernels of a model's calls, found and compiled before the calls: recorded problems, the disk cache, the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import cutekernels as ck
from cutekernels import ahead, cli, dispatch, gpu
from cutekernels.compilers import choose
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import first_call
from cutekernels.lengths import Chosen, Line
from cutekernels.models import Decoder
from cutekernels.models.loading import outline
from cutekernels.ops import registry
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.calls import Recorder
from tests.command_line import invoke
from tests.integrations import tiny
from tests.models.test_load_quantized import quantized

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
H200 = gpu.lookup("h200")


def decoder(model: Any, **options: Any) -> Decoder:
    return Decoder.from_transformers(model, **({"max_batch": 2, "max_tokens": 96, "chunk": 24} | options))


def posed(engine: Decoder, tokens: int) -> list[Any]:
    with Recorder().calls() as noted:
        twin = Decoder(engine._source, **engine._sizes)
        twin._choose(twin._prefill(torch.zeros(tokens, dtype=torch.int64), slice(0, 1))[:, -1], slice(0, 1), True)
    return noted


def on_lines(found: list[Any], noted: list[Any]) -> bool:
    return all(any(line.op == op.name and line.tokens_of(p) is not None for line in found) for op, p in noted)


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe"])
def test_a_decoders_lines_have_what_its_calls_pose(family: str) -> None:
    engine = decoder(tiny.model(family, torch.bfloat16))
    found = engine.lines(1, 32)
    for tokens in (1, 16, 17, 24):
        noted = posed(engine, tokens)
        assert {"embedding", "kv_append"} <= {op.name for op, _ in noted}
        assert on_lines(found, noted), tokens
    with Recorder().calls() as noted:
        twin = Decoder(engine._source, **engine._sizes)
        twin._decode(1, True)
        twin._decode(2, False)
    assert on_lines(found, noted)
    assert max(line.high for line in found) == 24, "a prompt is computed in chunks"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_patched_models_lines_have_what_its_calls_pose(family: str) -> None:
    model = tiny.model(family, torch.bfloat16)
    ck.patch(model)
    found = ahead.lines_of(model, 1, 40)
    for tokens in (1, 7, 32):
        with Recorder().calls() as noted:  # every layer
            kept = model(torch.zeros(1, tokens, dtype=torch.int64)).past_key_values
            model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=kept)
        assert {"rms_norm", "attention"} <= {op.name for op, _ in noted}
        assert on_lines(found, noted), tokens


def test_recording_leaves_nothing_behind() -> None:
    model = tiny.model("qwen3", torch.bfloat16)
    engine, prompts = decoder(model), [[5, 6, 7, 8]]
    before = engine.generate(prompts, max_new_tokens=6, stop=()).tokens
    with Recorder().calls():
        assert dispatch.recording()
    assert not dispatch.recording()
    engine.lines(1, 8)
    assert engine.generate(prompts, max_new_tokens=6, stop=()).tokens == before
    ck.patch(model)
    ids = torch.tensor(prompts)
    logits = model(ids).logits
    ahead.lines_of(model, 1, 8)
    assert torch.equal(model(ids).logits, logits)
    held = [value for module in model.modules() for value in vars(module).values()]
    assert not any(isinstance(value, FakeTensor) for value in [*held, *model.parameters(), *model.buffers()])
    assert not any("forward" in vars(module) for module in model.model.layers), "the model's own again"


def test_other_threads_compute_while_calls_are_recorded() -> None:
    model = tiny.model("llama", torch.bfloat16)
    ck.patch(model)
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    with ahead._take_fakes_back(model), ahead._alike_once(model):  # as another thread has it
        assert torch.equal(model(ids).logits, expected), "all layers, not the first of each kind"
        model.kept = 5
    assert model.kept == 5
    first_call._prepare(model, (ids,))  # torch has listed the hook before another thread took it off


def test_recording_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for CUDA has none on a machine without a GPU."""
    monkeypatch.setattr(paths, "_current_device", lambda: pytest.fail("no driver"))
    assert decoder(tiny.model("qwen3", torch.bfloat16)).lines(1, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_an_outline_has_the_lines_of_the_whole(packed: bool, tmp_path: Path) -> None:
    own = {} if packed else {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = tiny.model("llama" if packed else "gemma3", torch.bfloat16, num_hidden_layers=4, **own)
    if packed:
        quantized("gptq", tmp_path, model)
    else:
        model.save_pretrained(tmp_path)
    whole, thin = ck.models.load(tmp_path, dtype=torch.bfloat16), outline(tmp_path, dtype=torch.bfloat16)
    assert len(thin.model.layers) == (2 if packed else 3), "one of each kind, and the last"
    one, other = decoder(thin), decoder(whole)
    assert repr(one.identity()) == repr(other.identity()), "the choices of one serve the other"
    assert set(one.lines(1, 4)) == set(other.lines(1, 4))


class Inline:
    """In the place of compiling processes: chooses at once, and notes what it is asked to compile."""

    compiled: list[Any] = []  # noqa: RUF012

    def __init__(self, jobs: int) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def submit(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(request) == 2:
            future.set_result(choose(request))
        else:
            self.compiled.append(request)
            future.set_result(None)
        return future


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    monkeypatch.setenv("CUTEKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Inline, "compiled", [])
    monkeypatch.setattr(ahead, "Compilers", Inline)
    ready: set[str] = set()
    monkeypatch.setattr(ahead.compiler, "ready", ready.__contains__)
    keep = ahead._write

    def kept(place: Path, chosen: Any, keys: Any) -> None:
        ready.update(keys)
        keep(place, chosen, keys)

    monkeypatch.setattr(ahead, "_write", kept)
    yield Inline.compiled
    dispatch.reload()


def test_a_second_process_chooses_and_compiles_nothing(inline: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = decoder(tiny.model("qwen3", torch.bfloat16))
    first = ahead.prepare(engine, (1, 18), H200)
    assert first.compiled == first.kernels == len(inline) == len(set(inline)) > 10
    assert first.problems > 18 * 5
    op, p = posed(engine, 11)[1]
    choice = dispatch.resolve(op, p, H200)
    monkeypatch.setattr(Decoder, "lines", lambda *args: pytest.fail("recorded again"))
    dispatch.reload()
    again = ahead.prepare(decoder(tiny.model("qwen3", torch.bfloat16)), (1, 18), H200)
    assert (again.kernels, again.problems, again.compiled) == (first.kernels, first.problems, 0)
    found = dispatch._ahead_of(op, p, H200)
    assert found is not None and (found.config, found.origin) == (choice.config, choice.origin)
    with pytest.raises(pytest.fail.Exception, match="recorded again"):
        ahead.prepare(engine, (1, 19), H200)
    (place,) = Path(ahead.compiler.directory().parent / "choices").iterdir()
    place.write_text(json.dumps([[["gemm"]], []]))
    with pytest.raises(pytest.fail.Exception, match="recorded again"):
        ahead.prepare(engine, (1, 18), H200)


def test_the_command_line(inline: list[Any], tmp_path: Path) -> None:
    tiny.model("qwen3", torch.bfloat16).save_pretrained(tmp_path / "model")
    words = ["warmup", str(tmp_path / "model"), "--gpu", "h200", "--max-batch", "2"]
    result = invoke(cli.app, *words, "--tokens", "1:18")
    assert result.exit_code == 0, result.output
    assert f"h200: {len(inline)} kernels for" in result.output
    for tokens in ("40", "0:4", "5:4", "a:b"):
        refused = invoke(cli.app, *words, "--tokens", tokens)
        assert isinstance(refused.exception, UnsupportedProblem), tokens


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Kernels that are compiled side by side: ``(op, problem, config, gpu)`` of each kernel that a first call needs."""
    wanted: list[Any] = []
    ready = tmp_path / "ready"  # kernels are, once this file is there

    def side_by_side(requests: Any, *, here: bool) -> list[None]:
        assert here
        wanted.extend(requests)
        return [None] * len(requests)

    monkeypatch.setenv("CUTEKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "side_by_side", side_by_side)
    monkeypatch.setattr(gpu, "detect", lambda device=None: H200)
    monkeypatch.setattr(ahead.compiler, "ready", lambda key: ready.exists())
    yield wanted
    dispatch.reload()


def kernels_of(noted: list[Any]) -> set[str]:
    return {key for op, p in noted for key in ahead.kernels(op, p, dispatch.resolve(op, p, H200).config, H200)}


def keys_of(wanted: list[Any]) -> set[str]:
    found = set()
    for name, problem, config, spec in wanted:
        op = registry.get(name)
        found.add(ahead.compiler.cache_key(op, op.Problem.parse(problem), op.Config.parse(config), spec))
    return found


def test_the_first_requests_compile_side_by_side(first: list[Any]) -> None:
    engine = decoder(tiny.model("qwen3", torch.bfloat16))
    engine._cold = True  # as on a GPU
    prompts = [[5] * 7, [6] * 31, [7] * 24]  # two chunks of 24 and 7, and one of 24
    tokens = engine.generate(prompts, max_new_tokens=2, stop=()).tokens
    with Recorder().calls() as noted:
        twin = Decoder(engine._source, **engine._sizes)
        twin._decode(1, True)
        twin._decode(2, True)
    needed = kernels_of([*noted, *posed(engine, 7), *posed(engine, 24)])
    assert keys_of(first) == needed and len(first) == len(needed)
    first.clear()
    assert engine.generate(prompts, max_new_tokens=2, stop=()).tokens == tokens and not first, "the first alone"
    engine._cold = True
    ahead_of = dispatch.recorded_by
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "recorded_by", lambda note: ahead_of(lambda op, p: 1 / 0))  # type: ignore[arg-type, return-value]
        assert engine.generate([*prompts, [8]], max_new_tokens=2, stop=()).tokens[:3] == tokens, "left to calls"


def test_a_process_that_finds_all_compiled_records_nothing(
    first: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, prompts = tiny.model("qwen3", torch.bfloat16), [[5] * 7]

    def begin() -> None:
        engine = decoder(model)
        engine._cold = True
        engine.generate(prompts, max_new_tokens=2, stop=())

    begin()
    assert first
    first.clear()
    (tmp_path / "ready").touch()
    twin = Decoder._twin
    monkeypatch.setattr(Decoder, "_twin", lambda *args: pytest.fail("recorded again"))
    begin()
    prompts = [[5] * 8]
    with pytest.raises(pytest.fail.Exception, match="recorded again"):
        begin()
    monkeypatch.setattr(Decoder, "_twin", twin)
    dispatch.choose_ahead(
        H200, [Chosen(Line("gemm", registry.get("gemm").Problem(1, 8, 8), (), 1, 1), [1], [("", "")])]
    )
    monkeypatch.setattr(Decoder, "_twin", lambda *args: pytest.fail("recorded behind warmup"))
    begin()
    assert not first


def test_a_patched_models_first_prompt_compiles_side_by_side(first: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.full((2, 9), 5)
    monkeypatch.setattr(first_call, "_is_prompt", lambda ids: True)  # as on a GPU
    for way, compiles in ((torch.no_grad, True), (torch.inference_mode, True), (torch.enable_grad, False)):
        model = tiny.model("llama", torch.bfloat16)
        expected = model(ids).logits
        ck.patch(model)
        first.clear()
        with way():
            logits = model(ids).logits
            assert bool(first) is compiles, way
            assert keys_of(first) == (kernels_of(ahead.prompt_of(model, Recorder(), 2, 9)) if compiles else set())
            torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
            first.clear()
            model(ids)
        assert not first and not model._forward_pre_hooks
    model = tiny.model("llama", torch.bfloat16)
    ck.patch(model)
    ahead.lines_of(model, 1, 4)
    assert not first and not model._forward_pre_hooks, "warmup leaves nothing to prepare"
    for hooked in (True, False):
        model = tiny.model("llama", torch.bfloat16)
        ck.patch(model)
        if hooked:
            seen: list[Any] = []
            model.lm_head.register_forward_hook(lambda *args, seen=seen: seen.append(args))
            with torch.no_grad():
                model(ids)
            assert not first and len(seen) == 1, "a call on fakes would count"
        ck.unpatch(model)
        assert not model._forward_pre_hooks


def test_what_cannot_be_warmed_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "detect", lambda device=None: H200)
    model = tiny.model("qwen3", torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match="patch"):
        ahead.prepare(model, (1, 4), H200)

    class Reads(torch.nn.Linear):
        def forward(self, ids: Any) -> Any:
            return super().forward(ck.rms_norm(ids.float())) if int(ids.sum()) else ids

    with pytest.raises(UnsupportedProblem, match="reads values of tensors"):
        ahead.prepare(Reads(4, 4), (1, 4), H200)  # type: ignore[arg-type]
    for wrong, why in (
        (lambda: ck.warmup(model), "move it there"),
        (lambda: ck.warmup(model, 0), "its own device"),
        (lambda: ck.warmup(model, tokens=(0, 4)), r"\(1, 4096\)"),
        (lambda: ck.warmup(model, tokens=7), r"\(1, 4096\)"),
        (lambda: ck.warmup([("gemm", "m=1 n=8 k=8")], tokens=(1, 2)), "leave them out"),
    ):
        with pytest.raises(UnsupportedProblem, match=why):
            wrong()


def test_what_a_choice_launches_beside_is_chosen_too() -> None:
    op = registry.get("linear_silu_mul")
    line = Line(op.name, op.Problem.parse("m=200 n=18944 k=3584"), (("m", 1),), 200, 240)
    chosen, _ = choose((line, H200))
    problems = [line.at(m) for m in (200, 217, 240)]
    parts = [pair for p in problems for pair in op.chained(p, dispatch.resolve(op, p, H200).config, H200)]
    assert {own.name for own, _ in parts} == {"gemm", "silu_mul"}
    for own, p in parts:
        configs = {each.of(p) for each in chosen if each.line.op == own.name} - {None}
        choice = dispatch.resolve(own, p, H200)
        assert configs == {(str(choice.config), choice.origin)}
