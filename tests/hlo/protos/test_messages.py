"""Tests the tables of XLA's messages against the classes that TensorFlow generates from them."""

import pytest
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from lingvo_gshard.wings.hlo import messages
from lingvo_gshard.wings.profiling import xspace

# Fields that compilers write and TensorFlow's classes do not have yet.
NEWER = {"iota"}


def fields(message, found=None):
    """Returns the fields of a message and of the messages in it, by message."""
    found = {} if found is None else found
    if message.name not in found:
        found[message.name] = {field.name: field for field in message.fields}
        for field in message.fields:
            if field.message_type:
                fields(field.message_type, found)
    return found


def kind(field):
    """Returns the type of a field; enums are read as int32."""
    return field.TYPE_INT32 if field.type == field.TYPE_ENUM else field.type


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (messages.HloProto, hlo_pb2.HloProto),
        (xspace.XSpace, xplane_pb2.XSpace),
    ],
)
def test_fields_are_those_of_tensorflow(ours, theirs):
    known = fields(theirs.DESCRIPTOR)
    compared = 0
    for message, table in fields(ours.DESCRIPTOR).items():
        for name, field in table.items():
            if message == "IotaProto" or name in NEWER:
                continue
            other = known[message][name]
            assert (field.number, field.is_repeated) == (other.number, other.is_repeated), name
            assert kind(field) == kind(other), f"{message}.{name}"
            assert bool(field.containing_oneof) <= bool(other.containing_oneof)
            compared += 1
    assert compared > 20


def test_enums_are_those_of_tensorflow():
    types = {number: name.lower() for name, number in xla_data_pb2.PrimitiveType.items()}
    assert messages.ELEMENT_TYPES == types
    config = xla_data_pb2.PrecisionConfig
    assert (
        list(messages.PRECISIONS)
        == [name for name, number in sorted(config.Precision.items(), key=lambda pair: pair[1])][
            : len(messages.PRECISIONS)
        ]
    )
    algorithms = {
        number: name.removeprefix("ALG_").removeprefix("DOT_")
        for name, number in config.Algorithm.items()
    }
    assert messages.ALGORITHMS == algorithms


def test_no_field_of_instructions_is_newer_than_the_table():
    numbers = [field.number for field in hlo_pb2.HloInstructionProto.DESCRIPTOR.fields]
    assert max(numbers) <= messages.NEWEST_INSTRUCTION_FIELD


def test_what_is_not_read_is_kept():
    theirs = hlo_pb2.HloInstructionProto(name="a", fusion_kind="kLoop")
    theirs.sharding.tile_assignment_dimensions.extend([2, 4])
    ours = messages.HloInstructionProto.FromString(theirs.SerializeToString())
    assert ours.HasField("sharding") and ours.name == "a"
    assert hlo_pb2.HloInstructionProto.FromString(ours.SerializeToString()) == theirs
    sharding = xla_data_pb2.OpSharding.FromString(ours.sharding.SerializeToString())
    assert sharding == theirs.sharding
