"""A llama-server without a model: its wire, its pool of cells and its parks, any generation.

``python -m kvalet.sims.fakeserver`` is a process that takes llama-server's flags and
environment; ``open_sim`` runs the same server inside a trio program, on any clock.
"""
