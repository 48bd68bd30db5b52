"""The network in PyTorch: what checkpoints are checked with, what trains, what engines must match."""

from edge.export.network.model import Network, NetworkState

__all__ = ["Network", "NetworkState"]
