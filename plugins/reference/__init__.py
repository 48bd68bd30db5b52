"""Run graphs with the reference ops, which define what a bundle's numbers mean.

Each op's reference is plain, sequential PyTorch in the op's folder. All other implementations are
tested against it. It takes the state before the first token and returns the state after the last
one; T is any length, and one call with T tokens is equivalent to T calls with one.
"""
