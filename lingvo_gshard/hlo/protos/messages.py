"""Makes classes of protocol buffer messages from tables of the fields that are read.

Fields that a table leaves out are kept as unknown fields, so that a message that is read and
written again is whole.
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
      oneofs: fields of a message of which at most one is set, as its oneof `value`.
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
