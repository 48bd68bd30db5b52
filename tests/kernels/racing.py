"""Kernels with one race each, for the test of `races`; programs run in blocks of WIDTH."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apart(x, y, WIDTH: tl.constexpr):
    """No race: each program has a block of its own, and all write one sum of the weights."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(y + at, tl.load(x + at) + 1)
    tl.store(y + tl.num_programs(0) * WIDTH, 7.0)


@triton.jit
def overlapping(x, y, WIDTH: tl.constexpr):
    """A block is one too long."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, 2 * WIDTH)
    mask = tl.arange(0, 2 * WIDTH) <= WIDTH
    tl.store(y + at, tl.program_id(0) + tl.load(x + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def neighbours(x, y, WIDTH: tl.constexpr):
    """Reads, in place, what the program before writes."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(y + at, tl.load(y + at - 1, mask=at > 0, other=0.0) + 1)


@triton.jit
def twice(x, y, WIDTH: tl.constexpr):
    """All elements of a store go to one place."""
    at = tl.arange(0, WIDTH)
    tl.store(y + tl.program_id(0) + 0 * at, at.to(tl.float32))


@triton.jit
def unordered(x, y, BARRIER: tl.constexpr, WIDTH: tl.constexpr):
    """Reads the mirror image of what it wrote: other threads did."""
    at, back = tl.arange(0, WIDTH), WIDTH - 1 - tl.arange(0, WIDTH)
    block = y + tl.program_id(0) * 2 * WIDTH
    tl.store(block + at, tl.load(x + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(block + WIDTH + at, tl.load(block + back))


@triton.jit
def careless(x, y, WIDTH: tl.constexpr):
    """Adds up what a masked load left out."""
    at = tl.arange(0, WIDTH)
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + at, mask=at > 0)))
