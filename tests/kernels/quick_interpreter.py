"""A plugin of pytest that saves Triton's interpreter work which it does again and again.

When a kernel begins, the interpreter puts its own functions into `triton.language`. It does so anew
for every call of one function by another, and makes a table of all types for every value. Each
value gets a shape of its own, and each type of a block a name. Values of one shape are made
compatible as if they had two, and each value's bytes are compared with its type's. Sums of integers
are computed once more in 64 bits and compared, for a message that is shown in debugging only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.language import core, semantic
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


_init_block_type = core.block_type.__init__
_init_tensor = core.tensor.__init__
_types: dict[tuple[int, ...], dict[str, Any]] = {}  # what types of one shape share
_values: dict[tuple[int, ...], dict[str, Any]] = {}


def _shaped_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
    if sizes not in _types:
        _init_block_type(self, element_ty, shape)
        _types[sizes] = {"shape": self.shape, "numel": self.numel, "sizes": sizes}
    self.__dict__.update(_types[sizes])
    self.element_ty = element_ty


def _name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _shaped_value(self: Any, handle: Any, type: Any) -> None:
    sizes = getattr(type, "sizes", ())
    if sizes not in _values:
        _init_tensor(self, handle, type)
        _values[sizes] = {"shape": self.shape, "numel": self.numel}
    self.__dict__.update(_values[sizes])
    self.handle, self.type, self.dtype = handle, type, type.scalar


_broadcast = semantic.TritonSemantic.broadcast_impl_value


def _broadcast_unlike(self: Any, one: Any, other: Any) -> Any:
    if getattr(one.type, "sizes", ()) == getattr(other.type, "sizes", ()):
        return one, other
    return _broadcast(self, one, other)


core.block_type.__init__ = _shaped_type
core.block_type.name = property(_name, lambda self, name: None)
core.tensor.__init__ = _shaped_value
_builder = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
semantic.TritonSemantic.broadcast_impl_value = _broadcast_unlike
interpreter.TensorHandle.__post_init__ = lambda self: None
interpreter.InterpretedFunction.__call__ = _call
interpreter._get_np_dtype = _np_dtype
