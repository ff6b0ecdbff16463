# tests: wings/planning/compiling/cache.py
"""Reads the buffers of a program from a file that TensorFlow's classes of XLA's messages wrote."""

from tensorflow.compiler.xla.service import hlo_pb2

from lingvo_gshard.wings.planning.compiling import cache

VMEM = 1


def test_memory_is_the_sum_of_the_buffers_of_a_device(tmp_path):
    proto = hlo_pb2.HloProto()
    proto.hlo_module.name = "train_step"
    buffers = proto.buffer_assignment.buffer_allocations
    buffers.add(size=100, is_entry_computation_parameter=True)
    # An output in an argument's memory.
    buffers.add(size=30, is_entry_computation_parameter=True, maybe_live_out=True)
    buffers.add(size=7, maybe_live_out=True)
    buffers.add(size=1000)
    buffers.add(size=5, is_constant=True)
    buffers.add(size=2, is_thread_local=True)
    buffers.add(size=9999, color=VMEM)
    (tmp_path / "m.after_optimizations.hlo.pb").write_bytes(proto.SerializeToString())
    module, memory = cache.read(str(tmp_path), code=11)
    assert hlo_pb2.HloModuleProto.FromString(module) == proto.hlo_module
    sizes = {"arguments": 130, "outputs": 7, "temporaries": 1007, "code": 11}
    assert memory == sizes | {"peak": 130 + 7 + 1007 + 11, "host": 0}


def test_program_is_accepted_once_the_stage_after_its_buffers_is_there(tmp_path):
    assert not cache.is_accepted(str(tmp_path))
    (tmp_path / "m.after_optimizations.hlo.pb").write_bytes(b"")
    assert not cache.is_accepted(str(tmp_path))
    (tmp_path / "m.after_optimizations_after_buffer_assignment.hlo.pb").write_bytes(b"")
    assert cache.is_accepted(str(tmp_path))
