"""Published weights, if the package index has them: SmolLM2-135M-Instruct in a GGUF file.

The cheap part of `make real`: the result matches the file, the known facts about the model, and
transformers on 256 tokens.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import edge
from edge.apps.bench import real
from edge.apps.models import delta
from edge.errors import PullError
from edge.export.checkpoint import Checkpoint, open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.text_files import chat_template, licence, tokenizer_info
from edge.text import ChatTemplate, Message
from edge.text.load import make_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    try:
        file = real.fetch(tmp_path_factory.mktemp("real"))
    except PullError as problem:
        pytest.skip(f"{real.PACKAGE} cannot be had here, run make real: {problem.message}")
    return open_checkpoint(file)


def test_smollm2_is_read(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert (checkpoint.family, config.d_model, len(config.layers)) == ("llama", 576, 60)
    assert config.tie_embeddings and config.max_context == 8192 and not checkpoint.unknown_fields
    assert licence(checkpoint) == "apache-2.0"
    reader = real.reader_of(str(checkpoint.path))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in (("layers.59.down_proj.weight", "blk.29.ffn_down.weight"),
                         ("layers.0.norm.weight", "blk.0.attn_norm.weight")):  # fmt: skip
        tensor = stored[theirs]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(checkpoint.tensor(ours).numpy(), expected)
    q = checkpoint.tensor("layers.0.q_proj.weight")
    assert q.shape == (576, 576) and torch.isfinite(q).all()


def test_smollm2_speaks_its_own_tokens(checkpoint: Checkpoint) -> None:
    info, files = tokenizer_info(checkpoint, checkpoint.config)
    tokenizer = make_tokenizer(info, Path(files[0][0]).read_bytes(), "smollm2")
    assert (info.vocab_size, info.bos, info.eos, info.add_bos) == (49152, 1, (2,), False)
    for text in ("In 2024, don't stop!", "def f(x):\n    return x", "東京 \u00e9"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # digits stand alone, and a word takes the space before it
    pieces = [tokenizer.id_to_piece(i) for i in tokenizer.encode("the year 1984")]
    assert pieces == ["the", "\u0120year", "\u0120", "1", "9", "8", "4"]
    template = chat_template(checkpoint)
    assert template is not None
    ids = ChatTemplate(template, tokenizer).encode([Message("user", "Hi")])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


def test_smollm2_reads_a_text_as_transformers_does(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """On one window: `fp16` token for token, `w8` within the limits of `make real`."""
    judge = real.TransformersJudge(checkpoint.path)
    judged: list[tuple[real.Ints, real.Logits]] = []
    for recipe in ("fp16", "w8"):
        export_checkpoint(checkpoint.path, tmp_path / recipe, quant=recipe, verify=False)
        model = edge.load(tmp_path / recipe)
        if not judged:
            text = real.texts()[1][: 8 * real.WINDOW]
            tokens = np.array(model.tokenizer.encode(text), np.int64)[: real.WINDOW]
            judged = [(tokens, judge.logits(tokens)[:-1])]
        assert len(judged[0][0]) == real.WINDOW
        found = real.compare(real.logits_of(model), judged, recipe, 0)
        ratio, kl = real.MOST.get(recipe, (1.001, 1e-4))
        assert found.ratio < ratio and found.kl < kl, found
        assert found.top1 > (0.85 if recipe == "w8" else 0.99), found


def test_smollm2_hybrid_is_assembled_and_answers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The model of `make chat`, from the weights in the package and those of the file."""
    assembled = delta.open_delta("smollm2-hybrid").assemble(checkpoint.path, tmp_path / "hybrid")
    session = edge.load(assembled).session()
    greedy = {"temperature": 0.0, "max_tokens": 16}
    assert "London" in session.chat("What is the capital of England?", **greedy).finish().text
    assert "cold" in session.chat("What is the opposite of hot?", **greedy).finish().text
