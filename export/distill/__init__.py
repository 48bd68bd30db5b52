"""A Transformer becomes a hybrid of Mamba and attention (The Mamba in the Llama, arXiv 2408.15237).

`hybrid` says what the hybrid is, `initial` its first weights, `match` and `learn` the two stages of
training, `run` the whole with everything that a long run needs.
"""
