"""XLA's messages of compiled programs, as classes made from tables of the fields that are read.

Fields that a table leaves out are kept as unknown fields, so that a message that is read and
written again is whole.

Names and numbers of the fields are XLA's:
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto and
https://github.com/openxla/xla/blob/main/xla/xla_data.proto.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "lingvo_gshard"
_FIELD = re.compile(r"(?P<name>\w+):(?P<number>\d+):(?P<kind>[\[{]?)(?P<type>\w+)[\]}]?")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def make(
    name: str,
    tables: Mapping[str, str],
    oneofs: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """Returns the class of each message.

    Args:
      name: a name for the set of messages.
      tables: fields of each message: `name:number:type`, separated by spaces. A type is a scalar
        or a message; `[type]` is repeated, `{type}` a map from int64, and `{string}` a map from
        strings to strings. Values of enums are int32.
      oneofs: message -> fields that exclude one another. They form the oneof `value` of the
        message.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}/{name}.proto", package=f"{_PACKAGE}.{name}", syntax="proto3"
    )
    for message, table in tables.items():
        made = file.message_type.add(name=message)
        for text in table.split():
            _add_field(made, text, file.package)
        chosen = (oneofs or {}).get(message)
        if chosen:
            made.oneof_decl.add(name="value")
            for field in made.field:
                if field.name in chosen:
                    field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{message}")
        )
        for message in tables
    }


def _add_field(message: descriptor_pb2.DescriptorProto, text: str, package: str) -> None:
    match = _FIELD.fullmatch(text)
    assert match, f"{message.name}: {text}"
    field = message.field.add(name=match["name"], number=int(match["number"]))
    is_many = bool(match["kind"])
    field.label = _Field.LABEL_REPEATED if is_many else _Field.LABEL_OPTIONAL
    if match["kind"] == "{":
        _add_map(message, field, match["type"], package)
    else:
        _set_type(field, match["type"], package)


def _set_type(field: _Field, kind: str, package: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"


def _add_map(
    message: descriptor_pb2.DescriptorProto, field: _Field, kind: str, package: str
) -> None:
    """Makes a field a map: a repeated message of a key and a value."""
    entry_name = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL)
    key.type = _SCALARS["string" if kind == "string" else "int64"]
    value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
    _set_type(value, kind, package)
    field.type = _Field.TYPE_MESSAGE
    field.type_name = f".{package}.{message.name}.{entry_name}"


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

_TABLES = {
    "HloProto": "hlo_module:1:HloModuleProto buffer_assignment:3:BufferAssignmentProto",
    "BufferAssignmentProto": "buffer_allocations:3:[BufferAllocationProto]",
    "BufferAllocationProto": (
        "size:2:int64 is_entry_computation_parameter:5:bool maybe_live_out:7:bool color:8:int64"
    ),
    "HloModuleProto": (
        "name:1:string computations:3:[HloComputationProto] entry_computation_id:6:int64 "
        "schedule:7:HloScheduleProto"
    ),
    "HloScheduleProto": "sequences:1:{InstructionSequence}",
    "InstructionSequence": "instruction_ids:1:[int64]",
    "HloComputationProto": (
        "name:1:string instructions:2:[HloInstructionProto] id:5:int64 root_id:6:int64"
    ),
    "HloInstructionProto": (
        "name:1:string opcode:2:string shape:3:ShapeProto metadata:7:OpMetadata "
        "literal:8:LiteralProto parameter_number:9:int64 tuple_index:13:int64 "
        "dimensions:14:[int64] window:15:Window "
        "convolution_dimension_numbers:16:ConvolutionDimensionNumbers "
        "slice_dimensions:17:[SliceDimensions] custom_call_target:28:string "
        "dot_dimension_numbers:30:DotDimensionNumbers id:35:int64 operand_ids:36:[int64] "
        "called_computation_ids:38:[int64] sharding:40:OpSharding backend_config:43:bytes "
        "replica_groups:49:[ReplicaGroup] precision_config:51:PrecisionConfig "
        "source_target_pairs:52:[SourceTarget] batch_group_count:58:int64 "
        "comparison_direction:63:string frontend_attributes:68:FrontendAttributes "
        "collective_device_list:87:CollectiveDeviceListProto "
        "iota_collective_device_list:92:IotaReplicaGroupListProto "
        "mesh_axes_replica_group_list:93:MeshAxesReplicaGroupListProto"
    ),
    "SliceDimensions": "start:1:int64 limit:2:int64 stride:3:int64",
    "ShapeProto": (
        "element_type:2:int32 dimensions:3:[int64] tuple_shapes:4:[ShapeProto] layout:5:LayoutProto"
    ),
    "LayoutProto": "minor_to_major:1:[int64] tiles:6:[TileProto] memory_space:8:int64",
    "TileProto": "dimensions:1:[int64]",
    "LiteralProto": (
        "preds:2:[bool] u8s:3:bytes s32s:4:[int32] s64s:5:[int64] u32s:6:[uint32] u64s:7:[uint64] "
        "s8s:15:bytes u16s:16:bytes s16s:17:bytes"
    ),
    "DotDimensionNumbers": (
        "lhs_contracting_dimensions:1:[int64] rhs_contracting_dimensions:2:[int64]"
    ),
    "ConvolutionDimensionNumbers": (
        "kernel_input_feature_dimension:3:int64 kernel_output_feature_dimension:4:int64 "
        "kernel_spatial_dimensions:6:[int64] input_batch_dimension:7:int64 "
        "input_spatial_dimensions:11:[int64] output_spatial_dimensions:12:[int64]"
    ),
    # Both are enums: PRECISIONS and ALGORITHMS.
    "PrecisionConfig": "operand_precision:1:[int32] algorithm:2:int32",
    "Window": "dimensions:1:[WindowDimension]",
    "WindowDimension": (
        "size:1:int64 stride:2:int64 padding_low:3:int64 window_dilation:5:int64 "
        "base_dilation:6:int64"
    ),
    "OpMetadata": "op_name:2:string",
    "FrontendAttributes": "map:1:{string}",
    "OpSharding": "",
    "ReplicaGroup": "replica_ids:1:[int64]",
    "CollectiveDeviceListProto": (
        "replica_groups:1:[ReplicaGroup] iota_replica_group_list:2:IotaReplicaGroupListProto"
    ),
    "IotaReplicaGroupListProto": (
        "num_replica_groups:1:int64 num_devices_per_group:2:int64 iota_reshape_dims:3:[int64] "
        "iota_transpose_perm:4:[int32]"
    ),
    "MeshAxesReplicaGroupListProto": "mesh:1:MeshProto axes:2:[AxisRefProto]",
    "MeshProto": "axes:1:[MeshAxis] device_ids:2:[int64] iota:3:IotaProto",
    "MeshAxis": "name:1:string size:2:int64",
    "IotaProto": "dims:1:[int64] permutation:2:[int64]",
    "AxisRefProto": "mesh_axis_index:1:int64 sub_axis_info:2:SubAxis",
    "SubAxis": "pre_size:1:int64 size:2:int64",
    "SourceTarget": "source:1:int64 target:2:int64",
}

_CLASSES = make("hlo", _TABLES)
HloProto = _CLASSES["HloProto"]
HloModuleProto = _CLASSES["HloModuleProto"]
HloInstructionProto = _CLASSES["HloInstructionProto"]
ShapeProto = _CLASSES["ShapeProto"]
MeshAxesReplicaGroupListProto = _CLASSES["MeshAxesReplicaGroupListProto"]
