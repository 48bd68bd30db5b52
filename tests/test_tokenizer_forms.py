"""Tokenizers without a tokenizer.json, against transformers, sentencepiece and a plain BPE."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import transformers
from tokenizers import decoders
from transformers.integrations.mistral.tokenizer import MistralConverter

import edge
from edge.errors import ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.vocab_merges import read_vocab_merges
from edge.export.exporter import export_checkpoint
from edge.export.text_files import copied
from tests.checkpoints import write_json
from tests.facts import facts
from tests.test_gguf_text import TEKKEN, TEXTS, original
from tests.text_samples import spm_model
from tests.tokenizer_folders import add_vocab_merges, bare_checkpoint, pieces_of, read, tekken_of

END = "<|end|>"
CODE = (
    """for i in range(10):\n\t\tif x[i]>=3.14:  # größer\n\t\t    print(f"{i:>5}", "\u00a0")\r\n"""
)
VARIED = [
    *TEXTS, CODE, "  two   three    four", "1234567890 12 3.5e-7",
    "naïve\u0301 e\u0301 \ufb01 \u1e9b\u0323",
    "👩‍👩‍👧 🇩🇪 \u200d\ufe0f", "\u2028 and \x85 are line ends", "don't DON'T we'LL", "\0\x01\x7f",
]  # fmt: skip
CLASSES = ["GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer",
           "Qwen3_5Tokenizer"]  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bare_checkpoint(tmp_path / "checkpoint")


def made_of(letters: str, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(letters, k=rng.randint(1, 60))) for _ in range(count)]


NOISE = made_of("aeinrst  \n\t\r'.,;:<>|[]{}()0123456789äß東é\u0301🦾_-/\\", 200, 5)


# -- vocab.json and merges.txt -----------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_vocab_and_merges_read_as_transformers_reads_them(name: str, folder: Path) -> None:
    fast = original("qwen2" if name.startswith("Qwen") else "gpt-2")
    size = fast.get_vocab_size()
    plain = {"lstrip": False, "rstrip": False, "single_word": False}
    added = {
        "0": {"content": END, "special": True, "normalized": False, **plain},
        str(size): {"content": "<|im_start|>", "special": True, "normalized": False, **plain},
        # runs of spaces are tokens of their own in GPT-NeoX
        str(size + 1): {"content": "   ", "special": False, "normalized": True, **plain},
        str(size + 2): {"content": "<mask>", "special": True, "normalized": False, **plain,
                        "lstrip": True},
    }  # fmt: skip
    stated = {"tokenizer_class": name, "bos_token": END, "eos_token": END, "unk_token": END,
              "pad_token": END, "added_tokens_decoder": added}  # fmt: skip
    add_vocab_merges(folder, fast, **stated)
    # Qwen3_5Tokenizer does not find the two files by itself
    found = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
    given = found if name == "Qwen3_5Tokenizer" else {}
    judge = getattr(transformers, name).from_pretrained(folder, **given)
    info, ours = read(folder)
    assert (info.kind, info.vocab_size, info.add_bos) == ("tokenizer.json", size + 3, False)
    assert info.eos == (0,) == tuple(judge.convert_tokens_to_ids([END]))
    for text in [*VARIED, *NOISE]:
        assert ours.encode(text) == judge(text).input_ids, text
        composed = text if name[:4] in ("GPT2", "Code") else unicodedata.normalize("NFC", text)
        assert ours.decode(ours.encode(text)) == composed
    for text in ("a<|im_start|>b <mask> c   <|end|>", f"{END}{END} <|im_start|>\n"):
        assert ours.encode(text, special=True) == judge(text).input_ids, text
    assert size not in ours.encode("<|im_start|>"), "typed text is no control token"


def test_tokens_of_added_tokens_and_the_special_tokens_map(folder: Path) -> None:
    """As transformers 4 saved them."""
    fast = original("qwen2")
    size = fast.get_vocab_size()
    add_vocab_merges(folder, fast, tokenizer_class="Qwen2TokenizerFast")
    write_json(folder / "added_tokens.json", {"<|im_end|>": size + 1, "<|endoftext|>": size})
    write_json(
        folder / "special_tokens_map.json",
        {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|endoftext|>",
         "additional_special_tokens": ["<|end|>"]},
    )  # fmt: skip
    judge = transformers.Qwen2Tokenizer.from_pretrained(folder)
    info, ours = read(folder)
    assert (info.bos, info.eos, info.vocab_size) == (None, (size + 1,), size + 2)
    text = "<|end|>the state<|im_end|>\n<|endoftext|>"
    assert ours.encode(text, special=True) == judge(text).input_ids
    assert "<|" not in ours.decode(ours.encode(text, special=True)), "all three are special"


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "Qwen2"), ("gpt_neox", "GPTNeoX")])
def test_the_models_type_implies_the_class(kind: str, name: str, folder: Path) -> None:
    add_vocab_merges(folder, original("qwen2"))
    files = {path.name: path for path in folder.glob("*.*")}
    implied = read_vocab_merges(files, kind).data
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": f"{name}TokenizerFast"})
    stated = read_vocab_merges(
        files | {"tokenizer_config.json": folder / "tokenizer_config.json"}, ""
    )
    assert implied == stated.data


def test_tokenizer_json_comes_first(folder: Path) -> None:
    add_vocab_merges(folder, original("gpt-2"), tokenizer_class="unheard-of")
    other = original("smollm")
    other.decoder = decoders.ByteLevel()
    other.save(str(folder / "tokenizer.json"))
    assert read(folder)[1].encode("year 1984") == other.encode("year 1984").ids


def test_a_given_folder_takes_its_place_and_is_copied(folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    add_vocab_merges(given, original("gpt-2"), tokenizer_class="GPT2Tokenizer", eos_token=END)
    info, _ = read(folder, given)
    assert info.eos == (0,)
    files = copied(open_checkpoint(folder), given)
    assert sorted(files) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    (given / "vocab.json").unlink()
    (given / "merges.txt").unlink()
    with pytest.raises(ExportError, match=facts("tokenizer.json", "vocab.json", "tekken.json")):
        read(folder, given)


# -- tekken ------------------------------------------------------------------------------------


def add_tekken(folder: Path, special: list[str] | None = None, count: int = 20) -> dict[str, Any]:
    values = tekken_of(original("tekken"), TEKKEN, special or SPECIAL, count)
    write_json(folder / "tekken.json", values)
    return values


def plain_bpe(values: dict[str, Any], text: str) -> list[int]:
    """Join the first pair of lowest rank until there is none, word by word."""
    config = values["config"]
    first = config["default_num_special_tokens"]
    pieces = values["vocab"][: config["default_vocab_size"] - first]
    ranks = {base64.b64decode(piece["token_bytes"]): piece["rank"] for piece in pieces}
    ids = []
    for word in regex.findall(config["pattern"], text):
        parts = [bytes((value,)) for value in word.encode()]
        if word.encode() in ranks:
            parts = [word.encode()]
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            known = [(ranks[piece], at) for at, piece in enumerate(joined) if piece in ranks]
            if not known:
                break
            _, at = min(known)
            parts[at : at + 2] = [joined[at]]
        ids += [first + ranks[part] for part in parts]
    return ids


def test_tekken_reads_as_transformers_and_a_plain_bpe_read_it(folder: Path) -> None:
    values = add_tekken(folder)
    judge = MistralConverter(str(folder / "tekken.json")).converted()
    judge.encode_special_tokens = True  # leaves their spelling in typed text alone
    info, ours = read(folder)
    assert (info.kind, info.vocab_size) == ("tokenizer.json", judge.get_vocab_size())
    assert (info.bos, info.eos, info.add_bos) == (1, (2,), True)
    for text in [*VARIED, *NOISE]:
        assert ours.encode(text) == judge.encode(text).ids == plain_bpe(values, text), text
        assert ours.decode(ours.encode(text)) == text
    text = "<s>[INST] the state[/INST] of<SPECIAL_19></s>"
    judge.encode_special_tokens = False
    assert ours.encode(text, special=True) == judge.encode(text).ids
    assert ours.encode("<s>") == plain_bpe(values, "<s>"), "typed text is no control token"


def test_tekken_joins_by_rank_where_merges_would_not(folder: Path) -> None:
    """A piece of a rank below those of its parts, and one that can be made in two ways."""
    values = add_tekken(folder)
    texts = [b"ab", b"bc", b"abc", b"aa", b"aaa", b"aaaa", b"bab", b"abab"]
    encoded = [base64.b64encode(text).decode() for text in (texts[2], *texts[:2], *texts[3:])]
    values["vocab"] = values["vocab"][:256] + [
        {"rank": 256 + i, "token_bytes": text} for i, text in enumerate(encoded)
    ]
    values["config"]["default_vocab_size"] = 256 + len(encoded) + 20
    values["config"]["pattern"] = r"\S+|\s+"
    write_json(folder / "tekken.json", values)
    _, ours = read(folder)
    for text in made_of("abc", 300, 7):
        assert ours.encode(text) == plain_bpe(values, text), text


def test_tekken_of_the_first_kind_states_no_special_tokens(folder: Path) -> None:
    values = add_tekken(folder)
    del values["special_tokens"]
    write_json(folder / "tekken.json", values)
    info, ours = read(folder)
    assert (info.bos, info.eos) == (1, (2,))
    assert ours.encode("[INST][/INST][TOOL_CONTENT]", special=True) == [3, 4, 19]


def test_a_piece_spelled_like_a_special_token_is_left_out(folder: Path) -> None:
    values = add_tekken(folder)
    values["vocab"][256]["token_bytes"] = base64.b64encode(b"</").decode()
    values["vocab"][257]["token_bytes"] = base64.b64encode(b"</s").decode()
    values["vocab"][258]["token_bytes"] = base64.b64encode(b"</s>").decode()
    values["config"]["pattern"] = r"\S+|\s+"
    write_json(folder / "tekken.json", values)
    _, ours = read(folder)
    assert ours.encode("</s>") == [20 + 257, *ours.encode(">")]
    assert ours.encode("</s>", special=True) == [2]
    assert ours.decode([20 + 258]) == ""


def test_a_bundle_of_tekken_is_read_again(folder: Path, tmp_path: Path) -> None:
    """Texts still begin with `bos`, though nothing but the tokenizer says so."""
    add_tekken(folder)
    first = export_checkpoint(folder, tmp_path / "one", quant="fp16", verify=False)
    second = export_checkpoint(tmp_path / "one", tmp_path / "two", quant="w8", verify=False)
    one, two = (edge.load(summary.path, threads=1) for summary in (first, second))
    assert one.tokenizer.add_bos and two.tokenizer.add_bos
    assert one.tokenizer.fingerprint == two.tokenizer.fingerprint


# -- sentencepiece under other names -----------------------------------------------------------


def test_a_versioned_sentencepiece_model(folder: Path, tmp_path: Path) -> None:
    """Codestral Mamba's tokenizer.model.v3, with nothing else that says where texts end."""
    data = spm_model(add_dummy_prefix=True, user_defined_symbols="\n", vocab_size=330)
    (folder / "tokenizer.model.v3").write_bytes(data)
    judge = sentencepiece.SentencePieceProcessor(model_proto=data)
    info, ours = read(folder)
    assert (info.kind, info.file) == ("sentencepiece", "tokenizer/tokenizer.model")
    assert (info.bos, info.eos, info.add_bos) == (judge.bos_id(), (judge.eos_id(),), True)
    for text in TEXTS:
        if "<" not in text:
            assert ours.encode(text) == judge.encode(text), text
    summary = export_checkpoint(folder, tmp_path / "one", quant="fp16", verify=False)
    export_checkpoint(summary.path, tmp_path / "two", quant="w8", verify=False)
    assert edge.load(tmp_path / "two", threads=1).tokenizer.add_bos


def test_the_trained_pieces_are_several(folder: Path) -> None:
    """The judges above would agree on single bytes too."""
    vocabulary, merges = pieces_of(original("tekken"))
    assert len(merges) > 100 and max(map(len, vocabulary)) > 5
    assert json.loads(json.dumps(vocabulary)) == vocabulary
