"""Run text through the fp32 graph and make a plan from the statistics."""
