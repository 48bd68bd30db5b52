"""The product of two values, number by number."""
