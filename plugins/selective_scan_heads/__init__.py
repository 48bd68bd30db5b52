"""Mamba-2's selective scan, one decay a head, in fp32 and on int8 values."""
