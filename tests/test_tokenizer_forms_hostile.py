"""vocab.json, merges.txt and tekken.json that were damaged or made hostile: refused by name."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from edge.errors import CheckpointError, EdgeError
from edge.export.checkpoint import open_checkpoint, tekken
from edge.export.checkpoint.files import MAX_TEXT_BYTES
from edge.export.text_files import tokenizer_info
from edge.text.hf import HfTokenizer
from edge.text.tokenizer import MAX_FILE
from tests.checkpoints import write_json
from tests.facts import says
from tests.mutations import mutated
from tests.test_gguf_text import TEKKEN, original
from tests.test_text_files import POINTER
from tests.tokenizer_folders import add_vocab_merges, bare_checkpoint, tekken_of

PAIR = ("vocab.json", "merges.txt", "tokenizer_config.json")
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 63, 0.5, float("nan"), "", "x", "\ud800", "x" * 100_000, [], [0], ["a"],
    {}, {"a": "b"}, {"a": 1 << 40}, {"\ud800": 1}, {"": 0}, [[[]]], {"content": 5}, [None] * 1000,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_checkpoint(tmp_path_factory.mktemp("forms") / "checkpoint")


@pytest.fixture
def folder(checkpoint: Path) -> Path:
    """Return the checkpoint with a good pair of files."""
    for name in (*PAIR, "added_tokens.json", "special_tokens_map.json", "tekken.json"):
        (checkpoint / name).unlink(missing_ok=True)
    add_vocab_merges(
        checkpoint, original("gpt-2"), tokenizer_class="GPT2Tokenizer", eos_token="<|end|>",
        added_tokens_decoder={"0": {"content": "<|end|>", "special": True}},
    )  # fmt: skip
    return checkpoint


@pytest.fixture
def values(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Return a good tekken.json, which takes the pair's place."""
    for name in PAIR:
        (folder / name).unlink()
    return tekken_of(original("tekken"), TEKKEN, ["<unk>", "<s>", "</s>"], 12)


def try_reading(folder: Path) -> EdgeError | None:
    try:
        opened = open_checkpoint(folder)
        _, files = tokenizer_info(opened, opened.config)
        HfTokenizer(files[0][0].read_bytes()).encode("ab \0")
    except EdgeError as problem:
        assert len(str(problem)) < 2500
        return problem
    return None


def refused(folder: Path) -> CheckpointError:
    problem = try_reading(folder)
    assert isinstance(problem, CheckpointError) and problem.remedy, problem
    return problem


def change(file: Path, **changes: Any) -> None:
    write_json(file, json.loads(file.read_text()) | changes)


def test_a_missing_half_and_all_other_faults_are_named_at_once(folder: Path) -> None:
    assert try_reading(folder) is None
    (folder / "merges.txt").unlink()
    change(folder / "vocab.json", zzz=5, yyy=-3, xxx="1")
    change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", eos_token=5,
           add_prefix_space=True)  # fmt: skip
    said = str(refused(folder))
    for part in (
        str(folder), "merges.txt: is missing beside vocab.json", "'yyy' the id -3, and 1 more",
        "gives the id 5 to", "tokenizer_class: is 'BertTokenizer'", "add_prefix_space: is set",
        "eos_token: is 5, not a token", "tokenizer.json with --tokenizer",
    ):  # fmt: skip
        assert part in said, part
    (folder / "vocab.json").rename(folder / "merges.txt")
    assert "vocab.json: is missing beside merges.txt" in str(refused(folder))


PAIR_REFUSED: dict[str, tuple[str, Any, str]] = {
    "a list": ("vocab.json", [], "vocab.json: holds a JSON array"),
    "no json": ("vocab.json", "{", "vocab.json: not valid JSON"),
    "nested": ("vocab.json", "[" * 100_000, "vocab.json: nested too deeply"),
    "a pointer": ("merges.txt", POINTER, "merges.txt: is a git-lfs pointer"),
    "no text": ("merges.txt", b"\xff\xfe", "merges.txt: is not UTF-8 at byte 0"),
    "one word": ("merges.txt", "#version\nab\n", "merges.txt: line 2 joins no pieces"),
    "strangers": ("merges.txt", "q zz\n\nqq z\n", "'q zz', and 1 more like it"),
    "nothing": ("merges.txt", "e \n", "of vocab.json: 'e '"),
    "its own part": ("vocab.json", {"a": 0, "": 1}, "has a token of 0 characters"),
    "half a character": ("vocab.json", {"\ud800": 0}, "is not Unicode text"),
    "no number": ("vocab.json", {"a": True}, "gives 'a' the id True"),
    "a long piece": ("vocab.json", {"a" * 5000: 0}, "has a token of 5000 characters"),
    "another's id": ("added_tokens.json", {"<x>": 0}, "gives '<x>' the id of '<|end|>'"),
    "two ids": ("added_tokens.json", {"<|end|>": 500}, "the id 500, tokenizer_config.json 0"),
    "a piece's id": ("added_tokens.json", {"<x>": 7}, "where '<x>' was added"),
    "a piece's text": ("added_tokens.json", {"t": 490}, "where 't' was added"),
    "no class": ("tokenizer_config.json", {}, "tokenizer_class: names no class"),
    "no ids": (
        "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"x": "y", "9" * 5000: "z"}},
        "added_tokens_decoder: 'x' is 'y'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIR_REFUSED)
def test_a_pair_that_is_refused(case: str, folder: Path) -> None:
    name, content, message = PAIR_REFUSED[case]
    if isinstance(content, (bytes, str)):
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    else:
        write_json(folder / name, content)
    assert message in str(refused(folder))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tekken.json"])
def test_files_of_other_sizes_than_tokenizers_are_not_read(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    problem = try_reading(folder)
    assert problem is not None and problem.file == str(folder / name)
    assert f"larger than {MAX_TEXT_BYTES} bytes" in problem.message


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json",
                                  "special_tokens_map.json"])  # fmt: skip
def test_every_value_of_every_key_of_the_pair(name: str, folder: Path) -> None:
    """A tokenizer or an error, and no other exception."""
    file = folder / name
    good = json.loads(file.read_text()) if file.exists() else {}
    keys = ["tokenizer_class", "added_tokens_decoder", "eos_token", "additional_special_tokens",
            "extra_special_tokens", "add_prefix_space", "<|end|>", "<new>"]  # fmt: skip
    read = 0
    for key in keys:
        for value in ODD:
            write_json(file, good | {key: value})
            read += try_reading(folder) is None
    assert 0 < read < len(keys) * len(ODD) - 10


def test_mutations_of_the_pair(folder: Path) -> None:
    rng, refusals = random.Random(17), 0
    for _ in range(120):
        name = rng.choice(PAIR)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(mutated(whole, rng))
        refusals += try_reading(folder) is not None
        (folder / name).write_bytes(whole)
    assert 20 < refusals < 120


# -- tekken ------------------------------------------------------------------------------------


def test_tekken_names_all_its_faults_at_once(folder: Path, values: dict[str, Any]) -> None:
    values["config"]["pattern"] = 5
    values["special_tokens"][1]["rank"] = 0
    values["vocab"][3]["token_bytes"] = "!!"
    values["vocab"][4]["token_bytes"] = None
    write_json(folder / "tekken.json", values)
    said = str(refused(folder))
    for part in ("tekken.json: config.pattern: is 5", "special_tokens: entry 1 has the rank 0",
                 "vocab: entry 3 has no base64", "1024 bytes, and 1 more"):  # fmt: skip
        assert part in said, part


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


TEKKEN_REFUSED: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no vocab": (("vocab",), None, "vocab: is not a list"),
    "no special tokens": (("special_tokens",), {}, "special_tokens: is not a list"),
    "no config": (("config",), [], "config.pattern: is None"),
    "a long piece": (("vocab", 300, "token_bytes"), encoded(b"x" * 1025), "entry 300 has no"),
    "an empty piece": (("vocab", 300, "token_bytes"), "", "entry 300 has no base64"),
    "letters beyond": (("vocab", 300, "token_bytes"), "ÿÿÿÿ", "entry 300 has no base64"),
    "twice": (("vocab", 300, "token_bytes"), encoded(b"\x80"), "has the bytes of entry"),
    "another rank": (("vocab", 300, "rank"), 301, "entry 300 has the rank 301"),
    "a lost byte": (("vocab", 0, "token_bytes"), encoded(b"\x80\x81"), "lacks the byte 0x"),
    "too large": (("config", "default_vocab_size"), 1 << 40, "config.default_vocab_size: is 10995"),
    "too small": (("config", "default_vocab_size"), 200, "of which 256 are bytes"),
    "negative": (("config", "default_vocab_size"), -1, "is -1, not a number"),
    "few": (("config", "default_num_special_tokens"), 1, "with 3 special tokens"),
    "many": (("config", "default_num_special_tokens"), 1 << 20, "at most 65536 allowed"),
    "a filler": (("special_tokens", 1, "token_str"), "<SPECIAL_5>", "has <SPECIAL_5> below"),
    "one text": (("special_tokens", 1, "token_str"), "<unk>", "the text '<unk>' again"),
    "no text": (("special_tokens", 1, "token_str"), "\ud800", "entry 1 has no text"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEKKEN_REFUSED)
def test_a_tekken_that_is_refused(case: str, folder: Path, values: dict[str, Any]) -> None:
    path, value, message = TEKKEN_REFUSED[case]
    inner: Any = values
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    write_json(folder / "tekken.json", values)
    problem = refused(folder)
    assert message in str(problem) and problem.file == str(folder / "tekken.json")


def test_a_pattern_that_searches_without_end(folder: Path, values: dict[str, Any]) -> None:
    values["config"]["pattern"] = r"(a*)*b"
    write_json(folder / "tekken.json", values)
    problem = try_reading(folder)
    assert problem is not None and "pre_tokenizer: Split: pattern" in problem.message


def test_merges_are_bounded(
    folder: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of one letter in all lengths can be joined in as many ways as they have letters."""
    bytes_alone = values["vocab"][:256]
    runs = [{"token_bytes": encoded(b"a" * length)} for length in range(2, 200)]
    values["vocab"] = bytes_alone + runs
    values["config"]["default_vocab_size"] = 12 + 256 + len(runs)
    write_json(folder / "tekken.json", values)
    assert try_reading(folder) is None
    monkeypatch.setattr(tekken, "MAX_MERGES", 10_000)
    assert says(refused(folder), "vocab: ", "10000 ways")


@pytest.mark.parametrize("letters", ["a", "abc"])
def test_the_length_of_merges_is_bounded(
    folder: Path, values: dict[str, Any], letters: str
) -> None:
    """A thousand pieces of up to a thousand letters have a gigabyte of merges."""
    longest = 650 if len(letters) == 1 else 480
    runs = [{"token_bytes": encoded(letter.encode() * length)}
            for letter in letters for length in range(2, longest)]  # fmt: skip
    values["vocab"] = values["vocab"][:256] + runs
    values["config"]["default_vocab_size"] = 12 + 256 + len(runs)
    write_json(folder / "tekken.json", values)
    assert f"joins pieces in more than {MAX_FILE} bytes" in str(refused(folder))


def test_every_value_of_every_key_of_tekken(folder: Path, values: dict[str, Any]) -> None:
    read = tried = 0
    keys = {None: [*values], "config": [*values["config"]]}
    for outer, names in keys.items():
        for name in names:
            for value in ODD:
                whole = json.loads(json.dumps(values))
                (whole if outer is None else whole[outer])[name] = value
                write_json(folder / "tekken.json", whole)
                read, tried = read + (try_reading(folder) is None), tried + 1
    assert 10 < read < tried - 10


def test_mutations_of_tekken(folder: Path, values: dict[str, Any]) -> None:
    rng, refusals = random.Random(17), 0
    whole = json.dumps(values).encode()
    for _ in range(80):
        (folder / "tekken.json").write_bytes(mutated(whole, rng))
        refusals += try_reading(folder) is not None
    assert 20 < refusals <= 80
