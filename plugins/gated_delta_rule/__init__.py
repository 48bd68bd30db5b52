"""The gated delta rule: a state that forgets, and writes what it does not know yet."""
