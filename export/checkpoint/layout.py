"""Where each canonical tensor is in a checkpoint, which each family must define."""

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
    """Name and required shape of a source tensor that other tensors are made from."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Block:
    """A block of a matrix: rows of a source tensor, placed at a row and a column."""

    source: SourceTensor
    rows: Sequence[int]
    at: tuple[int, int]

    def within(self, matrix: Tensor) -> Tensor:
        """Return the view of the whole matrix that this block fills."""
        row, column = self.at
        return matrix[row : row + len(self.rows), column : column + self.source.shape[-1]]


@dataclass(frozen=True)
class TensorPlace:
    """One canonical tensor's place: the whole of a source tensor, or some of its rows.

    Attributes:
        source: name in the checkpoint.
        source_shape: shape that the source tensor must have.
        shape: canonical shape (a convolution's [C, 1, K] becomes [C, K]).
        start: first row, for a tensor that the source fuses with others.
        block, period: `block` rows of every `period` belong to the tensor, where the source
            interleaves it with others; 0 if its rows are contiguous.
        rows: stored row of each row, for a tensor whose heads share rows; () otherwise.
        factors: (first row, row after the last, factor) for rows that the model multiplies.
        plus: value that the model adds to each element before it multiplies.
        stack: source tensors that are stacked, such as those of experts; `source` is the first, and
            all have its shape. () is `source` alone.
        blocks: parts of a matrix that is zero elsewhere; `source` is the first one's.
        adapter: (up, down) of a low-rank adapter; the tensor's rows of up · down are added.
        behind: matrix applied to the tensor's output, so it multiplies the tensor from the left.
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
        """Source tensor → shape that it must have, for all that the tensor is made from."""
        others = [*(self.adapter or ()), *([self.behind] if self.behind else [])]
        others += [block.source for block in self.blocks]
        return dict.fromkeys(self.sources, self.source_shape) | {n.name: n.shape for n in others}

    @property
    def computed(self) -> bool:
        """Whether its values differ from the source's."""
        return bool(self.factors or self.adapter or self.behind or self.plus)


@dataclass
class Layout:
    """A model's config and the place of each of its tensors.

    Attributes:
        config: the model's config.
        pieces: canonical name → place, filled by the family.
        constants: canonical name → value of all elements, for tensors that the source lacks.
        tied_heads: source names that must equal the embedding if present.
        ignored: predicate for source names that are known leftovers (recomputed buffers).
        rename: maps a stored name to the name used in `pieces`, for families with two spellings.
        otherwise: canonical name → place in an alternative published form.
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
        """Return `weight`, and `bias` where the module has one."""
        return [kind for kind in ("weight", "bias") if f"{module}.{kind}" in self._shapes]

    def place(self, name: str, source: str) -> None:
        """Place a canonical tensor that is a whole source tensor."""
        shape = self._shapes[name]
        stored = (shape[0], 1, shape[1]) if name.endswith(".conv1d.weight") else shape
        self.pieces[name] = TensorPlace(source, stored, shape)

    def place_rows(self, names: tuple[str, ...], source: str) -> None:
        """Place canonical tensors that the source tensor stacks in this order."""
        shapes = [self._shapes[name] for name in names]
        total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self.pieces[name] = TensorPlace(source, total, shape, start)
            start += shape[0]

    def place_heads(self, names: tuple[str, ...], source: str, head_dim: int) -> None:
        """Place canonical tensors of one shape that the source interleaves by `head_dim` rows."""
        self.place_turns(names, source, [head_dim] * len(names))

    def place_turns(self, names: Sequence[str], source: str, rows: Sequence[int]) -> None:
        """Place canonical tensors that the source interleaves, `rows[i]` of tensor i at a time."""
        total = sum(self._shapes[name][0] for name in names)
        start = 0
        for name, count in zip(names, rows, strict=True):
            shape = self._shapes[name]
            stored = (total, *shape[1:])
            self.pieces[name] = TensorPlace(source, stored, shape, start, count, sum(rows))
            start += count

    def find(self, stored: Container[str]) -> None:
        """Switch tensors to their place in `otherwise` if its source is `stored`."""
        for name, place in self.otherwise.items():
            if place.source in stored:
                self.pieces[name] = place

    def place_stacked(self, names: tuple[str, ...], source: str, otherwise: bool = False) -> None:
        """Place stacks of matrices that the source joins by rows into one stack.

        With `otherwise`, as an alternative to the current places.
        """
        shapes = [self._shapes[name] for name in names]
        total = (shapes[0][0], sum(shape[1] for shape in shapes), shapes[0][2])
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            place = TensorPlace(source, total, shape, start, shape[1], total[1])
            (self.otherwise if otherwise else self.pieces)[name] = place
            start += shape[1]

    def place_each(self, name: str, sources: Sequence[str]) -> None:
        """Place a canonical tensor that stacks these source tensors, or is the only one."""
        shape, stack = self._shapes[name], tuple(sources) if sources[1:] else ()
        self.pieces[name] = TensorPlace(sources[0], shape[1:], shape, stack=stack)

    def place_blocks(self, name: str, blocks: Sequence[Block]) -> None:
        """Place a canonical matrix with these parts and zeros elsewhere."""
        first, shape = blocks[0].source, self._shapes[name]
        self.pieces[name] = TensorPlace(first.name, first.shape, shape, blocks=tuple(blocks))

    def multiply(
        self,
        module: str,
        factor: float,
        rows: slice = slice(None),
        kinds: Sequence[str] = ("weight", "bias"),
    ) -> None:
        """Move a factor that the model applies to a module's output into the module's weights.

        This changes logits only by the fp32 rounding of each product, and not at all for a power of
        two. Recipes quantize the products as they would the weights.
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
        """Add `value` to the weights of norms, as the model does, except names ending in `but`."""
        for name, piece in self.pieces.items():
            if name.endswith(("norm.weight", "norm_f.weight")) and not name.endswith(but):
                self.pieces[name] = replace(piece, plus=value)

    def multiply_ends(self, embedding: float, logits: float) -> None:
        """Move the factor of embedded tokens into the embedding, that of logits into the last norm.

        A tied head has the embedding's factor, by which the logits' is divided.
        """
        self.multiply("embedding", embedding)
        tied = self.config.tie_embeddings
        self.multiply("norm_f", logits / embedding if tied else logits)

    def place_norm(self, name: str, source: str) -> None:
        """Place a norm's weight, and the bias of a LayerNorm."""
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
        """Place a layer whose mixer's tensors have canonical names, except for `rename`.

        `rename` maps the first part of a name; a gated norm is always called `norm` in the source.
        `norm` or `post_norm` is "" if the layer has none. `joined` maps a module of the source to
        the canonical modules whose rows it stacks. Matrices of experts are separate, in `experts.0`
        and so on.
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
        """Place consecutive layers from `first` on; `parts` are (norm, mixer) names in `source`."""
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
        """Place final norm, embedding and head. A tied head may also be stored."""
        self.place("embedding.weight", embedding)
        self.place_norm("norm_f", norm_f)
        if self.config.tie_embeddings:
            self.tied_heads = (lm_head,)
        else:
            self.place("lm_head.weight", lm_head)


def elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)
