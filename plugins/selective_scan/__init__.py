"""Mamba-1's selective scan, in fp32 and on int8 values."""
