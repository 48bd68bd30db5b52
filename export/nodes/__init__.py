"""Nodes and weights of a graph under construction."""
