"""Entries of arrays, moved and chosen as loops and branches are not compiled to.

Knows arrays. Knows nothing of what they hold.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic(prefer_literal=True)
def copy_entries(_typing_context: Any, to: Any, line: Any, source: Any, num: Any) -> Any:
    """Copies the first `num` entries of one array to the beginning of a line of another; within compiled calls.

    A loop copies one entry after another, as nothing tells the compiler that the arrays are not the same. Of a number
    that is known when it compiles this makes a few wide moves.

    Args:
        to: [N, K], written.
        line: of `to`.
        source: [K], of the same type.
        num: a constant, at most K.

    Example: `copy_entries(output.features, 3, bud.features, 24)` for `output.features[3, :24] = bud.features[:24]`.
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

    A branch on what differs from one time to the next is guessed wrong every few times, which takes longer than all of
    this.

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
