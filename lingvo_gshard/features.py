"""Lists the modules of the package's features. Each module takes part at one seam.

A seam imports its features when it is first used; see core/seams.py. A feature that this table does
not list takes part once its module is imported.
"""

# Modules of each seam. Features are called in this order.
MODULES: dict[str, tuple[str, ...]] = {
    "observers": ("lingvo_gshard.services.observers",),
}
