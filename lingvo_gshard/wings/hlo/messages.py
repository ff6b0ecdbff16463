"""XLA's messages of compiled programs, as classes made from tables of the fields that are read.

Fields that a table leaves out are kept as unknown fields, so that a message that is read and
written again is whole.

Names and numbers of the fields are XLA's:
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto and
https://github.com/openxla/xla/blob/main/xla/xla_data.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from lingvo_gshard.core import objects


def read(text: str) -> dict[str, Any]:
    """Returns the class of each message that a FileDescriptorProto describes, given as text."""
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (
        pool.FindMessageTypeByName(f"{file.package}.{each.name}") for each in file.message_type
    )
    return {each.name: message_factory.GetMessageClass(each) for each in found}


# The highest number of a field of HloInstructionProto that was known when the table was written.
NEWEST_INSTRUCTION_FIELD = 97

# Types of elements, by their numbers.
ELEMENT_TYPES = dict(
    enumerate(
        """primitive_type_invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque_type
        c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3
        f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer""".split()
    )
)
TUPLE = next(number for number, name in ELEMENT_TYPES.items() if name == "tuple")

# PrecisionConfig.Precision, and what follows ALG_DOT_ in PrecisionConfig.Algorithm, by number.
PRECISIONS = ("DEFAULT", "HIGH", "HIGHEST")
ALGORITHMS = dict(
    enumerate(
        """UNSET ANY_F8_ANY_F8_F32 ANY_F8_ANY_F8_F32_FAST_ACCUM F16_F16_F16 F16_F16_F32
        BF16_BF16_BF16 BF16_BF16_F32 BF16_BF16_F32_X3 BF16_BF16_F32_X6 TF32_TF32_F32
        TF32_TF32_F32_X3 F32_F32_F32 F64_F64_F64 BF16_BF16_F32_X9""".split()
    )
)

_CLASSES = read(objects.text_beside(__file__, "hlo.textproto"))
HloProto = _CLASSES["HloProto"]
HloModuleProto = _CLASSES["HloModuleProto"]
HloInstructionProto = _CLASSES["HloInstructionProto"]
ShapeProto = _CLASSES["ShapeProto"]
MeshAxesReplicaGroupListProto = _CLASSES["MeshAxesReplicaGroupListProto"]
