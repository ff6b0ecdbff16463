"""Searches for the mesh, sharding and rematerialization policy of the fastest step that fits.

The task is traced once (trace/). A cost model rates the sharding options of each group of layers on
each mesh (costs/). An integer linear program picks one option for each group (ilp.py). The best
candidates are compiled to decide (search.py).
"""
