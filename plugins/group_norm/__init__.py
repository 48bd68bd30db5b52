"""RMSNorm of neighbouring values: of every head, or of dt, B and C."""
