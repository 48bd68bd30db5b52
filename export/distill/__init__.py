"""Distill a Transformer into a hybrid of Mamba and attention (The Mamba in the Llama, arXiv
2408.15237).

`hybrid` defines the hybrid, `initial` makes its first weights, `stages` has the two stages of
training, and `run` puts them together as a long run.
"""
