"""A small typed emitter over LLVM: kernels written as Python, specialised to shapes, compiled in milliseconds.

A kernel is a function of one address, that of an array of int64 slots (addresses and counts). Memory is reached by
address; vectors are ordinary values, so `a * b + c` works on `f32` and on eight of them alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

Number = int | float


@dataclass(frozen=True)
class Type:
    """`lanes` elements of "i1", "i8", "i16", "i32", "i64" or "f32"."""

    element: str
    lanes: int = 1

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return int(self.element[1:])

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.bits * self.lanes // 8

    @property
    def ir(self) -> Any:
        """The LLVM type."""
        ir, _ = _llvmlite()
        scalar = ir.FloatType() if self.element == "f32" else ir.IntType(self.bits)
        return scalar if self.lanes == 1 else ir.VectorType(scalar, self.lanes)

    def x(self, lanes: int) -> Type:
        """The same element, `lanes` of them."""
        return Type(self.element, lanes)


I8, I16, I32, I64, F32 = (Type(name) for name in ("i8", "i16", "i32", "i64", "f32"))
LANES = 8
F32x8, I32x8 = F32.x(LANES), I32.x(LANES)


@dataclass(frozen=True)
class Target:
    """What code is made for.

    Attributes:
        name: LLVM's name of the processor.
        features: LLVM's feature string.
        avx2: 256-bit integer operations may be named; else only portable ones are.
    """

    name: str
    features: str
    avx2: bool


@cache
def host() -> Target:
    """The processor this runs on."""
    _, binding = _llvmlite()
    features = binding.get_host_cpu_features()
    return Target(binding.get_host_cpu_name(), features.flatten(), bool(features.get("avx2")))


PORTABLE = Target("generic", "", avx2=False)
"""Any processor of this machine's kind: the fallback, and what tests compare with."""


class Value:
    """A value of a kernel; arithmetic with Python numbers spreads them over the lanes."""

    def __init__(self, emitter: Emitter, type: Type, ir: Any) -> None:
        self.emitter = emitter
        self.type = type
        self.ir = ir

    def _binary(self, other: Value | Number, integer: str, floating: str | None) -> Value:
        name = floating if self.type.element == "f32" else integer
        assert name is not None, f"no such operation on {self.type}"
        other = self.emitter.constant(self.type, other) if not isinstance(other, Value) else other
        assert other.type == self.type, f"{self.type} and {other.type}"
        return Value(self.emitter, self.type, getattr(self.emitter.builder, name)(self.ir, other.ir))

    def __add__(self, other: Value | Number) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Value | Number) -> Value:
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: Value | Number) -> Value:
        return self._binary(other, "udiv", None)

    def __mod__(self, other: Value | Number) -> Value:
        return self._binary(other, "urem", None)

    def __and__(self, other: Value | Number) -> Value:
        return self._binary(other, "and_", None)

    def __or__(self, other: Value | Number) -> Value:
        return self._binary(other, "or_", None)

    def __xor__(self, other: Value | Number) -> Value:
        return self._binary(other, "xor", None)

    def __lshift__(self, other: Value | Number) -> Value:
        return self._binary(other, "shl", None)

    def __rshift__(self, other: Value | Number) -> Value:
        return self._binary(other, "lshr", None)

    def compare(self, sign: str, other: Value | Number) -> Value:
        """`sign` is one of < <= > >= == !=; integers compare unsigned, a NaN compares false."""
        other = self.emitter.constant(self.type, other) if not isinstance(other, Value) else other
        builder = self.emitter.builder
        test = builder.fcmp_ordered if self.type.element == "f32" else builder.icmp_unsigned
        return Value(self.emitter, Type("i1", self.type.lanes), test(sign, self.ir, other.ir))


class Variable:
    """A value that changes inside loops."""

    def __init__(self, emitter: Emitter, value: Value) -> None:
        with emitter.builder.goto_entry_block():
            self._slot = emitter.builder.alloca(value.type.ir)
        self._emitter = emitter
        self._type = value.type
        self.set(value)

    def set(self, value: Value) -> None:
        """The new value."""
        assert value.type == self._type
        self._emitter.builder.store(value.ir, self._slot)

    def get(self) -> Value:
        """The value now."""
        return Value(self._emitter, self._type, self._emitter.builder.load(self._slot, typ=self._type.ir))


class Emitter:
    """Emits one kernel; its methods append instructions where the last one stopped."""

    def __init__(self, name: str, target: Target) -> None:
        ir, _ = _llvmlite()
        self._ir = ir
        self.target = target
        self.module = ir.Module(name=name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), name)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._arguments = Value(self, I64, function.args[0])

    def argument(self, slot: int) -> Value:
        """The int64 in a slot of the arguments."""
        return self.load(I64, self._arguments, 8 * slot)

    def constant(self, type: Type, value: Number | Sequence[Number]) -> Value:
        """A constant; one number is spread over the lanes."""
        lanes = [value] * type.lanes if isinstance(value, int | float) else list(value)
        convert: Callable[[Number], Number] = float if type.element == "f32" else int
        converted = [convert(lane) for lane in lanes]
        return Value(self, type, self._ir.Constant(type.ir, converted if type.lanes > 1 else converted[0]))

    def variable(self, value: Value) -> Variable:
        """A variable that starts as `value`."""
        return Variable(self, value)

    def load(self, type: Type, address: Value, offset: int = 0) -> Value:
        """What lies `offset` bytes behind an address, aligned to its elements."""
        instruction = self.builder.load(self._pointer(address, type, offset), typ=type.ir)
        instruction.align = max(type.bits // 8, 1)
        return Value(self, type, instruction)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        """Writes a value `offset` bytes behind an address."""
        instruction = self.builder.store(value.ir, self._pointer(address, value.type, offset))
        instruction.align = max(value.type.bits // 8, 1)

    def _pointer(self, address: Value, type: Type, offset: int) -> Any:
        return self.builder.inttoptr((address + offset).ir if offset else address.ir, type.ir.as_pointer())

    def bitcast(self, value: Value, type: Type) -> Value:
        """The same bits as another type."""
        return Value(self, type, self.builder.bitcast(value.ir, type.ir))

    def extend(self, value: Value, type: Type) -> Value:
        """An unsigned integer in a wider type."""
        return Value(self, type, self.builder.zext(value.ir, type.ir))

    def truncate(self, value: Value, type: Type) -> Value:
        """The low bits of an integer."""
        return Value(self, type, self.builder.trunc(value.ir, type.ir))

    def to_float(self, value: Value) -> Value:
        """A signed integer as a float, lane by lane."""
        type = F32.x(value.type.lanes)
        return Value(self, type, self.builder.sitofp(value.ir, type.ir))

    def to_int(self, value: Value) -> Value:
        """A float cut to a 32-bit integer, lane by lane."""
        type = I32.x(value.type.lanes)
        return Value(self, type, self.builder.fptosi(value.ir, type.ir))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """`yes` where the condition holds, else `no`, lane by lane."""
        return Value(self, yes.type, self.builder.select(condition.ir, yes.ir, no.ir))

    def minimum(self, a: Value, b: Value | Number) -> Value:
        """The smaller, lane by lane; `a` where it is NaN."""
        b = b if isinstance(b, Value) else self.constant(a.type, b)
        return self.select(b.compare("<", a), b, a)

    def maximum(self, a: Value, b: Value | Number) -> Value:
        """The larger, lane by lane; `a` where it is NaN."""
        b = b if isinstance(b, Value) else self.constant(a.type, b)
        return self.select(b.compare(">", a), b, a)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """`a * b + c`, rounded once where the processor can."""
        name = f"llvm.fmuladd.{_mangled(a.type)}"
        return self.intrinsic(name, a.type, a, b, c)

    def splat(self, value: Value, lanes: int) -> Value:
        """A scalar in every lane."""
        type = value.type.x(lanes)
        single = self.builder.insert_element(
            self._ir.Constant(type.ir, self._ir.Undefined), value.ir, self._ir.Constant(I32.ir, 0)
        )
        return self.shuffle(Value(self, type, single), [0] * lanes)

    def shuffle(self, a: Value, lanes: Sequence[int], b: Value | None = None) -> Value:
        """Lanes picked from `a`, then `b`, by number."""
        mask = self._ir.Constant(I32.x(len(lanes)).ir, list(lanes))
        type = a.type.x(len(lanes))
        return Value(self, type, self.builder.shuffle_vector(a.ir, (b or a).ir, mask))

    def lane(self, value: Value, number: int) -> Value:
        """One lane as a scalar."""
        return Value(self, value.type.x(1), self.builder.extract_element(value.ir, self._ir.Constant(I32.ir, number)))

    def gather(self, scalars: Sequence[Value]) -> Value:
        """Scalars as the lanes of one vector."""
        type = scalars[0].type.x(len(scalars))
        vector = self._ir.Constant(type.ir, self._ir.Undefined)
        for number, scalar in enumerate(scalars):
            vector = self.builder.insert_element(vector, scalar.ir, self._ir.Constant(I32.ir, number))
        return Value(self, type, vector)

    def sum_lanes(self, value: Value) -> Value:
        """All lanes added, halves first."""
        lanes = value.type.lanes
        while lanes > 2:
            lanes //= 2
            value = self.shuffle(value, range(lanes)) + self.shuffle(value, range(lanes, 2 * lanes))
        return self.lane(value, 0) + self.lane(value, 1)

    def intrinsic(self, name: str, type: Type, *arguments: Value) -> Value:
        """Calls an LLVM intrinsic by its full name."""
        function = self.module.globals.get(name)
        if function is None:
            signature = self._ir.FunctionType(type.ir, [argument.type.ir for argument in arguments])
            function = self._ir.Function(self.module, signature, name)
        return Value(self, type, self.builder.call(function, [argument.ir for argument in arguments]))

    def call(self, address: Value) -> Value:
        """Calls the C function `int32 f(void)` at an address; the result of one that returns nothing is garbage."""
        signature = self._ir.FunctionType(I32.ir, [])
        return Value(self, I32, self.builder.call(self.builder.inttoptr(address.ir, signature.as_pointer()), []))

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """A block that runs only where a scalar condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """A block that runs for each int64 from `start` below `stop`."""
        begin = start if isinstance(start, Value) else self.constant(I64, start)
        end = stop if isinstance(stop, Value) else self.constant(I64, stop)
        before = self.builder.block
        head = self.builder.append_basic_block("head")
        body = self.builder.append_basic_block("body")
        after = self.builder.append_basic_block("after")
        self.builder.branch(head)

        self.builder.position_at_end(head)
        index = self.builder.phi(I64.ir)
        index.add_incoming(begin.ir, before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, end.ir), body, after)

        self.builder.position_at_end(body)
        counter = Value(self, I64, index)
        yield counter
        index.add_incoming((counter + step).ir, self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def strips(self, start: Value, stop: Value, widths: Sequence[int], body: Callable[[Value, int], None]) -> None:
        """Covers `[start, stop)` by strips of the given widths, the widest first; the last width must be 1."""
        for width in widths:
            end = stop if width == 1 else start + (stop - start) // width * width
            with self.loop(start, end, width) as first:
                body(first, width)
            start = end

    def compile(self) -> Kernel:
        """Ends the kernel and makes machine code of it."""
        self.builder.ret_void()
        return Kernel(self.module, self.target)


class Kernel:
    """Machine code, alive as long as this object.

    Attributes:
        address: of the C function `void(int64 *)`.
    """

    def __init__(self, module: Any, target: Target) -> None:
        _, binding = _llvmlite()
        compiled = binding.parse_assembly(str(module))
        compiled.verify()
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=target.name, features=target.features, opt=3, jit=True
        )
        options = binding.create_pipeline_tuning_options(speed_level=3)
        # Kernels come vectorised and unrolled as far as it pays.
        options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(compiled, passes)
        self._engine = binding.create_mcjit_compiler(compiled, machine)
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(module.name)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, *arguments: int) -> None:
        """Runs it on this thread, its arguments in the slots."""
        self._function((ctypes.c_int64 * len(arguments))(*arguments))


def _mangled(type: Type) -> str:
    return f"v{type.lanes}{type.element}" if type.lanes > 1 else type.element


@cache
def _llvmlite() -> tuple[Any, Any]:
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return ir, binding
