"""A mixture of experts: the router's choice, products with the chosen experts, their sum."""
