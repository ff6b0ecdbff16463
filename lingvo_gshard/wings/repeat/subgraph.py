"""Subgraphs of a traced graph: finding dependents and ancestors, and copying into another graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from lingvo_gshard.core import tf


def dependents(tensors: Iterable[tf.Tensor], ignoring: Collection[str] = ()) -> set[tf.Operation]:
    """Returns the operations that depend on given tensors, including those that produce them.

    Operations of the types `ignoring` count as independent of their inputs.
    """
    found: set[tf.Operation] = set()
    pending = [tensor.op for tensor in tensors]
    while pending:
        operation = pending.pop()
        if operation not in found and operation.type not in ignoring:
            found.add(operation)
            pending.extend(reader for y in operation.outputs for reader in y.consumers())
    return found


def dependent_tensors(tensors: Iterable[tf.Tensor], ignoring: Collection[str] = ()) -> set[str]:
    """Returns the names of given tensors and of all tensors that are computed from them.

    A result of IdentityN depends on one input only. tf.custom_gradient passes the results and the
    arguments of a function through one IdentityN. Types to ignore are as in `dependents`.
    """
    found: set[str] = set()
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if tensor.name in found:
            continue
        found.add(tensor.name)
        for reader in tensor.consumers():
            if reader.type == "IdentityN":
                pairs = zip(reader.inputs, reader.outputs, strict=True)
                pending.extend(y for x, y in pairs if x.name == tensor.name)
            elif reader.type not in ignoring:
                pending.extend(reader.outputs)
    return found


def ancestors(targets: Iterable[tf.Tensor], known: Collection[str] = ()) -> set[tf.Operation]:
    """Returns the operations that compute the targets, given the values of the tensors `known`."""
    found: set[tf.Operation] = set()
    pending = list(targets)
    while pending:
        tensor = pending.pop()
        if tensor.name not in known and tensor.op not in found:
            found.add(tensor.op)
            pending.extend(tensor.op.inputs)
    return found


def copy_into_current_graph(
    targets: Sequence[tf.Tensor],
    known: Mapping[str, tf.Tensor],
    scope_of: Callable[[tf.Operation], str] = lambda operation: "",
) -> list[tf.Tensor]:
    """Computes tensors of another graph in the current graph.

    Copies the operations that the targets need, in the order of their graph.

    Args:
      targets: Tensors of the other graph.
      known: Values in the current graph, by the tensors' names in the other graph.
      scope_of: Returns a prefix for the name of an operation's copy.

    Raises:
      ValueError: A target depends on a placeholder that has no known value.
    """
    if not targets:
        return []
    graph, needed = targets[0].graph, ancestors(targets, known)
    # The order must be deterministic: all processes of a run must build the same program.
    operations = [operation for operation in graph.get_operations() if operation in needed]
    names = {operation.name: scope_of(operation) + operation.name for operation in operations}
    read = {tensor.name for operation in operations for tensor in operation.inputs}
    computed = [tensor for tensor in targets if tensor.name not in known]
    results = tf.graph_util.import_graph_def(
        _graph_def(graph, operations, names),
        # tf.identity captures values that are defined outside of the current graph.
        input_map={name: tf.identity(x) for name, x in known.items() if name in read},
        return_elements=[names[t.op.name] + f":{t.value_index}" for t in computed],
        name="",
    )
    value_of = {**known, **{t.name: x for t, x in zip(computed, results, strict=True)}}
    for tensor in targets:
        value_of[tensor.name].set_shape(tensor.shape)
    return [value_of[tensor.name] for tensor in targets]


def _graph_def(
    graph: tf.Graph, operations: Sequence[tf.Operation], names: Mapping[str, str]
) -> tf.compat.v1.GraphDef:
    """Returns a GraphDef of operations, in the order of their graph, under new names."""
    copied = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
    for operation in operations:
        if operation.type == "Placeholder":
            raise ValueError(f"{operation.name}: this placeholder has no known value")
        node = copied.node.add()
        node.CopyFrom(operation.node_def)
        node.name = names[operation.name]
        node.attr.pop("_class", None)
        # Drops control inputs: none of these operations has side effects.
        node.input[:] = [_renamed(i, names) for i in node.input if not i.startswith("^")]
    attributes = [a for operation in operations for a in operation.node_def.attr.values()]
    if any(a.HasField("func") or a.list.func for a in attributes):
        copied.library.CopyFrom(graph.as_graph_def().library)
    return copied


def _renamed(name: str, names: Mapping[str, str]) -> str:
    operation, colon, index = name.partition(":")
    return names.get(operation, operation) + colon + index
