"""Parts of a traced graph: what depends on what, and computing a part again somewhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import tensorflow as tf


def depending_on(tensors: Iterable[tf.Tensor], but_for: Collection[str] = ()) -> set[tf.Operation]:
    """Returns the operations that depend on one of the tensors of a graph, and those of them.

    but_for: types of operations that count as not depending on what they read.
    """
    found: set[tf.Operation] = set()
    ahead = [tensor.op for tensor in tensors]
    while ahead:
        operation = ahead.pop()
        if operation not in found and operation.type not in but_for:
            found.add(operation)
            ahead.extend(reader for y in operation.outputs for reader in y.consumers())
    return found


def needed_for(targets: Iterable[tf.Tensor], known: Collection[str] = ()) -> set[tf.Operation]:
    """Returns the operations that compute the targets from tensors whose names are known."""
    found: set[tf.Operation] = set()
    ahead = list(targets)
    while ahead:
        tensor = ahead.pop()
        if tensor.name not in known and tensor.op not in found:
            found.add(tensor.op)
            ahead.extend(tensor.op.inputs)
    return found


def compute(
    targets: Sequence[tf.Tensor],
    known: Mapping[str, tf.Tensor],
    scope_of: Callable[[tf.Operation], str] = lambda operation: "",
) -> list[tf.Tensor]:
    """Returns tensors of another graph, computed in the current one.

    known: by their names in the other graph, the tensors that there is a value of. scope_of: put
    before an operation's name. Raises ValueError if a target needs a placeholder that is not known.
    """
    if not targets:
        return []
    graph, needed = targets[0].graph, needed_for(targets, known)
    # In the graph's order: all processes of a run are to make the same program.
    operations = [operation for operation in graph.get_operations() if operation in needed]
    names = {operation.name: scope_of(operation) + operation.name for operation in operations}
    part = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
    for operation in operations:
        _check(operation)
        node = part.node.add()
        node.CopyFrom(operation.node_def)
        node.name = names[operation.name]
        node.attr.pop("_class", None)
        # What is only to run before: nothing here has effects.
        node.input[:] = [_renamed(i, names) for i in node.input if not i.startswith("^")]
    if any(_has_functions(operation) for operation in operations):
        part.library.CopyFrom(graph.as_graph_def().library)
    outside = [tensor for tensor in targets if tensor.name not in known]
    read = {tensor.name for operation in operations for tensor in operation.inputs}
    computed = iter(
        tf.graph_util.import_graph_def(
            part,
            # The identity brings what is around the current graph into it.
            input_map={name: tf.identity(x) for name, x in known.items() if name in read},
            return_elements=[names[t.op.name] + f":{t.value_index}" for t in outside],
            name="",
        )
    )
    results = [known[t.name] if t.name in known else next(computed) for t in targets]
    for tensor, result in zip(targets, results, strict=True):
        result.set_shape(tensor.shape)
    return results


def _renamed(name: str, names: Mapping[str, str]) -> str:
    operation, colon, index = name.partition(":")
    return names.get(operation, operation) + colon + index


def _check(operation: tf.Operation) -> None:
    if operation.type == "Placeholder":
        raise ValueError(f"{operation.name}: there is no value of this placeholder")


def _has_functions(operation: tf.Operation) -> bool:
    attributes = operation.node_def.attr.values()
    return any(a.HasField("func") or a.list.func for a in attributes)
