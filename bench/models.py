"""``python -m bench models --model qwen2.5-7b``: whole models: our decoder, transformers patched, plain and with Liger.

Weights are random, or those of ``--weights``. Times are wall time, the host's included, until the GPU is idle: of one
token of every request (decode, averaged over the steps of a sample), and from a prompt to its first token on the host
(prefill). Contenders run one after the other, so rows have no interval of a speed-up. ``memory_gib`` has the weights
in it, the cache, and what a contender keeps or needs besides.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import cutekernels
from bench import new_lengths, wall
from bench.baselines import Absent
from bench.rows import Row
from bench.wall import Commit, DryRun, Match, Out, Rounds
from cutekernels import environment, terminal
from cutekernels.errors import CuteKernelsError
from cutekernels.models import Decoder
from cutekernels.models.config import read_config
from cutekernels.models.loaded import LoadedModel, Weighted
from cutekernels.quant.formats.own import SCHEMES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COMMON = {"max_position_embeddings": 32768, "tie_word_embeddings": False}  # positions suffice for every case
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
# The config class, sizes, and what else the published checkpoints' config.json say.
CONFIGS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "qwen2.5-7b": ("Qwen2", (152064, 3584, 18944, 28, 28, 4), {"rms_norm_eps": 1e-6} | _ROPE),
    "llama-3-8b": ("Llama", (128256, 4096, 14336, 32, 32, 8), {"rms_norm_eps": 1e-5} | _LLAMA_ROPE),
    "qwen3-8b": ("Qwen3", (151936, 4096, 12288, 36, 32, 8), {"head_dim": 128, "rms_norm_eps": 1e-6} | _ROPE),
    "qwen3-30b-a3b": (
        "Qwen3Moe", (151936, 2048, 6144, 48, 32, 4), {"head_dim": 128, "rms_norm_eps": 1e-6} | _EXPERTS | _ROPE,
    ),
    "qwen2.5-0.5b": ("Qwen2", (151936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}),
    "qwen2.5-1.5b": ("Qwen2", (151936, 1536, 8960, 28, 12, 2), {"tie_word_embeddings": True}),
    "tiny": ("Qwen3", (256, 64, 96, 2, 4, 2), {"head_dim": 16}),
}  # fmt: skip
_FAILURES = (ImportError, RuntimeError, CuteKernelsError)  # out of memory, mostly: the others still run
WARM = 4  # steps or prompts before the first sample


@dataclass(frozen=True)
class ModelCase:
    """``decode``: ``tokens`` in the cache of each request, halfway through the samples. ``prefill``: in the prompt."""

    suite: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"batch={self.batch} tokens={self.tokens}"


PUBLISHED = tuple(
    ModelCase("prefill", 1, tokens) for tokens in (128, 256, 512, 1024, 2048)
)  # as others timed them, in fp16
CASES = (
    *(ModelCase("decode", batch, tokens) for tokens in (1024, 8192) for batch in (1, 4, 16, 64)),
    *(ModelCase("prefill", 1, tokens) for tokens in (128, 512, 2048, 8192)),
)


@dataclass(frozen=True)
class Effort:
    """Samples of a contender, and decode steps in each."""

    rounds: int = 20
    steps: int = 16

    @property
    def total(self) -> int:
        return WARM + self.rounds * self.steps


def config_of(name: str) -> Any:
    """The configuration of the model ``name``, of transformers' class."""
    import transformers

    kind, sizes, more = CONFIGS[name]
    named = _COMMON | dict(zip(_SIZES, sizes, strict=True)) | more
    return getattr(transformers, f"{kind}Config")(**named)


def build(
    name: str, device: torch.device, dtype: torch.dtype, weights: Path | None = None, *, layers: int = 0, seed: int = 0
) -> Any:
    """The model ``name`` in evaluation mode, with random weights or those in a folder; or so many of its layers."""
    import transformers

    if weights is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=dtype).eval().to(device)
    config = config_of(name)
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def build_packed(name: str, device: torch.device, dtype: torch.dtype, scheme: str) -> LoadedModel:
    """The model ``name`` with random projections packed by ``scheme``; the head, embeddings and routers are not."""
    given = config_of(name).to_dict()
    model = LoadedModel(read_config(given), None, dtype)
    draw = torch.Generator(device).manual_seed(0)
    for path, part in model.parts.items():
        module = model.get_submodule(path)
        assert isinstance(module, Weighted)
        shape = module.weight.shape
        if part.columns is None:
            module.put("weight", torch.ones(shape, dtype=dtype, device=device))
            continue
        weight = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=draw)
        plain = path in ("lm_head", "model.embed_tokens") or path.endswith("mlp.gate")
        module.put("weight", weight if plain else cutekernels.quant.quantize(weight, scheme))
        if module.bias is not None:
            module.put("bias", torch.zeros(shape[:1], dtype=dtype, device=device))
    return model.to(device).eval()


# ---- contenders: each gives a function that does one step, or one prompt, within what it does to the model --


def ours(
    model: Any, case: ModelCase, effort: Effort, *, kv_cache: Literal["fp8"] | None = None
) -> Callable[[], object]:
    vocabulary = model.config.vocab_size
    if case.suite == "prefill":
        decoder = Decoder.from_transformers(model, max_batch=1, max_tokens=case.tokens + 1, kv_cache=kv_cache)
        prompt = _prompt(vocabulary, case.tokens)
        return lambda: decoder.generate([prompt], max_new_tokens=1, stop=())
    begin, most = _begin(case, effort), effort.total + 2
    decoder = Decoder.from_transformers(model, max_batch=case.batch, max_tokens=begin + most, kv_cache=kv_cache)
    for number in range(case.batch):  # prompts differ, or all requests would have the same experts
        decoder.add(_prompt(vocabulary, begin, number), max_new_tokens=most, stop=())
    decoder.step()
    return decoder.step


def theirs(model: Any, case: ModelCase, effort: Effort, *, compiled: bool) -> Callable[[], object]:
    import transformers

    forward = torch.compile(model.forward, mode="reduce-overhead") if compiled else model.forward
    vocabulary, prefill = model.config.vocab_size, case.suite == "prefill"
    begin = _begin(case, effort)
    room = case.tokens if prefill else begin + effort.total + 2
    cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if prefill:
        prompt = torch.tensor([_prompt(vocabulary, case.tokens)], device=model.device)
        with torch.no_grad():
            model(prompt[:, :1], **options)  # allocates the cache outside of what is compiled

        def once() -> object:
            cache.reset()
            return forward(prompt, **options).logits.argmax(-1).tolist()

        return torch.no_grad()(once)
    token = torch.zeros((case.batch, 1), dtype=torch.int64, device=model.device)

    def step() -> None:
        token.copy_(forward(token, **options).logits.argmax(-1))

    with torch.no_grad():
        model(token, **options)  # allocates the cache
        for layer in cache.layers:  # the time of a step does not depend on which keys these are
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(begin)
    return torch.no_grad()(step)


@contextmanager
def patched(model: Any) -> Iterator[Any]:
    with cutekernels.patch(model):
        yield model


@contextmanager
def liger(model: Any) -> Iterator[Any]:
    """A twin that shares the weights. Liger's classes, which it puts into transformers' module too, leave it again."""
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Absent(f"liger-kernel has nothing for {model.config.model_type}")
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    try:
        monkey_patch._apply_liger_kernel_to_instance(twin)
        yield twin
    finally:
        names.update(before)


@contextmanager
def norms_and_mlps(model: Any) -> Iterator[Any]:
    """Only norms, and the activation between an MLP's projections, are ours: what others patched and published."""
    replaced = []
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif kind.endswith("MLP"):
            module.forward = partial(_mlp, module)
        else:
            continue
        replaced.append(module)
    try:
        yield model
    finally:
        for module in replaced:
            del module.forward


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return cutekernels.rms_norm(x, module.weight, eps=module.variance_epsilon, rounding="huggingface")


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    down: torch.Tensor = module.down_proj(cutekernels.silu_mul(module.gate_proj(x), module.up_proj(x)))
    return down


Make = Callable[[Any, ModelCase, Effort], Callable[[], object]]
_eager, _compiled = partial(theirs, compiled=False), partial(theirs, compiled=True)
Contender = tuple[Make, Callable[[Any], AbstractContextManager[Any]]]
CONTENDERS: dict[str, Contender] = {
    "transformers": (_eager, nullcontext),
    "transformers compiled": (_compiled, nullcontext),
    "liger-kernel": (_eager, liger),
    "cutekernels": (ours, nullcontext),
    "cutekernels, FP8 cache": (partial(ours, kv_cache="fp8"), nullcontext),
    "cutekernels patched": (_eager, patched),
    "cutekernels patched, compiled": (_compiled, patched),
}
PUBLISHED_CONTENDERS: dict[str, Contender] = {
    **{name: CONTENDERS[name] for name in ("transformers", "liger-kernel")},
    "cutekernels, norms and MLPs": (_eager, norms_and_mlps),
    **{name: CONTENDERS[name] for name in ("cutekernels", "cutekernels patched")},
}


def _begin(case: ModelCase, effort: Effort) -> int:
    return max(1, case.tokens - effort.total // 2)


def _prompt(vocabulary: int, tokens: int, number: int = 0) -> list[int]:
    return random.Random(f"{tokens} {number}").choices(range(vocabulary), k=tokens)


# ---- timing ---------------------------------------------------------------------------------------------


def run(
    name: str,
    model: Any,
    cases: list[ModelCase],
    effort: Effort,
    stamp: dict[str, str],
    contenders: Mapping[str, Contender] | None = None,
) -> Iterator[Row]:
    """A row of each case and contender."""
    for case in cases:
        for contender, (make, within) in (contenders or CONTENDERS).items():
            place = (name, case.suite, str(case), str(case))
            wall.forget()
            try:
                with within(model) as own:
                    us = _samples(make(own, case, effort), case, effort, model.device)
                yield wall.timed(place, contender, us, stamp=stamp, memory_gib=_most_memory(model.device))
            except _FAILURES as error:
                yield wall.untimed(place, contender, error, stamp=stamp)


def _samples(once: Callable[[], object], case: ModelCase, effort: Effort, device: torch.device) -> list[float]:
    steps = effort.steps if case.suite == "decode" else 1
    for _ in range(WARM):
        once()
    found = []
    for _ in range(effort.rounds):
        wall.wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            once()
        wall.wait(device)
        found.append((time.perf_counter() - begin) / steps * 1e6)
    return found


def _most_memory(device: torch.device) -> float | None:
    """GiB that were allocated at once since ``wall.forget``."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


# ---- command line ---------------------------------------------------------------------------------------


@app.command()
def command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")],
    weights: Annotated[Path | None, typer.Option(help="Folder of a checkpoint; random weights without it.")] = None,
    match: Match = None,
    rounds: Rounds = 20,
    out: Out = None,
    published: Annotated[
        bool,
        typer.Option("--published", help="The prompts that others timed, in fp16, with norms and MLPs alone ours."),
    ] = False,
    packed: Annotated[
        str | None,
        typer.Option(help="Our decoder alone, its weights packed by a scheme of quant.quantize: int4_g128, say."),
    ] = None,
    commit: Commit = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only contenders of one of these names.")] = None,
    suite: Annotated[
        str | None, typer.Option(help=f"decode, prefill or {new_lengths.SUITE}; default: the first two.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Time decode steps and prompts of a model, and record a row of each case and contender."""
    if model not in CONFIGS:
        terminal.fail(f"--model is one of {', '.join(CONFIGS)}; it is {model!r}", code=2)
    if packed is not None and (published or weights is not None):
        terminal.fail("--packed has random weights and no peers: leave --published and --weights out", code=2)
    if packed is not None and packed not in SCHEMES:
        terminal.fail(f"--packed is one of {', '.join(SCHEMES)}; it is {packed!r}", code=2)
    if suite not in (None, "decode", "prefill", new_lengths.SUITE):
        terminal.fail(f"--suite is decode, prefill or {new_lengths.SUITE}; it is {suite!r}", code=2)
    if suite == new_lengths.SUITE and (published or packed or match):
        terminal.fail(f"--suite {suite} is one case: leave --published, --packed and --match out", code=2)
    contenders: Mapping[str, Any] = PUBLISHED_CONTENDERS if published else CONTENDERS
    if suite == new_lengths.SUITE:
        contenders = new_lengths.CONTENDERS
    if packed is not None:
        contenders = {f"cutekernels, {packed}": CONTENDERS["cutekernels"]}
    if unknown := set(contender or ()) - set(contenders):
        terminal.fail(f"--contender is one of {', '.join(contenders)}; it is {min(unknown)!r}", code=2)
    contenders = {name: made for name, made in contenders.items() if not contender or name in contender}
    listed = [case for case in (PUBLISHED if published else CASES) if suite in (None, case.suite)]
    cases = [] if suite == new_lengths.SUITE else wall.chosen(listed, match, lambda case: f"{case.suite} {case}")
    if dry_run:
        for shown in [f"{case.suite} {case}" for case in cases] or [f"{suite} 1 to {new_lengths.MOST} tokens"]:
            terminal.show(f"{model} {shown}: {'; '.join(contenders)}")
        return
    gpu = wall.detect_gpu()
    kind = "_published" if published else f"_{packed}" if packed else "_new_lengths" if not cases else ""
    path = (out or wall.RESULTS / gpu.name / "models") / f"{model}{kind}.jsonl"
    device, dtype = torch.device("cuda"), torch.float16 if published else torch.bfloat16
    built = build_packed(model, device, dtype, packed) if packed else build(model, device, dtype, weights)
    stamp = environment.stamp(gpu.name, commit)
    found = (
        run(model, built, cases, Effort(rounds), stamp, contenders)
        if cases
        else new_lengths.run(model, built, stamp, contenders)
    )
    wall.record(found, path, wall.table)
