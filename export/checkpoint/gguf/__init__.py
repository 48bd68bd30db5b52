"""Read GGUF files, llama.cpp's format with config, tokenizer and weights in one, as checkpoints."""

from edge.export.checkpoint.gguf.model import GgufCheckpoint, GgufModel, find_gguf
from edge.export.checkpoint.gguf.weights import GgufFile

__all__ = ["GgufCheckpoint", "GgufFile", "GgufModel", "find_gguf"]
