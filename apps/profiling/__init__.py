"""`edge profile`: what an answer costs in time, memory and energy, and where the time goes."""
