"""Gated RMSNorm in groups, and the SiLU gate of an MLP."""
