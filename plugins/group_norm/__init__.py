"""RMSNorm of adjacent values: of every head, or of dt, B and C."""
