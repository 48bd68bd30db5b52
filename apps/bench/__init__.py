"""`make bench`: compare this runtime with its peers on one model with random weights.

Every peer gets the same weights, token ids and number of threads. Results are checked before
anything is timed, and the peers take turns within every round.
"""
