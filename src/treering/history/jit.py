"""Decorator of history's compiled functions, which caches them by a checksum, and the intrinsics that they share.

Numba checks a signed index for negative values unless it is a loop's own variable, so hot loops index with `np.uintp`.

Numba's on-disk cache notices a change in the file of a function, but not in the files that the function calls into. A
`stamped` function is compiled again when any file of this package changes.
"""

import math
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from treering.compiling.lean import kernel_of

_LINE = 64
"""Bytes of a cache line."""


def stamp_of(folder: Path) -> int:
    """Return a checksum of all Python files below a folder, file by file in the order of their paths."""
    stamp = 0
    for file in sorted(folder.rglob("*.py")):
        stamp = zlib.crc32(file.read_bytes(), stamp)
    return stamp


stamped = kernel_of(stamp_of(Path(__file__).parent))


@intrinsic(prefer_literal=True)
def copy_entries(_typing_context: Any, to: Any, line: Any, source: Any, num: Any) -> Any:
    """Copy the first `num` entries of one array to the beginning of a line of another; within compiled calls.

    A loop would copy one entry at a time, because the compiler cannot know that the arrays do not overlap. With a
    constant `num` this compiles to a few wide moves.

    Args:
        to: [N, K], written.
        line: line of `to`.
        source: [K], of the same type.
        num: a constant, at most K.

    Example: `copy_entries(output.features, 3, node.features, 24)` for `output.features[3, :24] = node.features[:24]`.
    """
    if not isinstance(num, types.IntegerLiteral) or to.dtype != source.dtype:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        written, read = (context.make_array(signature.args[k])(context, builder, arguments[k]) for k in (0, 2))
        number = context.cast(builder, arguments[1], signature.args[1], types.intp)
        begin = builder.mul(number, builder.extract_value(written.shape, 1))
        count = ir.Constant(begin.type, num.literal_value)
        num_bytes = context.get_abi_sizeof(context.get_data_type(to.dtype))
        cgutils.raw_memcpy(builder, builder.gep(written.data, [begin]), read.data, count, num_bytes)
        return context.get_dummy_value()

    return types.void(to, line, source, num), generate


@intrinsic
def pick(_typing_context: Any, which: Any, first: Any, second: Any, third: Any, at: Any) -> Any:
    """Return entry `at` of one of three arrays of one type, by a `which` of 0, 1 or 2; within compiled calls.

    It has no branch, because a branch on a value that varies between calls is often mispredicted and takes longer.

    Example: `pick(1, history, live, others, 40)` for `live[40]`.
    """
    if not first == second == third:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        datas = [context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (1, 2, 3)]
        number = arguments[0]
        is_first = builder.icmp_signed("==", number, number.type(0))
        is_second = builder.icmp_signed("==", number, number.type(1))
        data = builder.select(is_first, datas[0], builder.select(is_second, datas[1], datas[2]))
        index = context.cast(builder, arguments[4], signature.args[4], types.intp)
        return builder.load(builder.gep(data, [index]))

    return first.dtype(which, first, second, third, at), generate


@intrinsic
def prefetch(_typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch one entry of a 1-D array; within compiled calls. The index may be out of bounds.

    Example: `prefetch(text, 40)` before `text[40]` is read.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], signature.args[1], types.intp)
        address = builder.bitcast(builder.gep(view.data, [at]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # The arguments mean: read, kept in all caches, data.
        builder.call(call, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


class Memory:
    """Arrays of fixed shapes in one piece of memory, which is a single argument of a compiled call.

    numba takes a fifth of a microsecond to read an array argument, and half a second to compile what allocates one.

    Attributes:
        num_bytes: bytes of the arrays, each of which begins at a multiple of 64.
        arrays: within compiled calls, returns the arrays at an offset of a uint8 array.

    Example: for `Memory(Pair, counts=(np.int64, 3), sums=(np.float64, 3))`, `new()` is a `Pair` of two arrays, and
    `arrays(memory, 64)` within a compiled call is one whose counts are the bytes 64 to 87 of `memory`.
    """

    def __init__(self, record: type[Any], **arrays: tuple[Any, int | tuple[int, ...]]) -> None:
        """Take the dtype and shape of each field of a named tuple."""
        self._record = record
        self._arrays = [(np.dtype(dtype), np.broadcast_to(0, shape).shape) for dtype, shape in arrays.values()]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self._arrays]
        ends = list(accumulate(-(-size // _LINE) * _LINE for size in sizes))
        self._offsets, self.num_bytes = [0, *ends[:-1]], ends[-1]
        assert tuple(arrays) == record._fields
        self.arrays = self._intrinsic()

    def new(self) -> Any:
        """Return separate arrays for Python, uninitialised."""
        return self._record(*(np.empty(shape, dtype) for dtype, shape in self._arrays))

    def _intrinsic(self) -> Any:
        kinds = [types.Array(from_dtype(dtype), len(shape), "C") for dtype, shape in self._arrays]
        result = types.NamedTuple(kinds, self._record)

        @intrinsic
        def arrays(_typing_context: Any, memory: Any, first: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
                data = builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])
                made = [
                    _array_at(context, builder, kind, builder.gep(data, [ir.Constant(ir.IntType(64), offset)]), shape)
                    for kind, offset, (_, shape) in zip(kinds, self._offsets, self._arrays, strict=True)
                ]
                return context.make_tuple(builder, result, made)

            return result(memory, first), generate

        return arrays


def _array_at(context: Any, builder: Any, kind: Any, address: Any, shape: tuple[int, ...]) -> Any:
    """Return a numba array at an address, without reference counting."""
    array = context.make_array(kind)(context, builder)
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [math.prod(shape[axis + 1 :]) * size for axis in range(len(shape))]
    populate_array(
        array,
        data=builder.bitcast(address, array.data.type),
        shape=cgutils.pack_array(builder, [context.get_constant(types.intp, count) for count in shape]),
        strides=cgutils.pack_array(builder, [context.get_constant(types.intp, count) for count in strides]),
        itemsize=context.get_constant(types.intp, size),
        meminfo=None,
    )
    return array._getvalue()
