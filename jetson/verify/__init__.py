"""`python -m jetson.verify`: tests on a board of everything this repository calls unproven."""
