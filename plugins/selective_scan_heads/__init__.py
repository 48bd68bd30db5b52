"""Mamba-2's selective scan, with one decay per head, in fp32 and on int8 values."""
