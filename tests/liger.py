"""Run the kernels of liger-kernel in Triton's interpreter, which lacks two things that they use."""

import numpy as np
import pytest


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add numbers of type float32 and the functions of libdevice to the interpreter; skip without liger-kernel."""
    pytest.importorskip("liger_kernel")
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    import triton.language as tl
    from triton.runtime import interpreter

    if not interpreter_is_on():
        pytest.skip("the kernels are compiled here")
    stock = interpreter._implicit_cvt

    def with_floats(value: object) -> object:
        if not isinstance(value, float):
            return stock(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    # Looked up in each call, because the interpreter replaces them while a kernel runs.
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def interpreter_is_on() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
