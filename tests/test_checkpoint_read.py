"""An opened checkpoint: config, order, dtypes, shards, tokenizer, special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig
from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint
from edge.tensors import tensor_shapes
from tests.checkpoints import VOCABULARY, edit_config, write_json
from tests.state_spaces_checkpoints import save_mambabyte, save_state_spaces
from tests.transformers_checkpoints import save_bamba, save_mamba, save_mamba2


def all_tensors(path: Path) -> dict[str, Tensor]:
    """Return copies: a test may overwrite the file that a tensor is mapped from."""
    return {name: tensor.clone() for name, tensor in open_checkpoint(path).tensors()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("save", "family"),
    [(save_mamba, "mamba"), (save_mamba2, "mamba2"), (save_bamba, "bamba"),
     (save_state_spaces, "mamba"), (save_mambabyte, "mambabyte")],
)  # fmt: skip
def test_tensors_stream_in_canonical_order_with_their_shapes(save, family, tmp_path):  # type: ignore
    checkpoint = open_checkpoint(str(save(tmp_path)))
    assert checkpoint.family == checkpoint.config.family == family
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors()}
    assert list(shapes.items()) == list(tensor_shapes(checkpoint.config).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("save", [save_mamba, save_state_spaces])
def test_the_stored_dtype_is_kept(save, dtype: torch.dtype, tmp_path: Path) -> None:  # type: ignore
    checkpoint = open_checkpoint(save(tmp_path, dtype=dtype))
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == checkpoint.dtype(name) == dtype
        assert tensor.is_contiguous()


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    file = save_mamba(tmp_path, dtype=torch.bfloat16) / "model.safetensors"
    tensors = load_file(file)
    name = "backbone.layers.0.mixer.A_log"
    save_file(tensors | {name: tensors[name].float()}, file)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor("layers.0.A_log").dtype == torch.float32
    assert checkpoint.tensor("layers.1.A_log").dtype == torch.bfloat16


def test_the_conv_weight_loses_its_middle_axis(tmp_path: Path) -> None:
    stored = load_file(save_mamba(tmp_path) / "model.safetensors")
    ours = open_checkpoint(tmp_path).tensor("layers.0.conv1d.weight")
    assert torch.equal(ours, stored["backbone.layers.0.mixer.conv1d.weight"][:, 0])


def test_an_unknown_canonical_name_is_a_key_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        open_checkpoint(save_mamba(tmp_path)).tensor("layers.9.D")


def test_nothing_is_read_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Watched:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.file = safe_open(*args, **kwargs)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            tensor: Tensor = self.file.get_tensor(name)  # type: ignore[no-untyped-call]
            return tensor

    monkeypatch.setattr("edge.export.checkpoint.weights.safe_open", Watched)
    stream = open_checkpoint(save_mamba(tmp_path)).tensors()
    assert read == []
    next(stream), next(stream)
    assert read == ["backbone.embeddings.weight", "backbone.layers.0.norm.weight"]


def shard(path: Path, suffix: str) -> None:
    """Split model.safetensors in two, with an index, as safetensors or torch files."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    stem, index = {
        "safetensors": ("model", "model.safetensors.index.json"),
        "bin": ("pytorch_model", "pytorch_model.bin.index.json"),
    }[suffix]
    weight_map: dict[str, str] = {}
    for part in (0, 1):
        mine = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == part}
        name = f"{stem}-{part + 1:05}-of-00002.{suffix}"
        if suffix == "bin":
            torch.save(mine, path / name)
        else:
            save_file(mine, path / name)
        weight_map |= dict.fromkeys(mine, name)
    write_json(path / index, {"metadata": {"total_size": 1}, "weight_map": weight_map})


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_one_checkpoint(suffix: str, tmp_path: Path) -> None:
    whole = all_tensors(save_mamba2(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "sharded")
    shard(tmp_path / "sharded", suffix)
    assert same(all_tensors(tmp_path / "sharded"), whole)


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_a_torch_file_equals_a_safetensors_file(modern: bool, tmp_path: Path) -> None:
    whole = all_tensors(save_mamba(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=modern)
    assert same(all_tensors(tmp_path), whole)


def test_links_to_regular_files_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    save_mamba(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    linked = open_checkpoint(tmp_path / "snapshot")
    assert same(dict(linked.tensors()), all_tensors(tmp_path / "blobs"))
    assert linked.fingerprint() == open_checkpoint(tmp_path / "blobs").fingerprint()


def test_a_hub_config_that_kept_the_original_keys_is_read_as_transformers_would(
    tmp_path: Path,
) -> None:
    """state-spaces/mamba-130m-hf's config.json has both sets."""
    save_mamba(tmp_path)
    edit_config(
        tmp_path, d_model=24, n_layer=2, ssm_cfg={}, rms_norm=True, pad_vocab_size_multiple=8
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.layers[0] == Mamba1Config(d_inner=48, d_state=5, dt_rank=2)
    assert len(all_tensors(tmp_path)) == len(tensor_shapes(checkpoint.config))


def test_transformers_weights_may_use_the_original_embedding_name(tmp_path: Path) -> None:
    whole = all_tensors(save_mamba(tmp_path))
    file = tmp_path / "model.safetensors"
    save_file({n.replace("embeddings", "embedding"): t for n, t in load_file(file).items()}, file)
    assert same(all_tensors(tmp_path), whole)


def test_old_state_spaces_configs_take_the_defaults(tmp_path: Path) -> None:
    save_state_spaces(tmp_path, ssm_cfg={"d_state": 16})
    write_json(tmp_path / "config.json", {"d_model": 24, "n_layer": 2, "vocab_size": 270})
    config = open_checkpoint(tmp_path).config
    assert config.vocab_size == VOCABULARY and config.tie_embeddings
    assert config.norm.kind == "rmsnorm"
    assert config.layers == (Mamba1Config(d_inner=48, d_state=16, dt_rank=2),) * 2


def test_the_vocabulary_is_padded_to_the_stated_multiple(tmp_path: Path) -> None:
    path = save_state_spaces(tmp_path, pad_vocab_size_multiple=16, vocab_size=273)
    assert open_checkpoint(path).config.vocab_size == 288


def test_bare_and_tagged_infinity_mean_no_limit(tmp_path: Path) -> None:
    save_mamba2(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    edit_config(tmp_path, time_step_limit=[0.0, float("inf")])
    assert "Infinity\n" in (tmp_path / "config.json").read_text()
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], ...):
        edit_config(tmp_path, time_step_limit=limit)
        layer = open_checkpoint(tmp_path).config.layers[0]
        assert isinstance(layer, Mamba2Config) and layer.dt_limit == (0.0, float("inf"))


def test_mamba2_without_n_groups_has_eight_as_its_class_says(tmp_path: Path) -> None:
    edit_config(save_mamba2(tmp_path, n_groups=8), n_groups=...)
    layer = open_checkpoint(tmp_path).config.layers[0]
    assert isinstance(layer, Mamba2Config) and layer.n_groups == 8


def test_bamba_is_mixers_and_mlps_in_turn(tmp_path: Path) -> None:
    config = open_checkpoint(save_bamba(tmp_path)).config
    kinds = [layer.kind for layer in config.layers]
    assert kinds == ["mamba2", "mlp", "attention", "mlp", "mamba2", "mlp"]
    attention = config.layers[2]
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    assert (attention.n_kv_heads, attention.rope.dim, config.max_context) == (2, 4, 512)


def test_an_older_bamba_config_keeps_rope_theta_at_the_top(tmp_path: Path) -> None:
    edit_config(save_bamba(tmp_path), rope_parameters=..., rope_theta=5e5, rope_scaling=None)
    attention = open_checkpoint(tmp_path).config.layers[2]
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    assert (attention.rope.theta, attention.rope.dim) == (5e5, 4)


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    file = save_bamba(tmp_path) / "model.safetensors"
    extra = {"model.rotary_emb.inv_freq": torch.ones(2)}
    save_file(load_file(file) | extra, file)
    assert len(all_tensors(tmp_path)) == len(tensor_shapes(open_checkpoint(tmp_path).config))


def test_the_mlp_width_is_rounded_up_as_upstream_rounds_it(tmp_path: Path) -> None:
    config = open_checkpoint(save_state_spaces(tmp_path, d_intermediate=130)).config
    assert [layer.kind for layer in config.layers] == ["mamba1", "mlp"] * 2
    assert config.layers[1] == MlpConfig(d_intermediate=256)


def test_256_tokens_without_a_tokenizer_are_bytes(tmp_path: Path) -> None:
    assert open_checkpoint(save_mambabyte(tmp_path / "bytes")).family == "mambabyte"
    worded = save_state_spaces(tmp_path / "words", vocab_size=256, tokenizer=True)
    assert open_checkpoint(worded).family == "mamba"


def test_mambabyte_weights_in_the_old_spelling(tmp_path: Path) -> None:
    whole = all_tensors(save_mambabyte(tmp_path, "layernorm"))
    assert "layers.0.norm.bias" in whole and "lm_head.weight" in whole
    file = tmp_path / "mambabyte.pt"
    old = {"mambabyte": "module.backbone", "token_embedding": "embedding", "final_norm": "norm_f"}
    renamed = {}
    for name, tensor in torch.load(file).items():
        for new, was in old.items():
            name = name.replace(new, was)
        renamed[name] = tensor
    torch.save(renamed, file)
    assert same(all_tensors(tmp_path), whole)


def test_tokenizer_files_that_are_there_are_listed_and_work(tmp_path: Path) -> None:
    save_mamba(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    files = [file.name for file in open_checkpoint(tmp_path).tokenizer_files]
    assert files == [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "generation_config.json", "chat_template.jinja", "tokenizer.model",
    ]  # fmt: skip
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the state, ñ and 🤖"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= VOCABULARY
    assert open_checkpoint(save_mambabyte(tmp_path / "bytes")).tokenizer_files == []


def test_special_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    save_mamba(tmp_path, eos_token_id=5, bos_token_id=6, pad_token_id=7)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [3, 4, 3]})
    expected = {"eos_token_ids": [3, 4], "bos_token_id": 6, "pad_token_id": 7}
    assert open_checkpoint(tmp_path).generation == expected
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(tmp_path).generation == expected | {"eos_token_ids": [5]}
    assert open_checkpoint(save_state_spaces(tmp_path / "original")).generation == {}


@pytest.mark.parametrize("pad", [-1, VOCABULARY, None])
def test_a_padding_token_that_means_none_is_dropped(pad: int | None, tmp_path: Path) -> None:
    edit_config(save_mamba(tmp_path), pad_token_id=pad)
    (tmp_path / "generation_config.json").unlink()
    assert "pad_token_id" not in open_checkpoint(tmp_path).generation


def test_the_fingerprint_follows_config_and_weights_alone(tmp_path: Path) -> None:
    first = open_checkpoint(save_mamba(tmp_path / "a")).fingerprint()
    assert len(first) == 64
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "notes.txt").write_text("beside the point")
    assert open_checkpoint(tmp_path / "b").fingerprint() == first
    file = tmp_path / "b" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert open_checkpoint(tmp_path / "b").fingerprint() != first
    edit_config(tmp_path / "a", initializer_range=0.5)
    assert open_checkpoint(tmp_path / "a").fingerprint() != first


def test_the_source_config_is_kept(tmp_path: Path) -> None:
    path = save_state_spaces(tmp_path)
    assert open_checkpoint(path).source_config == json.loads((path / "config.json").read_text())


def test_a_stored_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    file = save_state_spaces(tmp_path) / "pytorch_model.bin"
    tensors = torch.load(file)
    torch.save(tensors | {"lm_head.weight": tensors["lm_head.weight"].clone()}, file)
    assert "lm_head.weight" not in all_tensors(tmp_path)
    torch.save(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1e-3}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        open_checkpoint(tmp_path)
    edit_config(tmp_path, tie_embeddings=False)
    assert torch.equal(all_tensors(tmp_path)["lm_head.weight"], tensors["lm_head.weight"] + 1e-3)
