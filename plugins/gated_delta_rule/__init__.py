"""The gated delta rule: a state that decays, and stores only what it does not predict yet."""
