"""Speculative generation: a drafter proposes tokens, the target verifies them in one run.

With the exact rule the output is what the target alone would have produced: at temperature 0 the
same tokens (up to near-ties, where a run of several tokens is not bit-equal to single steps), at
higher temperatures the same distribution.
"""
