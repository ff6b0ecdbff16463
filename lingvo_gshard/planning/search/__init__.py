"""Search: which mesh, letters and rematerialization make a step fit and be fastest.

A task is traced once (traced.py); what it records is costed for a mesh and tables of letters by a
model (costs.py); an integer program chooses tables for groups of layers (choosing.py); compilations
of the best decide (search.py).
"""
