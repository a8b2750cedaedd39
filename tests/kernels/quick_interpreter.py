"""A plugin of pytest that saves Triton's interpreter work which it does again and again.

When a kernel begins, the interpreter puts its own functions into `triton.language`. It does so anew
for every call of one function by another, and makes a table of all types for every value.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_np_dtype_of = interpreter._get_np_dtype
_found: dict[str, Any] = {}  # by the name of the type, since types of pointers have no hash


_modules: set[str] = set()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if function.fn.__module__ not in _modules:  # Triton's own have another name for the language
        _modules.add(function.fn.__module__)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _np_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _found:
        _found[name] = _np_dtype_of(dtype)
    return _found[name]


interpreter.InterpretedFunction.__call__ = _call
interpreter._get_np_dtype = _np_dtype
