"""`python -m jetson.verify`: everything this repository calls unproven, tried on a board."""
