"""Where each canonical tensor lies in a checkpoint: the one thing a family has to say."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edge.config import ModelConfig
from edge.tensors import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SourceTensor:
    """A source tensor that has a part in others: its name, and the shape it must have."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Block:
    """A block of a matrix: rows of a source tensor, placed at a row and a column."""

    source: SourceTensor
    rows: Sequence[int]
    at: tuple[int, int]

    def within(self, matrix: Tensor) -> Tensor:
        """Where it lies in the matrix that it is a part of."""
        row, column = self.at
        return matrix[row : row + len(self.rows), column : column + self.source.shape[-1]]


@dataclass(frozen=True)
class TensorPlace:
    """One canonical tensor's place: the whole of a source tensor, or some of its rows.

    Attributes:
        source: name in the checkpoint.
        source_shape: the shape that tensor must have there.
        shape: the canonical shape (a convolution's [C, 1, K] becomes [C, K]).
        start: the first row, for a tensor that the source stores fused with others.
        block, period: `block` rows out of every `period` are the tensor's, for one that the source
            interleaves with others; 0 when its rows lie together.
        rows: the stored row of each of its own, for one whose heads share rows; () when none do.
        factors: (first row, behind the last, factor), of rows that the model multiplies.
        plus: what the model adds to each value, before it multiplies.
        stack: the tensors that it is a stack of, such as experts' own; `source` is the first, and
            all have its shape. () is `source` alone.
        blocks: the parts of a matrix that is zeros elsewhere; `source` is the first one's.
        adapter: (up, down) of a low-rank adapter: the tensor's own rows of up · down are added.
        behind: a matrix that multiplies what the tensor gives, and so the tensor from the left.
    """

    source: str
    source_shape: Shape
    shape: Shape
    start: int = 0
    block: int = 0
    period: int = 0
    rows: tuple[int, ...] = ()
    factors: tuple[tuple[int, int, float], ...] = ()
    plus: float = 0.0
    stack: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    adapter: tuple[SourceTensor, SourceTensor] | None = None
    behind: SourceTensor | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return self.stack or (self.source,)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The tensors that it is made of, and the shapes they must have."""
        others = [*(self.adapter or ()), *([self.behind] if self.behind else [])]
        others += [block.source for block in self.blocks]
        return dict.fromkeys(self.sources, self.source_shape) | {n.name: n.shape for n in others}

    @property
    def computed(self) -> bool:
        """Whether its values are others than the source's."""
        return bool(self.factors or self.adapter or self.behind or self.plus)


@dataclass
class Layout:
    """A model's config and the place of each of its tensors.

    Attributes:
        config: the model.
        pieces: canonical name → place, filled by the family.
        constants: canonical name → the value that the family's class has everywhere in it.
        tied_heads: source names that, when there, must equal the embedding.
        ignored: says of a source name that it is a known leftover (buffers that are recomputed).
        rename: maps a stored name to the name used in `pieces`, for families with two spellings.
        otherwise: canonical name → its place in another published form, where that is there.
    """

    config: ModelConfig
    pieces: dict[str, TensorPlace] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    tied_heads: tuple[str, ...] = ()
    ignored: Callable[[str], bool] = lambda name: False
    rename: Callable[[str], str] = str
    otherwise: dict[str, TensorPlace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shapes = tensor_shapes(self.config)
        self._by_layer: dict[int, list[str]] = {}
        for name in self._shapes:
            if name.startswith("layers."):
                self._by_layer.setdefault(int(name.split(".")[1]), []).append(name)

    def kinds(self, module: str) -> list[str]:
        """`weight`, and `bias` where the module has one."""
        return [kind for kind in ("weight", "bias") if f"{module}.{kind}" in self._shapes]

    def place(self, name: str, source: str) -> None:
        """The canonical tensor is the whole source tensor."""
        shape = self._shapes[name]
        stored = (shape[0], 1, shape[1]) if name.endswith(".conv1d.weight") else shape
        self.pieces[name] = TensorPlace(source, stored, shape)

    def place_rows(self, names: tuple[str, ...], source: str) -> None:
        """The canonical tensors, in this order, are stacked in the source tensor."""
        shapes = [self._shapes[name] for name in names]
        total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self.pieces[name] = TensorPlace(source, total, shape, start)
            start += shape[0]

    def place_heads(self, names: tuple[str, ...], source: str, head_dim: int) -> None:
        """The canonical tensors, of one shape, take turns in the source: `head_dim` rows each."""
        self.place_turns(names, source, [head_dim] * len(names))

    def place_turns(self, names: Sequence[str], source: str, rows: Sequence[int]) -> None:
        """The canonical tensors take turns in the source: so many rows of each."""
        total = sum(self._shapes[name][0] for name in names)
        start = 0
        for name, each in zip(names, rows, strict=True):
            shape = self._shapes[name]
            stored = (total, *shape[1:])
            self.pieces[name] = TensorPlace(source, stored, shape, start, each, sum(rows))
            start += each

    def find(self, stored: Container[str]) -> None:
        """Take the places in another form of those tensors that are `stored` so."""
        for name, place in self.otherwise.items():
            if place.source in stored:
                self.pieces[name] = place

    def place_stacked(self, names: tuple[str, ...], source: str, otherwise: bool = False) -> None:
        """Stacks of matrices, which the source has as one stack of each joined below another;
        `otherwise`: or may have, instead of what is placed.
        """
        shapes = [self._shapes[name] for name in names]
        total = (shapes[0][0], sum(shape[1] for shape in shapes), shapes[0][2])
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            place = TensorPlace(source, total, shape, start, shape[1], total[1])
            (self.otherwise if otherwise else self.pieces)[name] = place
            start += shape[1]

    def place_each(self, name: str, sources: Sequence[str]) -> None:
        """The canonical tensor is a stack of these; of one alone, it is that."""
        shape, stack = self._shapes[name], tuple(sources) if sources[1:] else ()
        self.pieces[name] = TensorPlace(sources[0], shape[1:], shape, stack=stack)

    def place_blocks(self, name: str, blocks: Sequence[Block]) -> None:
        """The canonical matrix has these parts, and zeros elsewhere."""
        first, shape = blocks[0].source, self._shapes[name]
        self.pieces[name] = TensorPlace(first.name, first.shape, shape, blocks=tuple(blocks))

    def multiply(
        self,
        module: str,
        factor: float,
        rows: slice = slice(None),
        kinds: Sequence[str] = ("weight", "bias"),
    ) -> None:
        """A factor that the model applies to what a module gives, moved into its weights.

        That changes no logits but by the rounding of each product in fp32, and none at all for a
        power of two. Recipes round the products, as they would the weights.
        """
        for kind in (kind for kind in self.kinds(module) if kind in kinds and factor != 1):
            name = f"{module}.{kind}"
            if name in self.constants:  # a bias of zeros
                continue
            piece = self.pieces[name]
            start, stop, _ = rows.indices(piece.shape[0])
            factors = (*piece.factors, (start, stop, factor))
            self.pieces[name] = replace(piece, factors=factors)

    def add_to_norms(self, value: float, but: str = "-") -> None:
        """What the model adds to the weight of every norm, `but` those whose names end so."""
        for name, piece in self.pieces.items():
            if name.endswith(("norm.weight", "norm_f.weight")) and not name.endswith(but):
                self.pieces[name] = replace(piece, plus=value)

    def multiply_ends(self, embedding: float, logits: float) -> None:
        """Factors of the embedded tokens and of the logits, which a tied head has both of.

        The logits' factor is moved into the last norm.
        """
        self.multiply("embedding", embedding)
        tied = self.config.tie_embeddings
        self.multiply("norm_f", logits / embedding if tied else logits)

    def place_norm(self, name: str, source: str) -> None:
        """The weight, and the bias of a LayerNorm."""
        self.place(f"{name}.weight", f"{source}.weight")
        if self.config.norm.kind == "layernorm":
            self.place(f"{name}.bias", f"{source}.bias")

    def place_layer(
        self,
        index: int,
        *,
        norm: str,
        mixer: str,
        post_norm: str = "",
        rename: dict[str, str] | None = None,
        joined: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        """A layer whose mixer's tensors are called as here, but for a renamed first word; a gated
        norm is a `norm` everywhere. `norm` or `post_norm` is "" where the layer has none.

        `joined`: a module of the source → ours whose rows lie one below another in it. Matrices of
        experts lie apart, in `experts.0` and so on.
        """
        names = {"gated_norm": "norm", **(rename or {})}
        for ours, theirs in (("norm", norm), ("post_norm", post_norm)):
            if theirs:
                self.place_norm(f"layers.{index}.{ours}", theirs)
        placed = {"norm", "post_norm"}
        for stacked, modules in (joined or {}).items():
            placed |= {*modules}
            for kind in self.kinds(f"layers.{index}.{modules[0]}"):
                rows = tuple(f"layers.{index}.{module}.{kind}" for module in modules)
                self.place_rows(rows, f"{mixer}.{stacked}.{kind}")
        for name in self._by_layer[index]:
            module, dot, rest = name.split(".", 2)[2].partition(".")
            if module not in placed:
                theirs = f"{names.get(module, module)}{dot}{rest}"
                shape = self._shapes[name]
                if len(shape) == 3:
                    self.place_each(
                        name, [f"{mixer}.experts.{e}.{theirs}" for e in range(shape[0])]
                    )
                else:
                    self.place(name, f"{mixer}.{theirs}")

    def place_block(
        self, first: int, source: str, *parts: tuple[str, str], rename: dict[str, str] | None = None
    ) -> None:
        """Neighbouring layers from `first` on: the names in `source` of norm and mixer of each."""
        for index, (norm, mixer) in enumerate(parts, first):
            self.place_layer(
                index, norm=f"{source}.{norm}", mixer=f"{source}.{mixer}", rename=rename
            )

    def place_ends(
        self,
        norm_f: str,
        *,
        embedding: str = "model.embed_tokens.weight",
        lm_head: str = "lm_head.weight",
    ) -> None:
        """Final norm, embedding and head. A tied head may be stored again."""
        self.place("embedding.weight", embedding)
        self.place_norm("norm_f", norm_f)
        if self.config.tie_embeddings:
            self.tied_heads = (lm_head,)
        else:
            self.place("lm_head.weight", lm_head)


def elements(shape: Shape) -> int:
    """How many numbers a tensor of this shape holds."""
    return math.prod(shape)
