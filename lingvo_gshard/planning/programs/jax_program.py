"""Makes a Program of what `jax.export` exported, with the shardings that it was exported with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import func, ir, jax, jax_export, jnp, mlir, stablehlo
from lingvo_gshard.planning.programs import module_shardings
from lingvo_gshard.planning.programs.argument_names import argument_paths, result_path
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program, writers_versions
from lingvo_gshard.sharding.mesh import Mesh

_DONATED = ("jax.buffer_donor", "tf.aliasing_output")
# Shardings as jax wrote them into files before Shardy was its default partitioner.
_OLD_SHARDINGS = "xla.sdy.meshes"


@dataclasses.dataclass(frozen=True)
class _Value:
    """An argument or a result of a module's main function."""

    type: ir.RankedTensorType
    attributes: Mapping[str, ir.Attribute]

    @property
    def sharded(self) -> module_shardings.Sharded:
        return module_shardings.sharding_of(self.attributes), self.type.rank


def to_program(
    exported: jax_export.Exported, where: str, platform: str, mesh: Mesh | None = None
) -> Program:
    """Returns an exported jax function as a Program of the arguments that it uses.

    Args:
      exported: the function.
      where: the file or the function, for messages.
      platform: the platform that it will be compiled for: "tpu", "cuda" or "cpu". A function that
        was not exported for it is taken as it was exported for its first platform.
      mesh: the mesh that it must have; None takes the exported one.

    Raises:
      UserError: the function cannot be planned, or has another mesh; names `where`.
    """
    try:
        return _to_program(exported, platform, mesh)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _to_program(exported: jax_export.Exported, platform: str, given: Mesh | None) -> Program:
    _check(exported)
    with mlir.make_ir_context() as context:
        module = _parsed(exported, context)
        if len(exported.platforms) > 1:
            _choose_platform(module, exported.platforms, platform)
        main = _main(module)
        arguments = _values(main.type.inputs, main.arg_attrs)
        results = _values(main.type.results, main.result_attrs)
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
            partitioner="gspmd" if _is_gspmd(module) else "shardy",
            versions=writers_versions(),
        )


def _check(exported: jax_export.Exported) -> None:
    """Raises ValueError if a function has no fixed shapes, has effects or is of a newer jax."""
    newest = jax_export.maximum_supported_calling_convention_version
    if exported.calling_convention_version > newest:
        raise UserError(
            f"it has jax's calling convention {exported.calling_convention_version}, and jax "
            f"{jax.__version__} reads up to {newest}. Install a newer jax"
        )
    if exported.ordered_effects:
        raise UserError("it has ordered effects, such as callbacks, which cannot be planned")
    for aval in exported.in_avals:
        if not all(isinstance(size, int) for size in aval.shape):
            shape = ", ".join(map(str, aval.shape))
            raise UserError(
                f"an argument has the symbolic shape ({shape}); export it with fixed shapes"
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


def _values(types: Sequence[ir.Type], attributes: Sequence[ir.Attribute]) -> list[_Value]:
    return [
        _Value(ir.RankedTensorType(kind), {a.name: a.attr for a in ir.DictAttr(given)})
        for kind, given in zip(types, attributes, strict=True)
    ]


def _is_gspmd(module: ir.Module) -> bool:
    return all(operation.operation.name != "sdy.mesh" for operation in module.body)


def _mesh(module: ir.Module, values: list[_Value], devices: int, given: Mesh | None) -> Mesh:
    """Returns the mesh of a module. Raises ValueError if it is not the given one."""
    named = module_shardings.shardy_mesh(module)
    if named is None:
        if given is not None and given.size != devices:
            plural = "s"[: devices != 1]
            raise UserError(f"it was exported for {devices} device{plural}, not for --mesh={given}")
        return module_shardings.gspmd_mesh([v.sharded for v in values], devices, given)
    if given is not None and given != named:
        raise UserError(f"it was exported for the mesh {named}, not for --mesh={given}")
    return named


def _inputs(
    exported: jax_export.Exported, arguments: list[_Value], paths: list[str], mesh: Mesh
) -> tuple[Array, ...]:
    kept = [exported.in_avals[index] for index in exported.module_kept_var_idx]
    arrays = []
    for aval, argument, path in zip(kept, arguments, paths, strict=True):
        array = _array(path, aval, argument, mesh)
        whole = ((),) * len(array.shape)
        arrays.append(dataclasses.replace(array, split=array.split or whole))
    return tuple(arrays)


def _outputs(exported: jax_export.Exported, results: list[_Value], mesh: Mesh) -> tuple[Array, ...]:
    arrays = []
    for index, (aval, result) in enumerate(zip(exported.out_avals, results, strict=True)):
        info = result.attributes.get("jax.result_info")
        path = result_path("" if info is None else ir.StringAttr(info).value, index)
        arrays.append(_array(path, aval, result, mesh))
    return tuple(arrays)


def _array(path: str, aval: Any, value: _Value, mesh: Mesh) -> Array:
    """Returns the array of a value. Keys of random numbers are the integers that represent them.

    Args:
      path: its name.
      aval: its shape and dtype, as jax exports them.
      value: the value in the module.
      mesh: the program's mesh.
    """
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return Array(
        path=path,
        shape=tuple(value.type.shape),
        dtype="uint32" if is_key else jnp.dtype(aval.dtype).name,
        split=module_shardings.split_of(*value.sharded, mesh),
    )
