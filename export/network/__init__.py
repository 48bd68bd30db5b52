"""The network in PyTorch: what trains, what checkpoints load into, what engines must match."""

from edge.export.network.model import Network, NetworkState

__all__ = ["Network", "NetworkState"]
