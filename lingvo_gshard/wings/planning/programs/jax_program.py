"""Makes a Program of what `jax.export` exported, with the shardings that it names.

A program exported for Shardy names its mesh, and the mesh axes in every sharding:
https://openxla.org/shardy/sharding_representation. A program exported for GSPMD only numbers the
devices. We then make a mesh whose axes can express all shardings of the program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core import UserError, explained, jax, jnp
from lingvo_gshard.core.lazy import func, ir, jax_export, mlir, sdy, stablehlo
from lingvo_gshard.runtime import Array, Program, writers_versions
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.planning.search.candidates import factorizations
from lingvo_gshard.wings.spmd_passes.sharding_text import split_of_text

_NAMED = re.compile(r'loc\("(.+?)"(?:\(.*\))?\)')
_KEY = re.compile(r"\[\\?['\"](.*?)\\?['\"]\]")


def argument_paths(
    exported: jax_export.Exported, kept: Sequence[int], locations: Sequence[ir.Location]
) -> list[str]:
    """Returns the paths of the arguments that a program kept.

    jax names an argument by the function's parameter, as the location of the module's argument. If
    locations were stripped, the paths are those in the tree of arguments.

    Args:
      kept: indices among all arguments of those that the program uses.
      locations: the location of each of these arguments in the module.
    """
    named = [_NAMED.fullmatch(str(location)) for location in locations]
    if all(named):
        return [_dotted(match[1]) for match in named if match]
    return [_paths_in_tree(exported)[index] for index in kept]


def _paths_in_tree(exported: jax_export.Exported) -> list[str]:
    leaves = range(exported.in_tree.num_leaves)
    tree = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
    paths = []
    for (kind, *path), _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = jax.tree_util.keystr(tuple(path))
        paths.append(_dotted(f"arguments{keys}" if kind.idx == 0 else keys))
    return paths


def _dotted(name: str) -> str:
    return _KEY.sub(r".\1", name).lstrip(".")


# (attribute of a sharding or None, rank) of an array.
Sharded: TypeAlias = "tuple[ir.Attribute | None, int]"
SHARDY, GSPMD = "sdy.sharding", "mhlo.sharding"
_MOST_AXES = 4


def shardy_mesh(module: ir.Module) -> Mesh | None:
    """Returns the mesh that a module names; None without one. Raises UserError for several."""
    found = {}
    for operation in module.body:
        if _is_mesh(operation):
            attribute = sdy.MeshAttr(operation.operation.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in attribute.axes]
            if axes:
                found[tuple((_identifier(axis.name), axis.size) for axis in axes)] = None
    if len(found) > 1:
        meshes = " and ".join(str(Mesh(axes)) for axes in found)
        raise UserError(f"it has several meshes, {meshes}, and a plan has one")
    return Mesh(next(iter(found))) if found else None


def _is_mesh(operation: ir.OpView) -> bool:
    return operation.operation.name == "sdy.mesh"


def gspmd_mesh(shardings: Sequence[Sharded], devices: int, given: Mesh | None) -> Mesh:
    """Returns the mesh with the fewest axes that can express shardings of numbered devices.

    Raises:
      UserError: the shardings are no splits over `given`, or over any mesh of up to four axes.
    """
    texts = {(ir.StringAttr(a).value, rank) for a, rank in shardings if a is not None}
    for mesh in [given] if given else _meshes(devices):
        if all(split_of_text(text, rank, mesh) is not None for text, rank in texts):
            return mesh
    which = f"`mesh={given}`" if given else f"any mesh of up to {_MOST_AXES} axes"
    shown = ", ".join(sorted(text for text, _ in texts)[:3])
    raise UserError(f"its shardings ({shown}) are no splits over {which}")


def split_of(attribute: ir.Attribute | None, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split of an array; None without a sharding. Raises UserError for no split."""
    if attribute is None:
        return None
    if isinstance(attribute, ir.StringAttr):
        split = split_of_text(ir.StringAttr(attribute).value, rank, mesh)
        if split is None:
            raise UserError(f"its sharding {attribute} is no split over {mesh}")
        return split
    split = []
    for dimension in sdy.TensorShardingAttr(attribute).dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            raise UserError(f"its sharding {attribute} splits over a part of an axis")
        split.append(tuple(_identifier(axis.name) for axis in axes))
    return tuple(split)


def sharding_of(attributes: Mapping[str, ir.Attribute]) -> ir.Attribute | None:
    """Returns the sharding among the attributes of an argument or a result, if there is one."""
    return attributes.get(SHARDY, attributes.get(GSPMD))


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _meshes(devices: int) -> Iterator[Mesh]:
    """Yields the meshes of a number of devices, those with fewer axes first."""
    for count in range(1, _MOST_AXES + 1):
        for sizes in factorizations(devices, count):
            names = ["data"] if count == 1 else [f"axis_{index}" for index in range(count)]
            yield Mesh(tuple(zip(names, sizes, strict=True)))


# All machines of the world have fewer bytes.
_MOST_ELEMENTS = 2**60
_DONATED = ("jax.buffer_donor", "tf.aliasing_output")
# Shardings as jax wrote them into files before Shardy was its default partitioner.
_OLD_SHARDINGS = "xla.sdy.meshes"


@dataclasses.dataclass(frozen=True)
class _Value:
    """An argument or a result of a module's main function."""

    type: ir.RankedTensorType
    attributes: Mapping[str, ir.Attribute]

    @property
    def sharded(self) -> Sharded:
        return sharding_of(self.attributes), self.type.rank


def to_program(
    exported: jax_export.Exported, where: str, platform: str, mesh: Mesh | None = None
) -> Program:
    """Returns an exported jax function as a Program of the arguments that it uses.

    Args:
      platform: the platform to compile for: "tpu", "cuda" or "cpu". If the function was not
        exported for this platform, the first platform of the export is taken.
      mesh: the mesh that the function must have; None takes the exported mesh.

    Raises:
      UserError: the function cannot be planned, or has another mesh; names `where`.
    """
    with explained(where, ValueError):
        return _to_program(exported, platform, mesh)


def _to_program(exported: jax_export.Exported, platform: str, given: Mesh | None) -> Program:
    _check(exported)
    with mlir.make_ir_context() as context:
        module = _parsed(exported, context)
        _check_sizes(module.operation)
        if len(exported.platforms) > 1:
            _choose_platform(module, exported.platforms, platform)
        main = _main(module)
        arguments = _values(main.type.inputs, ir.ArrayAttr(main.arg_attrs))
        results = _values(main.type.results, ir.ArrayAttr(main.result_attrs))
        mesh = _mesh(module, [*arguments, *results], exported.nr_devices, given)
        names = argument_paths(
            exported, exported.module_kept_var_idx, [a.location for a in main.arguments]
        )
        return Program(
            name=exported.fun_name,
            module=bytes(
                stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version(), True)
            ),
            inputs=_inputs(exported, arguments, names, mesh),
            outputs=_outputs(exported, results, mesh),
            donated=tuple(
                index
                for index, argument in enumerate(arguments)
                if any(name in argument.attributes for name in _DONATED)
            ),
            mesh=mesh,
            partitioner="shardy" if any(map(_is_mesh, module.body)) else "gspmd",
            versions=writers_versions(),
        )


def _check(exported: jax_export.Exported) -> None:
    """Raises ValueError if a function returns nothing, has effects or no fixed shapes."""
    newest = jax_export.maximum_supported_calling_convention_version
    if exported.calling_convention_version > newest:
        raise UserError(
            f"it has jax's calling convention {exported.calling_convention_version}, and jax "
            f"{jax.__version__} reads up to {newest}. Install a newer jax"
        )
    if exported.ordered_effects:
        raise UserError("it has ordered effects, such as callbacks, which cannot be planned")
    if not exported.out_avals:
        raise UserError(
            "it returns no arrays, so that a compiler would remove all that it computes; return "
            "the new state or the loss"
        )
    for aval in exported.in_avals:
        if not all(isinstance(size, int) for size in aval.shape):
            shape = ", ".join(map(str, aval.shape))
            raise UserError(
                f"an argument has the symbolic shape ({shape}); export it with fixed shapes"
            )


def _check_sizes(operation: ir.Operation) -> None:
    """Raises UserError if an array is larger than any machine: compilers end the process then."""
    for region in operation.regions:
        for block in region.blocks:
            for value in block.arguments:
                _check_size(value.type)
            for each in block.operations:
                for result in each.operation.results:
                    _check_size(result.type)
                _check_sizes(each.operation)


def _check_size(kind: ir.Type) -> None:
    if isinstance(kind, ir.RankedTensorType) and math.prod(kind.shape) > _MOST_ELEMENTS:
        sizes = ", ".join(map(str, kind.shape))
        raise UserError(
            f"it has an array of shape ({sizes}), {math.prod(kind.shape):.3g} elements, which no "
            "machine can hold; check the shapes in `specs`"
        )


def _parsed(exported: jax_export.Exported, context: ir.Context) -> ir.Module:
    try:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
    except Exception as error:  # The bindings raise ValueError or MLIRError.
        raise UserError(
            f"its StableHLO cannot be read by jax {jax.__version__}; a newer jax may have written "
            f"it: {str(error).splitlines()[0]}"
        ) from None
    attributes = module.operation.attributes
    if _OLD_SHARDINGS in str(attributes.get("mhlo.frontend_attributes", "")):
        raise UserError("an old jax wrote its shardings; export it with a newer jax")
    return module


def _choose_platform(module: ir.Module, platforms: Sequence[str], wanted: str) -> None:
    """Replaces the first argument, the index of the platform, with a constant."""
    main = _main(module)
    block = main.entry_block
    index = platforms.index(wanted) if wanted in platforms else 0
    argument = block.arguments[0]
    with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
        value = ir.DenseElementsAttr.get_splat(
            argument.type,
            ir.IntegerAttr.get(ir.RankedTensorType(argument.type).element_type, index),
        )
        argument.replace_all_uses_with(stablehlo.constant(value))
    block.erase_argument(0)
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(main.type.inputs[1:], main.type.results)
    )
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(list(main.arg_attrs)[1:])


def _main(module: ir.Module) -> func.FuncOp:
    functions = (each for each in module.body if isinstance(each, func.FuncOp))
    return next(each for each in functions if each.name.value == "main")


def _values(types: Sequence[ir.Type], attributes: ir.ArrayAttr) -> list[_Value]:
    return [
        _Value(ir.RankedTensorType(kind), {a.name: a.attr for a in ir.DictAttr(given)})
        for kind, given in zip(types, attributes, strict=True)
    ]


def _mesh(module: ir.Module, values: list[_Value], devices: int, given: Mesh | None) -> Mesh:
    """Returns the mesh of a module. Raises ValueError if it is not the given one."""
    named = shardy_mesh(module)
    if named is None:
        if given is not None and given.size != devices:
            plural = "s"[: devices != 1]
            raise UserError(f"it was exported for {devices} device{plural}, not for `mesh={given}`")
        return gspmd_mesh([v.sharded for v in values], devices, given)
    if given is not None and given != named:
        raise UserError(f"it was exported for the mesh {named}, not for `mesh={given}`")
    return named


def _inputs(
    exported: jax_export.Exported, arguments: list[_Value], paths: list[str], mesh: Mesh
) -> tuple[Array, ...]:
    kept = [exported.in_avals[index] for index in exported.module_kept_var_idx]
    arrays = (_array(*each, mesh) for each in zip(paths, kept, arguments, strict=True))
    return tuple(dataclasses.replace(a, split=a.split or ((),) * len(a.shape)) for a in arrays)


def _outputs(exported: jax_export.Exported, results: list[_Value], mesh: Mesh) -> tuple[Array, ...]:
    arrays = []
    for index, (aval, result) in enumerate(zip(exported.out_avals, results, strict=True)):
        info = result.attributes.get("jax.result_info")
        name = "" if info is None else ir.StringAttr(info).value
        path = _dotted(name) if name else f"result[{index}]"
        arrays.append(_array(path, aval, result, mesh))
    return tuple(arrays)


def _array(path: str, aval: Any, value: _Value, mesh: Mesh) -> Array:
    """Returns the array of a value. Keys of random numbers are the integers that represent them."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return Array(
        path=path,
        shape=tuple(value.type.shape),
        dtype="uint32" if is_key else jnp.dtype(aval.dtype).name,
        split=split_of(*value.sharded, mesh),
    )
