"""Layer: the building block of models, with named child layers and weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from lingvo_gshard.core import context, letters, random_numbers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.initializers import Initializer
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import RECOMPUTED_SCOPE

UpdateRule: TypeAlias = "Callable[[tf.Tensor, tf.Tensor], tf.Tensor]"
Method = TypeVar("Method", bound=Callable)

_IS_LAYER_METHOD = "_is_layer_method"

# The roles that a weight can have in its layer.
MATRIX, TABLE, BIAS, SCALE = "matrix", "table", "bias", "scale"
ROLES = {
    MATRIX: "Activations are multiplied with it and summed over.",
    TABLE: "Rows that are looked up, such as embeddings.",
    BIAS: "Added to activations or logits.",
    SCALE: "Activations are multiplied with it elementwise.",
}


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """The declaration of a weight.

    Attributes:
      path: Path of the weight, such as "encoder.layers[0].w".
      shape: Shape of the weight.
      dtype: Name of the type.
      unsplit: Letters of the layout that no strategy splits.
      slices: For a stack of the weights of several layers, the paths of these weights in row-major
        order of the stacked dimensions.
      update_rule: For a weight that no optimizer updates: maps the weight and the value reported
        by `Layer.report_update` to the weight after the step.
      inputs: Letters that products of activations with the weight sum over, in the layout's order.
        Empty if layers use the weight otherwise.
      is_frozen: Whether the weight is not trained unless the optimizer's Params say so.
      is_measured: Whether the array is no weight, but what training steps measure beside one; see
        `context.Context.beside`. Its gradient is a measurement: of several, the largest counts.
      role: What the weight is to its layer, one of ROLES. Weight decay depends on it. Empty: a
        scalar, a vector, or one vector for each expert is a bias, any other weight a matrix.
      learning_rate_factor: Factor of the learning rate. Weight decay does not depend on it.
    """

    path: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    initializer: Initializer
    unsplit: str = ""
    slices: tuple[str, ...] = ()
    update_rule: UpdateRule | None = None
    inputs: str = ""
    is_frozen: bool = False
    is_measured: bool = False
    role: str = ""
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.role:
            role = BIAS if is_vector(self.layout) else MATRIX
            object.__setattr__(self, "role", role)

    @property
    def stacked(self) -> int:
        """Number of leading dimensions that stack the weights of several layers."""
        return len(self.layout) - len(self.layout.lstrip(letters.STACKS)) if self.slices else 0

    def init(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns the initial weight, which depends only on the seed and the path.

        Every slice of a stack depends on its own path.

        Args:
          seed: int32 [2] key.
        """
        dtype = tf.as_dtype(self.dtype)
        if not self.slices:
            key = random_numbers.fold_in(seed, self.path)
            return self.initializer(self.shape, dtype, key)

        def init_slice(word: tf.Tensor) -> tf.Tensor:
            key = random_numbers.fold_in_word(seed, word)
            return self.initializer(self.shape[self.stacked :], dtype, key)

        words = tf.constant([random_numbers.word(path) for path in self.slices], tf.int32)
        return tf.reshape(tf.map_fn(init_slice, words, fn_output_signature=dtype), self.shape)


def is_vector(layout: str) -> bool:
    """Returns whether a layout is for a scalar or a vector, or for a stack of such weights."""
    return len(layout.lstrip(letters.WEIGHT_BATCH)) < 2


def layer_method(method: Method) -> Method:
    """Decorates a method of a layer so that its operations carry the layer's path.

    The path is the name scope of the operations, such as `encoder/layers_0/dense`, which XLA's
    reports show. It is also `context.layer_path()`, which selects sharding overrides. A method that
    overrides a decorated method must be decorated, too. Otherwise defining the class raises a
    TypeError.
    """

    @functools.wraps(method)
    def run(self: Layer, *args: Any, **kwargs: Any) -> Any:
        with context.override(layer_path=self.path) as here, _name_scope(self.path):
            result = method(self, *args, **kwargs)
            if here.on_result is not None:
                here.on_result(self.path, method.__name__, result)
            return result

    setattr(run, _IS_LAYER_METHOD, True)
    return cast(Method, run)


def check_layer_methods(cls: type) -> None:
    """Raises TypeError if a new class overrides a @layer_method without the decorator."""
    for name, value in vars(cls).items():
        overridden = getattr(super(cls, cls), name, None)
        if hasattr(overridden, _IS_LAYER_METHOD) and not hasattr(value, _IS_LAYER_METHOD):
            raise TypeError(
                f"{cls.__name__}.{name} overrides a @layer_method and lacks the decorator. "
                "Its operations would not carry the layer's path."
            )


class Layer(Configurable):
    """A function of weights and inputs, with named child layers and weights.

    A subclass declares children and weights in __init__ and computes in fprop. The tree of weights
    is called theta:

        class Dense(Layer):
            def __init__(self, params, path=""):
                super().__init__(params, path)
                sizes = {"M": self.p.input_dim, "H": self.p.output_dim}
                self.create_variable("w", "MH", sizes, initializers.fan_in(self.p.input_dim))

            @layer_method
            def fprop(self, theta, x_BLM):
                return einsum("BLM,MH->BLH", x_BLM, theta.w)
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        check_layer_methods(cls)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("dtype", "", "Type of the weights. Empty: the parent's type, float32 at the root.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params.copy().set(dtype=params.dtype or "float32"))
        self.path = path
        self._children: dict[str, Layer | list[Layer]] = {}
        self._variables: dict[str, VariableSpec] = {}

    @property
    def children(self) -> dict[str, Layer | list[Layer]]:
        """Child layers, or lists of child layers, by name in the order of creation."""
        return dict(self._children)

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """The weights of this layer without its children's, by name in the order of creation."""
        return dict(self._variables)

    def create_child(self, name: str, params: Params) -> None:
        """Creates a child layer `self.<name>`, whose weights are `theta.<name>`."""
        self._check_new(name)
        self._children[name] = self._create(params, self._join(name))

    def create_children(self, name: str, params: list[Params]) -> None:
        """Creates child layers `self.<name>[i]`, whose weights are `theta.<name>[i]`."""
        self._check_new(name)
        self._children[name] = [
            self._create(p, f"{self._join(name)}[{index}]") for index, p in enumerate(params)
        ]

    def create_variable(
        self,
        name: str,
        layout: str,
        sizes: dict[str, int],
        initializer: Initializer,
        unsplit: str = "",
        update_rule: UpdateRule | None = None,
        inputs: str = "",
        role: str = "",
        is_frozen: bool = False,
    ) -> None:
        """Declares a weight `theta.<name>`.

        Args:
          layout: One letter for each dimension, see core/letters.py.
          sizes: The size of each letter.
          unsplit: Letters of the layout that no strategy may split.
          update_rule: Updates the weight in place of the optimizer, see `report_update`. Such a
            weight is float32, since its updates may be small.
          inputs: Letters that `layers.products.product` sums over, in the layout's order.
          role: What the weight is to the layer, one of ROLES; see `VariableSpec` for the default.
          is_frozen: Whether the weight has no gradient, so that the optimizer leaves it as it is.

        Raises:
          ValueError: A letter, a size or the role is not as described.
        """
        self._check_new(name)
        path = self._join(name)
        try:
            letters.check_layout(layout, None, may_be_unnamed=False)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for letter in layout:
            if sizes.get(letter, 0) < 1:
                raise ValueError(
                    f"{path}: dimension {letter!r} of layout {layout!r} has size "
                    f"{sizes.get(letter)}; expected a positive size"
                )
        for kind, given in (("unsplit", unsplit), ("input", inputs)):
            for letter in given:
                if letter not in layout:
                    where = f"{path}: {kind} letter {letter!r}"
                    raise ValueError(f"{where} is not in layout {layout!r}")
        if role and role not in ROLES:
            raise ValueError(f"{path}: role is {role!r}. {names.nearest(role, ROLES)}")
        self._variables[name] = VariableSpec(
            path=path,
            layout=layout,
            shape=tuple(sizes[letter] for letter in layout),
            dtype="float32" if update_rule else self.p.dtype,
            initializer=initializer,
            unsplit=unsplit,
            update_rule=update_rule,
            inputs=inputs,
            role=role,
            is_frozen=is_frozen,
        )

    @property
    def has_manual_regions(self) -> bool:
        """Whether the layer itself computes in manual regions on a mesh; see sharding/manual.py."""
        return False

    def all_layers(self) -> Iterator[Layer]:
        """Yields this layer and all its descendants."""
        yield self
        for child in self.child_layers():
            yield from child.all_layers()

    def layer_paths(self) -> list[str]:
        """Returns the paths of this layer and of all its descendants."""
        return [layer.path for layer in self.all_layers()]

    def variable_specs(self) -> NestedMap:
        """Returns the declarations of all weights, in the structure of theta."""
        specs = NestedMap(self._variables)
        if beside := context.current().beside:
            specs.update(beside(self))
        for name, child in self._children.items():
            if isinstance(child, list):
                specs[name] = [c.variable_specs() for c in child]
            else:
                specs[name] = child.variable_specs()
        return specs

    def init(self, seed: int | tf.Tensor) -> NestedMap:
        """Returns initial weights, which depend only on the seed and the weights' paths.

        Args:
          seed: An int, or an int32 [2] key.
        """
        if isinstance(seed, int):
            seed = tf.constant([seed & 0x7FFFFFFF, 0], tf.int32)
        return self.variable_specs().transform(lambda spec: spec.init(seed))

    @layer_method
    def fprop(self, theta: NestedMap, *args: Any, **kwargs: Any) -> Any:
        """Computes the layer's output as a pure function of theta, inputs and context."""
        raise NotImplementedError(f"{type(self).__name__} defines no fprop")

    @classmethod
    def for_stack(cls, params: Params, is_causal: bool, has_token_ids: bool) -> Params:
        """Returns Params adapted to a Transformer stack. The default returns them unchanged.

        Args:
          is_causal: Whether a position of the stack must not depend on later ones.
          has_token_ids: Whether callers of the stack set `token_context.tokens`.
        """
        del is_causal, has_token_ids
        return params

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that prevents computing several stages as one operation, or "".

        `Pipeline` computes all of its stages as one operation (`wings/pipeline/vectorize.py`).
        """
        del params
        return ""

    def child_layers(self) -> list[Layer]:
        """Returns the direct children in the order of creation, with lists flattened."""
        return [
            layer
            for child in self._children.values()
            for layer in (child if isinstance(child, list) else [child])
        ]

    def observe(self, output: tf.Tensor) -> tf.Tensor:
        """Reports the layer's output to `on_output` of the context, and returns it."""
        context.current().observe(self.path, output)
        return output

    def observe_named(self, name: str, compute: Callable[[], tf.Tensor]) -> None:
        """Reports another tensor to `on_output` of the context, as `<path>/<name>`.

        Args:
          compute: Computes the tensor. It is called only if the context has an `on_output`.
        """
        pass_under_way = context.current()
        if pass_under_way.on_output is not None:
            pass_under_way.observe(self._join_metric(name), compute())

    def random_seed(self, purpose: str) -> tf.Tensor:
        """Returns this layer's int32 [2] random key for one purpose in the current pass."""
        return context.current().random_seed(f"{self._join(purpose)}")

    def add_loss(self, name: str, value: tf.Tensor, weight: tf.Tensor | float | None = 1.0) -> None:
        """Adds a scalar to the training loss under this layer's path.

        Args:
          weight: Number of items that the value is a mean over, such as tokens. The loss of a batch
            that is computed in parts is the mean of their losses by this weight. By default all
            parts count equally. None: the value is a sum, and so is the batch's.
        """
        context.current().add_loss(self._join_metric(name), value, weight)

    def report_update(self, name: str, weight: tf.Tensor, value: tf.Tensor) -> None:
        """Passes a value to the update rule of a weight.

        The value becomes the weight's gradient, by means of an auxiliary loss that is zero. So it
        is summed over devices and over all parts of a batch, and stacked in loops, as gradients
        are.

        Args:
          value: Tensor of the weight's shape.
        """
        carrier = tf.stop_gradient(value) * (weight - tf.stop_gradient(weight))
        self.add_loss(name, tf.reduce_sum(carrier), weight=None)

    def add_metric(self, name: str, value: tf.Tensor, weight: tf.Tensor | float = 1.0) -> None:
        """Reports a scalar metric under this layer's path.

        Args:
          weight: Weight of the value in averages over steps.
        """
        context.current().add_metric(self._join_metric(name), value, weight)

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_children", {})
        if name in children:
            return children[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or child {name!r}")

    def _create(self, params: Params, path: str) -> Layer:
        params = params.copy().set(dtype=params.dtype or self.p.dtype)
        return params.instantiate(path=path)

    def _join(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _join_metric(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def _check_new(self, name: str) -> None:
        if name in self._children or name in self._variables:
            raise ValueError(f"{self._join(name)} is already a child or weight of this layer")


def stop_frozen(specs: Sequence[VariableSpec], weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns weights, those without a gradient for the frozen ones of the context."""
    frozen = context.current().frozen
    pairs = zip(specs, weights, strict=True)
    return [tf.stop_gradient(w) if spec.path in frozen else w for spec, w in pairs]


def scope_name(path: str) -> str:
    """Returns the name scope of a layer: `encoder/layers_0` for the path `encoder.layers[0]`."""
    name = re.sub(r"[^\w.\-]", "_", path.replace("]", ""), flags=re.ASCII).replace(".", "/")
    return name.lstrip("_-/")


@contextlib.contextmanager
def _name_scope(path: str) -> Iterator[None]:
    """Opens the absolute name scope of a layer, unless it is the root or already open."""
    name = scope_name(path)
    if name and context.current().is_recomputing:
        name = f"{RECOMPUTED_SCOPE}/{name}"
    if not name or f"{tf.get_current_name_scope()}/".startswith(f"{name}/"):
        yield
        return
    with tf.name_scope(f"{name}/"):
        yield
