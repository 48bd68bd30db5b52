"""Lessons of a drafter: its teacher's conversations, and the teacher's distribution in them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edge.apps.demo.data import DIALOGUES, Batch, Codec, Piece, read_conversations
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.folders import replace_folder
from edge.export.distill.loss import SHARES, Shares
from edge.export.network import Network

Hidden = npt.NDArray[np.float16]

HELD_OUT = 50  # every HELD_OUT-th talk is held out for measuring


@dataclass(frozen=True)
class Taught:
    """Sources of a drafter's lessons.

    Attributes:
        teacher: floating bundle or checkpoint of the teacher.
        talks: files of conversations with the teacher as the assistant. Conversations in others'
            words work too, because the teacher's distribution is learned.
        keep: folder for the teacher's hidden states, computed once per file and teacher.
        shares: weights of the losses.
    """

    teacher: Path
    talks: tuple[Path, ...]
    keep: Path
    shares: Shares = SHARES


@dataclass(frozen=True)
class Talk:
    """A conversation.

    Attributes:
        ids: token ids [n].
        mask: [n], True for the teacher's ids, which are predicted.
        first: row of its first prediction in `TeacherLessons.hidden`.
    """

    ids: list[int]
    mask: list[bool]
    first: int


def load_network(path: Path) -> tuple[Network, str]:
    """Load a floating bundle or checkpoint. Return the network and its fingerprint."""
    checkpoint = open_checkpoint(path)
    network = Network(checkpoint.config)
    network.load_canonical(dict(checkpoint.tensors()))
    return network.eval().requires_grad_(False), checkpoint.fingerprint()


def start_from(network: Network, path: Path) -> None:
    """Initialize a network with the tensors of `path` that have the same name and shape.

    A smaller network gets the first layers. An untied head is initialized from a tied embedding.
    """
    other = load_network(path)[0].canonical_tensors()
    other.setdefault("lm_head.weight", other["embedding.weight"])
    with torch.no_grad():
        for name, parameter in network.canonical_tensors().items():
            if name in other and other[name].shape == parameter.shape:
                parameter.copy_(other[name])


def read_talks(path: Path, codec: Codec, limit: int) -> list[Talk]:
    """Read conversations written by `edge.apps.demo.talks` or `answers`, cut to `limit` ids.

    They are not packed, because a drafter reads each conversation from its beginning.
    """
    talks: list[Talk] = []
    first = 0
    for ids, mask in _pieces(path, codec):
        talk = Talk(ids[:limit], mask[:limit], first)
        if any(talk.mask):
            talks.append(talk)
            first += sum(talk.mask)
    return talks


def _pieces(path: Path, codec: Codec) -> Iterator[Piece]:
    """Yield ids and mask of each conversation.

    The mask is True for the teacher's ids, and for both sides of dialogues between people. Answers
    of `edge.apps.demo.answers` are stored as ids.
    """
    with path.open(encoding="utf-8") as lines:
        stored_as_ids = "said" in json.loads(next(lines, "{}"))
    if stored_as_ids:
        with path.open(encoding="utf-8") as lines:
            for group in map(json.loads, lines):
                for before, body in zip(group["asked"], group["said"], strict=True):
                    yield before + body, [False] * len(before) + [True] * len(body)
        return
    for conversation in read_conversations(path):
        ids: list[int] = []
        mask: list[bool] = []
        both = conversation.source in DIALOGUES
        for role, content in conversation.turns:
            before, body = codec.turn(role, content)
            ids += before + body
            mask += [False] * len(before) + [both or role == "assistant"] * len(body)
        yield ids, mask


@dataclass(frozen=True)
class TalkRows:
    """Conversations in the order of an epoch, with similar lengths in a batch."""

    talks: list[Talk]
    pad: int
    hidden: Hidden

    def __len__(self) -> int:
        return len(self.talks)

    def batch(self, part: slice) -> Batch:
        talks = self.talks[part]
        width = max(len(talk.ids) for talk in talks)
        ids = np.full((len(talks), width), self.pad, np.int64)
        mask = np.zeros((len(talks), width), np.bool_)
        for row, talk in enumerate(talks):
            ids[row, : len(talk.ids)] = talk.ids
            mask[row, : len(talk.ids)] = talk.mask
        taught = np.concatenate([self.hidden[t.first : t.first + sum(t.mask)] for t in talks])
        return Batch(torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(taught))


class TeacherLessons:
    """A teacher's conversations, with its hidden state before each of its ids.

    Attributes:
        hidden: float16 [n, E], the teacher's final hidden state before each of its ids.
        head: the teacher's head [V, E].
        shares: weights of the losses.
    """

    def __init__(self, taught: Taught, codec: Codec, width: int, batch: int, seed: int) -> None:
        """`width`: maximum ids of a conversation. `batch`: rows per step."""
        self.pad, self.batch, self.seed, self.shares = codec.pad, batch, seed, taught.shares
        network, fingerprint = load_network(taught.teacher)
        self.head = network.head_weight
        all_talks: list[Talk] = []
        parts: list[Hidden] = []
        for path in taught.talks:
            talks = read_talks(path, codec, width)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            key = {"talks": digest, "teacher": fingerprint, "width": width}
            folder = taught.keep / digest[:16]
            if (hidden := _load_hidden(folder, key)) is None:
                _store_hidden(folder, key, hidden := final_hidden(network, talks, codec.pad))
            offset = sum(map(len, parts))
            all_talks += [replace(talk, first=offset + talk.first) for talk in talks]
            parts.append(hidden)
        self.hidden = np.concatenate(parts)
        self.learned = [talk for index, talk in enumerate(all_talks) if index % HELD_OUT]
        self.held_out = all_talks[::HELD_OUT]

    def epoch(self, number: int) -> TalkRows:
        """Return the rows of an epoch, which depend on the seed and `number` alone.

        Each step has conversations of similar length, and the steps are shuffled.
        """
        rng = random.Random(f"{self.seed}/{number}")
        order = sorted(self.learned, key=lambda talk: len(talk.ids) * rng.uniform(0.9, 1.1))
        starts = range(0, len(order) - self.batch + 1, self.batch)
        steps = [order[start : start + self.batch] for start in starts]
        rng.shuffle(steps)
        return TalkRows([talk for step in steps for talk in step], self.pad, self.hidden)

    def size(self) -> dict[str, int]:
        """Return the number of conversations to learn, and of ids to predict in them."""
        ids = sum(sum(talk.mask) for talk in self.learned)
        return {"talks": len(self.learned), "ids": ids}

    @torch.no_grad()
    def agreement(self, network: Network, batch: int = 16) -> dict[str, float]:
        """Measure agreement with the teacher at each of its ids in held-out conversations.

        `same_choice` is the share of equal likeliest tokens. `overlap` is the mean of Σ min(p, q),
        the share of drafted tokens that rejection sampling accepts.
        """
        rows = TalkRows(sorted(self.held_out, key=lambda t: len(t.ids)), self.pad, self.hidden)
        same, common, count = 0, 0.0, 0
        head = self.head.to(network.embedding.weight.device)
        for start in range(0, len(rows), batch):
            part = rows.batch(slice(start, start + batch)).to(str(head.device))
            assert part.taught is not None
            p = (part.taught.float() @ head.T).softmax(-1)
            hidden = network.hidden(part.ids[:, :-1])[0][part.mask[:, 1:]]
            q = network.head(hidden).softmax(-1)
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            common += float(torch.minimum(p, q).sum())
            count += len(p)
        return {"same_choice": round(same / count, 4), "overlap": round(common / count, 4)}


@torch.no_grad()
def final_hidden(network: Network, talks: list[Talk], pad: int, batch: int = 16) -> Hidden:
    """Compute the teacher's final hidden state before each of its ids, float16 [n, E].

    The rows are those of `Talk.first`.
    """
    width = network.config.d_model
    output = np.zeros((sum(sum(talk.mask) for talk in talks), width), np.float16)
    order = sorted(talks, key=lambda talk: len(talk.ids))
    for start in range(0, len(order), batch):
        rows = TalkRows(order[start : start + batch], pad, output)
        part = rows.batch(slice(None))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = network.hidden(part.ids[:, :-1])[0]
        for row, talk in enumerate(rows.talks):
            states = hidden[row][part.mask[row, 1:]].to(torch.float16).numpy()
            output[talk.first : talk.first + len(states)] = states
    return output


def _load_hidden(folder: Path, key: dict[str, Any]) -> Hidden | None:
    """Return what `_store_hidden` stored under this key, or None."""
    if not folder.exists() or json.loads((folder / "key.json").read_text()) != key:
        return None
    hidden: Hidden = np.load(folder / "hidden.npy")
    return hidden


def _store_hidden(folder: Path, key: dict[str, Any], hidden: Hidden) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    np.save(temporary / "hidden.npy", hidden)
    (temporary / "key.json").write_text(json.dumps(key, indent=2) + "\n")
    replace_folder(temporary, folder)
