"""Memory that will be read soon, asked for before it is needed.

Places of a text lie far apart, and each is a wait for memory unless several are on their way at once. Knows nothing of
what is read; results never depend on it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def prefetch(_typing_context: Any, array: Any, index: Any) -> Any:
    """Asks for one entry of a one-dimensional array; within compiled calls. The index may lie outside.

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
