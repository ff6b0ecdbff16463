"""Searches for the mesh, the sharding and the hyperparameters of the fastest step that fits.

The task is traced for each number of micro-batches (tracing.py). A cost model rates the sharding
options of each group of layers on each mesh (cost_model.py, costs.py). An integer linear program
picks one option for each group (ilp.py). The best candidates are compiled to decide (search.py),
and the choice is explained by the next best ones (explanation.py).
"""
