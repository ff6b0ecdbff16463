"""Takes part in lowering: prepares a module for XLA's SPMD partitioner."""

from __future__ import annotations

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime import FIRST_LOWERING_PASSES, LOWERING_PASSES
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.spmd_passes.inlining import inline_in_loops, inline_in_reducers
from lingvo_gshard.wings.spmd_passes.loop_sums import reduce_after_loops
from lingvo_gshard.wings.spmd_passes.partial_operations import add_before_reducing
from lingvo_gshard.wings.spmd_passes.uneven_sums import reduce_to_uneven_parts
from lingvo_gshard.wings.spmd_passes.whole_dimensions import keep_whole
from lingvo_gshard.wings.spmd_passes.whole_tables import keep_tables_whole

FIRST_LOWERING_PASSES.register("reducers")(inline_in_reducers)
FIRST_LOWERING_PASSES.register("loops")(inline_in_loops)


@LOWERING_PASSES.register("spmd_passes")
def prepare(module: ir.Module, mesh: Mesh) -> None:
    """Runs all passes over a module, in the order that they need."""
    add_before_reducing(module, mesh)
    reduce_after_loops(module, mesh)
    reduce_to_uneven_parts(module, mesh)
    keep_tables_whole(module, mesh)
    keep_whole(module, mesh)
