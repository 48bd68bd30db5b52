"""Gated RMSNorm in groups, and gates without a norm."""
