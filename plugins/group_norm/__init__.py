"""RMSNorm of neighbouring values, such as those of a head."""
