"""`make bench`: this runtime beside its peers, on one model with random weights.

Every peer gets the same weights, token ids and threads; results are checked before anything is
timed, and the peers take turns within every round.
"""
