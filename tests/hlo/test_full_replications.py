# tests: wings/hlo/names.py
"""Reads the partitioner's warnings of full replications."""

from lingvo_gshard.wings.hlo.names import FullReplication, full_replications

WARNING = (
    "W1121 15:50:55.909580   12241 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {devices=[1,2]0,1} to "
    "{devices=[2,1]0,1} efficiently for HLO operation %copy.1 = f32[8,4]{1,0} copy(%Sin.0), "
    "sharding={devices=[1,2]0,1}%s. As the last resort, SPMD will replicate the tensor.\n"
)


def test_a_warning_gives_the_operation_and_both_shardings():
    named = WARNING.replace("%s", ', metadata={op_name="jit(call)/call_exported/encoder/x"}')
    text = "W1121 0:0 1 other.cc:1] something\n" + named + named + WARNING.replace("%s", "")
    shardings = ("{devices=[1,2]0,1}", "{devices=[2,1]0,1}")
    assert full_replications(text) == [
        FullReplication("encoder/x", *shardings),
        FullReplication("%copy.1 f32[8,4]", *shardings),
    ]
    assert full_replications("") == []
