"""The reference ops in use: a graph run node by node, which says what a bundle's numbers mean.

Each op's reference is plain PyTorch in its folder, sequential and obvious: the truth that all else
is tested against. It takes the state before the first token and returns the state after the last
one; T is any length, and one call of T tokens means the same as T calls of one.
"""
