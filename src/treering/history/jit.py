"""How history's compiled functions are compiled, and the intrinsics that they share.

`lean` functions make no arrays, so numba counts no references in them: counting takes atomic operations, which is most
of the time in loops of a few nanoseconds. Numba also checks a signed index for negative values unless it is a loop's
own variable, so hot loops index with `np.uintp`.

`STAMP` keys numba's on-disk cache. The cache notices a change in the file of a function, but not in the files that the
function calls into; a compiled function that closes over the stamp is compiled again when any file of this package
changes.
"""

import zlib
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def stamp_of(folder: Path) -> int:
    """A checksum of all Python files below a folder, file by file in the order of their paths."""
    stamp = 0
    for file in sorted(folder.rglob("*.py")):
        stamp = zlib.crc32(file.read_bytes(), stamp)
    return stamp


STAMP = stamp_of(Path(__file__).parent)


@intrinsic(prefer_literal=True)
def copy_entries(_typing_context: Any, to: Any, line: Any, source: Any, num: Any) -> Any:
    """Copies the first `num` entries of one array to the beginning of a line of another; within compiled calls.

    A loop copies one entry at a time, because the compiler cannot know that the arrays do not overlap. For a constant
    `num` this compiles to a few wide moves.

    Args:
        to: [N, K], written.
        line: of `to`.
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
    """Entry `at` of one of three arrays of one type, by a `which` of 0, 1 or 2; within compiled calls.

    Branchless: a branch on a value that varies between calls is often mispredicted, which takes longer.

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
        place = context.cast(builder, arguments[4], signature.args[4], types.intp)
        return builder.load(builder.gep(data, [place]))

    return first.dtype(which, first, second, third, at), generate


@intrinsic
def prefetch(_typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetches one entry of a one-dimensional array; within compiled calls. The index may be out of bounds.

    Example: `prefetch(text, 40)` before `text[40]` is read.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], signature.args[1], types.intp)
        address = builder.bitcast(builder.gep(view.data, [at]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # Read, kept in all caches, data.
        builder.call(call, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate
