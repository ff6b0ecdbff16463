"""Messages of traces: XSpace and what it consists of.

Names and numbers of the fields are XLA's:
https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

from lingvo_gshard.hlo.protos.messages import make

_VALUES = {
    "double_value": "2:double",
    "uint64_value": "3:uint64",
    "int64_value": "4:int64",
    "str_value": "5:string",
    "bytes_value": "6:bytes",
    "ref_value": "7:uint64",
}
_TABLES = {
    "XSpace": "planes:1:[XPlane]",
    "XPlane": (
        "id:1:int64 name:2:string lines:3:[XLine] event_metadata:4:{XEventMetadata} "
        "stat_metadata:5:{XStatMetadata}"
    ),
    "XLine": (
        "id:1:int64 name:2:string timestamp_ns:3:int64 events:4:[XEvent] display_name:11:string"
    ),
    "XEvent": "metadata_id:1:int64 offset_ps:2:int64 duration_ps:3:int64 stats:4:[XStat]",
    "XStat": "metadata_id:1:int64 " + " ".join(f"{name}:{rest}" for name, rest in _VALUES.items()),
    "XEventMetadata": "id:1:int64 name:2:string display_name:4:string stats:5:[XStat]",
    "XStatMetadata": "id:1:int64 name:2:string",
}

XSpace = make("trace", _TABLES, oneofs={"XStat": tuple(_VALUES)})["XSpace"]
