"""A plugin of pytest that saves Triton's interpreter work which it does again and again.

When a kernel begins, the interpreter puts its own functions into `triton.language`. It does so anew
for every call of one function by another, and makes a table of all types for every value. Each
value gets a shape of its own, and each type of a block a name. Values of one shape are made
compatible as if they had two, and each value's bytes are compared with its type's. Sums of integers
are computed once more in 64 bits and compared, for a message that is shown in debugging only. The
type of a result is found anew for every operation, though the types of two values decide it.
"""

from __future__ import annotations

import dataclasses
import math
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
_shapes: dict[tuple[int, ...], dict[str, Any]] = {}  # what types of one shape share
_types: dict[tuple[tuple[int, ...], str], Any] = {}  # by shape and the name of their elements' type
_values: dict[tuple[int, ...], tuple[Any, Any]] = {}  # shape and number of elements of values


def _shaped_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
    if sizes not in _shapes:
        _init_block_type(self, element_ty, shape)
        _shapes[sizes] = {"shape": self.shape, "numel": self.numel, "sizes": sizes}
    self.__dict__.update(_shapes[sizes])
    self.element_ty = element_ty


def _with_element_type(self: Any, element_ty: Any) -> Any:
    key = (self.sizes, element_ty.name)
    if key not in _types:
        _types[key] = core.block_type(element_ty, self.shape)
    return _types[key]


def _name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _shaped_value(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _shape_of(value: Any) -> tuple[Any, Any]:
    sizes = getattr(value.type, "sizes", ())
    if sizes not in _values:
        shape = core.tuple([core.constexpr(each) for each in sizes])
        _values[sizes] = shape, core.constexpr(math.prod(sizes))
    return _values[sizes]


_broadcast = semantic.TritonSemantic.broadcast_impl_value


def _broadcast_unlike(self: Any, one: Any, other: Any) -> Any:
    if getattr(one.type, "sizes", ()) == getattr(other.type, "sizes", ()):
        return one, other
    return _broadcast(self, one, other)


# Two values of such a type have a result of this type, whatever the operation.
_PLAIN = {"fp32", "int1", "uint8", "int32", "int64"}
_check_types = semantic.TritonSemantic.binary_op_type_checking_impl
_constants: dict[tuple[Any, ...], Any] = {}


def _constant(self: Any, number: Any, dtype: Any, *allowed: Any) -> Any:
    """The number as a value of this type, or None if the value beside it needs another type."""
    key = (type(number), number, dtype.name, *allowed)
    if key not in _constants:
        beside = core.tensor(self.builder.get_null_value(dtype.to_ir(self.builder)), dtype)
        checked, constant = _check_types(self, beside, number, *allowed)
        is_same = checked is beside and not dtype.is_ptr()
        if is_same:
            constant.handle.data.setflags(write=False)  # it is used again
        _constants[key] = constant if is_same else None
    return _constants[key]


def _checked(
    self: Any,
    one: Any,
    other: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    allowed = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    if type(one) is core.tensor:
        if type(other) is core.tensor:
            name, other_name = one.dtype.name, other.dtype.name
            is_offset = allow_lhs_ptr and one.dtype.is_ptr() and other_name in ("int32", "int64")
            if is_offset or (name == other_name and name in _PLAIN):
                return _broadcast_unlike(self, one, other)
        elif one.dtype.name in _PLAIN and isinstance(other, int | float):
            constant = _constant(self, other, one.dtype, *allowed)
            if constant is not None:
                return _broadcast_unlike(self, one, constant)
    return _check_types(self, one, other, *allowed)


_unwrap = core._unwrap_if_constexpr


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind is core.tensor else _unwrap(value)


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Without a look at whether the caller gave what the interpreter gives."""
    function = getattr(member, "__wrapped__", member)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, called)


def _binary(self: Any, one: Any, other: Any, operation: Any) -> Any:
    output = operation(one.data, other.data)
    dtype = one.dtype.scalar
    if output.dtype != one.data.dtype and not interpreter._validate_np_data_size(output, dtype):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


core.block_type.__init__ = _shaped_type
core.block_type.name = property(_name, lambda self, name: None)
core.block_type.with_element_ty = _with_element_type
core.tensor.__init__ = _shaped_value
core.tensor.shape = property(lambda self: _shape_of(self)[0])
core.tensor.numel = property(lambda self: _shape_of(self)[1])
core._unwrap_if_constexpr = _unwrapped
_builder = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
interpreter.InterpreterBuilder.binary_op = _binary
semantic.TritonSemantic.broadcast_impl_value = _broadcast_unlike
semantic.TritonSemantic.binary_op_type_checking_impl = _checked
interpreter.TensorHandle.__post_init__ = lambda self: None
interpreter.InterpretedFunction.__call__ = _call
interpreter._get_np_dtype = _np_dtype
interpreter._patch_attr = _patch_attribute
