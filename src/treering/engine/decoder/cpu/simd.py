"""Provide explicit SIMD vectors for numba loops: an LLVM vector as a numba type.

numba leaves vectorisation to LLVM, which vectorises only long loops: in a row of 40 scores it computes 32 in vectors
and 8 one by one. These intrinsics make vectors explicit.

A vector has 64 bytes, 16 float32 or 8 float64, on every machine; machines with narrower registers use several. Arrays
must be contiguous, and indices count elements from the first, whatever the shape.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

NUM_BYTES = 64


class Vector(types.Type):
    """Numba type of a vector."""

    def __init__(self, dtype: Any) -> None:
        """Make the type for `dtype`, which is numba's float32 or float64."""
        self.dtype = dtype
        self.lanes = lanes_of(np.dtype(dtype.name))
        super().__init__(name=f"Vector({dtype.name})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        number = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


def lanes_of(dtype: np.dtype) -> int:
    """Return the number of elements of a vector.

    Example: 16 for float32.
    """
    return NUM_BYTES // dtype.itemsize


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """Return the number of elements of a vector with an array's dtype, as a compile-time constant."""
    size = lanes_of(np.dtype(array.dtype.name))
    return types.intp(array), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), size)


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """Load the vector at index `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, args), align=array.dtype.bitwidth // 8)

    return Vector(array.dtype)(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, at: Any, vector: Any) -> Any:
    """Store a vector at index `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature, args), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), generate


@intrinsic
def broadcast(typing: Any, number: Any) -> Any:
    """Broadcast a number to a vector."""
    vector = Vector(number)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _broadcast(builder, args[0], vector.lanes)

    return vector(number), generate


@intrinsic
def broadcast_from(typing: Any, array: Any, at: Any) -> Any:
    """Broadcast the element at index `at` to a vector."""
    vector = Vector(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(_data(context, builder, signature, args), [args[1]])
        return _broadcast(builder, builder.load(pointer), vector.lanes)

    return vector(array, types.intp), generate


@intrinsic
def muladd(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once if the machine has fused multiply-add."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _muladd(builder, *args)

    return a(a, a, a), generate


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return a(a, a), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def subtract(typing: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return a(a, a), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return a(a, a), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def divide(typing: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return a(a, a), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """Return the elementwise maximum; for NaN and a number, either."""
    return a(a, a), lambda context, builder, signature, args: _larger(builder, *args)


@intrinsic
def select(typing: Any, bits: Any, a: Any, b: Any) -> Any:
    """Return the elements of `a` where a bit is set (the lowest bit is the first element), of `b` elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.trunc(args[0], ir.IntType(a.lanes))
        return builder.select(builder.bitcast(number, ir.VectorType(ir.IntType(1), a.lanes)), args[1], args[2])

    return a(types.int64, a, a), generate


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """Return the largest element of a vector."""
    return a.dtype(a), lambda context, builder, signature, args: _reduce(builder, args[0], _larger)


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Return the sum of a vector, added pairwise by halves."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], lambda builder, x, y: builder.fadd(x, y))

    return a.dtype(a), generate


@intrinsic
def exponential(typing: Any, a: Any) -> Any:
    """Return e**a, within 2 units in the last place; clamped to normal numbers, and NaN stays NaN.

    Computes 2**n e**r with |r| <= ln(2) / 2. Adding 1.5 * 2**(mantissa bits) rounds to the integer n, leaving it in the
    lowest bits.
    """
    numbers = np.finfo(np.dtype(a.dtype.name))
    integer = ir.IntType(numbers.bits)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[0]

        def of(value: float) -> Any:
            return ir.Constant(x.type, [value] * a.lanes)

        bits_type = ir.VectorType(integer, a.lanes)
        lowest, highest = of(numbers.minexp * math.log(2)), of((numbers.maxexp - 1) * math.log(2))
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
        x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
        rounder = of(1.5 * 2.0**numbers.nmant)
        rounded = _muladd(builder, x, of(1 / math.log(2)), rounder)
        n = builder.fsub(rounded, rounder)
        high, low = _LN2[numbers.bits]
        r = builder.fsub(builder.fsub(x, builder.fmul(n, of(high))), builder.fmul(n, of(low)))
        order = _ORDER[numbers.bits]
        series = of(1 / math.factorial(order))
        for power in reversed(range(order)):
            series = _muladd(builder, series, r, of(1 / math.factorial(power)))
        bias, shift = (ir.Constant(bits_type, [count] * a.lanes) for count in (numbers.maxexp - 1, numbers.nmant))
        scale = builder.shl(builder.add(builder.bitcast(rounded, bits_type), bias), shift)
        return builder.fmul(series, builder.bitcast(scale, x.type))

    return a(a), generate


# ln 2 in two parts; the first has few bits, so that its integer multiples are exact.
_LN2 = {32: (0.693359375, -0.00021219444005469058), 64: (0.6931471803691238, 1.9082149292705877e-10)}
_ORDER = {32: 7, 64: 13}


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = signature.args[0]
    vector = ir.VectorType(context.get_value_type(array.dtype), lanes_of(np.dtype(array.dtype.name)))
    return builder.bitcast(builder.gep(_data(context, builder, signature, args), [args[1]]), vector.as_pointer())


def _data(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0]).data


def _broadcast(builder: Any, number: Any, size: int) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, size), ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), size), [0] * size))


def _muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fmuladd.v{a.type.count}{a.type.element.intrinsic_name}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Any) -> Any:
    size = vector.type.count
    index = ir.IntType(32)
    while size > 1:
        size //= 2
        low, high = (ir.Constant(ir.VectorType(index, size), list(range(first, first + size))) for first in (0, size))
        halves = builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high)
        vector = combine(builder, *halves)
    return builder.extract_element(vector, ir.Constant(index, 0))
