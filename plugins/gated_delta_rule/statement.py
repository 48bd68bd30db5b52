"""Statement of the recurrence of Gated DeltaNet, over floats.

Names are those of Mamba-2's scan, whose state has the same shape: x are the values v of linear
attention, B its keys k and C its queries q ("Transformers are SSMs", arXiv 2405.21060, section 5).
See `edge.plugins.selective_scan.statement` for chains, trees and kept rows.
"""

from edge.ops import Attribute, Op, state, value, weight
from edge.plugins.selective_scan.statement import STEERING

GATED_DELTA_RULE = Op(
    "GatedDeltaRule",
    (
        value("x", "f32[T,B,H·P]", "values"),
        value("dt", "f32[T,B,2·H]", "of every head, a, from which the decay follows; then b, the "
              "strength of writes"),
        value("B", "f32[T,B,G·N]", "keys, shared by the H/G heads of a group"),
        value("C", "f32[T,B,G·N]", "queries, shared likewise"),
        weight("A", "f32[H]", "-exp(A_log)"),
        weight("dt_bias", "f32[H]", ""),
        state("ssm_state", "f32[B,H,P,N]", "state before this run"),
        *STEERING,
    ),
    (
        value("y", "f32[T,B,H·P]", "not yet normed or gated"),
        state("ssm_states", "f32[R,B,H,P,N]", "state after each kept token"),
    ),
    (
        Attribute("heads", "int", "H"),
        Attribute("head_dim", "int", "P"),
        Attribute("groups", "int", "G"),
        Attribute("d_state", "int", "N"),
        Attribute("beta_max", "float", "1, or 2 where a state may change its sign"),
    ),
    "a, b = halves of dt\ng = exp(softplus(a + dt_bias)·A)\nβ = beta_max · sigmoid(b)\n"
    "f[t] = g[t] · h[parents[t]]\nu[t] = β[t] · (x[t] - f[t]·B[t])\nh[t] = f[t] + u[t] ⊗ B[t]\n"
    "y[t] = h[t]·C[t]\nssm_states[r] = h[kept[r]]",
    "Gated Delta Networks, arXiv 2412.06464, equation 10",
)  # fmt: skip
