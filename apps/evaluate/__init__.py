"""`edge eval`: perplexity, bits per byte, divergence, noise and tasks, over the runtime alone."""
