"""Running text over the fp32 graph, and the plan that what was seen makes."""
