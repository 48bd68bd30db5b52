"""ONNX text of a recurrence over the tokens of a run, for any step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

_ELEMENT = {32: "float", 16: "float16", 8: "int8"}
_DTYPE = {"float": 1, "int8": 3, "float16": 10}


@dataclass(frozen=True)
class Step:
    """One token of a recurrence, in the ONNX text syntax.

    Attributes:
        text: nodes that make `after`, the token's state as it is stored, and `read_t`, the output
            read from it, from `{before}`, the state of the token's parent, and one row of each of
            `rows`. They must also work on a row that still has the axis T, of length 1.
        rows: arrays [T, …] that a token reads: name → shape without T, as text.
        state: shape of the state, as text.
        read: shape of `read_t`, as text.
    """

    text: str
    rows: Mapping[str, str]
    state: str
    read: str


# Five ways to run the same recurrence. One token needs no loop. A chain that keeps every state
# writes them directly to the output; `kept` ascends, so its length shows this case. A chain that
# keeps only the last state never stores the others. Other chains, and trees, gather the kept states
# in the end. A tree holds its states in a sequence, whose elements are shared, not copied: element
# j+1 is node j's state, element 0 the state before the run. ONNX Runtime computes whatever depends
# on indices only once for all layers.
_WALKS = Template("""
    axis0 = Constant<value = int64[1] {0}>()
    unit = Constant<value = int64[1] {1}>()
    length = Shape(parents)
    kept_length = Shape(kept)
    alone = Equal(length, unit)
    is_step = And(alone, last_only)
    keeps_all = Equal(length, kept_length)
    is_chain = Not(tree)
    is_draft = And(keeps_all, is_chain)
    reads, ssm_states = If(is_step) <
      then_branch = single () => (float[T,$read] read_t, $element[R,$state] after) {$single
      },
      else_branch = several () => (float[T,$read] run_reads, $element[R,$state] run_states) {
        run_reads, run_states = If(is_draft) <
          then_branch = draft () => (float[T,$read] draft_reads, $element[R,$state] draft_states) {
            draft_end, draft_reads, draft_states = $chain
          },
          else_branch = long () => (float[T,$read] long_reads, $element[R,$state] long_states) {
            long_reads, long_states = If(last_only) <
              then_branch = last () => (float[T,$read] last_reads, $element[R,$state] last_states) {
                final, last_reads = Scan <num_scan_inputs=$count,
                  body = step ($element[$state] before, $token)
                      => ($element[$state] after, float[$read] read_t) {$step
                  }>(ssm_state, $rows)
                last_states = Unsqueeze(final, axis0)
              },
              else_branch = some () => (float[T,$read] some_reads, $element[R,$state] some_states) {
                some_reads, states = If(tree) <
                  then_branch = walk ()
                      => (float[T,$read] tree_reads, $element[T,$state] tree_states) {
                    next = Constant<value = int64 {1}>()
                    yes = Constant<value = bool {1}>()
                    steps = Squeeze(length)
                    nothing = SequenceEmpty<dtype=$dtype>()
                    first = SequenceInsert(nothing, ssm_state)
                    unread = SequenceEmpty<dtype=1>()
                    path, outputs = Loop(steps, yes, first, unread) <
                      body = node (int64 t, bool go, seq($element[$state]) seen,
                                   seq(float[$read]) told)
                          => (bool on, seq($element[$state]) grown, seq(float[$read]) retold) {
                        on = Identity(go)
                        parent = Gather<axis=0>(parents, t)
                        slot = Add(parent, next)
                        before = SequenceAt(seen, slot)$gathered$step
                        grown = SequenceInsert(seen, after)
                        retold = SequenceInsert(told, read_t)
                      }>
                    tree_reads = ConcatFromSequence<axis=0, new_axis=1>(outputs)
                    stacked = ConcatFromSequence<axis=0, new_axis=1>(path)
                    from_one = Constant<value = int64[1] {1}>()
                    to_end = Constant<value = int64[1] {9223372036854775807}>()
                    tree_states = Slice(stacked, from_one, to_end, axis0)
                  },
                  else_branch = line ()
                      => (float[T,$read] line_reads, $element[T,$state] line_states) {
                    line_end, line_reads, line_states = $chain
                  }>
                some_states = Gather<axis=0>(states, kept)
              }>
          }>
      }>
""")

# A chain that outputs the state after every token.
_CHAIN = Template("""Scan <num_scan_inputs=$count,
              body = step ($element[$state] before, $token)
                  => ($element[$state] after, float[$read] read_t, $element[$state] emitted) {$step
                emitted = Identity(after)
              }>(ssm_state, $rows)""")


def walks(step: Step, state_bits: int = 32) -> str:
    """Return nodes that make `reads` [T, …] and `ssm_states` [R, …] of a run.

    They read `step.rows` and the function's inputs kept, parents, tree, last_only and ssm_state.
    """
    element = _ELEMENT[state_bits]
    values = {
        "element": element,
        "dtype": _DTYPE[element],
        "state": step.state,
        "read": step.read,
        "count": len(step.rows),
        "rows": ", ".join(step.rows),
        "token": ", ".join(f"float[{shape}] {name}_t" for name, shape in step.rows.items()),
        "gathered": "".join(
            f"\n                        {name}_t = Gather<axis=0>({name}, t)" for name in step.rows
        ),
        "single": step.text.format(before="ssm_state", **{name: name for name in step.rows}),
        "step": step.text.format(before="before", **{name: f"{name}_t" for name in step.rows}),
    }
    return _WALKS.substitute(values, chain=_CHAIN.substitute(values))
