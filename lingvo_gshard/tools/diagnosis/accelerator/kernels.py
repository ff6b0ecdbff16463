"""The checks of kernels: each one at a small size against its reference, and timed at a large one.

A new kernel is one entry of `CASES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from lingvo_gshard.core import UserError, context, tf
from lingvo_gshard.layers import DistanceBuckets, products
from lingvo_gshard.runtime import platform_of
from lingvo_gshard.sharding import hardware_of, is_interpreted
from lingvo_gshard.tools.diagnosis.accelerator import references, trials
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing
from lingvo_gshard.training import PRECISIONS
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.activation_call import ActivationCall
from lingvo_gshard.wings.kernels.cache_call import CacheCall
from lingvo_gshard.wings.kernels.call import AttentionCall
from lingvo_gshard.wings.low_precision import devices
from lingvo_gshard.wings.low_precision.rounding import ROUNDINGS

_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for a trial. If `is_large`, it is timed, and no reference is computed."""

    machine: trials.Machine
    platform: str
    is_large: bool = False
    with_gradient: bool = True
    draw: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(1))

    def of(self, small: Any, large: Any) -> Any:
        """Returns the size that is wanted of two."""
        return large if self.is_large else small

    def normal(self, *shape: int, exact: Any = None, scale: float = 1.0) -> np.ndarray:
        """Returns random numbers in the machine's type, which a type of 8 bits has exactly."""
        x = self.draw.standard_normal(shape, np.float32) * np.float32(scale)
        return (x if exact is None else x.astype(exact)).astype(np.dtype(self.machine.dtype))

    def expects(self, expected: Callable[[], Sequence[np.ndarray]]) -> Any:
        """Returns the reference, of small sizes alone."""
        return None if self.is_large else expected

    def obstacle(self, precision: str) -> str:
        """Returns why the device has no faster products in a precision; "" if it has them."""
        if is_interpreted(self.platform):
            return ""
        device = self.machine.devices[0]
        capability = getattr(device, "compute_capability", "")
        chosen = PRECISIONS[precision]
        try:
            devices.check_name(chosen, platform_of(device), device.device_kind, capability)
        except UserError:
            return f"{device.device_kind} has no faster products in {precision}"
        return ""


# A text says why the device cannot compute it.
Made: TypeAlias = "trials.Trial | str"
Make: TypeAlias = Callable[[Request], Made]


def _with_gradients(
    function: Callable[..., Sequence[tf.Tensor]], request: Request, differentiated: Sequence[int]
) -> Callable[..., list[Any]]:
    """Returns a function whose last argument is the gradient of its first result.

    If the request has gradients, it returns the gradients of `differentiated` arguments, too.
    """

    def compute(*arguments: tf.Tensor) -> list[Any]:
        *given, d_first = arguments
        sources = [given[index] for index in differentiated]
        with context.scope(training=True, seed=None), tf.GradientTape() as tape:
            tape.watch(sources)
            results = function(*given)
        if not request.with_gradient:
            return list(results)
        d_results = [d_first] * len(results)
        return [*results, *tape.gradient(results, sources, d_results)]

    return compute


def _specs(*arrays: np.ndarray) -> list[Any]:
    """Returns shapes and types of arrays, which is all that kernels ask for obstacles."""
    return [tf.TensorSpec(x.shape, x.dtype) for x in arrays]


def attention(call: AttentionCall, most_segments: int = 0) -> Make:
    """Returns what makes the trial of an attention. `most_segments` of a row are 0 if unknown."""

    def make(request: Request) -> Made:
        if most_segments and request.platform != "cuda":
            return "only cuDNN computes the segments of a row one by one"
        (rows, heads, shared, length, dim) = request.of((2, 4, 2, 256, 64), (4, 32, 8, 4096, 128))
        query = request.normal(rows, heads, length, dim, scale=dim**-0.5)
        keys, values = (request.normal(rows, shared, length, dim, scale=s) for s in (1.0, 0.5))
        d_mixed = request.normal(rows, heads, length, dim, scale=0.7)
        integers, learned = [], []
        if call.has_segments:
            numbers = np.arange(length, dtype=np.int32) // (length // 4 + 1) + 1
            integers = [np.tile(numbers, (rows, 1))] * 2
        if call.has_sinks:
            learned = [np.linspace(-1, 1, heads, dtype=np.float32)]
        if call.buckets is not None:
            shape = (heads, call.buckets.count)
            learned = [np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)]
        specs = _specs(query, keys, values)
        if reason := kernels.attention.obstacle(request.platform, call, *specs):
            return reason

        def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *others: tf.Tensor) -> list[tf.Tensor]:
            count = len(integers)
            given = others[:count], others[count:], most_segments
            return [kernels.attention.attend(call, q, k, v, *given)]

        operands = [query, keys, values, *integers, *learned, d_mixed]
        learned_at = range(3 + len(integers), 3 + len(integers) + len(learned))
        function = _with_gradients(attend, request, [0, 1, 2, *learned_at])
        return trials.Trial(
            function, operands, request.expects(lambda: references.attention(call, operands))
        )

    return make


def _groups(request: Request) -> tuple[int, np.ndarray]:
    """Returns the rows that there is room for, and the rows of each group."""
    share = np.array([3, 0, 1, 4, 2, 1, 3, 1], np.int32)
    sizes = share * request.of(16, 1024)
    # Rows after the last group are undefined, which a large trial would take for a failure.
    return int(sizes.sum()) + request.of(40, 0), sizes


def grouped_products(precision: str = "", hardware: str = "") -> Make:
    """Returns what makes the trial of two products of the same groups of rows, and of gradients.

    Args:
      precision: a precision of 8 bits that rounds factors; "" for none.
      hardware: the only hardware with kernels for it; "" for all.
    """

    def make(request: Request) -> Made:
        if hardware and hardware_of(request.platform) != hardware:
            return f"no kernel for {hardware_of(request.platform)} computes it"
        if precision and (reason := request.obstacle(precision)):
            return reason
        count, sizes = _groups(request)
        inner, outer = request.of((128, 256), (4096, 4096))
        exact = _E4M3 if precision else None
        exact_gradient = _E5M2 if precision == "fp8" else exact
        rows = request.normal(count, inner, exact=exact)
        weights = [
            request.normal(len(sizes), inner, outer, exact=exact, scale=scale)
            for scale in (0.5, -0.25)
        ]
        d_products = request.normal(count, outer, exact=exact_gradient)
        rounding = ROUNDINGS[precision].by_rows if precision else None

        def multiply(rows: tf.Tensor, *others: tf.Tensor) -> list[tf.Tensor]:
            *given, groups = others
            used = int(sizes.sum())
            return kernels.grouped.products(rows, given, groups, used, rounding=rounding)

        def expected() -> list[np.ndarray]:
            one, other = (references.grouped_products(rows, w, sizes, d_products) for w in weights)
            return [one[0], other[0], one[1] + other[1], one[2], other[2]]

        function = _with_gradients(multiply, request, [0, 1, 2])
        arguments = [rows, *weights, sizes, d_products]
        return trials.Trial(function, arguments, request.expects(expected))

    return make


_SWIGLU = ActivationCall("swiglu", gate_alpha=0.0, gate_limit=0.0, gate_offset=0.0)


def activated_products(request: Request) -> Made:
    """Makes the trial of products of rows that a swiglu activates, and of its gradients."""
    count, sizes = _groups(request)
    inner, outer = request.of((256, 128), (4096, 4096))
    hidden = [request.normal(count, inner, scale=scale) for scale in (1.0, 0.5)]
    weights = request.normal(len(sizes), inner, outer, scale=0.1)
    d_products = request.normal(count, outer)

    def multiply(gate: tf.Tensor, factor: tf.Tensor, weights: tf.Tensor, groups: tf.Tensor) -> list:
        used = int(sizes.sum())
        return [kernels.grouped.activated_product([gate, factor], weights, groups, _SWIGLU, used)]

    def expected() -> list[np.ndarray]:
        gate, factor = (each.astype(np.float64) for each in hidden)
        (activated,) = references.swiglu(gate, factor)
        product, d_activated, d_weights = references.grouped_products(
            activated, weights, sizes, d_products
        )
        _, *d_hidden = references.swiglu(gate, factor, d_activated)
        return [product, *d_hidden, d_weights]

    function = _with_gradients(multiply, request, [0, 1, 2])
    return trials.Trial(function, [*hidden, weights, sizes, d_products], request.expects(expected))


def cache_attention(request: Request) -> Made:
    """Makes the trial of the attention of new tokens to a cache, whose ring wraps around."""
    rows, heads, shared, slots, dim = request.of((4, 4, 2, 256, 64), (32, 32, 8, 8192, 128))
    query = request.normal(rows, heads, dim, scale=dim**-0.5)
    keys, values = (request.normal(rows, shared, slots, dim, scale=s) for s in (1.0, 0.5))
    newest = np.int32(slots // 3)
    reach = np.full(rows, slots - 1, np.int32)
    if not request.is_large:
        reach = np.array([0, slots // 4, slots - 1, slots // 2], np.int32)
    call = CacheCall()
    specs = _specs(query, keys, values)
    if reason := kernels.cache_attention.obstacle(request.platform, call, *specs):
        return reason
    operands = [query, keys, values, newest, reach]
    return trials.Trial(
        lambda *given: [kernels.cache_attention.attend(call, *given)],
        operands,
        request.expects(lambda: [references.cache_attention(call, operands)]),
        unit=trials.READ,
    )


def product(precision: str) -> Make:
    """Returns what makes the trial of a product whose factors a precision rounds to 8 bits.

    The factors are numbers that the type of 8 bits has, so that nothing is lost by rounding them.
    """

    def make(request: Request) -> Made:
        if reason := request.obstacle(precision):
            return reason
        size = request.of(256, 8192)
        exact = np.int8 if precision == "int8" else _E4M3
        scale = 20.0 if precision == "int8" else 1.0
        x, w = (request.normal(size, n, exact=exact, scale=scale) for n in (size, size + 256))
        if precision == "int8":
            # With the largest number in each row and column, all scales are 1.
            x[:, 0], w[0] = 127, 127

        def multiply(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
            rounding = ROUNDINGS[precision]
            with context.override_extension(products.ProductContext, rounding=rounding):
                return [products.multiply("BM,MH->BH", x, w)]

        def expected() -> list[np.ndarray]:
            return [x.astype(np.float64) @ w.astype(np.float64)]

        return trials.Trial(multiply, [x, w], request.expects(expected))

    return make


_CAUSAL = AttentionCall(is_causal=True)
_PACKED = AttentionCall(is_causal=True, has_segments=True)
# Names of kernels and products -> what makes their trials.
CASES: dict[str, Make] = {
    "attention, causal": attention(_CAUSAL),
    "attention, window": attention(AttentionCall(is_causal=True, window=100)),
    "attention, packed": attention(_PACKED),
    "attention, packed, most_segments": attention(_PACKED, most_segments=16),
    "attention, packed, window, most_segments": attention(
        AttentionCall(is_causal=True, window=100, has_segments=True), most_segments=16
    ),
    "attention, cap and sinks": attention(AttentionCall(window=100, logit_cap=2.0, has_sinks=True)),
    "attention, learned bias": attention(
        AttentionCall(is_causal=True, buckets=DistanceBuckets(8, 64, True))
    ),
    "attention over a cache": cache_attention,
    "grouped products": grouped_products(),
    "grouped products, swiglu": activated_products,
    "grouped products, fp8": grouped_products("fp8"),
    "grouped products, fp8_blocks": grouped_products("fp8_blocks", "cuda"),
    "product, fp8": product("fp8"),
    "product, mxfp8": product("mxfp8"),
    "product, int8": product("int8"),
}


def check(name: str, make: Make, machine: trials.Machine) -> Iterator[Check]:
    """Yields the checks of one case, for each platform whose kernels the first device computes."""
    one = machine.first()
    if not machine.kernel_platforms:
        yield Check(name, State.SKIPPED, "there are no kernels for these devices")
    for platform in machine.kernel_platforms:
        title = f"{name}, {hardware_of(platform)}" if is_interpreted(platform) else name
        request = Request(one, platform)
        trial = make(request)
        if isinstance(trial, str):
            yield Check(title, State.SKIPPED, trial)
            continue
        outcome = trials.run(trial, one, platform)
        timing = None
        if not machine.is_virtual:
            large, timing = _timed(name, make, dataclasses.replace(request, is_large=True))
            outcome = dataclasses.replace(
                outcome, error=float(np.maximum(outcome.error, large.error))
            )
        yield trials.judged(title, outcome, one.dtype, one, timing)


def _timed(name: str, make: Make, request: Request) -> tuple[trials.Outcome, Timing]:
    """Returns a large trial and its time, with what plans take of it."""
    trial = make(request)
    assert isinstance(trial, trials.Trial)
    whole = trials.run(trial, request.machine, request.platform)
    return whole, whole.timing(trial.unit, "; ".join(_points(name, make, request, whole)))


def _points(name: str, make: Make, request: Request, whole: trials.Outcome) -> Iterator[str]:
    """Yields what wings/planning/machines takes of a large trial."""
    attentions = [op.attention for op in whole.operations if op.attention]
    topology = request.machine.topology
    if attentions:
        alone = make(dataclasses.replace(request, with_gradient=False))
        assert isinstance(alone, trials.Trial)
        forward = trials.run(alone, request.machine, request.platform)
        pairs = {
            "forward": (forward.flops, forward.seconds),
            "gradient": (whole.flops - forward.flops, whole.seconds - forward.seconds),
        }
        first = attentions[0]
        for which, (flops, seconds) in pairs.items():
            key = f"{which}.{'cudnn' if first.is_cudnn else 'kernel'}, {first.keys} keys"
            yield f"{key}: {flops / seconds / 1e12:.0f} TFLOP/s"
    elif topology is not None and whole.flops:
        dtype = "fp8" if "fp8" in name else request.machine.dtype
        peak = topology.chip.peak_flops.get(dtype) or topology.chip.peak(request.machine.dtype)
        yield f"{name}: {whole.flops / whole.seconds / peak:.3f} of the peak"
