"""ONNX function body of the gated delta rule, token by token."""

from __future__ import annotations

from edge.plugins.selective_scan.recurrence import Step, walks

# `known`: the product of each row of the state, one channel, with the key is its prediction of x.
STEP = Step(
    """
            faded = Mul({before}, {decay5})
            known = MatMul(faded, {B_columns})
            unknown = Sub({x5}, known)
            written = Mul(unknown, {beta5})
            fed = MatMul(written, {B_rows})
            after = Add(faded, fed)
            read_t = MatMul(after, {C_columns})""",
    {
        "decay5": "B,H,1,1",
        "beta5": "B,H,1,1",
        "x5": "B,H,P,1",
        "B_rows": "B,H,1,N",
        "B_columns": "B,H,N,1",
        "C_columns": "B,H,N,1",
    },
    state="B,H,P,N",
    read="B,H,P,1",
)

# Nodes that make `STEP.rows` from x, dt, B and C: for each head g, β and its values, and the key
# and query of its group.
ROWS = """
    behind = Constant<value = int64[1] {{-1}}>()
    two_behind = Constant<value = int64[2] {{-1, -2}}>()
    of_one = Constant<value = int64[1] {{1}}>()
    as_before = Constant<value = int64[2] {{0, 0}}>()
    from_none = Constant<value = int64 {{0}}>()
    by_one = Constant<value = int64 {{1}}>()
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, behind)
    groups_0 = Constant<value_int: int = @groups>()
    groups_1 = Reshape(groups_0, behind)
    head_columns = Concat<axis=0>(as_before, heads_1, behind, of_one)
    group_rows = Concat<axis=0>(as_before, groups_1, of_one, behind)
    head = Range(from_none, heads_0, by_one)
    share = Div(heads_0, groups_0)
    group = Div(head, share)
    a, b = Split<axis=-1, num_outputs=2>({dt})
    shifted = Add(a, dt_bias)
    positive = Softplus(shifted)
    rate = Mul(positive, A)
    decay = Exp(rate)
    decay5 = Unsqueeze(decay, two_behind)
    most = Constant<value_float: float = @beta_max>()
    open = Sigmoid(b)
    beta = Mul(open, most)
    beta5 = Unsqueeze(beta, two_behind)
    x5 = Reshape({x}, head_columns)
    B_groups = Reshape({B}, group_rows)
    B_rows = Gather<axis=2>(B_groups, group)
    B_columns = Transpose<perm=[0, 1, 2, 4, 3]>(B_rows)
    C_groups = Reshape({C}, group_rows)
    C_rows = Gather<axis=2>(C_groups, group)
    C_columns = Transpose<perm=[0, 1, 2, 4, 3]>(C_rows)
"""


def ort_gated_delta_rule() -> str:
    return (
        ROWS.format(x="x", dt="dt", B="B", C="C")
        + walks(STEP)
        + """
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(reads, flat)
"""
    )
