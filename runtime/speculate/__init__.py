"""Speculative generation: a drafter proposes tokens, the target verifies them in one run.

What comes out is what the target alone would have said: greedily the same tokens (up to near-ties,
where an engine's run of several tokens is not bit-equal to steps), otherwise the same distribution.
"""
