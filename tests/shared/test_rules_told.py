"""Each op's rules, told in words: a valid config, and what ``check`` says of it after a change to it or its problem."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import cutekernels.ops.library  # noqa: F401  registers all
from cutekernels import gpu
from cutekernels.errors import InvalidConfig
from cutekernels.ops import registry

Row = tuple[str, str, str]  # words of the problem, words of the config, words of the rule


class Told(NamedTuple):
    problem: str
    config: str
    rows: tuple[Row, ...]
    gpu: str = "h200"


_GLU = "block_rows=1 block_cols=1024 warps=4 evict=normal"
_NORM = "block_rows=1 block_cols=4096 resident=1 warps=8 per_sm=0 stages=1"
_HEADS = "batch=1 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16"
_FEW = "tile_q=64 tile_kv=64 warps=4 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=rows body=few split=4"
_TURN = "tokens=1 heads=1 block=64 warps=1"
_TURNED = (
    ("", "block=64 warps=4", "128 threads of 8 pairs an access need 1024"),
    ("", "tokens=4 heads=32 block=64 warps=4", "registers"),
    ("", "heads=4 block=128", "block=128 does not cover 64 pairs by a power of two from 8 to 256, 64"),
    ("", "heads=64 block=64 warps=8", "with 32 and 8 heads"),
    ("", "tokens=8 block=64", "with 3 tokens"),
)
TOLD: dict[str, tuple[Told, ...]] = {
    "silu_mul": (
        Told("rows=4 cols=4096", _GLU, (
            ("", "block_cols=256", "an access need 1024"),
            ("", "block_cols=8192 warps=1", "registers"),
            ("", "block_rows=2 block_cols=2048", "block_rows must be 1"),
            ("cols=300 layout=rows", "", "rows of 300"),
            ("rows=3 layout=rows", "block_rows=8 block_cols=256", "with 3 rows"),
            ("rows=64 cols=64 layout=strided", "block_rows=32 block_cols=64 warps=2", "registers"),
        )),
    ),
    "embedding": (
        Told("rows=3 vocabulary=9 cols=2000", "block_rows=1 block_cols=1024 warps=1", (
            ("", "block_cols=512 warps=4", "an access need 1024"),
            ("", "block_rows=8 block_cols=4096", "registers"),
            ("", "block_cols=4096 warps=4", "rows of 2000"),
            ("", "block_rows=8 block_cols=128", "with 3 rows"),
        )),
    ),
    "kv_append": (
        Told("batch=4 seq=3 heads_kv=8 head_dim=128 heads_q=32 rotary=128", _TURN, _TURNED),
    ),
    "rope": (
        Told("batch=4 seq=3 heads_q=32 head_dim=128 rotary=128 heads_kv=8", _TURN, _TURNED),
    ),
    "logit_gradient": (
        Told("rows=3 cols=2000", "block=1024 warps=4", (
            ("", "warps=8", "an access need 2048"),
            ("", "block=4096 warps=2", "at most 32 elements"),
            ("", "block=4096 warps=8", "with 2000 columns"),
        )),
    ),
    "scale_gradient": (
        Told("elements=4096", "block=1024 warps=4 programs=256", (("", "warps=8", "an access need 2048"),)),
    ),
    "moe_route": (
        Told("tokens=64 experts=128", "tokens=1 warps=1 method=sort", (
            ("", "tokens=32", "of a tile make 128"),
            ("experts=8 top_k=2", "warps=4", "a tile has 8"),
            ("tokens=2", "tokens=8 warps=4 method=rounds", "with 2 rows"),
        )),
    ),
    "moe_permute": (
        Told("pairs=200 experts=8", "block=256 programs=1 passes=1 warps=4", (
            ("pairs=100", "block=1024", "tile with 100 ids"),
            ("", "programs=32", "1 are enough"),
            ("", "passes=2", "no second pass"),
            ("pairs=1000000", "programs=32", "at most 16"),
        )),
    ),
    "moe_gather": (
        Told("tokens=4 cols=4096", "block=1024 warps=4", (
            ("", "block=256 warps=8", "an access need 2048"),
            ("", "block=4096 warps=1", "of a tile make 128"),
            ("cols=100 align=8", "", "with rows of 100"),
        )),
    ),
    "moe_dispatch": (
        Told("tokens=4 cols=4096 experts=8", "block=1024 warps=4", (("", "block=256 warps=8", "an access need 2048"),)),
    ),
    "rms_norm": (
        Told("rows=4 cols=4096", _NORM, (
            ("", "block_cols=2048", "take block_cols=4096"),
            ("cols=2048", "resident=0", "resident must be true"),
            ("cols=9000", "block_cols=256 resident=0", "chunks are of 1024"),
            ("", "block_rows=8", "with 4 rows"),
            ("", "warps=1", "registers"),
            ("cols=32 layout=strided", "block_cols=32 warps=2", "an access need 64"),
            ("", "stages=2", "stages must be 1"),
            ("", "per_sm=1 stages=2", "nothing ahead"),
            ("rows=9999", "per_sm=2", "copy nothing ahead"),
            ("rows=9999", "per_sm=1 stages=2", "bytes ahead"),
            ("rows=300", "per_sm=4 stages=2", "without one"),
        )),
    ),
    "rms_norm_backward": (
        Told("rows=4 cols=4096", _NORM, (
            ("", "", "per_sm must not be 0"),
            ("rows=9999", "per_sm=1", "copy ahead where"),
            ("rows=9999", "per_sm=4", "registers"),
        )),
    ),
    "adamw_step": (
        Told("elements=10000", "block=1024 warps=4 evict=normal", (
            ("", "block=256", "128 threads of 4 elements an access need 512"),
            ("", "block=4096 evict=first", "at most 16 elements; 4096 of a tile make 32"),
        )),
    ),
    "sample_filter": (
        Told("rows=1 cols=4096", "block=1024 warps=4 depth=1 splits=1", (
            ("", "block=4096", "4096 give it 32"),
            ("", "depth=8", "1024 give it 8"),
            ("", "warps=16 depth=8", "twice a row of 4096"),
            ("by_k=1", "splits=32", "idle on rows of 4096"),
            ("rows=1024 cols=131072 by_k=1", "splits=32", "of 1024 rows"),
        )),
    ),
    "attention": (
        Told(f"{_HEADS} head_dim=256", f"{_FEW} tile_q=128 tile_kv=128 warps=8 stages=1 body=multistage split=1", (
            ("", "tile_q=256 warps=4 stages=2", "registers"),
            ("", "stages=2", "shared memory"),
            ("", "tile_q=64", "rows each"),
            ("seq_q=16 seq_kv=16", "", "idles"),
        )),
        Told(f"{_HEADS} batch=4", f"{_FEW} tile_q=128 tile_kv=128 warps=8 body=warpgroup split=1 turns=1", (
            ("", "warps=4", "tile_q=128 takes 8"),
            ("", "ctas_per_sm=2", "takes ctas_per_sm from 1"),
            ("", "q_in_registers=1", "takes q_in_registers from False"),
            ("", "tile_q=192 warps=12 tile_kv=144", "leave room for 132"),
            ("", "tile_q=64 warps=4", "two groups or more"),
            ("", "body=multistage", "takes turns from False"),
            ("batch=1 seq_q=512 seq_kv=512", "grid=dynamic", "more tiles than SMs"),
            ("head_dim=256", "tile_kv=96", "shared memory"),
        )),
        Told("batch=1 seq_q=1024 seq_kv=1024 heads_q=1 heads_kv=1 head_dim=64", _FEW, (
            ("varlen=1", "", "one length without a mask"),
            ("mask=1", "", "one length without a mask"),
            ("", "split=1", "is body=warpgroup"),
            ("", "body=warpgroup", "takes split from 1"),
            ("", "grid=dynamic", "takes grid from tiles"),
            ("", "tile_q=128 warps=8 ctas_per_sm=2", "registers for one group"),
            ("seq_kv=200", "", "without one of 4 blocks"),
            ("batch=64", "", "for few tiles"),
            ("", "split=1 ctas_per_sm=2", "for more tiles than SMs"),
            ("", "order=paired", "tile_q=128 split=1"),
            ("", "tile_q=128 warps=8 split=1 order=paired", "the later they are"),
            ("head_dim=256", "tile_kv=64", "shared memory"),
            ("head_dim=192", "tile_kv=128 stages=1", "leave room for 160"),
            ("seq_q=512 seq_kv=512 heads_q=28 heads_kv=4 head_dim=128 causal=1 lse=1", "ctas_per_sm=2 tile_kv=128",
             "do not fit an SM"),
        )),
    ),
    "attention_backward": (
        Told(_HEADS, "tile_own=64 tile_walked=32 warps=4 stages=2 ctas_per_sm=2 in_registers=0 order=rows", (
            ("", "tile_own=256", "registers"),
            ("", "warps=8", "rows each"),
            ("", "ctas_per_sm=1", "one more CTA"),
            ("seq_q=16 seq_kv=16", "tile_own=128 warps=8 ctas_per_sm=1", "idles"),
            ("seq_kv=60", "order=heads", "more than one tile"),
        )),
        Told(_HEADS, "tile_own=128 tile_walked=32 warps=8 stages=2 ctas_per_sm=1 in_registers=0 order=rows", (
            ("", "tile_walked=64", "shared memory"),
        ), gpu="l40s"),
        Told(f"{_HEADS} batch=4", "tile_own=128 tile_walked=64 warps=8 stages=3 ctas_per_sm=1 in_registers=0 order=rows"
             " body=warpgroup", (
            ("", "warps=4", "tile_own=128 takes 8"),
            ("", "ctas_per_sm=2", "takes ctas_per_sm from 1"),
            ("", "in_registers=1", "takes in_registers from False"),
            ("", "tile_walked=80", "a thread has 228 accumulators and probabilities"),
            ("", "stages=1", "takes stages from 2, 3"),
            ("", "body=multistage", "takes stages from 1, 2"),
            ("softcap=1", "", "248 accumulators"),
            ("head_dim=256 of=q", "", "shared memory"),
            ("batch=1 seq_kv=512", "grid=dynamic", "more tiles than SMs"),
        )),
    ),
    "decode_attention": (
        Told("batch=4 seq_kv=4096 heads_q=32 heads_kv=8", "tile_kv=64 warps=4 stages=3 ctas_per_sm=2 splits=4", (
            ("", "warps=8", "keys each"),
            ("", "stages=6", "shared memory"),
            ("", "ctas_per_sm=3", "registers"),
            ("", "ctas_per_sm=1", "one more CTA"),
            ("", "splits=96", "more than the 64 blocks"),
            ("", "cluster=1 splits=11", "2 to 8 splits, not 11"),
            ("batch=300", "", "fill the GPU with fewer"),
            ("seq_kv=16", "", "idles"),
        )),
        Told("batch=4 seq_kv=4096 heads_q=32 heads_kv=8", "tile_kv=64 warps=4 stages=2 ctas_per_sm=2 splits=8", (
            ("", "cluster=1", "like the H100"),
        ), gpu="a100"),
    ),
}  # fmt: skip


def changed(text: str, words: str) -> str:
    """A text with some of its words others."""
    merged = dict(word.split("=") for word in f"{text} {words}".split())
    return " ".join(f"{name}={value}" for name, value in merged.items())


def failures(op: Any, problem: str, config: str, spec: gpu.GpuSpec) -> str:
    """Messages of ``check``; of ops with several schedules, all that the config's says, whatever comes first."""
    p, c = op.Problem.parse(problem), op.Config.parse(config)
    with pytest.raises(InvalidConfig) as refused:
        op.check(p, c, spec)
    return "; ".join([str(refused.value), *(op.schedule(c).failures(p, c, spec, p) if hasattr(op, "schedule") else ())])


OF_OPS = [(name, told) for name, all_of in TOLD.items() for told in all_of]


@pytest.mark.parametrize(("name", "told", "row"), [(*both, row) for both in OF_OPS for row in both[1].rows])
def test_a_broken_rule_is_told(name: str, told: Told, row: Row) -> None:
    problem, config, rule = row
    texts = changed(told.problem, problem), changed(told.config, config)
    assert rule in failures(registry.get(name), *texts, gpu.lookup(told.gpu))


@pytest.mark.parametrize(("name", "told"), OF_OPS)
def test_what_is_changed_was_valid(name: str, told: Told) -> None:
    """But where a row changes nothing: there the first problem and config break the rule themselves."""
    op: Any = registry.get(name)
    p, c = op.Problem.parse(changed(told.problem, "")), op.Config.parse(changed(told.config, ""))
    found = op.why_not(p, c, gpu.lookup(told.gpu))
    assert (found is None) != any(row[:2] == ("", "") for row in told.rows), found
