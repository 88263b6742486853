"""``load`` and ``Decoder.from_pretrained``: what transformers reads, to the bit; one sentence for each broken file."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, load
from cutekernels.models.safetensors import TensorFile
from tests.integrations import tiny
from tests.models.test_decoder import MODELS, one_thread, prompts
from tests.processes import python

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES: dict[str, Any] = {"max_batch": 2, "max_tokens": 96, "page_size": 16}
LOADED = [name for name in MODELS if not name.startswith(("qwen3-moe-", "qwen2-moe"))]
SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-deepseek": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7,
        "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
}  # fmt: skip


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def store(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    """Replaces the tensors of a checkpoint, and says how they are quantized."""
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
    edit(folder / "config.json", lambda c: c.update(quantization_config=quantization))


def logits(engine: Decoder, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of two prompts, and every logit behind them."""
    found, take = [], engine._choices.take

    def kept(logits: torch.Tensor, *rest: Any, **into: Any) -> torch.Tensor:
        found.append(logits.clone())
        return take(logits, *rest, **into)

    monkeypatch.setattr(engine._choices, "take", kept)
    return engine.generate(prompts(21, 3), max_new_tokens=12).tokens, torch.cat(found)


def assert_close(model: Any, ours: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ours`` generates what a decoder of ``model`` does, by logits that are close to its."""
    expected, wanted = logits(Decoder.from_transformers(model, **SIZES), monkeypatch)
    tokens, found = logits(ours, monkeypatch)
    assert tokens == expected
    torch.testing.assert_close(found, wanted)


def assert_alike(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Decoder:
    """``from_pretrained`` computes what ``from_transformers`` does, to the bit."""
    ours = Decoder.from_pretrained(folder, **SIZES, **options)
    expected, wanted = logits(Decoder.from_transformers(model, **SIZES), monkeypatch)
    tokens, found = logits(ours, monkeypatch)
    assert tokens == expected
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    return ours


# ---- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOADED)
def test_logits_are_those_of_the_loaded_transformers_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = MODELS[name]
    model = tiny.model(family, **changes)
    ours = assert_alike(model, saved(model, tmp_path), monkeypatch)
    loaded = ours._source.model
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == model.config.tie_word_embeddings


@pytest.mark.parametrize("scaled", SCALED)
def test_rotary_embeddings_of_a_config_alone(scaled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama", rope_parameters=dict(SCALED[scaled]))
    assert_alike(model, saved(model, tmp_path), monkeypatch)


def test_bf16_tied_scaled_and_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("gemma3", torch.bfloat16)
    saved(model, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_alike(again.eval(), tmp_path, monkeypatch)


def test_a_dtype_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tiny.model("qwen2"), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_alike(model.eval(), tmp_path, monkeypatch, dtype=torch.bfloat16)


def test_no_library_is_needed(tmp_path: Path) -> None:
    """In a process where neither transformers nor huggingface_hub can be imported."""
    model = tiny.model("qwen3", eos_token_id=7)
    saved(model, tmp_path)
    code = f"""
import sys
for name in ("transformers", "huggingface_hub", "accelerate"):
    sys.modules[name] = None
from cutekernels.models import Decoder
print(Decoder.from_pretrained({str(tmp_path)!r}, max_tokens=64).generate([[3, 4, 5]], max_new_tokens=6).tokens)
"""
    run = python(code)
    expected = Decoder.from_transformers(model, max_tokens=64).generate([[3, 4, 5]], max_new_tokens=6).tokens
    assert json.loads(run.stdout) == expected
    assert "load" not in run.stderr, "no bar without a terminal"


def test_a_bar_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    saved(tiny.model("llama"), tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    capsys.readouterr()
    load(tmp_path, progress=False)
    assert not capsys.readouterr().err
    load(tmp_path)
    assert "load" in capsys.readouterr().err


def test_weights_have_memory_of_their_own_once(tmp_path: Path) -> None:
    model = tiny.model("llama")
    saved(model, tmp_path)
    loaded = load(tmp_path)
    before = {name: p.clone() for name, p in loaded.named_parameters()}
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    assert all(torch.equal(p, before[name]) for name, p in loaded.named_parameters())
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in loaded.parameters()}
    assert sum(held.values()) == sum(p.nbytes for p in model.parameters())


def test_ends_of_a_text(tmp_path: Path) -> None:
    """Ends are those of ``generation_config.json``; without that file the config's."""
    saved(tiny.model("llama", eos_token_id=5), tmp_path)
    edit(tmp_path / "generation_config.json", lambda g: g.update(eos_token_id=[6, 7]))
    assert Decoder.from_pretrained(tmp_path, **SIZES)._stop(None) == {6, 7}
    (tmp_path / "generation_config.json").unlink()
    assert Decoder.from_pretrained(tmp_path, **SIZES)._stop(None) == {5}


def test_a_head_that_is_stored_and_differs_is_not_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    saved(model, tmp_path)
    edit(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert_alike(model, tmp_path, monkeypatch)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    saved(model, tmp_path)
    edit(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tied = saved(tiny.model("llama", tie_word_embeddings=True), tmp_path / "tied")
    edit(tied / "config.json", lambda c: c.pop("tie_word_embeddings"))
    loaded = load(tied)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight, "nothing else could be meant"


def test_other_names_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors saves a tied model, the head's name alone; and as the model without its head is saved."""
    model = tiny.model("llama", tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    assert "model.embed_tokens.weight" not in TensorFile(tmp_path / "model.safetensors").entries
    assert_alike(model, tmp_path, monkeypatch)
    assert_alike(model, saved(model.model, tmp_path / "body"), monkeypatch)


def test_a_whole_file_goes_before_an_index_that_a_save_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers, whichever of the two was saved last."""
    for order in ([True, False], [False, True]):
        folder = tmp_path / str(order[0])
        for whole in order:
            model = tiny.model("llama")
            model.lm_head.weight.data *= -1 if whole else 1
            saved(model, folder, **({} if whole else {"max_shard_size": "30KB"}))
        assert_alike(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), folder, monkeypatch)


def test_a_loaded_model_moves_and_is_checked(tmp_path: Path) -> None:
    loaded = load(saved(tiny.model("qwen2"), tmp_path))
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert "qwen2, 2 layers of 64" in repr(loaded)
    decoder = Decoder.from_transformers(loaded, **SIZES)
    loaded.lm_head.weight.data = loaded.lm_head.weight.data * 2
    decoder.generate([[1, 2]], max_new_tokens=2)
    loaded.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedProblem, match="lm_head has one"):
        Decoder.from_transformers(loaded, **SIZES)


# ---- files ----------------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of ``model.safetensors``'s header, its tensors' bytes left as they are."""

    def broken(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        found = json.loads(raw[8 : 8 + length])
        text = change(found)
        text = json.dumps(found).encode() if not isinstance(text, bytes) else text
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return broken


def of(name: str, **values: Any) -> Callable[[Path], None]:
    return header(lambda h: h[name].update(values))


def file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return broken


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda c: c.update(values))


def index(change: Callable[[dict[str, str]], Any], *copies: str) -> Callable[[Path], None]:
    """The one file as a shard, under an index."""

    def broken(folder: Path) -> None:
        for name in ("a.safetensors", *copies):
            shutil.copy(folder / "model.safetensors", folder / name)
        (folder / "model.safetensors").unlink()
        names = TensorFile(folder / "a.safetensors").entries
        places = dict.fromkeys(names, "a.safetensors")
        change(places)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return broken


def piped(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NORM, HEAD = "model.norm.weight", "lm_head.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (file(lambda raw: raw[:-40]), "file not fully covered, of .* bytes; download it again"),
    "longer": (file(lambda raw: raw + b"\0"), "file not fully covered"),
    "no header": (file(lambda raw: raw[:5]), "header too small, of 5 bytes"),
    "empty": (file(lambda raw: b""), "header too small, of 0 bytes"),
    "header beyond the file": (file(lambda raw: b"\xff" * 8 + raw[8:]), "header too large, of .* bytes"),
    "no JSON": (file(lambda raw: raw[:8] + b"\xff" + raw[9:]), "invalid UTF-8 in header"),
    "nested": (header(lambda h: b'{"a": {"shape": ' + b"[" * 100000), "invalid JSON in header"),
    "a list": (header(lambda h: b"[1, 2]"), "invalid JSON in header: invalid type"),
    "a name twice": (header(lambda h: b'{"a": 1, "a": 2}'), "invalid JSON in header: .* integer `1`"),
    "an int of 5000 digits": (header(lambda h: b'{"a": %s}' % (b"9" * 5000)), "number out of range"),
    "unknown dtype": (of(NORM, dtype="F128"), "unknown variant `F128`, expected one of"),
    "half bytes": (of(NORM, dtype="F4", shape=[512]), "is of dtype 'F4', which is none of F64, F32"),
    "negative": (of(NORM, shape=[-64]), "integer `-64`, expected usize"),
    "a bool": (of(NORM, shape=[True]), "boolean `true`, expected usize"),
    "beyond strides": (
        header(lambda h: h.update(x={"dtype": "I8", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]})), "'x' has the"
    ),
    "offsets": (of(NORM, data_offsets=[0]), "invalid length 1, expected a tuple of size 2"),
    "beyond the file": (of(NORM, data_offsets=[2**40, 2**40 + 256]), "invalid offset for tensor `model.norm"),
    "overlapping": (header(lambda h: h[NORM].update(data_offsets=[0, 256])), "invalid offset for tensor"),
    "backwards": (of(NORM, data_offsets=[512, 256]), "invalid offset for tensor `model.norm"),
    "bytes for another shape": (of(NORM, shape=[63]), "invalid shape, data type, or offset"),
    "a pipe": (piped, "is no regular file"),
    "pickled": (pickled, r"has neither model.safetensors nor .*; pytorch_model.bin may hold code, and is not read"),
    "integers": (of(NORM, dtype="I32"), "is torch.int32 of shape .* asks for a float"),
    "lacking": (header(lambda h: h.update(other=h.pop(NORM))), "has a tensor 'other', of no module of a llama"),
    "no head": (lambda folder: edit_head(folder), r"lacks lm_head.weight, of shape \(131, 64\)"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "config.json is no JSON object"),
    "another family": (config(model_type="mamba"), "model_type is one of llama, .* has 'mamba': load it with"),
    "experts": (config(model_type="qwen2_moe"), "has 'qwen2_moe': load it with transformers"),
    "no layers": (config(num_hidden_layers=0), "takes num_hidden_layers as a whole number from 1 to 2000; got 0"),
    "2 ** 31 layers": (config(num_hidden_layers=2**31), "takes num_hidden_layers as .*; got 2147483648"),
    "another width": (config(hidden_size=128), r"is torch.float32 of shape .*, and config.json asks for a float of"),
    "heads": (config(num_key_value_heads=3), "4 heads for 3 of keys"),
    "a bias too many": (config(attention_bias=True), r"lacks model.layers.0.self_attn.q_proj.bias, of shape \(64,\)"),
    "another gate": (config(hidden_act="relu"), "load has the gates silu, .* has 'relu'"),
    "rope": (config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_type is dynamic"),
    "rope no number": (config(rope_parameters={"rope_type": "linear", "factor": "x"}), "need factor, a positive"),
    "head_dim": (config(head_dim=12), "head_dim that is a multiple of 8"),
    "shard elsewhere": (index(lambda p: p.update({NORM: "../a.safetensors"})), r"names the shard '../a.safetensors'"),
    "shard by a path": (index(lambda p: p.update({NORM: "/etc/a.safetensors"})), "names the shard '/etc/a.safet"),
    "shard no name": (index(lambda p: p.update({NORM: 3})), "names the shard 3"),
    "shard missing": (index(lambda p: p.update({NORM: "b.safetensors"})), r"lacks 'b.safetensors' of 2 shards"),
    "shard without it": (index(lambda p: p.update(other="a.safetensors")), "'other' in a.safetensors, which does not"),
    "characters that act on a terminal": (
        index(lambda p: p.update({NORM: "\x1b[2J\n.safetensors"})), r"lacks '\\x1b\[2J\\n.safetensors' of 2 shards"
    ),
    "of a name": (header(lambda h: h.update({"\n\x1b": h.pop(NORM)})), r"it names a tensor '\\n\\x1b'"),
    "no map": (index(dict.clear), "has no weight_map"),
}  # fmt: skip


def edit_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny.model("llama"), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_sentence(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change, message = BROKEN[name]
    change(folder)
    with pytest.raises(UnsupportedProblem, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_strange_bytes_of_a_header_are_refused(whole: Path, tmp_path: Path) -> None:
    """No other error and no crash, whatever they are. Some change nothing that counts."""
    shutil.copy(whole / "config.json", tmp_path)
    raw, draw = (whole / "model.safetensors").read_bytes(), random.Random(0)
    first = 8 + struct.unpack("<Q", raw[:8])[0]
    outcomes = set()
    for _ in range(300):
        changed = bytearray(raw)
        for _ in range(draw.choice([1, 1, 3])):
            changed[draw.randrange(first)] = draw.choice(b'0123456789[]{}",:-e.\\\xff\x00')
        (tmp_path / "model.safetensors").write_bytes(
            changed[: draw.choice([len(raw), len(raw), draw.randrange(first)])]
        )
        try:
            load(tmp_path)
            outcomes.add("loaded")
        except UnsupportedProblem as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes


STRANGE = (None, -1, 0, "x", [], {}, 1e400, True, 10**400, [None], {"rope_type": []}, {"full_attention": 3})


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "glm4-moe", "gemma4"])
def test_strange_values_of_a_config_are_refused(family: str, tmp_path: Path) -> None:
    """Or mean something: no other error, up to the decoder."""
    saved(tiny.model(family), tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    more = (
        "rope_scaling",
        "rope_theta",
        "use_sliding_window",
        "sliding_window_pattern",
        "quantization_config",
        "dtype",
    )
    for name in {*given, *more}:
        for value in STRANGE:
            (tmp_path / "config.json").write_text(json.dumps({**given, name: value}))
            try:
                Decoder.from_pretrained(tmp_path, max_batch=1, max_tokens=16, page_size=16)
            except UnsupportedProblem as error:
                assert "\n" not in str(error)


def test_what_the_system_cannot_read(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    places = {"model.norm.weight": "x" * 300 + ".safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedProblem, match=r"cannot be read, File name too long: pass a folder that can$"):
        load(tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(UnsupportedProblem, match="'/nowhere' cannot be read, No such file or directory"):
        load(whole)


def test_no_folder() -> None:
    with pytest.raises(UnsupportedProblem, match="'Qwen/Qwen2.5-7B' is none: download the model first"):
        load("Qwen/Qwen2.5-7B")
    with pytest.raises(UnsupportedProblem, match="path of a checkpoint's folder; got 3"):
        load(3)  # type: ignore[arg-type]


def test_sizes_and_types_are_refused_before_anything_is_read(whole: Path) -> None:
    with pytest.raises(UnsupportedProblem, match="max_batch"):
        Decoder.from_pretrained("nowhere", max_batch=0)
    with pytest.raises(UnsupportedProblem, match=r"takes fp16 and bf16 .* torch.float8_e4m3fn on cpu: pass dtype"):
        load(whole, dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedProblem, match="device must be one that torch has"):
        load(whole, device="warp")


def test_the_reader_alone(tmp_path: Path) -> None:
    """Every type at odd addresses, scalars and tensors without elements; a key that the format lacks means nothing."""
    tensors = {
        str(dtype): torch.arange(6).view(2, 3).to(dtype)
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64,
                      torch.float8_e4m3fn, torch.bool)
    }  # fmt: skip
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "odd": torch.ones(1, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    raw = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    shifted = struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :]
    (tmp_path / "b.safetensors").write_bytes(shifted)
    entries = json.loads(raw[8 : 8 + length])
    entries["scalar"]["code"] = "import os"
    text = json.dumps(entries).encode()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    for name in ("a", "b", "c"):
        ours = TensorFile(tmp_path / f"{name}.safetensors")
        expected = load_file(tmp_path / "a.safetensors")
        assert ours.entries.keys() == expected.keys()
        for key, tensor in expected.items():
            found = ours.read(key)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.double(), tensor.double())
